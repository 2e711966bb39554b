"""TorchServe as the gateway sees it: its keys, its contract, and turns in front of its queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from handler.problem import Problem
from handler.wire import PROBLEM
from scripts.package import MODEL_NAME
from scripts.ready import is_draining

logger = logging.getLogger("gateway")

PAUSE = 0.2  # s between two attempts
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
        return sum(len(turns) for connections in self.waiting.values() for turns in connections.values())

    @contextlib.asynccontextmanager
    async def turn(self, key: str, connection: int) -> AsyncIterator[None]:
        """A place inside, once it is this connection's turn."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(key, OrderedDict()).setdefault(connection, deque()).append(place)
        self._admit()
        try:
            await place
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


@dataclass(frozen=True)
class Reply:
    """TorchServe's answer to a prediction."""

    status: int
    content_type: str
    headers: dict[str, str]
    body: bytes


class Upstream:
    """One TorchServe on this machine.

    key_file: its keys; without that file it serves without. renew: whether to renew its inference key before it
    expires, which cuts off everybody else who holds it.
    """

    def __init__(self, inference_url: str, management_url: str, key_file: Path, renew: bool, patience: float) -> None:
        self.predict_url = f"{inference_url.rstrip('/')}/predictions/{MODEL_NAME}"
        self.management_url = management_url.rstrip("/")
        self.key_file, self.renew, self.patience = key_file, renew, patience
        self.turnstile = Turnstile()
        self.contract: dict[str, Any] = {}
        self.workers = 0  # READY ones
        self.retries = 0
        self._stamp = 0
        self._keys: dict[str, str] = {}
        self._renew_at = float("inf")

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
            watch = asyncio.create_task(self._watch())
            try:
                yield self
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        due = time.time() + WATCH
        while True:
            await asyncio.sleep(TOLD)
            if is_draining(self.key_file):
                if self.turnstile.width:
                    logger.info("TorchServe is being stopped: robots wait here for the next one")
                self.turnstile.width = 0
            elif time.time() >= min(due, self._renew_at):
                await self._look()
            else:
                continue
            # a server that is being stopped or has been: whether there is another
            due = time.time() + (WATCH if self.turnstile.width else PAUSE)

    def key(self, kind: str = "inference") -> str | None:
        """TorchServe's present key of a kind (inference, management, API); None when it asks for none."""
        try:
            status = self.key_file.stat()
            if status.st_mtime_ns != self._stamp:
                held = json.loads(self.key_file.read_text(encoding="utf-8"))
                self._keys = {name: entry["key"] for name, entry in held.items()}
                self._stamp = status.st_mtime_ns
                written = status.st_mtime
                self._renew_at = min(
                    written + 0.75 * (datetime.fromisoformat(str(entry["expiration time"]).replace("Z", "+00:00")
                                                             ).timestamp() - written)
                    for entry in held.values() if "expiration time" in entry
                )  # fmt: skip
        except FileNotFoundError:
            self._keys, self._renew_at = {}, float("inf")
        except (ValueError, KeyError):  # being written: the next look reads it whole
            self._stamp = 0
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
            if self.workers and not self.contract:
                self.contract = (await self._describe("?customized=true"))["customizedMetadata"]
            return True
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, IndexError) as error:
            self.workers = 0
            if self.contract:
                logger.warning("TorchServe does not answer: %s", type(error).__name__)
            return False

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
        is over or the deadline (Unix seconds) is.

        Raises:
            Problem: 503 not before patience was over, 504 not before the deadline.
        """
        until = time.time() + self.patience
        if deadline is not None:
            until = min(until, deadline)
        try:
            return await asyncio.wait_for(self._in_turn(key, connection, headers, body), until - time.time())
        except asyncio.TimeoutError:
            if deadline is not None and time.time() >= deadline:
                raise Problem(504, "this observation waited past its deadline, and nothing was computed: send a fresh "
                              "one") from None  # fmt: skip
            raise Problem(503, f"no worker answered within {self.patience:.0f} s; the server may be starting again",
                          retry_after=5) from None  # fmt: skip

    async def _in_turn(self, name: str, connection: int, headers: dict[str, str], body: bytes) -> Reply:
        async with self.turnstile.turn(name, connection):
            return await self._insist(headers, body)

    async def _insist(self, headers: dict[str, str], body: bytes) -> Reply:
        """Asks until there is an answer of a worker that lives."""
        key, failures = self.key(), 0
        while True:
            try:
                own = {"Authorization": f"Bearer {key}"} if key else {}
                async with self._http.post(self.predict_url, data=body, headers={**headers, **own}) as answer:
                    reply = Reply(answer.status, answer.content_type, dict(answer.headers), await answer.read())
                if reply.status in (400, 401) and b"InvalidKeyException" in reply.body:
                    self._stamp = 0
                    if (fresh := self.key()) == key:
                        logger.error("TorchServe refuses its own key: is %s this server's?", self.key_file.name)
                        raise Problem(503, "the gateway's own key is refused by the server; its log says more")
                    key = fresh
                    self.retries += 1
                    continue
                if reply.status == 503 and reply.content_type == PROBLEM:  # the worker's own: its accelerator failed
                    failures += 1
                    if failures > 2:
                        return reply
                elif not cut_off(reply):
                    return reply
            except aiohttp.ClientError as error:
                logger.warning("TorchServe is gone: %s", type(error).__name__)
            self.retries += 1
            await asyncio.sleep(PAUSE)
            key = self.key()


def cut_off(reply: Reply) -> bool:
    """Whether a worker's end, a full queue or the lack of workers answered, rather than a worker."""
    return reply.status == 503 or (reply.status in (500, 507) and b"Worker died." in reply.body)
