"""config/nginx in a real nginx, before two real servers, one of which is killed with requests in hand."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from handler.policy import Actions, Gr00tPolicy
from scripts.package import ROOT, build
from scripts.serve import LOOPBACK, Server, is_free, local_session, pick_ports
from tests.client import Body, arrived, as_msgpack, differences, read
from tests.conftest import observation

CONFIG = ROOT / "config" / "nginx"

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@dataclass
class Fleet:
    url: str
    servers: list[Server]
    log: Path

    def ask(
        self, body: Body, robot: str = "one", path: str = "/predictions/gr00t", **headers: str
    ) -> requests.Response:
        headers = {"Authorization": f"Bearer key-of-{robot}", **body[0], **headers}
        with local_session() as session:
            return session.post(self.url + path, data=body[1], headers=headers, timeout=120)


def write_config(folder: Path, port: int, servers: list[Server]) -> Path:
    """The three files of a fleet, from those in the repository: only ports, addresses and keys are put in."""
    folder.mkdir()
    text = (CONFIG / "gr00t.conf").read_text()
    assert text.count("listen 8000;") == 1
    (folder / "gr00t.conf").write_text(text.replace("listen 8000;", f"listen {LOOPBACK}:{port};"))
    example = (CONFIG / "clients.map.example").read_text().splitlines()[-1].removeprefix("# ")
    assert example == '"Bearer THE-KEY-OF-ROBOT-7" robot-7;'
    (folder / "clients.map").write_text('"Bearer key-of-one" one;\n"Bearer key-of-two" two;\n')
    instances = (CONFIG / "instances.conf.example").read_text()
    inner = [p for p in pick_ports(0) if p != port][:2]
    values = zip(servers, ("10.0.0.11:8080", "10.0.0.12:8080"), ("KEY-OF-THE-FIRST", "KEY-OF-THE-SECOND"),
                 ("127.0.0.1:9101", "127.0.0.1:9102"), inner, strict=True)  # fmt: skip
    for server, address, key, listen, own in values:
        assert address in instances and key in instances and instances.count(listen) == 2
        instances = instances.replace(address, server.inference_url.removeprefix("http://"))
        instances = instances.replace(key, str(server.inference_key)).replace(listen, f"{LOOPBACK}:{own}")
    (folder / "instances.conf").write_text(instances)
    return folder / "gr00t.conf"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("nginx")
    archive = build(None, [], folder / "store" / "gr00t.mar")
    with Server(archive, run_dir=folder / "run1") as first, Server(archive, run_dir=folder / "run2") as second:
        port = pick_ports(0)[0]
        config = write_config(folder / "nginx", port, [first, second])
        command = ["nginx", "-p", str(folder / "nginx"), "-c", str(config)]
        user = "user root; " if os.geteuid() == 0 else ""  # the test's folder is its owner's alone
        subprocess.run([*command, "-t", "-g", user], check=True, capture_output=True)
        log = folder / "nginx.log"
        with log.open("w") as out, subprocess.Popen([*command, "-g", f"{user}daemon off;"], stderr=out) as process:
            try:
                deadline = time.monotonic() + 20
                while is_free(port):
                    assert time.monotonic() < deadline and process.poll() is None, log.read_text()
                    time.sleep(0.05)
                yield Fleet(f"http://{LOOPBACK}:{port}", [first, second], log)
            finally:
                process.terminate()


@pytest.fixture(scope="module")
def asked(policy: Gr00tPolicy) -> tuple[Body, Actions]:
    fields = observation(policy, seed=3, size=(64, 64))
    return as_msgpack(fields), policy.get_action(fields)


def test_a_robot_gets_its_answer_and_no_one_else_gets_anything(fleet: Fleet, asked: tuple[Body, Actions]) -> None:
    body, want = asked
    for path in ("/predictions/gr00t", "/predictions/gr00t/1.0"):
        assert not differences(read(fleet.ask(body, path=path))[0], want)
    assert fleet.ask(body, "stranger").status_code == 401
    key = fleet.servers[0].inference_key
    assert fleet.ask(body, Authorization=f"Bearer {key}").status_code == 401, "a server's own key is no robot's"
    for path in ("/models", "/models/gr00t", "/models/gr00t/1.0/set-default", "/metrics", "/ping", "/token", "/",
                 "/predictions/../models", "/invocations", "/predictions/gr00t/1.0/x"):  # fmt: skip
        assert fleet.ask(body, path=path).status_code == 404, path


def test_sizes(fleet: Fleet) -> None:
    types = {"Content-Type": "application/msgpack"}
    assert fleet.ask((types, bytes(33 * 2**20))).status_code == 413
    reply = fleet.ask((types, bytes(31 * 2**20)))
    assert (reply.status_code, reply.headers["Content-Type"]) == (400, "application/problem+json")


def test_the_deadline_counts_from_when_nginx_saw_the_request(fleet: Fleet, asked: tuple[Body, Actions]) -> None:
    body, want = asked
    old = {"X-Request-Start": "t=1000000000.000", "X-Request-Timeout-Ms": "60000"}
    assert not differences(read(fleet.ask(body, **old))[0], want)
    server = fleet.servers[0]
    headers = {"Authorization": f"Bearer {server.inference_key}", **body[0], **old}
    with local_session() as session:
        assert session.post(server.predict_url, data=body[1], headers=headers, timeout=60).status_code == 504


def test_a_flood_is_held_back_alone(fleet: Fleet, asked: tuple[Body, Actions]) -> None:
    body, want = asked
    with ThreadPoolExecutor(60) as pool:
        flood = [pool.submit(fleet.ask, body, "one") for _ in range(60)]
        other = read(fleet.ask(body, "two"))[0]
        statuses = Counter(future.result().status_code for future in flood)
    assert not differences(other, want)
    assert set(statuses) == {200, 429}, statuses


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_is_killed_loses_no_request(fleet: Fleet, asked: tuple[Body, Actions], name: str) -> None:
    """TorchServe answers its wave 507 or 500; nginx sends it again."""
    body, want = asked
    first = fleet.servers[0]
    (worker,) = first.worker_pids()
    with ThreadPoolExecutor(4) as pool:
        os.kill(worker, signal.SIGSTOP)
        futures = [pool.submit(fleet.ask, body) for _ in range(4)]
        until(lambda: any(future.done() for future in futures))  # the second server answers, the first holds one
        time.sleep(0.5)
        os.kill(worker, signal.Signals[name])
        if name != "SIGKILL":  # which ends what is stopped too
            os.kill(worker, signal.SIGCONT)
        assert not any(differences(read(future.result())[0], want) for future in futures)
    first.wait_for_other_workers([worker], 120)


def test_a_server_that_is_killed_loses_no_request(fleet: Fleet, asked: tuple[Body, Actions]) -> None:
    """Last, for it leaves one server. Its worker stands still first, so that it has requests in hand when it dies."""
    body, want = asked
    first, second = fleet.servers
    served = [arrived(server) for server in fleet.servers]
    replies: list[requests.Response] = []
    stop = False

    def robot(name: str) -> None:
        while not stop:
            replies.append(fleet.ask(body, name))

    (worker,) = first.worker_pids()
    with ThreadPoolExecutor(3) as pool:
        try:
            robots = [pool.submit(robot, name) for name in ("one", "one", "two")]
            until(lambda: arrived(first) > served[0] and arrived(second) > served[1])
            os.kill(worker, signal.SIGSTOP)
            count = len(replies)
            until(lambda: len(replies) > count + 5)  # least_conn: the first server got one meanwhile, if it had none
            assert first._process is not None
            logged = len(fleet.log.read_text())
            os.killpg(first._process.pid, signal.SIGKILL)
            count = len(replies)
            until(lambda: len(replies) > count + 9)
        finally:
            stop = True
        for future in robots:
            future.result()
    assert Counter(reply.status_code for reply in replies) == {200: len(replies)}
    assert not any(differences(read(reply)[0], want) for reply in replies)
    broken_off = "while reading response header from upstream"
    assert any(broken_off in line for line in fleet.log.read_text()[logged:].splitlines()), "no request was in hand"
    with socket.socket() as gone:
        assert gone.connect_ex((LOOPBACK, first.ports[0])) != 0


def until(happened) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
