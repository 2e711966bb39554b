"""Camera frames as the checkpoint was trained to see them: resize, crop, resize, then Qwen's own resize.

The recipe keeps the aspect ratio, so an image's patch grid depends on the camera. The result is uint8; cutting it into
patches and scaling to [-1, 1] happens on the model's device (`model.cut_patches`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from handler.gr00t.model import Grid, VisionConfig

Image = NDArray[np.uint8]  # (height, width, 3) RGB
Size = tuple[int, int]  # height, width

cv2.setNumThreads(1)  # frames are small and come many at a time: the caller's threads do better than OpenCV's

# Qwen3-VL's image processor, size {shortest_edge, longest_edge}: bounds on an image's area in pixels.
MIN_PIXELS, MAX_PIXELS = 65536, 16777216


@dataclass(frozen=True)
class ImageRecipe:
    """How frames become what the vision tower was trained on (`processor_config.json`).

    albumentations: cv2 INTER_AREA and a fractional centre crop; otherwise torchvision's bilinear resize and a centre
        crop in pixels.
    edge: shortest edge after a resize, or None for exactly `target` (height, width); without both nothing is resized.
    """

    albumentations: bool
    letter_box: bool
    edge: int | None
    crop_fraction: float
    target: tuple[int, int] | None
    crop: tuple[int, int] | None

    @classmethod
    def from_json(cls, kwargs: dict[str, Any]) -> ImageRecipe:
        """Raises ValueError when the settings do not make a recipe."""
        target, crop = (
            tuple(int(n) for n in kwargs[key]) if kwargs.get(key) is not None else None
            for key in ("image_target_size", "image_crop_size")
        )
        for key, size in (("image_target_size", target), ("image_crop_size", crop)):
            if size is not None and (len(size) != 2 or min(size) < 1):
                raise ValueError(f"{key} is {list(size)}, expected [height, width]")
        albumentations = bool(kwargs.get("use_albumentations", False))
        # Absent and null differ: the training code has defaults for absent keys, and null switches these two off.
        edge, fraction = kwargs.get("shortest_image_edge", 256), kwargs.get("crop_fraction", 0.95)
        if albumentations:
            if edge is not None and edge < 1:
                raise ValueError(f"shortest_image_edge is {edge}, expected a positive number of pixels")
            if edge is None and target is None:
                raise ValueError("image_target_size is needed when shortest_image_edge is null")
            if fraction is None:
                if target is None or crop is None:
                    raise ValueError("image_crop_size and image_target_size are needed when crop_fraction is null")
                fraction = crop[0] / target[0]
            if not 0 < fraction <= 1:
                raise ValueError(f"crop_fraction is {fraction}, expected 0 to 1")
        elif target is None or crop is None:
            raise ValueError("image_target_size and image_crop_size are needed, [height, width] each")
        return cls(
            albumentations=albumentations,
            letter_box=bool(kwargs.get("letter_box_transform", False)),
            edge=edge if albumentations else None,
            crop_fraction=float(fraction or 1.0),
            target=target,  # type: ignore[arg-type]
            crop=crop,  # type: ignore[arg-type]
        )

    @lru_cache(maxsize=256)  # noqa: B019  # cameras send the same shape all day, and a server has one recipe
    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) after the letterbox, the first resize, the crop, the second resize and Qwen's resize.

        Raises:
            ValueError: one side is more than 200 times the other, before or after: Qwen's own bound, and what makes
                the work for a small file large.
        """
        if max(height, width) > 200 * min(height, width):
            raise ValueError("one side is more than 200 times the other")
        boxed = (max(height, width),) * 2 if self.letter_box else (height, width)
        if self.letter_box and boxed[0] ** 2 > max(MAX_PIXELS, 4 * height * width):
            raise ValueError(f"letterboxed, each side has {boxed[0]} pixels, too many")
        first = self._resized(*boxed)
        if self.albumentations:
            cropped = (max(1, int(first[0] * self.crop_fraction)), max(1, int(first[1] * self.crop_fraction)))
        else:
            assert self.crop is not None
            cropped = self.crop
        second = self._resized(*cropped)
        return [boxed, first, cropped, second, qwen_size(*second)]

    def makes(self, height: int, width: int) -> bool:
        """Whether the checkpoint's own steps, before Qwen's, turn frames of some size into (height, width) ones."""
        if self.edge is None:
            return (height, width) == self.target
        short = max(1, int(self.edge * self.crop_fraction))  # of the crop; every long side from there on occurs
        near = int(max(height, width) * short / self.edge)
        longs = (short,) if self.letter_box else (near, near + 1)
        return any((height, width) in (self._resized(short, n), self._resized(n, short)) for n in longs if n >= short)

    def describe(self) -> dict[str, Any]:
        """The settings as plain JSON without nulls, as the contract gives them to clients."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items() if value is not None
        }  # fmt: skip

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.edge is None:
            return self.target or (height, width)
        scale = self.edge / min(height, width)
        return round(height * scale), round(width * scale)

    def __call__(self, frame: Image) -> Image:
        """The checkpoint's own steps, before Qwen's: (H, W, 3) -> (h, w, 3)."""
        boxed, first, cropped, second, _ = self.sizes(*frame.shape[:2])
        if boxed != frame.shape[:2]:
            top, left = (boxed[0] - frame.shape[0]) // 2, (boxed[1] - frame.shape[1]) // 2
            bottom, right = boxed[0] - frame.shape[0] - top, boxed[1] - frame.shape[1] - left
            frame = cv2.copyMakeBorder(frame, top, bottom, left, right, cv2.BORDER_CONSTANT, value=0)  # type: ignore
        frame = self._resize(frame, first)
        frame = self._crop(frame, cropped)
        return self._resize(frame, second)

    def _resize(self, frame: Image, size: tuple[int, int]) -> Image:
        if frame.shape[:2] == size:
            return frame
        if self.albumentations:
            return cv2.resize(frame, size[::-1], interpolation=cv2.INTER_AREA)  # type: ignore[return-value]
        return interpolate(frame, size, "bilinear")

    def _crop(self, frame: Image, size: tuple[int, int]) -> Image:
        (height, width), (h, w) = frame.shape[:2], size
        top, left = crop_offset(self, (height, width), size)
        if self.albumentations:
            return frame[top : top + h, left : left + w]
        # Black where the crop is larger.
        above, before = max(-top, 0), max(-left, 0)
        frame = np.pad(frame, ((above, max(h - height - above, 0)), (before, max(w - width - before, 0)), (0, 0)))
        return np.ascontiguousarray(frame[top + above : top + above + h, left + before : left + before + w])


# What is left of a recipe for frames that the client took through it: nothing. Qwen's own resize is the server's.
PREPARED = ImageRecipe(True, letter_box=False, edge=None, crop_fraction=1.0, target=None, crop=None)


def crop_offset(recipe: ImageRecipe, size: Size, cropped: Size) -> Size:
    """Where the centre crop begins, (top, left); negative where it is larger than the frame."""
    if recipe.albumentations:
        return (size[0] - cropped[0]) // 2, (size[1] - cropped[1]) // 2
    # torchvision's CenterCrop: it pads what is smaller, then rounds the offset, halves to even.
    top, left = (round((max(n - c, 0)) / 2) - max(c - n, 0) // 2 for n, c in zip(size, cropped, strict=True))
    return top, left


def interpolate(frame: Image, size: tuple[int, int], mode: str) -> Image:
    """Antialiased uint8 resize, "bilinear" or "bicubic", as torchvision does it on the CPU."""
    if frame.shape[:2] == size:
        return frame
    # A permuted view is the channels-last layout, which PyTorch resizes without a copy on either side.
    planes = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
    out = F.interpolate(planes, size, mode=mode, antialias=True, align_corners=False)[0]
    return np.ascontiguousarray(out.permute(1, 2, 0).numpy())


def qwen_size(height: int, width: int, factor: int = 32) -> tuple[int, int]:
    """Qwen-VL's `smart_resize`: both sides multiples of `factor`, the area within bounds, the aspect about kept.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > 200:
        raise ValueError("one side is more than 200 times the other")
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > MAX_PIXELS:
        beta = math.sqrt(height * width / MAX_PIXELS)
        return tuple(max(factor, math.floor(n / beta / factor) * factor) for n in (height, width))  # type: ignore
    if h * w < MIN_PIXELS:
        beta = math.sqrt(MIN_PIXELS / (height * width))
        return tuple(math.ceil(n * beta / factor) * factor for n in (height, width))  # type: ignore[return-value]
    return h, w


def image_grid(frame_size: tuple[int, int], recipe: ImageRecipe, vision: VisionConfig) -> Grid:
    """The patch grid that a frame of (height, width) will have, without touching a pixel.

    Raises:
        ValueError: as `ImageRecipe.sizes`.
    """
    height, width = recipe.sizes(*frame_size)[-1]
    return height // vision.patch_size, width // vision.patch_size


def model_frame(frame: Image, recipe: ImageRecipe) -> Image:
    """A camera's frame as the vision tower sees it, before it is cut into patches: (H, W, 3) -> (h, w, 3)."""
    frame = recipe(frame)
    return interpolate(frame, qwen_size(*frame.shape[:2]), "bicubic")
