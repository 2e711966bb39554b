"""Camera pictures: JPEG or PNG bytes to RGB arrays, with everything that could change a picture's meaning refused."""

from __future__ import annotations

import base64
import io
import re
import warnings

import cv2
import numpy as np
from PIL import Image

from handler.problem import Problem
from handler.wire import quote

MAX_SCANS = 20  # of a JPEG: each goes over the whole picture, and empty ones cost a few bytes. Real files have ~10.
_SCAN, _END = b"\xff\xda", b"\xff\xd9"  # markers of a JPEG
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


def decode_image(data: bytes, where: str, max_pixels: int) -> np.ndarray:
    """A JPEG or PNG as (H, W, 3) uint8 RGB, C-contiguous and writable.

    Grey is replicated to three channels, 1-bit grey as 0 and 255; a palette without transparency gives its colours.
    EXIF orientation and colour profiles are ignored: pixels come as they are stored.

    Raises Problem with pointer `where`: 413 when the header announces more than max_pixels (nothing is decoded then),
    422 for other formats, damaged data, alpha or transparency, CMYK, 16-bit and animated or multi-picture files.
    """
    try:
        # The warnings are about sizes, which are checked here, and about metadata, which is not used.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _decode(data, where, max_pixels)
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise _too_large(where, max_pixels) from None
    except Exception:  # on damaged data Pillow raises nearly any kind: OSError, SyntaxError, struct.error, ...
        if data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
            raise _refused(where, "a damaged or cut JPEG or PNG file. Send the complete file.") from None
        came = f"bytes that start {quote(data, 12)}" if data else "nothing"
        raise _refused(where, f"expected a JPEG or PNG file; came {came}.") from None


def from_base64(text: str, where: str) -> bytes:
    """The bytes of strict base64 (standard alphabet, padded, no line breaks), after an optional data:image/...;base64,

    Raises Problem 422 with pointer `where`.
    """
    prefix = _DATA_URL.match(text)
    try:
        data = base64.b64decode(text[prefix.end() :] if prefix else text, validate=True)
    except ValueError:
        data = b""
    if not data:
        hint = "Use the standard alphabet with padding and no line breaks."
        raise _refused(where, f"expected the base64 text of a JPEG or PNG file; came {quote(text, 20)}. {hint}")
    return data


def _decode(data: bytes, where: str, max_pixels: int) -> np.ndarray:
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
        if image.width * image.height > max_pixels:
            raise _too_large(where, max_pixels, f"{image.width} x {image.height}")
        # MPO is a JPEG file that holds several pictures.
        if image.format == "MPO" or getattr(image, "n_frames", 1) > 1:
            raise _refused(where, "an animated or multi-picture file. Send one picture a file, one file a frame.")
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            raise _refused(where, "a picture with alpha or transparency. Flatten it to RGB first.")
        if image.mode == "CMYK":
            raise _refused(where, "a CMYK picture. Convert it to RGB first.")
        # The mode does not tell: Pillow would cut 16-bit RGB to 8 bits without a word. The tile's raw mode does.
        if image.format == "PNG" and "16" in str(image.tile[0][3]):
            raise _refused(where, "a 16-bit PNG. Scale it to 8 bits a channel first.")
        if image.mode not in ("1", "L", "P", "RGB"):
            raise _refused(where, f"a picture of mode {image.mode}. Convert it to 8-bit RGB first.")
        if image.format == "JPEG" and data.count(_SCAN) > MAX_SCANS:
            raise _refused(where, f"a JPEG of more than {MAX_SCANS} scans. Save it again as a baseline JPEG.")
        if image.format == "PNG":
            return np.array(image.convert("RGB"))
    # OpenCV decodes to the same bits in half the time, and others may run meanwhile; but it takes what is cut short.
    if data.rfind(_END) < data.rfind(_SCAN):
        raise ValueError("no end after the last scan")
    frame = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if frame is None:
        raise ValueError("not decodable")
    return frame


def _refused(where: str, text: str) -> Problem:
    return Problem(422, f"{quote(where)}: {text}", where)


def _too_large(where: str, max_pixels: int, size: str = "far more") -> Problem:
    return Problem(413, f"{quote(where)}: at most {max_pixels} pixels are taken; came {size}. Scale it down.", where)
