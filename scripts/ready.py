"""Says whether an observation sent now would be served: exit status 0 when it would, else 1 and the reason.

For probes and load balancers; TorchServe's /ping says Healthy before any worker is. `./scripts/serve --ready-port N`
answers the same over HTTP: GET /ready gives 200 or 503.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import requests

from scripts.package import MODEL_NAME, ROOT
from scripts.serve import DRAINING, Server, local_session

Verdict = tuple[bool, str]  # whether, and why
STOPPING: Verdict = (False, "the server is being stopped")


def readiness(management_url: str, key: str | None) -> Verdict:
    """Asks TorchServe's management API: ready when a worker is READY and the queue has room.

    A worker that hangs counts as READY until responseTimeout has passed.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with local_session() as session:
            reply = session.get(f"{management_url}/models/{MODEL_NAME}", headers=headers, timeout=3)
        if reply.status_code != 200:
            return False, f"TorchServe answers {reply.status_code}"
        model = reply.json()[0]
        workers = sum(worker["status"] == "READY" for worker in model["workers"])
        room, waiting = model["jobQueueStatus"]["remainingCapacity"], model["jobQueueStatus"]["pendingRequests"]
    except requests.ConnectionError:
        return False, "TorchServe does not answer"
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        return False, f"TorchServe's answer cannot be used: {type(error).__name__}"
    if not workers:
        return False, "no worker is READY"
    if room <= 0:
        return False, f"the queue is full: {waiting} wait"
    return True, f"workers READY: {workers}, waiting: {waiting}"


class ReadyServer(ThreadingHTTPServer):
    """GET /ready, in a thread of its own, until `shutdown`. The verdict is at most half a second old."""

    daemon_threads = True

    def __init__(self, host: str, port: int, verdict: Callable[[], Verdict]) -> None:
        super().__init__((host, port), _Ready)
        self._verdict, self._lock = verdict, threading.Lock()
        self.stopping = False  # set: not ready, whatever TorchServe says
        self._last: tuple[float, Verdict] = (float("-inf"), (False, ""))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def verdict(self) -> Verdict:
        """Asked once for all who ask at the same time."""
        if self.stopping:
            return STOPPING
        with self._lock:
            if time.monotonic() - self._last[0] > 0.5:
                verdict = self._verdict()
                self._last = (time.monotonic(), verdict)
            return self._last[1]


class _Ready(BaseHTTPRequestHandler):
    timeout = 5  # s for a client to say what it wants

    def do_GET(self) -> None:
        assert isinstance(self.server, ReadyServer)
        found = self.path.partition("?")[0] == "/ready"
        ready, why = self.server.verdict() if found else (False, "there is only /ready")
        body = json.dumps({"ready": ready, "detail": why}).encode()
        self.send_response(404 if not found else 200 if ready else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """A probe every second is no news."""


def serve_ready(server: Server, port: int) -> ReadyServer:
    """Answers GET /ready for a server of ours, on its address."""
    return ReadyServer(server.host, port, lambda: readiness(server.management_url, server.management_key))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which running server is meant."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8081", help="management API (default: %(default)s)")
    add("--key-file", type=Path, default=ROOT / ".run" / "key_file.json",
        help="TorchServe's (default: .run/key_file.json)")  # fmt: skip


def read_keys(key_file: Path) -> tuple[str | None, str | None]:
    """(inference key, management key); without authorization there is no file, and no key."""
    if not key_file.is_file():
        return None, None
    keys = json.loads(key_file.read_text(encoding="utf-8"))
    return keys["inference"]["key"], keys["management"]["key"]


def is_draining(key_file: Path) -> bool:
    """Whether the server with this key file is being stopped, and takes no more work."""
    return key_file.with_name(DRAINING).exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    if is_draining(args.key_file):
        ready, why = STOPPING
    else:
        ready, why = readiness(args.url.rstrip("/"), read_keys(args.key_file)[1])
    print(f"{'ready' if ready else 'not ready'}: {why}")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
