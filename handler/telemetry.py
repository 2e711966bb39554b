"""What a wave did, told twice: as metrics on TorchServe's metrics port and as one line of JSON in its model log.

Metrics go by TorchServe's custom metrics: a line of this process's output each, which TorchServe adds up. So there are
few, once a wave, under names that config/metrics.yaml lists, and labels take values from short fixed lists. A thread
tells it once the replies have left: nobody waits for it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from ts.metrics.metric_type_enum import MetricTypes

from handler.policy import Gr00tPolicy
from handler.problem import REASONS, Problem
from handler.wave import Slot

logger = logging.getLogger(__name__)

SIZES = (*range(9), 12, 16, 24, 32, 48, 64, 96, 128)  # the values of a label that counts something
FIELDS = {"video": "video", "images": "video", "state": "state", "language": "language", "prompt": "language",
          "options": "options"}  # fmt: skip
MAX_POINTER = 200  # characters of a pointer in the log; the reply has all of it


def size_label(count: int) -> str:
    """The smallest of SIZES that holds `count`, or "more"."""
    return next((str(size) for size in SIZES if size >= count), "more")


def reason(problem: Problem | None) -> str:
    """Why a request failed, in one of a few fixed words; for 422 it is the part of the observation."""
    if problem is None:
        return "ok"
    if problem.status != 422:
        return problem.reason
    first = re.match(r"/([a-z]+)", problem.pointer or "")
    return FIELDS.get(first[1] if first else "", "other")


class Telemetry:
    """Accounts of one worker. `stage` around the three steps of a wave, then `wave`, and `tell` after its replies left.

    Args:
        metrics: TorchServe's metrics cache, `context.metrics`.
        policy: warmed up: what it did before does not count.
    """

    def __init__(self, metrics: Any, policy: Gr00tPolicy) -> None:
        self.metrics, self.policy = metrics, policy
        self.seconds: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="telemetry")
        self._untold: tuple[Any, ...] | None = None  # the arguments of `_tell`
        self._told: Future[None] | None = None
        self.work = self._work()  # what has been counted of it
        self._add("gr00t_worker_starts_total", 1)
        # A counter that begins at 0 has a rate from its first event on.
        for name in ("engine_captures", "groups"):
            self._add(f"gr00t_{name}_total", 0)
        for name, kind in (("rows", "real"), ("rows", "padding"), ("tokens", "real"), ("tokens", "padding")):
            self._add(f"gr00t_{name}_total", 0, kind)
        for status, why in [(200, "ok"), *((422, field) for field in dict.fromkeys([*FIELDS.values(), "other"])),
                            *((status, why) for status, words in REASONS.items() for why in words)]:  # fmt: skip
            self._add("gr00t_requests_total", 0, str(status), why)
        dtype, engine = str(policy.dtype).removeprefix("torch."), "fused" if policy.engine else "plain"
        reproducible = str(policy.reproducible).lower()
        self._set("gr00t_model_info", 1, policy.checkpoint, dtype, policy.device.type, engine, reproducible)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one step of the wave."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)

    def wave(self, slots: Sequence[Slot]) -> None:
        """Keeps a wave that has its replies, and will not change any more, until it is told."""
        self.flush()  # of a wave whose telling takes longer than the next one: what is kept stays bounded
        self._untold = slots, self.seconds, self._work()
        self.seconds = {}

    def tell(self) -> None:
        """Begins to count and log the last wave."""
        if self._untold is not None:
            self._told = self._thread.submit(self._tell, *self._untold)
            self._untold = None

    def flush(self) -> None:
        """Returns when every wave has been told."""
        self.tell()
        if self._told is not None:
            self._told.result()
            self._told = None

    def _tell(self, slots: Sequence[Slot], seconds: dict[str, float], work: Counter[tuple[str, str]]) -> None:
        """Never raises: no later reply may depend on it."""
        try:
            self._count(slots, seconds, work)
            logger.info(json.dumps(self._line(slots, seconds), separators=(",", ":")))
        except Exception:
            logger.exception("a wave could not be accounted for")

    def _line(self, slots: Sequence[Slot], seconds: dict[str, float]) -> dict[str, Any]:
        """The log's line. Of what clients sent it has their request ids and the pointers, nothing else."""
        failures = []
        for slot in slots:
            if slot.problem is not None:
                failure = {"id": slot.request_id, "status": slot.problem.status, "reason": reason(slot.problem)}
                if slot.problem.pointer is not None:
                    failure["pointer"] = slot.problem.pointer[:MAX_POINTER]
                failures.append(failure)
        times = {f"{name}_ms": round(taken * 1e3, 3) for name, taken in seconds.items()}
        return {
            "wave": [slot.request_id for slot in slots], "rows": self._rows(slots), "groups": self._groups(slots),
            **times, "failures": failures,
        }  # fmt: skip

    def _count(self, slots: Sequence[Slot], seconds: dict[str, float], work: Counter[tuple[str, str]]) -> None:
        outcomes = Counter((slot.problem.status if slot.problem else 200, reason(slot.problem)) for slot in slots)
        for (status, why), count in outcomes.items():
            self._add("gr00t_requests_total", count, str(status), why)
        self._add("gr00t_waves_total", 1, size_label(len(slots)))
        self._add("gr00t_waves_by_rows_total", 1, size_label(self._rows(slots)))
        if groups := self._groups(slots):
            self._add("gr00t_groups_total", groups)
        for (name, label), count in (work - self.work).items():
            self._add(f"gr00t_{name}_total", count, *([label] if label else []))
        self.work = work
        for name, taken in seconds.items():
            self.metrics.get_metric("gr00t_stage_seconds", MetricTypes.HISTOGRAM).add_or_update(taken, [name])
        if self.policy.device.type == "cuda":
            device = str(self.policy.device.index)
            self._set("gr00t_gpu_memory_allocated_bytes", torch.cuda.memory_allocated(self.policy.device), device)
            self._set("gr00t_gpu_memory_reserved_bytes", torch.cuda.memory_reserved(self.policy.device), device)

    def _work(self) -> Counter[tuple[str, str]]:
        """What the network has done so far, by metric and label."""
        work = Counter({("engine_captures", ""): self.policy.engine.captures if self.policy.engine else 0})
        for (name, label), count in self.policy.work.items():
            work[name, size_label(int(label)) if name == "forwards" else label] += count
        return work

    @staticmethod
    def _rows(slots: Sequence[Slot]) -> int:
        """Rows that were answered."""
        return sum(len(slot.rows) for slot in slots if slot.problem is None)

    def _groups(self, slots: Sequence[Slot]) -> int:
        """Groups that came to a forward."""
        return len({self.policy.shape(row) for slot in slots if slot.group_rows for row in slot.rows})

    def _add(self, name: str, value: int, *labels: str) -> None:
        self.metrics.get_metric(name, MetricTypes.COUNTER).add_or_update(value, list(labels))

    def _set(self, name: str, value: int, *labels: str) -> None:
        self.metrics.get_metric(name, MetricTypes.GAUGE).add_or_update(value, list(labels))
