"""The engine's fused operations: each twin against the plain formula, and each kernel against its twin on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from handler.gr00t import kernels
from handler.gr00t.model import rotate

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels run on a GPU; their twins ran")


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def test_add_norm_twin() -> None:
    x, r, w, b = random(6, 48), random(3, 48, seed=1), random(48, seed=2), random(48, seed=3)
    total = x + r.repeat(2, 1)
    got = x.clone()
    torch.testing.assert_close(kernels.add_norm(got, r, "layer", w, b), F.layer_norm(total, (48,), w, b))
    assert torch.equal(got, total)
    torch.testing.assert_close(kernels.add_norm(got, None, "ada", w, b, 1e-6),
                               F.layer_norm(total, (48,), eps=1e-6) * (1 + w) + b)  # fmt: skip
    want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * w
    torch.testing.assert_close(kernels.add_norm(got, None, "rms", w, None, 1e-6), want)
    torch.testing.assert_close(kernels.add_norm(got, None, "layer"), F.layer_norm(total, (48,)))


@pytest.mark.parametrize("normed", [False, True])
def test_rope_twin(normed: bool) -> None:
    qkv, angle = random(6, 8 * 16), random(3, 8, seed=1)
    norms = (random(16, seed=2), random(16, seed=3), 1e-6) if normed else None
    cos, sin = angle.cos(), angle.sin()
    got = qkv.clone()
    kernels.rope_(got, cos, sin, 4, 2, norms)
    heads = qkv.view(6, 8, 16)
    for n in range(6):
        for head in range(8):
            want = heads[n, head]
            if norms is not None and head < 6:
                want = want * torch.rsqrt(want.square().mean() + 1e-6) * norms[0 if head < 4 else 1]
            if head < 6:
                c, s = (torch.cat((t[n % 3], t[n % 3])) for t in (cos, sin))
                want = rotate(want, c, s)
            torch.testing.assert_close(got.view(6, 8, 16)[n, head], want)


def test_a_split_product_is_summed_up_by_the_norm() -> None:
    x, weight, bias, stream = random(5, 48), random(32, 48, seed=1), random(32, seed=2), random(5, 32, seed=3)
    want = stream + F.linear(x, weight, bias)
    for splits in (1, 2, 3):
        got = stream.clone()
        y = kernels.add_norm(got, kernels.linear_split(x, weight, bias, splits), "layer")
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(y, F.layer_norm(want, (32,)))


def test_silu_mul_and_attend_twins() -> None:
    x = random(5, 12)
    torch.testing.assert_close(kernels.silu_mul(x), F.silu(x[:, :6]) * x[:, 6:])
    q, k, v = random(2, 3, 4, 8), random(2, 5, 4, 8, seed=1), random(2, 5, 4, 8, seed=2)
    got = kernels.attend(q, k, v, torch.tensor([2, 5], dtype=torch.int32))
    for row, count in ((0, 2), (1, 5)):
        weights = torch.einsum("nhd,mhd->hnm", q[row], k[row, :count]) / 8**0.5
        want = torch.einsum("hnm,mhd->nhd", weights.softmax(-1), v[row, :count]).flatten(1)
        torch.testing.assert_close(got[row], want)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 1024, 1536, 2048, 4096])
def test_add_norm_kernel(width: int, dtype: torch.dtype) -> None:
    tolerance: Any = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for kind in ("layer", "ada", "rms"):
        for rows in (None, 7, 14):
            shapes = enumerate(((14, width), (width,), (width,)))
            x, w, b = (random(*shape, device="cuda", dtype=dtype, seed=seed) for seed, shape in shapes)
            r = None if rows is None else random(rows, width, device="cuda", dtype=dtype, seed=9)
            ours, twin = x.clone(), x.clone()
            got = kernels.add_norm(ours, r, kind, w, None if kind == "rms" else b)
            want = kernels.add_norm_twin(twin, r, kind, w, None if kind == "rms" else b, 1e-5)
            assert torch.equal(ours, twin)
            torch.testing.assert_close(got, want, **tolerance)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels(dtype: torch.dtype) -> None:
    tolerance: Any = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for dim, q_heads, k_heads, v_heads, normed in ((64, 16, 16, 16, False), (128, 16, 8, 8, True), (32, 4, 2, 2, True)):
        qkv = random(26, (q_heads + k_heads + v_heads) * dim, device="cuda", dtype=dtype)
        angle = random(13, dim // 2, device="cuda", seed=1)
        norms = (random(dim, device="cuda", dtype=dtype, seed=2), random(dim, device="cuda", dtype=dtype, seed=3), 1e-6)
        got, want = qkv.clone(), qkv.clone()
        kernels.rope_(got, angle.cos(), angle.sin(), q_heads, k_heads, norms if normed else None)
        kernels.rope_twin(want, angle.cos(), angle.sin(), q_heads, k_heads, norms if normed else None)
        torch.testing.assert_close(got, want, **tolerance)
    x = random(9, 2 * 6144, device="cuda", dtype=dtype)
    torch.testing.assert_close(kernels.silu_mul(x), kernels.silu_mul_twin(x), **tolerance)
    if dtype == torch.bfloat16:
        wide = random(41, 6144, device="cuda", dtype=dtype)
        weight = random(1536, 6144, device="cuda", dtype=dtype, seed=1)
        bias, stream = random(1536, device="cuda", dtype=dtype), random(41, 1536, device="cuda", dtype=dtype, seed=2)
        sums = kernels.linear_split(wide, weight, bias, 3)
        assert isinstance(sums, kernels.Sums) and sums.parts.shape == (3, 41, 1536)
        ours, twin = stream.clone(), stream.clone()
        got, want = kernels.add_norm(ours, sums, "layer"), kernels.add_norm_twin(twin, sums, "layer", None, None, 1e-5)
        assert torch.equal(ours, twin)
        torch.testing.assert_close(got, want, **tolerance)
        torch.testing.assert_close(ours.float(), stream.float() + wide.float() @ weight.float().T + bias.float(),
                                   rtol=2e-2, atol=0.5)  # fmt: skip
        w, b = random(512, 96, device="cuda", dtype=dtype, seed=4), random(512, device="cuda", dtype=dtype, seed=5)
        x = random(41, 96, device="cuda", dtype=dtype)
        want = F.gelu(F.linear(x.float(), w.float(), b.float()), approximate="tanh").to(dtype)
        torch.testing.assert_close(kernels.gelu_linear(x, w, b), want, rtol=2e-2, atol=5e-2)
        for heads, size, queries, keys in ((32, 64, 158, 158), (32, 48, 41, 30), (4, 32, 20, 17)):
            packed = random(3, max(queries, keys), 3, heads, size, device="cuda", dtype=dtype, seed=6)
            q, k, v = packed[:, :queries, 0], packed[:, :keys, 1], packed[:, :keys, 2]
            counts = torch.tensor([1, keys // 2, keys], dtype=torch.int32, device="cuda")
            got, want = kernels.attend(q, k, v, counts), kernels.attend_twin(q, k, v, counts)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            poisoned = packed.clone()
            poisoned[1, keys // 2 :, 1:] = float("nan")  # what stands after a row's count is never read
            again = kernels.attend(q, poisoned[:, :keys, 1], poisoned[:, :keys, 2], counts)
            assert torch.equal(got[1], again[1])
