"""Forwards that fail, in a real TorchServe: who gets what, and who is left standing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from handler.policy import Gr00tPolicy
from scripts.package import ROOT, build
from scripts.serve import Server
from tests.client import as_msgpack, post, read, wave
from tests.conftest import LIBERO, observation


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    faulty = Path(__file__).with_name("faulty_handler.py")
    patient = folder / "patient.yaml"
    patient.write_text("maxBatchDelay: 30\n")  # on a busy machine 1 ms can split what has queued up
    overlays = [ROOT / "config" / "batched.yaml", patient]
    archive = build(None, overlays, folder / "store" / "gr00t.mar", LIBERO, handler_file=faulty)
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
    deadline = time.monotonic() + 60
    while not (fresh := server.worker_pids()) or fresh == pids:
        assert time.monotonic() < deadline, "no fresh worker"
        time.sleep(0.2)
    actions, _ = read(post(server, good))
    for key, want in policy.get_action(observation(policy, seed=1)).items():
        assert np.array_equal(actions[key], want)
