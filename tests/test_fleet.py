"""Scaling and swapping a real server while robots use it: every request gets one checkpoint's very bits."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from handler import gr00t_handler
from handler.policy import Actions, Gr00tPolicy
from scripts import scale, swap
from scripts.make_checkpoint import write_checkpoint
from scripts.package import build, read_config
from scripts.serve import Server, local_session
from tests.client import Body, as_msgpack, differences, post, read
from tests.conftest import observation

CLIENTS = 2
PAUSE = 0.1  # s between a robot's requests; without any, a new worker hardly gets a core to start on


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other weights and statistics than `checkpoint`."""
    return write_checkpoint(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="module")
def other(other_checkpoint: Path) -> Gr00tPolicy:
    return Gr00tPolicy(other_checkpoint)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, policy: Gr00tPolicy, checkpoint: Path) -> Iterator[Server]:
    """Serves the first checkpoint, from a folder; waves of one request, whose bits do not depend on company."""
    run_dir = tmp_path_factory.mktemp("fleet") / ".run"
    mine = shutil.copytree(checkpoint, run_dir.parent / "checkpoint")
    patient = run_dir.parent / "patient.yaml"
    patient.write_text("maxBatchDelay: 5\n")
    archive = build(mine, [patient], run_dir / "model_store" / "gr00t.mar")
    with Server(archive, run_dir=run_dir, model_api=True) as server:
        yield server


def command(monkeypatch: pytest.MonkeyPatch, module: Any, server: Server, *words: str) -> int:
    """Runs ./scripts/scale or ./scripts/swap against `server`; its exit status."""
    where = ["--url", server.management_url, "--key-file", str(server.key_file), "--limit", "240"]
    if module is swap:
        where += ["--predict-url", server.inference_url]
    monkeypatch.setattr("sys.argv", [module.__name__, *words, *where])
    return int(module.main())


@pytest.fixture
def question(policy: Gr00tPolicy) -> dict[str, Any]:
    return observation(policy, seed=3, size=(64, 64))


class Robots:
    """Clients that ask one thing over and over, each again as soon as it is answered."""

    def __init__(self, server: Server, body: Body, url: str) -> None:
        self.replies: list[tuple[int, Actions | str]] = []  # status, actions or what came instead
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server, body, url)) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Server, body: Body, url: str) -> None:
        headers = {"Authorization": f"Bearer {server.inference_key}", **body[0]}
        with local_session() as session:
            while not self._stop.is_set():
                try:
                    reply = session.post(url, data=body[1], headers=headers, timeout=120)
                    good = reply.status_code == 200
                    self.replies.append((reply.status_code, read(reply)[0] if good else reply.text))
                except Exception as error:
                    self.replies.append((0, repr(error)))
                time.sleep(PAUSE)

    def served(self, count: int) -> None:
        """Returns when so many more requests have been answered."""
        want, deadline = len(self.replies) + count, time.monotonic() + 120
        while len(self.replies) < want:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def came_from(self, *answers: Actions) -> list[int]:
        """Which of `answers` each reply is, bit by bit; every one must be one of them."""
        came = []
        for status, actions in self.replies:
            assert status == 200, actions
            assert isinstance(actions, dict)
            matches = [index for index, answer in enumerate(answers) if not differences(actions, answer)]
            assert len(matches) == 1
            came += matches
        return came


@contextlib.contextmanager
def robots(server: Server, question: dict[str, Any], url: str | None = None) -> Iterator[Robots]:
    crowd = Robots(server, as_msgpack(question), url or server.predict_url)
    try:
        crowd.served(CLIENTS)
        yield crowd
        crowd.served(CLIENTS)
    finally:
        crowd.stop()


def test_the_name_of_a_worker_that_retires() -> None:
    assert scale.RETIRING == gr00t_handler.RETIRING and len(scale.RETIRING) <= 15


def test_the_table_of_workers() -> None:
    usage = "utilization.gpu::7 % utilization.memory::3 % memory.used::9,100 MiB"
    on_gpu = {"id": "9000", "pid": 71, "status": "READY", "memoryUsage": 2_100_000_000, "gpu": True,
              "gpuUsage": f"gpuId::1 {usage}"}  # fmt: skip
    new = {"id": "9001", "pid": -1, "status": "UNLOADING", "memoryUsage": 0, "gpu": False, "gpuUsage": "N/A"}
    rows = [line.split(None, 4) for line in scale.table([on_gpu, new]).splitlines()]
    assert rows[1:] == [["9000", "71", "READY", "2100", f"1 {usage}"], ["9001", "-1", "UNLOADING", "-", "none"]]


def test_a_version_whose_worker_is_dead_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchServe gives a worker that is not there the pid -1."""
    calls = []

    def answer(self: scale.Management, method: str, path: str, headers: Any = None, **params: Any) -> Any:
        calls.append((method, path))
        version = {"modelName": "gr00t", "workers": [{"pid": -1, "status": "UNLOADED"}],
                   "jobQueueStatus": {"pendingRequests": 0}}  # fmt: skip
        if path == "/models":
            return {"models": [{"modelName": "gr00t"}]}
        both = [{**version, "modelVersion": number} for number in ("1.0", "2.0")]
        return both if path.endswith("/all") else [both[path.endswith("/2.0")]]

    monkeypatch.setattr(scale.Management, "call", answer)
    swap.remove(scale.Management("http://127.0.0.1:9", None), "gr00t", "2.0", 5, scale.Progress("swap"))
    assert calls[-1] == ("DELETE", "/models/gr00t/2.0")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    ["/predictions/gr00t", "/predictions/gr00t/1.0", "/invocations", "/models/gr00t/invoke", "/explanations/gr00t",
     "/v1/models/gr00t:predict", "/v2/models/gr00t/infer"],
)  # fmt: skip
def test_a_robot_cannot_retire_a_worker(server: Server, method: str, path: str) -> None:
    """With the inference key, the header of a describe job, and no body."""
    (pid,) = server.worker_pids()
    headers = {"Authorization": f"Bearer {server.inference_key}", "describe": "True"}
    with local_session() as session, contextlib.suppress(requests.Timeout):
        reply = session.request(method, server.inference_url + path, headers=headers, timeout=5)
        assert "embodiments" not in reply.text
    assert psutil.Process(pid).name() != scale.RETIRING


def test_what_looks_like_a_describe_job_retires_nobody(server: Server) -> None:
    """A form without parts that calls itself text comes to the worker as a describe job; only a signal retires it."""
    (pid,) = server.worker_pids()
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=30)
    connection.putrequest("POST", "/predictions/gr00t")
    for name, value in (("Content-Type", "application/x-www-form-urlencoded"), ("Content-Type", "text/plain"),
                        ("Content-Length", "0"), ("describe", "True"),
                        ("Authorization", f"Bearer {server.inference_key}")):  # fmt: skip
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    assert reply.status == 200 and b"embodiments" in reply.read()  # the contract is no secret
    assert psutil.Process(pid).name() != scale.RETIRING and server.worker_pids() == [pid]


def test_scaling_up_and_down_fails_no_request(
    server: Server, policy: Gr00tPolicy, question: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with robots(server, question) as crowd:
        for count in (2, 1, 2, 1):
            assert command(monkeypatch, scale, server, str(count)) == 0
            model = server.describe()
            assert (model["minWorkers"], model["maxWorkers"], len(server.worker_pids())) == (count, count, count)
            said = capsys.readouterr()
            assert f"{count} of {count} workers READY" in said.err
            rows = [line.split() for line in said.out.splitlines()]
            assert rows[0] == ["worker", "pid", "status", "memory", "MB", "GPU"]
            assert [int(row[1]) for row in rows[1:]] == server.worker_pids()
            assert all(row[2] == "READY" for row in rows[1:])
            crowd.served(2 * CLIENTS)
    assert set(crowd.came_from(policy.get_action(question))) == {0}


def test_a_worker_that_cannot_start_is_taken_back(
    server: Server, policy: Gr00tPolicy, question: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = Path(read_config(server.archive)["handler"]["checkpoint"])
    pids = server.worker_pids()
    away = folder.rename(folder.with_name("away"))
    try:
        assert command(monkeypatch, scale, server, "2") == 1
    finally:
        away.rename(folder)
    assert f"scale: a worker cannot start: the checkpoint folder {folder} does not exist\n" in capsys.readouterr().err
    model = server.describe()
    assert (model["minWorkers"], model["maxWorkers"], server.worker_pids()) == (1, 1, pids)
    assert not differences(read(post(server, as_msgpack(question)))[0], policy.get_action(question))


def test_a_swap_and_the_way_back_fail_no_request(
    server: Server, policy: Gr00tPolicy, other: Gr00tPolicy, other_checkpoint: Path, question: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    first, second = policy.get_action(question), other.get_action(question)
    with robots(server, question) as crowd, robots(server, question, f"{server.predict_url}/1.0") as pinned:
        new = ("--checkpoint", str(other_checkpoint), "--version", "2.0")
        assert command(monkeypatch, swap, server, *new) == 0
        assert f"is version 2.0 now, checkpoint {other.checkpoint}" in capsys.readouterr().out
        model = server.describe()
        assert (model["modelVersion"], model["maxBatchDelay"]) == ("2.0", 5), "the settings of the old version"
        assert not differences(read(post(server, as_msgpack(question)))[0], second)
        crowd.served(2 * CLIENTS)
        pinned.served(CLIENTS)

        assert command(monkeypatch, swap, server, *new) == 1
        assert "has a version 2.0 already" in capsys.readouterr().err
        assert command(monkeypatch, swap, server, "--remove", "2.0") == 1
        assert "is the default" in capsys.readouterr().err

        assert command(monkeypatch, swap, server, "--version", "1.0", "--remove", "2.0") == 0
        assert f"is version 1.0 now, checkpoint {policy.checkpoint}" in capsys.readouterr().out
        assert not differences(read(post(server, as_msgpack(question)))[0], first)
    came = crowd.came_from(first, second)
    assert came[:CLIENTS] == [0] * CLIENTS and came[-1] == 0 and came.count(1) >= 2 * CLIENTS
    assert set(pinned.came_from(first, second)) == {0}
    assert post(server, as_msgpack(question), f"{server.predict_url}/2.0").status_code == 404


def test_a_checkpoint_that_cannot_load_changes_nothing(
    server: Server, policy: Gr00tPolicy, other_checkpoint: Path, question: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    broken = shutil.copytree(other_checkpoint, tmp_path / "broken")
    (broken / "config.json").write_text("{}")
    assert command(monkeypatch, swap, server, "--checkpoint", str(broken), "--version", "3.0") == 1
    said = capsys.readouterr().err
    assert "a worker cannot start: " in said and "Traceback" not in said
    assert list(swap.versions(scale.Management(server.management_url, server.management_key), "gr00t")) == ["1.0"]
    assert command(monkeypatch, swap, server, "--version", "3.0") == 1
    assert "has no version 3.0; registered: 1.0" in capsys.readouterr().err
    assert not differences(read(post(server, as_msgpack(question)))[0], policy.get_action(question))


def test_a_new_version_has_as_many_workers_as_the_old_one(tmp_path: Path, checkpoint: Path) -> None:
    build(checkpoint, [], tmp_path / "gr00t.mar", "libero_sim")
    args = argparse.Namespace(model_store=tmp_path, model="gr00t", version="2.0", overlay=[], checkpoint=checkpoint,
                              embodiment_tag=None, tokenizer=None)  # fmt: skip
    new = read_config(swap.package(args, {"modelUrl": "gr00t.mar", "minWorkers": 3, "maxWorkers": 3}))
    assert (new["minWorkers"], new["maxWorkers"], new["handler"]["embodiment_tag"]) == (3, 3, "libero_sim")
    with pytest.raises(scale.ManageError, match="--model-store"):
        swap.package(args, {"modelUrl": "gone.mar", "minWorkers": 3, "maxWorkers": 3})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gr00t.mar", "gr00t_2.0.mar"]


def test_a_second_model_beside_the_first(
    server: Server, policy: Gr00tPolicy, other: Gr00tPolicy, other_checkpoint: Path, question: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    new = ("--model", "second", "--checkpoint", str(other_checkpoint), "--version", "1.0")
    assert command(monkeypatch, swap, server, *new) == 0
    url = f"{server.inference_url}/predictions/second"
    assert not differences(read(post(server, as_msgpack(question), url))[0], other.get_action(question))
    assert not differences(read(post(server, as_msgpack(question)))[0], policy.get_action(question))
    assert command(monkeypatch, swap, server, "--model", "second", "--remove", "1.0") == 0
    assert post(server, as_msgpack(question), url).status_code == 404
    assert server.describe()["modelVersion"] == "1.0"


def test_no_archive_is_registered_from_elsewhere(server: Server, tmp_path: Path) -> None:
    elsewhere = shutil.copyfile(server.archive, tmp_path / "elsewhere.mar")
    api = scale.Management(server.management_url, server.management_key)
    for url in (elsewhere.as_uri(), "http://127.0.0.1:1/gr00t.mar"):
        with pytest.raises(scale.ManageError, match=r"404 .* does not match any allowed URL"):
            api.call("POST", "/models", url=url)
    with pytest.raises(scale.ManageError, match=r"404 .*not found"):
        api.call("POST", "/models", url=str(elsewhere))
    with pytest.raises(scale.ManageError, match="answers 400"):
        scale.Management(server.management_url, None).call("POST", "/models", url="gr00t.mar")
