"""TorchServe's entry point: a wave of raw requests in, a reply for each out.

`handle` -> `preprocess` (requests to slots) -> `inference` (slots to actions) -> `postprocess` (slots to replies).
"""

from __future__ import annotations

import fcntl
import functools
import gc
import json
import logging
import os
import signal
import socket
import struct
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from ts.context import Context, RequestProcessor
from ts.protocol import otf_message_handler
from ts.service import Service
from ts.torch_handler.base_handler import BaseHandler

from handler.observation import Limits
from handler.policy import DTYPES, ENGINES, Gr00tPolicy
from handler.problem import Problem
from handler.telemetry import Telemetry
from handler.turn import Turn
from handler.wave import ContextLost, Slot, fill, run
from handler.wire import Part, Request, encode_problem, encode_reply

logger = logging.getLogger(__name__)

GRPC_HEADERS = ("content-type", "accept", "x-request-id", "x-request-timeout-ms", "x-request-start")
RETIRING, RETIRING_SECONDS = "gr00t-retiring", 20.0  # a process name (Linux: at most 15 bytes)
RETIRING_NOTICE = 5.0  # s from the signal in which a describe job counts


def unpack(batch: list[dict[str, Any]]) -> tuple[list[RequestProcessor], list[Request], dict[int, str]]:
    """TorchServe's raw batch -> response slots, requests, and request ids.

    Stands in for `Service.retrieve_data_for_inference`, which keeps one part of a name (a camera's later frames would
    replace the first), mixes part names with header names, and whose exceptions kill the worker with its whole wave.
    """
    requests, ids = [], {}
    for index, raw in enumerate(batch):
        ids[index] = raw["requestId"].decode()
        headers = {
            bytes(h["name"]).decode("utf-8", "replace"): bytes(h["value"]).decode("utf-8", "replace")
            for h in raw.get("headers") or ()
        }
        parts = [Part(p["name"], p["contentType"], p["value"]) for p in raw["parameters"]]
        if not any(name.lower() == "content-type" for name in headers):
            # gRPC has no headers: short inputs of these names stand for them.
            meant = [part for part in parts if part.name in GRPC_HEADERS and len(part.value) <= 1024]
            headers.update({part.name: part.value.decode("utf-8", "replace") for part in meant})
            parts = [part for part in parts if part not in meant]
        requests.append(Request(headers, parts, ids[index]))
    return [RequestProcessor(request.headers) for request in requests], requests, ids


def receive(connection: socket.socket, length: int) -> bytearray:
    """So many bytes from TorchServe, each put into its place as it comes.

    Stands in for `otf_message_handler._retrieve_buffer`, which copies a body's pieces twice.
    """
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            logger.info("TorchServe closed the connection")
            sys.exit(0)
        rest = rest[count:]
    return data


def wait_to_be_ended() -> None:
    """Keeps this worker busy with nothing, for ./scripts/scale and ./scripts/swap to end it (they see its new name).

    They send it SIGUSR1, which only its own user and root can, and then a describe job, which always comes alone.

    TorchServe ends a worker at once, and often fails the wave that it has in hand. A worker that waits here has none.
    It goes on by itself after RETIRING_SECONDS, in case nobody ends it.
    """
    name = Path("/proc/self/comm")
    before = name.read_text()
    name.write_text(RETIRING)
    time.sleep(RETIRING_SECONDS)
    name.write_text(before)


class Gr00tHandler(BaseHandler):
    """Serves one checkpoint on one device."""

    retires_until = 0.0  # of time.monotonic: whether the next describe job keeps this worker

    def initialize(self, context: Context) -> None:
        """Loads the checkpoint that the archive's model config names, and answers one example to itself.

        Raises:
            Exception: whatever keeps the worker from serving, after a log line `GR00T_START_FAILED: reason`.
        """
        try:
            self._initialize(context)
        except Exception as error:
            logger.error("GR00T_START_FAILED: %s", " ".join(str(error).split()) or type(error).__name__)
            raise

    def _initialize(self, context: Context) -> None:
        start = time.perf_counter()
        config, properties = context.model_yaml_config, context.system_properties
        if config.get("batchSize") != properties["batch_size"]:
            raise RuntimeError(
                f"the model config says batchSize {config.get('batchSize')}, but this worker was started with batch "
                f"size {properties['batch_size']}: something overrides the archive (config.properties or the "
                "management API); make both say the same"
            )
        settings = dict(config["handler"])
        gpu = properties.get("gpu_id")
        self.device = torch.device(f"cuda:{gpu}" if gpu is not None and torch.cuda.is_available() else "cpu")
        turn = None
        if self.device.type == "cuda":
            torch.set_num_threads(1)  # the GPU computes
            # Beside the folders of all models that this TorchServe has.
            turn = Turn(Path(properties["model_dir"]).parent / f"gr00t-turn-{gpu}")
        limits = {name: settings[name] for name in vars(Limits()) if name in settings}
        self.policy = Gr00tPolicy(
            Path(properties["model_dir"]) / settings["checkpoint"],  # an absolute path stands for itself
            self.device,
            DTYPES[settings["dtype"]],
            settings.get("embodiment_tag"),
            Path(settings["tokenizer"]) if settings.get("tokenizer") else None,
            Limits(**limits),
            engine=ENGINES[settings["engine"]],
            reproducible=settings["reproducible"],
            turn=turn,
        )
        self.pool = None
        if self.device.type == "cuda":  # the GPU computes, so the cores are free to decode images
            # A thread begins on the first GPU, which may be another worker's.
            own = functools.partial(torch.cuda.set_device, self.device)
            self.pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="decode", initializer=own)
        loaded = time.perf_counter()
        self.policy.warm_up()
        self.telemetry = Telemetry(context.metrics, self.policy)
        signal.signal(signal.SIGUSR1, self._on_retire)
        Service.retrieve_data_for_inference = staticmethod(unpack)
        otf_message_handler._retrieve_buffer = self._receive
        gc.collect()
        gc.freeze()  # what is there now stays, so the collector need not walk through it in the middle of a wave
        self.initialized = True
        logger.info(
            "checkpoint %s on %s in %s, batch size %d, embodiments %s; loaded in %.1f s, warm after %.1f s more",
            self.policy.checkpoint, self.device, self.policy.dtype, properties["batch_size"],
            ", ".join(self.policy.embodiments), loaded - start, time.perf_counter() - loaded,
        )

    def handle(self, data: list[Request], context: Context) -> list[bytes]:
        """Answers a wave. Never looks at one request's headers to decide about another."""
        self.context = context
        if self._is_describe_job(data):
            if time.monotonic() < self.retires_until:
                wait_to_be_ended()
            return [self.describe_handle()]
        lost = False
        with self.telemetry.stage("preprocess"):
            slots = self.preprocess(data)
        with self.telemetry.stage("inference"):
            try:
                self.inference(slots)
            except ContextLost:
                lost = True
            except Exception:  # a defect of ours: those who have their answer get it all the same
                logger.exception("a wave could not be run to its end")
                for slot in slots:
                    if slot.problem is None and len(slot.results) < len(slot.rows):
                        slot.problem = Problem(500, "the wave failed; the server's log says more")
        with self.telemetry.stage("postprocess"):
            bodies = self.postprocess(slots)
        self.telemetry.wave(slots)
        if lost:
            self._reply_and_exit(bodies)
        return bodies

    def _receive(self, connection: socket.socket, length: int) -> bytearray:
        if length == 1:  # a message's first byte: the replies to the last wave have left
            self.telemetry.tell()
        return receive(connection, length)

    def _on_retire(self, *_: object) -> None:
        self.retires_until = time.monotonic() + RETIRING_NOTICE

    @staticmethod
    def _is_describe_job(data: list[Request]) -> bool:
        """The management API's describe comes alone, and without the part that every prediction has (or is a form)."""
        if len(data) != 1 or data[0].parts or data[0].headers.get("describe") != "True":
            return False
        return not (data[0].header("content-type") or "").lower().startswith(("multipart/", "application/x-www-form"))

    def preprocess(self, data: list[Request]) -> list[Slot]:
        """Every request becomes a slot: a decoded and checked observation, or a problem."""
        return fill(data, self.policy, self.pool)

    def inference(self, data: list[Slot], *args: Any, **kwargs: Any) -> list[Slot]:
        """Runs one forward per group of slots and puts the actions into them."""
        run(data, self.policy)
        return data

    def postprocess(self, data: list[Slot]) -> list[bytes]:
        """Gives every request its own status, content type and body."""
        wave = {
            "wave_requests": len(data),
            "wave_rows": sum(len(slot.rows) for slot in data if slot.problem is None),
        }
        bodies = []
        for index, slot in enumerate(data):
            try:
                bodies.append(self._reply(index, slot, wave))
            except Exception:
                logger.exception("a reply could not be written")
                slot.problem = Problem(500, "the reply could not be written; the server's log says more")
                bodies.append(self._reply(index, slot, wave))
        return bodies

    def _reply(self, index: int, slot: Slot, wave: dict[str, int]) -> bytes:
        if slot.problem is not None:
            problem = slot.problem
            content_type, body = encode_problem(problem, slot.request_id)
            self.context.set_response_status(problem.status, problem.title, index)
            if problem.retry_after is not None:
                self.context.set_response_header(index, "Retry-After", str(problem.retry_after))
        else:
            info: dict[str, Any] = {
                **wave,
                "group_rows": slot.group_rows,
                "preprocess_ms": round(slot.preprocess_ms, 3),
                "inference_ms": round(slot.inference_ms, 3),
                "seed": slot.rows[0].seed,
                "checkpoint": self.policy.checkpoint,
                "request_id": slot.request_id,
            }
            assert slot.observation is not None
            if slot.observation.timestamp is not None:
                info["timestamp"] = slot.observation.timestamp
            content_type, body = encode_reply(slot.form, slot.actions(), info)
            self.context.set_response_status(200, "OK", index)
        self.context.set_response_content_type(index, content_type)
        # TorchServe writes its own id into X-Request-Id, over whatever is set here.
        self.context.set_response_header(index, "X-Client-Request-Id", slot.request_id)
        return body

    def describe_handle(self) -> bytes:
        """The contract, for `GET /models/gr00t?customized=true`."""
        self.context.set_response_content_type(0, "application/json")
        return json.dumps(self.policy.describe()).encode()

    def _reply_and_exit(self, bodies: list[bytes]) -> None:
        """Sends a wave's replies, then ends this process: only a new one gets a working CUDA context.

        TorchServe sends what `handle` returns, but then keeps the worker; so the bytes go out from here.
        """
        message = otf_message_handler.create_predict_response(
            bodies, self.context.request_ids, "Prediction success", 200, context=self.context
        )
        connection = self.context.cl_socket
        connection.sendall(message)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # SIOCOUTQ: bytes that TorchServe has not read yet
            unread = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
            if unread == 0:
                break
            time.sleep(0.005)
        time.sleep(0.5)  # TorchServe answers the clients before it sees this connection close
        self.telemetry.flush()
        logger.error("the worker ends, TorchServe starts a fresh one")
        logging.shutdown()
        os._exit(1)
