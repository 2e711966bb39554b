"""Writes a checkpoint folder in the published GR00T-N1.7 layout, with random weights from a seed.

`tiny` has every part of the architecture in about 5 MB; `full` has the published widths (3.1 B parameters) for speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from handler.gr00t.model import Gr00t, Gr00tConfig

# Qwen's added tokens, in the order of their ids (151643 onwards in the published tokenizer).
SPECIAL_TOKENS = [
    f"<|{name}|>"
    for name in (
        "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
        "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
    )
]  # fmt: skip

# Qwen's pre-tokenizer pattern (tokenizer.json of Qwen3-VL).
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SENTENCES = [
    f"{verb} the {colour} {thing} {where}"
    for verb in ("pick up", "put down", "push", "open", "close", "place", "stack", "move", "turn on")
    for colour in ("red", "green", "blue", "black", "white", "small", "large")
    for thing in ("object", "bowl", "cup", "drawer", "block", "plate", "stove", "microwave", "robot arm")
    for where in ("", "on the table", "in the drawer", "next to the plate", "from the left", "to the right")
]

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "dtype": torch.bfloat16,
        "words": 1000,
        "config": {
            "select_layer": 4,
            "backbone_embedding_dim": 128,
            "max_state_dim": 32,
            "max_action_dim": 32,
            "hidden_size": 64,
            "input_embedding_dim": 96,
            "max_num_embodiments": 8,
            "max_seq_len": 64,
            "diffusion_model_cfg": {
                "num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 24, "output_dim": 64,
            },
            "vl_self_attention_cfg": {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 32},
        },
        "text_config": {
            "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "vocab_size": 1024, "mrope_section": [6, 5, 5],
        },
        "vision_config": {
            "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 128,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2],
        },
    },
    "full": {"dtype": torch.bfloat16, "words": 151643, "config": {}, "text_config": {}, "vision_config": {}},
}  # fmt: skip


def write_checkpoint(
    out: Path, size: str = "tiny", seed: int = 0, device: str = "cpu", max_shard_bytes: int = 5_000_000_000
) -> Path:
    """Writes the folder `out`, the same bytes for the same arguments on one kind of device.

    Args:
        size: a key of SIZES.
        device: where the weights are drawn; a GPU makes `full` in seconds.
        max_shard_bytes: above it the weights are split, with `model.safetensors.index.json`.
    """
    out.mkdir(parents=True, exist_ok=True)
    spec = SIZES[size]
    tokenizer = make_tokenizer(spec["words"])
    tokenizer.save(str(out / "tokenizer.json"))
    config = model_config(spec, tokenizer)
    write_json(out / "config.json", config)
    limits = Gr00tConfig.from_json(config)
    processor, statistics, ids = processor_files(limits, seed)
    write_json(out / "processor_config.json", processor)
    write_json(out / "statistics.json", statistics)
    write_json(out / "embodiment_id.json", ids)
    write_weights(out, make_weights(limits, seed, device, spec["dtype"]), max_shard_bytes)
    return out


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_tokenizer(words: int) -> Tokenizer:
    """A byte-level BPE in Qwen's form, trained on a few robot instructions, with Qwen's special tokens at `words`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(words, 1000), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    # Fill up, so that the special tokens get the ids that the model was (or would have been) trained with.
    bpe = json.loads(tokenizer.to_str())
    vocab = bpe["model"]["vocab"]
    for index in range(len(vocab), words):
        vocab[f"<|unused_{index}|>"] = index
    tokenizer = Tokenizer.from_str(json.dumps(bpe))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def model_config(spec: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json`: the published keys, and the backbone described, since it is not the published one for `tiny`."""
    head = {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024}
    self_attention = {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64}
    config = {
        "model_type": "Gr00tN1d7",
        "architectures": ["Gr00tN1d7"],
        "model_name": "nvidia/Cosmos-Reason2-2B",
        "select_layer": 16,
        "backbone_embedding_dim": 2048,
        "max_state_dim": 132,
        "max_action_dim": 132,
        "action_horizon": 40,
        "hidden_size": 1024,
        "input_embedding_dim": 1536,
        "max_num_embodiments": 32,
        "max_seq_len": 1024,
        "num_inference_timesteps": 4,
        "num_timestep_buckets": 1000,
        "add_pos_embed": True,
        "use_vlln": True,
        "use_alternate_vl_dit": True,
        "attend_text_every_n_blocks": 2,
        "state_history_length": 1,
        **spec["config"],
    }
    config["diffusion_model_cfg"] = {
        **head, **config.get("diffusion_model_cfg", {}), "positional_embeddings": None, "norm_type": "ada_norm",
        "interleave_self_attention": True,
    }  # fmt: skip
    config["vl_self_attention_cfg"] = {
        **self_attention, **config.get("vl_self_attention_cfg", {}), "positional_embeddings": None,
    }  # fmt: skip
    text = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "mrope_section": [24, 20, 20], **spec["text_config"],
    }  # fmt: skip
    text["rope_scaling"] = {
        "mrope_interleaved": True, "mrope_section": text.pop("mrope_section"), "rope_type": "default",
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 2048,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17], "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, **spec["vision_config"],
    }  # fmt: skip
    config["backbone_config"] = {
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "text_config": text,
        "vision_config": vision,
    }
    return config


def processor_files(c: Gr00tConfig, seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two embodiments that differ in everything: cameras, frames, keys, horizons, absolute and relative actions."""
    generator = torch.Generator().manual_seed(seed + 1)

    def spread(*shape: int) -> dict[str, Any]:
        """Statistics of a made-up feature, (width,) or (steps, width)."""
        low = -0.5 - torch.rand(*shape, generator=generator, dtype=torch.float64)
        high = 0.5 + torch.rand(*shape, generator=generator, dtype=torch.float64)
        mean, std = (low + high) / 2, (high - low) / 4
        values = {"min": low, "max": high, "mean": mean, "std": std, "q01": 0.9 * low, "q99": 0.9 * high}
        return {name: [round_list(v) for v in t] if t.ndim == 2 else round_list(t) for name, t in values.items()}

    def round_list(values: torch.Tensor) -> list[float]:
        return [round(float(v), 6) for v in values]

    def modality(keys: list[str], steps: list[int], **more: Any) -> dict[str, Any]:
        empty = {"sin_cos_embedding_keys": None, "mean_std_embedding_keys": None, "action_configs": None}
        return {"delta_indices": steps, "modality_keys": keys, **empty, **more}

    def action(rep: str, kind: str = "NON_EEF", form: str = "DEFAULT") -> dict[str, Any]:
        return {"rep": rep, "type": kind, "format": form, "state_key": None}

    axes = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
    droid = {"eef_9d": 9, "gripper_position": 1, "joint_position": 7}
    droid_horizon = c.action_horizon
    configs = {
        "libero_sim": {
            "video": modality(["image", "wrist_image"], [0]),
            "state": modality(axes, [0], mean_std_embedding_keys=["gripper"]),
            "action": modality(axes, list(range(16)), action_configs=[action("ABSOLUTE")] * len(axes)),
            "language": modality(["annotation.human.action.task_description"], [0]),
        },
        "oxe_droid_relative_eef_relative_joint": {
            "video": modality(["exterior_image_1_left", "wrist_image_left"], [-15, 0]),
            "state": modality(list(droid), [0], sin_cos_embedding_keys=["joint_position"]),
            "action": modality(
                list(droid),
                list(range(droid_horizon)),
                action_configs=[
                    action("RELATIVE", "EEF", "XYZ_ROT6D"), action("ABSOLUTE"), action("RELATIVE"),
                ],
            ),
            "language": modality(
                ["annotation.language.language_instruction", "annotation.language.language_instruction_2"], [0]
            ),
        },
    }  # fmt: skip
    statistics: dict[str, Any] = {
        "libero_sim": {
            "state": {key: spread(2 if key == "gripper" else 1) for key in axes},
            "action": {key: spread(1) for key in axes},
            "relative_action": {},
        },
        "oxe_droid_relative_eef_relative_joint": {
            "state": {key: spread(width) for key, width in droid.items()},
            "action": {key: spread(width) for key, width in droid.items()},
            "relative_action": {key: spread(droid_horizon, droid[key]) for key in ("eef_9d", "joint_position")},
        },
    }
    pose = statistics["oxe_droid_relative_eef_relative_joint"]["relative_action"]["eef_9d"]
    for name, bound in {"min": -1.1, "max": 1.1, "mean": 0.0, "std": 0.5, "q01": -1.0, "q99": 1.0}.items():
        for step in pose[name]:
            step[3:] = [bound] * 6  # rotations reach 1, whatever the robot does
    kwargs = {
        "modality_configs": configs,
        "image_crop_size": None,
        "image_target_size": None,
        "use_albumentations": True,
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "letter_box_transform": False,
        "formalize_language": True,
        "model_name": "nvidia/Cosmos-Reason2-2B",
        "model_type": "qwen",
        "max_state_dim": c.max_state_dim,
        "max_action_dim": c.max_action_dim,
        "max_action_horizon": c.action_horizon,
        "use_percentiles": True,
        "clip_outliers": True,
        "apply_sincos_state_encoding": True,
        "use_relative_action": True,
    }
    ids = {"libero_sim": 2, "oxe_droid_relative_eef_relative_joint": min(24, c.max_num_embodiments - 1)}
    return {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": kwargs}, statistics, ids


def make_weights(
    c: Gr00tConfig, seed: int, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every published tensor, the unused LM head too, drawn so that signals neither fade nor grow."""
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Gr00t(c).state_dict().items()}
    shapes["backbone.model.lm_head.weight"] = (c.text.vocab_size, c.text.hidden_size)
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        leaf = name.rsplit(".", 1)[1]
        if leaf in ("bias", "b"):
            values *= 0.02
        elif len(shape) == 1:
            values = 1 + 0.1 * values  # norms
        elif "embed_tokens" in name or "pos_embed" in name or "position_embedding" in name:
            values *= 0.5
        else:
            fan_in = shape[1] if leaf == "W" else math.prod(shape[1:])
            values /= math.sqrt(fan_in)
            if "action_decoder.layer2" in name:
                values *= 0.5  # keeps most actions inside the range that decoding clips to
        yield name, values.to(dtype).cpu()


def write_weights(out: Path, weights: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    """`model.safetensors`, or shards and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = total = 0
    for name, tensor in weights:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where weights are drawn, such as cuda (for --size full)")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        print(f"{args.out} is not empty; name a new folder", file=sys.stderr)
        return 1
    start = time.perf_counter()
    write_checkpoint(args.out, args.size, args.seed, args.device)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    seconds = time.perf_counter() - start
    print(f"wrote {args.out}: {args.size}, seed {args.seed}, {size / 1e6:.1f} MB in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
