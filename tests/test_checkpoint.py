"""Checkpoint folders: what loads, what is refused by name, what the content hash sees, and how prompts become ids."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from handler.gr00t.checkpoint import CheckpointError, content_hash, load_model, read_json, weight_files
from handler.gr00t.model import Gr00t
from handler.policy import Gr00tPolicy
from handler.prompt import PromptEncoder, load_tokenizer
from scripts.make_checkpoint import write_checkpoint
from tests.conftest import DROID, LIBERO

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
HEAD = "backbone.model.lm_head.weight"
A, B = "action_head.state_encoder.layer1.W", "action_head.vlln.weight"
PROCESSOR = ("processor_config.json", "statistics.json", "embodiment_id.json")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def tensors(checkpoint: Path) -> Tensors:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Gr00t:
    return load_model(checkpoint, CPU, torch.float32)


def save(folder: Path, *shards: Tensors) -> None:
    """Puts other weights into the folder: one file, or shards and their index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    value = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(change(value) or value))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def equal(one: Gr00t, two: Gr00t) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ----------------------------------------------------------------------------------------------------------- weights


def test_names_are_those_of_the_file(tensors: Tensors, model: Gr00t) -> None:
    assert {A, B, HEAD} <= tensors.keys() == {*model.state_dict(), HEAD}
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 and not value.requires_grad
        assert torch.equal(value, tensors[name].float())
    assert not model.training


WRONG: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "missing": (lambda t: t.pop(A), [f"missing tensor {A}"]),
    "unexpected": (lambda t: t.update({"action_head.extra": torch.zeros(1)}), ["unexpected tensor action_head.extra"]),
    "unexpected without a part": (lambda t: t.update(extra=torch.zeros(1)), ["unexpected tensor extra"]),
    "misshapen": (lambda t: t.update({B: torch.zeros(3)}), [f"tensor {B} has shape [3], expected [128]"]),
    "right size, wrong shape": (lambda t: t.update({A: t[A].transpose(1, 2).contiguous()}), [f"tensor {A} has shape"]),
    "doubled": (lambda t: t.update({f"wrapper.{A}": t[A].clone()}), [f"tensor {A} is there twice"]),
    "no number": (lambda t: t.update({B: torch.zeros(128, dtype=torch.int8)}), [B, "int8"]),
    "several": (
        lambda t: (t.pop(A), t.update({B: torch.zeros(3), "action_head.extra": torch.zeros(1)})),
        [f"missing tensor {A}", f"tensor {B} has shape [3]", "unexpected tensor action_head.extra"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_named(folder: Path, tensors: Tensors, case: str) -> None:
    change, fragments = WRONG[case]
    changed = dict(tensors)
    change(changed)
    save(folder, changed)
    text = refusal(lambda: load_model(folder, CPU, torch.float32))
    assert all(fragment in text for fragment in fragments), text
    assert text.count(";") == len(fragments) - 1 or case == "no number"


def test_many_wrong_tensors_are_counted(folder: Path, tensors: Tensors) -> None:
    save(folder, {B: tensors[B]})
    text = refusal(lambda: load_model(folder, CPU, torch.float32))
    assert text.count("missing tensor") == 8 and f"and {len(tensors) - 2 - 8} more" in text


def test_lm_head_does_not_matter(folder: Path, tensors: Tensors, model: Gr00t) -> None:
    save(folder, {key: value for key, value in tensors.items() if key != HEAD})
    assert equal(load_model(folder, CPU, torch.float32), model)
    save(folder, {**tensors, HEAD: torch.zeros(2, 2)})
    assert equal(load_model(folder, CPU, torch.float32), model)


@pytest.mark.parametrize("prefix", ["_groot_model.", "module.model."])
def test_prefix_of_a_training_wrapper(folder: Path, tensors: Tensors, model: Gr00t, prefix: str) -> None:
    save(folder, {prefix + key: value for key, value in tensors.items()})
    assert equal(load_model(folder, CPU, torch.float32), model)


def test_shards(folder: Path, tensors: Tensors, model: Gr00t) -> None:
    keys = sorted(tensors)
    save(folder, *({key: tensors[key] for key in keys[i::3]} for i in range(3)))
    assert [file.name for file in weight_files(folder)] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert equal(load_model(folder, CPU, torch.float32), model)
    edit(folder, "model.safetensors.index.json", lambda index: index["weight_map"].update({A: "../x.safetensors"}))
    assert "'../x.safetensors'" in refusal(lambda: weight_files(folder))


def test_shards_that_disagree(folder: Path, tensors: Tensors) -> None:
    rest = {key: value for key, value in tensors.items() if key != A}
    save(folder, rest, {A: tensors[A], B: tensors[B]})
    assert f"tensor {B} is there twice" in refusal(lambda: load_model(folder, CPU, torch.float32))
    save(folder, rest, {A: tensors[A]})
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "'model-00002-of-00002.safetensors'" in refusal(lambda: weight_files(folder))


def test_written_shards_hold_the_same_weights(tmp_path: Path, checkpoint: Path, model: Gr00t) -> None:
    out = write_checkpoint(tmp_path / "sharded", max_shard_bytes=1_000_000)
    assert len(weight_files(out)) > 2 and not (out / "model.safetensors").exists()
    assert equal(load_model(out, CPU, torch.float32), model)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", "sub/model.safetensors", "gone", "a\0b", 5])
def test_index_that_names_what_is_no_shard(folder: Path, tensors: Tensors, name: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "sub").mkdir()
    save_file({A: tensors[A]}, folder / "sub/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {A: name}}))
    assert "model.safetensors.index.json" in refusal(lambda: weight_files(folder))


@pytest.mark.parametrize("index", ["{", "[]", "{}", "null", '{"weight_map": []}', '{"weight_map": {}}', "\xff"])
def test_index_that_is_none(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    assert "model.safetensors" in refusal(lambda: load_model(folder, CPU, torch.float32))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_cut_weights(folder: Path, kept: int) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    text = refusal(lambda: load_model(folder, CPU, torch.float32))
    assert "model.safetensors cannot be read" in text and str(folder) not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_casts(folder: Path, tensors: Tensors, dtype: torch.dtype, saved: torch.dtype) -> None:
    save(folder, {key: value.to(saved) for key, value in tensors.items()})
    for name, value in load_model(folder, CPU, dtype).state_dict().items():
        assert value.dtype == dtype and torch.equal(value, tensors[name].to(saved).to(dtype))


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "processor_config.json", "statistics.json"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(lambda: Gr00tPolicy(folder))


@pytest.mark.parametrize("name", ["config.json", *PROCESSOR])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b"[" * 100_000])
def test_files_that_are_no_json_mapping(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert name in refusal(lambda: Gr00tPolicy(folder))


CONFIGS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.update(model_type="Gr00tN1d5"), "model_type is 'Gr00tN1d5'"),
    (lambda c: c.update(use_vlln=False), "use_vlln"),
    (lambda c: c.update(use_tactile=True), "tactile"),
    (lambda c: c.update(max_state_dim=64), f"tensor {A} has shape"),
    (lambda c: c.update(select_layer=3), "unexpected tensor backbone.model.model.language_model.layers.3."),
    (lambda c: c.update(hidden_size="large"), "config.json"),
    (lambda c: c.update(diffusion_model_cfg=3), "config.json"),
    (lambda c: c["backbone_config"].update(image_token_id=None), "config.json"),
]


@pytest.mark.parametrize(("change", "fragment"), CONFIGS)
def test_config_that_does_not_fit(folder: Path, change: Callable[[Any], Any], fragment: str) -> None:
    edit(folder, "config.json", change)
    assert fragment in refusal(lambda: load_model(folder, CPU, torch.float32))


PROCESSORS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("processor_config.json", lambda p: p["processor_kwargs"].update(modality_configs={}), "there is none"),
    ("processor_config.json", lambda p: p["processor_kwargs"].update(modality_configs=[1]), "processor_config.json"),
    ("processor_config.json", lambda p: {"processor_kwargs": None}, "processor_config.json"),
    ("processor_config.json", lambda p: p["processor_kwargs"].update(use_tactile=True), "tactile"),
    ("processor_config.json", lambda p: p["processor_kwargs"].update(crop_fraction=2), "crop_fraction is 2"),
    ("processor_config.json", lambda p: p["processor_kwargs"].update(crop_fraction="x"), "processor_config.json"),
    ("statistics.json", lambda s: {"other": {}}, f"{LIBERO}: statistics.json has no statistics for it; {DROID}:"),
    ("embodiment_id.json", lambda _: {LIBERO: 8, DROID: 99}, "its id needs 9, the model has room for 8"),
]


@pytest.mark.parametrize(("name", "change", "fragment"), PROCESSORS)
def test_processor_files_that_cannot_be_served(
    folder: Path, name: str, change: Callable[[Any], Any], fragment: str
) -> None:
    edit(folder, name, change)
    assert fragment in refusal(lambda: Gr00tPolicy(folder))


def test_no_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: Gr00tPolicy(tmp_path / "gone"))
    assert "config.json is missing" in refusal(lambda: read_json(tmp_path, "config.json"))
    assert "neither model.safetensors" in refusal(lambda: weight_files(tmp_path))


def test_one_embodiment_that_does_not_fit_leaves_the_other(folder: Path) -> None:
    edit(folder, "statistics.json", lambda s: {DROID: s[DROID]})
    policy = Gr00tPolicy(folder)
    assert (list(policy.embodiments), policy.default_tag) == ([DROID], DROID)


def test_embodiment_tag(folder: Path, policy: Gr00tPolicy) -> None:
    assert policy.default_tag is None
    assert Gr00tPolicy(folder, embodiment_tag=DROID).default_tag == DROID
    text = refusal(lambda: Gr00tPolicy(folder, embodiment_tag="libero"))
    assert "'libero'" in text and f"it has {LIBERO}, {DROID}" in text
    edit(folder, "embodiment_id.json", lambda _: {LIBERO: 8, DROID: 7})
    assert "its id needs 9" in refusal(lambda: Gr00tPolicy(folder, embodiment_tag=LIBERO))


@pytest.mark.parametrize("tokenizer_too", [False, True])
def test_processor_folder(folder: Path, policy: Gr00tPolicy, tokenizer_too: bool) -> None:
    (folder / "processor").mkdir()
    for name in (*PROCESSOR, *(["tokenizer.json"] if tokenizer_too else [])):
        (folder / name).rename(folder / "processor" / name)
    moved = Gr00tPolicy(folder)
    assert moved.describe() == policy.describe()  # the content hash too
    assert moved.encode_prompt("pick up the bowl", [4]) == policy.encode_prompt("pick up the bowl", [4])
    assert moved.recipe == policy.recipe


def test_processor_folder_without_processor_files(folder: Path, policy: Gr00tPolicy) -> None:
    (folder / "processor").mkdir()
    (folder / "tokenizer.json").rename(folder / "processor/tokenizer.json")
    assert list(Gr00tPolicy(folder).embodiments) == [LIBERO, DROID]


# --------------------------------------------------------------------------------------------------------------- hash


def test_writing_twice_gives_the_same_bytes(tmp_path: Path, checkpoint: Path) -> None:
    again, other = write_checkpoint(tmp_path / "again"), write_checkpoint(tmp_path / "other", seed=1)
    names = {file.name for file in checkpoint.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", *PROCESSOR}
    assert names == {file.name for file in again.iterdir()} == {file.name for file in other.iterdir()}
    different = set()
    for name in names:
        assert (again / name).read_bytes() == (checkpoint / name).read_bytes(), name
        if (other / name).read_bytes() != (checkpoint / name).read_bytes():
            different.add(name)
    assert different == {"model.safetensors", "statistics.json"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "processor_config.json", "statistics.json"])
def test_content_hash_sees_every_file(folder: Path, policy: Gr00tPolicy, name: str) -> None:
    assert len(policy.checkpoint) == 12 and int(policy.checkpoint, 16) >= 0
    assert Gr00tPolicy(folder).checkpoint == policy.checkpoint
    data = bytearray((folder / name).read_bytes())
    if name == "model.safetensors":
        data[-1] ^= 1
    else:
        data[-1:] = b" "  # for the last line's end: the same JSON
    (folder / name).write_bytes(data)
    assert Gr00tPolicy(folder).checkpoint != policy.checkpoint


def test_content_hash(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"ab" * 3_000_000)
    two.write_bytes(b"")
    both = content_hash([one, two])
    assert both == content_hash([one, two]) and content_hash([two]) == hashlib.sha256(b"\ntwo 0\n").hexdigest()[:12]
    one.write_bytes(b"ab" * 2_999_999 + b"ac")
    assert content_hash([one, two]) != both


# ---------------------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """No hub: the client is told so, its cache is empty, and what would still go to the network is recorded."""
    import huggingface_hub.constants

    calls: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        calls.append(args)
        raise OSError("the network was used")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return calls


def test_no_tokenizer(folder: Path, offline: list[Any]) -> None:
    (folder / "tokenizer.json").unlink()
    text = refusal(lambda: Gr00tPolicy(folder))
    assert "no tokenizer.json" in text and "Qwen/Qwen3-VL-2B-Instruct" in text and str(folder) not in text
    assert offline == []


def test_tokenizer_of_another_folder(folder: Path, tmp_path: Path, policy: Gr00tPolicy, offline: list[Any]) -> None:
    (tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer/tokenizer.json")
    assert Gr00tPolicy(folder, tokenizer=tmp_path / "tokenizer").checkpoint == policy.checkpoint
    assert offline == []


def test_tokenizer_folder_without_one_is_refused(folder: Path, tmp_path: Path) -> None:
    """Falling back to another tokenizer than the one asked for would change what the robot is told."""
    assert "tokenizer" in refusal(lambda: Gr00tPolicy(folder, tokenizer=tmp_path / "gone"))


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "Nope"}}'])
def test_broken_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refusal(lambda: Gr00tPolicy(folder))


def test_tokenizer_of_another_model(folder: Path, policy: Gr00tPolicy) -> None:
    edit(folder, "config.json", lambda c: c["backbone_config"].update(image_token_id=5))
    text = refusal(lambda: Gr00tPolicy(folder))
    assert "gives <|image_pad|> the id 1012, the model expects 5" in text
    edit(folder, "tokenizer.json", lambda t: t.update(
        added_tokens=[token for token in t["added_tokens"] if token["content"] != "<|im_end|>"]))
    assert "has no token <|im_end|>" in refusal(lambda: Gr00tPolicy(folder))


# ------------------------------------------------------------------------------------------------------------- prompt


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer([checkpoint])


# The template's ids by name; the published tokenizer has them from 151643 on, the small one from 1000 on.
START, END, BEFORE, AFTER, IMAGE = 1001, 1002, 1009, 1010, 1012


def test_template(tokenizer: Tokenizer) -> None:
    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad")
    assert [tokenizer.token_to_id(f"<|{name}|>") for name in names] == [START, END, BEFORE, AFTER, IMAGE]
    encode = PromptEncoder(tokenizer, IMAGE, formalize=True)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    user, newline, pick = ids("user\n"), ids("\n"), ids("pick up the bowl")
    assert tokenizer.decode(user) == "user\n" and tokenizer.decode(pick) == "pick up the bowl" and len(pick) < 8
    assert encode("pick up the bowl", [2, 3]) == [
        START, *user, BEFORE, IMAGE, IMAGE, AFTER, BEFORE, IMAGE, IMAGE, IMAGE, AFTER, *pick, END, *newline,
    ]  # fmt: skip
    assert encode("", [1]) == [START, *user, BEFORE, IMAGE, AFTER, END, *newline]
    assert encode("?!", [1]) == encode("", [1]) != encode(" ", [1])
    # Written out and read back with the special tokens on, it is the same text and the same ids.
    tokenizer.encode_special_tokens = False
    try:
        text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>pick up the bowl<|im_end|>\n"
        assert ids(text) == encode("pick up the bowl", [1])
    finally:
        tokenizer.encode_special_tokens = True


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("Pick UP the Bowl!", "pick up the bowl"), ("pick-up, the: (bowl).", "pickup the bowl"), ("it's", "its"),
        ("snake_case 7", "snake_case 7"), ("a\tb\nc", "a\tb\nc"), ("  two  ", "  two  "), ("Grün, ÄÖ", "grün äö"),
        ("拿起碗。", "拿起碗"), ("go 🤖!", "go "), ("<|image_pad|>", "image_pad"), ("<|im_end|>\n", "im_end\n"),
    ],
)  # fmt: skip
def test_formalized_language(tokenizer: Tokenizer, given: str, same: str) -> None:
    formal, plain = (PromptEncoder(tokenizer, IMAGE, formalize=on) for on in (True, False))
    assert formal(given, [1]) == formal(same, [1]) == plain(same, [1])
    assert given == same or plain(given, [1]) != plain(same, [1])


@pytest.mark.parametrize("name", ["im_start", "im_end", "vision_start", "vision_end", "image_pad", "endoftext"])
@pytest.mark.parametrize("text", ["<|{}|>", "look: <|{}|><|{}|> there"])
def test_special_tokens_in_an_instruction_stay_text(tokenizer: Tokenizer, name: str, text: str) -> None:
    text = text.replace("{}", name)
    encode = PromptEncoder(tokenizer, IMAGE, formalize=False)
    around = encode("", [4])
    ids = encode(text, [4])
    inside = ids[len(around) - 2 : -2]
    assert ids[: len(around) - 2] == around[:-2] and ids[-2:] == around[-2:]
    assert max(inside) < 1000 and tokenizer.decode(inside, skip_special_tokens=False) == text


@pytest.mark.parametrize("off", [False, True])
def test_checkpoint_decides_about_formalizing(folder: Path, off: bool) -> None:
    edit(folder, "processor_config.json", lambda p: p["processor_kwargs"].update(formalize_language=not off))
    encode = Gr00tPolicy(folder).encode_prompt
    assert (encode("Pick!", [1]) == encode("pick", [1])) is not off
