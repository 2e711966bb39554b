"""A wave: the requests that TorchServe hands over together. Each becomes a slot, and good slots share forwards.

A slot holds an observation or its own problem, so a bad request fails alone. Rows whose images have the same patch
grids form a group; a group runs in forwards of at most `max_rows`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from handler.observation import Observation, takes_decoding
from handler.policy import Actions, Gr00tPolicy, Row, stacked
from handler.problem import Problem
from handler.wire import ReplyForm, Request, decode, header_deadline, reply_form

logger = logging.getLogger(__name__)

class ContextLost(RuntimeError):
    """The CUDA context is beyond repair; only a new process helps."""


@dataclass
class Slot:
    """One request's place in a wave.

    Attributes:
        form: how the client wants its reply.
        observation, rows: what it asked, when it is good.
        deadline: Unix time in seconds after which nothing is computed for it, or None.
        problem: why it failed, when it did; unexpected: by a defect of ours, or of the accelerator.
        results: per row its actions, once they are there.
        group_rows: rows of the forward that answered its first row.
        preprocess_ms, inference_ms: its own decoding and checking; its forwards.
        request_id: the client's own name for it, or TorchServe's.
    """

    form: ReplyForm
    observation: Observation | None = None
    rows: list[Row] = field(default_factory=list)
    deadline: float | None = None
    problem: Problem | None = None
    unexpected: bool = False
    results: dict[int, Actions] = field(default_factory=dict)
    group_rows: int = 0
    preprocess_ms: float = 0.0
    inference_ms: float = 0.0
    request_id: str = ""

    def actions(self) -> Actions:
        """The reply's arrays: (B, horizon, width), or (horizon, width) when the request had no B."""
        assert self.observation is not None
        joined = stacked([self.results[b] for b in range(len(self.rows))])
        return joined if self.observation.batched else {key: value[0] for key, value in joined.items()}


def fill(requests: Sequence[Request], policy: Gr00tPolicy, pool: ThreadPoolExecutor | None = None) -> list[Slot]:
    """Decodes and checks requests. Never raises: what goes wrong becomes the slot's problem.

    Requests that bring image files are decoded in the pool's threads, side by side. Arrays need no thread: handing
    Python's lock from one to the other takes longer than all there is to do.
    """
    slots, others = [], []
    for request in requests:
        slot = Slot(reply_form(request), request_id=request.request_id)
        slots.append(slot)
        fields: dict[str, Any] = {}
        with _blame(slot):
            if request.headers.get("explain") == "True":  # set by TorchServe for /explanations
                raise Problem(404, "there are no explanations for this model")
            slot.deadline = header_deadline(request)
            _in_time(slot)
            fields, slot.form = decode(request)
        if slot.problem is None:
            if pool is not None and len(requests) > 1 and takes_decoding(fields):
                others.append(pool.submit(_prepare, slot, fields, policy))
            else:
                _prepare(slot, fields, policy)
    for other in others:
        other.result()
    return slots


def _prepare(slot: Slot, fields: dict[str, Any], policy: Gr00tPolicy) -> None:
    with _blame(slot):
        slot.observation = policy.check(fields)
        deadlines = [d for d in (slot.deadline, slot.observation.deadline) if d is not None]
        slot.deadline = min(deadlines, default=None)
        _in_time(slot)
        slot.rows = policy.prepare(slot.observation)
        slot.observation.video.clear()  # the rows have copies; the originals would only take memory


def _in_time(slot: Slot) -> None:
    """Raises Problem 504 when the slot's deadline is over."""
    late = time.time() - slot.deadline if slot.deadline is not None else 0.0
    if late > 0:
        raise Problem(504, f"this observation came to its wave {math.ceil(late * 1000)} ms after its deadline, so "
                      "nothing was computed: send a fresh one (and compare the clocks if it was fresh)")  # fmt: skip


@contextmanager
def _blame(slot: Slot) -> Iterator[None]:
    """What is raised inside becomes the slot's problem; the time counts as its own."""
    start = time.perf_counter()
    try:
        yield
    except Problem as problem:
        slot.problem = problem
    except Exception:
        logger.exception("a request could not be prepared")
        slot.problem = Problem(500, "this request could not be prepared; the server's log says more")
        slot.unexpected = True
    slot.preprocess_ms += (time.perf_counter() - start) * 1e3


def run(slots: Sequence[Slot], policy: Gr00tPolicy) -> None:
    """Answers every good slot: one forward per group and chunk.

    Raises:
        ContextLost: slots without an answer have a 503 problem by then.
    """
    groups: dict[Any, list[tuple[Slot, int]]] = {}
    for slot in slots:
        if slot.problem is None:
            for b, row in enumerate(slot.rows):
                groups.setdefault(policy.shape(row), []).append((slot, b))
    try:
        if any(slot.unexpected for slot in slots) and policy.lost():  # preparing uses the accelerator, too
            raise ContextLost
        for places in groups.values():
            for first in range(0, len(places), policy.rows_per_forward):
                # What was decoded and computed before took time.
                chunk = [place for place in places[first : first + policy.rows_per_forward] if _waits(place[0])]
                if chunk:
                    _answer(chunk, policy)
    except ContextLost:
        for slot in slots:
            unanswered = slot.problem is None and len(slot.results) < len(slot.rows)
            if unanswered or slot.unexpected:
                slot.problem = Problem(
                    503,
                    "the accelerator failed and the worker starts again; send the request once more",
                    retry_after=math.ceil(policy.load_seconds) + 10,  # starting Python and warming up take some, too
                )
        raise


def _waits(slot: Slot) -> bool:
    """Whether a slot still wants its forward."""
    if slot.problem is None and slot.deadline is not None:
        with _blame(slot):
            _in_time(slot)
    return slot.problem is None


def _answer(places: Sequence[tuple[Slot, int]], policy: Gr00tPolicy) -> None:
    """One forward; when it raises, its halves, until the culprit stands alone."""
    start = time.perf_counter()
    results: list[Actions | Problem] = []
    failure = None
    try:
        results = policy.predict([slot.rows[b] for slot, b in places])
    except torch.OutOfMemoryError:
        logger.warning("out of accelerator memory with %d rows", len(places))
        failure = Problem(503, "not enough accelerator memory for this row at present", retry_after=1,
                          reason="out_of_memory")  # fmt: skip
    except Exception:
        logger.exception("a forward of %d rows failed", len(places))
        failure = Problem(500, "the network failed on this observation; the server's log says more")
    # Not inside the handlers above: there the exception still holds the failed forward's tensors.
    if failure is not None and policy.lost():
        raise ContextLost
    elapsed = (time.perf_counter() - start) * 1e3
    for slot in {id(slot): slot for slot, _ in places}.values():
        slot.inference_ms += elapsed
    if failure is not None and len(places) > 1:
        middle = len(places) // 2
        _answer(places[:middle], policy)
        _answer(places[middle:], policy)
        return
    for (slot, b), result in zip(places, [failure] if failure else results, strict=True):
        if isinstance(result, Problem):
            slot.problem = slot.problem or result
        else:
            slot.results[b] = result
        slot.group_rows = slot.group_rows or len(places)
