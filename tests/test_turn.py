"""Workers of one GPU compute in turns, and none waits for one that hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from handler.policy import Gr00tPolicy
from handler.turn import Turn
from tests.conftest import LIBERO, observation, predict, rows_of

HOLD = """
import sys, time
from pathlib import Path
from handler.turn import Turn
with Turn(Path(sys.argv[1])):
    print("taken", flush=True)
    time.sleep(60)
"""


def test_one_holds_it_at_a_time(tmp_path: Path) -> None:
    held, most, done = [], [], []

    def worker(name: int) -> None:
        turn = Turn(tmp_path / "turn", patience=30)
        for _ in range(30):
            with turn:
                held.append(name)
                time.sleep(0.0005)
                most.append(len(held))
                held.remove(name)
        done.append(name)

    threads = [Thread(target=worker, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 90 and sorted(done) == [0, 1, 2]
    assert (tmp_path / "turn").stat().st_mode & 0o777 == 0o600


def test_an_error_inside_ends_the_turn(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Turn(tmp_path / "turn"):
        1 / 0  # noqa: B018
    other = Turn(tmp_path / "turn", patience=0)
    assert other._free()


def test_a_holder_that_hangs_is_waited_for_once_and_one_that_dies_is_not(tmp_path: Path) -> None:
    file = tmp_path / "turn"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        turn, waits = Turn(file, patience=0.3), []
        for _ in range(3):
            start = time.monotonic()
            with turn:
                waits.append(time.monotonic() - start)
        assert waits[0] >= 0.3 and max(waits[1:]) < 0.3
        assert not Turn(file)._free(), "leaving it freed another's turn"
    finally:
        holder.kill()
        holder.wait()
    with turn:
        assert not Turn(file)._free()
    assert Turn(file)._free()


def test_the_file_must_be_none_of_somebody_else_s(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Turn(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


class Notes:
    """Notes when the network is entered and left."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> None:
        self.events.append("takes")

    def __exit__(self, *error: Any) -> None:
        self.events.append("gives")


@pytest.mark.parametrize("engine", [True, False])
def test_a_forward_is_a_turn(checkpoint: Path, engine: bool) -> None:
    notes = Notes()
    policy = Gr00tPolicy(checkpoint, engine=engine, turn=notes)
    rows = rows_of(policy, observation(policy, LIBERO, seed=1), observation(policy, LIBERO, seed=2))
    assert notes.events == [], "preparing takes no turn"
    alone = predict(policy, rows[:1])[0]
    assert notes.events == ["takes", "gives"]
    again = predict(policy, rows[:1])[0]
    assert notes.events == ["takes", "gives"] * 2
    assert all(np.array_equal(alone[key], again[key]) for key in alone)

    def fail(*_: Any) -> None:
        raise RuntimeError("a broken network")

    network = policy.engine.fused if policy.engine else policy.model
    network.begin = network.forward = fail  # type: ignore[union-attr, method-assign, assignment]
    with pytest.raises(RuntimeError, match="a broken network"):
        predict(policy, rows)
    assert notes.events == ["takes", "gives"] * 3
