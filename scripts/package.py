"""Builds the model archive: the handler, its modules, the merged model config and, by default, a tiny checkpoint.

The same inputs give the same bytes. A checkpoint of your own is named in the config by its path, never copied.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BASE_CONFIG = ROOT / "config" / "gr00t.yaml"
HANDLER_FILE = ROOT / "handler" / "gr00t_handler.py"
MODEL_NAME, MODEL_VERSION, CONFIG_NAME = "gr00t", "1.0", "gr00t.yaml"
EMBEDDED = "checkpoint"  # the folder inside the archive, and the value of handler.checkpoint that means it

# What TorchServe 0.12.0 reads from a model config (its ModelConfig.java). It ignores every other key, and a value of
# another type, with no more than a line in its log; here both are errors.
TORCHSERVE_KEYS: dict[str, type] = {
    **dict.fromkeys(["minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "jobQueueSize", "parallelLevel"], int),
    **dict.fromkeys(["responseTimeout", "startupTimeout", "maxRetryTimeoutInSec", "clientTimeoutInMills"], int),
    **dict.fromkeys(["sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize"], int),
    **dict.fromkeys(["useJobTicket", "useVenv", "continuousBatching", "sequenceBatching", "asyncCommunication"], bool),
    **{"deviceType": str, "parallelType": str, "deviceIds": list, "torchrun": dict},
}
TYPE_NAMES = {int: "a whole number", bool: "true or false", str: "a text", list: "a list", dict: "a mapping"}
MAY_BE_ZERO = {"maxBatchDelay", "parallelLevel", "sequenceMaxIdleMSec", "sequenceTimeoutMSec"}
MAY_BE_NULL = {"handler.tokenizer", "handler.embodiment_tag"}


class ConfigError(ValueError):
    """A model config or overlay that cannot be used. The text names the key, the file and what was expected."""


def merge_config(overlays: list[Path]) -> dict[str, Any]:
    """The base model config with `overlays` merged over it in order, key by key, `handler:` included.

    Raises ConfigError for a file that cannot be read, an unknown key or a value of the wrong type.
    """
    merged: dict[str, Any] = {"handler": {}}
    defaults = _read_yaml(BASE_CONFIG)["handler"]
    handler_types = {key: str if default is None else type(default) for key, default in defaults.items()}
    for file in [BASE_CONFIG, *overlays]:
        layer = _read_yaml(file)
        handler = layer.pop("handler", {})
        if not isinstance(handler, dict):
            raise ConfigError(f"{file}: `handler` must be a mapping of keys, not {handler!r}")
        for key, value in layer.items():
            _check(file, "", key, value, TORCHSERVE_KEYS)
        for key, value in handler.items():
            _check(file, "handler.", key, value, handler_types)
        merged["handler"].update(handler)
        merged.update(layer)
    _check_together(merged)
    return merged


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {error}") from None
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must be a mapping of keys, not a {type(content).__name__}")
    return content


def _check(file: Path, prefix: str, key: Any, value: Any, types: dict[str, type]) -> None:
    if key not in types:
        near = difflib.get_close_matches(str(key), [*types, *([] if prefix else ["handler"])], n=1, cutoff=0.0)[0]
        raise ConfigError(f"{file}: unknown key `{prefix}{key}`; the nearest known one is `{prefix}{near}`")
    if value is None and prefix + key in MAY_BE_NULL:
        return
    if type(value) is not types[key]:  # isinstance would take `true` for a whole number
        raise ConfigError(f"{file}: `{prefix}{key}` must be {TYPE_NAMES[types[key]]}, not {value!r}")
    least = 0 if key in MAY_BE_ZERO else 1
    if type(value) is int and value < least:
        raise ConfigError(f"{file}: `{prefix}{key}` must be {least} or more, not {value}")


def _check_together(config: dict[str, Any]) -> None:
    """What each key alone allows, but TorchServe then does not do as asked."""
    for most, least in (("maxWorkers", "minWorkers"), ("jobQueueSize", "batchSize")):
        if config[most] < config[least]:
            raise ConfigError(f"{least} is {config[least]} but {most} only {config[most]}: set both")
    if config.get("deviceType") not in (None, "cpu", "gpu"):
        raise ConfigError(f"deviceType must be cpu or gpu, not {config['deviceType']!r}")
    for key, allowed in (("dtype", ("auto", "float32", "bfloat16")), ("engine", ("auto", "fused", "plain"))):
        if config["handler"][key] not in allowed:
            raise ConfigError(
                f"handler.{key} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {config['handler'][key]!r}"
            )
    checkpoint = config["handler"]["checkpoint"]
    if checkpoint != EMBEDDED and not os.path.isabs(checkpoint):
        raise ConfigError(f"handler.checkpoint must be `{EMBEDDED}` or an absolute path, not {checkpoint!r}")


def build(
    checkpoint: Path | None, overlays: list[Path], out: Path, embodiment_tag: str | None = None,
    handler_file: Path = HANDLER_FILE, tokenizer: Path | None = None,
    name: str = MODEL_NAME, version: str = MODEL_VERSION,
) -> Path:  # fmt: skip
    """Builds the archive `out` (replaced if there) and returns its path.

    `checkpoint` and `tokenizer` are folders, referenced by absolute path; `checkpoint` None takes the one the overlays
    name or else embeds the tiny one. TorchServe serves it as /predictions/`name`/`version`. Raises ConfigError for an
    unusable config, name or version, or a folder that is not there.
    """
    for what, text in {"name": name, "version": version}.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}", text) or text == "all":
            raise ConfigError(f"the {what} must be letters, digits, `.` and `-`, and not `all`; it is {text!r}")
    config = merge_config(overlays)
    for key, value in {"checkpoint": checkpoint, "tokenizer": tokenizer}.items():
        if value is not None:
            config["handler"][key] = str(value.resolve())
        folder = config["handler"][key]
        if folder not in (None, EMBEDDED) and not os.path.isdir(folder):
            raise ConfigError(f"handler.{key}: there is no folder {folder}")
    if embodiment_tag is not None:
        config["handler"]["embodiment_tag"] = embodiment_tag

    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gr00t-package-") as temp:
        work = Path(temp)
        stage = work / "stage"
        for module in (ROOT / "handler").rglob("*.py"):
            copy = stage / module.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(module, copy)
        if config["handler"]["checkpoint"] == EMBEDDED:
            from scripts.make_checkpoint import write_checkpoint  # here, since it imports torch

            write_checkpoint(stage / EMBEDDED, size="tiny", seed=0)
        config_file = work / CONFIG_NAME
        config_file.write_text(yaml.safe_dump(config, sort_keys=True), encoding="utf-8")
        _run_archiver(work, stage, config_file, handler_file, name, version)
        repacked = out.with_name(f".{out.name}.{os.getpid()}")
        _repack(work / f"{name}.mar", repacked)
        repacked.replace(out)  # at once, so that a server starting now sees the old or the new one
    return out


def archive_name(name: str, version: str) -> str:
    """The archive's file name in a model store, one for each version (no name has a `_`)."""
    return f"{name}.mar" if version == MODEL_VERSION else f"{name}_{version}.mar"


def read_config(archive: Path) -> dict[str, Any]:
    """The merged model config inside an archive that `build` made."""
    with zipfile.ZipFile(archive) as mar:
        config: dict[str, Any] = yaml.safe_load(mar.read(CONFIG_NAME))
    return config


def _run_archiver(work: Path, stage: Path, config_file: Path, handler_file: Path, name: str, version: str) -> None:
    # --extra-files copies the CONTENTS of the folder to the archive's root. The archiver works in, and first deletes,
    # TMPDIR/NAME: it gets a TMPDIR of its own, so that two builds (or a folder of that name) do not meet.
    command = [sys.executable, "-m", "model_archiver.model_packaging"]
    command += ["--model-name", name, "--version", version, "--handler", str(handler_file.resolve())]
    command += ["--extra-files", str(stage), "--config-file", str(config_file)]
    command += ["--archive-format", "default", "--export-path", str(work)]
    (work / "tmp").mkdir()
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(work / "tmp")}, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"torch-model-archiver failed:\n{done.stderr}")


def _repack(source: Path, out: Path) -> None:
    """Writes the archive again with sorted names, fixed permissions, and one fixed time everywhere."""
    with zipfile.ZipFile(source) as mar, zipfile.ZipFile(out, "w") as fixed:
        for name in sorted(mar.namelist()):
            content = mar.read(name)
            if name == "MAR-INF/MANIFEST.json":
                manifest = json.loads(content)
                manifest["createdOn"] = "01/01/1980 00:00:00"  # TorchServe warns where there is none
                content = json.dumps(manifest, indent=2, sort_keys=True).encode()
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix: what the permissions below are for
            entry.external_attr = 0o100644 << 16
            fixed.writestr(entry, content)  # stored: weights do not shrink, and zlib versions differ in their output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what goes into the archive; `serve` has the same."""
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="a checkpoint folder (default: a tiny one with random weights)")
    add("--tokenizer", type=Path, metavar="DIR", help="the tokenizer's folder, where the checkpoint has none")
    add("--embodiment-tag", metavar="TAG", help="the embodiment of requests that name none")
    add("--overlay", type=Path, action="append", default=[], metavar="FILE", help="merged over config/gr00t.yaml")


def main() -> int:
    parser = argparse.ArgumentParser(prog="package", description="Build the model archive for TorchServe.")
    add_arguments(parser)
    add = parser.add_argument
    add("--name", default=MODEL_NAME, help="the model's, in /predictions/NAME (default: %(default)s)")
    add("--version", default=MODEL_VERSION, help="the model's, in /predictions/NAME/VERSION (default: %(default)s)")
    add("--out", type=Path, help="(default: model_store/NAME.mar, or NAME_VERSION.mar for a version of your own)")
    args = parser.parse_args()
    out = args.out or ROOT / "model_store" / archive_name(args.name, args.version)
    try:
        build(args.checkpoint, args.overlay, out, args.embodiment_tag, tokenizer=args.tokenizer, name=args.name,
              version=args.version)  # fmt: skip
    except ConfigError as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    print(f"{out.resolve()} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
