"""./scripts/doctor: a sound setup passes, and each planted fault is found by name."""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from scripts import doctor
from scripts.doctor import ERROR, OK, WARNING, Finding, examine
from scripts.make_checkpoint import write_checkpoint
from scripts.package import ROOT, build
from scripts.serve import pick_ports


@pytest.fixture
def sound(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What ./scripts/serve would get, with nothing wrong, and a tree of its own for files at the root."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("config.properties", "requirements.txt"):
        shutil.copy(ROOT / name, tree)
    monkeypatch.setattr(doctor, "ROOT", tree)
    for variable in [v for v in os.environ if v.startswith("TS_") or v.endswith("_LOCATION")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr("scripts.gateway.read_settings", lambda overlays: dict.fromkeys(
        ("port", "zmq_port", "admin_port"), pick_ports(0)[0]))  # fmt: skip
    copy = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, copy)
    return argparse.Namespace(
        checkpoint=copy, tokenizer=None, embodiment_tag="libero_sim", overlay=[ROOT / "config" / "batched.yaml"],
        port=pick_ports(0)[0], ready_port=None, run_dir=tmp_path / "run",
    )  # fmt: skip


def wrong(args: argparse.Namespace) -> list[Finding]:
    return [finding for finding in examine(args) if finding.level != OK]


def test_nothing_is_wrong(sound: argparse.Namespace) -> None:
    findings = examine(sound)
    assert [finding for finding in findings if finding.level != OK] == []
    names = {"python", "package", "java", "gpu", "port", "run dir", "disk", "memory", "config", "config.properties",
             "checkpoint"}  # fmt: skip
    assert {finding.name for finding in findings} == names
    assert not sound.run_dir.exists()


Plant = Callable[[argparse.Namespace, pytest.MonkeyPatch], Any]


def overlay(text: str) -> Plant:
    def plant(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        file = args.run_dir.parent / "own.yaml"
        file.write_text(text)
        args.overlay.append(file)

    return plant


def in_checkpoint(name: str, change: Callable[[str], str] | None) -> Plant:
    """Rewrites a file of the checkpoint, or takes it away."""

    def plant(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        (file,) = args.checkpoint.rglob(name)
        if change is None:
            file.unlink()
        else:
            file.write_text(change(file.read_text()))

    return plant


def truncated(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sorted(args.checkpoint.glob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size - 1)


def other_weights(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((args.checkpoint / "config.json").read_text())
    config["diffusion_model_cfg"]["num_layers"] += 2
    (args.checkpoint / "config.json").write_text(json.dumps(config))


def missing_shard(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"weight_map": {"action_head.x": "model-00001-of-00002.safetensors"}}
    for file in args.checkpoint.glob("model*.safetensors*"):
        file.unlink()
    (args.checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def old_java(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = args.run_dir.parent / "java" / "bin"
    folder.mkdir(parents=True)
    (folder / "java").write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    (folder / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(folder.parent))


def bad_java_home(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")


def missing_packages(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torchserve", "pytest"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.0.0" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def file_for_run_dir(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.run_dir.parent.joinpath("file").touch()
    args.run_dir = args.run_dir.parent / "file"


def left_key_file(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.run_dir.mkdir()
    (args.run_dir / "key_file.json").touch()


def other_archive(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    build(args.checkpoint, [], doctor.ROOT / "model_store" / "gr00t.mar")


def properties(line: str) -> Plant:
    def plant(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        with (doctor.ROOT / "config.properties").open("a") as file:
            file.write(f"{line}\n")

    return plant


def gpu(capability: tuple[int, int], free: int) -> Plant:
    def plant(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "is_available": True, "device_count": 1, "get_arch_list": ["sm_80", "sm_90", "compute_90"],
            "get_device_name": "H", "get_device_capability": capability, "mem_get_info": (free, 10**11),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return plant


def driver_only(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: "/x/nvidia-smi" if name == "nvidia-smi" else real(name))


def little_memory(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))


def little_disk(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1, 1, 1000))


def no_folder(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.checkpoint = args.checkpoint / "gone"


def other_tag(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.embodiment_tag = "libero"


def no_overlay(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    args.overlay = []


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (missing_packages, [("package", ERROR, "torch 2.0.0 does not fit torch=="),
                            ("package", ERROR, "torchserve is not installed"),
                            ("package", WARNING, "pytest is not installed")]),
        (old_java, [("java", ERROR, "is version 8, not 17")]),
        (bad_java_home, [("java", WARNING, "JAVA_HOME has no bin/java")]),
        (gpu((9, 0), 10), [("gpu memory", ERROR, "GPU 0 (H) has 0.0 GB free; the weights alone")]),
        (gpu((12, 0), 10**11), [("gpu", ERROR, "has capability 12.0, for which torch")]),
        (driver_only, [("gpu", WARNING, "sees no GPU")]),
        (file_for_run_dir, [("run dir", ERROR, "cannot be written: Not a directory")]),
        (left_key_file, [("key file", WARNING, "is left from an earlier run")]),
        (little_memory, [("memory", ERROR, "of weights do not fit")]),
        (little_disk, [("disk", ERROR, "for the run dir"), ("disk", ERROR, "for the temporary folder")]),
        (overlay("batchsize: 4"), [("config", ERROR, "unknown key `batchsize`")]),
        (overlay("jobQueueSize: 4"), [("config", ERROR, "batchSize is 8 but jobQueueSize only 4")]),
        (overlay("maxBatchDelay: 0"), [("config", WARNING, "caps waves at two requests, not 8")]),
        (no_overlay, [("config", WARNING, "batchSize is 1")]),
        (other_archive, [("archive", WARNING, "model_store/gr00t.mar has batchSize 1, not 8")]),
        (properties('models={"other": {}}'), [("config.properties", WARNING, "`models=` contradicts the archive")]),
        (properties("decode_input_request=true"), [("config.properties", ERROR, "decode_input_request must be false")]),
        (lambda args, monkeypatch: monkeypatch.setenv("TS_BATCH_SIZE", "1"), [
            ("environment", WARNING, "TS_BATCH_SIZE: a plain")]),
        (no_folder, [("checkpoint", ERROR, "there is no folder")]),
        (truncated, [("weights", ERROR, "cannot be read")]),
        (missing_shard, [("weights", ERROR, "names 'model-00001-of-00002.safetensors', which is not in the folder")]),
        (other_weights, [("weights", ERROR, "the weights do not fit config.json: missing ['action_head.")]),
        (in_checkpoint("config.json", None), [("config.json", ERROR, "config.json is missing")]),
        (in_checkpoint("tokenizer.json", None), [("tokenizer", WARNING, "each start asks Hugging Face")]),
        (in_checkpoint("tokenizer.json", lambda text: text.replace("<|image_pad|>", "<|other|>")), [
            ("tokenizer", ERROR, "has no token <|image_pad|>")]),
        (in_checkpoint("statistics.json", None), [("processor", ERROR, "statistics.json is missing")]),
        (other_tag, [("processor", ERROR, "embodiment 'libero' cannot be served")]),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_nothing_else(
    sound: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, plant: Plant, expected: list[tuple[str, str, str]]
) -> None:
    plant(sound, monkeypatch)
    found = wrong(sound)
    assert [(finding.name, finding.level) for finding in found] == [(name, level) for name, level, _ in expected], found
    for finding, (_, _, words) in zip(found, expected, strict=True):
        assert words in finding.text and finding.advice, finding


def test_a_port_in_use_is_an_error_unless_it_is_our_server_s(sound: argparse.Namespace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", sound.port))
        taken.listen()
        (found,) = wrong(sound)
        assert (found.name, found.level) == ("port", ERROR) and f"port {sound.port} is in use" in found.text
        sound.run_dir.mkdir()
        (sound.run_dir / "key_file.json").touch()
        with (sound.run_dir / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (found,) = wrong(sound)
        assert (found.name, found.level) == ("port", WARNING) and "a server runs in" in found.advice


def test_shards_whose_index_lies(sound: argparse.Namespace) -> None:
    shutil.rmtree(sound.checkpoint)
    write_checkpoint(sound.checkpoint)
    single = sound.checkpoint / "model.safetensors"
    if single.exists():
        single.rename(sound.checkpoint / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"action_head.nothing": sorted(sound.checkpoint.glob("*.safetensors"))[0].name}}
    (sound.checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (found,) = wrong(sound)
    assert found.name == "weights" and "names action_head.nothing, which is not in" in found.text


def test_the_command(tmp_path: Path, checkpoint: Path) -> None:
    """Exit status, text and JSON, as a user gets them."""
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--port", str(pick_ports(0)[0])]
    command += ["--run-dir", str(tmp_path / "run"), "--checkpoint", str(checkpoint)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    good = subprocess.run(command, capture_output=True, text=True, env=env)
    assert good.returncode == 0 and "0 errors" in good.stdout, good.stdout + good.stderr
    broken = tmp_path / "own.yaml"
    broken.write_text("nonsense: 1\n")
    bad = subprocess.run([*command, "--overlay", str(broken), "--json"], capture_output=True, text=True, env=env)
    assert bad.returncode == 1, bad.stderr
    (error,) = [finding for finding in json.loads(bad.stdout) if finding["level"] == "error"]
    assert error["name"] == "config" and "unknown key `nonsense`" in error["text"] and error["advice"]


def test_missing_packages_are_said_even_where_they_are_needed(tmp_path: Path) -> None:
    """Without YAML nothing of ours can be imported, and doctor still answers."""
    (tmp_path / "yaml.py").write_text("raise ImportError('no yaml', name='yaml')\n")
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    texts = [finding["text"] for finding in json.loads(done.stdout) if finding["level"] == "error"]
    assert texts and all("not looked at: no yaml" in text for text in texts)
