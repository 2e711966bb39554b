"""Every kind of the catalogue in a real TorchServe, in a wave between two good neighbours."""

from __future__ import annotations

import contextlib
import copy
import http.client
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import requests

from handler.policy import Actions, Gr00tPolicy
from scripts.serve import Server
from tests.adversary.catalogue import BEFORE, GOOD, KINDS, PROMPTS_GOOD, Before, Good, Kind, complaint
from tests.adversary.conftest import joined
from tests.client import Body, as_json, as_msgpack, differences, post, read, send, wave

ABREAST = 6  # kinds in one wave; with the two neighbours it is the overlay's batch size
WAVES = [KINDS[first : first + ABREAST] for first in range(0, len(KINDS), ABREAST)]
GOOD_WAVES = [GOOD[first : first + ABREAST] for first in range(0, len(GOOD), ABREAST)]


def queue(server: Server, count: int) -> None:
    """Waits until so many requests are in TorchServe's queue."""
    deadline = time.monotonic() + 30
    while server.describe()["jobQueueStatus"]["pendingRequests"] != count:
        assert time.monotonic() < deadline, "a request did not reach the queue"
        time.sleep(0.003)


def abreast(
    server: Server, bodies: Sequence[Body], neighbours: Sequence[Body], pause: float = 0.0
) -> list[requests.Response]:
    """As tests.client.wave, but what is between the neighbours comes in any order, which takes half the time.

    pause: seconds that the queued wave waits longer.
    """
    (pid,) = server.worker_pids()
    with ThreadPoolExecutor(len(bodies) + 3) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            taken = send(server, neighbours[0], pool)
            queue(server, 0)
            time.sleep(0.06)  # the blocker's wave is closed by then
            futures = [pool.submit(post, server, neighbours[0])]
            queue(server, 1)
            futures += [pool.submit(post, server, body) for body in bodies]
            queue(server, 1 + len(bodies))
            futures.append(pool.submit(post, server, neighbours[1]))
            queue(server, 2 + len(bodies))
            time.sleep(pause)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert taken.result().status_code == 200
        return [future.result() for future in futures]


def test_names_are_unique_and_many() -> None:
    names = [*(kind.name for kind in KINDS), *(kind.name for kind in GOOD), *(kind.name for kind in BEFORE)]
    assert len(names) == len(set(names)) and len(KINDS) >= 80


@pytest.mark.parametrize("kinds", WAVES, ids=[f"{wave[0].name} to {wave[-1].name}" for wave in WAVES])
def test_hostile(server: Server, pid: int, small: dict[str, Any], neighbours: list[dict[str, Any]],
                 clean: list[Actions], kinds: list[Kind]) -> None:
    bodies = [kind.make(copy.deepcopy(small)) for kind in kinds]
    first, *replies, last = abreast(server, bodies, [as_msgpack(fields) for fields in neighbours])
    complaints = [complaint(kind, reply) for kind, reply in zip(kinds, replies, strict=True)]
    for kind, wrong in zip(kinds, complaints, strict=True):
        print("FAILS" if wrong else "holds", kind.status, kind.name)
    for reply, want in zip((first, last), clean, strict=True):
        actions, info = read(reply)
        assert (info["wave_requests"], info["wave_rows"], info["group_rows"]) == (len(kinds) + 2, 2, 2)
        assert not differences(actions, want)
    assert server.worker_pids() == [pid]
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.parametrize("kinds", GOOD_WAVES, ids=[f"{wave[0].name} to {wave[-1].name}" for wave in GOOD_WAVES])
def test_odd_and_good(server: Server, pid: int, policy: Gr00tPolicy, small: dict[str, Any],
                      neighbours: list[dict[str, Any]], kinds: list[Good]) -> None:
    plain = [kind.means(copy.deepcopy(small)) for kind in kinds]
    first, *wanted, last = joined(policy, [neighbours[0], *plain, neighbours[1]])
    ends = [as_msgpack(fields) for fields in neighbours]
    bodies = [ends[0], *(kind.make(copy.deepcopy(small)) for kind in kinds), ends[1]]
    first_reply, *replies, last_reply = wave(server, bodies, ends[0])
    complaints = []
    for kind, fields, reply, want in zip(kinds, plain, replies, wanted, strict=True):
        wrong = f"{reply.status_code} {reply.text[:300]}"
        if reply.status_code == 200:
            actions = {key: value.reshape(want[key].shape) for key, value in read(reply)[0].items()}
            solo = policy.get_action(fields)
            wrong = " ".join(differences(actions, want))
            wrong += " ".join(key for key in solo if not np.allclose(actions[key], solo[key], rtol=0, atol=1e-5))
        complaints.append(f"{kind.name}: {wrong}" if wrong else "")
        print("FAILS" if wrong else "holds", 200, kind.name)
    assert not any(complaints), "\n".join(filter(None, complaints))
    for reply, want in zip((first_reply, last_reply), (first, last), strict=True):
        assert not differences(read(reply)[0], want)
    assert server.worker_pids() == [pid]


def test_no_prompt_becomes_an_image_or_a_turn(policy: Gr00tPolicy, small: dict[str, Any]) -> None:
    """Token ids that only the template may write come as often as with a plain prompt."""
    encode, grid = policy.encode_prompt, [64, 64]
    formalize, encode.formalize = encode.formalize, False  # which would take the brackets away
    try:
        plain = encode("pick up the bowl", grid)
        special = {plain[0], encode.image, encode._before_image, encode._after_image}
        for text in PROMPTS_GOOD.values():
            ids = encode(text, grid)
            assert [ids.count(token) for token in special] == [plain.count(token) for token in special], text
    finally:
        encode.formalize = formalize


def test_answered_before_the_handler(server: Server, pid: int, small: dict[str, Any],
                                     neighbours: list[dict[str, Any]], clean: list[Actions]) -> None:
    """TorchServe's own reply, or its silence, while the neighbours are served."""
    url = urlsplit(server.predict_url)

    def ask(kind: Before) -> int | None:
        headers, body = kind.make(copy.deepcopy(small))
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=3)
        try:
            # It answers, and hangs up, before it has read a body that is too large.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                authorized = {"Authorization": f"Bearer {server.inference_key}", **headers}
                connection.request("POST", url.path, body, authorized)
            return connection.getresponse().status
        except TimeoutError:
            return None
        finally:
            connection.close()

    ends = [as_msgpack(fields) for fields in neighbours]
    with ThreadPoolExecutor(len(BEFORE)) as pool:
        came = [pool.submit(ask, kind) for kind in BEFORE]
        for _ in range(2):
            for reply, want in zip(wave(server, ends, ends[0]), clean, strict=True):
                assert not differences(read(reply)[0], want)
        got = {kind.name: future.result() for kind, future in zip(BEFORE, came, strict=True)}
    for name, status in got.items():
        print("came", status, name)
    assert got == {kind.name: kind.status for kind in BEFORE}
    assert server.worker_pids() == [pid]


def test_deadlines_pass_in_the_queue(server: Server, pid: int, small: dict[str, Any], neighbours: list[dict[str, Any]],
                                     clean: list[Actions]) -> None:
    """They cost no forward: the neighbours' bits are those of a wave of two."""
    soon = time.time() + 0.2
    fields = copy.deepcopy(small)
    fields["options"]["deadline_ms"] = soon * 1000
    late = [as_msgpack(fields), as_json(copy.deepcopy(small))]
    late[1][0].update({"X-Request-Start": f"t={soon - 0.1:.3f}", "X-Request-Timeout-Ms": "100"})
    ends = [as_msgpack(fields) for fields in neighbours]
    first, *replies, last = abreast(server, late, ends, pause=0.3)
    for reply in replies:
        assert (reply.status_code, reply.json()["title"]) == (504, "Gateway Timeout")
        assert "ms after its deadline, so nothing was computed" in reply.json()["detail"]
    for reply, want in zip((first, last), clean, strict=True):
        actions, info = read(reply)
        assert (info["wave_requests"], info["wave_rows"], info["group_rows"]) == (4, 2, 2)
        assert not differences(actions, want)
    assert server.worker_pids() == [pid]


def test_memory_is_back_where_it_was(server: Server, pid: int, small: dict[str, Any]) -> None:
    """Twice the whole catalogue: the second time the worker needs no more memory than the first."""
    worker, held = psutil.Process(pid), []
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            replies = pool.map(lambda kind: post(server, kind.make(copy.deepcopy(small))).status_code, KINDS)
            assert list(replies) == [kind.status for kind in KINDS]
        held.append(worker.memory_info().rss / 1e6)
    print("worker's resident megabytes", held)
    assert held[1] < held[0] + 48
