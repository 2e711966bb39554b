"""The server of a module, and what the good neighbours must get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from handler.policy import Actions, Gr00tPolicy
from handler.wave import Slot, run
from handler.wire import JSON, ReplyForm
from scripts.serve import Server
from tests.client import patient_archive
from tests.conftest import observation


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded checkpoint with the batched overlay, and more patience: 1 ms is short on a busy machine."""
    folder = tmp_path_factory.mktemp("adversary")
    with Server(patient_archive(folder), run_dir=folder / "run") as server:
        yield server


@pytest.fixture(scope="module")
def pid(server: Server) -> int:
    """The worker that must live through all of them."""
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
