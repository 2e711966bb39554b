"""A robot's side of the wire, for tests: every encoding of an observation, and waves that form for certain."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import requests
from PIL import Image

from handler.policy import Actions
from scripts.package import HANDLER_FILE, ROOT, build
from scripts.serve import Server, local_session

Body = tuple[dict[str, str], bytes]  # headers, body


def openpi(value: Any) -> Any:
    """Arrays in the form of openpi-client's msgpack_numpy."""
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {key: openpi(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def unpack_openpi(data: bytes) -> Any:
    """What openpi-client packed, with its arrays."""

    def array(value: dict[Any, Any]) -> Any:
        if b"__ndarray__" in value:
            return np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
        return value

    return msgpack.unpackb(data, strict_map_key=False, object_hook=array)


def npy(value: dict[str, Any]) -> np.ndarray:
    """An array that GR00T's own client packed."""
    array: np.ndarray = np.load(io.BytesIO(value["as_npy"]), allow_pickle=False)
    return array


def gr00t(value: Any) -> Any:
    """Arrays in the form of GR00T's own client."""
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    return {key: gr00t(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def lists(value: Any) -> Any:
    """Arrays as nested lists; frames (uint8) as base64 PNG."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return [[base64.b64encode(png(frame)).decode() for frame in row] for row in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {key: lists(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def as_msgpack(fields: dict[str, Any], arrays: Any = openpi) -> Body:
    return {"Content-Type": "application/msgpack"}, msgpack.packb(arrays(fields))


def as_json(fields: dict[str, Any]) -> Body:
    return {"Content-Type": "application/json; charset=utf-8"}, json.dumps(lists(fields)).encode()


def as_multipart(fields: dict[str, Any]) -> Body:
    """One row: camera files, states as JSON or .npy in turn, the prompt, the options."""
    parts: list[tuple[str, Any]] = []
    for key, value in fields["video"].items():
        parts += [(f"video.{key}", (f"{t}.png", png(frame), "image/png")) for t, frame in enumerate(value[0])]
    for index, (key, value) in enumerate(fields["state"].items()):
        file = io.BytesIO()
        np.save(file, value[0])
        data = (f"{key}.npy", file.getvalue(), "application/octet-stream") if index % 2 else (
            None, json.dumps(value[0].tolist()), "application/json")  # fmt: skip
        parts.append((f"state.{key}", data))
    parts.append(("prompt", (None, next(iter(fields["language"].values()))[0][0])))
    parts.append(("options", (None, json.dumps(fields["options"]), "application/json")))
    prepared = requests.Request("POST", "http://localhost", files=parts).prepare()
    assert isinstance(prepared.body, bytes)
    return {"Content-Type": prepared.headers["Content-Type"]}, prepared.body


def patient_archive(
    folder: Path, settings: str = "", checkpoint: Path | None = None, tag: str | None = None,
    handler_file: Path = HANDLER_FILE,
) -> Path:  # fmt: skip
    """An archive with the batched overlay, and 30 ms for a wave to fill: on a busy machine 1 ms can split what has
    queued up. settings: YAML over that."""
    patient = folder / "patient.yaml"
    patient.write_text(f"maxBatchDelay: 30\n{settings}", encoding="ascii")
    overlays = [ROOT / "config" / "batched.yaml", patient]
    return build(checkpoint, overlays, folder / "store" / "gr00t.mar", tag, handler_file=handler_file)


def said_until_up(process: subprocess.Popen[str]) -> str:
    """What ./scripts/serve says until it is up, or ends."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("Ctrl-C stops it"):
            break
    return said


def post(server: Server, body: Body, url: str | None = None) -> requests.Response:
    headers = {"Authorization": f"Bearer {server.inference_key}", **body[0]}
    with local_session() as session:
        return session.post(url or server.predict_url, data=body[1], headers=headers, timeout=60)


def read(reply: requests.Response) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The actions (float32) and info of a good reply."""
    assert reply.status_code == 200, reply.text
    if reply.headers["Content-Type"] == "application/json":
        document = reply.json()
        return {key: np.array(value, np.float32) for key, value in document["actions"].items()}, document["info"]
    assert reply.headers["Content-Type"] == "application/msgpack"
    document = msgpack.unpackb(reply.content, strict_map_key=False)
    arrays = {}
    for key, value in document["actions"].items():
        if "as_npy" in value:
            arrays[key] = npy(value)
        else:
            arrays[key] = np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
    return arrays, document["info"]


def differences(got: Actions, want: Actions) -> list[str]:
    """The keys whose bits differ, or whose values are not finite."""
    assert got.keys() == want.keys()
    return [
        key for key, value in want.items()
        if got[key].dtype != np.float32 or not np.isfinite(value).all()
        or got[key].tobytes() != value.astype(np.float32).tobytes()
    ]  # fmt: skip


def arrived(server: Server) -> int:
    """Predictions that TorchServe has taken in and queued so far."""
    with local_session() as session:
        text = session.get(f"{server.metrics_url}/metrics", timeout=30).text
    counts = re.findall(r"^ts_inference_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def send(server: Server, body: Body, pool: ThreadPoolExecutor) -> Future[requests.Response]:
    """Sends a request; returns when TorchServe has queued it, so that the queue's order is the caller's."""
    before = arrived(server)
    future = pool.submit(post, server, body)
    deadline = time.monotonic() + 60
    while arrived(server) == before:
        assert time.monotonic() < deadline and not future.done(), "the request did not reach the queue"
        time.sleep(0.01)
    time.sleep(0.02)  # counted just before it is queued
    return future


def wave(server: Server, bodies: Sequence[Body], blocker: Body) -> list[requests.Response]:
    """Sends `bodies`, which the server's only worker gets as one wave, in this order.

    The worker is stopped while it has `blocker` in hand, so that what is sent meanwhile queues up.
    """
    (pid,) = server.worker_pids()
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        os.kill(pid, signal.SIGSTOP)
        try:
            taken = send(server, blocker, pool)
            time.sleep(0.2)  # TorchServe hands it to the worker at once
            futures = [send(server, body, pool) for body in bodies]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert taken.result().status_code == 200
        return [future.result() for future in futures]
