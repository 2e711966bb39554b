"""The archive in a real TorchServe, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import requests

from handler.policy import Gr00tPolicy
from scripts.bench_client import PREDICTIONS, prediction, predictions_request
from scripts.serve import Server
from tests.adversary.catalogue import SECRETS
from tests.client import Body, as_json, as_msgpack, as_multipart, gr00t, patient_archive, post, read, wave
from tests.conftest import DROID, LIBERO, observation


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded checkpoint with the batched overlay, and one of the test's own."""
    folder = tmp_path_factory.mktemp("server")
    with Server(patient_archive(folder), run_dir=folder / "run") as server:
        yield server


@pytest.fixture
def blocker(policy: Gr00tPolicy) -> Body:
    return as_msgpack(observation(policy, seed=99))


def assert_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].dtype == np.float32
        assert np.array_equal(got[key], want[key]), key


def problem(reply: requests.Response) -> tuple[int, str | None]:
    assert reply.headers["Content-Type"] == "application/problem+json"
    document = reply.json()
    assert document["status"] == reply.status_code and document["title"] and document["detail"]
    assert not any(words in reply.text for words in SECRETS)
    return reply.status_code, document.get("pointer")


# ------------------------------------------------------------------------------------------------ isolation in a wave


def bad_requests(policy: Gr00tPolicy) -> list[tuple[Body, tuple[int, str | None]]]:
    """Five requests that break in five ways, and the status and pointer that each must get."""
    malformed = ({"Content-Type": "application/json"}, b'{"video": {"image": [1, 2')
    floats = observation(policy, seed=11)
    floats["video"]["image"] = floats["video"]["image"].astype(np.float32) / 255
    camera = observation(policy, seed=12)
    del camera["video"]["wrist_image"]
    nan = observation(policy, seed=13)
    nan["state"]["pitch"][0, 0, 0] = np.nan
    unknown = observation(policy, seed=14)
    unknown["options"]["embodiment_tag"] = "libero"
    return [
        (malformed, (400, None)),
        (as_msgpack(floats), (422, "/video/image")),
        (as_msgpack(camera), (422, "/video/wrist_image")),
        (as_json(nan), (422, "/state/pitch")),
        (as_msgpack(unknown), (422, "/options/embodiment_tag")),
    ]


def test_five_bad_requests_fail_alone_and_change_no_bit(
    server: Server, policy: Gr00tPolicy, blocker: Body
) -> None:
    good = [as_msgpack(observation(policy, LIBERO, seed=seed)) for seed in range(3)]
    bad = bad_requests(policy)
    pids = server.worker_pids()
    order = [bad[0][0], good[0], bad[1][0], bad[2][0], good[1], bad[3][0], bad[4][0], good[2]]
    replies = wave(server, order, blocker)
    for i, (_, expected) in zip((0, 2, 3, 5, 6), bad, strict=True):
        assert problem(replies[i]) == expected
    mixed = [read(replies[i]) for i in (1, 4, 7)]
    clean = [read(reply) for reply in wave(server, good, blocker)]
    for (actions, info), (want, want_info) in zip(mixed, clean, strict=True):
        assert (info["wave_requests"], info["wave_rows"], info["group_rows"]) == (8, 3, 3)
        assert (want_info["wave_requests"], want_info["wave_rows"], want_info["group_rows"]) == (3, 3, 3)
        assert_bits(actions, want)
    assert server.worker_pids() == pids


def test_bodies_made_to_take_long_do_not_delay_a_neighbour_for_long(
    server: Server, policy: Gr00tPolicy, blocker: Body
) -> None:
    """31 MB of empty lists, in one body and in the parts of a form: refused by count, before anything is made."""
    part = b'--x\r\nContent-Disposition: form-data; name="state.k%d"\r\n\r\n[%s1]\r\n'
    form = b"".join(part % (i, b"[]," * 1_000_000) for i in range(10)) + b"--x--\r\n"
    text = b'{"state": [%s1]}' % (b"[]," * 10_000_000)
    types = ("multipart/form-data; boundary=x", "application/json")
    hostile = [({"Content-Type": kind}, body) for kind, body in zip(types, (form, text), strict=True)]
    pids = server.worker_pids()
    good = observation(policy, seed=1)
    replies = wave(server, [*hostile, as_msgpack(good)], blocker)
    assert [problem(reply) for reply in replies[:2]] == [(413, "/state.k0"), (413, None)]
    actions, info = read(replies[2])
    assert_bits(actions, policy.get_action(good))
    assert info["wave_requests"] == 3
    assert server.worker_pids() == pids


def test_prompts_grids_and_embodiments_share_a_wave(server: Server, policy: Gr00tPolicy, blocker: Body) -> None:
    long = "pick up the large green block and place it on the table next to the plate"
    fields = [
        observation(policy, LIBERO, seed=0),
        observation(policy, DROID, seed=1, prompt=long),
        observation(policy, LIBERO, seed=2, prompt=long),
        observation(policy, LIBERO, seed=3, size=(180, 320)),
        observation(policy, DROID, seed=4),
        observation(policy, DROID, seed=5, size=(480, 640)),
        observation(policy, LIBERO, seed=6, size=(480, 640)),
        observation(policy, LIBERO, seed=7, prompt="stop"),
    ]
    groups = [3, 2, 3, 1, 2, 1, 1, 3]  # 256x256: LIBERO 0, 2, 7 and DROID 1, 4; the others stand alone
    replies = wave(server, [as_msgpack(f) for f in fields], blocker)
    for f, reply, group in zip(fields, replies, groups, strict=True):
        actions, info = read(reply)
        assert (info["wave_requests"], info["wave_rows"], info["group_rows"]) == (8, 8, group)
        solo = policy.get_action(f)
        for key in solo:
            np.testing.assert_allclose(actions[key], solo[key], rtol=0, atol=1e-5, err_msg=key)


def test_a_neighbour_on_another_path_does_not_lead_the_wave_astray(
    server: Server, policy: Gr00tPolicy, blocker: Body
) -> None:
    """Headers that TorchServe's base handler would obey for the whole wave, in the place that it looks at."""
    good = [as_msgpack(observation(policy, LIBERO, seed=seed)) for seed in range(2)]
    for name in ("describe", "explain"):
        spoofed = ({**good[0][0], name: "True"}, good[0][1])
        replies = wave(server, [spoofed, good[1]], blocker)
        want = [read(reply)[0] for reply in wave(server, good, blocker)]
        for reply, actions in zip(replies, want, strict=True):
            assert_bits(read(reply)[0], actions)


# ------------------------------------------------------------------------------------------- one request, every form


@pytest.mark.parametrize("tag", [LIBERO, DROID])
@pytest.mark.parametrize(
    "encode", [as_msgpack, lambda f: as_msgpack(f, gr00t), as_json, as_multipart],
    ids=["openpi", "gr00t", "json", "multipart"],
)
def test_rest_returns_the_bits_of_get_action(server: Server, policy: Gr00tPolicy, encode: Any, tag: str) -> None:
    fields = observation(policy, tag, seed=3, size=(240, 320))
    want = policy.get_action(fields)
    if encode is as_multipart:  # a form has no B axis
        want = {key: value[0] for key, value in want.items()}
    actions, info = read(post(server, encode(fields)))
    assert_bits(actions, want)
    assert info["wave_requests"] == info["wave_rows"] == info["group_rows"] == 1
    assert (info["seed"], info["checkpoint"]) == (3, policy.checkpoint)
    assert info["preprocess_ms"] > 0 and info["inference_ms"] > 0


def test_the_reply_is_in_the_encoding_that_accept_asks_for(server: Server, policy: Gr00tPolicy) -> None:
    fields = observation(policy, seed=4)
    want = policy.get_action(fields)
    headers, body = as_msgpack(fields)
    as_text = post(server, ({**headers, "Accept": "application/json"}, body))
    assert as_text.headers["Content-Type"] == "application/json"
    assert_bits(read(as_text)[0], want)
    headers, body = as_json(fields)
    binary = post(server, ({**headers, "Accept": "application/msgpack"}, body))
    assert binary.headers["Content-Type"] == "application/msgpack"
    assert_bits(read(binary)[0], want)


def test_vectorised_rows_timestamp_and_chunking(server: Server, policy: Gr00tPolicy) -> None:
    one = observation(policy, DROID, seed=5)
    fields: dict[str, Any] = {
        "images": {key: np.repeat(value, 3, 0) for key, value in one["video"].items()},
        "state": {key: np.repeat(value, 3, 0) for key, value in one["state"].items()},
        "prompt": "close the drawer",
        "options": {**one["options"], "timestamp": 1234.5},
    }
    actions, info = read(post(server, as_msgpack(fields)))
    assert_bits(actions, policy.get_action(fields))
    assert (info["wave_requests"], info["wave_rows"], info["group_rows"], info["timestamp"]) == (1, 3, 3, 1234.5)
    fields["options"]["rtc"] = {"action": actions, "overlap_steps": 10, "frozen_steps": 4, "ramp_rate": 3.0}
    chained, _ = read(post(server, as_msgpack(fields)))
    assert_bits(chained, policy.get_action(fields))
    assert not np.array_equal(chained["joint_position"], actions["joint_position"])


def test_an_unseeded_request_says_which_seed_it_got(server: Server, policy: Gr00tPolicy) -> None:
    fields = observation(policy)
    del fields["options"]["seed"]
    actions, info = read(post(server, as_msgpack(fields)))
    fields["options"]["seed"] = info["seed"]
    assert_bits(actions, policy.get_action(fields))


# --------------------------------------------------------------------------------------------------- other endpoints


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"hello", 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"prompt=x", 415),
        ({}, b"{}", 415),
        ({"Content-Type": "application/json"}, b"", 400),
        ({"Content-Type": "APPLICATION/JSON"}, b"[]", 400),
        ({"Content-Type": "application/msgpack"}, b"\x81\xa5video\xc0", 422),
    ],
)
def test_undecodable_bodies(server: Server, headers: dict[str, str], body: bytes, status: int) -> None:
    assert problem(post(server, (headers, body)))[0] == status


def test_a_request_over_the_row_limit(server: Server, policy: Gr00tPolicy) -> None:
    one = observation(policy, seed=1, size=(32, 32))
    fields = {
        "video": {key: np.repeat(value, 33, 0) for key, value in one["video"].items()},
        "state": {key: np.repeat(value, 33, 0) for key, value in one["state"].items()},
        "prompt": "stop",
        "options": one["options"],
    }
    assert problem(post(server, as_msgpack(fields))) == (413, None)


def test_explanations_are_not_found(server: Server, policy: Gr00tPolicy) -> None:
    url = f"{server.inference_url}/explanations/gr00t"
    assert problem(post(server, as_msgpack(observation(policy)), url)) == (404, None)


def test_the_management_api_describes_the_contract(server: Server, policy: Gr00tPolicy) -> None:
    assert server.describe(customized=True)["customizedMetadata"] == policy.describe()


def test_a_client_cannot_get_the_description_in_place_of_an_answer(server: Server) -> None:
    empty_form = ({"Content-Type": "multipart/form-data; boundary=x", "describe": "True"}, b"--x--\r\n")
    reply = post(server, empty_form, f"{server.inference_url}/invocations")
    assert problem(reply) == (400, None) and "embodiments" not in reply.text


def test_no_key_no_answer(server: Server, policy: Gr00tPolicy) -> None:
    headers, body = as_msgpack(observation(policy))
    reply = requests.post(server.predict_url, data=body, headers=headers, timeout=30)
    assert reply.status_code == 400 and "token" in reply.text.lower()


def test_the_overlays_are_in_force(server: Server) -> None:
    model = server.describe()
    assert (model["batchSize"], model["maxBatchDelay"], model["minWorkers"]) == (8, 30, 1)


def test_grpc_takes_the_same_bodies(server: Server, policy: Gr00tPolicy) -> None:
    """Inputs named like headers stand for them; the answer is a body, or a problem that says its status."""
    fields = observation(policy, seed=5)
    want = policy.get_action(fields)
    key = (("authorization", f"Bearer {server.inference_key}"),)
    with grpc.insecure_channel(f"127.0.0.1:{server.ports[3]}") as channel:
        call = channel.unary_unary(PREDICTIONS)

        def ask(**inputs: bytes) -> bytes:
            return prediction(call(predictions_request(**inputs), metadata=key, timeout=60))

        packed = msgpack.unpackb(ask(body=as_msgpack(fields)[1], content_type=b"application/msgpack"),
                                 strict_map_key=False)  # fmt: skip
        text = json.loads(ask(body=as_msgpack(fields)[1], content_type=b"application/msgpack",
                              accept=b"application/json"))  # fmt: skip
        for name, value in want.items():
            array = packed["actions"][name]
            assert array[b"data"] == value.tobytes() and array[b"shape"] == list(value.shape)
            assert np.array_equal(np.array(text["actions"][name], np.float32), value)
        del fields["state"]["yaw"]
        refused = json.loads(ask(body=as_json(fields)[1], content_type=b"application/json"))
        assert (refused["status"], refused["pointer"]) == (422, "/state/yaw")
        assert json.loads(ask(body=b"{}"))["status"] == 415
