"""HTTP as clients should not speak it, and some who should be understood, while good neighbours are served."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from handler.policy import Actions, Gr00tPolicy
from scripts.bench_client import PREDICTIONS, predictions_request
from scripts.ready import readiness
from scripts.serve import Server
from tests.client import (
    arrived,
    as_json,
    as_msgpack,
    differences,
    post,
    read,
    send,
    wave,
)

Step = bytes | float  # what is sent, or seconds of waiting
Talk = Callable[["Speaker"], Iterator[Step]]


@dataclass(frozen=True)
class Speaker:
    """What a client needs to write a request by hand: the key and two good JSON bodies."""

    key: str
    body: bytes
    other: bytes

    def head(self, *lines: str, length: object = None, start: str = "POST /predictions/gr00t HTTP/1.1",
             key: str | None = None) -> bytes:  # fmt: skip
        """The lines before the body; length "" leaves the Content-Length out."""
        given = ["Host: robot", f"Authorization: Bearer {key or self.key}", "Content-Type: application/json", *lines]
        if length != "":
            given.append(f"Content-Length: {len(self.body) if length is None else length}")
        return "\r\n".join([start, *given, "", ""]).encode()


def chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def dribble(s: Speaker) -> Iterator[Step]:
    yield s.head()
    for byte in s.body[:12]:
        yield bytes([byte])
        yield 0.2


CHUNKED = "Transfer-Encoding: chunked"
# What is said, and the statuses that come back; none is silence, or a connection closed without a word.
TALKS: dict[str, tuple[Talk, list[int]]] = {
    "a plain request": (lambda s: iter([s.head() + s.body]), [200]),
    "in two halves": (lambda s: iter([(s.head() + s.body)[:2000], 0.5, (s.head() + s.body)[2000:]]), [200]),
    "HTTP/1.0": (lambda s: iter([s.head(start="POST /predictions/gr00t HTTP/1.0") + s.body]), [200]),
    "Expect: 100-continue": (lambda s: iter([s.head("Expect: 100-continue"), 0.5, s.body]), [100, 200]),
    "chunked": (lambda s: iter([s.head(CHUNKED, length="") + chunks(s.body)]), [200]),
    "chunked with a length": (lambda s: iter([s.head(CHUNKED) + chunks(s.body)]), [200]),
    "two pipelined": (lambda s: iter([s.head() + s.body + s.head(length=len(s.other)) + s.other]), [200, 200]),
    "one and a half": (lambda s: iter([s.head() + s.body + s.head() + s.body[:100]]), [200]),
    "a good one, then garbage": (lambda s: iter([s.head() + s.body + b"\x16\x03\x01\r\n\r\n"]), [200]),
    "two lengths": (lambda s: iter([s.head("Content-Length: 5") + s.body]), [400]),
    "no HTTP": (lambda s: iter([b"\x16\x03\x01\x02\x00\r\n\r\n"]), []),
    "a header of 100 kB": (lambda s: iter([s.head("X-Long: " + "a" * 100_000) + s.body]), [400]),
    "2,000 headers": (lambda s: iter([s.head(*(f"X-{n}: 1" for n in range(2000))) + s.body]), [400]),
    "NUL in a header": (lambda s: iter([s.head("X-A: a\0b") + s.body]), [400]),
    "a wrong chunk": (lambda s: iter([s.head(CHUNKED, length="") + b"zz\r\nabc\r\n"]), [400]),
    "a petabyte announced": (lambda s: iter([s.head(length=10**15) + s.body[:100]]), [413]),
    "a wrong key": (lambda s: iter([s.head(key="x" * 8) + s.body]), [400]),
    "another model": (lambda s: iter([s.head(start="POST /predictions/other HTTP/1.1") + s.body]), [404]),
    "another version": (lambda s: iter([s.head(start="POST /predictions/gr00t/9.9 HTTP/1.1") + s.body]), [404]),
    "a path upwards": (lambda s: iter([s.head(start="POST /predictions/../models HTTP/1.1") + s.body]), [404]),
    "HEAD": (lambda s: iter([s.head(start="HEAD /predictions/gr00t HTTP/1.1", length=0)]), [400]),
    "a negative length": (lambda s: iter([s.head(length=-5) + s.body]), []),
    "a slow body": (dribble, []),
    "half a head": (lambda s: iter([s.head()[:40], 1.0]), []),
    "nothing": (lambda s: iter([1.0]), []),
}
# Those who hang up: after the whole request, in the middle of the body, in the middle of the head.
QUITTERS: list[Talk] = [
    lambda s: iter([s.head() + s.body]),
    lambda s: iter([s.head() + s.body[:500]]),
    lambda s: iter([s.head()[:60]]),
]


def say(server: Server, steps: Iterator[Step], answers: int | None) -> bytes:
    """Sends the steps; what came back once so many answers did, and a second of silence. None: hangs up at once."""
    came = b""
    with (
        socket.create_connection(("127.0.0.1", server.ports[0]), timeout=4 if answers == 0 else 30) as connection,
        # It may answer, and hang up, before it has read everything.
        contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError),
    ):
        for step in steps:
            if isinstance(step, bytes):
                connection.sendall(step)
            else:
                time.sleep(step)
        while answers is not None and (piece := connection.recv(65536)):
            came += piece
            if len(statuses(came)) >= answers:
                connection.settimeout(1)
    return came


def statuses(came: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", came)]


def check(reply: Any, want: Actions) -> None:
    """A neighbour's bits where it shared its forward with the other neighbour alone, else their rounding."""
    actions, info = read(reply)
    if info["group_rows"] == 2:
        assert not differences(actions, want)
    for key, value in want.items():
        np.testing.assert_allclose(actions[key], value, rtol=0, atol=1e-5)


def test_neighbours_do_not_notice(server: Server, pid: int, policy: Gr00tPolicy, small: dict[str, Any],
                                  neighbours: list[dict[str, Any]], clean: list[Actions]) -> None:
    other = copy.deepcopy(small)
    other["options"]["seed"] = 8
    speaker = Speaker(server.inference_key or "", as_json(copy.deepcopy(small))[1], as_json(other)[1])
    ends = [as_msgpack(fields) for fields in neighbours]
    with ThreadPoolExecutor(len(TALKS) + len(QUITTERS)) as pool:
        talks = {name: pool.submit(say, server, talk(speaker), len(want)) for name, (talk, want) in TALKS.items()}
        quits = [pool.submit(say, server, talk(speaker), None) for talk in QUITTERS]
        for _ in range(3):
            for reply, want in zip(wave(server, ends, ends[0]), clean, strict=True):
                check(reply, want)
        came = {name: talk.result() for name, talk in talks.items()}
        for quit_one in quits:
            quit_one.result()
    got = {name: statuses(answer) for name, answer in came.items()}
    for name, answered in got.items():
        print("came", answered, name)
    assert got == {name: want for name, (_, want) in TALKS.items()}
    assert all(b"Traceback" not in answer and b".py" not in answer for answer in came.values())
    # Two in one connection are answered in their order.
    assert re.findall(rb'"seed": (\d+)', came["two pipelined"]) == [b"7", b"8"]
    for name in ("chunked", "Expect: 100-continue", "in two halves", "chunked with a length"):
        assert re.findall(rb'"seed": (\d+)', came[name]) == [b"7"]
    # What the quitters left is gone, and the next wave is a clean one.
    assert server.describe()["jobQueueStatus"]["pendingRequests"] == 0
    for reply, want in zip(wave(server, ends, ends[0]), clean, strict=True):
        assert not differences(read(reply)[0], want)
    assert server.worker_pids() == [pid]


def test_a_full_queue_says_so_at_once(server: Server, pid: int, neighbours: list[dict[str, Any]],
                                      clean: list[Actions]) -> None:
    """100 wait (jobQueueSize), more are refused; those who wait are served in the end."""
    body = as_msgpack(neighbours[0])
    size = server.config["jobQueueSize"]
    with ThreadPoolExecutor(size + 20) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            futures = [pool.submit(post, server, body) for _ in range(size + 20)]
            deadline = time.monotonic() + 60
            while sum(future.done() for future in futures) < 10:
                assert time.monotonic() < deadline, "nobody was refused"
                time.sleep(0.05)
            refused = [future.result() for future in futures if future.done()]
            ready, why = readiness(server.management_url, server.management_key)
            assert not ready and why.startswith("the queue is full: "), why
        finally:
            os.kill(pid, signal.SIGCONT)
        replies = [future.result() for future in futures]
    assert all(reply.status_code == 503 and reply.headers["Content-Type"] == "application/json" for reply in refused)
    served = [reply for reply in replies if reply.status_code == 200]
    assert len(served) >= size and {reply.status_code for reply in replies} == {200, 503}
    for reply in served:
        for key, value in clean[0].items():
            np.testing.assert_allclose(read(reply)[0][key], value, rtol=0, atol=1e-5)
    assert server.worker_pids() == [pid]


def test_cancelled_grpc_calls(server: Server, pid: int, neighbours: list[dict[str, Any]], clean: list[Actions]) -> None:
    """Cancelled while it waits, or while its wave runs: the neighbours get their bits, the worker lives on."""
    ends = [as_msgpack(fields) for fields in neighbours]
    request = predictions_request(body=ends[0][1])
    key = (("authorization", f"Bearer {server.inference_key}"),)
    with grpc.insecure_channel(f"127.0.0.1:{server.ports[3]}") as channel:
        call = channel.unary_unary(PREDICTIONS)
        for running in (False, True):
            with ThreadPoolExecutor(3) as pool:
                os.kill(pid, signal.SIGSTOP)
                try:
                    taken = send(server, ends[0], pool)
                    time.sleep(0.2)
                    first = send(server, ends[0], pool)
                    before = arrived(server)
                    cancelled = call.future(request, metadata=key)
                    deadline = time.monotonic() + 30
                    while arrived(server) == before:
                        assert time.monotonic() < deadline, "the call did not reach the queue"
                        time.sleep(0.01)
                    if not running:
                        cancelled.cancel()
                    last = send(server, ends[1], pool)
                finally:
                    os.kill(pid, signal.SIGCONT)
                cancelled.cancel()
                assert taken.result().status_code == 200
                for future, want in zip((first, last), clean, strict=True):
                    actions, info = read(future.result())
                    assert info["wave_requests"] in (2, 3) and info["group_rows"] == 2
                    assert not differences(actions, want)
        with pytest.raises(grpc.RpcError) as refused:
            call(request, metadata=(("authorization", "Bearer x"),), timeout=20)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert server.worker_pids() == [pid]
