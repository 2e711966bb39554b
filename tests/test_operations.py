"""What an operator does with a real server: starts it as another user, puts TLS before it, drains it, and again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import requests
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from handler.policy import Actions, Gr00tPolicy
from scripts.certificate import write_certificate
from scripts.gateway import GatewayProcess, read_settings, tls_context
from scripts.gateway_keys import new_key
from scripts.gateway_translate import pack
from scripts.package import ROOT
from scripts.ready import readiness
from scripts.serve import Server, is_free, local_session, pick_ports
from tests.client import arrived, as_msgpack, differences, post, read, send, unpack_openpi
from tests.conftest import LIBERO, observation

NOBODY = 65534
PATIENCE = 180  # s for what must happen at all
UNITS = ROOT / "config" / "systemd"


def wait_for(what: Callable[[], object], text: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def as_user(user: int) -> list[str]:
    """Before a command: another user, who may read everything, since Python may be in a closed home; writing is not
    made easier for it."""
    can_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *can_read]


class Command:
    """./scripts/serve as a process of its own, from a tree that it cannot write, as `user` where that is not None."""

    def __init__(self, folder: Path, tree: Path, user: int | None) -> None:
        self.tree, self.user = tree, user
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.overlay = folder / "own.yaml"
        # reproducible, so that bits are the same in any wave; patient, since workers are suspended here
        self.overlay.write_text(
            "batchSize: 8\nmaxBatchDelay: 20\nresponseTimeout: 600\nhandler:\n  reproducible: true\n"
        )
        self.ports, self.ready_port = pick_ports(0), pick_ports(0)[0]
        self.inference_url, self.management_url, self.metrics_url = (
            f"http://127.0.0.1:{port}" for port in self.ports[:3]
        )
        self.predict_url = f"{self.inference_url}/predictions/gr00t"
        self.key_file = self.run_dir / "key_file.json"
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(str(folder / "notify"))
        self.systemd.settimeout(PATIENCE)
        if user is not None:
            os.chown(self.run_dir, user, user)
            (folder / "notify").chmod(0o777)

    def start(self) -> None:
        command = [sys.executable, str(self.tree / "scripts" / "serve.py"), "--port", str(self.ports[0])]
        command += ["--run-dir", str(self.run_dir), "--ready-port", str(self.ready_port)]
        command += ["--overlay", str(self.overlay), "--drain-seconds", "300"]
        packages = os.pathsep.join([str(self.tree), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": packages, "HOME": str(self.run_dir),
               "NOTIFY_SOCKET": str(self.run_dir.parent / "notify")}  # fmt: skip
        if self.user is not None:
            command = [*as_user(self.user), *command]
        self.process = subprocess.Popen(command, cwd=self.run_dir, env=env, text=True, start_new_session=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        self.said = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_for(lambda: "Ctrl-C stops it" in self.said or self.process.poll() is not None, "it does not start")
        assert "READY after" in self.said, self.said
        assert self.systemd.recv(100) == b"READY=1"
        keys = json.loads(self.key_file.read_text())
        self.inference_key, self.management_key = keys["inference"]["key"], keys["management"]["key"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def as_server(self) -> Server:
        """For helpers that only look at addresses and keys."""
        return cast(Server, SimpleNamespace(**{**vars(self), "worker_pids": self.worker_pids}))

    def worker_pids(self) -> list[int]:
        with local_session() as session:
            headers = {"Authorization": f"Bearer {self.management_key}"}
            (model,) = session.get(f"{self.management_url}/models/gr00t", headers=headers, timeout=30).json()
        return [worker["pid"] for worker in model["workers"]]

    def ready(self) -> int:
        with local_session() as session:
            return session.get(f"http://127.0.0.1:{self.ready_port}/ready", timeout=30).status_code

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        self.reader.join(10)
        return code


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    """Served as another user from a tree that nobody may write, where this user is root."""
    folder = Path(tempfile.mkdtemp(prefix="gr00t-operations-"))
    folder.chmod(0o755)  # pytest's own folders are closed to others
    user, tree = None, ROOT
    if os.getuid() == 0 and shutil.which("setpriv"):
        user, tree = NOBODY, folder / "tree"
        tree.mkdir()
        for name in ("handler", "scripts", "config"):
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "config.properties", tree)
        for path in [tree, *tree.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222 | 0o444)
    made = Command(folder, tree, user)
    try:
        made.start()
        yield made
    finally:
        if made.process.poll() is None:
            for _ in range(2):
                made.process.send_signal(signal.SIGTERM)
                time.sleep(1)
            made.ended()
        made.systemd.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Gr00tPolicy:
    """What the server computes, in this process."""
    return Gr00tPolicy(checkpoint, reproducible=True)


class OwnKeys(GatewayProcess):
    """A gateway with a key of its own."""

    def __init__(self, command: Command, folder: Path, **settings: Any) -> None:
        self.key = new_key(folder / "keys.json", "fleet", 1)
        super().__init__(command.as_server(), folder, keys=str(folder / "keys.json"), embodiment_tag=LIBERO, **settings)

    def __enter__(self) -> OwnKeys:
        super().__enter__()
        return self

    @contextlib.contextmanager
    def robot(self) -> Iterator[ClientConnection]:
        headers = {"Authorization": f"Api-Key {self.key}"}
        with connect(self.url, compression=None, max_size=None, additional_headers=headers) as robot:
            robot.recv(timeout=PATIENCE)  # the metadata
            yield robot


def check(answer: Any, want: Actions) -> None:
    """An OpenPI answer's bits."""
    assert isinstance(answer, dict), answer
    assert not differences({key: answer[key] for key in want}, want)


class Robots:
    """Robots that ask without pause until they are told to stop or have no answer; every answer is checked."""

    def __init__(self, exact: Gr00tPolicy, count: int) -> None:
        self.fields = [observation(exact, LIBERO, seed=seed) for seed in range(count)]
        self.want = [exact.get_action(f) for f in self.fields]
        self.stop = threading.Event()
        self.answers = [0] * (2 * count)
        self.pool = ThreadPoolExecutor(2 * count)

    def websocket(self, number: int, gateway: OwnKeys) -> int | None:
        """Returns the code that the connection was closed with, None when it was not."""
        sent = {**self.fields[number], "options": {"seed": number}}
        with gateway.robot() as robot:
            while not self.stop.is_set():
                try:
                    robot.send(pack(sent))
                    answer = robot.recv(timeout=PATIENCE)
                except ConnectionClosed as closed:
                    return closed.rcvd.code if closed.rcvd else -1
                check(unpack_openpi(answer) if isinstance(answer, bytes) else answer, self.want[number])
                self.answers[number] += 1
        return None

    def rest(self, number: int, url: str, key: str) -> requests.Response | None:
        """Returns the answer that was no action; None when no connection was had any more."""
        headers, body = as_msgpack(self.fields[number])
        headers["Authorization"] = f"Bearer {key}"
        with local_session() as session:
            while not self.stop.is_set():
                try:
                    reply = session.post(url, data=body, headers=headers, timeout=PATIENCE)
                except requests.ConnectionError:
                    return None
                if reply.status_code != 200:
                    return reply
                assert not differences(read(reply)[0], self.want[number])
                self.answers[len(self.fields) + number] += 1
        raise AssertionError("told to stop, not refused")

    def under_way(self, more: int = 2) -> None:
        """Returns when each that is at work has had so many answers more."""
        before = list(self.answers)
        wait_for(lambda: all(a >= b + more for a, b in zip(self.answers, before, strict=True) if b), "no answers")


def test_a_read_only_tree_and_another_user(command: Command, exact: Gr00tPolicy) -> None:
    if command.user is None:
        pytest.skip("not root, or there is no setpriv")
    assert {psutil.Process(pid).uids().real for pid in [command.process.pid, *command.worker_pids()]} == {NOBODY}
    touch = [*as_user(NOBODY), "touch", str(command.tree / "handler" / "x")]
    assert "Permission denied" in subprocess.run(touch, capture_output=True, text=True).stderr
    fields = observation(exact, LIBERO, seed=7)
    assert not differences(read(post(command.as_server(), as_msgpack(fields)))[0], exact.get_action(fields))
    assert stat.S_IMODE(command.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(command.key_file.stat().st_mode) & 0o077 == 0
    assert not list(command.tree.rglob("__pycache__")) and not (command.tree / ".run").exists()
    assert command.ready() == 200


def test_tls(command: Command, exact: Gr00tPolicy, openpi_python: Path, tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    write_certificate(tls, ["localhost", "127.0.0.1"], 1)
    assert stat.S_IMODE((tls / "key.pem").stat().st_mode) == 0o600
    fields = observation(exact, LIBERO, seed=1)
    headers, body = as_msgpack(fields)
    with OwnKeys(command, tmp_path, tls_cert=str(tls / "cert.pem"), tls_key=str(tls / "key.pem"),
                 host="0.0.0.0") as gateway:  # fmt: skip
        headers["Authorization"] = f"Bearer {gateway.key}"

        def ask(scheme: str = "https", ca: Path = tls / "ca.pem", host: str = "localhost") -> requests.Response:
            with local_session() as session:
                return session.post(f"{scheme}://{host}:{gateway.port}/predictions/gr00t", data=body, headers=headers,
                                    verify=str(ca), timeout=PATIENCE)  # fmt: skip

        assert not differences(read(ask())[0], exact.get_action(fields))
        with pytest.raises(requests.exceptions.SSLError):
            ask(host="127.0.0.2")  # not in the certificate
        with pytest.raises(requests.ConnectionError):
            ask("http")
        strict = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        with socket.create_connection(("127.0.0.1", gateway.port)) as raw, strict.wrap_socket(
            raw, server_hostname="localhost"
        ) as wrapped:
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
        # the real client, which takes its authorities from the environment
        source, target = tmp_path / "in", tmp_path / "out"
        source.write_bytes(pack([{**fields, "options": {"seed": 1}}]))
        robot = [str(openpi_python), str(ROOT / "tests" / "openpi_robot.py"), f"wss://localhost:{gateway.port}"]
        robot += [gateway.key, str(source), str(target), "0"]
        env = {**os.environ, "SSL_CERT_FILE": str(tls / "ca.pem")}
        done = subprocess.run(robot, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        (answer,) = unpack_openpi(target.read_bytes())[1]
        check(answer, exact.get_action(fields))
        refused = subprocess.run(robot, env={**os.environ, "SSL_CERT_FILE": ""}, capture_output=True, text=True)
        assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
        # ZeroMQ knows no TLS: it stays on loopback, while `port` is open to others
        assert is_free(gateway.zmq_port, "127.0.0.2") and not is_free(gateway.zmq_port)
        assert not is_free(gateway.port, "127.0.0.2")
        # another certificate while it serves
        old = tmp_path / "old.pem"
        shutil.copy(tls / "ca.pem", old)
        write_certificate(tls, ["localhost"], 1)
        gateway._process.send_signal(signal.SIGHUP)
        wait_for(lambda: fails(lambda: ask(ca=old)), "the old certificate is still shown")
        assert read(ask())[1]["seed"] == 1
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log_path.read_text()


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except requests.exceptions.SSLError:
        return True
    return False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tls_cert: a.pem", "go together"),
        ("tls_cert: 3\ntls_key: 4", "tls_cert must be a text"),
        ("tls_cert: gone.pem\ntls_key: gone.pem", "cannot be used: No such file"),
        ("keys: 'off'\nzmq_host: 0.0.0.0", "for this machine alone"),
    ],
)
def test_tls_settings_that_are_wrong(tmp_path: Path, text: str, reason: str) -> None:
    overlay = tmp_path / "own.yaml"
    overlay.write_text(text)
    with pytest.raises(ValueError, match=reason):
        tls_context(read_settings([overlay]))


def test_tls_is_1_2_or_later_and_zmq_goes_where_it_is_told(tmp_path: Path) -> None:
    write_certificate(tmp_path, ["localhost"], 1)
    overlay = tmp_path / "own.yaml"
    text = f"tls_cert: {tmp_path}/cert.pem\ntls_key: {tmp_path}/key.pem\nhost: 0.0.0.0\n"
    overlay.write_text(text)
    settings = read_settings([overlay])
    context = tls_context(settings)
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert settings["zmq_host"] == "127.0.0.1"
    overlay.write_text(text + "zmq_host: 0.0.0.0\n")
    assert read_settings([overlay])["zmq_host"] == "0.0.0.0"
    assert read_settings([])["zmq_host"] == "127.0.0.1" and tls_context(read_settings([])) is None
    (tmp_path / "key.pem").write_text((tmp_path / "cert.pem").read_text())
    with pytest.raises(ValueError, match="tls_cert and tls_key cannot be used"):
        tls_context(settings)


def test_a_gateway_that_is_stopped_loses_nothing(command: Command, exact: Gr00tPolicy, tmp_path: Path) -> None:
    """Whatever reached TorchServe was answered to its robot; each robot is told that the gateway goes."""
    robots, before = Robots(exact, 3), arrived(command.as_server())
    with OwnKeys(command, tmp_path) as gateway:
        sockets = [robots.pool.submit(robots.websocket, n, gateway) for n in range(3)]
        url = f"http://127.0.0.1:{gateway.port}/predictions/gr00t"
        others = [robots.pool.submit(robots.rest, n, url, gateway.key) for n in range(3)]
        with gateway.robot() as idle:
            wait_for(lambda: all(robots.answers), "no answers")
            robots.under_way()
            assert gateway.stop() == 0
            with pytest.raises(ConnectionClosed) as closed:
                idle.recv(timeout=PATIENCE)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert [socket.result() for socket in sockets] == [1001] * 3
        assert [other.result() for other in others] == [None] * 3
    assert arrived(command.as_server()) - before == sum(robots.answers)
    assert "Traceback" not in gateway.log_path.read_text()


def test_who_is_not_answered_in_time_is_told_so(command: Command, exact: Gr00tPolicy, tmp_path: Path) -> None:
    """A worker that hangs does not keep the gateway from ending."""
    (pid,) = command.worker_pids()
    with OwnKeys(command, tmp_path, drain_s=1) as gateway, gateway.robot() as robot:
        before = arrived(command.as_server())
        os.kill(pid, signal.SIGSTOP)
        try:
            robot.send(pack(observation(exact, LIBERO, seed=1)))
            wait_for(lambda: arrived(command.as_server()) > before, "the request did not come through")
            assert gateway.stop() == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(ConnectionClosed) as closed:
            robot.recv(timeout=PATIENCE)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


def test_drain_and_another_start_under_load(command: Command, exact: Gr00tPolicy, tmp_path: Path) -> None:
    """SIGTERM: what runs and what waits is answered, to the bit; new work is refused; through the gateway nobody is
    refused, and its robots go on with the next server."""
    server = command.as_server()
    queued = [observation(exact, LIBERO, seed=seed) for seed in range(20, 32)]
    want = [exact.get_action(f) for f in queued]
    robots = Robots(exact, 3)
    with OwnKeys(command, tmp_path, patience_s=PATIENCE) as gateway, ThreadPoolExecutor(len(queued)) as pool:
        sockets = [robots.pool.submit(robots.websocket, n, gateway) for n in range(3)]
        direct = [robots.pool.submit(robots.rest, n, command.predict_url, command.inference_key) for n in range(3)]
        wait_for(lambda: all(robots.answers), "no answers")
        robots.under_way()
        (pid,) = command.worker_pids()
        os.kill(pid, signal.SIGSTOP)  # so that these wait, for certain
        try:
            futures = [send(server, as_msgpack(f), pool) for f in queued]
            assert command.ready() == 200
            command.process.send_signal(signal.SIGTERM)
            wait_for(lambda: command.ready() == 503, "ready")
            assert "being stopped" in readiness_detail(command)
            wait_for(lambda: not command.key_file.exists(), "new work is not kept out")
            late = post(server, as_msgpack(queued[0]))
            assert late.status_code == 400 and late.json()["type"] == "InvalidKeyException"
            assert not any(future.done() for future in futures)
        finally:
            os.kill(pid, signal.SIGCONT)
        for future, actions in zip(futures, want, strict=True):
            assert not differences(read(future.result())[0], actions)
        for robot in direct:
            refused = robot.result()
            assert refused is not None and refused.json()["type"] == "InvalidKeyException", refused
        assert command.ended() == 0
        assert "all is answered" in command.said and "serve: stopped" in command.said
        assert readiness(command.management_url, command.management_key) == (False, "TorchServe does not answer")
        assert command.systemd.recv(100) == b"STOPPING=1"
        assert {file.name for file in command.run_dir.iterdir()} == {"config.properties", "lock", "logs", "model_store"}

        command.start()
        had = robots.answers[:3]
        wait_for(lambda: all(now > then for now, then in zip(robots.answers[:3], had, strict=True)), "no more answers")
        robots.stop.set()
        assert [socket.result() for socket in sockets] == [None] * 3  # connected all the time, and every answer right
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log_path.read_text()


def test_a_second_signal_ends_it_at_once(command: Command, exact: Gr00tPolicy) -> None:
    (pid,) = command.worker_pids()
    with ThreadPoolExecutor(1) as pool:
        os.kill(pid, signal.SIGSTOP)  # so that draining would take 300 s
        cut_off = send(command.as_server(), as_msgpack(observation(exact, LIBERO, seed=1)), pool)
        command.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not command.key_file.exists(), "it does not drain")
        command.process.send_signal(signal.SIGINT)
        assert command.ended() == 0
        assert "serve: stopped" in command.said and "all is answered" not in command.said
        assert isinstance(cut_off.exception(), requests.ConnectionError)
    assert not psutil.pid_exists(pid)


def readiness_detail(command: Command) -> str:
    with local_session() as session:
        return str(session.get(f"http://127.0.0.1:{command.ready_port}/ready", timeout=30).json()["detail"])


# ------------------------------------------------------------------------------------------------------------- systemd


@pytest.mark.parametrize("name", ["gr00t.service", "gr00t-gateway.service"])
def test_the_unit(tmp_path: Path, name: str) -> None:
    text = (UNITS / name).read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    script, *options = settings["ExecStart"].split()
    python = Path(script.replace("/opt/gr00t", str(ROOT)) + ".py")
    usage = subprocess.run([sys.executable, str(python), "--help"], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout  # fmt: skip
    assert all(option in usage for option in options if option.startswith("--"))
    assert float(settings["TimeoutStopSec"]) > 20 + 25 and settings["Restart"] == "on-failure"
    assert settings["User"] == "gr00t" and settings["ProtectSystem"] == "strict"
    assert {settings[name] for name in ("NoNewPrivileges", "PrivateTmp")} == {"yes"}
    if name == "gr00t.service":  # SIGTERM to all would end Java, and with it whatever waits
        assert settings["KillMode"] == "mixed"
    if shutil.which("systemd-analyze"):
        unit = tmp_path / name
        unit.write_text(text.replace("/opt/gr00t", str(ROOT)))
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
        assert done.returncode == 0 and name not in done.stderr, done.stderr
