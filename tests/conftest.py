"""Fixtures shared by all tests: the small checkpoint, its policy, and observations that keep its contract."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.policy import Actions, Gr00tPolicy, Row
from handler.problem import Problem
from scripts.bench_engine import random_observation
from scripts.make_checkpoint import write_checkpoint
from scripts.package import ROOT

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


@pytest.fixture(scope="session")
def openpi_python() -> Path:
    """A Python with openpi-client, kept between runs."""
    folder = ROOT / ".venv-openpi"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        # It does not say that it needs typing_extensions.
        command = [str(python), "-m", "pip", "install", "-q", "openpi-client==0.1.2", "typing_extensions"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"openpi-client cannot be installed here: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return python


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
