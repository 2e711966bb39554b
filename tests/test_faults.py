"""Forwards that fail, in a real TorchServe: who gets what, and who is left standing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from handler.policy import Gr00tPolicy
from scripts.make_checkpoint import write_checkpoint
from scripts.package import build
from scripts.ready import main, serve_ready
from scripts.serve import Server, StartError, local_session
from tests.client import as_msgpack, patient_archive, post, read, wave
from tests.conftest import LIBERO, observation


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    faulty = Path(__file__).with_name("faulty_handler.py")
    # A worker that hangs shall be given up on in this life.
    archive = patient_archive(folder, "responseTimeout: 10\n", tag=LIBERO, handler_file=faulty)
    with Server(archive, run_dir=folder / "run") as server:
        yield server


def test_a_row_that_makes_the_forward_raise_fails_alone(server: Server, policy: Gr00tPolicy) -> None:
    fields = [observation(policy, seed=seed) for seed in range(4)]
    culprit = observation(policy, seed=9, prompt="fault row")
    pids = server.worker_pids()
    order = [fields[0], culprit, *fields[1:]]
    replies = wave(server, [as_msgpack(f) for f in order], as_msgpack(fields[0]))
    assert replies[1].status_code == 500
    assert replies[1].json()["detail"].startswith("the network failed on this observation")
    assert "cannot be computed" not in replies[1].text
    for i in (0, 2, 3, 4):
        actions, info = read(replies[i])
        assert info["wave_requests"] == 5
        for key, want in policy.get_action(order[i]).items():
            np.testing.assert_allclose(actions[key], want, rtol=0, atol=1e-5)
    assert server.worker_pids() == pids


def test_out_of_memory_fails_nobody_who_fits(server: Server, policy: Gr00tPolicy) -> None:
    fields = [observation(policy, seed=seed) for seed in range(3)]
    fields[1]["language"] = {next(iter(fields[1]["language"])): [["fault memory"]]}
    replies = wave(server, [as_msgpack(f) for f in fields], as_msgpack(fields[0]))
    for f, reply in zip(fields, replies, strict=True):
        actions, _ = read(reply)
        for key, want in policy.get_action(f).items():
            np.testing.assert_allclose(actions[key], want, rtol=0, atol=1e-5)


def test_a_lost_context_answers_its_wave_503_and_gets_a_new_worker(server: Server, policy: Gr00tPolicy) -> None:
    good = as_msgpack(observation(policy, seed=1))
    bad = as_msgpack(observation(policy, seed=2, prompt="fault context"))
    broken = ({"Content-Type": "application/json"}, b"{")
    pids = server.worker_pids()
    replies = wave(server, [good, bad, broken], good)
    assert [reply.status_code for reply in replies] == [503, 503, 400]
    for reply in replies[:2]:
        assert 5 <= int(reply.headers["Retry-After"]) <= 60
        assert reply.headers["Content-Type"] == "application/problem+json"
        assert "CUDA" not in reply.text
    back_again(server, policy, pids)


def back_again(server: Server, policy: Gr00tPolicy, pids: list[int]) -> None:
    """Another worker than these is READY within a minute, and answers as ever."""
    began = time.monotonic()
    server.wait_for_other_workers(pids, 60)
    print(f"READY again after {time.monotonic() - began:.1f} s")
    actions, _ = read(post(server, as_msgpack(observation(policy, seed=1))))
    for key, want in policy.get_action(observation(policy, seed=1)).items():
        assert np.array_equal(actions[key], want)


@pytest.mark.parametrize(("word", "forwards"), [("fault batch", 1), ("fault once", 2)])
def test_who_can_be_served_after_all_is_served(server: Server, policy: Gr00tPolicy, word: str, forwards: int) -> None:
    """A forward that fails in company, or only the first time: everyone gets their actions."""
    fields = [observation(policy, seed=seed) for seed in range(3)]
    fields[1]["language"] = {next(iter(fields[1]["language"])): [[word]]}
    pids = server.worker_pids()
    replies = wave(server, [as_msgpack(f) for f in fields], as_msgpack(fields[0]))
    for f, reply in zip(fields, replies, strict=True):
        actions, info = read(reply)
        assert info["wave_requests"] == 3 and info["group_rows"] <= forwards
        for key, want in policy.get_action(f).items():
            np.testing.assert_allclose(actions[key], want, rtol=0, atol=1e-5)
    assert server.worker_pids() == pids


def test_a_wave_in_which_all_fail(server: Server, policy: Gr00tPolicy) -> None:
    fields = [observation(policy, seed=seed, prompt="fault row") for seed in range(4)]
    pids = server.worker_pids()
    blocker = as_msgpack(observation(policy, seed=9))
    for reply in wave(server, [as_msgpack(f) for f in fields], blocker):
        assert reply.status_code == 500 and reply.json()["detail"].startswith("the network failed on this observation")
    assert server.worker_pids() == pids


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_in_mid_wave(server: Server, policy: Gr00tPolicy, name: str) -> None:
    """Its wave is told at once, what waits is served by the next worker, and nothing is lost in silence."""
    good = as_msgpack(observation(policy, seed=1))
    bad = as_msgpack(observation(policy, seed=2, prompt=f"fault {name}"))
    pids = server.worker_pids()
    replies = wave(server, [good, bad, *[good] * 10], good)
    told = [reply for reply in replies if reply.status_code != 200]
    assert 2 <= len(told) <= 8  # the wave of the culprit
    for reply in told:  # 507 when TorchServe saw the process end by SIGKILL before it saw the connection close
        assert reply.status_code in (500, 507) and reply.json()["message"] == "Worker died."
    want = policy.get_action(observation(policy, seed=1))
    for reply in replies:
        if reply.status_code == 200:
            for key, value in read(reply)[0].items():
                np.testing.assert_allclose(value, want[key], rtol=0, atol=1e-5)
    back_again(server, policy, pids)


def test_a_worker_that_hangs(server: Server, policy: Gr00tPolicy) -> None:
    """After responseTimeout its wave is told, and another worker takes over."""
    good = as_msgpack(observation(policy, seed=1))
    bad = as_msgpack(observation(policy, seed=2, prompt="fault hang"))
    pids = server.worker_pids()
    began = time.monotonic()
    replies = wave(server, [good, bad], good)
    assert all(reply.status_code == 500 and "code" in reply.json() for reply in replies)
    assert time.monotonic() - began < 40
    back_again(server, policy, pids)


def spoil(folder: Path, how: str) -> None:
    """Breaks the checkpoint's weights."""
    (file,) = folder.glob("*.safetensors")
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
        return
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.startswith("action_head.") and tensors[name].ndim == 2)
    if how == "missing":
        del tensors[name]
    else:
        tensors[name].fill_(float("nan"))
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", r"safetensors"),
        ("missing", r"missing tensor action_head\."),
        ("nan", r"an example of libero_sim cannot be answered: the network's answer .* is not finite"),
    ],
)
def test_a_spoilt_checkpoint_does_not_start(tmp_path: Path, how: str, reason: str) -> None:
    """It says why within seconds, rather than serve wrong actions or hang."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    spoil(folder, how)
    archive = build(folder, [], tmp_path / "store" / "gr00t.mar")
    with pytest.raises(StartError, match=reason) as caught:
        Server(archive, run_dir=tmp_path / "run").start()
    assert "Traceback" not in str(caught.value)


def test_readiness_follows_the_worker(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """200 while a worker can serve; 503 from its death until the next is READY."""
    command = ["ready", "--url", server.management_url, "--key-file", str(server.key_file)]
    monkeypatch.setattr(sys, "argv", command)
    ready = serve_ready(server, 0)
    url = f"http://127.0.0.1:{ready.server_port}/ready"

    def ask() -> tuple[int, dict[str, Any]]:
        with local_session() as session:
            reply = session.get(url, timeout=10)
            return reply.status_code, reply.json()

    try:
        assert ask() == (200, {"ready": True, "detail": "workers READY: 1, waiting: 0"})
        assert main() == 0 and capsys.readouterr().out == "ready: workers READY: 1, waiting: 0\n"
        with local_session() as session:
            assert session.get(url.replace("/ready", "/keys"), timeout=10).status_code == 404
            assert session.head(url, timeout=10).status_code == 200

        pids = server.worker_pids()
        os.kill(pids[0], signal.SIGKILL)
        seen: list[int] = []
        deadline = time.monotonic() + 60
        while not seen or seen[-1] != 200 or 503 not in seen:
            assert time.monotonic() < deadline, seen
            seen.append(ask()[0])
            time.sleep(0.2)
        assert server.worker_pids() not in ([], pids)  # what it says is so
    finally:
        ready.shutdown()
        ready.server_close()
    monkeypatch.setattr(sys, "argv", [*command[:2], "http://127.0.0.1:9", *command[3:]])
    assert main() == 1 and capsys.readouterr().out == "not ready: TorchServe does not answer\n"
    monkeypatch.setattr(sys, "argv", [*command[:4], str(tmp_path / "none.json")])
    assert main() == 1 and capsys.readouterr().out == "not ready: TorchServe answers 400\n"
