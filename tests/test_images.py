"""Camera pictures: exact pixels for what is taken, status and pointer for what is not."""

from __future__ import annotations

import base64
import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from handler.images import MAX_SCANS, decode_image, from_base64
from handler.problem import Problem

RGB = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
WHERE = "/video/front"


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, pixels: bytes, before: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def refused(data: bytes, status: int = 422, max_pixels: int = 1 << 24) -> str:
    with pytest.raises(Problem) as caught:
        decode_image(data, WHERE, max_pixels)
    assert (caught.value.status, caught.value.pointer) == (status, WHERE)
    assert caught.value.detail.isascii()
    return caught.value.detail


def test_png_comes_exactly() -> None:
    out = decode_image(encoded(Image.fromarray(RGB)), WHERE, 24)
    assert out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    np.testing.assert_array_equal(out, RGB)


def test_jpeg_comes_as_the_decoder_gives_it() -> None:
    grid = np.add.outer(np.arange(32), np.arange(48)).astype(np.uint8)
    data = encoded(Image.fromarray(np.stack([grid, grid + 20, grid + 40], -1)), "JPEG", quality=95)
    out = decode_image(data, WHERE, 32 * 48)
    np.testing.assert_array_equal(out, np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey"])
@pytest.mark.parametrize("size", [(1, 1), (17, 33), (123, 211), (256, 256)])
def test_every_kind_of_jpeg_has_pillow_s_bits(size: tuple[int, int], sampling: str, progressive: bool) -> None:
    """Robots and simulators write files with either library, and training read them with either."""
    noise = np.random.default_rng(0).integers(90, 130, (*size, 3), np.uint8)  # Pillow cannot save more as progressive
    image = Image.fromarray(noise).convert("L" if sampling == "grey" else "RGB")
    for quality in (20, 90):
        options = {} if sampling == "grey" else {"subsampling": sampling}
        data = encoded(image, "JPEG", quality=quality, progressive=progressive, **options)
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        out = decode_image(data, WHERE, size[0] * size[1])
        assert out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_grey_is_replicated(form: str) -> None:
    data = encoded(Image.fromarray(RGB[..., 0]), form, **({"quality": 100} if form == "JPEG" else {}))
    out = decode_image(data, WHERE, 24)
    assert out.shape == (4, 6, 3)
    np.testing.assert_array_equal(out, np.repeat(np.asarray(Image.open(io.BytesIO(data)))[..., None], 3, -1))


def test_one_bit_grey_is_black_and_white() -> None:
    bits = np.array([[0, 255, 255], [255, 0, 0]], np.uint8)
    out = decode_image(encoded(Image.fromarray(bits).convert("1")), WHERE, 6)
    np.testing.assert_array_equal(out, np.repeat(bits[..., None], 3, -1))


def test_palette_gives_its_colours() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.putdata([2, 0, 1])
    out = decode_image(encoded(image), WHERE, 3)
    np.testing.assert_array_equal(out, [[[70, 80, 90], [10, 20, 30], [40, 50, 60]]])


def test_exif_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(RGB), "PNG", exif=exif)
    np.testing.assert_array_equal(decode_image(data, WHERE, 24), RGB)
    data = encoded(Image.fromarray(RGB), "JPEG", exif=exif)
    np.testing.assert_array_equal(decode_image(data, WHERE, 24), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_refused(mode: str) -> None:
    assert "alpha" in refused(encoded(Image.new(mode, (2, 2))))


@pytest.mark.parametrize(("mode", "transparency"), [("P", 0), ("L", 7), ("RGB", (1, 2, 3))])
def test_transparent_colours_are_refused(mode: str, transparency: Any) -> None:
    assert "transparency" in refused(encoded(Image.new(mode, (2, 2)), transparency=transparency))


def test_cmyk_is_refused() -> None:
    assert "CMYK" in refused(encoded(Image.new("CMYK", (8, 8)), "JPEG"))


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3)])
def test_sixteen_bit_is_refused(colour: int, channels: int) -> None:
    assert "16-bit" in refused(png(2, 1, 16, colour, bytes(1 + 2 * 2 * channels)))


def test_animated_png_is_refused() -> None:
    frames = [Image.new("RGB", (2, 2), (level, 0, 0)) for level in (0, 99)]
    assert "animated" in refused(encoded(frames[0], save_all=True, append_images=frames[1:]))


def test_multi_picture_jpeg_is_refused() -> None:
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (0, 99)]
    assert "multi-picture" in refused(encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]))


@pytest.mark.parametrize("form", ["GIF", "BMP", "WEBP", "TIFF"])
def test_other_formats_are_refused_naming_the_two(form: str) -> None:
    assert "JPEG or PNG" in refused(encoded(Image.fromarray(RGB), form))
    assert "came nothing" in refused(b"")


def test_size_is_checked_from_the_header_alone() -> None:
    assert "6 x 4" in refused(encoded(Image.fromarray(RGB)), 413, max_pixels=23)
    refused(png(60000, 60000, 8, 2, b""), 413)  # Pillow's own limit
    refused(png(10000, 10000, 8, 2, b""), 413)  # Pillow only warns here


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_truncated_data_is_refused(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), form)
    for length in (4, 20, 60, len(data) // 2, len(data) * 3 // 4):
        refused(data[:length])


def test_a_cut_jpeg_with_a_whole_thumbnail_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    exif = Image.Exif()
    exif[0x927C] = encoded(Image.fromarray(noise[:16, :16]), "JPEG")  # a note of the maker's: a picture with its end
    data = encoded(Image.fromarray(noise), "JPEG", exif=exif)
    assert data.count(b"\xff\xd9") == 2 and decode_image(data, WHERE, 4096).shape == (64, 64, 3)
    for length in (data.index(b"\xff\xd9") + 2, data.rindex(b"\xff\xda"), data.rindex(b"\xff\xda") + 40, len(data) - 2):
        assert "cut" in refused(data[:length])


def test_damaged_png_is_refused() -> None:
    data = bytearray(encoded(Image.fromarray(RGB)))
    data[45] ^= 255
    assert "damaged" in refused(bytes(data))


def test_text_chunk_bombs_are_bounded() -> None:
    bomb = chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1)))
    refused(png(1, 1, 8, 2, bytes(4), bomb))
    one = chunk(b"zTXt", b"key\0\0" + zlib.compress(b"a" * PngImagePlugin.MAX_TEXT_CHUNK))
    refused(png(1, 1, 8, 2, bytes(4), one * (PngImagePlugin.MAX_TEXT_MEMORY // PngImagePlugin.MAX_TEXT_CHUNK + 1)))


def test_jpeg_scan_bombs_are_refused() -> None:
    data = encoded(Image.fromarray(RGB), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    assert "scans" in refused(data[:-2] + data[last:-2] * (MAX_SCANS + 1) + data[-2:])


def test_no_warning_leaks() -> None:
    bad_exif = chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(png(10000, 10000, 8, 2, b""), 413)
        decode_image(png(1, 1, 8, 2, bytes(4), chunk(b"acTL", bytes(8)) + bad_exif), WHERE, 1)


@settings(deadline=None, database=None)
@given(st.binary(max_size=200), st.integers(0, 150), st.sampled_from(["PNG", "JPEG"]))
def test_any_bytes_give_a_picture_or_a_problem(patch: bytes, offset: int, form: str) -> None:
    data = encoded(Image.fromarray(RGB), form)
    for body in (patch, data[:8] + patch, data[:offset] + patch + data[offset + len(patch) :]):
        try:
            out = decode_image(body, WHERE, 1 << 16)
        except Problem as problem:
            assert problem.status in (413, 422) and problem.pointer == WHERE
        else:
            assert out.ndim == 3 and out.shape[2] == 3 and out.dtype == np.uint8


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,", "data:image/JPEG;base64,"])
def test_base64(prefix: str) -> None:
    data = bytes(range(256))
    assert from_base64(prefix + base64.b64encode(data).decode(), WHERE) == data


@pytest.mark.parametrize(
    "text",
    [
        *("", "AAA", "AA=A", "AAAA\n", "AA-_", "AAAA AAAA", "=", "\u00e9" * 4, "\ud800"),
        *("data:text/plain;base64,AAAA", "data:image/png;base64,", "A" * 999),
    ],
)
def test_bad_base64_is_refused(text: str) -> None:
    with pytest.raises(Problem) as caught:
        from_base64(text, WHERE)
    assert (caught.value.status, caught.value.pointer) == (422, WHERE)
    assert caught.value.detail.isascii() and len(caught.value.detail) < 300
