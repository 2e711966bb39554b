"""GR00T's own protocol: PolicyClient over ZeroMQ, msgpack with arrays as .npy.

A ROUTER socket stands where GR00T's server has a REP, so that many clients are served at once. Requests are
{"endpoint", "data", "api_token"}; the answer to get_action is [actions, info], errors are {"error": text}.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from handler.problem import Problem
from handler.wire import MSGPACK, Part, Request, decode, write_gr00t
from scripts.gateway_translate import in_words

if TYPE_CHECKING:
    from scripts.gateway import Gateway, Robot

logger = logging.getLogger("gateway")

PER_CLIENT = 4  # messages of a client that wait for their answer


@contextlib.asynccontextmanager
async def serve_zmq(gateway: Gateway) -> AsyncIterator[None]:
    """Answers GR00T clients meanwhile; afterwards those that are being answered get their answer."""
    s = gateway.settings
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, s["max_message_mb"] << 20)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.bind(f"tcp://{s['zmq_host']}:{s['zmq_port']}")
    answers: set[asyncio.Task[None]] = set()
    listener = asyncio.create_task(_listen(gateway, socket, answers))
    try:
        yield
    finally:
        listener.cancel()
        if answers:
            await asyncio.wait(answers, timeout=1)  # what `Gateway.close` has waited for
        socket.close()
        context.term()


async def _listen(gateway: Gateway, socket: zmq.asyncio.Socket, answers: set[asyncio.Task[None]]) -> None:
    while True:
        frames = await socket.recv_multipart()
        # A REQ socket puts an empty frame between its address and its message; a DEALER may leave it out.
        envelope, message = frames[:-1], frames[-1]
        answer = asyncio.create_task(_answer(gateway, socket, envelope, message))
        answers.add(answer)
        answer.add_done_callback(answers.discard)


async def _answer(gateway: Gateway, socket: zmq.asyncio.Socket, envelope: list[bytes], message: bytes) -> None:
    try:
        reply = await _reply(gateway, envelope[0], message)
    except Problem as problem:
        reply = {"error": in_words(problem)}
    except Exception:  # a defect of ours: the client still gets its answer, and others are none the wiser
        logger.exception("a message could not be answered")
        reply = {"error": "500 Internal Server Error: the gateway's log says more"}
    with contextlib.suppress(zmq.ZMQError):  # it has left
        await socket.send_multipart([*envelope, msgpack.packb(reply, default=_array)])


async def _reply(gateway: Gateway, address: bytes, message: bytes) -> Any:
    request, _ = decode(Request({"Content-Type": MSGPACK}, [Part("body", "", message)]))
    token = request.get("api_token")
    name = gateway.who(token if isinstance(token, str) else None)
    if name is None:
        return {"error": "Unauthorized: Invalid API token"}
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
    robot = gateway.robot_at("gr00t", address, name)
    if endpoint == "reset":
        robot.episode.reset()
        return {}
    if endpoint != "get_action":
        raise Problem(404, "endpoint must be get_action, reset, get_modality_config or ping", "/endpoint")
    if gateway.closing:
        raise Problem(503, "the gateway is being stopped; send this observation again when it is back")
    if robot.busy >= PER_CLIENT:
        raise Problem(503, f"{robot.busy} messages of this client wait for their answer; send one at a time")
    with gateway.room(robot, len(message)):
        return await _get_action(gateway, robot, data)


async def _get_action(gateway: Gateway, robot: Robot, data: dict[str, Any]) -> list[Any]:
    observation, options = data.get("observation"), data.get("options")
    if not isinstance(observation, dict):
        raise Problem(422, "observation is missing, or no mapping", "/data/observation")
    actions, info = await gateway.act(robot, {**observation, **({"options": options} if options is not None else {})})
    return [actions, info]


def modality_config(gateway: Gateway) -> dict[str, Any]:
    """GR00T's ModalityConfig of each modality, of the embodiment that observations are of when they name none."""
    translation = gateway.translation()
    contract = translation.embodiments[translation.tag or next(iter(translation.embodiments))]
    keys = {
        "video": contract["video"]["keys"],
        "state": list(contract["state"]),
        "action": list(contract["action"]),
        "language": contract["language"]["keys"],
    }
    deltas = {**contract["delta_indices"], "language": [0]}
    configs = {name: {"delta_indices": deltas[name], "modality_keys": keys[name]} for name in keys}
    return {name: {"__ModalityConfig_class__": True, "as_json": config} for name, config in configs.items()}


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return write_gr00t(value)
    raise TypeError(type(value).__name__)
