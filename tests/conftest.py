"""Fixtures shared by all tests: the small checkpoint, its policy, and observations that keep its contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.policy import Actions, Gr00tPolicy, Row
from handler.problem import Problem
from scripts.bench_engine import random_observation
from scripts.make_checkpoint import write_checkpoint

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
LIBERO = "libero_sim"
DROID = "oxe_droid_relative_eef_relative_joint"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded small checkpoint, seed 0."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def policy(checkpoint: Path) -> Iterator[Gr00tPolicy]:
    yield Gr00tPolicy(checkpoint)


def observation(policy: Gr00tPolicy, tag: str = LIBERO, seed: int = 0, size: tuple[int, int] = (256, 256),
                prompt: str = "pick up the bowl") -> dict[str, Any]:
    """An observation of one row with random frames and state, as a client would nest it; `seed` is also its noise's."""
    return random_observation(policy, tag, size, prompt, seed)


def rows_of(policy: Gr00tPolicy, *fields: dict[str, Any]) -> list[Row]:
    return [row for f in fields for row in policy.prepare(policy.check(f))]


def predict(policy: Gr00tPolicy, rows: list[Row]) -> list[Actions]:
    """The rows' actions; none may have failed."""
    results = policy.predict(rows)
    assert not any(isinstance(result, Problem) for result in results)
    return results  # type: ignore[return-value]
