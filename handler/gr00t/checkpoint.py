"""Reads a checkpoint folder's weights, strictly: every tensor of the model, under its published name and shape.

safetensors only; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from handler.gr00t.model import Gr00t, Gr00tConfig

# Saved by training, never used: the action head reads hidden states, not logits.
UNUSED = {"backbone.model.lm_head.weight"}
# A checkpoint saved by a training wrapper has a prefix before these.
TOP_LEVEL = re.compile(r"^(?:.*?\.)?(?=(?:backbone|action_head)\.)")


class CheckpointError(ValueError):
    """The folder is not a checkpoint that this model can serve; the text says which file and what is wrong."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Parses `folder/name`, a JSON mapping.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing from the checkpoint folder") from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} is not a JSON mapping")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: `model.safetensors`, or the shards that its index names.

    Raises:
        CheckpointError: there are none, or a shard is missing.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / "model.safetensors.index.json").is_file():
        raise CheckpointError("neither model.safetensors nor model.safetensors.index.json is in the checkpoint folder")
    index = read_json(folder, "model.safetensors.index.json").get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise CheckpointError("model.safetensors.index.json has no weight_map of tensors to files")
    shards = sorted(set(index.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CheckpointError(f"model.safetensors.index.json names {shard!r}, which is not in the folder")
    return [folder / shard for shard in shards]


def read_tensors(files: list[Path], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name without a training wrapper's prefix, tensor on `device`) for every tensor that the model uses.

    Raises:
        CheckpointError: a file is not whole.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                    name = TOP_LEVEL.sub("", key)
                    if name not in UNUSED:
                        yield name, tensors.get_tensor(key)
        except Exception as error:  # safetensors raises its own type, OSError or RuntimeError, by what is broken
            raise CheckpointError(f"{file.name} cannot be read: {error}") from error


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Gr00t:
    """Builds the model that `config.json` describes and fills it from the folder's safetensors.

    Tensors go straight to `device`, one at a time, and are cast to `dtype` there.

    Raises:
        CheckpointError: a tensor is unexpected, missing, misshapen or there twice (each is named), or a file is broken.
    """
    try:
        config = Gr00tConfig.from_json(read_json(folder, "config.json"))
        with torch.device("meta"):
            model = Gr00t(config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"config.json: {error}") from error
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    state: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, tensor in read_tensors(weight_files(folder), device):
        if name not in expected:
            problems.append(f"unexpected tensor {name}")
        elif name in state:
            problems.append(f"tensor {name} is there twice")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        elif not tensor.is_floating_point():
            problems.append(f"tensor {name} is {tensor.dtype}, expected floating point")
        else:
            state[name] = tensor.to(dtype)
    wrong = {p.split()[1] for p in problems}
    problems += [f"missing tensor {name}" for name in expected if name not in state and name not in wrong]
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError("the weights do not fit config.json: " + "; ".join(problems[:8]) + more)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def content_hash(files: list[Path], more: bytes = b"") -> str:
    """12 hex digits of a SHA-256 over names, sizes and contents, and over `more`: which weights moved the robot."""
    digest = hashlib.sha256(more)
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()[:12]
