"""The frame recipe of `transforms` where the network runs: cameras' frames in, images for the vision tower out.

On a CPU that is `transforms.model_frame`. On a GPU every resize is a table of source pixels and weights per axis, and
one kernel computes with them exactly as OpenCV or PyTorch does on the CPU, to the bit: the resize is part of what the
checkpoint was trained on. A crop or a black border only shifts the tables.

N frames of (H, W) become N of (h, w); T taps a pixel and axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from handler.transforms import PREPARED, ImageRecipe, Size, crop_offset, model_frame

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch
    triton = None

# How a step rounds. FIXED: OpenCV's bilinear of 11 bits, which its INTER_AREA is when a side grows. AREA: INTER_AREA,
# float32. MEAN: the same by whole factors. INT16: PyTorch's antialiased uint8 resize, which rounds between the axes.
FIXED, AREA, MEAN, INT16 = range(4)
BLOCK = 512  # values that one program of the kernel computes


@dataclass(frozen=True)
class Axis:
    """One axis of a resize: int32 (h, T) source pixels, which may lie outside (black), and their weights, int32 or
    float32. shift: bits of the weights (INT16)."""

    index: NDArray[np.int32]
    weight: NDArray[Any]
    shift: int = 0


@dataclass(frozen=True)
class Step:
    """(H, W) `source` to (h, w) `target` along both axes."""

    kind: int
    source: Size
    target: Size
    y: Axis
    x: Axis


# ------------------------------------------------------------------------------------------------------------ tables


def fixed_axis(source: int, target: int, horizontal: bool) -> Axis:
    """OpenCV's bilinear taps in the variant that INTER_AREA uses to enlarge (imgproc/src/resize.cpp, `area_mode`)."""
    inverse = target / source
    at = np.arange(target)
    left = np.floor(at * (1.0 / inverse)).astype(np.int32)
    part = ((at + 1) - (left + 1) * inverse).astype(np.float32)
    part = np.where(part <= 0, np.float32(0), part - np.floor(part))
    if horizontal:  # OpenCV does so along x alone; along y it repeats the last row
        part = np.where(left >= source - 1, np.float32(0), part)
    weight = np.rint(np.stack((np.float32(1) - part, part), axis=1) * np.float32(2048)).astype(np.int32)
    index = np.minimum(np.stack((left, left + 1), axis=1), source - 1)
    return Axis(index.astype(np.int32), weight)


def area_axis(source: int, target: int) -> Axis:
    """The share of each source pixel in a target pixel (`computeResizeAreaTab`)."""
    scale = 1.0 / (target / source)
    taps: list[list[tuple[int, float]]] = []
    for at in range(target):
        low, high = at * scale, at * scale + scale
        cell = min(scale, source - low)
        first, last = math.ceil(low), min(math.floor(high), source - 1)
        first = min(first, last)
        row = [(first - 1, (first - low) / cell)] if first - low > 1e-3 else []
        row += [(pixel, 1.0 / cell) for pixel in range(first, last)]
        if high - last > 1e-3:
            row.append((last, min(min(high - last, 1.0), cell) / cell))
        taps.append(row)
    return _axis(taps, np.float32)


def mean_axis(source: int, target: int) -> Axis:
    """Whole factors: each target pixel has its own source pixels, which count alike."""
    factor = source // target
    index = np.arange(source, dtype=np.int32).reshape(target, factor)
    return Axis(index, np.ones_like(index))


def int16_axis(source: int, target: int, cubic: bool) -> Axis:
    """PyTorch's antialiased taps (aten UpSampleKernel.cpp, `_compute_index_ranges_int16_weights`)."""
    scale = source / target
    support = (2.0 if cubic else 1.0) * max(scale, 1.0)
    inverse = 1.0 / max(scale, 1.0)
    most = math.ceil(support) * 2 + 1
    taps: list[list[tuple[int, float]]] = []
    for at in range(target):
        centre = scale * (at + 0.5)
        first = max(int(centre - support + 0.5), 0)
        count = min(max(min(int(centre + support + 0.5), source) - first, 0), most)
        weights = [_filter((pixel + first - centre + 0.5) * inverse, cubic) for pixel in range(count)]
        total = sum(weights)
        taps.append([(first + n, w / total if total else w) for n, w in enumerate(weights)])
    largest = max(weight for row in taps for _, weight in row)
    shift = 0
    while shift < 22 and int(0.5 + largest * (1 << (shift + 1))) < 1 << 15:
        shift += 1
    rounded = [[(pixel, math.trunc(w * (1 << shift) + math.copysign(0.5, w))) for pixel, w in row] for row in taps]
    return _axis(rounded, np.int32, shift)


def _filter(x: float, cubic: bool) -> float:
    x = abs(x)
    if not cubic:
        return 1.0 - x if x < 1.0 else 0.0
    a = -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * a if x < 2.0 else 0.0


def _axis(taps: Sequence[Sequence[tuple[int, float]]], dtype: Any, shift: int = 0) -> Axis:
    """Rows of unequal length, filled up with weights of zero."""
    most = max(len(row) for row in taps)
    index, weight = np.zeros((len(taps), most), np.int32), np.zeros((len(taps), most), dtype)
    for at, row in enumerate(taps):
        index[at, : len(row)] = [pixel for pixel, _ in row]
        weight[at, : len(row)] = [w for _, w in row]
    return Axis(index, weight, shift)


def resize_step(source: Size, window: tuple[int, int, int, int], target: Size, method: str) -> Step:
    """A resize of a window (top, left, height, width), which may stand out of the frame, "area" (OpenCV's INTER_AREA),
    or PyTorch's "bilinear" or "bicubic"."""
    top, left, *inner = window
    (h, w), (th, tw) = inner, target
    if method != "area":
        kind, y, x = INT16, int16_axis(h, th, method == "bicubic"), int16_axis(w, tw, method == "bicubic")
    elif h >= th and w >= tw and (h, w) != (th, tw):
        # As OpenCV finds out, which misses a few whole factors, such as 49.
        if all(abs(1.0 / (new / old) - round(old / new)) < np.finfo(float).eps for old, new in ((h, th), (w, tw))):
            kind, y, x = MEAN, mean_axis(h, th), mean_axis(w, tw)
        else:
            kind, y, x = AREA, area_axis(h, th), area_axis(w, tw)
    else:
        kind, y, x = FIXED, fixed_axis(h, th, False), fixed_axis(w, tw, True)
    y, x = Axis(y.index + np.int32(top), y.weight, y.shift), Axis(x.index + np.int32(left), x.weight, x.shift)
    return Step(kind, source, target, y, x)


def steps_of(recipe: ImageRecipe, height: int, width: int) -> list[Step]:
    """`model_frame` for frames of (height, width) as resizes, at least one. Raises ValueError: `ImageRecipe.sizes`."""
    boxed, first, cropped, second, last = recipe.sizes(height, width)
    size = (height, width)
    window = (-((boxed[0] - height) // 2), -((boxed[1] - width) // 2), *boxed)
    steps: list[Step] = []

    def resize(target: Size, method: str) -> None:
        nonlocal size, window
        if window[2:] != target:
            steps.append(resize_step(size, window, target, method))
            size, window = target, (0, 0, *target)

    method = "area" if recipe.albumentations else "bilinear"
    resize(first, method)
    down, right = crop_offset(recipe, window[2:], cropped)
    window = (window[0] + down, window[1] + right, *cropped)
    resize(second, method)
    resize(last, "bicubic")
    if window != (0, 0, *size) or not steps:  # a crop alone, or nothing: FIXED by 1 changes no value
        steps.append(resize_step(size, window, last, "area"))
    return steps


# ------------------------------------------------------------------------------------------------------------ kernel


def resize_twin(images: Tensor, step: Step) -> Tensor:
    """One step over (N, H, W, 3) uint8 -> (N, h, w, 3), in PyTorch."""
    device = images.device
    yi, yw, xi, xw = (torch.from_numpy(t).to(device) for a in (step.y, step.x) for t in (a.index, a.weight))
    work = torch.float32 if step.kind == AREA else torch.int32
    total = torch.zeros(images.shape[0], *step.target, 3, dtype=work, device=device)
    (height, width), shift_y, shift_x = step.source, step.y.shift, step.x.shift
    for ty in range(yi.shape[1]):
        y = yi[:, ty]
        lines = images[:, y.clamp(0, height - 1)].to(work) * ((y >= 0) & (y < height))[:, None, None]
        row = torch.zeros_like(total)
        for tx in range(xi.shape[1]):
            x = xi[:, tx]
            pixels = lines[:, :, x.clamp(0, width - 1)] * ((x >= 0) & (x < width))[:, None]
            row = row + pixels * xw[:, tx, None]
        weight = yw[:, ty, None, None]
        if step.kind == FIXED:
            row = (weight * (row >> 4)) >> 16
        elif step.kind == INT16:
            row = ((row + (1 << shift_x >> 1)) >> shift_x).clamp(0, 255) * weight
        else:
            row = row * weight
        total = total + row
    if step.kind == INT16:
        total = (total + (1 << shift_y >> 1)) >> shift_y
    elif step.kind == FIXED or (step.kind == MEAN and yi.shape[1] == xi.shape[1] == 2):
        total = (total + 2) >> 2
    elif step.kind == MEAN:
        total = (total.float() * np.float32(1 / (yi.shape[1] * xi.shape[1]))).round()
    return total.round().clamp(0, 255).to(torch.uint8) if step.kind == AREA else total.clamp(0, 255).to(torch.uint8)


if triton is not None:
    # Nothing is specialised for a value, so a new camera compiles nothing.
    FREE = ["S_AT", "T_AT", "H", "W", "OH", "OW", "TY", "TX", "shift_y", "shift_x", "scale"]

    @triton.jit(do_not_specialize=FREE)
    def _resize(S_AT, T_AT, YI, YW, XI, XW, H, W, OH, OW, TY, TX, shift_y, shift_x, scale,
                KIND: tl.constexpr, WORK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        # S_AT, T_AT: the addresses of the frames and of their images.
        # KIND as above: FIXED 0, AREA 1, MEAN 2, INT16 3; WORK is float32 for AREA, else int32.
        image = tl.program_id(1)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < OH * OW * 3
        channel, x, y = at % 3, at // 3 % OW, at // 3 // OW
        source = tl.load(S_AT + image).to(tl.pointer_type(tl.uint8)) + channel
        target = tl.load(T_AT + image).to(tl.pointer_type(tl.uint8))
        total = tl.zeros([BLOCK], WORK)
        for ty in range(TY):
            yi = tl.load(YI + y * TY + ty, mask=inside, other=-1)
            yw = tl.load(YW + y * TY + ty, mask=inside, other=0)
            row = tl.zeros([BLOCK], WORK)
            for tx in range(TX):
                xi = tl.load(XI + x * TX + tx, mask=inside, other=-1)
                xw = tl.load(XW + x * TX + tx, mask=inside, other=0)
                there = inside & (yi >= 0) & (yi < H) & (xi >= 0) & (xi < W)
                pixel = tl.load(source + (yi * W + xi) * 3, mask=there, other=0)
                row += pixel.to(WORK) * xw
            if KIND == 0:
                row = (yw * (row >> 4)) >> 16
            elif KIND == 3:
                row = (row + ((1 << shift_x) >> 1)) >> shift_x
                row = tl.minimum(tl.maximum(row, 0), 255) * yw
            else:
                row = row * yw
            total += row
        if KIND == 3:
            total = (total + ((1 << shift_y) >> 1)) >> shift_y
        elif KIND == 0:
            total = (total + 2) >> 2
        elif KIND == 1:
            total = ((total + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: rounds, halves to even
        elif (TY == 2) & (TX == 2):
            total = (total + 2) >> 2
        else:
            total = ((total.to(tl.float32) * scale + 12582912.0) - 12582912.0).to(tl.int32)
        total = tl.minimum(tl.maximum(total, 0), 255)
        tl.store(target + at, total.to(tl.uint8), mask=inside)


@dataclass(frozen=True)
class Launch:
    """A step on the device: uint8 values of an image that comes out, and the kernel's arguments after the addresses."""

    values: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Resizer:
    """Turns waves of frames into what the vision tower sees, on one device."""

    def __init__(self, recipe: ImageRecipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.on_host = device.type != "cuda" or triton is None
        self._plan = lru_cache(maxsize=64)(self._tables)  # by camera size, which clients choose
        # A robot alone gets the same memory again at every step.
        self._addresses = lru_cache(maxsize=64)(self._on_device)

    def __call__(
        self, rows: Sequence[Tensor], sizes: Sequence[tuple[Size, ...]], prepared: Sequence[bool], out: Tensor
    ) -> None:
        """Fills the first rows of `out`, uint8 (R, values) on the device: a row's images (h, w, 3) one after the other.

        rows: uint8, a row's frames (H, W, 3) of these sizes one after the other; best on the device already, except
            `on_host`.
        prepared: whether a row's frames went through the recipe before they came, so that Qwen's resize alone is left.
        """
        recipes = [PREPARED if done else self.recipe for done in prepared]
        if self.on_host:
            images = torch.empty(len(rows), out.shape[1], dtype=torch.uint8)
            for row, row_sizes, recipe, place in zip(rows, sizes, recipes, images.numpy(), strict=True):
                at = put = 0
                for height, width in row_sizes:
                    frame = row[at : at + height * width * 3].view(height, width, 3).numpy()
                    image = model_frame(frame, recipe)
                    place[put : put + image.size] = image.reshape(-1)
                    at, put = at + frame.size, put + image.size
            out[: len(rows)].copy_(images)
            return
        rows = [row.to(self.device, non_blocking=True) for row in rows]
        # Addresses of the frames and of their images, by what is done with them.
        groups: dict[tuple[ImageRecipe, Size], tuple[list[int], list[int]]] = {}
        for b, (row, row_sizes, recipe) in enumerate(zip(rows, sizes, recipes, strict=True)):
            at, put = row.data_ptr(), out.data_ptr() + b * out.shape[1]
            for size in row_sizes:
                sources, targets = groups.setdefault((recipe, size), ([], []))
                sources.append(at)
                targets.append(put)
                at, put = at + size[0] * size[1] * 3, put + self._plan(recipe, size)[-1].values
        for key, places in groups.items():
            self._run(*places, self._plan(*key))

    def warm_up(self) -> None:
        """Compiles the kernel in each of its kinds."""
        if self.on_host:
            return
        for size, window, target, method in (
            ((4, 4), (0, 0, 4, 4), (5, 5), "area"), ((5, 5), (0, 0, 5, 5), (4, 4), "area"),
            ((4, 4), (0, 0, 4, 4), (2, 2), "area"), ((4, 4), (0, 0, 4, 4), (5, 5), "bicubic"),
        ):  # fmt: skip
            frame = torch.zeros(size[0] * size[1] * 3, dtype=torch.uint8, device=self.device)
            out = torch.empty(target[0] * target[1] * 3, dtype=torch.uint8, device=self.device)
            launch = self._launch(resize_step(size, window, target, method))
            self._run([frame.data_ptr()], [out.data_ptr()], [launch])

    def _tables(self, recipe: ImageRecipe, size: Size) -> list[Launch]:
        return [self._launch(step) for step in steps_of(recipe, *size)]

    def _launch(self, step: Step) -> Launch:
        tables = (step.y.index, step.y.weight, step.x.index, step.x.weight)
        ty, tx = step.y.index.shape[1], step.x.index.shape[1]
        return Launch(
            values=step.target[0] * step.target[1] * 3,
            arguments=(
                *(torch.from_numpy(table).to(self.device) for table in tables),
                *step.source, *step.target, ty, tx, step.y.shift, step.x.shift, float(np.float32(1 / (ty * tx))),
            ),
            options={
                "KIND": step.kind, "WORK": tl.float32 if step.kind == AREA else tl.int32, "BLOCK": BLOCK,
                "num_warps": 4, "enable_fp_fusion": False,  # OpenCV rounds products and sums one by one
            },
        )  # fmt: skip

    def _run(self, sources: list[int], targets: list[int], launches: list[Launch]) -> None:
        """The steps of one camera size, over the addresses of frames and of their images."""
        count = len(sources)
        # Frames between two steps stand one after the other.
        between = [torch.empty(count, one.values, dtype=torch.uint8, device=self.device) for one in launches[:-1]]
        rows = [frame.data_ptr() for frames in between for frame in frames]
        tables = self._addresses((*sources, *rows, *targets), count)
        for launch, source, target in zip(launches, tables, tables[1:], strict=False):
            grid = (-(-launch.values // BLOCK), count)
            _resize[grid](source, target, *launch.arguments, **launch.options)

    def _on_device(self, addresses: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        """Addresses as int64 tensors of `count` on the device."""
        return torch.tensor(addresses).to(self.device, non_blocking=True).split(count)
