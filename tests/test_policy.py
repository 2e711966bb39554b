"""The policy in process: seeds, joined rows, real-time chunking, and what it tells about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from handler.policy import Actions, Gr00tPolicy
from handler.problem import Problem
from handler.transforms import ImageRecipe
from tests.conftest import DROID, LIBERO, observation, predict, rows_of
from tests.test_transforms import RECIPES

PITCH = [0.585219, 0.173371, -1.210474, -1.210474]
GRIPPER = [-1.2871, 0.684542, -0.911022, -0.384317]
JOINTS = [-1.067389, 1.236907, -0.756102, 0.977255]


def assert_same(got: Actions, want: Actions, atol: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=0, atol=atol, err_msg=key)


def test_actions_have_the_contract_s_keys_shapes_and_dtype(policy: Gr00tPolicy) -> None:
    actions = policy.get_action(observation(policy, DROID))
    assert {key: (value.shape, value.dtype) for key, value in actions.items()} == {
        "eef_9d": ((1, 40, 9), np.float32),
        "gripper_position": ((1, 40, 1), np.float32),
        "joint_position": ((1, 40, 7), np.float32),
    }


def test_a_seed_is_the_whole_randomness(policy: Gr00tPolicy) -> None:
    fields = observation(policy, seed=5)
    first, again = policy.get_action(fields), policy.get_action(fields)
    other = policy.get_action({**fields, "options": {**fields["options"], "seed": 6}})
    for key in first:
        assert np.array_equal(first[key], again[key])
        assert not np.array_equal(first[key], other[key])
    unseeded = {**fields, "options": {"embodiment_tag": LIBERO}}
    assert not np.array_equal(policy.get_action(unseeded)["x"], policy.get_action(unseeded)["x"])


def test_row_i_draws_its_noise_alone_from_seed_plus_i(policy: Gr00tPolicy) -> None:
    one = observation(policy, seed=40)
    many = {
        "video": {key: np.repeat(value, 3, 0) for key, value in one["video"].items()},
        "state": {key: np.repeat(value, 3, 0) for key, value in one["state"].items()},
        "prompt": one["language"]["annotation.human.action.task_description"][0][0],
        "options": one["options"],
    }
    batch = policy._batch(rows_of(policy, many))
    for i in range(3):
        want = torch.randn((1, 40, 32), generator=torch.Generator().manual_seed(40 + i))
        assert torch.equal(batch.noise[i], want[0])
    got = policy.get_action(many)
    for i in range(3):
        solo = policy.get_action({**one, "options": {**one["options"], "seed": 40 + i}})
        assert_same({key: value[i : i + 1] for key, value in got.items()}, solo, atol=1e-5)


def test_company_does_not_change_a_row(policy: Gr00tPolicy) -> None:
    """Other prompts, cameras, embodiments and chunking options in one forward: 1e-5 from solo, in any order."""
    long = "pick up the small blue bowl " * 12
    fields = [
        observation(policy, LIBERO, seed=1),
        observation(policy, DROID, seed=2, prompt=long),
        observation(policy, LIBERO, seed=3, size=(180, 320), prompt=long),
        observation(policy, DROID, seed=4, size=(480, 640)),
    ]
    chunk = {key: value[0] for key, value in policy.get_action(fields[0]).items()}
    fields[0]["options"]["rtc"] = {"action": chunk, "overlap_steps": 9, "frozen_steps": 3}
    rows = rows_of(policy, *fields)
    solo = [predict(policy, [row])[0] for row in rows]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        for i, got in zip(order, predict(policy, [rows[i] for i in order]), strict=True):
            assert_same(got, solo[i], atol=1e-5)


def test_a_neighbour_s_values_do_not_change_a_bit(policy: Gr00tPolicy) -> None:
    """Equal shapes: whatever the neighbours see, say or are, a row's actions are the same bits."""
    me = observation(policy, seed=1)
    first = predict(policy, rows_of(policy, me, observation(policy, seed=2, prompt="open the drawer")))
    second = predict(policy, rows_of(policy, me, observation(policy, seed=3, prompt="push the stove")))
    assert len(rows_of(policy, observation(policy, prompt="open the drawer"))[0].input_ids) == len(
        rows_of(policy, observation(policy, prompt="push the stove"))[0].input_ids
    )
    assert_same(first[0], second[0])
    assert not np.array_equal(first[1]["x"], second[1]["x"])


def test_every_input_moves_the_actions(policy: Gr00tPolicy) -> None:
    base = observation(policy, DROID, seed=1)
    want = policy.get_action(base)["gripper_position"]
    changed = observation(policy, DROID, seed=1)
    changed["video"]["wrist_image_left"][0, 0] //= 2
    assert not np.array_equal(policy.get_action(changed)["gripper_position"], want)
    changed = observation(policy, DROID, seed=1)
    changed["state"]["joint_position"] += 0.1
    assert not np.array_equal(policy.get_action(changed)["gripper_position"], want)
    changed = observation(policy, DROID, seed=1, prompt="close the drawer")
    assert not np.array_equal(policy.get_action(changed)["gripper_position"], want)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "engine"])
def any_policy(request: pytest.FixtureRequest, checkpoint: Path) -> Gr00tPolicy:
    return Gr00tPolicy(checkpoint, engine=request.param)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frames_that_the_client_prepared_give_the_same_actions(
    any_policy: Gr00tPolicy, monkeypatch: pytest.MonkeyPatch, recipe: ImageRecipe
) -> None:
    policy = any_policy
    monkeypatch.setattr(policy, "recipe", recipe)
    monkeypatch.setattr(policy.resizer, "recipe", recipe)
    for seed, size in enumerate([(37, 53), (480, 640), (601, 300)]):
        whole = observation(policy, LIBERO if seed % 2 else DROID, seed, size)
        prepared = {
            **whole,
            "video": {key: np.stack([[recipe(f) for f in row] for row in v]) for key, v in whole["video"].items()},
            "options": {**whole["options"], "prepared_with": policy.describe()["image_recipe"]},
        }
        want = policy.get_action(whole)
        assert_same(policy.get_action(prepared), want)
        rows = rows_of(policy, whole, prepared)  # side by side, too
        assert policy.shape(rows[0]) == policy.shape(rows[1])
        for got, same in zip(predict(policy, rows), predict(policy, [rows[0], rows[0]]), strict=True):
            assert_same(got, same)


@pytest.mark.parametrize(
    ("size", "recipe", "pointer", "fragment"),
    [
        ((256, 256), {"edge": 224}, "/options/prepared_with", '"edge": 256'),
        ((256, 256), {"target": [256, 256]}, "/options/prepared_with", "is not this checkpoint's recipe"),
        ((480, 640), {}, "/video/image", "480 x 640 (height x width) does not come out of the recipe"),
        ((255, 340), {}, "/video/image", "255 x 340"),
        ((256, 60000), {}, "/video/image", "200 times"),
    ],
)
def test_prepared_frames_that_cannot_be_are_refused(
    policy: Gr00tPolicy, size: tuple[int, int], recipe: dict[str, Any], pointer: str, fragment: str
) -> None:
    fields = observation(policy, LIBERO)
    fields["video"]["image"] = np.zeros((1, 1, *size, 3), np.uint8)
    fields["options"]["prepared_with"] = {**policy.recipe.describe(), **recipe}
    with pytest.raises(Problem) as caught:
        policy.prepare(policy.check(fields))
    assert (caught.value.status, caught.value.pointer) == (422, pointer) and fragment in caught.value.detail


@pytest.mark.parametrize("tag", [LIBERO, DROID])
def test_frozen_steps_repeat_the_previous_chunk_exactly(policy: Gr00tPolicy, tag: str) -> None:
    """Also where its rows lie outside the range of the steps that they stand on now, and relative to a new state."""
    before, now = observation(policy, tag, seed=1), observation(policy, tag, seed=2)
    previous = {key: value[0] for key, value in policy.get_action(before).items()}
    now["options"]["rtc"] = {"action": previous, "overlap_steps": 6, "frozen_steps": 4}
    actions = policy.get_action(now)
    free = policy.get_action({**now, "options": {"embodiment_tag": tag, "seed": 2}})
    for key in previous:
        assert np.array_equal(actions[key][0, :4], previous[key][-6:-2]), key
        assert not np.array_equal(actions[key][0, 4:], free[key][0, 4:]), key


@pytest.mark.parametrize("tag", [LIBERO, DROID])
def test_the_network_is_told_the_previous_chunk_in_its_own_terms(policy: Gr00tPolicy, tag: str) -> None:
    """Decoding the prefix gives the rows again, for absolute and re-anchored relative groups alike."""
    before = observation(policy, tag, seed=1)
    raw_state = {key: value[0] for key, value in before["state"].items()}
    e = policy.embodiments[tag]
    chunk = np.random.default_rng(0).uniform(-0.4, 0.4, (40, 32)).astype(np.float32)
    previous = e.decode_action(chunk, raw_state)
    moved = {key: value + np.float32(1e-3) for key, value in raw_state.items()}
    prefix = e.encode_prefix({key: value[-6:] for key, value in previous.items()}, moved, 32)
    got = e.decode_action(np.concatenate([prefix, chunk[6:]]), moved)
    start = 0
    for group in e.actions:
        inside = (np.abs(prefix[:, start : start + group.width]) < 1).all(axis=1)  # clipped rows come back clipped
        start += group.width
        assert inside.sum() >= 3, group.key
        np.testing.assert_allclose(
            got[group.key][:6][inside], previous[group.key][-6:][inside], rtol=0, atol=2e-5, err_msg=group.key
        )


def test_actions_of_the_small_checkpoint_stay_what_they_are(policy: Gr00tPolicy) -> None:
    """Figures from the day on which the network equalled the reference; they hold where no reference is at hand."""
    libero = policy.get_action(observation(policy, LIBERO, seed=0))
    droid = policy.get_action(observation(policy, DROID, seed=0))
    np.testing.assert_allclose(libero["pitch"][0, :4, 0], PITCH, rtol=0, atol=1e-4)
    np.testing.assert_allclose(droid["gripper_position"][0, :4, 0], GRIPPER, rtol=0, atol=1e-4)
    np.testing.assert_allclose(droid["joint_position"][0, 20, :4], JOINTS, rtol=0, atol=1e-4)


def test_a_row_whose_answer_is_not_finite_fails_alone(policy: Gr00tPolicy) -> None:
    rows = rows_of(policy, observation(policy, seed=1), observation(policy, seed=2))
    want = predict(policy, rows)
    broken = [rows[0], type(rows[1])(**{**vars(rows[1]), "state": np.full_like(rows[1].state, np.nan)})]
    results = policy.predict(broken)
    assert isinstance(results[1], Problem) and results[1].status == 500
    assert_same(results[0], want[0])  # type: ignore[arg-type]


def test_the_description_is_json_and_its_example_is_an_observation(policy: Gr00tPolicy) -> None:
    described = json.loads(json.dumps(policy.describe()))
    assert set(described["embodiments"]) == {LIBERO, DROID}
    assert described["embodiments"][DROID]["video"] == {
        "keys": ["exterior_image_1_left", "wrist_image_left"], "frames": 2, "dtype": "uint8",
        "shape": ["B", 2, "H", "W", 3],
    }  # fmt: skip
    assert described["embodiments"][DROID]["action"]["eef_9d"]["relative_to"] == "eef_9d"
    assert described["checkpoint"] == policy.checkpoint and len(policy.checkpoint) == 12
    for tag in policy.embodiments:
        assert policy.check(policy.example(tag)).rows == 1
