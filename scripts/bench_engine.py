"""Measures the engine in process: `get_action` of B rows, from uint8 images on the host to actions on the host.

Compares it, in one run, with the plain network and with floors worked out from parameters, tokens and two ceilings
measured on the spot (a large bf16 product, a large copy). `--check` also verifies what the engine promises.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handler.policy import Actions, Gr00tPolicy, Row
from handler.problem import Problem
from scripts.report import command, machine, write_report

PRESETS = {
    "libero": ("libero_sim", (256, 256)),  # 2 images
    "droid": ("oxe_droid_relative_eef_relative_joint", (180, 320)),  # 2 cameras, 2 frames each
}
TEXT = "pick up the red object and put it into the drawer next to the plate on the left side of the table"
WORDS = TEXT.split()


def observation(policy: Gr00tPolicy, preset: str, seed: int, words: int = 11) -> dict[str, Any]:
    """A random observation of a preset, with an instruction of so many words."""
    tag, size = PRESETS[preset]
    return random_observation(policy, tag, size, " ".join(WORDS[i % len(WORDS)] for i in range(words)), seed)


def random_observation(policy: Gr00tPolicy, tag: str, size: tuple[int, int], prompt: str, seed: int) -> dict[str, Any]:
    """An observation of one row with random frames and state, as a client would nest it; `seed` is also its noise's."""
    rng = np.random.default_rng(seed)
    fields = policy.example(tag)
    for camera, frames in fields["video"].items():
        fields["video"][camera] = rng.integers(0, 256, (*frames.shape[:2], *size, 3), dtype=np.uint8)
    for key, value in fields["state"].items():
        fields["state"][key] = value + rng.uniform(-0.2, 0.2, value.shape).astype(np.float32)
    fields["language"] = {next(iter(fields["language"])): [[prompt]]}
    fields["options"] = {"embodiment_tag": tag, "seed": seed}
    return fields


def free() -> None:
    """Gives back the memory of policies that are gone; they hold themselves in a cycle."""
    gc.collect()
    torch.cuda.empty_cache()


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median wall milliseconds of `run`, which ends synchronised, after three warm-ups."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def batch_of(fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Observations of one row as one observation of B rows; row i's seed is the first's + i."""
    first = fields[0]
    joined = {name: {key: np.concatenate([f[name][key] for f in fields]) for key in first[name]}
              for name in ("video", "state")}  # fmt: skip
    language = {key: [text for f in fields for text in f["language"][key]] for key in first["language"]}
    return {**joined, "language": language, "options": first["options"]}


def rows_of(policy: Gr00tPolicy, fields: Sequence[dict[str, Any]]) -> list[Row]:
    return [row for f in fields for row in policy.prepare(policy.check(f))]


def ceilings() -> tuple[float, float]:
    """(product FLOP/s in bf16, copy bytes/s read and written), each the best of several on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / event_ms(lambda: a @ b, 10) * 1e3
    source = torch.empty(1 << 32, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return product, 2 * source.numel() / event_ms(lambda: target.copy_(source), 10) * 1e3


def event_ms(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds between CUDA events around `run`."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def work(policy: Gr00tPolicy, row: Row) -> tuple[float, float, float]:
    """(FLOPs of a row, bytes of weights read once, bytes of DiT weights), products of weights only."""
    c = policy.config
    v, t = c.vision, c.text
    patches, tokens = sum(h * w for h, w in row.grids), len(row.input_ids)
    images = patches // v.spatial_merge_size**2
    joined = v.hidden_size * v.spatial_merge_size**2
    vision = v.depth * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size)
    merge = (1 + len(v.deepstack_visual_indexes)) * joined * (joined + v.out_hidden_size)
    heads = (2 * t.num_attention_heads + 2 * t.num_key_value_heads) * t.head_dim
    text = c.select_layer * (t.hidden_size * heads + 3 * t.hidden_size * t.intermediate_size)
    vl = c.vl_self_attention.num_layers * 12 * c.vl_self_attention.width**2
    width, context = c.dit.width, c.backbone_embedding_dim
    half = c.dit.num_layers // 2
    cross_kv = half * 2 * context * width  # text layers see text tokens, image layers image tokens
    dit = half * (4 + 2 + 2 * 8) * width**2
    steps = c.num_inference_timesteps
    macs = patches * vision + images * merge + tokens * (text + vl) + tokens / 2 * cross_kv
    macs += steps * (1 + c.action_horizon) * dit
    weights = 2 * (vision + merge + text + vl + cross_kv)
    return 2 * macs, weights, 2 * dit * steps


def answers(policy: Gr00tPolicy, rows: Sequence[Row]) -> list[Actions]:
    out = []
    for result in policy.predict(rows):
        assert not isinstance(result, Problem)
        out.append(result)
    return out


def same(a: Actions, b: Actions) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def check(engine: Gr00tPolicy, checkpoint: Path) -> dict[str, Any]:
    """What the engine promises: precision, isolation, reproducibility, and no capture while serving."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    # Precision: RMS error against float32 with the same noise, over 64 observations, beside the plain bf16 network's.
    eager, exact = (Gr00tPolicy(checkpoint, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    rows = rows_of(engine, [observation(engine, "libero", seed, 5 + seed % 9) for seed in range(64)])
    squares = np.zeros(2)
    for first in range(0, 64, 8):
        part = rows[first : first + 8]
        batch = eager._batch(part)
        plain = eager.model(batch).float()
        full = exact._batch(part)
        want = exact.model(replace(full, noise=batch.noise.float()))
        fast = torch.from_numpy(engine._run_engine(part)).cuda()
        squares += [float((fast - want).square().mean()), float((plain - want).square().mean())]
    del eager, exact
    free()
    found["rms_engine"], found["rms_eager"] = np.sqrt(squares / 8).tolist()
    found["rms_ratio"] = found["rms_engine"] / found["rms_eager"]
    # Isolation: at an equal rung, whatever the neighbours see, say and are.
    me = rows[0]
    want = None
    found["neighbour_swap_identical"] = True
    for trial in range(20):
        others = rows_of(engine, [observation(engine, "libero", 1000 + 7 * trial + i, int(rng.integers(1, 17)))
                                  for i in range(7)])  # fmt: skip
        place = trial % 8
        got = answers(engine, [*others[:place], me, *others[place:]])[place]
        want = want or got
        found["neighbour_swap_identical"] &= same(got, want)
    # No capture while serving: 1,000 waves of mixed sizes and prompt lengths.
    before = engine.engine.captures if engine.engine else 0
    many = rows_of(engine, [observation(engine, "libero", seed, 1 + seed % 90) for seed in range(90)])
    for _ in range(1000):
        picked = rng.choice(len(many), int(rng.integers(1, engine.rows_per_forward + 1)), replace=True)
        answers(engine, [many[i] for i in picked])
    found["captures_in_1000_waves"] = (engine.engine.captures if engine.engine else 0) - before
    return found


def check_reproducible(policy: Gr00tPolicy) -> dict[str, Any]:
    """200 waves of random size and order: every row keeps its bits. And what that costs at 1 and at 8 rows."""
    rng = np.random.default_rng(1)
    rows = rows_of(policy, [observation(policy, "libero", seed, 5 + seed % 9) for seed in range(24)])
    solo = [answers(policy, [row])[0] for row in rows]
    identical = True
    for _ in range(200):
        picked = rng.permutation(len(rows))[: int(rng.integers(1, policy.rows_per_forward + 1))]
        identical &= all(same(a, solo[i]) for a, i in zip(answers(policy, [rows[i] for i in picked]), picked,
                                                          strict=True))  # fmt: skip
    return {
        "identical_in_200_waves": identical,
        "ms_1_row": round(median_ms(lambda: policy.predict(rows[:1]), 30), 2),
        "ms_8_rows": round(median_ms(lambda: policy.predict(rows[:8]), 30), 2),
    }


def measure(policy: Gr00tPolicy, preset: str, counts: Sequence[int], repeats: int,
            rates: tuple[float, float], plain: bool) -> list[dict[str, Any]]:  # fmt: skip
    """One line of the table per row count: the plain network alone, or the engine with its floors."""
    out = []
    for count in counts:
        fields = [observation(policy, preset, seed) for seed in range(count)]
        rows = rows_of(policy, fields)
        line: dict[str, Any] = {"rows": count}
        if plain:
            line["eager_ms"] = median_ms(lambda rows=rows: policy.predict(rows), max(5, repeats // 5))  # type: ignore[misc]
            out.append(line)
            continue
        flops, weights, dit = work(policy, rows[0])
        line["floor_ms"] = max(count * flops / rates[0], (weights + dit) / rates[1]) * 1e3
        joined = batch_of(fields)
        for name, run in (
            ("get_action_ms", lambda joined=joined: policy.get_action(joined)),
            ("prepare_ms", lambda joined=joined: policy.prepare(policy.check(joined))),
            ("predict_ms", lambda rows=rows: policy.predict(rows)),
            # The same rows as requests of their own, each checked and prepared by itself, as in a wave.
            ("wave_ms", lambda fields=fields: policy.predict(rows_of(policy, fields))),
        ):
            line[name] = median_ms(run, repeats)  # type: ignore[arg-type]
        if policy.engine is not None:
            grids = rows[0].grids
            rung = policy.engine.rungs[grids, next(r for r in policy.engine.row_rungs if r >= count),
                                       policy.engine.tokens(grids, len(rows[0].input_ids))]  # fmt: skip
            line["gpu_ms"] = event_ms(rung.replay, repeats)
        out.append(line)
    return out


def profile(policy: Gr00tPolicy, count: int) -> list[dict[str, Any]]:
    """Where a replay's time goes: kernels by total microseconds."""
    rows = rows_of(policy, [observation(policy, "libero", seed) for seed in range(count)])
    policy.predict(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        policy.predict(rows)
    events = [e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [{"kernel": e.key[:70], "calls": e.count, "us": round(e.self_device_time_total)} for e in events[:14]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder, such as make_checkpoint --size full")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--check", action="store_true", help="also verify precision, isolation and reproducibility")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="row counts whose kernels to list")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG of the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the engine's graphs need a CUDA device", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": command("bench_engine"),
        "machine": machine(),
    }

    broken: list[str] = []

    def save() -> None:
        if args.json:
            write_report(report, args.json)
        if args.plot:
            plot(report, args.plot)

    rates = ceilings()
    report["ceilings"] = {"product_tflops": round(rates[0] / 1e12, 1), "copy_tb_s": round(rates[1] / 1e12, 2)}
    print(f"{report['machine']['gpu']}: {report['ceilings']}", flush=True)
    plain = Gr00tPolicy(args.checkpoint, "cuda")
    eager = {p: measure(plain, p, args.rows, args.repeats, rates, plain=True) for p in args.presets}
    del plain
    free()
    start = time.perf_counter()
    policy = Gr00tPolicy(args.checkpoint, "cuda", engine=True)
    loaded = time.perf_counter()
    for preset in args.presets:
        row = rows_of(policy, [observation(policy, preset, 0)])[0]
        assert policy.engine is not None
        policy.engine.warm_up(row.grids)
    report["load_s"], report["capture_s"] = round(loaded - start, 1), round(time.perf_counter() - loaded, 1)
    report["gpu_memory_gb"] = round(torch.cuda.memory_reserved() / 1e9, 2)
    print(f"loaded in {report['load_s']} s, captured in {report['capture_s']} s, "
          f"{report['gpu_memory_gb']} GB", flush=True)  # fmt: skip
    report["presets"] = {}
    for preset in args.presets:
        lines = measure(policy, preset, args.rows, args.repeats, rates, plain=False)
        for line, other in zip(lines, eager[preset], strict=True):
            line.update(other)
        report["presets"][preset] = [{k: round(v, 3) for k, v in line.items()} for line in lines]
        print(f"\n{preset}: milliseconds, medians")
        names = ("rows", "floor_ms", "gpu_ms", "predict_ms", "prepare_ms", "get_action_ms", "wave_ms", "eager_ms")
        print(" ".join(f"{name:>13}" for name in names))
        for line in lines:
            print(" ".join(f"{line[name]:13.2f}" if name != "rows" else f"{line[name]:13}" for name in names))
        sys.stdout.flush()
    save()
    for count in args.profile:
        report.setdefault("profile", {})[str(count)] = listing = profile(policy, count)
        print(f"\nkernels of one forward of {count} rows")
        for entry in listing:
            print(f"{entry['us']:8} us {entry['calls']:5} x  {entry['kernel']}")
    if args.check:
        report["check"] = check(policy, args.checkpoint)
        del policy
        free()
        fixed = Gr00tPolicy(args.checkpoint, "cuda", engine=True, reproducible=True)
        assert fixed.engine is not None
        fixed.engine.warm_up(rows_of(fixed, [observation(fixed, "libero", 0)])[0].grids)
        report["reproducible"] = check_reproducible(fixed)
        print(f"\n{json.dumps(report['check'])}\nreproducible: {json.dumps(report['reproducible'])}")
        kept = {
            "rms_ratio at most 1.05": report["check"]["rms_ratio"] <= 1.05,
            "neighbours change no bit": report["check"]["neighbour_swap_identical"],
            "no capture while serving": report["check"]["captures_in_1000_waves"] == 0,
            "reproducible": report["reproducible"]["identical_in_200_waves"],
        }
        broken = [name for name, holds in kept.items() if not holds]
        print(f"promises broken: {', '.join(broken)}" if broken else "every promise holds")
    save()
    return 1 if broken else 0


def plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(report["presets"]), figsize=(6 * len(report["presets"]), 4.5), squeeze=False)
    for axis, (preset, lines) in zip(axes[0], report["presets"].items(), strict=True):
        for name, label, style in (
            ("eager_ms", "plain PyTorch", "o--"), ("get_action_ms", "engine, whole get_action", "o-"),
            ("gpu_ms", "engine, GPU alone", ".-"), ("floor_ms", "floor", "k:"),
        ):  # fmt: skip
            axis.plot([line["rows"] for line in lines], [line[name] for line in lines], style, label=label)
        axis.set(title=f"{preset}, {report['machine']['gpu']}", xlabel="rows", ylabel="ms (median)", xscale="log",
                 yscale="log")  # fmt: skip
        axis.set_xticks([line["rows"] for line in lines], [str(line["rows"]) for line in lines])
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
