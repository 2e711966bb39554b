"""Robots with clients of their own, through the gateway to a real TorchServe: their bits, their errors, their turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import requests
import zmq
from aiohttp import web
from prometheus_client import generate_latest

from handler.policy import Actions, Gr00tPolicy
from handler.problem import Problem
from handler.wire import MSGPACK, Part, ReplyForm, Request, decode, encode_reply
from scripts.gateway import Gateway, GatewayProcess, read_settings, serving
from scripts.gateway_keys import Keys, new_key
from scripts.gateway_translate import MAX_ENTRIES, Episode, Translation, outline_of, pack, unpack
from scripts.gateway_upstream import Turnstile
from scripts.gateway_zmq import token_of
from scripts.package import ROOT, build
from scripts.serve import Server, local_session, pick_ports
from tests.client import arrived, as_msgpack, differences, gr00t, npy, read, unpack_openpi
from tests.conftest import DROID, LIBERO, observation

# ------------------------------------------------------------------------------------------------------------- units


def read_msgpack(body: bytes) -> dict[str, Any]:
    """As the server decodes it."""
    return decode(Request({"Content-Type": MSGPACK}, [Part("body", "", body)]))[0]


def test_turns_go_by_key_and_then_by_connection() -> None:
    """Who floods delays itself: another key's request waits for one other at most."""
    order: list[str] = []

    async def ask(turnstile: Turnstile, key: str, connection: int, name: str) -> None:
        async with turnstile.turn(key, connection):
            order.append(name)
            await asyncio.sleep(0)

    async def main() -> None:
        turnstile = Turnstile()
        turnstile.width = 1
        flood = [ask(turnstile, "a", n % 3, f"a{n % 3}") for n in range(9)]
        others = [ask(turnstile, "b", 7, "b"), ask(turnstile, "b", 7, "b"), ask(turnstile, "c", 8, "c")]
        await asyncio.gather(*flood, *others)
        assert turnstile.inside == 0 and not turnstile.waiting

    asyncio.run(main())
    assert order == ["a0", "a1", "b", "c", "a2", "b", "a0", "a1", "a2", "a0", "a1", "a2"]


def test_who_gives_up_leaves_its_turn() -> None:
    async def main() -> None:
        turnstile = Turnstile()
        turnstile.width = 1
        entered = asyncio.Event()

        async def stay() -> None:
            async with turnstile.turn("a", 1):
                entered.set()
                await asyncio.sleep(60)

        first, second, third = (asyncio.create_task(stay()) for _ in range(3))
        await entered.wait()
        second.cancel()
        entered.clear()
        first.cancel()
        await entered.wait()  # the third's turn
        assert turnstile.inside == 1 and turnstile.waits() == 0
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert turnstile.inside == 0 and not turnstile.waiting

    asyncio.run(main())


def test_keys_live_as_long_as_said_and_two_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    first, other = new_key(path, "fleet", 1), new_key(path, "lab", 30)
    keys = Keys(path)
    second = new_key(path, "fleet", 30)
    assert [keys.name_of(key) for key in (first, second, other, "", "x")] == ["fleet", "fleet", "lab", None, None]
    third = new_key(path, "fleet", 30)
    assert [keys.name_of(key) for key in (first, second, third, other)] == [None, "fleet", "fleet", "lab"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(key in path.read_text() for key in (first, second, third, other))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31 * 86400)
    assert keys.name_of(third) is None
    monkeypatch.setattr(time, "time", lambda: now)
    path.write_text("{}")
    with pytest.raises(ValueError, match="key file cannot be read"):
        Keys(path)
    assert keys.name_of(third) == "fleet"  # whoever spoils the file locks nobody out


def test_keys_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, or a file as a secret is mounted: a link that is turned to another file."""
    arm, lab = "a" * 20 + "=", "b" * 16
    monkeypatch.setenv("GR00T_KEYS", f"arm={arm}, lab={lab}")
    keys = Keys("env:GR00T_KEYS")
    assert [keys.name_of(key) for key in (arm, lab, "", "x", f"arm={arm}")] == ["arm", "lab", None, None, None]
    for text in ("", "arm", f"={lab}", "arm=short"):
        monkeypatch.setenv("GR00T_KEYS", text)
        with pytest.raises(ValueError, match="environment variable GR00T_KEYS cannot be used") as told:
            Keys("env:GR00T_KEYS")
        assert "short" not in str(told.value)
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "keys"
    for path, text in ((old, f"arm={arm}\n"), (new, f"arm={arm}\narm={lab}\n")):
        path.write_text(text)
        path.chmod(0o440)
    link.symlink_to(old)
    keys = Keys(link)
    assert [keys.name_of(key) for key in (arm, lab)] == ["arm", None]
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").replace(link)
    assert [keys.name_of(key) for key in (arm, lab)] == ["arm", "arm"]
    with pytest.raises(ValueError, match="add a line NAME=KEY yourself"):
        new_key(link, "arm", 1)
    new.chmod(0o444)
    with pytest.raises(ValueError, match="others can read it"):
        Keys(link)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prt: 1", "unknown setting 'prt'"),
        ("port: high", "port must be like 8000"),
        ("- 1", "expected a mapping"),
        ("keys: 'off'\nhost: 0.0.0.0", "for this machine alone"),
        ("key_map: {a: [video.x]}", "state.KEY only"),
        ("key_map: {a: 3}", "must go to a key"),
        ("steps_per_request: 0", "must be 1 or more"),
        ("max_pending_mb: 0.5", "must be like 1024"),
        ("key_map: {a: state.x, b: [state.x, state.y]}", "state.x stands for more than one key"),
        ("embodiment_tag: [1]", "must be a text"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, text: str, reason: str) -> None:
    overlay = tmp_path / "own.yaml"
    overlay.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_settings([overlay])


def test_a_key_map_renames_and_cuts(policy: Gr00tPolicy) -> None:
    contract = policy.describe()
    states = list(contract["embodiments"][LIBERO]["state"])
    key_map: dict[str, Any] = {"observation/image": "video.image", "observation/state": [f"state.{s}" for s in states]}
    translation = Translation(contract, LIBERO, key_map, 1)
    width = sum(contract["embodiments"][LIBERO]["state"][s]["width"] for s in states)
    image = np.zeros((8, 8, 3), np.uint8)
    sent = {"observation/image": image, "observation/state": np.arange(width), "prompt": "go"}
    fields, _ = translation.fields(sent, Episode())
    assert fields["video.image"] is image and fields["prompt"] == "go"
    assert fields["options"] == {"embodiment_tag": LIBERO}
    assert np.concatenate([fields[f"state.{s}"] for s in states]).tolist() == list(range(width))
    with pytest.raises(Problem, match=rf"expected {width} numbers .* shape \[3\]") as caught:
        translation.fields({"observation/state": np.zeros(3)}, Episode())
    assert caught.value.pointer == "/observation~1state"
    with pytest.raises(Problem, match="came something else"):
        translation.fields({"observation/state": "text"}, Episode())
    with pytest.raises(Problem, match=r"video\.image is given twice"):
        translation.fields({"video.image": image, "observation/image": image}, Episode())
    with pytest.raises(ValueError, match="the server has no 'x'"):
        Translation(contract, "x", {}, 1)


def test_earlier_frames_fill_the_horizon(policy: Gr00tPolicy) -> None:
    contract = policy.describe()
    deltas = contract["embodiments"][DROID]["delta_indices"]["video"]
    assert len(deltas) == 2 and deltas[-1] == 0
    camera = contract["embodiments"][DROID]["video"]["keys"][0]
    translation, episode = Translation(contract, DROID, {}, 5), Episode()
    ago = -deltas[0] // 5

    def ask(name: str, value: Any, answered: bool = True) -> Any:
        fields, history = translation.fields({name: value}, episode)
        if answered:
            episode.history.update(history)
        return fields[name]

    for step in range(8):
        frame = np.full((4, 4, 3), step, np.uint8)
        refused = ask(f"video.{camera}", frame, answered=False)  # does not count
        got = ask(f"video.{camera}", frame)
        assert np.array_equal(refused, got) and got.shape == (2, 4, 4, 3) and got.dtype == np.uint8
        assert got[:, 0, 0, 0].tolist() == [max(0, step - ago), step]
    episode.reset()
    assert ask("video", {camera: frame})[camera][:, 0, 0, 0].tolist() == [7, 7]
    whole = np.zeros((2, 4, 4, 3), np.uint8)  # who sends all steps is left alone
    assert ask(f"video.{camera}", whole) is whole
    episode.reset()
    for step in range(ago + 1):
        files = ask(f"video.{camera}", b"JPEG %d" % step)
    assert files == [b"JPEG 0", b"JPEG %d" % ago]
    with pytest.raises(Problem, match="which is too much"):
        ask(f"video.{camera}", np.zeros((4000, 4000, 3), np.uint8))


@pytest.mark.parametrize("tag", [None, LIBERO])
@pytest.mark.parametrize(
    "also",
    [
        {"options": {"embodiment_tag": LIBERO}},
        {"options": {"embodiment_tag": LIBERO, "seed": 7, "timestamp": None, "rtc": {"action": {"x": np.ones(3)}}}},
        {"session_id": "s", "endpoint": "infer", "options": {"embodiment_tag": LIBERO, "deadline_ms": 1.8e12}},
        {"session_id": 3, "options": None},
        {"endpoint": "infer"},
        {},
    ],
)
def test_a_message_passes_without_being_read(policy: Gr00tPolicy, tag: str | None, also: dict[str, Any]) -> None:
    """And says the same as one that is read and written anew."""
    contract = {**policy.describe(), "default_embodiment": tag}
    translation = Translation(contract, tag, {}, 1)
    fields = observation(policy, LIBERO)
    fields = {**{name: fields[name] for name in ("video", "state", "language")}, **also}
    _, body = as_msgpack(fields)
    outline = outline_of(body)
    assert outline is not None and outline.session == also.get("session_id")
    passed = translation.passes(outline)
    if translation.embodiment(fields) is None:
        assert passed is None  # the server says that none is named
        return
    assert passed is not None
    sent = read_msgpack(body)
    for name in ("endpoint", "session_id"):
        sent.pop(name, None)
    want = read_msgpack(pack(translation.fields(sent, Episode())[0]))
    got = read_msgpack(passed)
    np.testing.assert_equal(got, want)  # exactly, and of all that is nested
    if not also.keys() & {"endpoint", "session_id"} and None not in (also.get("options") or {None: None}).values():
        assert passed is body


def test_answers_in_either_form_of_arrays(policy: Gr00tPolicy) -> None:
    actions = policy.get_action(observation(policy, LIBERO))
    for form in ("openpi", "gr00t"):
        got, info = unpack(encode_reply(ReplyForm(MSGPACK, form), actions, {"seed": 7})[1])
        assert differences(got, actions) == [] and info == {"seed": 7}


def test_what_is_out_of_the_ordinary_is_read(policy: Gr00tPolicy) -> None:
    contract = policy.describe()
    fields = observation(policy, LIBERO)
    _, plain = as_msgpack(fields)
    assert outline_of(plain) is not None
    others: list[dict[Any, Any]] = [
        {"endpoint": "reset"}, {"session_id": [1]}, {"options": [1]}, {"options": {b"seed": 1}},
        {"options": {"deadline_ms": {b"__npgeneric__": True, b"data": 1.0, b"dtype": "<f8"}}},
        {"options": {"text": "x" * (1 << 16)}}, {"x" * 300: 1}, {b"endpoint": "infer"}, {7: 1},
    ]  # fmt: skip
    for also in others:
        assert outline_of(as_msgpack({**fields, **also})[1]) is None, also
    twice = msgpack.Packer().pack_map_header(2) + 2 * (msgpack.packb("prompt") + msgpack.packb("go"))
    many = msgpack.packb({str(key): None for key in range(MAX_ENTRIES + 1)})
    for body in (b"", many, plain[:-1], plain + b"\xc0", msgpack.packb([1]), msgpack.packb("go"), twice, b"\x81" * 5000,
                 b"\xdf\xff\xff\xff\xff"):  # fmt: skip
        assert outline_of(body) is None, body[:20]
    outline = outline_of(plain)
    assert outline is not None
    assert Translation(contract, None, {"video": "video"}, 1).passes(outline) is None
    droid = outline_of(as_msgpack(observation(policy, DROID))[1])
    assert droid is not None
    assert Translation(contract, None, {}, 1).passes(droid) is None  # it takes earlier frames


def test_the_token_of_a_gr00t_message_is_found_without_decoding_it() -> None:
    nested = b"\x91" * 300 + b"\xc0"
    assert token_of(msgpack.packb({"endpoint": "ping", "data": {"a": [1, {"b": b"x" * 99}]}, "api_token": "t"})) == "t"
    assert token_of(b"\x82\xa4data" + nested + b"\xa9api_token\xa1t") == "t"
    for message in (b"", b"\xc1", b"\x90", b"\x81", b"\x81\x91\xc0\xc0", msgpack.packb({"api_token": 5}),
                    msgpack.packb({"endpoint": "ping"}), b"\x81\xa9api_token\xa2\xff\xff",
                    b"\xdf\xff\xff\xff\xff", msgpack.packb({"api_token": ["t"]})):  # fmt: skip
        assert token_of(message) is None


class FakeTorchServe:
    """Answers as told: `replies` are taken in turn, the last for ever. `bodies` is what came."""

    def __init__(self, contract: dict[str, Any], folder: Path, *replies: tuple[int, bytes]) -> None:
        self.contract, self.replies = contract, list(replies)
        self.bodies: list[bytes] = []
        self.seconds = 0.0  # that a prediction takes
        self.key_file = folder / "key_file.json"
        self.key_file.write_text(json.dumps({kind: {"key": f"{kind} key"} for kind in ("inference", "management")}))

    async def describe(self, _: web.Request) -> web.Response:
        worker = {"id": "9000", "status": "READY", "startTime": self.contract["checkpoint"]}
        return web.json_response([{"modelVersion": "1.0", "batchSize": 1, "workers": [worker],
                                   "customizedMetadata": self.contract}])  # fmt: skip

    async def predict(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        await asyncio.sleep(self.seconds)
        status, body = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        kind = "application/msgpack" if status == 200 else "application/json"
        return web.Response(status=status, body=body, content_type=kind)

    @contextlib.asynccontextmanager
    async def gateway(self, **settings: Any) -> AsyncIterator[Gateway]:
        """A gateway before it, in this process."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/models/gr00t", self.describe), web.post("/predictions/gr00t", self.predict)])
        runner = web.AppRunner(app)
        await runner.setup()
        ports = pick_ports(0)
        await web.TCPSite(runner, "127.0.0.1", ports[0]).start()
        own = {"inference_url": f"http://127.0.0.1:{ports[0]}", "management_url": f"http://127.0.0.1:{ports[0]}",
               "key_file": str(self.key_file), "port": ports[1], "zmq_port": 0, "admin_port": 0}  # fmt: skip
        try:
            async with serving({**read_settings([]), **own, **settings}) as gateway:
                yield gateway
        finally:
            await runner.cleanup()


def good(contract: dict[str, Any], **info: Any) -> tuple[int, bytes]:
    """An answer of zeros."""
    actions = {key: np.zeros((a["horizon"], a["width"]), np.float32)
               for key, a in contract["embodiments"][DROID]["action"].items()}  # fmt: skip
    about = {"wave_requests": 1, "inference_ms": 1.0, "checkpoint": contract["checkpoint"], **info}
    return 200, pack({"actions": actions, "info": about})


DIED = (500, b'{"code": 500, "message": "Worker died."}')
REFUSED = (422, b'{"message": "no"}')
FULL = (503, b'{"code": 503, "message": "no worker"}')
WRONG_KEY = (400, b'{"type": "InvalidKeyException", "message": "wrong"}')


def test_what_is_sent_again_and_how_often(policy: Gr00tPolicy, tmp_path: Path) -> None:
    contract = policy.describe()

    async def asked(*replies: tuple[int, bytes], **settings: Any) -> tuple[str, int]:
        """How one observation was answered, and how often TorchServe was asked."""
        fake = FakeTorchServe(contract, tmp_path, *replies)
        async with fake.gateway(embodiment_tag=DROID, **settings) as gateway:
            with gateway.connection("a", "openpi") as robot:
                try:
                    await gateway.act(robot, {"prompt": "go"})
                    return "200", len(fake.bodies)
                except Problem as problem:
                    return f"{problem.status} {problem.detail}", len(fake.bodies)

    assert asyncio.run(asked(DIED, DIED, good(contract))) == ("200", 3)
    assert asyncio.run(asked(DIED)) == ("500 Worker died.", 3)  # an observation that kills workers
    assert asyncio.run(asked(REFUSED)) == ("422 no", 1)
    assert asyncio.run(asked(WRONG_KEY, WRONG_KEY, good(contract))) == ("200", 3)  # while TorchServe renews it
    words, times = asyncio.run(asked(FULL, patience_s=1))
    assert words == "503 no worker answered within 1 s; the server may be starting again" and times > 2


def test_a_forward_that_began_in_time_may_end_after_the_deadline(policy: Gr00tPolicy, tmp_path: Path) -> None:
    contract = policy.describe()

    async def main() -> None:
        fake = FakeTorchServe(contract, tmp_path, good(contract))
        fake.seconds = 1.0
        async with fake.gateway(embodiment_tag=DROID) as gateway:
            with gateway.connection("a", "openpi") as robot:
                soon = {"prompt": "go", "options": {"deadline_ms": (time.time() + 0.5) * 1e3}}
                await gateway.act(robot, soon)
                gateway.upstream.turnstile.width = 0
                soon = {"prompt": "go", "options": {"deadline_ms": (time.time() + 0.5) * 1e3}}
                with pytest.raises(Problem, match="nothing was computed"):
                    await gateway.act(robot, soon)
        assert len(fake.bodies) == 1

    asyncio.run(main())


def test_another_checkpoint_is_noticed(policy: Gr00tPolicy, tmp_path: Path) -> None:
    contract = policy.describe()

    async def main() -> None:
        fake = FakeTorchServe(contract, tmp_path, good(contract), good(contract, checkpoint="another"))
        async with fake.gateway(embodiment_tag=DROID) as gateway:
            with gateway.connection("a", "openpi") as robot:
                await gateway.act(robot, {"prompt": "go"})
                fake.contract = {**contract, "checkpoint": "another", "default_embodiment": LIBERO}
                assert gateway.upstream.contract["checkpoint"] == contract["checkpoint"]
                await gateway.act(robot, {"prompt": "go"})
                assert gateway.upstream.contract["default_embodiment"] == LIBERO

    asyncio.run(main())


def test_nobody_gets_in_while_torchserve_s_keys_are_gone(policy: Gr00tPolicy, tmp_path: Path) -> None:
    contract = policy.describe()

    async def main() -> None:
        fake = FakeTorchServe(contract, tmp_path, good(contract))
        async with fake.gateway() as gateway:
            assert gateway.who("inference key") == "torchserve" and gateway.who("management key") is None
            fake.key_file.write_text("")
            assert gateway.who(None) is None and gateway.who("") is None and gateway.who("x") is None
            fake.key_file.unlink()
            assert gateway.who(None) is None and gateway.who("") is None and gateway.who("x") is None
        async with fake.gateway() as gateway:  # TorchServe without authorization has no such file from the start
            assert gateway.who(None) == "anyone"

    asyncio.run(main())


def test_http_limits_and_connections_that_come_and_go(policy: Gr00tPolicy, tmp_path: Path) -> None:
    contract = policy.describe()

    async def main() -> None:
        fake = FakeTorchServe(contract, tmp_path, good(contract))
        async with fake.gateway(max_connections=2, max_message_mb=1, patience_s=1) as gateway:
            url = f"http://127.0.0.1:{gateway.settings['port']}/predictions/gr00t"

            async def post(body: bytes, **headers: str) -> tuple[int, str, str | None]:
                headers = {"Authorization": "Bearer inference key", **headers}
                async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as reply:
                    return reply.status, await reply.text("latin-1"), reply.headers.get("Retry-After")

            for _ in range(5):  # each from a connection of its own
                assert (await post(b"x"))[0] == 200
            assert not gateway.robots
            status, text, _ = await post(b"x" * (1 << 20) + b"x")
            assert status == 413 and "1048576" in text
            status, text, _ = await post(b"x", **{"Content-Encoding": "gzip"})
            assert status == 415 and "without compression" in text
            status, text, _ = await post(b"x", **{"X-Request-Timeout-Ms": "soon"})
            assert status == 400 and "whole milliseconds" in text
            fake.replies = [FULL]
            status, text, wait = await post(b"x")
            assert (status, wait) == (503, "5") and "no worker answered" in text
            count = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
                     for line in generate_latest(gateway.stats.registry).decode().splitlines()
                     if line.startswith("gateway_requests_total")}  # fmt: skip
            assert count == {f'gateway_requests_total{{protocol="http",status="{status}"}}': n
                             for status, n in ((200, 5), (413, 1), (415, 1), (400, 1), (503, 1))}  # fmt: skip

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------------- for real

EXPIRES = 60  # s that TorchServe's keys live in these tests


class ShortLived(Server):
    """A server whose keys expire after a minute."""

    def _settings(self) -> str:
        return super()._settings().replace("token_expiration_min=5256000", f"token_expiration_min={EXPIRES // 60}")

    def describe(self, customized: bool = False) -> dict[str, Any]:
        for last in (False, False, True):
            try:
                keys = json.loads(self.key_file.read_text())
                self.inference_key, self.management_key = keys["inference"]["key"], keys["management"]["key"]
                return super().describe(customized)
            except (ValueError, requests.HTTPError):  # TorchServe changes a key before it has written it
                if last:
                    raise
                time.sleep(0.5)
        raise AssertionError


class RunningGateway(GatewayProcess):
    """A gateway with keys of its own; `key` is one of them."""

    def __init__(self, server: Server, folder: Path, **settings: Any) -> None:
        self.keys = folder / "keys.json"
        self.key = new_key(self.keys, "fleet", 1)
        super().__init__(server, folder, keys=str(self.keys), **settings)

    def status(self) -> dict[str, Any]:
        with local_session() as session:
            status: dict[str, Any] = session.get(f"http://127.0.0.1:{self.admin_port}/status.json", timeout=10).json()
            return status

    def metric(self, name: str) -> float:
        with local_session() as session:
            text = session.get(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShortLived]:
    folder = tmp_path_factory.mktemp("gateway-server")
    own = folder / "own.yaml"
    own.write_text("maxBatchDelay: 20\nhandler:\n  reproducible: true\n")  # so that bits are the same in any wave
    archive = build(None, [ROOT / "config" / "batched.yaml", own], folder / "store" / "gr00t.mar")
    server = ShortLived(archive, run_dir=folder / "run")
    with server:
        yield server


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Gr00tPolicy:
    """What the server computes, in this process."""
    return Gr00tPolicy(checkpoint, reproducible=True)


STATES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


@pytest.fixture(scope="module")
def gateway(
    server: ShortLived, exact: Gr00tPolicy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    contract = exact.describe()["embodiments"][LIBERO]
    cameras = contract["video"]["keys"]
    key_map = {
        "observation/image": f"video.{cameras[0]}",
        "observation/wrist_image": f"video.{cameras[1]}",
        "observation/state": [f"state.{key}" for key in contract["state"]],
    }
    running = RunningGateway(server, tmp_path_factory.mktemp("gateway"), embodiment_tag=LIBERO, key_map=key_map)
    with running:
        yield running
        assert running.stop() == 0, running.log_path.read_text()
    assert "Traceback" not in running.log_path.read_text()


def as_openpi(fields: dict[str, Any]) -> dict[str, Any]:
    """A LIBERO observation as OpenPI's LIBERO robots send it: flat, without batch and time, state in one piece."""
    images = [value[0, 0] for value in fields["video"].values()]
    state = np.concatenate([value[0, 0] for value in fields["state"].values()])
    (text,) = fields["language"].values()
    return {"observation/image": images[0], "observation/wrist_image": images[1], "observation/state": state,
            "prompt": text[0][0], "options": {"seed": fields["options"]["seed"]}}  # fmt: skip


class Robots:
    """openpi-client robots in processes of their own."""

    def __init__(self, python: Path, gateway: RunningGateway, folder: Path) -> None:
        self.python, self.gateway, self.folder = python, gateway, folder
        self.started: list[tuple[subprocess.Popen[str], Path]] = []

    def start(self, observations: list[Any], seconds: float = 0.0) -> None:
        number = len(self.started)
        source, target = self.folder / f"in{number}", self.folder / f"out{number}"
        source.write_bytes(pack(observations))
        command = [str(self.python), str(ROOT / "tests" / "openpi_robot.py"), self.gateway.url, self.gateway.key]
        process = subprocess.Popen([*command, str(source), str(target), str(seconds)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        self.started.append((process, target))

    def answers(self) -> list[tuple[dict[str, Any], list[Any]]]:
        """Of each robot its metadata and its answers, arrays decoded."""
        out = []
        for process, target in self.started:
            said, _ = process.communicate(timeout=180)
            assert process.returncode == 0, said
            metadata, answers = unpack_openpi(target.read_bytes())
            out.append((metadata, answers))
        return out


@pytest.fixture
def robots(openpi_python: Path, gateway: RunningGateway, tmp_path: Path) -> Robots:
    return Robots(openpi_python, gateway, tmp_path)


def check(answer: dict[str, Any], want: Actions) -> None:
    """An OpenPI answer's bits: each group's, and all of them side by side."""
    one = {key: value[0] for key, value in want.items()}
    assert not differences({key: answer[key] for key in one}, one)
    assert answer["actions"].tobytes() == np.concatenate(list(one.values()), axis=-1).tobytes()
    assert answer["actions"].dtype == np.float32 and answer["actions"].shape[0] == next(iter(one.values())).shape[0]


def test_an_openpi_robot(robots: Robots, exact: Gr00tPolicy) -> None:
    fields = [observation(exact, LIBERO, seed=seed, prompt="go " * (1 + seed)) for seed in range(3)]
    robots.start([as_openpi(f) for f in fields] + [{"endpoint": "reset"}, as_openpi(fields[0])])
    ((metadata, answers),) = robots.answers()
    contract = exact.describe()["embodiments"]
    assert metadata == {
        "action_horizon": contract[LIBERO]["horizon"], "action_keys": list(contract[LIBERO]["action"]),
        "embodiment_tag": LIBERO, "image_resolution": None, "supported_embodiments": list(contract),
        "needs_session_id": False,
    }  # fmt: skip
    for answer, f in zip([*answers[:3], answers[4]], [*fields, fields[0]], strict=True):
        check(answer, exact.get_action(f))
        assert answer["server_timing"]["infer_ms"] > answer["server_timing"]["forward_ms"] > 0
    assert answers[3].endswith("reset successful")


def test_openpi_robots_share_waves_and_garbage_disturbs_nobody(robots: Robots, exact: Gr00tPolicy) -> None:
    fields = [observation(exact, LIBERO, seed=seed) for seed in range(7)]
    want = [exact.get_action(f) for f in fields]
    for f in fields:
        robots.start([as_openpi(f)] * 3, seconds=8)
    good = as_openpi(fields[0])
    garbage = [
        {**good, "observation/image": np.zeros((4, 4), np.uint8)},
        {key: value for key, value in good.items() if key != "observation/wrist_image"},
        {**good, "observation/state": np.zeros(3)},
        {**good, "observation/other": 1},
        {"endpoint": "kill"},
        "text",
    ]
    robots.start([*garbage, good], seconds=8)
    *others, (_, mixed) = robots.answers()
    waves = []
    for (_, answers), actions in zip(others, want, strict=True):
        for answer in answers:
            check(answer, actions)
            waves.append(answer["info"]["wave_requests"])
    assert max(waves) > 1 and len(waves) >= 21
    words = ["(/observation~1image)", "is missing; embodiment 'libero_sim' needs it as video.", "expected 8 numbers",
             "unknown field 'observation/other'", "endpoint must be infer or reset", "Expected a mapping"]  # fmt: skip
    for start in range(0, len(mixed) - len(garbage), len(garbage) + 1):
        for text, word in zip(mixed[start:], words, strict=False):
            assert isinstance(text, str) and word in text and "Traceback" not in text, text
        check(mixed[start + len(garbage)], want[0])  # still connected
    assert len(mixed) > len(garbage)


def test_a_worker_that_is_killed_is_survived_by_all(robots: Robots, server: ShortLived, exact: Gr00tPolicy) -> None:
    fields = [observation(exact, LIBERO, seed=seed) for seed in range(3)]
    for f in fields:
        robots.start([as_openpi(f)], seconds=12)
    before = arrived(server)
    deadline = time.monotonic() + 60
    while arrived(server) < before + 6:  # they are under way
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = server.worker_pids()
    os.kill(pids[0], signal.SIGKILL)
    server.wait_for_other_workers(pids, 90)
    for (_, answers), f in zip(robots.answers(), fields, strict=True):
        actions = exact.get_action(f)
        for answer in answers:
            check(answer, actions)


class Gr00tRobot:
    """GR00T's PolicyClient, as far as the wire goes."""

    def __init__(self, gateway: RunningGateway, token: str | None = None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, 120_000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{gateway.zmq_port}")
        self.token = gateway.key if token is None else token

    def raw(self, message: bytes) -> Any:
        self.socket.send(message)
        return msgpack.unpackb(self.socket.recv(), strict_map_key=False)

    def call(self, endpoint: str, data: Any = None) -> Any:
        request = {"endpoint": endpoint, **({} if data is None else {"data": gr00t(data)})}
        return self.raw(msgpack.packb({**request, **({"api_token": self.token} if self.token else {})}))


def test_gr00t_clients(gateway: RunningGateway, exact: Gr00tPolicy) -> None:
    robot = Gr00tRobot(gateway)
    assert robot.call("ping") == {"status": "ok", "message": "Server is running"}
    contract = exact.describe()["embodiments"][LIBERO]
    config = robot.call("get_modality_config")
    assert config["video"] == {"__ModalityConfig_class__": True, "as_json": {
        "delta_indices": contract["delta_indices"]["video"], "modality_keys": contract["video"]["keys"]}}  # fmt: skip
    assert config["action"]["as_json"]["modality_keys"] == list(contract["action"])
    assert len(config["action"]["as_json"]["delta_indices"]) == contract["horizon"]

    one = observation(exact, LIBERO, seed=3)
    two = {name: {key: np.concatenate([value, value[:, :, ::-1]]) if name == "video" else np.concatenate([value, value])
                  for key, value in one[name].items()} for name in ("video", "state")}  # fmt: skip
    two = {**two, "language": {key: text * 2 for key, text in one["language"].items()}}
    for fields, options in ((one, one["options"]), (two, {"seed": 5}), (one, {"seed": 3, "embodiment_tag": None})):
        sent = {key: value for key, value in fields.items() if key != "options"}
        actions, info = robot.call("get_action", {"observation": sent, "options": options})
        want = exact.get_action({**sent, "options": {"embodiment_tag": LIBERO, "seed": options["seed"]}})
        assert not differences({key: npy(value) for key, value in actions.items()}, want)
        assert info["seed"] == options["seed"]
    assert robot.call("reset", {"options": None}) == {}

    errors = {
        "unknown": robot.call("fly"),
        "kill": robot.call("kill"),
        "no observation": robot.call("get_action", {"options": None}),
        "no camera": robot.call("get_action", {"observation": {**one, "video": {}}, "options": None}),
        "no msgpack": robot.raw(b"\xc1garbage"),
        "no mapping": robot.raw(msgpack.packb([1])),
        "more than a message": robot.raw(msgpack.packb({"api_token": robot.token}) + b"\xc0"),
        "no data": robot.raw(msgpack.packb({"api_token": robot.token, "data": [1]})),
        "no token": Gr00tRobot(gateway, "").call("ping"),
        "wrong token": Gr00tRobot(gateway, "wrong").call("ping"),
    }
    words = {
        "unknown": "endpoint must be get_action", "kill": "kill is refused", "no observation": "observation is missing",
        "no camera": "is missing; embodiment", "no msgpack": "Unauthorized: Invalid API token",
        "no mapping": "Unauthorized: Invalid API token", "more than a message": "Bytes follow the msgpack message",
        "no data": "data must be a mapping",
        "no token": "Unauthorized: Invalid API token", "wrong token": "Unauthorized: Invalid API token",
    }  # fmt: skip
    for name, word in words.items():
        assert list(errors[name]) == ["error"] and word in errors[name]["error"], name


def test_many_gr00t_clients_at_once(gateway: RunningGateway, exact: Gr00tPolicy) -> None:
    fields = [observation(exact, LIBERO, seed=seed) for seed in range(6)]

    def run(f: dict[str, Any]) -> list[tuple[Any, int]]:
        robot = Gr00tRobot(gateway)
        sent = {key: value for key, value in f.items() if key != "options"}
        answers = [robot.call("get_action", {"observation": sent, "options": f["options"]}) for _ in range(4)]
        return [({key: npy(value) for key, value in actions.items()}, info["wave_requests"])
                for actions, info in answers]

    with ThreadPoolExecutor(len(fields)) as pool:
        results = list(pool.map(run, fields))
    for f, answers in zip(fields, results, strict=True):
        want = exact.get_action(f)
        for actions, _ in answers:
            assert not differences(actions, want)
    assert max(wave for answers in results for _, wave in answers) > 1


def test_http_is_passed_on_as_it_is(gateway: RunningGateway, exact: Gr00tPolicy) -> None:
    url = f"http://127.0.0.1:{gateway.port}/predictions/gr00t"
    headers, body = as_msgpack(observation(exact, LIBERO, seed=4))
    with local_session() as session:
        def ask(key: str, body: bytes = body) -> requests.Response:
            return session.post(url, data=body, headers={**headers, "Authorization": f"Bearer {key}"}, timeout=120)

        actions, _ = read(ask(gateway.key))
        assert not differences(actions, exact.get_action(observation(exact, LIBERO, seed=4)))
        broken = ask(gateway.key, b"\xc1")
        assert broken.status_code == 400 and broken.headers["Content-Type"] == "application/problem+json"
        assert broken.json()["detail"].startswith("Not msgpack")
        assert ask("wrong").status_code == 401 and ask("wrong").json()["type"] == "InvalidKeyException"
        assert session.get(f"http://127.0.0.1:{gateway.port}/healthz", timeout=10).text == "OK\n"
        assert session.get(f"http://127.0.0.1:{gateway.port}/", timeout=10).status_code == 426
    assert gateway.metric('gateway_requests_total{protocol="http",status="200"}') == 1
    assert gateway.metric('gateway_requests_total{protocol="http",status="400"}') == 1


def test_keys_turn_over_while_robots_stay(robots: Robots, gateway: RunningGateway, exact: Gr00tPolicy) -> None:
    """A robot's key goes on while its successor comes; the third key of a name ends the first."""
    f = observation(exact, LIBERO, seed=1)

    def connected(count: int) -> None:
        deadline = time.monotonic() + 60
        while sum(robot["protocol"] == "openpi" for robot in gateway.status()["robots"]) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    robots.start([as_openpi(f)], seconds=10)
    connected(1)
    old, gateway.key = gateway.key, new_key(gateway.keys, "fleet", 1)
    robots.start([as_openpi(f)], seconds=1)
    connected(2)
    assert Gr00tRobot(gateway, old).call("ping") == Gr00tRobot(gateway).call("ping")
    gateway.key = new_key(gateway.keys, "fleet", 1)
    assert "Unauthorized" in Gr00tRobot(gateway, old).call("ping")["error"]
    assert "error" not in Gr00tRobot(gateway).call("ping")
    want = exact.get_action(f)
    for _, answers in robots.answers():
        for answer in answers:
            check(answer, want)


def test_the_server_s_own_keys_expire_and_nobody_notices(gateway: RunningGateway, server: ShortLived,
                                                        exact: Gr00tPolicy) -> None:
    """Its key is renewed in time; the old one opens nothing any more."""
    first = server.inference_key
    robot, f = Gr00tRobot(gateway), observation(exact, LIBERO, seed=2)
    want = exact.get_action(f)
    sent = {key: value for key, value in f.items() if key != "options"}
    deadline = time.monotonic() + EXPIRES + 15
    while time.monotonic() < deadline:
        actions, _ = robot.call("get_action", {"observation": sent, "options": f["options"]})
        assert not differences({key: npy(value) for key, value in actions.items()}, want)
        server.describe()
        if server.inference_key != first and time.monotonic() > deadline - 12:
            break
        time.sleep(0.5)
    assert server.inference_key != first
    assert "renewed TorchServe's keys" in gateway.log_path.read_text()
    headers, body = as_msgpack(f)
    with local_session() as session:
        for key, status in ((first, 400), (server.inference_key, 200)):
            reply = session.post(server.predict_url, data=body, headers={**headers, "Authorization": f"Bearer {key}"},
                                 timeout=60)  # fmt: skip
            assert reply.status_code == status, reply.text


def test_no_server_is_said_in_clear_words(server: ShortLived, exact: Gr00tPolicy, tmp_path: Path) -> None:
    """TorchServe goes and comes: an error after the gateway's patience, answers again afterwards."""
    gateway = RunningGateway(server, tmp_path, embodiment_tag=LIBERO, patience_s=5)
    with gateway:
        robot, f = Gr00tRobot(gateway), observation(exact, LIBERO, seed=6)
        data = {"observation": {key: value for key, value in f.items() if key != "options"}, "options": f["options"]}
        assert len(robot.call("get_action", data)) == 2
        server.stop()
        late = {**data, "options": {**f["options"], "deadline_ms": (time.time() + 1) * 1e3}}
        assert "504 Gateway Timeout: this observation waited past" in robot.call("get_action", late)["error"]
        assert "no worker answered within 5 s" in robot.call("get_action", data)["error"]
        server.start()
        deadline = time.monotonic() + 60
        while "error" in (answer := robot.call("get_action", data)):
            assert time.monotonic() < deadline, answer
        assert not differences({key: npy(value) for key, value in answer[0].items()}, exact.get_action(f))
        assert gateway.stop() == 0


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_status_page_in_a_browser(gateway: RunningGateway, exact: Gr00tPolicy, tmp_path: Path) -> None:
    """It shows what the gateway counts, and a robot's text as text."""
    robot, f = Gr00tRobot(gateway), observation(exact, LIBERO, seed=2)
    sent = {key: value for key, value in f.items() if key != "options"}
    before = {robot["number"] for robot in gateway.status()["robots"]}
    for _ in range(3):
        assert len(robot.call("get_action", {"observation": sent, "options": f["options"]})) == 2
    evil = "<img src=x onerror=document.title='pwned'>"
    assert "unknown field" in robot.call("get_action", {"observation": {**sent, evil: 1}, "options": None})["error"]
    deadline = time.monotonic() + 60
    while gateway.status()["workers_ready"] != 1:  # the server of before is new; the gateway looks every few seconds
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
               "--virtual-time-budget=4000", "--dump-dom", f"http://127.0.0.1:{gateway.admin_port}/"]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    status = gateway.status()
    mine = [r for r in status["robots"] if r["number"] not in before]
    assert [(r["protocol"], r["requests"], r["failures"]) for r in mine] == [("gr00t", 4, 1)]
    assert f'<b id="robots_count">{len(status["robots"])}</b>' in page
    assert f'<b id="workers_ready">{status["workers_ready"]}</b>' in page and status["workers_ready"] == 1
    for failure, count in status["failures"].items():
        assert f"<td>{failure}</td><td class=\"n\">{count}</td>" in page
    assert "&lt;img src=x" in page and "<img" not in page and "<title>GR00T fleet</title>" in page
    assert f'checkpoint {status["checkpoint"]}' in page
