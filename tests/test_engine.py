"""The fused network against the plain one, in float32 on the CPU: every grid, length, embodiment and option."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from handler.gr00t.engine import ROW_RUNGS, TEXT_RUNGS, Buffers, HostRow, rung_of, splits_of
from handler.policy import Gr00tPolicy
from scripts.bench_engine import batch_of
from tests.conftest import DROID, LIBERO, observation, predict, rows_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")


@pytest.fixture(scope="module")
def fused(checkpoint: Path) -> Gr00tPolicy:
    return Gr00tPolicy(checkpoint, engine=True)


def test_equals_the_plain_network(policy: Gr00tPolicy, fused: Gr00tPolicy) -> None:
    """Also padded rows and tokens, cameras of two shapes in one row, and real-time chunking."""
    two_shapes = observation(policy, DROID, seed=7)
    two_shapes["video"]["wrist_image_left"] = two_shapes["video"]["wrist_image_left"][:, :, :, :140]
    chunked = observation(policy, LIBERO, seed=8)
    previous = {key: value[0] for key, value in policy.get_action(chunked).items()}
    chunked["options"]["rtc"] = {"action": previous, "overlap_steps": 7, "frozen_steps": 2}
    fields = [
        observation(policy, LIBERO, seed=1, prompt="go"),
        observation(policy, DROID, seed=2, prompt="pick up the large blue bowl " * 4),
        observation(policy, LIBERO, seed=3, size=(180, 320)),
        observation(policy, DROID, seed=4, size=(180, 320)),
        observation(policy, LIBERO, seed=5, prompt="push the stove " * 20),
        two_shapes,
        chunked,
        *(observation(policy, LIBERO, seed=seed) for seed in range(10, 15)),  # more images than OWN_ATTENTION_IMAGES
    ]
    for got, want in zip(predict(fused, rows_of(fused, *fields)), predict(policy, rows_of(policy, *fields)),
                         strict=True):  # fmt: skip
        for key in want:
            np.testing.assert_allclose(got[key], want[key], rtol=0, atol=1e-5, err_msg=key)


def test_what_an_earlier_wave_left_in_the_padding_changes_no_bit(fused: Gr00tPolicy) -> None:
    rows = rows_of(fused, *(observation(fused, LIBERO, seed=seed, prompt="go " * (4 - seed)) for seed in range(4)))
    engine = fused.engine
    assert engine is not None
    grids = rows[0].grids
    hosts = [
        HostRow(r.frames, r.sizes, r.prepared, r.input_ids, r.positions, r.state, 0, r.seed, None, None) for r in rows
    ]
    tokens = engine.tokens(grids, max(len(row.input_ids) for row in rows))
    plan, tables = engine.fused.plan(grids, tokens), engine.fused.tables(grids)

    def forward(used: tuple[torch.Tensor, Buffers], hosts: list[HostRow]) -> torch.Tensor:
        frames, buffers = used
        fused.resizer([host.frames for host in hosts], [host.sizes for host in hosts], [False] * len(hosts), frames)
        buffers.load(hosts, engine.images(grids), engine.generator)
        start = engine.fused.begin(buffers.inputs, plan)
        return engine.fused.act(buffers.inputs, start, engine.fused.encode_images(frames, grids, tables), plan)

    used, fresh = ((engine.fused.frames(4, grids), Buffers(engine.fused, 4, tokens)) for _ in range(2))
    full = forward(used, hosts)
    assert not torch.equal(full[3], full[2])
    assert torch.equal(forward(used, hosts[1:])[:3], forward(fresh, hosts[1:])[:3])


def test_threads_prepare_the_same_bits(checkpoint: Path) -> None:
    """As on a GPU, where a wave's requests are prepared side by side."""
    policy = Gr00tPolicy(checkpoint, engine=True)
    fields = [observation(policy, DROID, seed=seed, prompt=f"push the bowl {seed % 5}") for seed in range(12)]
    fields.append(batch_of([observation(policy, DROID, seed=20 + seed) for seed in range(7)]))
    serial = rows_of(policy, *fields)
    want = predict(policy, serial)
    with ThreadPoolExecutor(8) as callers:
        rows = [row for rows in callers.map(lambda f: policy.prepare(policy.check(f)), fields) for row in rows]
    got = predict(policy, rows)
    for a, b, x, y in zip(rows, serial, got, want, strict=True):
        assert torch.equal(a.frames, b.frames)
        assert np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.state, b.state)
        assert all(np.array_equal(x[key], y[key]) for key in x)


@pytest.mark.parametrize("engine", [False, True])
def test_reproducible_whatever_the_company(checkpoint: Path, engine: bool) -> None:
    policy = Gr00tPolicy(checkpoint, engine=engine, reproducible=True)
    long = "pick up the small blue bowl " * 12
    rows = rows_of(policy, *(observation(policy, LIBERO, seed=s, prompt=long if s % 3 else "go") for s in range(10)))
    solo = [predict(policy, [row])[0] for row in rows]
    rng = np.random.default_rng(0)
    for _ in range(6):
        picked = rng.permutation(10)
        shape = policy.shape(rows[picked[0]])
        wave = [i for i in picked if policy.shape(rows[i]) == shape][: policy.rows_per_forward]
        for i, got in zip(wave, predict(policy, [rows[i] for i in wave]), strict=True):
            assert all(np.array_equal(got[key], solo[i][key]) for key in got)
    assert len({policy.shape(row) for row in rows}) == 2
    # More rows than one forward has, of both lengths, in one call.
    for got, want in zip(predict(policy, [*rows, *rows]), [*solo, *solo], strict=True):
        assert all(np.array_equal(got[key], want[key]) for key in got)


@needs_gpu
def test_graphs_on_a_gpu(checkpoint: Path) -> None:
    """The whole ladder captured, memory around it rewritten, then waves of random size against the plain network."""
    engine, plain = (Gr00tPolicy(checkpoint, "cuda", torch.bfloat16, engine=on) for on in (True, False))
    engine.warm_up()
    assert engine.engine is not None
    captured = engine.engine.captures
    assert captured == 2 * len(TEXT_RUNGS) * len(engine.engine.row_rungs)
    waste = [torch.full((1 << 20,), -1, device="cuda") for _ in range(64)]  # lands where freed constants were
    del waste
    rng = np.random.default_rng(0)
    text = "pick up the small blue bowl and put it down next to the red cup on the table"
    words = text.split()
    pools = []
    for tag in (LIBERO, DROID):
        fields = [observation(engine, tag, seed=s, prompt=" ".join(rng.choice(words, 1 + s % 40))) for s in range(40)]
        pools.append(rows_of(engine, *fields))
    for _ in range(60):
        rows = pools[int(rng.integers(2))]
        picked = rng.choice(40, int(rng.integers(1, 33)))
        got, want = (predict(policy, [rows[i] for i in picked]) for policy in (engine, plain))
        for a, b in zip(got, want, strict=True):
            for key in a:
                np.testing.assert_allclose(a[key], b[key], rtol=0, atol=0.1, err_msg=key)
    assert engine.engine.captures == captured
    me, place = pools[0][0], 3
    answers = []
    for trial in range(4):  # at an equal rung the neighbours do not matter, to the bit
        others = [pools[0][i] for i in rng.choice(40, 7)]
        answers.append(predict(engine, [*others[:place], me, *others[place:]])[place])
        assert all(np.array_equal(answers[0][key], answers[trial][key]) for key in answers[0])
    new = observation(engine, LIBERO, seed=1, size=(180, 320))  # a new grid: at once, and captured once
    for captures in (0, 1, 1):  # at once; captured when it comes again; replayed
        predict(engine, rows_of(engine, new))
        assert engine.engine.captures == captured + captures


@needs_gpu
def test_what_remains_after_evictions_keeps_its_bits(checkpoint: Path) -> None:
    """Graphs share pools: those that went, and memory given back and used anew, take nothing from those that stay."""
    policy = Gr00tPolicy(checkpoint, "cuda", torch.bfloat16, engine=True)
    assert policy.engine is not None
    policy.engine.max_graphs = 2
    wave = rows_of(policy, *(observation(policy, LIBERO, seed=s, prompt="push the bowl") for s in range(8)))
    sizes = (8, 4, 2, 1)
    for size in sizes:  # at once; captured
        for _ in range(2):
            predict(policy, wave[:size])
    assert policy.engine.captures == 4 and len(policy.engine.rungs) == 2
    want = {size: predict(policy, wave[:size]) for size in sizes[2:]}
    torch.cuda.empty_cache()
    waste = [torch.full((1 << 20,), -1, device="cuda") for _ in range(64)]
    for _ in range(3):
        for size, answers in want.items():
            for got, before in zip(predict(policy, wave[:size]), answers, strict=True):
                assert all(np.array_equal(got[key], before[key]) for key in got)
    assert policy.engine.captures == 4 and len(waste) == 64


def test_rungs() -> None:
    assert [rung_of(n, ROW_RUNGS) for n in (1, 2, 3, 5, 8, 9, 32, 33)] == [1, 2, 3, 6, 8, 12, 32, 48]
    assert rung_of(TEXT_RUNGS[-1] + 1, TEXT_RUNGS) is None
    assert splits_of(((128, 3), (256, 2)), np.empty((100, 6144))) == 3  # type: ignore[arg-type]
    assert splits_of(((128, 3), (256, 2)), np.empty((200, 6144))) == 2  # type: ignore[arg-type]
    assert splits_of(((128, 3), (256, 2)), np.empty((300, 6144))) == 1  # type: ignore[arg-type]
    assert splits_of(((128, 3),), np.empty((100, 32))) == 1  # type: ignore[arg-type]  # no equal aligned parts
