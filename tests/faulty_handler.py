"""The handler of `test_faults.py`: instructions that start with "fault" make the forward fail in known ways.

"fault SIGNAL": the worker kills itself; "fault hang": it sleeps; "fault row", "batch", "once": the forward raises with
this row, with any other beside it, the first time; "fault memory" and "fault context": as a GPU out of memory, or lost.
"fault full" and "fault assert" are the real ones, on a GPU: all its memory taken, a device-side assert.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import torch
from ts.context import Context

from handler.gr00t_handler import Gr00tHandler
from handler.observation import Observation
from handler.policy import Actions, Row
from handler.problem import Problem


def fill(device: torch.device) -> list[torch.Tensor]:
    """All the memory that the device has left."""
    taken: list[torch.Tensor] = []
    for size in (1 << 30, 1 << 26, 1 << 21):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
    return taken


class FaultyHandler(Gr00tHandler):
    def initialize(self, context: Context) -> None:
        super().initialize(context)
        policy = self.policy
        real_prepare, real_predict = policy.prepare, policy.predict
        faults: dict[int, tuple[Row, str]] = {}  # by the row's id; holding the row, so that no other gets its id

        def prepare(observation: Observation) -> list[Row]:
            rows = real_prepare(observation)
            for row, instruction in zip(rows, observation.instructions, strict=True):
                if instruction.startswith("fault"):
                    faults[id(row)] = (row, instruction)
            return rows

        def predict(rows: Sequence[Row]) -> list[Actions | Problem]:
            words = {faults[id(row)][1] for row in rows if id(row) in faults}
            for word in words:
                if word.startswith("fault SIG"):
                    os.kill(os.getpid(), signal.Signals[word.removeprefix("fault ")])
            if "fault hang" in words:
                time.sleep(600)
            if "fault batch" in words and len(rows) > 1:
                raise ValueError("only alone")
            if "fault once" in words:
                for row in rows:
                    faults.pop(id(row), None)
                raise ValueError("only the first time")
            if "fault row" in words:
                raise ValueError("this row cannot be computed")
            if "fault memory" in words and len(rows) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            if "fault context" in words:
                policy.lost = lambda: True  # type: ignore[method-assign]
                raise RuntimeError("CUDA error: device-side assert triggered (simulated)")
            if "fault assert" in words:
                torch.zeros(4, device=policy.device)[torch.tensor([99], device=policy.device)]
            taken = fill(policy.device) if "fault full" in words else []
            try:
                return real_predict(rows)
            finally:
                taken.clear()

        policy.prepare, policy.predict = prepare, predict  # type: ignore[method-assign]
