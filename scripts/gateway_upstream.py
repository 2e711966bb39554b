"""TorchServe as the gateway sees it: its keys, its contract, and turns in front of its queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import aiohttp

from handler.problem import Problem
from handler.wire import PROBLEM
from scripts.package import MODEL_NAME
from scripts.ready import is_draining

logger = logging.getLogger("gateway")

PAUSE = 0.2  # s between two attempts
WORKER_ATTEMPTS = 2  # answers of dying workers; the next one is the client's
KEY_ATTEMPTS = 10  # refusals of a key: TorchServe changes it before it writes the file
WATCH = 5.0  # s between two looks at the workers
TOLD = 0.2  # s between two looks whether the server is being stopped; scripts/drain.py waits for it
SHORT = aiohttp.ClientTimeout(total=10)


class Turnstile:
    """Lets so many requests at a time through to TorchServe, whose queue is first come, first served.

    Those that wait take turns: by key, and among the connections of a key. So whoever floods delays itself.
    """

    def __init__(self) -> None:
        self.width = 2
        self.inside = 0
        self.waiting: OrderedDict[str, OrderedDict[int, deque[asyncio.Future[None]]]] = OrderedDict()

    def waits(self) -> int:
        """How many wait."""
        turns = [turn for connections in self.waiting.values() for turn in connections.values()]
        return sum(not place.done() for places in turns for place in places)

    @contextlib.asynccontextmanager
    async def turn(self, key: str, connection: int, seconds: float | None = None) -> AsyncIterator[None]:
        """A place inside, once it is this connection's turn. Raises asyncio.TimeoutError after so many seconds."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(key, OrderedDict()).setdefault(connection, deque()).append(place)
        self._admit()
        try:
            await asyncio.wait_for(asyncio.shield(place), seconds)
            yield
        finally:
            if place.done() and not place.cancelled():
                self.inside -= 1
            place.cancel()
            self._admit()

    def _admit(self) -> None:
        while self.waiting and self.inside < self.width:
            key, connections = self.waiting.popitem(last=False)
            connection, places = connections.popitem(last=False)
            place = places.popleft()
            if places:
                connections[connection] = places
            if connections:
                self.waiting[key] = connections  # at the end: the next key first
            if not place.done():
                place.set_result(None)
                self.inside += 1


def _seconds(text: str) -> float:
    """Unix time of Java's "2026-11-30T12:00:00.123456789Z", whose nanoseconds Python 3.10 does not read."""
    return datetime.fromisoformat(text[:19] + "+00:00").timestamp()


@dataclass(frozen=True)
class Reply:
    """TorchServe's answer to a prediction."""

    status: int
    content_type: str
    headers: Mapping[str, str]  # whatever the case of a name
    body: bytes


class Upstream:
    """One TorchServe on this machine.

    key_file: its keys. Whether it asks for any is settled at the start: from then on a missing file means a TorchServe
    that is not there. renew: whether to renew its inference key before it expires, which cuts off everybody else who
    holds it.
    """

    def __init__(self, inference_url: str, management_url: str, key_file: Path, renew: bool, patience: float) -> None:
        self.predict_url = f"{inference_url.rstrip('/')}/predictions/{MODEL_NAME}"
        self.management_url = management_url.rstrip("/")
        self.key_file, self.renew, self.patience = key_file, renew, patience
        self.turnstile = Turnstile()
        self.contract: dict[str, Any] = {}
        self.guarded = True  # whether TorchServe asks for a key
        self.workers = 0  # READY ones
        self._served: object = None  # which workers and version the contract is from
        self.retries = 0
        self._stamp = 0
        self._keys: dict[str, str] = {}
        self._renew_at = inf

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Upstream]:
        """Keeps up with TorchServe meanwhile; returns when its contract is known, however long that takes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._http:
            said = False
            while not self.contract:
                if not await self._look() and not said:
                    logger.info("waiting for TorchServe at %s", self.management_url)
                    said = True
                await asyncio.sleep(0 if self.contract else 0.5)
            self.guarded = self.key() is not None
            watch = asyncio.create_task(self._watch())
            try:
                yield self
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        due = time.monotonic() + WATCH
        while True:
            await asyncio.sleep(TOLD)
            try:
                if is_draining(self.key_file):
                    if self.turnstile.width:
                        logger.info("TorchServe is being stopped: robots wait here for the next one")
                    self.turnstile.width = 0
                elif time.monotonic() >= due or (self.renew and time.time() >= self._renew_at):
                    if not await self._look():
                        await asyncio.sleep(1)
                else:
                    continue
            except Exception:  # of whatever kind: the next look may do better
                logger.exception("a look at TorchServe failed")
            # a server that is being stopped or has been: whether there is another
            due = time.monotonic() + (WATCH if self.turnstile.width else PAUSE)

    def key(self, kind: str = "inference") -> str | None:
        """TorchServe's present key of a kind (inference, management, API); None when it asks for none."""
        try:
            status = self.key_file.stat()
            if status.st_mtime_ns != self._stamp:
                held = json.loads(self.key_file.read_text(encoding="utf-8"))
                self._keys = {name: entry["key"] for name, entry in held.items()}
                ends = [_seconds(entry["expiration time"]) for entry in held.values() if "expiration time" in entry]
                self._renew_at = min((status.st_mtime + 0.75 * (end - status.st_mtime) for end in ends), default=inf)
                self._stamp = status.st_mtime_ns
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._stamp = 0  # gone, or half written: the next look reads it whole
        return self._keys.get(kind)

    def _headers(self, kind: str) -> dict[str, str]:
        key = self.key(kind)
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _look(self) -> bool:
        """Renews what expires, counts the workers and reads the contract; False when TorchServe does not answer."""
        try:
            if self.renew and time.time() >= self._renew_at:
                for kind in ("management", "inference"):
                    url = f"{self.management_url}/token?type={kind}"
                    async with self._http.get(url, headers=self._headers("API"), timeout=SHORT) as reply:
                        reply.raise_for_status()
                self._stamp = 0
                logger.info("renewed TorchServe's keys")
            model = await self._describe()
            self.workers = sum(worker["status"] == "READY" for worker in model["workers"])
            # One wave in the worker's hands, and one that forms meanwhile.
            self.turnstile.width = 2 * model["batchSize"] * max(1, self.workers)
            self.turnstile._admit()
            served = model["modelVersion"], [(worker["id"], worker["startTime"]) for worker in model["workers"]]
            if self.workers and served != self._served:
                await self.read_contract()
                self._served = served
            return True
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, KeyError, IndexError) as error:
            self.workers = 0
            if self.contract:
                logger.warning("TorchServe does not answer: %s", type(error).__name__)
            return False

    async def read_contract(self) -> None:
        """Asks a worker for the contract: the checkpoint may be another one now."""
        self.contract = (await self._describe("?customized=true"))["customizedMetadata"]

    async def _describe(self, query: str = "") -> dict[str, Any]:
        url = f"{self.management_url}/models/{MODEL_NAME}{query}"
        async with self._http.get(url, headers=self._headers("management"), timeout=SHORT) as reply:
            reply.raise_for_status()
            model: dict[str, Any] = (await reply.json())[0]
            return model

    async def predict(
        self, key: str, connection: int, headers: dict[str, str], body: bytes, deadline: float | None = None
    ) -> Reply:
        """TorchServe's answer, when it is this connection's turn.

        A policy call changes nothing, so one that a worker's death or a restart cut off is sent again, until `patience`
        is over or the deadline (Unix seconds) is. What is sent is waited for beyond the deadline: the server answers
        504 itself where it is too late.

        Raises:
            Problem: 503 not before patience was over, 504 not before the deadline.
        """
        end = time.monotonic() + self.patience
        last = end if deadline is None else min(end, time.monotonic() + deadline - time.time())
        try:
            async with self.turnstile.turn(key, connection, last - time.monotonic()):
                return await asyncio.wait_for(self._insist(headers, body, last), end - time.monotonic())
        except asyncio.TimeoutError:
            if last < end and time.monotonic() < end:
                raise Problem(504, "this observation waited past its deadline, and nothing was computed: send a fresh "
                              "one") from None  # fmt: skip
            raise Problem(503, f"no worker answered within {self.patience:.0f} s; the server may be starting again",
                          retry_after=5) from None  # fmt: skip

    async def _insist(self, headers: dict[str, str], body: bytes, last: float) -> Reply:
        """Asks until there is an answer of a worker that lives; not again after `last` (monotonic)."""
        failures = 0
        while True:
            key = self.key()
            try:
                own = {"Authorization": f"Bearer {key}"} if key else {}
                async with self._http.post(
                    self.predict_url, data=body, headers={**headers, **own}, skip_auto_headers=["Content-Type"]
                ) as answer:
                    reply = Reply(answer.status, answer.content_type, answer.headers, await answer.read())
                failed = worker_failed(reply)
                refused = reply.status in (400, 401) and b"InvalidKeyException" in reply.body
                # A worker fails, or dies: of this very observation, maybe, and each time with all its neighbours.
                failures += failed or refused
                if failures > (KEY_ATTEMPTS if refused else WORKER_ATTEMPTS):
                    if refused:
                        logger.error("TorchServe refuses its own key: is %s this server's?", self.key_file.name)
                        raise Problem(503, "the gateway's own key is refused by the server; its log says more")
                    return reply
                if not (refused or failed or reply.status == 503):
                    return reply
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("TorchServe is gone: %s", type(error).__name__)
            self.retries += 1
            if time.monotonic() + PAUSE >= last:
                raise asyncio.TimeoutError
            await asyncio.sleep(PAUSE)
            self._stamp = 0  # the keys may be others by now


def worker_failed(reply: Reply) -> bool:
    """Whether a worker died of a wave, or could not answer it: its accelerator failed, or its handler did."""
    if reply.status == 503:
        return reply.content_type == PROBLEM or b"Prediction failed" in reply.body
    return reply.status in (500, 507) and b"Worker died." in reply.body
