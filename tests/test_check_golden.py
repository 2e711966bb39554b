"""The golden check's own path, against a small checkpoint's own actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handler.policy import Gr00tPolicy
from scripts.check_golden import GOLDEN, compare, main
from tests.conftest import REFERENCE


@pytest.fixture
def golden(policy: Gr00tPolicy) -> dict[str, Any]:
    """The published observation, with this checkpoint's actions in place of the real one's."""
    golden = json.loads(GOLDEN.read_text())
    fields = {**golden["observation"]}
    fields["video"] = {key: np.zeros(shape, np.uint8) for key, shape in fields["video"].items()}
    actions = policy.get_action(fields)
    golden["actions"] = {key: [actions[key][0, step].tolist() for step in golden["steps"]] for key in actions}
    return golden


def test_equal_actions_pass_and_a_small_deviation_does_not(
    policy: Gr00tPolicy, checkpoint: Path, golden: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {difference for _, _, difference in compare(policy, golden)} == {0.0}
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(golden))
    arguments = ["--checkpoint", str(checkpoint), "--golden", str(file), "--device", "cpu"]
    assert main(arguments) == 0
    assert "equal within 0.01: largest difference 0.000000" in capsys.readouterr().out
    golden["actions"]["joint_position"][1][3] += 0.011
    file.write_text(json.dumps(golden))
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "NOT equal within 0.01: largest difference 0.011" in out and out.count("too large") == 1


def test_random_weights_do_not_pass_for_the_published_ones(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--checkpoint", str(checkpoint), "--device", "cpu"]) == 1
    assert "CUDA" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", str(tmp_path), "--device", "cpu"]) == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err


@pytest.mark.skipif(not (REFERENCE / "golden").is_dir(), reason="the published actions are not in this checkout")
def test_the_published_actions_are_retyped_without_a_slip() -> None:
    ours, published = json.loads(GOLDEN.read_text()), json.loads((REFERENCE / "golden" / "droid.json").read_text())
    for key in ("steps", "actions", "atol"):
        assert ours[key] == published[key]
    assert ours["observation"]["state"] == published["observation"]["state"]
    assert list(published["observation"]["language"].values()) == [ours["observation"]["prompt"]]
    assert ours["observation"]["options"]["seed"] == published["seed"]
