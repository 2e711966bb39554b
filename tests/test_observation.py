"""The observation check: every accepted form gives the same arrays, every refusal its status, pointer and reason."""

from __future__ import annotations

import base64
import copy
import io
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from handler.observation import MAX_SEED, Limits, Observation, check
from handler.policy import Gr00tPolicy
from handler.problem import Problem
from tests.conftest import DROID, LIBERO, observation

Fields = dict[str, Any]
TASK = "annotation.human.action.task_description"
DROID_TASK = "annotation.language.language_instruction"
EXTERIOR = "video/exterior_image_1_left"
SIZE = (6, 8)
DROP: Any = object()


def changed(fields: Fields, changes: Mapping[str, Any]) -> Fields:
    """A copy with {"a/b": value} put in; DROP deletes, a function gets the old value."""
    out = copy.deepcopy(fields)
    for path, value in changes.items():
        *parents, last = path.split("/")
        at = out
        for name in parents:
            at = at.setdefault(name, {})
        if value is DROP:
            del at[last]
        else:
            at[last] = value(at[last]) if callable(value) else value
    return out


def each(fields: Fields, modality: str, change: Callable[[np.ndarray], Any]) -> Fields:
    """A copy with every value of "video" or "state" changed."""
    return {**fields, modality: {key: change(value) for key, value in fields[modality].items()}}


def encode(frame: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind)
    return file.getvalue()


def text(frame: np.ndarray) -> str:
    return base64.b64encode(encode(frame)).decode()


def rows(fields: Fields, count: int) -> Fields:
    """The same observation `count` times, row i brighter by i and moved by i."""
    def video(value: np.ndarray) -> np.ndarray:
        return np.concatenate([value + np.uint8(i) for i in range(count)])

    def state(value: np.ndarray) -> np.ndarray:
        return np.concatenate([value + np.float32(i) for i in range(count)])

    out = each(each(fields, "video", video), "state", state)
    return {**out, "language": {key: [[f"text {i}"] for i in range(count)] for key in fields["language"]}}


def problem(call: Callable[[], Any]) -> Problem:
    with pytest.raises(Problem) as caught:
        call()
    assert caught.value.detail.isascii()
    return caught.value


def same(got: Observation, fields: Fields, batched: bool) -> None:
    """`got` holds the canonical `fields` exactly."""
    assert list(got.video) == list(fields["video"]) and list(got.state) == list(fields["state"])
    for key, frames in fields["video"].items():
        assert got.video[key].dtype == np.uint8 and got.video[key].shape == frames.shape
        np.testing.assert_array_equal(got.video[key], frames)
    for key, value in fields["state"].items():
        assert got.state[key].dtype == np.dtype("=f4") and got.state[key].dtype.isnative
        assert got.state[key].shape == value.shape
        np.testing.assert_array_equal(got.state[key], value)
    assert got.instructions == [texts[0] for texts in next(iter(fields["language"].values()))]
    assert (got.batched, got.rows) == (batched, len(got.instructions))


# ---------------------------------------------------------------------------------------------------- accepted forms

FORMS: dict[str, tuple[Callable[[Fields], Fields], bool]] = {
    "nested": (lambda f: f, True),
    "flat": (lambda f: {**{f"{m}.{k}": v for m in ("video", "state") for k, v in f[m].items()}, **f["language"],
                        "options": f["options"]}, True),
    "flat images and nested state": (
        lambda f: {**{f"images.{k}": v for k, v in f["video"].items()}, "state": f["state"], "prompt": "go",
                   "options": f["options"]}, True),
    "flat language with its modality": (lambda f: changed(f, {"language": DROP}) | {f"language.{TASK}": "go"}, True),
    "images": (lambda f: changed(f, {"video": DROP}) | {"images": f["video"]}, True),
    "half video, half images": (
        lambda f: changed(f, {"video/image": DROP}) | {"images": {"image": f["video"]["image"]}}, True),
    "prompt": (lambda f: changed(f, {"language": DROP}) | {"prompt": "go"}, True),
    "language is a text": (lambda f: changed(f, {f"language/{TASK}": "go"}), True),
    "language is B texts": (lambda f: changed(f, {f"language/{TASK}": ["go"]}), True),
    "language is an array": (lambda f: changed(f, {f"language/{TASK}": np.array([["go"]])}), True),
    "a paraphrase": (lambda f: f, True),
    "no B": (lambda f: each(each(f, "video", lambda v: v[0]), "state", lambda v: v[0]), False),
    "no B and T": (lambda f: each(each(f, "video", lambda v: v[0, 0]), "state", lambda v: v[0, 0]), False),
    "B in one camera only": (
        lambda f: changed(each(each(f, "video", lambda v: v[0]), "state", lambda v: v[0, 0]),
                          {"video/image": f["video"]["image"]}), True),
    "B in one state only": (
        lambda f: changed(each(each(f, "video", lambda v: v[0, 0]), "state", lambda v: v[0]),
                          {"state/gripper": f["state"]["gripper"]}), True),
    "0-d arrays": (
        lambda f: each(each(f, "video", lambda v: v[0, 0]), "state", lambda v: np.squeeze(v)), False),
    "numbers": (
        lambda f: each(each(f, "video", lambda v: v[0, 0]), "state", lambda v: np.squeeze(v).tolist()), False),
    "lists": (lambda f: each(each(f, "video", lambda v: v.tolist()), "state", lambda v: v.tolist()), True),
    "lists of arrays": (lambda f: each(each(f, "video", list), "state", list), True),
    "PNG": (lambda f: each(f, "video", lambda v: encode(v[0, 0])), True),
    "PNG, T of them": (lambda f: each(f, "video", lambda v: [encode(v[0, 0])]), True),
    "PNG, B lists of T": (lambda f: each(f, "video", lambda v: [[encode(v[0, 0])]]), True),
    "base64": (lambda f: each(f, "video", lambda v: text(v[0, 0])), True),
    "base64 list": (lambda f: each(f, "video", lambda v: [[text(v[0, 0])]]), True),
    "data URL": (lambda f: each(f, "video", lambda v: "data:image/png;base64," + text(v[0, 0])), True),
    "PNG without B anywhere": (
        lambda f: each(each(f, "video", lambda v: encode(v[0, 0])), "state", lambda v: v[0, 0]), False),
    "float64 state": (lambda f: each(f, "state", lambda v: v.astype(np.float64)), True),
    "big-endian state": (lambda f: each(f, "state", lambda v: v.astype(">f4")), True),
    "big-endian float64 state": (lambda f: each(f, "state", lambda v: v.astype(">f8")), True),
    "int32 video": (lambda f: each(f, "video", lambda v: v.astype(np.int32)), True),
    "big-endian int16 video": (lambda f: each(f, "video", lambda v: v.astype(">i2")), True),
    "uint64 video": (lambda f: each(f, "video", lambda v: v.astype(np.uint64)), True),
    "Fortran order": (lambda f: each(each(f, "video", np.asfortranarray), "state", np.asfortranarray), True),
    "read-only": (lambda f: each(f, "video", lambda v: np.frombuffer(v.tobytes(), np.uint8).reshape(v.shape)), True),
    "options that are null": (lambda f: {**f, "options": {**f["options"], "rtc": None, "timestamp": None}}, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(policy: Gr00tPolicy, form: str) -> None:
    fields = observation(policy, size=SIZE, prompt="go")
    change, batched = FORMS[form]
    got = policy.check(change(fields))
    same(got, fields, batched)
    assert (got.seed, got.rtc, got.timestamp, got.embodiment.tag) == (0, None, None, LIBERO)


DROID_FORMS: dict[str, tuple[Callable[[np.ndarray], Any], bool]] = {
    "array": (lambda v: v, True),
    "no B": (lambda v: v[0], False),
    "PNG, T of them": (lambda v: [encode(frame) for frame in v[0]], False),
    "base64, B lists of T": (lambda v: [[text(frame) for frame in row] for row in v], True),
    "PNG and base64": (lambda v: [encode(v[0, 0]), text(v[0, 1])], False),
}


@pytest.mark.parametrize("form", DROID_FORMS)
def test_forms_of_two_frames(policy: Gr00tPolicy, form: str) -> None:
    fields = observation(policy, DROID, size=SIZE)
    change, batched = DROID_FORMS[form]
    same(policy.check(each(each(fields, "video", change), "state", lambda v: v[0])), fields, batched)
    second = changed(fields, {f"language/{DROID_TASK}_2": [["a paraphrase"]]})
    same(policy.check(second), fields, True)


@pytest.mark.parametrize("language", ["one", [["text 0"], ["text 1"], ["text 2"]], ["text 0", "text 1", "text 2"]])
@pytest.mark.parametrize("encoded", [False, True])
def test_rows(policy: Gr00tPolicy, language: Any, encoded: bool) -> None:
    fields = rows(observation(policy, size=SIZE), 3)
    sent = changed(fields, {f"language/{TASK}": language})
    if encoded:
        sent = each(sent, "video", lambda v: [[encode(row[0])] for row in v])
    if language == "one":
        fields["language"][TASK] = [["one"]] * 3
    same(policy.check(sent), fields, True)


def test_jpeg_pixels_are_those_of_the_file(policy: Gr00tPolicy) -> None:
    fields = observation(policy, size=SIZE)
    data = encode(fields["video"]["image"][0, 0], "JPEG")
    fields["video"]["image"] = np.asarray(Image.open(io.BytesIO(data)))[None, None]
    for value in (data, base64.b64encode(data).decode()):
        same(policy.check(changed(fields, {"video/image": value})), fields, True)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (2, 2.0), ([2], 2.0), ([[2]], 2.0), ([[[2]]], 2.0), (np.array([[2]], ">i4"), 2.0),
        (np.array([2], np.uint8), 2.0), (np.array([0.5], np.float16), 0.5), (0.1, np.float32(0.1)), (-0.0, 0.0),
        (10**6, 1e6), (np.array(-(2**19)), -(2.0**19)), (1e-60, 0.0), (-1e6, -1e6), (np.float32(1.5), 1.5),
    ],
)  # fmt: skip
def test_state_numbers(policy: Gr00tPolicy, value: Any, want: float) -> None:
    got = policy.check(changed(observation(policy, size=SIZE), {"state/x": value}))
    assert got.state["x"].shape == (1, 1, 1) and got.state["x"][0, 0, 0] == want


@pytest.mark.parametrize("value", [0, 7, MAX_SEED, np.array(7), np.int64(7), None])
def test_seeds(policy: Gr00tPolicy, value: Any) -> None:
    assert policy.check(changed(observation(policy, size=SIZE), {"options/seed": value})).seed == value


@pytest.mark.parametrize("value", [0, -1.5, 2**63, "2024-01-01T00:00:00Z", "x" * 64, np.array(3), None])
def test_timestamps(policy: Gr00tPolicy, value: Any) -> None:
    got = policy.check(changed(observation(policy, size=SIZE), {"options/timestamp": value})).timestamp
    assert got == value and not isinstance(got, np.ndarray)


def test_only_embodiment_is_the_default(policy: Gr00tPolicy) -> None:
    fields = observation(policy, size=SIZE)
    only = {LIBERO: policy.embodiments[LIBERO]}
    for options in ({}, {"embodiment_tag": LIBERO}, {"embodiment_tag": None}, None, DROP):
        got = check(changed(fields, {"options": options}), only, LIBERO, Limits())
        assert got.embodiment.tag == LIBERO and got.seed is None


def rtc(**changes: Any) -> Callable[[Any], Any]:
    """options.rtc, valid for LIBERO with one row, with changes; DROP leaves a key out."""
    keys = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    value = {"action": {key: np.full((1, 16, 1), 0.25, np.float32) for key in keys}, "overlap_steps": 4,
             "frozen_steps": 2, "ramp_rate": 3, **changes}
    return lambda _: {key: item for key, item in value.items() if item is not DROP}


def action(**changes: Any) -> Callable[[Any], Any]:
    """`rtc` with changes to its action."""
    value = {**rtc()(None)["action"], **changes}
    return rtc(action={key: item for key, item in value.items() if item is not DROP})


def test_rtc(policy: Gr00tPolicy) -> None:
    fields = changed(observation(policy, size=SIZE), {"options/rtc": None})
    got = policy.check(changed(fields, {"options/rtc": rtc()})).rtc
    assert got is not None and (got.overlap_steps, got.frozen_steps, got.ramp_rate) == (4, 2, 3.0)
    assert list(got.action) == [group.key for group in policy.embodiments[LIBERO].actions]
    for value in got.action.values():
        np.testing.assert_array_equal(value, np.full((1, 16, 1), 0.25, np.float32))
    plain = {key: value[0].tolist() for key, value in rtc()(None)["action"].items()}  # as a JSON reply without B
    got = policy.check(changed(fields, {"options/rtc": rtc(action=plain, frozen_steps=DROP, ramp_rate=DROP)})).rtc
    assert got is not None and (got.frozen_steps, got.ramp_rate) == (0, 6.0)
    assert {value.shape for value in got.action.values()} == {(1, 16, 1)}


# ---------------------------------------------------------------------------------------------------------- refusals

LONG = np.zeros((6, 8, 3), np.uint8)
V, X, G, L = "video/image", "state/x", "state/gripper", f"language/{TASK}"
NAN, INF = float("nan"), float("inf")
SEEDS: list[Any] = [-1, 2**63, 10**400, True, 1.0, NAN, "1", [1], np.array([1]), np.array(True), {}]
TIMESTAMPS: list[Any] = [NAN, INF, True, [1], {}, "x" * 65, 2**64, 10**400, b"1", np.zeros(2)]
RAMPS: list[Any] = [0, -1, 1000.5, NAN, INF, 10**400, True, "1", None, [1], np.zeros(2)]
REFUSALS: list[tuple[dict[str, Any], int, str | None, str]] = [
    # what is missing
    ({V: DROP}, 422, "/video/image", "camera 'image' is missing"),
    ({"video": DROP}, 422, "/video/image", "needs it as video.image"),
    ({X: DROP}, 422, "/state/x", "state 'x' is missing"),
    ({L: DROP}, 422, f"/language/{TASK}", "(or prompt)"),
    ({"options": {}}, 422, "/options/embodiment_tag", f"this server has {LIBERO}, {DROID}"),
    ({"options": DROP}, 422, "/options/embodiment_tag", "is missing"),
    # what is unknown
    ({"video/imgae": LONG}, 422, "/video/imgae", "did you mean 'image'?"),
    ({"video/Image": LONG}, 422, "/video/Image", "did you mean 'image'?"),
    ({"video.wrist": LONG}, 422, "/video.wrist", "unknown video key 'wrist'"),
    ({"images.b~": LONG}, 422, "/images.b~0", "unknown video key 'b~'"),
    ({"state/joint": 1}, 422, "/state/joint", "x, y, z, roll, pitch, yaw, gripper"),
    ({"state.rol": 1}, 422, "/state.rol", "did you mean 'roll'?"),
    ({"language/annotation.other": "go"}, 422, "/language/annotation.other", "unknown language key"),
    ({"annotation.human.action.task": "go"}, 422, "/annotation.human.action.task", f"did you mean '{TASK}'?"),
    ({"action": 1}, 422, "/action", "unknown field 'action'"),
    ({"vidéo": 1}, 422, "/vidéo", "unknown field 'vid\\xe9o'"),
    ({"": 1}, 422, "/", "unknown field ''"),
    ({"options/sed": 1}, 422, "/options/sed", "did you mean 'seed'?"),
    ({"x" * 500: 1}, 422, "/" + "x" * 500, "..."),
    # what is given twice
    ({"video.image": LONG}, 422, "/video.image", "given twice"),
    ({"images": {"image": LONG}}, 422, "/images/image", "given twice"),
    ({"images.image": LONG}, 422, "/images.image", "given twice"),
    ({"state.x": 1}, 422, "/state.x", "state key 'x' is given twice"),
    ({"prompt": "go"}, 422, "/prompt", "given twice"),
    ({TASK: "go"}, 422, f"/{TASK}", "given twice"),
    # modalities that are no mapping
    ({"video": LONG}, 422, "/video", "must be a mapping of keys, got an array of uint8 with shape [6, 8, 3]"),
    ({"state": [1.0]}, 422, "/state", "got a list"),
    ({"language": "go"}, 422, "/language", "got a text"),
    ({"images": None}, 422, "/images", "got nothing"),
    # video
    ({V: LONG / np.float32(255)}, 422, "/video/image", "video is float32"),
    ({V: LONG.astype(np.float16)}, 422, "/video/image", "0..1 or 0..255"),
    ({V: (LONG / 255).tolist()}, 422, "/video/image", "video is float64"),
    ({V: LONG.astype(bool)}, 422, "/video/image", "video is bool"),
    ({V: LONG.astype(bool).tolist()}, 422, "/video/image", "got a boolean"),
    ({V: None}, 422, "/video/image", "got nothing"),
    ({V: {"a": 1}}, 422, "/video/image", "got a mapping"),
    ({V: 3}, 422, "/video/image", "expected (B, T, H, W, 3) with T = 1, or without B, or (H, W, 3)"),
    ({V: []}, 422, "/video/image", "video is empty: shape [0]"),
    ({V: [[[1, 2, 3]], [[1, 2]]]}, 422, "/video/image", "rows differ in length"),
    ({V: LONG.astype(np.int32) - 1}, 422, "/video/image", "values outside 0..255"),
    ({V: LONG.astype(np.uint16) + 256}, 422, "/video/image", "video is uint16"),
    ({V: LONG[..., :1]}, 422, "/video/image", "video has 1 channels (shape [1, 1, 6, 8, 1])"),
    ({V: LONG.transpose(2, 0, 1)}, 422, "/video/image", "video has 8 channels"),
    ({V: LONG[..., 0]}, 422, "/video/image", "shape [6, 8]"),
    ({V: np.zeros((1, 1, 1, 6, 8, 3), np.uint8)}, 422, "/video/image", "shape [1, 1, 1, 6, 8, 3]"),
    ({V: np.zeros((2, 6, 8, 3), np.uint8)}, 422, "/video/image", "T = 2"),
    ({V: np.zeros((1, 0, 6, 8, 3), np.uint8)}, 422, "/video/image", "video is empty"),
    ({V: np.zeros((0, 1, 6, 8, 3), np.uint8)}, 422, "/video/image", "video is empty"),
    ({V: np.zeros((1, 1, 0, 8, 3), np.uint8)}, 422, "/video/image", "video is empty"),
    ({V: np.zeros((1, 1, 6, 0, 3), np.uint8)}, 422, "/video/image", "video is empty"),
    ({V: b"GIF89a"}, 422, "/video/image", "JPEG or PNG"),
    ({V: "not base64!"}, 422, "/video/image", "base64"),
    ({V: [encode(LONG), 1]}, 422, "/video/image", "got a number"),
    ({V: [encode(LONG), encode(LONG[:5])]}, 422, "/video/image", "must all have one size"),
    ({V: [[encode(LONG)], []]}, 422, "/video/image", "as many frames in every row"),
    ({V: [[[encode(LONG)]]]}, 422, "/video/image", "B lists of T"),
    ({V: [encode(LONG), encode(LONG)]}, 422, "/video/image", "T = 2"),
    # state
    ({X: "1.5"}, 422, "/state/x", "expected numbers, got a text"),
    ({X: ["1.5"]}, 422, "/state/x", "expected numbers, got a text"),
    ({X: [[["1.5"]]]}, 422, "/state/x", "expected numbers, got a text"),
    ({X: b"1.5"}, 422, "/state/x", "got bytes"),
    ({X: True}, 422, "/state/x", "got a boolean"),
    ({G: [1.0, True]}, 422, "/state/gripper", "got a boolean"),
    ({X: np.array([True])}, 422, "/state/x", "values are bool"),
    ({X: None}, 422, "/state/x", "got nothing"),
    ({X: [None]}, 422, "/state/x", "got nothing"),
    ({X: {"a": 1}}, 422, "/state/x", "got a mapping"),
    ({X: NAN}, 422, "/state/x", "value 0 of step 0 of row 0 is nan"),
    ({G: [0.0, INF]}, 422, "/state/gripper", "value 1 of step 0 of row 0 is inf"),
    ({G: np.array([[[0, -1e39]]])}, 422, "/state/gripper", "is -inf as float32"),
    ({X: 2**24 + 1}, 422, "/state/x", "too large for float32"),
    ({X: 2**24}, 422, "/state/x", "16777216.0 as float32; it lies too far outside the checkpoint's statistics"),
    ({X: np.array(-(2**62))}, 422, "/state/x", "it lies too far outside"),
    ({G: [0.0, 3.4e38]}, 422, "/state/gripper", "value 1 of step 0 of row 0 is 3.3"),
    ({X: 2**63 - 1}, 422, "/state/x", "too large for float32"),
    ({X: np.array([2**64 - 1], np.uint64)}, 422, "/state/x", "too large for float32"),
    ({X: 10**400}, 422, "/state/x", "a number is too large"),
    ({X: [1.0, 10**400]}, 422, "/state/x", "a number is too large"),
    ({X: [1, 2]}, 422, "/state/x", "expected (B, 1, 1), or without B, or (1,)"),
    ({G: 1.0}, 422, "/state/gripper", "expected (B, 1, 2), or without B, or (2,)"),
    ({G: [1.0]}, 422, "/state/gripper", "shape is [1], expected (B, 1, 2)"),
    ({G: np.zeros((1, 1, 3))}, 422, "/state/gripper", "shape is [1, 1, 3]"),
    ({G: np.zeros((2, 2))}, 422, "/state/gripper", "T = 2"),
    ({G: np.zeros((1, 0, 2))}, 422, "/state/gripper", "T = 0"),
    ({G: np.zeros((0, 1, 2))}, 422, "/state/gripper", "shape is [0, 1, 2]"),
    ({G: np.zeros((1, 1, 1, 2))}, 422, "/state/gripper", "shape [1, 1, 1, 2]"),
    ({G: [[1.0], [1.0, 2.0]]}, 422, "/state/gripper", "rows differ in length"),
    ({G: []}, 422, "/state/gripper", "shape"),
    # language
    ({L: 5}, 422, f"/language/{TASK}", "got a number"),
    ({L: None}, 422, f"/language/{TASK}", "got nothing"),
    ({L: b"go"}, 422, f"/language/{TASK}", "got bytes"),
    ({L: []}, 422, f"/language/{TASK}", "empty list"),
    ({L: [[]]}, 422, f"/language/{TASK}", "got a list"),
    ({L: [["go", "on"]]}, 422, f"/language/{TASK}", "got a list"),
    ({L: [[["go"]]]}, 422, f"/language/{TASK}", "got a list"),
    ({L: ["go", "on"]}, 422, f"/language/{TASK}", "2 rows (B), others have 1"),
    ({L: np.zeros(3)}, 422, f"/language/{TASK}", "got an array of float64 with shape [3]"),
    ({L: DROP, "prompt": "\ud800"}, 422, "/prompt", "surrogate"),
    ({L: "x" * 4097}, 413, f"/language/{TASK}", "4097 characters; at most 4096"),
    # rows
    ({V: np.zeros((2, 1, 6, 8, 3), np.uint8)}, 422, "/video/wrist_image", "1 rows (B), others have 2"),
    ({X: np.zeros((2, 1, 1))}, 422, "/video/image", "1 rows (B), others have 2"),
    # options
    ({"options": [1]}, 422, "/options", "must be a mapping, got a list"),
    ({"options": "seed"}, 422, "/options", "got a text"),
    ({"options/embodiment_tag": "libero"}, 422, "/options/embodiment_tag", f"did you mean '{LIBERO}'?"),
    ({"options/embodiment_tag": "LIBERO_SIM"}, 422, "/options/embodiment_tag", f"did you mean '{LIBERO}'?"),
    ({"options/embodiment_tag": 3}, 422, "/options/embodiment_tag", "unknown embodiment 3"),
    ({"options/embodiment_tag": [LIBERO]}, 422, "/options/embodiment_tag", "unknown embodiment a list"),
    ({"options/embodiment_tag": None}, 422, "/options/embodiment_tag", "is missing"),
    *[
        ({"options/seed": seed}, 422, "/options/seed", f"from 0 to {MAX_SEED}")
        for seed in SEEDS
    ],
    *[
        ({"options/timestamp": value}, 422, "/options/timestamp", "finite number")
        for value in TIMESTAMPS
    ],
    *[
        ({"options/prepared_with": value}, 422, "/options/prepared_with", f"must be a mapping of numbers and {words}")
        for value, words in ((True, "lists of"), ("yes", "lists of"),
                             ([1], "lists of whole numbers, the contract's image_recipe; got a list"))
    ],
    *[
        ({"options/prepared_with": {"crop_fraction": 0.95, key: value}}, 422, f"/options/prepared_with/{key}", words)
        for key, value, words in (
            ("edge", np.zeros(3), "its 'edge' is an array of float64 with shape [3]"),
            ("target", [256, np.zeros(3)], "its 'target' is a list"),
            ("edge", "256", "its 'edge' is a text"),
            ("", b"", "its '' is bytes"),
        )
    ],
    # real-time chunking
    ({"options/rtc": [1]}, 422, "/options/rtc", "must be a mapping, got a list"),
    ({"options/rtc": rtc(overlap=3)}, 422, "/options/rtc/overlap", "did you mean 'overlap_steps'?"),
    ({"options/rtc": rtc(action=DROP)}, 422, "/options/rtc/action", "options.rtc.action is missing"),
    ({"options/rtc": rtc(overlap_steps=DROP)}, 422, "/options/rtc/overlap_steps", "is missing"),
    ({"options/rtc": rtc(overlap_steps=0)}, 422, "/options/rtc/overlap_steps", "from 1 to 16, got 0"),
    ({"options/rtc": rtc(overlap_steps=17)}, 422, "/options/rtc/overlap_steps", "from 1 to 16, got 17"),
    ({"options/rtc": rtc(overlap_steps=4.0)}, 422, "/options/rtc/overlap_steps", "whole number"),
    ({"options/rtc": rtc(overlap_steps=True)}, 422, "/options/rtc/overlap_steps", "whole number"),
    ({"options/rtc": rtc(frozen_steps=5)}, 422, "/options/rtc/frozen_steps", "from 0 to 4, got 5"),
    ({"options/rtc": rtc(frozen_steps=-1)}, 422, "/options/rtc/frozen_steps", "from 0 to 4, got -1"),
    ({"options/rtc": rtc(frozen_steps="1")}, 422, "/options/rtc/frozen_steps", "got '1'"),
    *[
        ({"options/rtc": rtc(ramp_rate=value)}, 422, "/options/rtc/ramp_rate", "from 0.001 to 1000")
        for value in RAMPS
    ],
    ({"options/rtc": rtc(action=[1])}, 422, "/options/rtc/action", "must be the previous reply's actions"),
    ({"options/rtc": action(q=1)}, 422, "/options/rtc/action/q", "has no key 'q'"),
    ({"options/rtc": action(z=DROP)}, 422, "/options/rtc/action/z", "send the whole previous chunk"),
    ({"options/rtc": action(z=np.zeros((1, 15, 1)))}, 422, "/options/rtc/action/z", "T = 15"),
    ({"options/rtc": action(z=np.zeros((1, 16, 2)))}, 422, "/options/rtc/action/z", "shape is [1, 16, 2]"),
    ({"options/rtc": action(z=np.zeros(16))}, 422, "/options/rtc/action/z", "shape [16]"),
    ({"options/rtc": action(z=np.zeros((2, 16, 1)))}, 422, "/options/rtc/action/z", "the observation has 1"),
    ({"options/rtc": action(z=np.full((1, 16, 1), np.nan))}, 422, "/options/rtc/action/z", "is nan"),
    ({"options/rtc": action(z="chunk")}, 422, "/options/rtc/action/z", "got a text"),
]


@pytest.mark.parametrize(("changes", "status", "pointer", "fragment"), REFUSALS)
def test_refusals(
    policy: Gr00tPolicy, changes: dict[str, Any], status: int, pointer: str | None, fragment: str
) -> None:
    fields = changed(observation(policy, size=SIZE), {"options/rtc": None})
    found = problem(lambda: policy.check(changed(fields, changes)))
    assert (found.status, found.pointer) == (status, pointer)
    assert fragment in found.detail
    assert len(found.detail) < 500


E9, CHUNK = "state/eef_9d", np.tile([0.1, 0.2, 0.3, 1, 0, 0, 0, 1, 0], (1, 40, 1))
DROID_RTC = {"action": {"eef_9d": CHUNK, "gripper_position": np.zeros((1, 40, 1)), "joint_position":
                        np.zeros((1, 40, 7))}, "overlap_steps": 8}
DROID_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({EXTERIOR: LONG}, "/video/exterior_image_1_left", "with T = 2, or without B"),
    ({EXTERIOR: encode(LONG)}, "/video/exterior_image_1_left", "shape [6, 8, 3]"),
    ({EXTERIOR: [encode(LONG)] * 3}, "/video/exterior_image_1_left", "T = 3"),
    *[
        ({E9: np.array([0.5, 0.6, 0.7, *pose], np.float32)}, "/state/eef_9d", "holds no rotation")
        for pose in (
            (0, 0, 0, 0, 0, 0),
            (0, 0, 0, 1, 0, 0),
            (1, 0, 0, 0, 0, 0),
            (1, 0, 0, 1, 0, 0),
            (1, 0, 0, -2, 0, 0),
            # parallel, but rounding leaves a crumb of 1e-17 that is no direction
            (0.1, 0.2, 0.3, 0.2, 0.4, 0.6),
            (0.1, 0.2, 0.3, 0.3, 0.6, 0.9),
        )
    ],
    ({"options/rtc": changed(DROID_RTC, {"action/eef_9d": np.zeros((1, 40, 9))})}, "/options/rtc/action/eef_9d",
     "pose without rotation"),
    ({"options/rtc": changed(DROID_RTC, {"action/eef_9d": CHUNK[:, :39]})}, "/options/rtc/action/eef_9d", "T = 39"),
    ({f"language/{DROID_TASK}": DROP, f"language/{DROID_TASK}_2": "go"}, f"/language/{DROID_TASK}", "is missing"),
]


@pytest.mark.parametrize(("changes", "pointer", "fragment"), DROID_REFUSALS)
def test_refusals_of_poses_and_frames(
    policy: Gr00tPolicy, changes: dict[str, Any], pointer: str, fragment: str
) -> None:
    fields = observation(policy, DROID, size=SIZE)
    assert policy.check(changed(fields, {"options/rtc": DROID_RTC} if "rtc" in pointer else {})).rows == 1
    found = problem(lambda: policy.check(changed(fields, changes)))
    assert (found.status, found.pointer) == (422, pointer)
    assert fragment in found.detail


def test_pointer_is_in_the_form_that_was_sent(policy: Gr00tPolicy) -> None:
    fields = observation(policy, size=SIZE)
    flat = {**{f"{m}.{k}": v for m in ("images", "state") for k, v in fields["video" if m == "images" else m].items()},
            "prompt": "go", "options": fields["options"]}
    got = policy.check(flat)
    want = {"video.image": "/images.image", "video.wrist_image": "/images.wrist_image", "language": "/prompt"}
    assert want.items() <= got.where.items()
    assert problem(lambda: policy.check({**flat, "state.x": "1"})).pointer == "/state.x"
    assert problem(lambda: policy.check({**flat, "images.image": 0.5})).pointer == "/images.image"


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("encoded", [False, True])
def test_limits_of_rows_and_pixels(policy: Gr00tPolicy, encoded: bool) -> None:
    fields = rows(observation(policy, size=SIZE), 2)  # 4 frames of 48 pixels
    if encoded:
        fields = each(fields, "video", lambda v: [[encode(row[0])] for row in v])

    def run(**limits: int) -> Observation:
        return check(fields, policy.embodiments, None, Limits(**limits))

    assert run(max_rows=2, max_image_pixels=192).rows == 2
    found = problem(lambda: run(max_rows=1))
    # As lists of files it is known before the other fields are read, and at which field.
    assert (found.status, found.pointer) == (413, "/video/image" if encoded else None)
    assert encoded or "2 rows in one request; at most 1" in found.detail
    for limit, camera in ((191, "wrist_image"), (96, "wrist_image"), (95, "image"), (47, "image")):
        found = problem(lambda limit=limit: run(max_image_pixels=limit))  # type: ignore[misc]
        assert (found.status, found.pointer) == (413, f"/video/{camera}"), limit


def test_limit_of_rows_holds_before_decoding(policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million one-pixel images fit into a body; a wave must not wait for them."""
    decoded = 0

    def count(*_: Any) -> np.ndarray:
        nonlocal decoded
        decoded += 1
        return np.zeros((1, 1, 3), np.uint8)

    monkeypatch.setattr("handler.observation.decode_image", count)
    fields = changed(observation(policy, size=SIZE), {V: [[b"png"]] * 5000})
    assert problem(lambda: policy.check(fields)).status in (413, 422)
    assert problem(lambda: policy.check(changed(fields, {V: [b"png"] * 5000}))).status in (413, 422)
    assert decoded < 100


def test_limit_of_prompt_characters(policy: Gr00tPolicy) -> None:
    fields = observation(policy, size=SIZE, prompt="x" * 4096)
    assert policy.check(fields).instructions == ["x" * 4096]
    fields = changed(rows(fields, 2), {L: ["go", "x" * 4097]})
    assert problem(lambda: policy.check(fields)).status == 413


def test_limit_of_tokens(policy: Gr00tPolicy) -> None:
    # two images of 8 x 8 tokens and their 4 marks, one token a digit, and start "user\n" ... end "\n"
    around = len(policy.encode_prompt("", [64, 64]))
    fields = observation(policy, prompt="1" * (2048 - around))
    assert len(policy.prepare(policy.check(fields))[0].input_ids) == 2048
    found = problem(lambda: policy.prepare(policy.check(observation(policy, prompt="1" * (2049 - around)))))
    assert (found.status, found.pointer) == (413, f"/language/{TASK}")
    assert "2049 tokens (128 of images); at most 2048" in found.detail


@pytest.mark.parametrize(
    ("size", "fine"), [((2, 390), False), ((2, 402), False), ((1, 300000), False), ((8, 40), True)]
)
def test_aspect_ratio(policy: Gr00tPolicy, size: tuple[int, int], fine: bool) -> None:
    fields = changed(observation(policy, size=SIZE), {"video/wrist_image": np.zeros((*size, 3), np.uint8)})
    got = policy.check(fields)
    if fine:
        assert policy.prepare(got)[0].grids == ((16, 22), (16, 80))
        return
    found = problem(lambda: policy.prepare(got))
    want = (413 if size == (2, 390) else 422, "/video/wrist_image")  # 195 is allowed, but too many tokens
    assert (found.status, found.pointer) == want
    assert size == (2, 390) or "more than 200 times" in found.detail


def test_state_that_its_statistics_carry_out_of_float32(policy: Gr00tPolicy) -> None:
    """It is finite, but not after mean/std: the client's value, so not a 500 from the network's answer."""
    fields = changed(observation(policy, size=SIZE), {G: np.full((1, 1, 2), 3.4e38)})
    found = problem(lambda: policy.prepare(policy.check(fields)))
    assert (found.status, found.pointer) == (422, "/state/gripper")


@pytest.mark.parametrize("path", [X, V, L, "options/seed", "options/timestamp", "options/embodiment_tag"])
@pytest.mark.parametrize("kind", [str, bytes])
def test_one_huge_text_among_many_short_ones_is_not_padded(policy: Gr00tPolicy, path: str, kind: type) -> None:
    huge = "b" * 5_000_000 if kind is str else b"b" * 5_000_000
    short = "a" if kind is str else b"a"
    for value in ([short] * 20_000 + [huge], [[[short]]] * 20_000 + [[[huge]]]):
        fields = changed(observation(policy, size=SIZE), {path: None})
        at = fields
        for name in path.split("/")[:-1]:
            at = at[name]
        at[path.split("/")[-1]] = value
        tracemalloc.start()
        try:
            assert problem(lambda fields=fields: policy.check(fields)).status in (413, 422)  # type: ignore[misc]
            assert tracemalloc.get_traced_memory()[1] < 30_000_000
        finally:
            tracemalloc.stop()


# -------------------------------------------------------------------------------------------------- arbitrary fields

KEYS = ["image", "wrist_image", "x", "y", "gripper", "eef_9d", "action", "overlap_steps", "frozen_steps", "ramp_rate",
        "embodiment_tag", "seed", "rtc", "timestamp", TASK, ""]
NUMBERS = st.integers() | st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**400]) | st.floats() | st.booleans()
ARRAYS = hnp.arrays(
    hnp.scalar_dtypes().filter(lambda d: d.kind in "biuf" and d.itemsize <= 8),
    st.sampled_from([(), (1,), (2,), (1, 1), (1, 2), (1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 3, 3), (1, 2, 3, 3), (0, 3),
                     (1, 1, 2, 2, 3), (2, 1, 2, 2, 3), (1, 1, 0, 2, 3), (1, 1, 1, 1, 1, 1)])
    | hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=3),
)
LEAVES = (
    st.none() | NUMBERS | st.text(max_size=8) | st.binary(max_size=8) | ARRAYS
    | st.sampled_from([LIBERO, DROID, "go", encode(LONG), text(LONG), "\ud800"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
PATHS = ["video", "images", "state", "language", "options", "prompt", V, "video/wrist_image", X, "state/yaw", G, L,
         "options/seed", "options/timestamp", "options/embodiment_tag", "options/prepared_with", "options/rtc",
         "options/rtc/action",
         "options/rtc/overlap_steps", "options/rtc/frozen_steps", "options/rtc/ramp_rate", "options/rtc/action/x",
         "video.image", "state.x", "images.image", TASK, "language.x", E9, EXTERIOR]


def survives(policy: Gr00tPolicy, fields: Fields) -> None:
    try:
        got = policy.check(fields)
    except Problem as error:
        assert error.status in (413, 422) and error.detail.isascii() and len(error.detail) < 1000
        return
    assert isinstance(got, Observation)
    for frames in got.video.values():
        assert frames.dtype == np.uint8 and frames.shape[:2] == (got.rows, got.embodiment.frames)
    for value in got.state.values():
        assert value.dtype == np.float32 and value.shape[0] == got.rows and np.isfinite(value).all()


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_of_a_good_observation(policy: Gr00tPolicy, data: st.DataObject) -> None:
    fields = observation(policy, data.draw(st.sampled_from([LIBERO, DROID])), size=(2, 2))
    fields["options"]["rtc"] = copy.deepcopy(data.draw(st.sampled_from([None, rtc()(None), DROID_RTC])))
    for path in data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        *parents, last = path.split("/")
        at: Any = fields
        for name in parents:
            at = at.get(name) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[last] = data.draw(VALUES)
    survives(policy, fields)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(
    st.sampled_from(["video", "images", "state", "language", "prompt", "options", "video.image", "state.x", TASK])
    | st.text(max_size=6), VALUES, max_size=6))
def test_any_mapping(policy: Gr00tPolicy, fields: Fields) -> None:
    survives(policy, fields)
    survives(policy, {**fields, "options": {"embodiment_tag": LIBERO}})


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
       prompt=st.text(max_size=20), size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
       seed=st.integers(0, MAX_SEED))
def test_what_passes_the_check_can_be_prepared(
    policy: Gr00tPolicy, state: list[float], prompt: str, size: tuple[int, int], seed: int
) -> None:
    fields = observation(policy, size=size, prompt=prompt)
    fields["state"] = dict(zip(fields["state"], [*state[:6], state[6:]], strict=True))
    fields["options"]["seed"] = seed
    try:
        row = policy.prepare(policy.check(fields))[0]
    except Problem as error:
        assert error.status in (413, 422)
        return
    assert np.isfinite(row.state).all() and row.seed == seed
    assert row.frames.shape == (sum(height * width * 3 for height, width in row.sizes),)
