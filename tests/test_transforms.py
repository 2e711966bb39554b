"""Camera frames to patches: reference figures, and plain implementations of what the training code does."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from handler.gr00t.model import VisionConfig, cut_patches
from handler.transforms import MAX_PIXELS, PREPARED, ImageRecipe, image_grid, interpolate, model_frame, qwen_size

VISION = VisionConfig()
# height, width, seed, shortest edge, crop, letterbox, shape, sha256: what the training code made of these images.
REFERENCE: list[tuple[int, int, int, int, float, bool, tuple[int, int, int], str]] = [
    (480, 640, 0, 256, 0.95, False, (256, 340, 3), "c17e47af68a812aa79db3bb7b64b549ddf10148ac1b204a9686095018561ae9e"),
    (180, 320, 0, 256, 0.95, False, (256, 455, 3), "81d5dacf78f32389e7b83aeaee9207362eb5524da13240381a7df699b6311c03"),
    (256, 256, 0, 256, 0.95, False, (256, 256, 3), "b1334b1ff038f5ef569f9faaf1e1406468d3c67792d351153a8b15e7d5002c67"),
    (720, 1280, 0, 256, 0.95, True, (256, 256, 3), "4615484c9076732ffa38a85e85d1fc0ae90b6653f68a29f712c6528c7607f08b"),
    (100, 90, 0, 256, 0.95, False, (283, 256, 3), "0f20d4db8b3e9237be51c9a6f3d5a33e893d49c2224694d63dc0a192878eb552"),
    (333, 777, 0, 224, 0.9, False, (224, 524, 3), "c137c6aa4c25ad38a49775768eda2dc75763dd14b903ec2c230bdeb434b0e5c8"),
]


def picture(height: int, width: int, s: int = 0) -> NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    channels = (x * (1 + s) + 3 * y, 2 * x + y * (1 + s), x + 5 * y + s)
    return np.stack([channel % 256 for channel in channels], axis=-1).astype(np.uint8)


def albumentations(edge: int | None = 256, crop: float = 0.95, **more: Any) -> ImageRecipe:
    settings = {"use_albumentations": True, "shortest_image_edge": edge, "crop_fraction": crop, **more}
    return ImageRecipe.from_json(settings)


def torchvision(target: tuple[int, int], crop: tuple[int, int], **more: Any) -> ImageRecipe:
    return ImageRecipe.from_json({"image_target_size": list(target), "image_crop_size": list(crop), **more})


@pytest.mark.parametrize(("height", "width", "seed", "edge", "crop", "letter_box", "shape", "sha256"), REFERENCE)
def test_reference(
    height: int, width: int, seed: int, edge: int, crop: float, letter_box: bool, shape: tuple[int, ...], sha256: str
) -> None:
    recipe = albumentations(edge, crop, letter_box_transform=letter_box)
    frame = picture(height, width, seed)
    before = frame.copy()
    got = recipe(frame)
    assert (got.shape, got.dtype) == (shape, np.uint8)
    assert hashlib.sha256(got.tobytes()).hexdigest() == sha256
    np.testing.assert_array_equal(frame, before)
    grid = image_grid((height, width), recipe, VISION)
    assert grid == tuple(n // 16 for n in qwen_size(*shape[:2]))
    assert model_frame(frame, recipe).shape == (grid[0] * 16, grid[1] * 16, 3)


RECIPES = [
    albumentations(), albumentations(letter_box_transform=True),
    albumentations(None, 0.9, image_target_size=[200, 320]),
    torchvision((256, 256), (230, 230)), torchvision((120, 200), (300, 100)),
    torchvision((256, 320), (256, 320), letter_box_transform=True),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [(1, 1), (37, 53), (256, 256), (480, 640), (50, 900), (601, 7)])
def test_grid_is_known_without_a_pixel(recipe: ImageRecipe, size: tuple[int, int]) -> None:
    boxed, first, cropped, second, last = recipe.sizes(*size)
    assert recipe(picture(*size)).shape == (*second, 3)
    assert image_grid(size, recipe, VISION) == (last[0] // 16, last[1] // 16)
    assert model_frame(picture(*size), recipe).shape == (*last, 3)
    if recipe.letter_box:
        assert boxed == (max(size),) * 2
    if not recipe.albumentations:
        assert (first, cropped, second) == (recipe.target, recipe.crop, recipe.target)


@pytest.mark.parametrize("recipe", [*RECIPES, albumentations(8, 0.9), albumentations(100, 0.3), albumentations(20, 1)])
def test_the_sizes_that_a_recipe_makes(recipe: ImageRecipe) -> None:
    """Exactly those of the second resize of any frame."""
    edge = recipe.edge or 9
    frames = [size for n in range(edge, 12 * edge) for size in ((edge, n), (n, edge))]
    made = {recipe.sizes(*size)[3] for size in frames}
    assert all(recipe.makes(*size) for size in made)
    near = range(max(1, edge - 3), edge + 20)
    for size in {*frames, *((h, w) for h in near for w in near), (1, edge), (edge, 1)}:
        if max(size) < 10 * edge:  # longer ones may come out of longer frames
            assert recipe.makes(*size) == (size in made), size


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [(1, 1), (37, 53), (256, 256), (480, 640), (50, 900), (601, 7)])
def test_a_frame_that_went_through_the_recipe_needs_qwens_resize_alone(
    recipe: ImageRecipe, size: tuple[int, int]
) -> None:
    frame = picture(*size)
    sent = recipe(frame)
    assert recipe.makes(*sent.shape[:2])
    assert image_grid(sent.shape[:2], PREPARED, VISION) == image_grid(size, recipe, VISION)
    np.testing.assert_array_equal(model_frame(sent, PREPARED), model_frame(frame, recipe))


def test_patch_order() -> None:
    """Merge block by merge block; within a block row by row; each patch channels first, twice for the still frame."""
    frame = np.random.default_rng(0).integers(0, 256, (256, 352, 3), np.uint8)  # nothing to resize or crop
    want = []
    for block_row in range(8):
        for block_column in range(11):
            for row in (0, 1):
                for column in (0, 1):
                    top, left = 16 * (2 * block_row + row), 16 * (2 * block_column + column)
                    patch = frame[top : top + 16, left : left + 16].transpose(2, 0, 1)
                    want.append((patch[:, None].repeat(2, axis=1).astype(np.float32) - 127.5) / 127.5)
    got = cut_patches(torch.from_numpy(frame)[None], VISION, torch.float32)
    np.testing.assert_array_equal(got[0].numpy(), np.stack(want).reshape(352, -1))


# ------------------------------------------------------------------------------------------------- torchvision's recipe


def weights(source: int, target: int) -> NDArray[np.float64]:
    """(target, source) weights of an antialiased linear resize: a triangle, as wide as the reduction."""
    scale = source / target
    reach = max(scale, 1.0)
    out = np.zeros((target, source))
    for i in range(target):
        centre = (i + 0.5) * scale
        for j in range(source):
            out[i, j] = max(0.0, 1 - abs(j + 0.5 - centre) / reach)
        out[i] /= out[i].sum()
    return out


def resize(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    # Each pass ends in 8 bits, halves rounded up.
    wide = np.floor(np.einsum("lk,jkc->jlc", weights(frame.shape[1], size[1]), frame) + 0.5)
    return np.floor(np.einsum("ij,jlc->ilc", weights(frame.shape[0], size[0]), wide) + 0.5).astype(np.uint8)


def centre_crop(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixel by pixel; what lies outside is black. The offset is half of what is left over, halves to even, but of
    what is missing half is added before, rounded down."""
    out = np.zeros((*size, 3), np.uint8)
    offset = []
    for have, want in zip(frame.shape, size, strict=False):
        offset.append(round((have - want) / 2) if have >= want else -((want - have) // 2))
    for y in range(size[0]):
        for x in range(size[1]):
            v, u = y + offset[0], x + offset[1]
            if 0 <= v < frame.shape[0] and 0 <= u < frame.shape[1]:
                out[y, x] = frame[v, u]
    return out


@pytest.mark.parametrize(
    ("size", "target", "crop"),
    [
        ((48, 64), (32, 32), (28, 28)), ((48, 64), (32, 40), (30, 37)), ((20, 30), (32, 40), (29, 35)),
        ((48, 64), (32, 32), (40, 44)), ((48, 64), (31, 32), (40, 41)), ((48, 64), (32, 40), (24, 52)),
        ((32, 40), (32, 40), (27, 45)), ((90, 31), (33, 33), (33, 33)),
    ],
)  # fmt: skip
def test_torchvision_recipe(size: tuple[int, int], target: tuple[int, int], crop: tuple[int, int]) -> None:
    frame = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    want = resize(centre_crop(resize(frame, target), crop), target)
    got = torchvision(target, crop)(frame)
    assert got.shape == (*target, 3) and got.dtype == np.uint8 and got.flags.c_contiguous
    difference = np.abs(got.astype(int) - want)
    assert difference.max() <= 2 and difference.mean() < 0.1  # its weights have 16 bits


@pytest.mark.parametrize("crop", [(27, 31), (28, 30), (25, 38), (41, 44), (42, 43), (24, 52), (32, 40), (1, 1)])
def test_torchvision_crop_takes_these_pixels(crop: tuple[int, int]) -> None:
    frame = picture(32, 40, 3)
    np.testing.assert_array_equal(torchvision((32, 40), crop)._crop(frame, crop), centre_crop(frame, crop))


@pytest.mark.parametrize("recipe", [albumentations(8, 1.0, letter_box_transform=True),
                                    torchvision((8, 8), (8, 8), letter_box_transform=True)])
def test_letter_box(recipe: ImageRecipe) -> None:
    frame = np.full((3, 8, 3), 200, np.uint8)
    want = np.zeros((8, 8, 3), np.uint8)
    want[2:5] = 200
    np.testing.assert_array_equal(recipe(frame), want)
    np.testing.assert_array_equal(recipe(frame.transpose(1, 0, 2)), want.transpose(1, 0, 2))


def test_letter_box_is_bounded() -> None:
    """The square around a thin frame may be thousands of times its size: 48 TB for 4 million pixels here."""
    recipe = albumentations(letter_box_transform=True)
    with pytest.raises(ValueError, match="side"):
        recipe.sizes(1, 4_000_000)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolate(mode: str) -> None:
    flat = np.full((40, 30, 3), 77, np.uint8)
    np.testing.assert_array_equal(interpolate(flat, (64, 96), mode), np.full((64, 96, 3), 77, np.uint8))
    frame = picture(40, 30)
    assert interpolate(frame, (40, 30), mode) is frame
    if mode == "bilinear":
        difference = np.abs(interpolate(frame, (20, 50), mode).astype(int) - resize(frame, (20, 50)))
        assert difference.max() <= 1


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((256, 340), (256, 352)),  # 340 / 32 = 10.6
        ((256, 256), (256, 256)),  # the smallest area allowed
        ((256, 240), (256, 256)),  # 7.5 rounds to even: 8
        ((272, 256), (256, 256)),  # 8.5 rounds to even: 8
        ((100, 100), (256, 256)),  # 96 * 96 is too small: times 2.56
        ((16, 1600), (32, 2560)),  # 0.5 rounds to 0: too small: times 1.6, and up
        ((224, 256), (256, 288)),  # times 1.069: 239.5 and 273.7, and up
        ((1, 200), (32, 3648)),  # times 18.1: 3620.4
        ((32, 6400), (32, 6400)),  # 200 times
        ((4096, 4096), (4096, 4096)),  # the largest area allowed
        ((4112, 4096), (4096, 4096)),  # 128.5 rounds to even: 128
        ((8192, 8192), (4096, 4096)),  # halved
        ((4144, 4096), (4096, 4064)),  # 4160 * 4096 is too large: over 1.00584, 4119.9 and 4072.2, and down
    ],
)
def test_qwen_size(size: tuple[int, int], want: tuple[int, int]) -> None:
    assert qwen_size(*size) == want
    assert qwen_size(*size[::-1]) == want[::-1]
    assert 65536 <= math.prod(want) <= MAX_PIXELS == 16777216


@pytest.mark.parametrize("size", [(1, 201), (6401, 32), (100000, 2)])
def test_one_side_more_than_200_times_the_other(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="200"):
        qwen_size(*size)
    for recipe in (albumentations(), torchvision((256, 256), (230, 230))):  # also one that makes it square
        for refused in (size, size[::-1], (size[0] * 2, size[1] * 2)):
            with pytest.raises(ValueError, match="200"):
                image_grid(refused, recipe, VISION)
    assert image_grid((200, 1), torchvision((256, 256), (230, 230)), VISION) == (16, 16)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("kwargs", "want"),
    [
        ({"use_albumentations": True}, (256, 0.95, None)),
        ({"use_albumentations": True, "shortest_image_edge": 224, "crop_fraction": 1}, (224, 1.0, None)),
        ({"use_albumentations": True, "shortest_image_edge": None, "image_target_size": [224, 320]},
         (None, 0.95, (224, 320))),
        ({"use_albumentations": True, "crop_fraction": None, "image_target_size": [256, 256],
          "image_crop_size": [230, 230]}, (256, 230 / 256, (256, 256))),
        ({"image_target_size": [256, 320], "image_crop_size": [230, 300], "shortest_image_edge": 128},
         (None, 0.95, (256, 320))),
    ],
)
def test_from_json(kwargs: dict[str, Any], want: tuple[Any, ...]) -> None:
    recipe = ImageRecipe.from_json(kwargs)
    assert (recipe.edge, recipe.crop_fraction, recipe.target) == want
    assert recipe.letter_box is False and recipe.albumentations is kwargs.get("use_albumentations", False)


@pytest.mark.parametrize(
    ("kwargs", "fragment"),
    [
        ({}, "image_target_size"),
        ({"image_target_size": [256, 256]}, "image_crop_size"),
        ({"image_target_size": [256], "image_crop_size": [230, 230]}, "height, width"),
        ({"image_target_size": [256, 256, 3], "image_crop_size": [230, 230]}, "height, width"),
        ({"image_target_size": [0, 256], "image_crop_size": [230, 230]}, "image_target_size"),
        ({"image_target_size": [256, 256], "image_crop_size": [-1, 230]}, "image_crop_size"),
        ({"use_albumentations": True, "shortest_image_edge": None}, "image_target_size"),
        ({"use_albumentations": True, "shortest_image_edge": None, "image_target_size": [256]}, "image_target_size"),
        ({"use_albumentations": True, "shortest_image_edge": 0}, "shortest_image_edge"),
        ({"use_albumentations": True, "shortest_image_edge": -256}, "shortest_image_edge"),
        ({"use_albumentations": True, "crop_fraction": None}, "image_crop_size"),
        ({"use_albumentations": True, "crop_fraction": None, "image_target_size": [0, 0], "image_crop_size": [1, 1]},
         "image_target_size"),
        ({"use_albumentations": True, "crop_fraction": 0}, "crop_fraction"),
        ({"use_albumentations": True, "crop_fraction": 1.01}, "crop_fraction"),
        ({"use_albumentations": True, "crop_fraction": math.nan}, "crop_fraction"),
    ],
)  # fmt: skip
def test_settings_that_make_no_recipe(kwargs: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        ImageRecipe.from_json(kwargs)
