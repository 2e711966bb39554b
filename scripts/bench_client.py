"""A robot of `scripts/bench`, in a process of its own.

It imports next to nothing, so that dozens start in seconds and cost little beside the server, and lives through all
steps. Orders come and results go as plain dictionaries over a connection whose file descriptor is its argument.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import msgpack

MSGPACK = "application/msgpack"
TIMEOUT = 120  # s for one answer
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"

Ask = Callable[[], tuple[str, bytes]]  # sends the request; the answer's status ("200") and body


def connect(order: dict[str, Any]) -> tuple[Ask, Callable[[], None]]:
    """A kept connection: what asks over it, and what closes it.

    order: `protocol` (rest, gateway, grpc or openpi), `url`, `key` (or None), `content_type` and `body` of the one
    request. Replies are asked for as msgpack.
    """
    return {"rest": rest, "gateway": rest, "grpc": grpc, "openpi": openpi}[order["protocol"]](order)


def rest(order: dict[str, Any]) -> tuple[Ask, Callable[[], None]]:
    """TorchServe's REST interface; http.client sets TCP_NODELAY."""
    url, body = urlsplit(order["url"]), order["body"]
    connection = HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT)
    headers = {"Content-Type": order["content_type"], "Accept": MSGPACK}
    if order["key"]:
        headers["Authorization"] = f"Bearer {order['key']}"

    def ask() -> tuple[str, bytes]:
        connection.request("POST", url.path, body, headers)
        reply = connection.getresponse()
        return str(reply.status), reply.read()

    return ask, connection.close


def grpc(order: dict[str, Any]) -> tuple[Ask, Callable[[], None]]:
    """TorchServe's gRPC interface."""
    import grpc

    channel = grpc.insecure_channel(urlsplit(order["url"]).netloc, [
        ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)
    ])  # fmt: skip
    call = channel.unary_unary(PREDICTIONS)
    request = predictions_request(
        body=order["body"], content_type=order["content_type"].encode(), accept=MSGPACK.encode()
    )
    metadata = [("authorization", f"Bearer {order['key']}")] if order["key"] else []

    def ask() -> tuple[str, bytes]:
        try:
            reply: bytes = call(request, metadata=metadata, timeout=TIMEOUT)
        except grpc.RpcError as error:
            return error.code().name, error.details().encode()
        body = prediction(reply)
        return str(json.loads(body)["status"]) if body[:1] == b"{" else "200", body  # a problem is JSON, and ends OK

    return ask, channel.close


def predictions_request(**inputs: bytes) -> bytes:
    """TorchServe's PredictionsRequest {1: model_name, 3: input {1: key, 2: value}}, written by hand."""

    def piece(number: int, value: bytes) -> bytes:
        size, length = len(value), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + value

    pairs = (piece(1, name.replace("_", "-").encode()) + piece(2, value) for name, value in inputs.items())
    return piece(1, b"gr00t") + b"".join(piece(3, pair) for pair in pairs)


def prediction(reply: bytes) -> bytes:
    """The bytes in TorchServe's PredictionResponse {1: prediction}."""
    assert reply[0] == 1 << 3 | 2
    at = 1
    while reply[at] & 128:
        at += 1
    return reply[at + 1 :]


def openpi(order: dict[str, Any]) -> tuple[Ask, Callable[[], None]]:
    """The gateway, as openpi-client speaks to it: metadata first, then an observation and its actions in turn."""
    from websockets.sync.client import connect

    headers = {"Authorization": f"Api-Key {order['key']}"} if order["key"] else {}
    opened = contextlib.ExitStack()
    socket = opened.enter_context(connect(order["url"], compression=None, max_size=None, additional_headers=headers,
                                          proxy=None, ping_interval=None))  # fmt: skip
    socket.recv(TIMEOUT)

    def ask() -> tuple[str, bytes]:
        socket.send(order["body"])
        reply = socket.recv(TIMEOUT)
        return ("error", reply.encode()) if isinstance(reply, str) else ("200", reply)  # text is a traceback or reason

    return ask, opened.close


def actions_of(order: dict[str, Any], document: dict[Any, Any]) -> dict[Any, Any]:
    """The groups of actions of an answer, arrays still packed."""
    if order["protocol"] != "openpi":
        actions: dict[Any, Any] = document["actions"]
        return actions
    # There they stand beside `actions`, which has them all in one.
    return {key: v for key, v in document.items() if isinstance(v, dict) and b"__ndarray__" in v and key != "actions"}


def due_times(order: dict[str, Any], start: float) -> Iterator[float]:
    """When to send, in seconds of time.monotonic.

    Open loop: `arrivals`, in seconds after the start, whatever the answers do. Closed loop: first `phase` seconds after
    the start, then `think` seconds after each answer, until `requests` were sent or `seconds` have passed (either may
    be None).
    """
    if order["arrivals"] is not None:
        yield from (start + at for at in order["arrivals"])
        return
    due = start + order["phase"]
    for sent in itertools.count():
        if sent == order["requests"] or (order["seconds"] is not None and due >= start + order["seconds"]):
            return
        yield due
        due = time.monotonic() + order["think"]


def run(order: dict[str, Any], connection: Connection) -> dict[str, Any]:
    """One step: warms up, says so, waits for the time to start, then sends.

    Returns `records`, a tuple a request of due, sent and received (s of time.monotonic), status, wave_requests and
    inference_ms (0 where the reply has none); `answers`, every different `actions` that came, still in msgpack; the
    last `complaint`; `cpu_s`, what this process spent on it.
    """
    ask, close = connect(order)
    records, answers, complaint = [], set(), ""
    for _ in range(order["warmup"]):
        ask()
    connection.send("ready")
    start = connection.recv()
    spent = cpu_seconds()
    for due in due_times(order, start):
        wait = due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        sent = time.monotonic()
        status, body = ask()
        received = time.monotonic()
        info: dict[str, Any] = {}
        if status == "200":
            document = msgpack.unpackb(body, strict_map_key=False)
            info = document.get("info") or {}
            answers.add(msgpack.packb(actions_of(order, document)))
        else:
            complaint = body[:300].decode("utf-8", "replace")
        records.append((due, sent, received, status, info.get("wave_requests", 0), info.get("inference_ms", 0.0)))
    close()
    return {"records": records, "answers": list(answers), "complaint": complaint, "cpu_s": cpu_seconds() - spent}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose end closes the connection
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        connection.send(run(order, connection))


if __name__ == "__main__":
    main()
