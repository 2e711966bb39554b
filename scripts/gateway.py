"""Robots connect with what they already have: OpenPI's WebSocket client, GR00T's ZeroMQ PolicyClient, or plain HTTP.

Every robot's observation joins TorchServe's waves. `upstream` talks to TorchServe, `translate` between the terms of
robots and checkpoint, `zmq` is GR00T's protocol; OpenPI's and HTTP are here. Runs beside TorchServe, on its machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import resource
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zmq
from aiohttp import ClientError, WSCloseCode, WSMessage, WSMsgType, web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Total

from handler.problem import Problem
from handler.wire import MSGPACK, Part, Request, decode, encode_problem, header_deadline
from scripts.gateway_keys import Keys, new_key
from scripts.gateway_translate import (
    Episode,
    Translation,
    deadline_of,
    for_openpi,
    in_words,
    outline_of,
    pack,
    problem_of,
    unpack,
)
from scripts.gateway_upstream import Reply, Upstream
from scripts.package import ROOT
from scripts.serve import Server, StartError, notify, pick_ports

logger = logging.getLogger("gateway")

PAGE = ROOT / "scripts" / "status.html"
PASSED_ON = ("content-type", "accept", "x-request-timeout-ms", "x-request-start", "x-request-id")
ANSWERED = ("Content-Type", "Retry-After", "X-Request-Id")
SHOWN = 60.0  # s that the status page's rates cover
BODY_SECONDS = 30  # for an HTTP body to arrive
START_SECONDS = 60.0  # for a gateway to find TorchServe
LEAVE_SECONDS = 5.0  # for the last answers to leave, after `drain_s`
STOP_SECONDS = 20.0  # for a gateway to end, on top of its `drain_s`
IDLE_SECONDS = 300.0  # after which a robot without a connection of its own is forgotten


@dataclass
class Robot:
    """One connection.

    key: whose key it came with; protocol: openpi, gr00t or http; leaves: whether that says when a robot does; episode:
    see `Episode`; session: the robot's own name for it.
    """

    number: int
    key: str
    protocol: str
    leaves: bool = True
    episode: Episode = field(default_factory=Episode)
    session: Any = None
    since: float = field(default_factory=time.monotonic)
    requests: int = 0
    failures: int = 0
    last: float = field(default_factory=time.monotonic)
    last_ms: float = 0.0
    busy: int = 0  # messages without their answer


class Stats:
    """What has happened, for Prometheus and for the status page."""

    def __init__(self, gateway: Gateway) -> None:
        self.registry = CollectorRegistry()
        self.requests = Total("gateway_requests", "Answers to robots", ["protocol", "status"], registry=self.registry)
        self.seconds = Histogram(
            "gateway_request_seconds", "From a robot's message to its answer", ["protocol"], registry=self.registry,
            buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        )  # fmt: skip
        for name, text, value in (
            ("gateway_robots", "Connected robots", lambda: len(gateway.robots)),
            ("gateway_waiting", "Requests that wait for their turn", gateway.upstream.turnstile.waits),
            ("gateway_in_flight", "Requests at TorchServe", lambda: gateway.upstream.turnstile.inside),
            ("gateway_pending_bytes", "Messages that wait for their answer", lambda: gateway.held.total()),
            ("gateway_ready_workers", "TorchServe's workers that are READY", lambda: gateway.upstream.workers),
            ("gateway_retries", "Attempts after a worker's death or a restart", lambda: gateway.upstream.retries),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)
        self.recent: deque[tuple[float, float, int]] = deque(maxlen=100_000)  # end, ms, requests of its wave
        self.failures: Counter[str] = Counter()
        self.last_failures: deque[dict[str, Any]] = deque(maxlen=20)

    def answered(self, robot: Robot, seconds: float, wave: int) -> None:
        """Counts an answer with actions; wave: how many requests shared its wave, 0 when that is not known."""
        self._count(robot, 200)
        robot.last_ms = seconds * 1e3
        self.seconds.labels(robot.protocol).observe(seconds)
        self.recent.append((robot.last, robot.last_ms, wave))

    def failed(self, robot: Robot, problem: Problem) -> None:
        """Counts an answer without actions."""
        self._count(robot, problem.status)
        robot.failures += 1
        self.failures[f"{problem.status} {problem.title}"] += 1
        where = (problem.pointer or "")[:200]
        self.last_failures.append({"time": time.time(), "robot": robot.number, "status": problem.status,
                                   "pointer": where, "detail": problem.detail[:300]})  # fmt: skip

    def _count(self, robot: Robot, status: int) -> None:
        robot.requests += 1
        robot.last = time.monotonic()
        self.requests.labels(robot.protocol, str(status)).inc()


class Gateway:
    """The robots that are connected, and the way from each to TorchServe and back.

    settings: as in config/gateway.yaml.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.keys = None if settings["keys"] in ("torchserve", "off") else Keys(settings["keys"])
        self.tls = tls_context(settings)
        self.upstream = Upstream(settings["inference_url"], settings["management_url"], Path(settings["key_file"]),
                                 renew=self.keys is not None, patience=settings["patience_s"])  # fmt: skip
        self.robots: dict[int, Robot] = {}
        self.numbers = itertools.count(1)
        self.sockets: dict[web.WebSocketResponse, Robot] = {}
        self.closing = False
        self.held: Counter[str] = Counter()  # bytes of messages without their answer, by key
        self.stats = Stats(self)
        self.kill: Callable[[], object] = lambda: None  # ends the gateway

    def translation(self) -> Translation:
        """By the contract that TorchServe has now. Raises ValueError when the settings do not fit it."""
        s = self.settings
        return Translation(self.upstream.contract, s["embodiment_tag"], s["key_map"], s["steps_per_request"])

    def who(self, key: str | None) -> str | None:
        """Whose key this is; None when it opens nothing."""
        if self.settings["keys"] == "off":
            return "anyone"
        if self.keys is not None:
            return self.keys.name_of(key or "")
        if not self.upstream.guarded:
            return "anyone"
        own, given = self.upstream.key(), (key or "").encode("utf-8", "surrogateescape")
        return "torchserve" if own is not None and hmac.compare_digest(own.encode(), given) else None

    def admit(self, key: str, protocol: str, leaves: bool = True) -> Robot:
        """A robot that has come; whoever says that it leaves, `robots` loses it then, the others after a while.

        Raises Problem 503 when there are too many.
        """
        if len(self.robots) >= self.settings["max_connections"]:
            now = time.monotonic()
            for robot in list(self.robots.values()):
                if not robot.leaves and not robot.busy and now - robot.last > IDLE_SECONDS:
                    del self.robots[robot.number]
        if len(self.robots) >= self.settings["max_connections"]:
            raise Problem(503, f"{len(self.robots)} robots are connected, and no more are taken", retry_after=10)
        robot = Robot(next(self.numbers), key, protocol, leaves)
        self.robots[robot.number] = robot
        return robot

    @contextlib.contextmanager
    def connection(self, key: str, protocol: str) -> Iterator[Robot]:
        """A robot's time here. Raises Problem 503 when there are too many."""
        robot = self.admit(key, protocol)
        try:
            yield robot
        finally:
            del self.robots[robot.number]

    @contextlib.contextmanager
    def room(self, robot: Robot, size: int) -> Iterator[None]:
        """Room for a robot's message of so many bytes until it is answered.

        Raises Problem 503 when there is none, or when this would be more than half of all for its key.
        """
        most = self.settings["max_pending_mb"] << 20
        if self.held.total() + size > most or self.held[robot.key] + size > most // 2:
            raise Problem(503, "too many messages wait for their answer; send this one again", retry_after=1)
        self.held[robot.key] += size
        robot.busy += 1
        try:
            yield
        finally:
            self.held[robot.key] -= size
            robot.busy -= 1

    async def act(self, robot: Robot, sent: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The actions, in modality order, and info for a robot's observation, decoded by `handler.wire`.

        Raises Problem.
        """
        translation = self.translation()
        fields, history = translation.fields(sent, robot.episode)
        try:
            answer = await self.ask(robot, pack(fields), deadline_of(fields.get("options")))
        except Problem as problem:
            raise translation.robots_own(problem) from None
        robot.episode.history.update(history)
        return answer

    async def ask(
        self, robot: Robot, body: bytes, deadline: float | None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The same for a message in the server's terms. deadline: Unix seconds. Raises Problem, in those terms."""
        began = time.monotonic()
        reply = await self.upstream.predict(robot.key, robot.number, {"Content-Type": MSGPACK}, body, deadline)
        if reply.status != 200:
            raise problem_of(reply)
        actions, info = unpack(reply.body)
        if info["checkpoint"] != self.upstream.contract["checkpoint"]:  # it was swapped
            with contextlib.suppress(ClientError, asyncio.TimeoutError):  # the next look asks again
                await self.upstream.read_contract()
        self.stats.answered(robot, time.monotonic() - began, info["wave_requests"])
        return actions, info

    @contextlib.contextmanager
    def answering(self, robot: Robot) -> Iterator[None]:
        """Whatever is raised inside becomes a Problem, and is counted: a robot gets its answer in any case."""
        try:
            yield
        except Problem as problem:
            self.stats.failed(robot, problem)
            raise
        except Exception:  # a defect of ours
            logger.exception("a message could not be answered")
            defect = Problem(500, "the gateway could not answer this message; its log says more")
            self.stats.failed(robot, defect)
            raise defect from None

    # ------------------------------------------------------------------------------------------------------- OpenPI

    def metadata(self) -> dict[str, Any]:
        """What an OpenPI client is told when it connects."""
        translation = self.translation()
        tag, contract = translation.default()
        return {
            "action_horizon": contract["horizon"],
            "action_keys": list(contract["action"]),
            "embodiment_tag": tag,
            "image_resolution": self.settings["image_resolution"],
            "supported_embodiments": list(translation.embodiments),
            "needs_session_id": False,
        }

    async def openpi(self, request: web.Request) -> web.StreamResponse:
        """An OpenPI client: metadata when it connects, then an observation in and actions out, again and again."""
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return web.Response(status=426, text="This is an OpenPI WebSocket; robots connect here.\n")
        name = self.who(_bearer(request))
        if name is None:
            return web.Response(status=401, text="Expected the header Authorization: Api-Key KEY with a valid key.\n")
        if "Origin" in request.headers:  # some web page in somebody's browser
            return web.Response(status=403, text="This WebSocket is for robots, not for web pages.\n")
        socket = web.WebSocketResponse(
            compress=False, max_msg_size=self.settings["max_message_mb"] << 20, heartbeat=30, timeout=5
        )
        try:
            with self.connection(name, "openpi") as robot:
                await socket.prepare(request)
                self.sockets[socket] = robot
                await socket.send_bytes(pack(self.metadata()))
                # Read in a task of its own: pings are answered, and a hang-up is noticed, while actions are computed.
                messages: asyncio.Queue[WSMessage] = asyncio.Queue(maxsize=1)
                reader = asyncio.create_task(_read(socket, messages))
                talk = asyncio.create_task(self._talk(socket, robot, messages))
                try:
                    await asyncio.wait((reader, talk), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (reader, talk):
                        task.cancel()
                    for outcome in await asyncio.gather(reader, talk, return_exceptions=True):
                        if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
                            raise outcome
        except Problem as problem:
            return _answer(problem)
        finally:
            self.sockets.pop(socket, None)
        await socket.close(code=WSCloseCode.GOING_AWAY if self.closing else WSCloseCode.OK)
        return socket

    async def close(self, _: web.Application) -> None:
        """Lets who is being answered have the answer, for `drain_s`, and closes the other connections."""
        self.closing = True
        until, over = time.monotonic() + self.settings["drain_s"], False
        while not over and (self.sockets or any(robot.busy for robot in self.robots.values())):
            over = time.monotonic() >= until
            leave = [socket for socket, robot in self.sockets.items() if over or not robot.busy]
            await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in leave))
            await asyncio.sleep(0.05)

    async def _talk(self, socket: web.WebSocketResponse, robot: Robot, messages: asyncio.Queue[WSMessage]) -> None:
        total_ms = None
        while True:
            message = await messages.get()
            began = time.perf_counter()
            try:
                with self.answering(robot), self.room(robot, len(message.data)):
                    answer = await self._openpi_answer(robot, message, total_ms)
            except Problem as problem:
                answer = in_words(problem)
            if isinstance(answer, str):  # a text is an error to an OpenPI client, or "reset successful"
                await socket.send_str(answer)
            else:
                await socket.send_bytes(answer)
            total_ms = (time.perf_counter() - began) * 1e3
            if self.closing:
                return

    async def _openpi_answer(self, robot: Robot, message: WSMessage, total_ms: float | None) -> bytes | str:
        if message.type != WSMsgType.BINARY:
            raise Problem(400, "Expected a binary message with msgpack; came text.")
        outline = outline_of(message.data)
        body = self.translation().passes(outline) if outline else None
        endpoint: Any = "infer"
        session: Any = None
        if outline is not None and body is not None:
            session, asking = outline.session, partial(self.ask, robot, body, deadline_of(outline.options))
        else:
            sent, _ = decode(Request({"Content-Type": MSGPACK}, [Part("body", "", message.data)]))
            endpoint, session = sent.pop("endpoint", "infer"), sent.pop("session_id", None)
            asking = partial(self.act, robot, sent)
        if not np.array_equal(session, robot.session):  # a text, or an array of one
            robot.episode.reset()
            robot.session = session
        if endpoint == "reset":
            robot.episode.reset()
            return "reset successful"
        if endpoint != "infer":
            raise Problem(404, "endpoint must be infer or reset", "/endpoint")
        began = time.perf_counter()
        actions, info = await asking()
        timing = {"infer_ms": (time.perf_counter() - began) * 1e3, "forward_ms": info["inference_ms"]}
        if total_ms is not None:
            timing["prev_total_ms"] = total_ms
        return pack({**for_openpi(actions), "server_timing": timing, "info": info})

    # --------------------------------------------------------------------------------------------------------- HTTP

    async def predictions(self, request: web.Request) -> web.Response:
        """TorchServe's own path, with the gateway's keys and turns: body and answer are passed on as they are."""
        name = self.who(_bearer(request))
        if name is None:
            return web.json_response({"code": 401, "type": "InvalidKeyException", "message": "Expected the header "
                                      "Authorization: Bearer KEY with a valid key."}, status=401)  # fmt: skip
        began, most = time.monotonic(), self.settings["max_message_mb"] << 20
        try:
            with self.connection(name, "http") as robot, self.answering(robot):
                reply = await self._pass_on(request, robot, most)
                if reply.status == 200:
                    self.stats.answered(robot, time.monotonic() - began, 0)
                else:
                    self.stats.failed(robot, problem_of(reply))
        except Problem as problem:
            return _answer(problem)
        kept = {key: reply.headers[key] for key in ANSWERED if key in reply.headers}
        if reply.status == 503:
            kept.setdefault("Retry-After", "1")  # TorchServe's own has none
        return web.Response(status=reply.status, body=reply.body, headers=kept)

    async def _pass_on(self, request: web.Request, robot: Robot, most: int) -> Reply:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Problem(415, "Expected a body without compression. JPEG or PNG files make bodies small.")
        if (request.content_length or 0) > most:
            raise Problem(413, f"a body of {request.content_length} bytes; at most {most} are taken")
        headers = {key: request.headers[key] for key in PASSED_ON if key in request.headers}
        headers.setdefault("x-request-start", f"t={time.time():.3f}")
        try:
            body = await asyncio.wait_for(request.read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Problem(400, f"the body did not arrive within {BODY_SECONDS} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise Problem(413, f"the body is larger than {most} bytes") from None
        with self.room(robot, len(body)):
            deadline = header_deadline(Request(headers, []))
            return await self.upstream.predict(robot.key, robot.number, headers, body, deadline)

    # ------------------------------------------------------------------------------------------------- for its owner

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        now, upstream = time.monotonic(), self.upstream
        recent = [entry for entry in self.stats.recent if now - entry[0] < SHOWN]
        times = sorted(entry[1] for entry in recent) or [0.0]
        waves = Counter(entry[2] for entry in recent if entry[2])
        return {
            "checkpoint": upstream.contract.get("checkpoint"),
            "workers_ready": upstream.workers,
            "robots": [
                {"number": r.number, "key": r.key, "protocol": r.protocol, "connected_s": round(now - r.since),
                 "requests": r.requests, "failures": r.failures, "idle_s": round(now - r.last, 1),
                 "last_ms": round(r.last_ms, 1)}
                for r in self.robots.values()
            ],
            "requests_per_s": round(len(recent) / SHOWN, 2),
            "p50_ms": round(times[len(times) // 2], 1),
            "p99_ms": round(times[int(0.99 * (len(times) - 1))], 1),
            "requests_by_wave_size": {str(size): waves[size] for size in sorted(waves)},
            "waiting": upstream.turnstile.waits(),
            "in_flight": upstream.turnstile.inside,
            "retries": upstream.retries,
            "failures": dict(self.stats.failures),
            "last_failures": list(self.stats.last_failures),
        }  # fmt: skip

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(encoding="utf-8"), content_type="text/html")

    async def status_json(self, _: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.stats.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _read(socket: web.WebSocketResponse, messages: asyncio.Queue[WSMessage]) -> None:
    async for message in socket:
        if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
            await messages.put(message)


def _bearer(request: web.Request) -> str | None:
    """The key of `Authorization: Api-Key KEY` (OpenPI) or `Bearer KEY` (TorchServe)."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() in ("api-key", "bearer") else None


def _answer(problem: Problem) -> web.Response:
    content_type, body = encode_problem(problem)
    headers = {"Retry-After": str(problem.retry_after)} if problem.retry_after is not None else {}
    return web.Response(status=problem.status, body=body, content_type=content_type, headers=headers)


# ---------------------------------------------------------------------------------------------------------- settings


def read_settings(overlays: list[Path]) -> dict[str, Any]:
    """config/gateway.yaml with overlays merged over it. Raises ValueError: what is wrong, by its name."""
    own = yaml.safe_load((ROOT / "config" / "gateway.yaml").read_text(encoding="utf-8"))
    settings = dict(own)
    for overlay in overlays:
        given = yaml.safe_load(overlay.read_text(encoding="utf-8")) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{overlay.name}: expected a mapping of settings")
        for name, value in given.items():
            if name not in own:
                raise ValueError(f"{overlay.name}: unknown setting {name!r}; there are {', '.join(own)}")
            if name == "keys" and value is False:
                value = "off"  # what YAML makes of it
            seconds = name.endswith("_s") and isinstance(value, float)
            if own[name] is not None and type(value) is not type(own[name]) and not seconds:
                raise ValueError(f"{overlay.name}: {name} must be like {own[name]!r}, got {value!r}")
            settings[name] = value
    for name, target in settings["key_map"].items():
        targets = target if isinstance(target, list) else [target]
        if not targets or not all(isinstance(t, str) for t in targets):
            raise ValueError(f"key_map: {name!r} must go to a key or a list of keys, got {target!r}")
        if isinstance(target, list) and not all(t.startswith("state.") for t in targets):
            raise ValueError(f"key_map: {name!r} can be cut into keys of the form state.KEY only")
    for name in ("tls_cert", "tls_key", "zmq_host", "embodiment_tag"):
        if not isinstance(settings[name], str | None):
            raise ValueError(f"{name} must be a text, got {settings[name]!r}")
    mapped = [t for target in settings["key_map"].values() for t in (target if isinstance(target, list) else [target])]
    if twice := [target for target, count in Counter(mapped).items() if count > 1]:
        raise ValueError(f"key_map: {', '.join(twice)} stands for more than one key")
    if (settings["tls_cert"] is None) != (settings["tls_key"] is None):
        raise ValueError("tls_cert and tls_key go together; give both or none")
    if settings["zmq_host"] is None:  # ZeroMQ's GR00T clients know no TLS
        settings["zmq_host"] = settings["host"] if settings["tls_cert"] is None else "127.0.0.1"
    if settings["keys"] == "off" and not {settings["host"], settings["zmq_host"]} <= {"127.0.0.1", "localhost"}:
        raise ValueError("keys: off is for this machine alone; give keys, or host: 127.0.0.1")
    for name in ("steps_per_request", "max_connections", "max_message_mb", "max_pending_mb", "patience_s"):
        if settings[name] < 1:
            raise ValueError(f"{name} must be 1 or more")
    return settings


def tls_context(settings: dict[str, Any]) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the certificate of the settings; None without one. Raises ValueError: it cannot be used."""
    if settings["tls_cert"] is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: dict[str, Any]) -> None:
    """The certificate as its files are now, for connections from now on. Raises ValueError: it cannot be used."""
    try:
        context.load_cert_chain(settings["tls_cert"], settings["tls_key"], password="")  # never ask the terminal
    except OSError as error:
        raise ValueError(f"tls_cert and tls_key cannot be used: {error.strerror or error}; they must be PEM files, the "
                         "key without a passphrase") from None  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- run


@contextlib.asynccontextmanager
async def serving(settings: dict[str, Any]) -> AsyncIterator[Gateway]:
    """A gateway that takes robots meanwhile."""
    from scripts.gateway_zmq import serve_zmq  # it needs Gateway

    gateway = Gateway(settings)
    async with gateway.upstream.connected(), contextlib.AsyncExitStack() as stack:
        gateway.translation()  # whether the settings fit the checkpoint
        robots = web.Application(client_max_size=settings["max_message_mb"] << 20)
        robots.add_routes([web.get("/", gateway.openpi), web.get("/healthz", _healthy),
                           web.post("/predictions/gr00t", gateway.predictions)])  # fmt: skip
        robots.on_shutdown.append(gateway.close)
        if settings["admin_port"]:
            admin = web.Application()
            admin.add_routes([web.get("/", gateway.page), web.get("/status.json", gateway.status_json),
                              web.get("/metrics", gateway.metrics)])  # fmt: skip
            await stack.enter_async_context(_listening(admin, "127.0.0.1", settings["admin_port"]))
        if settings["zmq_port"]:
            await stack.enter_async_context(serve_zmq(gateway))
        await stack.enter_async_context(_listening(robots, settings["host"], settings["port"], gateway.tls))
        yield gateway


@contextlib.asynccontextmanager
async def _listening(
    app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=LEAVE_SECONDS, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="OK\n")


class GatewayProcess:
    """`./scripts/gateway` on free ports, in front of a server: `with GatewayProcess(server, folder) as gateway: ...`.

    folder: for its settings and its log. settings: over config/gateway.yaml.
    """

    def __init__(self, server: Server, folder: Path, **settings: Any) -> None:
        self.port, self.zmq_port, self.admin_port = pick_ports(0)[:3]
        self.url = f"{'wss' if settings.get('tls_cert') else 'ws'}://127.0.0.1:{self.port}"
        self.log_path = folder / "gateway.log"
        self._config = folder / "gateway.yaml"
        self._settings = {
            "inference_url": server.inference_url, "management_url": server.management_url,
            "key_file": str(server.key_file), "port": self.port, "zmq_port": self.zmq_port,
            "admin_port": self.admin_port, **settings,
        }  # fmt: skip

    def __enter__(self) -> GatewayProcess:
        self._config.parent.mkdir(parents=True, exist_ok=True)
        self._config.write_text(yaml.safe_dump(self._settings), encoding="utf-8")
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--config", str(self._config)],
                stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while "Robots: " not in self.log_path.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise StartError(f"the gateway did not start: {self.log_path.read_text()[-500:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Lets it end as on Ctrl-C, and returns its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS + self._settings.get("drain_s", 20))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, action="append", default=[], help="YAML over config/gateway.yaml")
    parser.add_argument("--new-key", metavar="NAME", help="make a key for NAME in the file that `keys` names, and end")
    parser.add_argument("--days", type=float, default=90, help="how long that key opens (default: %(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = read_settings(args.config)
        if args.new_key is not None:
            if settings["keys"] in ("torchserve", "off") or settings["keys"].startswith("env:"):
                raise ValueError("keys must name a file first, in a --config FILE")
            print(new_key(Path(settings["keys"]), args.new_key, args.days))
            return 0
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a robot takes two while it is answered
        asyncio.run(_serve(settings))
    except (ValueError, OSError, zmq.ZMQError) as error:  # such as a port in use
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: dict[str, Any]) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with serving(settings) as gateway:
            gateway.kill = task.cancel
            s, secure = settings, "s" if gateway.tls else ""
            at = f"{s['host']}:{s['port']}"
            gr00t = f", tcp://{s['zmq_host']}:{s['zmq_port']} (GR00T)" if s["zmq_port"] else ""
            print(f"Robots: ws{secure}://{at} (OpenPI), http{secure}://{at}/predictions/gr00t{gr00t}", flush=True)
            if s["admin_port"]:
                print(f"Status: http://127.0.0.1:{s['admin_port']}/ and /metrics", flush=True)
            if gateway.tls is not None:
                loop.add_signal_handler(signal.SIGHUP, load_certificate, gateway.tls, settings)
            notify("READY=1")
            try:
                await asyncio.Event().wait()
            finally:
                notify("STOPPING=1")


if __name__ == "__main__":
    sys.exit(main())
