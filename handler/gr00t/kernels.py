"""The fused operations of the engine: each a Triton kernel on CUDA, with a plain-PyTorch twin that says what it does.

The twin runs everywhere else; `tests/test_kernels.py` compares the two where there is a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch
    triton = None


class Sums(NamedTuple):
    """A product that is not summed up yet: parts float32 (splits, M, N), to which bias (N,) belongs."""

    parts: Tensor
    bias: Tensor


# ------------------------------------------------------------------------------------------------------------- twins


def add_norm_twin(x: Tensor, r: Tensor | Sums | None, kind: str, w: Tensor | None, b: Tensor | None, eps: float
                  ) -> Tensor:  # fmt: skip
    """See `add_norm`."""
    if isinstance(r, Sums):
        r = (r.parts.sum(0) + r.bias.float()).to(x.dtype)
    if r is not None:
        x.view(-1, *r.shape).add_(r)
    y = x.float()
    if kind == "rms":
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    else:
        y = F.layer_norm(y, y.shape[-1:], eps=eps)
    if w is not None:
        y = y * (w.float() + (1.0 if kind == "ada" else 0.0))
    if b is not None:
        y = y + b.float()
    return y.to(x.dtype)


def rope_twin(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_heads: int, k_heads: int, norms: tuple[Tensor, Tensor, float] | None
) -> None:
    """See `rope_`."""
    dim = 2 * cos.shape[-1]
    heads = qkv[:, : (q_heads + k_heads) * dim].unflatten(1, (-1, dim)).float()
    if norms is not None:
        q_weight, k_weight, eps = norms
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)
        weights = torch.cat((q_weight.expand(q_heads, dim), k_weight.expand(k_heads, dim)))
        heads = heads * weights.float()
    repeat = qkv.shape[0] // cos.shape[0]
    c, s = (t.repeat(repeat, 1)[:, None] for t in (cos, sin))
    left, right = heads.chunk(2, dim=-1)
    turned = torch.cat((left * c - right * s, right * c + left * s), dim=-1)
    qkv[:, : (q_heads + k_heads) * dim] = turned.flatten(1).to(qkv.dtype)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    """See `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def attend_twin(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    """See `attend`."""
    mask = torch.arange(k.shape[1], device=k.device) < counts[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------------------------------- kernels

if triton is not None:

    @triton.jit
    def _add_norm(X, R, RB, Y, W, B, r_rows, eps, N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
                  HAS_R: tl.constexpr, SPLITS: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr):  # fmt: skip
        row = tl.program_id(0)
        at = tl.arange(0, BLOCK)
        inside = at < N
        x = tl.load(X + row * N + at, mask=inside, other=0.0)
        if SPLITS > 0:
            r = tl.load(RB + at, mask=inside, other=0.0).to(tl.float32)
            for split in tl.static_range(SPLITS):
                r += tl.load(R + (split * r_rows + row) * N + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + r.to(x.dtype).to(tl.float32)).to(x.dtype)
            tl.store(X + row * N + at, x, mask=inside)
        elif HAS_R:
            r = tl.load(R + (row % r_rows) * N + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)  # rounded, as the stored stream is
            tl.store(X + row * N + at, x, mask=inside)
        x = x.to(tl.float32)
        if KIND == "rms":
            y = x * tl.rsqrt(tl.sum(x * x) / N + eps)
        else:
            centred = tl.where(inside, x - tl.sum(x) / N, 0.0)
            y = centred * tl.rsqrt(tl.sum(centred * centred) / N + eps)
        if HAS_W:
            w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
            y = y * (w + 1.0) if KIND == "ada" else y * w
        if HAS_B:
            y = y + tl.load(B + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + row * N + at, y.to(Y.dtype.element_ty), mask=inside)

    @triton.jit
    def _rope(X, COS, SIN, QW, KW, table_rows, stride, eps, HALF: tl.constexpr, HEADS: tl.constexpr,
              Q_HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
        row = tl.program_id(0)
        head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        at = tl.arange(0, HALF)[None, :]
        inside = (head < HEADS) & (at < HALF)
        left_at = X + row * stride + head * (2 * HALF) + at
        left = tl.load(left_at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(left_at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF) + eps)[:, None]
            is_q = head < Q_HEADS
            left_w = tl.where(is_q, tl.load(QW + at), tl.load(KW + at)).to(tl.float32)
            right_w = tl.where(is_q, tl.load(QW + HALF + at), tl.load(KW + HALF + at)).to(tl.float32)
            left, right = left * scale * left_w, right * scale * right_w
        c = tl.load(COS + (row % table_rows) * HALF + at)
        s = tl.load(SIN + (row % table_rows) * HALF + at)
        tl.store(left_at, (left * c - right * s).to(X.dtype.element_ty), mask=inside)
        tl.store(left_at + HALF, (right * c + left * s).to(X.dtype.element_ty), mask=inside)

    @triton.jit
    def _silu_mul(X, Y, N, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < N
        gate = tl.load(X + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(X + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Y + row * N + at, (gate * tl.sigmoid(gate) * up).to(Y.dtype.element_ty), mask=inside)

    @triton.jit
    def _attend(Q, K, V, OUT, COUNTS, scale, queries, keys, heads,
                q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                D: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
        row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        query = tl.program_id(0) * BM + tl.arange(0, BM)
        d = tl.arange(0, PADDED)
        q_inside = (query[:, None] < queries) & (d[None, :] < D)
        q = tl.load(Q + row * q_row + head * q_head + query[:, None] * q_token + d[None, :], mask=q_inside, other=0.0)
        count = tl.load(COUNTS + row)
        best = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        out = tl.zeros([BM, PADDED], tl.float32)
        for first in range(0, count, BN):
            key = first + tl.arange(0, BN)
            inside = (key[:, None] < count) & (d[None, :] < D)
            k = tl.load(K + row * k_row + head * k_head + key[:, None] * k_token + d[None, :], mask=inside, other=0.0)
            score = tl.dot(q, tl.trans(k)) * scale
            score = tl.where(key[None, :] < count, score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            p = tl.exp2(score - new_best[:, None])
            keep = tl.exp2(best - new_best)
            v = tl.load(V + row * v_row + head * v_head + key[:, None] * v_token + d[None, :], mask=inside, other=0.0)
            out = out * keep[:, None] + tl.dot(p.to(v.dtype), v)
            total = total * keep + tl.sum(p, 1)
            best = new_best
        out = out / total[:, None]
        where = OUT + ((row * queries + query[:, None]) * heads + head) * D + d[None, :]
        tl.store(where, out.to(OUT.dtype.element_ty), mask=q_inside)


# -------------------------------------------------------------------------------------------------------- operations


def add_norm(
    x: Tensor, r: Tensor | Sums | None, kind: str, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5
) -> Tensor:  # fmt: skip
    """x += r, then a norm of x: (M, N) -> (M, N).

    r: (M, N), (m, N) that repeats, Sums that get summed up here, or None. kind: "layer" (times w, plus b), "ada" (times
    1 + w, plus b) or "rms" (times w); w and b (N,) or None. Computed in float32, rounded once.
    """
    if triton is None or not x.is_cuda:
        return add_norm_twin(x, r, kind, w, b, eps)
    rows, width = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    added, splits, bias = (r.parts, r.parts.shape[0], r.bias) if isinstance(r, Sums) else (r, 0, x)
    r_rows = 1 if added is None else added.shape[-2]
    _add_norm[(rows,)](
        x, x if added is None else added, bias, y, x if w is None else w, x if b is None else b, r_rows, eps,
        N=width, BLOCK=block, KIND=kind, HAS_R=r is not None, SPLITS=splits, HAS_W=w is not None, HAS_B=b is not None,
        num_warps=4 if rows > 512 and block <= 2048 else 8,
    )  # fmt: skip
    return y


def linear_split(x: Tensor, weight: Tensor, bias: Tensor, splits: int) -> Tensor | Sums:
    """x @ weight.T + bias with K in `splits` equal parts: (M, K) -> (M, N), or Sums where there is more than one part.

    With few rows a long K leaves most of the GPU idle; its parts run side by side as one batched product.
    """
    if splits == 1:
        return F.linear(x, weight, bias)
    rows, width = x.shape[0], weight.shape[0]
    xs = x.view(rows, splits, -1).transpose(0, 1)
    ws = weight.view(width, splits, -1).permute(1, 2, 0)
    parts = torch.bmm(xs, ws, out_dtype=torch.float32) if x.is_cuda else torch.bmm(xs.float(), ws.float())
    return Sums(parts, bias)


def rope_(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_heads: int, k_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:  # fmt: skip
    """Turns the query and key heads of packed (M, heads * dim) in place, after an RMS norm of each head if asked.

    cos, sin: float32 (m, dim / 2), m rows that repeat. norms: (weight of queries, weight of keys, eps).
    """
    if triton is None or not qkv.is_cuda:
        return rope_twin(qkv, cos, sin, q_heads, k_heads, norms)
    half, heads = cos.shape[-1], q_heads + k_heads
    q_weight, k_weight, eps = norms if norms is not None else (cos, cos, 0.0)
    block = 16
    _rope[(qkv.shape[0], triton.cdiv(heads, block))](
        qkv, cos, sin, q_weight, k_weight, cos.shape[0], qkv.stride(0), eps,
        HALF=half, HEADS=heads, Q_HEADS=q_heads, BLOCK=block, NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return None


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of packed (M, 2 N) -> (M, N)."""
    if triton is None or not gate_up.is_cuda:
        return silu_mul_twin(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    block = 2048
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, y, width, BLOCK=block, num_warps=4)
    return y


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ weight.T + bias), tanh form, in the product's epilogue on CUDA: (M, K) -> (M, N)."""
    if x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def attend(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    """Attention over the first counts[row] keys of each row: q (R, N, heads, D), k and v (R, M, heads, D)
    -> (R, N, heads * D). The last axis is contiguous; counts (R,) int32, at least 1."""
    if triton is None or not q.is_cuda:
        return attend_twin(q, k, v, counts)
    rows, queries, heads, dim = q.shape
    out = q.new_empty(rows, queries, heads * dim)
    strides: list[Any] = [t.stride(axis) for t in (q, k, v) for axis in (0, 1, 2)]
    bm = 64 if queries > 32 else 32
    bn = 64 if queries > 64 else 32
    _attend[(triton.cdiv(queries, bm), rows * heads)](
        q, k, v, out, counts, dim**-0.5 * 1.4426950408889634, queries, k.shape[1], heads, *strides,
        D=dim, PADDED=max(16, triton.next_power_of_2(dim)), BM=bm, BN=bn, num_warps=4,
    )  # fmt: skip
    return out
