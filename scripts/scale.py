"""Sets how many workers a running server has, and waits until they are READY.

Each worker is a process with its own copy of the model; TorchServe spreads them over the GPUs in turn. No request fails
on the way, neither up nor down: a worker that goes is first given a job of no one's, so that it has no wave in hand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import requests

from scripts.package import MODEL_NAME
from scripts.ready import add_arguments, read_keys
from scripts.serve import StartFailure, local_session

RETIRING = "gr00t-retiring"  # the name that handler/gr00t_handler.py gives a worker that waits to be ended


class ManageError(RuntimeError):
    """What was asked of a running server did not come about. The text says why."""


class Progress:
    """Shows what is awaited: one line that changes on a terminal, a line a change elsewhere."""

    def __init__(self, command: str) -> None:
        self._command, self._began, self._last = command, time.monotonic(), ""

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{self._command}: {text}, {time.monotonic() - self._began:.0f} s", end="", file=sys.stderr,
                  flush=True)  # fmt: skip
        elif text != self._last:
            print(f"{self._command}: {text}", file=sys.stderr, flush=True)
        self._last = text

    def end(self) -> None:
        if sys.stderr.isatty() and self._last:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Management:
    """The management API of a running TorchServe at `url`, with its management key."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, **params: Any) -> Any:
        """The decoded reply. Raises ManageError, with TorchServe's own words for a refusal."""
        try:
            with local_session() as session:
                reply = session.request(method, self.url + path, params=params, headers=self._headers, timeout=90)
        except requests.ConnectionError:
            raise ManageError(f"nothing answers at {self.url}; start it with ./scripts/serve, or see --url") from None
        except requests.RequestException as error:
            raise ManageError(f"{self.url}{path}: {error}") from None
        try:
            body = reply.json()
        except ValueError:
            body = {}
        if reply.status_code >= 300:
            words = body.get("message") or reply.reason
            raise ManageError(f"TorchServe answers {reply.status_code} to {method} {path}: {words}")
        return body

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """What TorchServe says of a version; of the default one where none is named."""
        described: dict[str, Any] = self.call("GET", f"/models/{model}/{version}" if version else f"/models/{model}")[0]
        return described


def scale(
    api: Management, model: str, version: str | None, count: int, limit: float, log: Path, show: Progress
) -> list[dict[str, Any]]:
    """Brings a version of a model to `count` workers and returns TorchServe's description of them.

    limit: seconds. log: TorchServe's output, for the reason of a failure; need not exist. Where new workers do not come
    up, the number is set back and ManageError says why.
    """
    before = api.describe(model, version)
    version, had = before["modelVersion"], len(before["workers"])
    deadline = time.monotonic() + limit
    watch = StartWatch(log, before)
    for left in range(had - 1, count - 1, -1):  # TorchServe ends the last of its list
        last = api.describe(model, version)["workers"][-1]
        if last["status"] == "READY":
            retire(api, model, version, [last["pid"]], deadline, show)
        _set_workers(api, model, version, left)
    try:
        _set_workers(api, model, version, count)  # the same again, if it went down: min_worker may have been less
        return wait_until_ready(api, model, version, count, deadline, watch, show)
    except ManageError:
        if count > had:
            _set_workers(api, model, version, had)
        raise


def _set_workers(api: Management, model: str, version: str, count: int) -> None:
    api.call("PUT", f"/models/{model}/{version}", min_worker=count, max_worker=count)


class StartWatch:
    """Follows TorchServe's output from now on: why a worker of one version, that is not READY now, cannot start."""

    def __init__(self, log: Path, model: dict[str, Any]) -> None:
        self._log, self._offset = log, log.stat().st_size if log.is_file() else 0
        self._failure = StartFailure(model["startupTimeout"])
        name = re.escape(f"{model['modelName']}_{model['modelVersion']}")
        self._mine = re.compile(rf"W-(\d+)-{name}(?=-stdout |-stderr | )")
        self._others = {worker["id"] for worker in model["workers"] if worker["status"] == "READY"}

    def reason(self) -> str | None:
        """The reason, once the output has told."""
        if self._log.is_file():
            if self._log.stat().st_size < self._offset:  # a new file
                self._offset = 0
            with self._log.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    text = line.decode("utf-8", "replace").rstrip()
                    worker = self._mine.search(text)
                    if worker and worker[1] not in self._others:
                        self._failure.read(text)
        return self._failure.reason


def wait_until_ready(
    api: Management, model: str, version: str, count: int, deadline: float, watch: StartWatch, show: Progress
) -> list[dict[str, Any]]:
    """Returns the workers when a version has `count`, all READY. Raises ManageError with the reason, or at `deadline`
    (of time.monotonic).
    """
    while True:
        workers: list[dict[str, Any]] = api.describe(model, version)["workers"]
        ready = sum(worker["status"] == "READY" for worker in workers)
        show(f"{ready} of {count} workers READY")
        if ready == len(workers) == count:
            return workers
        if reason := watch.reason():
            raise ManageError(f"a worker cannot start: {reason}")
        if time.monotonic() > deadline:
            raise ManageError(f"{ready} of {count} workers were READY when the time was over (--limit)")
        time.sleep(0.3)


def retire(api: Management, model: str, version: str, pids: list[int], deadline: float, show: Progress) -> None:
    """Returns when each of these workers holds a job of ours and nothing else, for some seconds.

    The job is a describe request, which always comes to a worker alone; the handler of a process that has got SIGUSR1
    keeps it. Another worker answers at once, and it is sent again. Raises ManageError at `deadline` (of
    time.monotonic), and when a worker is no process of this machine and user.
    """

    def ask() -> None:
        with contextlib.suppress(ManageError):  # the worker that takes the job may be ended with it
            api.call("GET", f"/models/{model}/{version}", customized="true")

    jobs: dict[int, threading.Thread] = {}
    told = {pid: 0.0 for pid in pids}
    while busy := [pid for pid in pids if _process_name(pid) != RETIRING]:
        for pid in busy:
            if time.monotonic() - told[pid] > 1:
                _notify(pid)
                told[pid] = time.monotonic()
            if pid not in jobs or not jobs[pid].is_alive():
                jobs[pid] = threading.Thread(target=ask, daemon=True)
                jobs[pid].start()
        if time.monotonic() > deadline:
            raise ManageError(f"worker {busy[0]} was never free within the time (--limit)")
        show(f"worker {busy[0]} finishes its wave")
        time.sleep(0.02)


def _notify(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return  # it ended by itself
    except PermissionError:
        raise ManageError(f"worker {pid} is another user's process; run this as the server's user") from None


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        raise ManageError(
            f"worker {pid} is no process of this machine; workers are ended where the server runs, so that no request "
            "fails"
        ) from None


def table(workers: list[dict[str, Any]]) -> str:
    """The workers as text, with their GPU and what TorchServe says of its use."""
    lines = ["worker  pid       status     memory MB  GPU"]
    for worker in workers:
        gpu = worker["gpuUsage"].replace("gpuId::", "", 1) if worker["gpu"] else "none"
        memory = f"{worker['memoryUsage'] / 1e6:.0f}" if worker["memoryUsage"] else "-"  # not yet known
        lines.append(f"{worker['id']:6}  {worker['pid']:<8}  {worker['status']:9}  {memory:>9}  {gpu}")
    return "\n".join(lines)


def at_least_one(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("must be 1 or more; Ctrl-C at ./scripts/serve stops the server")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=at_least_one, metavar="N", help="workers, one or two for each GPU")
    parser.add_argument("--model", default=MODEL_NAME, metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--version", help="of the model (default: its default version)")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds to wait (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args()
    api, show = Management(args.url, read_keys(args.key_file)[1]), Progress("scale")
    log = args.key_file.parent / "logs" / "console.log"
    try:
        workers = scale(api, args.model, args.version, args.count, args.limit, log, show)
    except ManageError as error:
        show.end()
        print(f"scale: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        show.end()
        return 130
    show.end()
    print(table(workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
