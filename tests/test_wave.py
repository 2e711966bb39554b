"""Slots and groups, with a policy whose forward does what the test wants."""

from __future__ import annotations

import email
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from handler.observation import Observation
from handler.policy import Actions, Gr00tPolicy, Row
from handler.problem import Problem
from handler.wave import ContextLost, Slot, fill, run
from handler.wire import Part, Request
from tests.client import Body, as_json, as_msgpack, as_multipart
from tests.conftest import DROID, LIBERO, observation


def request(fields: dict[str, Any]) -> Request:
    headers, body = as_msgpack(fields)
    return Request({"content-type": headers["Content-Type"]}, [Part("body", headers["Content-Type"], body)])


class Forwards:
    """Stands in for `policy.predict`: remembers every forward's seeds, and raises where told."""

    def __init__(self, policy: Gr00tPolicy, fail: Callable[[list[int]], Exception | None] = lambda seeds: None) -> None:
        self.policy, self.fail, self.calls = policy, fail, list[list[int]]()
        self.real = policy.predict

    def __call__(self, rows: Sequence[Row]) -> list[Actions | Problem]:
        seeds = [row.seed for row in rows]
        self.calls.append(seeds)
        if error := self.fail(seeds):
            raise error
        return self.real(rows)


@pytest.fixture
def slots(policy: Gr00tPolicy) -> list[Slot]:
    return fill([request(observation(policy, LIBERO, seed=seed)) for seed in range(5)], policy)


def patched(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Forwards:
    forwards = Forwards(policy, **kwargs)
    monkeypatch.setattr(policy, "predict", forwards)
    return forwards


def test_one_forward_per_patch_grid(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lengths and embodiments share a forward; token grids do not."""
    long = "push the large green block next to the plate"
    fields = [
        observation(policy, LIBERO, seed=0),
        observation(policy, DROID, seed=1),
        observation(policy, LIBERO, seed=2, prompt=long),
        observation(policy, LIBERO, seed=3, size=(180, 320)),
        observation(policy, DROID, seed=4, prompt=long),
    ]
    slots = fill([request(f) for f in fields], policy)
    forwards = patched(policy, monkeypatch)
    run(slots, policy)
    assert forwards.calls == [[0, 2], [1, 4], [3]]
    assert [slot.group_rows for slot in slots] == [2, 2, 2, 1, 2]
    for f, slot in zip(fields, slots, strict=True):
        solo = forwards.real(policy.prepare(policy.check(f)))[0]
        assert isinstance(solo, dict)
        for key, value in slot.actions().items():
            np.testing.assert_allclose(value[0], solo[key], rtol=0, atol=1e-5)


def test_a_bad_request_is_not_in_the_forward(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = observation(policy, LIBERO, seed=1)
    bad["state"]["x"][0, 0, 0] = np.nan
    good = [observation(policy, LIBERO, seed=seed) for seed in (0, 2)]
    wave = fill([request(f) for f in (good[0], bad, good[1])], policy)
    alone = fill([request(f) for f in good], policy)
    forwards = patched(policy, monkeypatch)
    run(wave, policy)
    run(alone, policy)
    assert forwards.calls == [[0, 2], [0, 2]]
    assert wave[1].problem is not None
    assert (wave[1].problem.status, wave[1].problem.pointer) == (422, "/state/x")
    for got, want in zip((wave[0], wave[2]), alone, strict=True):
        for key, value in got.actions().items():
            assert np.array_equal(value, want.actions()[key])


def test_a_group_runs_in_chunks_of_max_rows(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "rows_per_forward", 2)
    forwards = patched(policy, monkeypatch)
    run(slots, policy)
    assert forwards.calls == [[0, 1], [2, 3], [4]]
    assert [slot.group_rows for slot in slots] == [2, 2, 2, 2, 1]


def test_a_forward_that_raises_is_halved_until_the_culprit_stands_alone(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = patched(policy, monkeypatch, fail=lambda seeds: ValueError("boom /secret") if 3 in seeds else None)
    run(slots, policy)
    assert forwards.calls == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [2], [3, 4], [3], [4]]
    for seed, slot in enumerate(slots):
        if seed == 3:
            assert slot.problem is not None and slot.problem.status == 500
            assert "boom" not in slot.problem.detail and "secret" not in slot.problem.detail
        else:
            assert slot.problem is None
            solo = forwards.real(slot.rows)[0]
            assert isinstance(solo, dict)
            for key, value in slot.actions().items():
                np.testing.assert_allclose(value[0], solo[key], rtol=0, atol=1e-5)


def test_a_forward_that_always_raises_fails_every_row_and_ends(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = patched(policy, monkeypatch, fail=lambda seeds: RuntimeError("always"))
    run(slots, policy)
    assert len(forwards.calls) == 9  # 2 n - 1
    assert [slot.problem.status for slot in slots if slot.problem] == [500] * 5


def test_out_of_memory_fails_nobody_who_fits(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = patched(
        policy, monkeypatch, fail=lambda seeds: torch.OutOfMemoryError("OOM") if len(seeds) > 2 else None
    )
    run(slots, policy)
    assert forwards.calls == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [2], [3, 4]]
    assert [slot.problem for slot in slots] == [None] * 5
    assert [slot.group_rows for slot in slots] == [2, 2, 1, 2, 2]


def test_a_row_too_large_for_memory_is_told_to_come_back(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(policy, monkeypatch, fail=lambda seeds: torch.OutOfMemoryError("OOM") if 1 in seeds else None)
    run(slots, policy)
    assert [slot.problem.status if slot.problem else 200 for slot in slots] == [200, 503, 200, 200, 200]
    assert slots[1].problem is not None and slots[1].problem.retry_after


def test_a_lost_context_answers_what_is_open_with_503(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots[0].problem = Problem(422, "its own")
    patched(policy, monkeypatch, fail=lambda seeds: RuntimeError("CUDA error: device-side assert triggered"))
    monkeypatch.setattr(policy, "lost", lambda: True)
    with pytest.raises(ContextLost):
        run(slots, policy)
    assert [slot.problem.status for slot in slots if slot.problem] == [422, 503, 503, 503, 503]
    assert all(slot.problem and slot.problem.retry_after for slot in slots[1:])


def test_a_row_that_is_not_finite_fails_alone(
    policy: Gr00tPolicy, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = patched(policy, monkeypatch)
    clean = forwards.real([row for slot in slots for row in slot.rows])
    slots[2].rows[0] = replace(slots[2].rows[0], state=np.full_like(slots[2].rows[0].state, np.inf))
    run(slots, policy)
    assert [slot.problem.status if slot.problem else 200 for slot in slots] == [200, 200, 500, 200, 200]
    assert forwards.calls == [[0, 1, 2, 3, 4]]
    for i in (0, 1, 3, 4):
        want = clean[i]
        assert isinstance(want, dict)
        for key, value in slots[i].actions().items():
            assert np.array_equal(value[0], want[key])


def test_one_failed_row_fails_its_request_only(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    one = observation(policy, LIBERO, seed=10)
    three = {
        "video": {key: np.repeat(value, 3, 0) for key, value in one["video"].items()},
        "state": {key: np.repeat(value, 3, 0) for key, value in one["state"].items()},
        "prompt": "push the cup",
        "options": one["options"],
    }
    slots = fill([request(f) for f in (three, observation(policy, LIBERO, seed=20))], policy)
    patched(policy, monkeypatch, fail=lambda seeds: RuntimeError("x") if 11 in seeds else None)
    run(slots, policy)
    assert [slot.problem.status if slot.problem else 200 for slot in slots] == [500, 200]


def test_a_defect_in_preparing_costs_one_slot(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(observation: Any) -> list[Row]:
        raise KeyError("/a/path")

    monkeypatch.setattr(policy, "prepare", broken)
    slot = fill([request(observation(policy))], policy)[0]
    assert slot.problem is not None and slot.problem.status == 500 and "path" not in slot.problem.detail


def test_the_reply_keeps_b_exactly_if_the_request_had_it(policy: Gr00tPolicy) -> None:
    fields = observation(policy, LIBERO, seed=1)
    bare = {
        "video": {key: value[0] for key, value in fields["video"].items()},
        "state": {key: value[0, 0] for key, value in fields["state"].items()},
        "prompt": "pick up the bowl",
        "options": json.loads(json.dumps(fields["options"])),
    }
    slots = fill([request(f) for f in (fields, bare)], policy)
    run(slots[:1], policy)
    run(slots[1:], policy)
    assert {key: value.shape for key, value in slots[0].actions().items()}["x"] == (1, 16, 1)
    for key, value in slots[1].actions().items():
        assert np.array_equal(value, slots[0].actions()[key][0])


@pytest.mark.parametrize(
    ("options", "headers", "late"),
    [
        ({}, {}, False),
        ({"deadline_ms": 5000}, {}, False),
        ({"deadline_ms": -1}, {}, True),
        ({}, {"X-Request-Timeout-Ms": "5000", "X-Request-Start": "t={:.3f}"}, False),
        ({}, {"x-request-timeout-ms": "0", "X-REQUEST-START": "{:.6f}"}, True),
        ({}, {"X-Request-Timeout-Ms": "5000", "X-Request-Start": "{:.7f}"}, False),
        ({}, {"X-Request-Timeout-Ms": "5000", "X-Request-Start": "{:.0f}"}, False),
        ({}, {"X-Request-Timeout-Ms": "0", "X-Request-Start": "0000000000"}, True),
        ({"deadline_ms": 5000}, {"X-Request-Timeout-Ms": "0", "X-Request-Start": "t={:.3f}"}, True),
        ({"deadline_ms": -1}, {"X-Request-Timeout-Ms": "5000", "X-Request-Start": "t={:.3f}"}, True),
    ],
)
def test_what_is_past_its_deadline_costs_no_forward(
    policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], headers: dict[str, str], late: bool
) -> None:
    """The earlier of the two deadlines holds; options here are milliseconds from now."""
    now = time.time()
    fields = observation(policy, seed=7)
    fields["options"].update({key: (now * 1000) + value for key, value in options.items()})
    one = request(fields)
    one.headers.update({name: value.format(now) for name, value in headers.items()})
    forwards = patched(policy, monkeypatch)
    slots = fill([one, request(observation(policy, seed=8))], policy)
    run(slots, policy)
    assert forwards.calls == ([[8]] if late else [[7, 8]])
    if late:
        assert slots[0].problem is not None and slots[0].problem.status == 504 and not slots[0].rows
    assert slots[1].problem is None


def test_a_deadline_that_passes_while_others_are_decoded(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = observation(policy, seed=7)
    fields["options"]["deadline_ms"] = time.time() * 1000 + 60_000
    slots = fill([request(fields), request(observation(policy, seed=8))], policy)
    assert slots[0].problem is None and slots[0].rows
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    forwards = patched(policy, monkeypatch)
    run(slots, policy)
    assert forwards.calls == [[8]]
    assert slots[0].problem is not None and slots[0].problem.status == 504


def test_image_files_are_decoded_in_threads_and_arrays_in_this_one(
    policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the mix, every request gets its own slot, in order, with its own rows or problem."""
    fields = [observation(policy, seed=seed, size=(64, 64)) for seed in range(6)]
    bad = [observation(policy, seed=9, size=(64, 64)) for _ in range(2)]
    for one in bad:
        del one["state"]["x"]
    bodies = [as_msgpack(fields[0]), as_json(fields[1]), as_json(bad[0]), as_multipart(fields[2]), as_msgpack(bad[1]),
              as_json(fields[3]), as_msgpack(fields[4]), as_multipart(fields[5])]  # fmt: skip
    requests = [read_request(body) for body in bodies]
    threads: list[int] = []
    real = policy.prepare

    def prepare(observed: Observation) -> list[Row]:
        threads.append(threading.get_ident())
        return real(observed)

    monkeypatch.setattr(policy, "prepare", prepare)
    with ThreadPoolExecutor(3) as pool:
        got = fill(requests, policy, pool)
    assert threads.count(threading.get_ident()) == 2  # the two good arrays
    assert len(threads) == 6
    want = fill(requests, policy)
    for a, b in zip(got, want, strict=True):
        assert (a.problem is None) == (b.problem is None)
        if a.problem is not None and b.problem is not None:
            assert (a.problem.status, a.problem.pointer) == (b.problem.status, b.problem.pointer)
        assert [row.seed for row in a.rows] == [row.seed for row in b.rows]
        assert all(torch.equal(x.frames, y.frames) for x, y in zip(a.rows, b.rows, strict=True))
    assert [slot.problem is None for slot in got] == [True, True, False, True, False, True, True, True]


def read_request(body: Body) -> Request:
    """A body as the handler gets it: forms taken apart."""
    headers, data = body
    kind = headers["Content-Type"]
    if not kind.startswith("multipart/"):
        return Request(dict(headers), [Part("body", kind, data)])
    message = email.message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + data)
    parts = []
    for part in message.walk():
        if not part.is_multipart():
            value = part.get_payload(decode=True)
            assert isinstance(value, bytes)
            kind = part.get_content_type() if part["content-type"] else ""
            parts.append(Part(str(part.get_param("name", header="content-disposition")), kind, value))
    return Request(dict(headers), parts)


def test_a_request_that_is_late_already_is_not_even_decoded(policy: Gr00tPolicy) -> None:
    headers = {"X-Request-Timeout-Ms": "1", "X-Request-Start": "t=1600000000", "Content-Type": "application/json"}
    broken = Request(headers, [Part("body", "application/json", b"{")])
    (slot,) = fill([broken], policy)
    assert slot.problem is not None and slot.problem.status == 504


def test_a_deadline_that_passes_during_an_earlier_forward(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another grid, so a second forward of the same wave."""
    fields = observation(policy, seed=7, size=(180, 320))
    fields["options"]["deadline_ms"] = time.time() * 1000 + 60_000
    slots = fill([request(observation(policy, seed=8)), request(fields)], policy)
    later = time.time() + 61

    def pass_time(seeds: list[int]) -> None:
        monkeypatch.setattr(time, "time", lambda: later)

    forwards = patched(policy, monkeypatch, fail=pass_time)
    run(slots, policy)
    assert forwards.calls == [[8]]
    assert slots[0].problem is None and slots[0].results
    assert slots[1].problem is not None and slots[1].problem.status == 504


@pytest.mark.parametrize("lost", [False, True])
def test_an_accelerator_that_is_lost_while_preparing(
    policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    real = policy.prepare

    def prepare(observed: Observation) -> list[Row]:
        if observed.seed == 8:
            raise RuntimeError("CUDA error: unspecified launch failure (simulated)")
        return real(observed)

    monkeypatch.setattr(policy, "prepare", prepare)
    monkeypatch.setattr(policy, "lost", lambda: lost)
    forwards = patched(policy, monkeypatch)
    refused = observation(policy, seed=9)
    del refused["state"]["x"]
    slots = fill([request(observation(policy, seed=7)), request(observation(policy, seed=8)), request(refused)], policy)
    if lost:
        with pytest.raises(ContextLost):
            run(slots, policy)
        assert forwards.calls == []
        assert [slot.problem and slot.problem.status for slot in slots] == [503, 503, 422]
    else:
        run(slots, policy)
        assert forwards.calls == [[7]]
        assert [slot.problem and slot.problem.status for slot in slots] == [None, 500, 422]
