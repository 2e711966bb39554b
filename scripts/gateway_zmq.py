"""GR00T's own protocol: PolicyClient over ZeroMQ, msgpack with arrays as .npy.

A ROUTER socket stands where GR00T's server has a REP, so that many clients are served at once. Requests are
{"endpoint", "data", "api_token"}; the answer to get_action is [actions, info], errors are {"error": text}.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgpack
import zmq
import zmq.asyncio

from handler.problem import Problem
from handler.wire import MSGPACK, Part, Request, decode, write_gr00t
from scripts.gateway_translate import in_words, pack

if TYPE_CHECKING:
    from scripts.gateway import Gateway, Robot

logger = logging.getLogger("gateway")

PER_CLIENT = 4  # messages of a client that wait for their answer
TEXT = {*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB}  # first bytes of msgpack's texts and byte strings
FRAMES = 3  # of a message at most: the client's address, an empty one, and what it says


@contextlib.asynccontextmanager
async def serve_zmq(gateway: Gateway) -> AsyncIterator[None]:
    """Answers GR00T clients meanwhile; afterwards those that are being answered get their answer."""
    s = gateway.settings
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, s["max_message_mb"] << 20)
    socket.setsockopt(zmq.RCVHWM, PER_CLIENT)  # messages of a client that ZeroMQ keeps before they are read
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.bind(f"tcp://{s['zmq_host']}:{s['zmq_port']}")
    clients = Clients(gateway, socket)
    listener = asyncio.create_task(clients.listen())
    try:
        yield
    finally:
        listener.cancel()
        if clients.answers:
            await asyncio.wait(clients.answers, timeout=1)  # what `Gateway.close` has waited for
        socket.close()
        context.term()


class Clients:
    """Who speaks to the socket: {address and key: robot}; ZeroMQ does not say when one leaves."""

    def __init__(self, gateway: Gateway, socket: zmq.asyncio.Socket) -> None:
        self.gateway, self.socket = gateway, socket
        self.answers: set[asyncio.Task[None]] = set()  # under way
        self.robots: dict[tuple[bytes, str], Robot] = {}

    async def listen(self) -> None:
        """Takes messages for ever, each answered in a task of its own."""
        while True:
            try:
                frames = await self.socket.recv_multipart()
                await asyncio.sleep(0)  # while messages wait, receiving them never does
                while len(self.answers) >= self.gateway.settings["max_connections"]:
                    await asyncio.wait(self.answers, return_when=asyncio.FIRST_COMPLETED)
                if len(frames) > FRAMES:
                    continue
                # A REQ socket puts an empty frame between its address and its message; a DEALER may leave it out.
                answer = asyncio.create_task(self.answer(frames[:-1], frames[-1]))
                self.answers.add(answer)
                answer.add_done_callback(self.answers.discard)
            except Exception:  # of whatever kind: the next message is another one
                logger.exception("a message could not be taken")
                await asyncio.sleep(0.1)

    async def answer(self, envelope: list[bytes], message: bytes) -> None:
        """Answers one message."""
        try:
            reply = await self.reply(envelope[0], message)
        except Problem as problem:
            reply = {"error": in_words(problem)}
        except Exception:  # a defect of ours: the client still gets its answer, and others are none the wiser
            logger.exception("a message could not be answered")
            reply = {"error": "500 Internal Server Error: the gateway's log says more"}
        with contextlib.suppress(zmq.ZMQError):  # it has left
            await self.socket.send_multipart([*envelope, pack(reply, write_gr00t)])

    async def reply(self, address: bytes, message: bytes) -> Any:
        """What a message gets. Raises Problem."""
        gateway = self.gateway
        name = gateway.who(token_of(message))  # before any work for it
        if name is None:
            return {"error": "Unauthorized: Invalid API token"}
        robot = self.robots.get((address, name))
        if robot is None or robot.number not in gateway.robots:
            self.robots = {at: other for at, other in self.robots.items() if other.number in gateway.robots}
            robot = self.robots[address, name] = gateway.admit(name, "gr00t", leaves=False)
        robot.last = time.monotonic()
        if robot.busy >= PER_CLIENT:
            raise Problem(503, f"{robot.busy} messages of this client wait for their answer; send one at a time")
        with gateway.answering(robot), gateway.room(robot, len(message)):
            request, _ = decode(Request({"Content-Type": MSGPACK}, [Part("body", "", message)]))
            return await self.call(robot, request)

    async def call(self, robot: Robot, request: dict[str, Any]) -> Any:
        """The answer of an endpoint. Raises Problem."""
        gateway = self.gateway
        endpoint, data = request.get("endpoint", "get_action"), request.get("data")
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise Problem(400, "data must be a mapping", "/data")
        if endpoint == "ping":
            return {"status": "ok", "message": "Server is running"}
        if endpoint == "get_modality_config":
            return modality_config(gateway)
        if endpoint == "kill":
            if not gateway.settings["allow_kill"]:
                raise Problem(404, "kill is refused here; whoever runs the gateway can allow it (allow_kill)")
            asyncio.get_running_loop().call_later(0.2, gateway.kill)
            return {"status": "ok", "message": "The gateway ends; TorchServe goes on"}
        if endpoint == "reset":
            robot.episode.reset()
            return {}
        if endpoint != "get_action":
            raise Problem(404, "endpoint must be get_action, reset, get_modality_config or ping", "/endpoint")
        if gateway.closing:
            raise Problem(503, "the gateway is being stopped; send this observation again when it is back")
        return await _get_action(gateway, robot, data)


def token_of(message: bytes) -> str | None:
    """The api_token of a message, which is not decoded for it; None without one, or when it is no such message."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(message)))
    unpacker.feed(message)
    try:
        for _ in range(min(unpacker.read_map_header(), 8)):
            if message[unpacker.tell()] not in TEXT:
                return None
            if unpacker.unpack() in ("api_token", b"api_token"):
                token = unpacker.unpack() if message[unpacker.tell()] in TEXT else None
                return token if isinstance(token, str) else None
            unpacker.skip()
    except (msgpack.UnpackException, ValueError, IndexError):  # cut short, no mapping, no UTF-8
        return None
    return None


async def _get_action(gateway: Gateway, robot: Robot, data: dict[str, Any]) -> list[Any]:
    observation, options = data.get("observation"), data.get("options")
    if not isinstance(observation, dict):
        raise Problem(422, "observation is missing, or no mapping", "/data/observation")
    actions, info = await gateway.act(robot, {**observation, **({"options": options} if options is not None else {})})
    return [actions, info]


def modality_config(gateway: Gateway) -> dict[str, Any]:
    """GR00T's ModalityConfig of each modality, of the embodiment that observations are of when they name none."""
    _, contract = gateway.translation().default()
    keys = {
        "video": contract["video"]["keys"],
        "state": list(contract["state"]),
        "action": list(contract["action"]),
        "language": contract["language"]["keys"],
    }
    deltas = {**contract["delta_indices"], "language": [0]}
    configs = {name: {"delta_indices": deltas[name], "modality_keys": keys[name]} for name in keys}
    return {name: {"__ModalityConfig_class__": True, "as_json": config} for name, config in configs.items()}
