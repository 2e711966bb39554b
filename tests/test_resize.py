"""The resizes as tables: every camera size and recipe equals OpenCV's and PyTorch's numbers on the CPU, to the bit."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handler.resize import AREA, FIXED, INT16, MEAN, Resizer, resize_step, resize_twin, steps_of
from handler.transforms import PREPARED, ImageRecipe, Size, model_frame

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU; its twin ran")

RECIPES = {
    "albumentations": ImageRecipe.from_json({"use_albumentations": True}),
    "letterbox": ImageRecipe.from_json({"use_albumentations": True, "letter_box_transform": True}),
    "exact": ImageRecipe.from_json(
        {"use_albumentations": True, "shortest_image_edge": None, "image_target_size": [200, 300]}
    ),
    "whole": ImageRecipe.from_json({"use_albumentations": True, "crop_fraction": 1.0}),
    "torchvision": ImageRecipe.from_json({"image_target_size": [224, 224], "image_crop_size": [230, 201]}),
    "torchvision crop": ImageRecipe.from_json({"image_target_size": [256, 320], "image_crop_size": [225, 300]}),
    "prepared": PREPARED,
}
SIZES = [(256, 256), (180, 320), (480, 640), (512, 512), (768, 1024), (240, 320), (720, 1280), (1080, 1920), (33, 47),
         (257, 300), (1, 1), (2, 90), (1024, 300), (100, 224)]  # fmt: skip


def picture(size: Size, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def by_tables(frame: np.ndarray[Any, Any], recipe: ImageRecipe) -> np.ndarray[Any, Any]:
    image = torch.from_numpy(frame)[None]
    for step in steps_of(recipe, *frame.shape[:2]):
        image = resize_twin(image, step)
    return image[0].numpy()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", SIZES)
def test_tables_equal_the_cpu_path(name: str, size: Size) -> None:
    frame = picture(size)
    np.testing.assert_array_equal(by_tables(frame, RECIPES[name]), model_frame(frame, RECIPES[name]))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(RECIPES)), height=st.integers(1, 700), width=st.integers(1, 700))
def test_any_size(name: str, height: int, width: int) -> None:
    recipe = RECIPES[name]
    try:
        recipe.sizes(height, width)
    except ValueError:
        with pytest.raises(ValueError):
            steps_of(recipe, height, width)
        return
    frame = picture((height, width), height)
    np.testing.assert_array_equal(by_tables(frame, recipe), model_frame(frame, recipe))


@pytest.mark.parametrize("source", [(490, 60), (980, 90), (98, 60), (480, 60), (20, 15), (30, 60)])
def test_whole_factors(source: Size) -> None:
    """OpenCV takes some of them for others: 1 / (1 / 49) is not 49 in floating point."""
    frame, target = picture(source), (10, 30)
    step = resize_step(source, (0, 0, *source), target, "area")
    want = cv2.resize(frame, target[::-1], interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(resize_twin(torch.from_numpy(frame)[None], step)[0].numpy(), want)


def test_extreme_shapes_are_refused_before_any_work() -> None:
    """A tiny file can hold a frame of 1 x 33,554,432."""
    for recipe in RECIPES.values():
        for size in ((1, 33_554_432), (100_000, 300)):
            with pytest.raises(ValueError, match="200 times"):
                steps_of(recipe, *size)
            with pytest.raises(ValueError, match="200 times"):
                recipe.sizes(*size)


def test_every_way_of_rounding_is_met() -> None:
    kinds = {step.kind for recipe in RECIPES.values() for size in SIZES for step in steps_of(recipe, *size)}
    assert kinds == {FIXED, AREA, MEAN, INT16}
    assert len(steps_of(RECIPES["whole"], 256, 256)) == 1  # nothing to do is a step, too


def fill(resizer: Resizer, rows: list[list[Any]], prepared: list[bool], device: str) -> list[np.ndarray[Any, Any]]:
    packed = [torch.from_numpy(np.concatenate([frame.reshape(-1) for frame in row])) for row in rows]
    values = sum(model_frame(frame, resizer.recipe).size for frame in rows[0])  # the first row is not prepared
    out = torch.full((len(rows) + 1, values), 7, dtype=torch.uint8, device=device)
    resizer(packed, [tuple(frame.shape[:2] for frame in row) for row in rows], prepared, out)
    assert (out[-1] == 7).all()  # rows that the wave does not fill stay as they are
    return list(out[:-1].cpu().numpy())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_wave_of_mixed_cameras(name: str, device: str) -> None:
    """Rows of two cameras each; sizes differ between rows and cameras, the images' sizes do not. Every other row went
    through the recipe before it came."""
    recipe = RECIPES[name]
    resizer = Resizer(recipe, torch.device(device))
    groups: dict[tuple[Size, ...], list[Size]] = {}
    for size in SIZES:
        groups.setdefault((recipe.sizes(*size)[-1],), []).append(size)
    for sizes in groups.values():
        rows = [[picture(first, n), picture(sizes[-1 - n], 50 + n)] for n, first in enumerate(sizes)]
        prepared = [n % 2 == 1 for n in range(len(rows))]
        sent = [[recipe(frame) for frame in row] if done else row for row, done in zip(rows, prepared, strict=True)]
        for row, got in zip(rows, fill(resizer, sent, prepared, device), strict=True):
            want = np.concatenate([model_frame(frame, recipe).reshape(-1) for frame in row])
            np.testing.assert_array_equal(got, want)
