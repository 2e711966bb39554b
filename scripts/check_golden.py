"""Compares a checkpoint's actions with published ones: the proof that real weights move a robot as they should.

By default the published actions of nvidia/GR00T-N1.7-3B, which need CUDA: noise from one seed differs between a CPU
and a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handler.gr00t.checkpoint import CheckpointError
from handler.policy import Gr00tPolicy
from handler.problem import Problem

GOLDEN = Path(__file__).with_name("golden_droid.json")


def compare(policy: Gr00tPolicy, golden: dict[str, Any]) -> list[tuple[str, int, float]]:
    """The largest difference per action key and step: (key, step, |ours - published|).

    golden: `observation` (frames as shapes, black; states as (D,) numbers), `steps`, and `actions` {key: one row per
    step}.

    Raises:
        Problem: the checkpoint does not take the observation.
    """
    fields = dict(golden["observation"])
    fields["video"] = {key: np.zeros(shape, np.uint8) for key, shape in fields["video"].items()}
    actions = policy.get_action(fields)
    differences = []
    for key, rows in golden["actions"].items():
        for step, row in zip(golden["steps"], rows, strict=True):
            difference = np.abs(actions[key][0, step] - np.asarray(row, np.float32)) if key in actions else np.inf
            differences.append((key, step, float(np.max(difference))))
    return differences


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, when the checkpoint has none")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="observation and actions to compare with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    golden = json.loads(args.golden.read_text(encoding="utf-8"))
    if args.golden == GOLDEN and not args.device.startswith("cuda"):
        print("note: the published actions need CUDA noise; on a CPU they cannot be met", file=sys.stderr)
    try:
        policy = Gr00tPolicy(args.checkpoint, args.device, tokenizer=args.tokenizer)
        differences = compare(policy, golden)
    except (CheckpointError, Problem) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{golden['what']}\ncheckpoint {policy.checkpoint}, {policy.dtype} on {args.device}\n")
    print(f"{'action':32} {'step':>4} {'largest difference':>18}")
    for key, step, difference in differences:
        print(f"{key:32} {step:4} {difference:18.6f}{'' if difference <= golden['atol'] else '  <-- too large'}")
    worst = max(difference for _, _, difference in differences)
    good = worst <= golden["atol"]
    print(f"\n{'equal' if good else 'NOT equal'} within {golden['atol']}: largest difference {worst:.6f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
