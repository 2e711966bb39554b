"""scripts/gr00t_client.py against a real TorchServe, and the paths of KServe that TorchServe has."""

from __future__ import annotations

import http.server
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from handler.policy import Actions, Gr00tPolicy
from handler.transforms import ImageRecipe
from scripts import gr00t_client
from scripts.gr00t_client import (
    BadObservation,
    Gr00tClient,
    Gr00tError,
    Late,
    Reply,
    Unauthorized,
    Unavailable,
    encode_jpeg,
    prepare_frames,
)
from scripts.package import ROOT, build
from scripts.serve import Server, is_free, local_session, pick_ports
from tests.client import arrived, as_json, as_msgpack, as_multipart, differences, post, read
from tests.conftest import DROID, LIBERO, observation
from tests.test_transforms import RECIPES, picture


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("client")
    with Server(build(None, [], folder / "store" / "gr00t.mar"), run_dir=folder / "run") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Gr00tClient]:
    with Gr00tClient(server.inference_url, key_file=server.key_file, timeout=120) as client:
        yield client


def record(client: Gr00tClient, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that the client sends from here on."""
    bodies: list[bytes] = []
    real = client.session.post

    def send(*args: Any, **kwargs: Any) -> requests.Response:
        bodies.append(kwargs["data"])
        return real(*args, **kwargs)

    monkeypatch.setattr(client.session, "post", send)
    return bodies


def assert_bits(reply: Reply, want: Actions) -> None:
    assert differences(reply.actions, want) == []
    assert {key: value.shape for key, value in reply.actions.items()} == {key: v.shape for key, v in want.items()}


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("tag", [LIBERO, DROID])
def test_actions_are_those_of_the_policy(client: Gr00tClient, policy: Gr00tPolicy, tag: str) -> None:
    """Nested and flat, with and without B, joined rows, and the next chunk of a chain; proxies are not asked."""
    fields = observation(policy, tag, seed=3)
    want = policy.get_action(fields)
    first = client.get_action(fields, timestamp="t1")
    assert_bits(first, want)
    assert (first.info["seed"], first.info["timestamp"], first.info["checkpoint"]) == (3, "t1", policy.checkpoint)
    flat = {f"video.{key}": value[0] for key, value in fields["video"].items()}
    flat |= {f"state.{key}": value[0].astype(np.float64) for key, value in fields["state"].items()}
    flat["prompt"] = "pick up the bowl"
    alone = client.get_action(flat, seed=np.int64(3), embodiment_tag=tag)  # type: ignore[arg-type]
    assert_bits(alone, {key: value[0] for key, value in want.items()})
    client.embodiment_tag = "nobody"  # what the observation says comes before what the client says
    rtc = {"action": first.actions, "overlap_steps": 8, "frozen_steps": 3}
    before = json.dumps(fields["options"])
    assert_bits(client.get_action(fields, seed=9, rtc=rtc),
                policy.get_action({**fields, "options": {"embodiment_tag": tag, "seed": 9, "rtc": rtc}}))  # fmt: skip
    assert json.dumps(fields["options"]) == before
    first.actions["x" if tag == LIBERO else "eef_9d"][:] = 0  # the arrays are the caller's own


def test_nothing_is_taken_from_the_environment(
    client: Gr00tClient, policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proxy would see the key; a .netrc would replace it."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fields = observation(policy, seed=1)
    assert_bits(client.get_action(fields), policy.get_action(fields))


def test_jpeg_is_what_was_compressed(client: Gr00tClient, policy: Gr00tPolicy) -> None:
    fields = observation(policy, DROID, seed=4, size=(180, 320))
    decoded = {
        key: np.stack([[np.array(Image.open(io.BytesIO(encode_jpeg(frame, 80)))) for frame in row] for row in video])
        for key, video in fields["video"].items()
    }
    want = policy.get_action({**fields, "video": decoded})
    assert differences(want, policy.get_action(fields))
    assert_bits(client.get_action(fields, jpeg=80), want)
    colours = np.array(Image.open(io.BytesIO(encode_jpeg(np.full((8, 8, 3), (250, 120, 10), np.uint8), 95))))
    assert np.abs(colours.astype(int) - (250, 120, 10)).max() < 6  # RGB, not BGR
    for frames in (b"\xff\xd8\xff", fields["video"]["exterior_image_1_left"] / 255, np.zeros((8, 8, 4), np.uint8)):
        with pytest.raises(ValueError, match="uint8 arrays"):
            client.get_action({"video.image": frames}, jpeg=80)


# ------------------------------------------------------------------------------------------------------------- frames


def test_frames_prepared_here_give_the_same_actions(
    client: Gr00tClient, policy: Gr00tPolicy, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = server.describe(customized=True)["customizedMetadata"]["image_recipe"]
    bodies = record(client, monkeypatch)
    for tag, size in ((LIBERO, (480, 640)), (DROID, (180, 320)), (LIBERO, (256, 256))):
        fields = observation(policy, tag, seed=6, size=size)
        assert_bits(client.get_action(fields, prepare_with=recipe), policy.get_action(fields))
        assert fields["video"].popitem()[1].shape[2:4] == size
    assert len(bodies[0]) < 2 * 256 * 341 * 3 + 2000 < 2 * 480 * 640 * 3
    with pytest.raises(BadObservation) as caught:  # what was not prepared does not pass for it
        client.get_action({**observation(policy, size=(480, 640)), "options": {"prepared_with": recipe}},
                          embodiment_tag=LIBERO)  # fmt: skip
    assert (caught.value.status, caught.value.pointer) == (422, "/video/image")
    with pytest.raises(BadObservation) as caught:
        client.get_action(observation(policy), prepare_with={**recipe, "edge": 224})
    assert caught.value.pointer == "/options/prepared_with"


ALBUMENTATIONS = [recipe for recipe in RECIPES if recipe.albumentations]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=st.sampled_from(ALBUMENTATIONS), height=st.integers(1, 700), width=st.integers(1, 700))
def test_the_client_s_recipe_is_the_server_s(recipe: ImageRecipe, height: int, width: int) -> None:
    frame = picture(height, width, height)
    told = json.loads(json.dumps(recipe.describe()))
    try:
        want = recipe(frame)
    except ValueError:  # shapes that the server refuses
        return
    got = prepare_frames(frame[None, None], told)
    assert got.dtype == np.uint8 and got.shape == (1, 1, *want.shape)
    np.testing.assert_array_equal(got[0, 0], want)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if not recipe.albumentations])
def test_a_recipe_that_needs_pytorch_is_refused_by_name(recipe: ImageRecipe) -> None:
    with pytest.raises(ValueError, match="torchvision"):
        prepare_frames(picture(30, 40), recipe.describe())


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_bad_observation_is_sent_once_and_says_where(
    client: Gr00tClient, policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = record(client, monkeypatch)
    fields = observation(policy)
    del fields["state"]["yaw"]
    with pytest.raises(BadObservation) as caught:
        client.get_action(fields)
    error = caught.value
    assert (error.status, error.title, error.pointer) == (422, "Unprocessable Content", "/state/yaw")
    assert "state 'yaw' is missing" in error.detail and str(error).startswith("422 Unprocessable Content: ")
    assert len(bodies) == 1
    with pytest.raises(Gr00tError) as other:
        Gr00tClient(client.url.removesuffix("/predictions/gr00t"), key=client.key, model="nope").get_action(fields)
    assert type(other.value) is Gr00tError and other.value.status == 404


def test_a_key_file_that_changes_is_read_again_once(
    server: Server, policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = json.loads(server.key_file.read_text())
    file = tmp_path / "key_file.json"

    def write(key: str) -> None:
        file.write_text(json.dumps({**good, "inference": {**good["inference"], "key": key}}))

    fields = observation(policy, seed=2)
    write("stale")
    with Gr00tClient(server.inference_url, key_file=file, timeout=60) as client:
        bodies = record(client, monkeypatch)
        with pytest.raises(Unauthorized) as caught:  # the file still says the same
            client.get_action(fields)
        assert caught.value.status == 400 and "Token" in caught.value.detail and len(bodies) == 1
        write("also wrong")
        with pytest.raises(Unauthorized):
            client.get_action(fields)
        assert len(bodies) == 3
        write(good["inference"]["key"])
        assert_bits(client.get_action(fields), policy.get_action(fields))
        assert len(bodies) == 5
        file.unlink()
        assert_bits(client.get_action(fields), policy.get_action(fields))  # the file is read when a key is refused
        client.key = "stale"
        with pytest.raises(Unauthorized):
            client.get_action(fields)
    with Gr00tClient(server.inference_url) as keyless, pytest.raises(Unauthorized):
        keyless.get_action(fields)
    with pytest.raises(FileNotFoundError):
        Gr00tClient(server.inference_url, key_file=file)
    with pytest.raises(ValueError, match="not both"):
        Gr00tClient(server.inference_url, key="k", key_file=server.key_file)


@pytest.fixture
def stopped(server: Server) -> Iterator[Callable[[], None]]:
    """The only worker stands still; the fixture's value lets it go on, as the test's end does."""
    (pid,) = server.worker_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_deadline_that_passes_in_the_queue(
    server: Server, client: Gr00tClient, policy: Gr00tPolicy, stopped: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bodies = record(client, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        before, until = arrived(server), time.monotonic() + 60
        late = pool.submit(client.get_action, observation(policy), deadline=0.5)
        while arrived(server) == before:
            assert time.monotonic() < until and not late.done()
            time.sleep(0.01)
        time.sleep(0.6)  # the deadline counts from before the request arrived
        stopped()
        with pytest.raises(Late) as caught:
            late.result()
    assert caught.value.status == 504 and "after its deadline" in caught.value.detail and len(bodies) == 1
    assert_bits(client.get_action(observation(policy), deadline=120.0), policy.get_action(observation(policy)))


def test_no_answer_within_the_timeout(client: Gr00tClient, policy: Gr00tPolicy, stopped: Callable[[], None]) -> None:
    with pytest.raises(Late) as caught:
        client.get_action(observation(policy), timeout=0.5)
    assert caught.value.status is None
    stopped()
    assert_bits(client.get_action(observation(policy)), policy.get_action(observation(policy)))


def test_a_worker_that_is_killed_costs_no_answer_and_no_other_seed(
    server: Server, client: Gr00tClient, policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = observation(policy)
    del fields["options"]["seed"]
    bodies = record(client, monkeypatch)
    pids = server.worker_pids()
    os.kill(pids[0], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        before = arrived(server)
        answer = pool.submit(client.get_action, fields)
        while arrived(server) == before and not answer.done():
            time.sleep(0.01)
        time.sleep(0.3)  # TorchServe hands it to the worker at once
        os.kill(pids[0], signal.SIGKILL)
        reply = answer.result()
    assert len(bodies) >= 2 and len(set(bodies)) == 1
    fields["options"]["seed"] = reply.info["seed"]
    assert_bits(reply, policy.get_action(fields))
    server.wait_for_other_workers(pids, 60)
    other = client.get_action({**fields, "options": {"embodiment_tag": LIBERO}})
    assert other.info["seed"] != reply.info["seed"]


# ---------------------------------------------------------------------------------------- answers that are hard to get

Answer = tuple[int, dict[str, str], bytes]
DIED = json.dumps({"code": 507, "type": "InternalServerException", "message": "Worker died."}).encode()
FULL = json.dumps({"code": 503, "type": "ServiceUnavailableException", "message": "Model \"gr00t\" has no worker to "
                   "serve inference request."}).encode()  # fmt: skip
OWN = json.dumps({"title": "Internal Server Error", "status": 500, "detail": "the network failed on this"}).encode()


@pytest.fixture
def answers() -> Iterator[tuple[str, list[Answer], list[float]]]:
    """A server's url, what it answers in turn (the last for ever), and when it was asked."""
    script: list[Answer] = []
    asked: list[float] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(time.monotonic())
            self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, body = script[min(len(asked), len(script)) - 1]
            if not status:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                self.connection.close()
                return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", script, asked
        server.shutdown()


GOOD: Answer = (200, {}, b"\x82\xa7actions\x80\xa4info\x81\xa4seed\x01")


@pytest.mark.parametrize(
    ("first", "kind", "retried"),
    [
        ((503, {}, FULL), Unavailable, True),
        ((503, {"Retry-After": "0"}, b"{}"), Unavailable, True),
        ((507, {}, DIED), Unavailable, True),
        ((500, {}, DIED), Unavailable, True),
        ((0, {}, b""), Unavailable, True),
        ((500, {}, OWN), Gr00tError, False),
        ((504, {}, b"{}"), Late, False),
        ((400, {}, b"[1]"), BadObservation, False),
        ((413, {}, b""), BadObservation, False),
        ((415, {}, b"{}"), BadObservation, False),
        ((307, {"Location": "http://127.0.0.1:9/"}, b""), Gr00tError, False),
        ((429, {}, b"<html>"), Unavailable, True),
        ((502, {}, b"<html>"), Unavailable, True),
        ((401, {}, b"<html>"), Unauthorized, False),
        ((404, {}, b"<html>"), Gr00tError, False),
    ],
)
def test_what_is_sent_again(
    answers: tuple[str, list[Answer], list[float]], monkeypatch: pytest.MonkeyPatch, first: Answer,
    kind: type[Gr00tError], retried: bool,
) -> None:  # fmt: skip
    url, script, asked = answers
    monkeypatch.setattr(gr00t_client, "WAIT", 0.01)
    with Gr00tClient(url, key="k", retries=2) as client:
        script += [first, GOOD]
        if retried:
            assert client.get_action({"prompt": "x"}).info == {"seed": 1} and len(asked) == 2
            del script[1:]
            asked.clear()
        with pytest.raises(Gr00tError) as caught:
            client.get_action({"prompt": "x"})
    assert type(caught.value) is kind and len(asked) == (3 if retried else 1)
    assert caught.value.status == (first[0] or None) and caught.value.detail


def test_a_401_reads_the_key_file_again(answers: tuple[str, list[Answer], list[float]], tmp_path: Path) -> None:
    url, script, asked = answers
    file = tmp_path / "key_file.json"
    file.write_text(json.dumps({"inference": {"key": "old"}}))
    script += [(401, {}, b"<html>"), GOOD]
    with Gr00tClient(url, key_file=file) as client:
        file.write_text(json.dumps({"inference": {"key": "new"}}))
        assert client.get_action({"prompt": "x"}).info == {"seed": 1}
        assert client.key == "new" and len(asked) == 2


def test_a_pause_after_retry_after_is_random(
    answers: tuple[str, list[Answer], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, script, _ = answers
    pauses: list[float] = []
    monkeypatch.setattr(gr00t_client.time, "sleep", pauses.append)
    monkeypatch.setattr(gr00t_client.random, "uniform", lambda low, high: high)
    script += [(503, {"Retry-After": "2"}, b"{}")]
    with Gr00tClient(url, retries=3) as client, pytest.raises(Unavailable):
        client.get_action({"prompt": "x"})
    assert pauses == pytest.approx([2.15, 2.3, 2.6])


def test_retry_after_is_kept_within_the_time_that_is_left(answers: tuple[str, list[Answer], list[float]]) -> None:
    url, script, asked = answers
    script += [(503, {"Retry-After": "1"}, b"{}"), GOOD]
    with Gr00tClient(url) as client:
        client.get_action({"prompt": "x"}, deadline=60.0)
        assert asked[1] - asked[0] >= 1
        for bound in ({"deadline": 0.5}, {"timeout": 0.5}):
            asked.clear()
            with pytest.raises(Unavailable) as caught:
                client.get_action({"prompt": "x"}, **bound)  # type: ignore[arg-type]
            assert caught.value.retry_after == 1 and len(asked) == 1


@pytest.mark.parametrize("closing", [False, True], ids=["kept open", "closed"])
def test_a_body_that_drips_is_cut_off_in_time(closing: bool) -> None:
    """Each byte is in time for its read; the whole never would be. Then silence, which no further byte ends."""
    stop = threading.Event()
    dripped = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal dripped
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Connection" if closing else "Content-Length", "close" if closing else "1000000")
            self.end_headers()
            for _ in range(6):
                self.wfile.write(b"x")
                dripped += 1
                if stop.wait(0.1):
                    return
            stop.wait(120)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with Gr00tClient(f"http://127.0.0.1:{server.server_port}") as client, pytest.raises(Late) as caught:
                client.get_action({"prompt": "x"}, timeout=1.5)
        finally:
            stop.set()
            server.shutdown()
    assert caught.value.status is None and dripped == 6


def test_an_answer_that_is_too_large(
    answers: tuple[str, list[Answer], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, script, asked = answers
    script.append((200, {}, GOOD[2]))
    monkeypatch.setattr(gr00t_client, "MAX_REPLY", len(GOOD[2]) - 1)
    with Gr00tClient(url) as client, pytest.raises(Gr00tError, match="200 Too large") as caught:
        client.get_action({"prompt": "x"})
    assert type(caught.value) is Gr00tError and len(asked) == 1
    monkeypatch.setattr(gr00t_client, "MAX_REPLY", len(GOOD[2]))
    with Gr00tClient(url) as client:
        assert client.get_action({"prompt": "x"}).info == {"seed": 1}


def test_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    port = pick_ports(0)[0]
    assert is_free(port)
    monkeypatch.setattr(gr00t_client, "WAIT", 0.01)
    with Gr00tClient(f"http://127.0.0.1:{port}", key="very-secret", retries=2) as client:
        bodies = record(client, monkeypatch)
        with pytest.raises(Unavailable) as caught:
            client.get_action({"prompt": "x"})
    assert caught.value.status is None and len(bodies) == 3 and len(set(bodies)) == 1
    assert "very-secret" not in str(caught.value)


def test_the_file_stands_alone(tmp_path: Path) -> None:
    """Copied to a robot, it imports nothing of this repository, and OpenCV only where it is needed."""
    shutil.copy(gr00t_client.__file__, tmp_path)
    imported = "import sys, gr00t_client; print(sorted({'cv2', 'torch', 'handler', 'scripts'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", imported], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""},
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_python_of_the_page_on_clients_runs_as_written(
    server: Server, policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    here = {"http://127.0.0.1:8080": server.inference_url, ".run/key_file.json": str(server.key_file),
            "deadline=0.5": "deadline=60.0"}  # fmt: skip
    frame = np.zeros((480, 640, 3), np.uint8)
    fields = {
        "video": {"image": frame, "wrist_image": frame},
        "state": {"x": 0.1, "y": 0.0, "z": 0.2, "roll": 0.0, "pitch": 0.0, "yaw": 0.0, "gripper": [0.0, 0.0]},
        "prompt": "pick up the red bowl",
    }
    for block in blocks[:2]:  # the third needs stubs that grpcio-tools makes
        for there, value in here.items():
            block = block.replace(there, value)
        names: dict[str, Any] = {}
        exec(block, names)
        seed = names.get("seed", 7)
        want = policy.get_action({**fields, "options": {"embodiment_tag": LIBERO, "seed": seed}})
        assert differences(names["actions"], {key: value[0] for key, value in want.items()}) == []


# ------------------------------------------------------------------------------------------------------ KServe's paths


@pytest.mark.parametrize("path", ["/v1/models/gr00t:predict", "/v2/models/gr00t/infer"])
@pytest.mark.parametrize("encode", [as_msgpack, as_json, as_multipart])
def test_kserve_paths_take_this_server_s_bodies(
    server: Server, policy: Gr00tPolicy, path: str, encode: Callable[..., Any]
) -> None:
    fields = observation(policy, seed=8)
    want = policy.get_action(fields)
    actions, info = read(post(server, encode(fields), server.inference_url + path))
    assert differences(actions, want if encode is not as_multipart else {k: v[0] for k, v in want.items()}) == []
    assert info["seed"] == 8


def test_what_of_kserve_does_not_work(server: Server, policy: Gr00tPolicy) -> None:
    """Its envelopes are refused by name; the paths that need TS_OPEN_INFERENCE_PROTOCOL are not there."""
    kind, body = as_json(observation(policy))
    options = {"options": {"embodiment_tag": LIBERO}}
    v1 = {"instances": [json.loads(body)], **options}
    v2 = {"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["stop"]}], **options}
    for path, envelope, pointer in (("/v1/models/gr00t:predict", v1, "/instances"),
                                    ("/v2/models/gr00t/infer", v2, "/inputs")):  # fmt: skip
        reply = post(server, (kind, json.dumps(envelope).encode()), server.inference_url + path)
        assert (reply.status_code, reply.json()["pointer"]) == (422, pointer)
    with local_session() as session:
        for path in ("/v1/models", "/v1/models/gr00t", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/gr00t",
                     "/v2/models/gr00t/ready"):  # fmt: skip
            headers = {"Authorization": f"Bearer {server.inference_key}"}
            assert session.get(server.inference_url + path, headers=headers, timeout=30).status_code == 404, path
