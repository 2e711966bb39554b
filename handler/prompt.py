"""An instruction and a number of images -> the token ids of Qwen3-VL's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from handler.gr00t.checkpoint import CheckpointError

# The backbone's own repository ships no tokenizer that suits; this one stands in (Isaac-GR00T and its ports agree).
TOKENIZER_REPOSITORY = "Qwen/Qwen3-VL-2B-Instruct"


def load_tokenizer(folders: Sequence[Path]) -> Tokenizer:
    """The first `tokenizer.json` in `folders`, else the one of Qwen3-VL from the Hugging Face cache or hub.

    Raises:
        CheckpointError: none of them can be had.
    """
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            try:
                return Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as error:  # the library raises plain Exception
                raise CheckpointError(f"tokenizer.json cannot be read: {error}") from None
    try:
        return Tokenizer.from_pretrained(TOKENIZER_REPOSITORY)
    except Exception as error:  # the hub client raises many kinds; all mean the same to the operator
        raise CheckpointError(
            f"no tokenizer.json in the checkpoint folder, and {TOKENIZER_REPOSITORY} cannot be fetched "
            f"({type(error).__name__}); put that repository's tokenizer.json into the checkpoint folder"
        ) from None


class PromptEncoder:
    """One user turn: every image before the text, no system turn, no generation prompt.

    `<|im_start|>user\\n`, per image `<|vision_start|>` image tokens `<|vision_end|>`, the text, `<|im_end|>\\n`.

    Args:
        formalize: lower-case the instruction and keep only word characters and white space, as in training.
    """

    def __init__(self, tokenizer: Tokenizer, image_token_id: int, formalize: bool) -> None:
        # Words of an instruction stay words: without this, "<|image_pad|>" in a prompt would become an image token.
        tokenizer.encode_special_tokens = True
        special = {}
        for name in ("im_start", "im_end", "vision_start", "vision_end", "image_pad"):
            token = tokenizer.token_to_id(f"<|{name}|>")
            if token is None:
                raise CheckpointError(f"tokenizer.json has no token <|{name}|>")
            special[name] = token
        if special["image_pad"] != image_token_id:
            raise CheckpointError(
                f"tokenizer.json gives <|image_pad|> the id {special['image_pad']}, the model expects {image_token_id}"
            )
        self.formalize = formalize
        self.image = special["image_pad"]
        self._before_image, self._after_image = special["vision_start"], special["vision_end"]

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        self._encode = encode
        self._start = (special["im_start"], *encode("user\n"))
        self.lead = len(self._start) + 1  # tokens before the first image's, with its <|vision_start|>
        self._end = (special["im_end"], *encode("\n"))

    def __call__(self, instruction: str, image_tokens: Sequence[int]) -> list[int]:
        """Token ids for an instruction and images of so many tokens each."""
        if self.formalize:
            instruction = re.sub(r"[^\w\s]", "", instruction.lower())
        ids = list(self._start)
        for count in image_tokens:
            ids += [self._before_image, *[self.image] * count, self._after_image]
        return [*ids, *self._encode(instruction), *self._end]
