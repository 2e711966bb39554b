"""States into the network and actions out of it, against values worked out by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from handler.embodiment import KNOWN_IDS, ActionGroup, Embodiment, load_embodiments
from tests.conftest import LIBERO, REFERENCE

FIXTURE = REFERENCE.parent / "fixtures" / "processor_config"
POSE9 = [1.0, 2.0, 3.0, 0, -1, 0, 1, 0, 0]  # a quarter turn about z, seen from (1, 2, 3)


def floats(values: Any) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


STATE9 = floats([[9.0] * 9, POSE9])  # only the last row counts


def stats(low: Any, high: Any, **more: Any) -> dict[str, Any]:
    zeros = np.zeros_like(np.asarray(low, float)).tolist()
    return {"min": low, "max": high, "mean": zeros, "std": zeros, "q01": low, "q99": high, **more}


def config(rep: str = "ABSOLUTE", kind: str = "NON_EEF", form: str = "DEFAULT", state: str | None = None) -> Any:
    return {"rep": rep, "type": kind, "format": form, "state_key": state}


def files(
    state: dict[str, Any], action: dict[str, Any] | None = None, relative: dict[str, Any] | None = None,
    configs: list[Any] | None = None, horizon: int = 2, state_steps: int = 1, state_more: dict[str, Any] | None = None,
    action_more: dict[str, Any] | None = None, **kwargs: Any,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """processor_kwargs, statistics and ids of one embodiment "robot" with id 7."""
    action = action or {"a": stats([-1.0], [1.0])}
    modality = {
        "video": {"modality_keys": ["front"], "delta_indices": [0]},
        "state": {"modality_keys": list(state), "delta_indices": list(range(state_steps)), **(state_more or {})},
        "action": {"modality_keys": list(action), "delta_indices": list(range(horizon)), "action_configs": configs,
                   **(action_more or {})},
        "language": {"modality_keys": ["task", "task_2"], "delta_indices": [0]},
    }
    processor = {"modality_configs": {"robot": modality}, "use_relative_action": True,
                 "apply_sincos_state_encoding": True, **kwargs}
    return processor, {"robot": {"state": state, "action": action, "relative_action": relative or {}}}, {"robot": 7}


def load(*args: Any, **kwargs: Any) -> Embodiment:
    served, refused = load_embodiments(*files(*args, **kwargs))
    assert refused == {}
    return served["robot"]


# ------------------------------------------------------------------------------------------------------------ states

MEAN_STD = {"state_more": {"mean_std_embedding_keys": ["s"]}}
SIN_COS = {"state_more": {"sin_cos_embedding_keys": ["s"]}}
PERCENTILES = stats([-10.0], [10.0], q01=[1.0], q99=[3.0])
STATES: list[tuple[dict[str, Any], dict[str, Any], list[float], list[float]]] = [
    # statistics, processor, raw, encoded
    (stats([0.0, -1.0], [10.0, 1.0]), {}, [2.5, 0.0], [-0.5, 0.0]),
    (stats([0.0], [10.0]), {}, [12.0], [1.0]),
    (stats([0.0], [10.0]), {}, [-2.0], [-1.0]),
    (stats([0.0], [10.0]), {"clip_outliers": False}, [12.0], [1.4]),
    (stats([3.0, 0.5], [3.0, 0.5 + 1e-9]), {}, [3.5, 0.5], [0.0, 0.0]),
    (stats([3.0], [3.0]), {"clip_outliers": False}, [1e6], [0.0]),
    (PERCENTILES, {"use_percentiles": True}, [2.5], [0.5]),
    (PERCENTILES, {"use_percentiles": True}, [4.0], [1.0]),
    (PERCENTILES, {"use_percentiles": False}, [2.5], [0.25]),
    (stats([0.0], [1.0], mean=[1.0], std=[2.0]), MEAN_STD, [5.0], [2.0]),
    (stats([0.0], [1.0], mean=[1.0], std=[0.5]), MEAN_STD, [-5.0], [-12.0]),  # never clipped
    (stats([0.0, 0.0], [1.0, 1.0], mean=[1.0, 2.0], std=[2.0, 0.0]), MEAN_STD, [5.0, 7.0], [2.0, 7.0]),
    (stats([0.0, 0.0], [1.0, 1.0]), SIN_COS, [0.0, math.pi / 2], [0.0, 1.0, 1.0, 0.0]),
    (stats([0.0], [4.0]), {**SIN_COS, "apply_sincos_state_encoding": False}, [1.0], [-0.5]),
    (stats([0.0], [1.0], mean=[1.0], std=[2.0]),
     {"state_more": {"mean_std_embedding_keys": ["s"], "sin_cos_embedding_keys": ["s"]}}, [math.pi], [0.0, -1.0]),
]


@pytest.mark.parametrize(("statistics", "processor", "raw", "encoded"), STATES)
def test_state(statistics: dict[str, Any], processor: dict[str, Any], raw: list[float], encoded: list[float]) -> None:
    robot = load({"s": statistics}, **processor)
    got = robot.encode_state({"s": floats([raw])}, 6)
    assert got.dtype == np.float32 and got.shape == (1, 6)
    np.testing.assert_allclose(got[0], encoded + [0.0] * (6 - len(encoded)), atol=1e-6)
    assert robot.states[0].encoded_width == len(encoded)


def test_state_groups_stand_in_modality_order_and_rows_stay_apart() -> None:
    robot = load({"b": stats([0.0], [2.0]), "a": stats([0.0, 0.0], [4.0, 4.0])}, state_steps=2)
    state = {"a": floats([[1, 2], [3, 4]]), "b": floats([[0], [2]])}
    np.testing.assert_array_equal(
        robot.encode_state(state, 5), floats([[-1, -0.5, 0, 0, 0], [1, 0.5, 1, 0, 0]])
    )
    assert (robot.tag, robot.id, robot.cameras, robot.frames, robot.state_steps) == ("robot", 7, ("front",), 1, 2)
    assert (robot.language_keys, robot.horizon) == (("task", "task_2"), 2)


def test_state_statistics_may_have_one_row_per_step() -> None:
    robot = load({"s": stats([[0.0], [10.0]], [[2.0], [20.0]])}, state_steps=2)
    np.testing.assert_array_equal(robot.encode_state({"s": floats([[2], [15]])}, 1), floats([[1], [0]]))


@pytest.mark.parametrize("more", [{}, {"clip_outliers": False}, {"state_more": {"sin_cos_embedding_keys": ["c"]}}])
def test_groups_side_by_side_have_the_bits_of_each_alone(more: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    low = np.round(rng.normal(0, 3, (3, 4)), 3)
    spread = np.array([[1e-12, 0.3, 7.7, 1e3], [0.1, 0.0, 3.3, 1e-30], [1.1, 2.2, 0.7, 5.5]])
    groups = {
        key: stats(list(low[n]), list(low[n] + spread[n]), mean=list(low[n] / 3), std=list(spread[n] / 7))
        for n, key in enumerate("abc")
    }
    more = {**more, "state_more": {**more.get("state_more", {}), "mean_std_embedding_keys": ["b"]}}
    robot = load(groups, **more)
    for size in (1e-3, 1.0, 1e30):
        state = {key: floats(rng.normal(0, size, (50, 1, 4))) for key in groups}
        with np.errstate(over="ignore"):
            alone = np.concatenate([group.encode(state[group.key]) for group in robot.states], axis=-1)
        got = robot.encode_state(state, 20)
        assert got[..., : alone.shape[-1]].tobytes() == alone.tobytes() and not got[..., alone.shape[-1] :].any()


@pytest.mark.parametrize("where", [{"exclude_state": True}, {"state_more": {"exclude_state": True}}])
def test_excluded_state_is_zeros(where: dict[str, Any]) -> None:
    robot = load({"s": stats([0.0], [2.0])}, **where)
    np.testing.assert_array_equal(robot.encode_state({"s": floats([[2]])}, 3), np.zeros((1, 3), np.float32))


# ----------------------------------------------------------------------------------------------------------- actions


def decode(robot: Embodiment, chunk: list[list[float]], **state: Any) -> np.ndarray:
    got = robot.decode_action(floats(chunk), {key: floats(value) for key, value in state.items()})["a"]
    assert got.dtype == np.float32
    return got


S = {"s": stats([0.0], [1.0])}
TURN = 2 * math.pi / 3 / math.sqrt(3)  # a third of a turn about (1, 1, 1)
ACTION_MEAN_STD = {"action_more": {"mean_std_embedding_keys": ["a"]}}
ABSOLUTE: list[tuple[dict[str, Any], dict[str, Any], list[list[float]], list[list[float]]]] = [
    (stats([-2.0], [6.0]), {}, [[0.5], [-1.0]], [[4.0], [-2.0]]),
    (stats([-2.0], [6.0]), {}, [[3.0], [-1.5]], [[6.0], [-2.0]]),  # clipped, also when
    (stats([-2.0], [6.0]), {"clip_outliers": False}, [[3.0], [-1.5]], [[6.0], [-2.0]]),
    (stats([5.0], [5.0]), {}, [[1.0], [-1.0]], [[5.0], [5.0]]),
    (stats([[0.0], [10.0]], [[2.0], [20.0]]), {}, [[0.0], [0.0]], [[1.0], [15.0]]),
    (stats([[0.0], [10.0], [9.0]], [[2.0], [20.0], [9.0]]), {}, [[0.0], [0.0]], [[1.0], [15.0]]),
    (PERCENTILES, {"use_percentiles": True}, [[0.0], [0.5]], [[2.0], [2.5]]),
    (stats([0.0], [1.0], mean=[1.0], std=[2.0]), ACTION_MEAN_STD, [[0.5], [-3.0]], [[2.0], [-5.0]]),
    (stats([0.0], [1.0], mean=[1.0], std=[0.0]), ACTION_MEAN_STD, [[0.5], [-3.0]], [[0.5], [-3.0]]),
    (stats([-2.0], [6.0]), {"configs": [config("DELTA")]}, [[0.5], [0.0]], [[4.0], [2.0]]),
    (stats([-2.0], [6.0]), {"configs": [config("RELATIVE")], "use_relative_action": False}, [[0.5], [0]], [[4], [2]]),
]


@pytest.mark.parametrize(("statistics", "processor", "chunk", "want"), ABSOLUTE)
def test_absolute_actions(
    statistics: dict[str, Any], processor: dict[str, Any], chunk: list[list[float]], want: list[list[float]]
) -> None:
    robot = load(S, {"a": statistics}, **processor)
    padded = [[*row, 9.0] for row in chunk] + [[9.0, 9.0]]  # the network's own width and horizon are larger
    np.testing.assert_allclose(decode(robot, padded, s=[[5.0]]), want, rtol=1e-6)


@pytest.mark.parametrize("percentiles", [False, True])
def test_relative_joints(percentiles: bool) -> None:
    """The range is that of the differences, whatever use_percentiles says; the last row of the named state counts."""
    robot = load(
        {"s": stats([0.0], [1.0]), "t": stats([0.0], [1.0])}, {"a": stats([-100.0], [100.0], q01=[-50.0], q99=[50.0])},
        {"a": stats([-2.0], [6.0], q01=[-1.0], q99=[1.0])}, [config("RELATIVE", state="t")], state_steps=2,
        use_percentiles=percentiles,
    )
    assert (robot.actions[0].relative_to, robot.actions[0].pose) == ("t", "")
    np.testing.assert_array_equal(decode(robot, [[0.5], [7.0]], s=[[7], [8]], t=[[1], [10]]), [[14.0], [16.0]])


def test_relative_joints_with_one_row_of_statistics_per_step_and_their_own_state() -> None:
    robot = load({"a": stats([0.0], [1.0])}, {"a": stats([0.0], [1.0])},
                 {"a": stats([[0.0], [10.0]], [[2.0], [20.0]])}, [config("RELATIVE")])
    np.testing.assert_array_equal(decode(robot, [[0.0], [0.0]], a=[[100.0]]), [[101.0], [115.0]])


@pytest.mark.parametrize("form", ["XYZ_ROT6D", "xyz+rot6d"])
def test_relative_rot6d(form: str) -> None:
    wide = stats([-4.0] * 9, [4.0] * 9)
    robot = load({"p": wide}, {"a": wide}, {"a": wide}, [config("RELATIVE", "EEF", form, "p")], state_steps=2)
    # 1 ahead along the gripper's x, which is the world's y, then a quarter turn about that x.
    chunk = [[0.25, 0, 0, 0.25, 0, 0, 0, 0, -0.25], [0.25, 0, 0, 0.5, 0, 0, 0.75, 0, -0.125]]  # the second: skewed
    want = floats([1, 3, 3, 0, 0, 1, 1, 0, 0])
    np.testing.assert_allclose(decode(robot, chunk, p=STATE9), [want, want], atol=1e-6)


def test_relative_rotvec() -> None:
    wide = stats([-4.0] * 6, [4.0] * 6)
    robot = load({"p": wide}, {"a": wide}, {"a": wide}, [config("RELATIVE", "EEF", "XYZ_ROTVEC", "p")])
    chunk = [[0.25, 0, 0, math.pi / 8, 0, 0], [0.0] * 6]
    reference = [1, 2, 3, 0, 0, math.pi / 2]
    np.testing.assert_allclose(
        decode(robot, chunk, p=[reference]), [[1, 3, 3, TURN, TURN, TURN], reference], atol=1e-6
    )


@pytest.mark.parametrize(("form", "width"), [("XYZ_ROT6D", 9), ("XYZ_ROTVEC", 6)])
def test_an_answer_that_is_not_finite_stays_a_value(form: str, width: int) -> None:
    """`predict` then fails that row alone; an exception would fail the whole forward."""
    wide = stats([-4.0] * width, [4.0] * width)
    robot = load({"p": wide}, {"a": wide}, {"a": wide}, [config("RELATIVE", "EEF", form, "p")])
    chunk = [[math.nan] * width, [0.1] * width]
    assert not np.isfinite(decode(robot, chunk, p=[[0, 0, 0, 1, 0, 0, 0, 1, 0][:width]])).all()


# --------------------------------------------------------------------------------------------------- chunks going back

STEPS = 6


def per_step(width: int, low: float = -3.0, high: float = 3.0) -> dict[str, Any]:
    shift = np.arange(STEPS)[:, None] * 0.125 + np.arange(width) * 0.0625
    return stats((low - shift).tolist(), (high + shift).tolist(), mean=(shift / 4).tolist(), std=(2 + shift).tolist())


def flat(width: int) -> dict[str, Any]:
    return stats([-3.0] * width, [4.0] * width, mean=[0.5] * width, std=[2.0] * width)


GROUPS: dict[str, tuple[int, Any, bool]] = {  # width, config, mean_std
    "absolute": (2, config(), False),
    "absolute mean_std": (2, config(), True),
    "relative": (2, config("RELATIVE", state="s"), False),
    "relative mean_std": (2, config("RELATIVE", state="s"), True),
    "rot6d": (9, config("RELATIVE", "EEF", "XYZ_ROT6D", "s"), False),
    "rotvec": (6, config("RELATIVE", "EEF", "XYZ_ROTVEC", "s"), False),
    "rot6d mean_std": (9, config("RELATIVE", "EEF", "XYZ_ROT6D", "s"), True),
}
POSES = {
    2: ([0.5, -0.25], [0.75, 0.0]),
    9: ([*POSE9[:3], 1, 0.1, 0, 0, 1, 0.2], [1.125, 1.875, 3.25, 0.9, 0, 0.1, 0, 1, 0]),
    6: ([0.1, 0.2, 0.3, 0.5, -0.25, 0.125], [0.2, 0.1, 0.4, 0.25, 0.0, 0.5]),
}


@pytest.mark.parametrize("steps", [1, 3, STEPS])
@pytest.mark.parametrize("statistics", [flat, per_step])
@pytest.mark.parametrize("group", GROUPS)
def test_prefix_gives_the_same_physical_rows(group: str, statistics: Callable[[int], Any], steps: int) -> None:
    width, action, mean_std = GROUPS[group]
    more = {"mean_std_embedding_keys": ["a"]} if mean_std else None
    both = {"z": statistics(1), "a": statistics(width)}  # a neighbour before it, so offsets matter
    robot = load({"s": flat(width)}, both, {"a": statistics(width)}, [config(), action], horizon=STEPS,
                 action_more=more, use_percentiles=True)
    before, after = ({"s": floats([pose])} for pose in POSES[width])
    rng = np.random.default_rng(5)
    predicted = rng.uniform(-0.3, 0.3, (STEPS, width + 1)).astype(np.float32)
    chunk = robot.decode_action(predicted, before)
    prefix = robot.encode_prefix({key: rows[-steps:] for key, rows in chunk.items()}, after, width + 4)
    assert prefix.dtype == np.float32 and prefix.shape == (steps, width + 4)
    assert (prefix[:, width + 1 :] == 0).all() and np.abs(prefix).max() <= 1
    got = robot.decode_action(np.concatenate([prefix, np.zeros((STEPS - steps, width + 4), np.float32)]), after)
    for key in ("z", "a"):
        np.testing.assert_allclose(got[key][:steps], chunk[key][-steps:], atol=1e-5)


def test_prefix_by_hand() -> None:
    robot = load({"a": stats([0.0], [1.0])}, {"a": stats([0.0], [1.0])},
                 {"a": stats([[-2.0], [-4.0], [-8.0]], [[2.0], [4.0], [8.0]])}, [config("RELATIVE")], horizon=3)
    rows = {"a": floats([[11], [12]])}  # they stand on steps 0 and 1 now
    prefix = robot.encode_prefix(rows, {"a": floats([[10]])}, 2)
    np.testing.assert_array_equal(prefix, floats([[0.5, 0], [0.5, 0]]))
    np.testing.assert_array_equal(  # out of range: clipped, as in training
        robot.encode_prefix(rows, {"a": floats([[0]])}, 1), floats([[1], [1]])
    )
    robot = load(S, {"a": stats([0.0], [0.0], mean=[1.0], std=[2.0])}, clip_outliers=False, **ACTION_MEAN_STD)
    np.testing.assert_array_equal(
        robot.encode_prefix({"a": floats([[7]])}, {"s": floats([[0]])}, 1), floats([[3]])
    )


# ----------------------------------------------------------------------------------------------------------- loading

M = "modality_configs/robot/"
GOOD = files({"s": stats([0.0], [1.0]), "p": stats([0.0] * 9, [1.0] * 9)},
             {"a": stats([0.0], [1.0]), "e": stats([0.0] * 9, [1.0] * 9)},
             {"a": stats([0.0], [1.0]), "e": stats([0.0] * 9, [1.0] * 9)},
             [config("RELATIVE", state="s"), config("RELATIVE", "EEF", "XYZ_ROT6D", "p")])
NINE, DROP = [0.0] * 9, object()
REFUSALS: list[tuple[int, str, Any, str]] = [  # file (processor, statistics, ids), path, new value, reason
    (1, "robot", DROP, "statistics.json has no statistics for it"),
    (2, "robot", DROP, "embodiment_id.json has no id for it"),
    (2, "robot", "7", "embodiment_id.json has no id for it"),
    (2, "robot", -1, "id"),
    (2, "robot", True, "embodiment_id.json has no id for it"),
    (1, "robot/state", DROP, "no state statistics for 's'"),
    (1, "robot/state/s", DROP, "no state statistics for 's'"),
    (1, "robot/action", DROP, "no action statistics for 'a'"),
    (1, "robot/action/e", DROP, "no action statistics for 'e'"),
    (1, "robot/relative_action", DROP, "no relative_action statistics for 'a'"),
    (1, "robot/relative_action/e", DROP, "no relative_action statistics for 'e'"),
    (1, "robot/state/s/min", DROP, "min"),
    (1, "robot/state/s/min", None, "min"),
    (1, "robot/state/s/max", [1.0, 2.0], "max of state 's'"),
    (1, "robot/state/s/max", [math.nan], "max of state 's'"),
    (1, "robot/state/s/std", [math.inf], "std of state 's'"),
    (1, "robot/action/a/mean", [0.0, 0.0], "mean of action 'a'"),
    (1, "robot/state/s/min", ["zero"], "ValueError"),
    (1, "robot/state/s/min", [[0.0], [0.0, 1.0]], "ValueError"),
    (1, "robot/state/s", stats([[0.0]] * 3, [[1.0]] * 3), "statistics of state 's' have shape [3, 1]"),
    (1, "robot/relative_action/a", stats([[0.0]], [[1.0]]), "statistics of action 'a' have shape [1, 1]"),
    (1, "robot/relative_action/a", stats([0.0, 0.0], [1.0, 1.0]), "statistics of action 'a' have shape [2]"),
    (1, "robot/relative_action/a/mean", [[0.0]], "action 'a'"),
    (0, M + "action/action_configs", [config()], "ValueError"),
    (0, M + "action/action_configs", [config("RELATIVE", state="p"), config()], "refers to state 'p'"),
    (0, M + "action/action_configs", [config("RELATIVE", state="q"), config()], "refers to state 'q'"),
    (0, M + "action/action_configs", [config("RELATIVE"), config()], "refers to state 'a'"),
    (0, M + "action/action_configs", [config(), config("RELATIVE", "EEF", "DEFAULT", "p")], "format 'DEFAULT'"),
    (0, M + "action/action_configs", [config(), config("RELATIVE", "EEF", "XYZ_QUAT", "p")], "format 'XYZ_QUAT'"),
    (0, M + "action/action_configs", [config(), config("RELATIVE", "EEF", "XYZ_ROTVEC", "p")], "with width 9"),
    (0, M + "action/action_configs", [None, None], "AttributeError"),
    (0, M + "state", DROP, "'state'"),
    (0, M + "language", DROP, "'language'"),
    (0, M + "video/delta_indices", DROP, "'delta_indices'"),
    # served, these would fail every request
    (0, M + "video/delta_indices", [], "video"),
    (0, M + "video/modality_keys", [], "video"),
    (0, M + "state/modality_keys", [], "state"),
    (0, M + "state/delta_indices", [], "state"),
    (0, M + "action/delta_indices", [], "action"),
    (0, M + "language/modality_keys", [], "language"),
    (0, "modality_configs/robot", [], ""),
]


@pytest.mark.parametrize(("file", "path", "value", "reason"), REFUSALS)
def test_embodiments_that_cannot_be_served(file: int, path: str, value: Any, reason: str) -> None:
    assert list(load_embodiments(*GOOD)[0]) == ["robot"]
    changed = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    at: Any = changed[file]
    for name in parents:
        at = at[name]
    if value is DROP:
        del at[last]
    else:
        at[last] = value
    served, refused = load_embodiments(*changed)
    assert served == {} and list(refused) == ["robot"] and reason in refused["robot"]


def test_one_bad_embodiment_leaves_the_others() -> None:
    processor, statistics, ids = copy.deepcopy(GOOD)
    processor["modality_configs"]["other"] = copy.deepcopy(processor["modality_configs"]["robot"])
    served, refused = load_embodiments(processor, statistics, ids)
    assert (list(served), list(refused)) == (["robot"], ["other"])
    assert load_embodiments({}, {}, {}) == load_embodiments({"modality_configs": None}, {}, {}) == ({}, {})


@pytest.mark.parametrize(("tag", "ids", "want"), [
    ("libero_sim", {}, 2), ("libero_sim", {"libero_sim": 24}, 24), ("oxe_droid_relative_eef_relative_joint", {}, 24),
    ("new_embodiment", {"robot": 7}, 10),
])  # fmt: skip
def test_known_ids_fill_what_the_file_leaves_out(tag: str, ids: dict[str, int], want: int) -> None:
    processor, statistics, _ = copy.deepcopy(GOOD)
    processor["modality_configs"] = {tag: processor["modality_configs"]["robot"]}
    served, refused = load_embodiments(processor, {tag: statistics["robot"]}, ids)
    assert refused == {} and served[tag].id == want
    assert tag in KNOWN_IDS


# -------------------------------------------------------------------------------------------------- reference numbers


def test_end_effector_reference() -> None:
    path = REFERENCE / "processing" / "processing.json"
    if not path.is_file():
        pytest.skip("the reference numbers are not here")
    cases = json.loads(path.read_text())["eef_xyz_rot6d"]
    scale = 16.0
    limits = np.full(9, scale)
    group = ActionGroup("eef", 9, "min_max", "RELATIVE", "eef", "xyz_rot6d", -limits, limits, limits, limits, True)
    for relative, reference, absolute in zip(
        cases["relative"], cases["reference_state"], cases["absolute"], strict=True
    ):
        assert np.abs(relative).max() < scale
        anchor, want = floats(reference).reshape(-1, 9)[-1], floats(absolute)
        got = group.anchor(np.array(relative), anchor)
        np.testing.assert_allclose(got, want, atol=2e-6)
        again = group.anchor(np.float64(scale) * group.encode(got, anchor), anchor)
        np.testing.assert_allclose(again, want, atol=1e-5)


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="the processor files of a real run are not here")
def test_processor_files_of_a_real_run() -> None:
    def read(name: str) -> Any:
        return json.loads(Path(FIXTURE, name).read_text())

    processor = read("processor_config.json")["processor_kwargs"]
    statistics, ids = read("statistics.json"), read("embodiment_id.json")
    served, refused = load_embodiments(processor, statistics, ids)
    assert served == {} and list(refused) == [LIBERO] and "statistics.json" in refused[LIBERO]
    served, refused = load_embodiments(processor, {LIBERO: next(iter(statistics.values()))}, ids)
    assert refused == {}
    robot = served[LIBERO]
    assert (robot.id, robot.horizon, robot.frames, robot.state_steps, len(robot.cameras)) == (24, 16, 1, 1, 2)
    assert {group.key: group.width for group in robot.states} == {
        "x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2,
    }  # fmt: skip
    assert [group.width for group in robot.actions] == [1] * 7
    assert robot.encode_state({g.key: np.zeros((1, g.width), np.float32) for g in robot.states}, 128).shape == (1, 128)
