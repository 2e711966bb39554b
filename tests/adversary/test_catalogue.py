"""Every kind of the catalogue in a real TorchServe, in a wave between two good neighbours."""

from __future__ import annotations

import contextlib
import copy
import http.client
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests

from handler.policy import Actions, Gr00tPolicy
from handler.wave import Slot, run
from handler.wire import JSON, ReplyForm
from scripts.package import ROOT, build
from scripts.serve import Server
from tests.adversary.catalogue import BEFORE, GOOD, KINDS, PROMPTS_GOOD, Before, Good, Kind
from tests.client import Body, as_msgpack, post, read, send, wave
from tests.conftest import observation

ABREAST = 6  # kinds in one wave; with the two neighbours it is the overlay's batch size
SECRETS = ("Traceback", "File \"", ".py", str(ROOT), "/tmp", "gr00t-serve-", "site-packages", "ts.service")
WAVES = [KINDS[first : first + ABREAST] for first in range(0, len(KINDS), ABREAST)]
GOOD_WAVES = [GOOD[first : first + ABREAST] for first in range(0, len(GOOD), ABREAST)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded checkpoint with the batched overlay, and more patience: 1 ms is short on a busy machine."""
    folder = tmp_path_factory.mktemp("adversary")
    patient = folder / "patient.yaml"
    patient.write_text("maxBatchDelay: 30\n")
    archive = build(None, [ROOT / "config" / "batched.yaml", patient], folder / "store" / "gr00t.mar")
    with Server(archive, run_dir=folder / "run") as server:
        yield server


@pytest.fixture(scope="module")
def pid(server: Server) -> int:
    """The worker that must live through the whole module."""
    (pid,) = server.worker_pids()
    return pid


@pytest.fixture(scope="module")
def small(policy: Gr00tPolicy) -> dict[str, Any]:
    """What kinds are made from; copy it."""
    return observation(policy, seed=7, size=(64, 64))


@pytest.fixture(scope="module")
def neighbours(policy: Gr00tPolicy) -> list[dict[str, Any]]:
    return [observation(policy, seed=seed, size=(64, 64), prompt=text) for seed, text in ((1, "stop"), (2, "go on"))]


@pytest.fixture(scope="module")
def clean(policy: Gr00tPolicy, neighbours: list[dict[str, Any]]) -> list[Actions]:
    """The two neighbours' actions in a wave of their own."""
    return joined(policy, neighbours)


def joined(policy: Gr00tPolicy, observations: Sequence[dict[str, Any]]) -> list[Actions]:
    """`policy.get_action` of several observations, joined in forwards as the server joins them."""
    slots = []
    for fields in observations:
        slot = Slot(ReplyForm(JSON, "openpi"), policy.check(fields))
        assert slot.observation is not None
        slot.rows = policy.prepare(slot.observation)
        slots.append(slot)
    run(slots, policy)
    assert all(slot.problem is None for slot in slots)
    return [slot.actions() for slot in slots]


def differences(got: Actions, want: Actions) -> list[str]:
    """The keys whose bits differ, or whose values are not finite."""
    assert got.keys() == want.keys()
    return [
        key for key, value in want.items()
        if got[key].dtype != np.float32 or not np.isfinite(value).all()
        or got[key].tobytes() != value.astype(np.float32).tobytes()
    ]  # fmt: skip


def complaint(kind: Kind, reply: requests.Response) -> str:
    """What is wrong with a kind's reply, or nothing."""
    if reply.headers.get("Content-Type") != "application/problem+json":
        return f"{kind.name}: {reply.status_code} {reply.headers.get('Content-Type')} {reply.text[:300]}"
    document = reply.json()
    came = (reply.status_code, document["status"], document.get("pointer"))
    wrong = came != (kind.status, kind.status, kind.pointer) or kind.fragment not in document["detail"]
    wrong |= not document["title"] or not reply.content.isascii() or not reply.reason.isascii()
    wrong |= len(document["detail"]) > 1000 or any(secret in reply.text for secret in SECRETS)
    expected = kind.status, kind.pointer, kind.fragment
    return f"{kind.name}: expected {expected}, came {reply.text[:700]}" if wrong else ""


def queue(server: Server, count: int) -> None:
    """Waits until so many requests are in TorchServe's queue."""
    deadline = time.monotonic() + 30
    while server.describe()["jobQueueStatus"]["pendingRequests"] != count:
        assert time.monotonic() < deadline, "a request did not reach the queue"
        time.sleep(0.003)


def abreast(server: Server, bodies: Sequence[Body], neighbours: Sequence[Body]) -> list[requests.Response]:
    """As tests.client.wave, but what is between the neighbours comes in any order, which takes half the time."""
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
