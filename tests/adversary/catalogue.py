"""Hostile and broken requests as data, each with the exact answer that it must get.

A kind is made from a good LIBERO observation of one row (see `tests.conftest.observation`) that it may change at will.
`KINDS` fail alone, `GOOD` look odd and are good all the same, and the wire's answers to both come from the handler.
`BEFORE` never reach it: TorchServe answers those by itself.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import requests
from PIL import Image

from handler.wire import MAX_KEYS, MAX_LISTS, MAX_VALUES
from scripts.package import ROOT
from tests.client import Body, as_json, as_msgpack, as_multipart, gr00t, lists, openpi, png

Fields = dict[str, Any]
Make = Callable[[Fields], Body]

JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}
FORM = {"Content-Type": "multipart/form-data; boundary=x"}
LANGUAGE = "annotation.human.action.task_description"
HORIZON = 16
# What no client may be told.
SECRETS = ("Traceback", "File \"", ".py", str(ROOT), "/tmp", "gr00t-serve-", "site-packages", "ts.service")


@dataclass(frozen=True)
class Kind:
    """A request that must fail: with this status, this JSON pointer, and a detail that has this fragment in it."""

    name: str
    make: Make
    status: int
    pointer: str | None
    fragment: str


@dataclass(frozen=True)
class Good:
    """A request that looks odd and is good: `means` is the plain observation that it stands for."""

    name: str
    make: Make
    means: Callable[[Fields], Fields]


@dataclass(frozen=True)
class Before:
    """A request that TorchServe answers before the handler: with this status, or never (None)."""

    name: str
    make: Make
    status: int | None


def complaint(kind: Kind, reply: requests.Response) -> str:
    """What is wrong with a kind's reply, or nothing."""
    if reply.headers.get("Content-Type") != "application/problem+json":
        return f"{kind.name}: {reply.status_code} {reply.headers.get('Content-Type')} {reply.text[:300]}"
    document = reply.json()
    came = (reply.status_code, document["status"], document.get("pointer"))
    wrong = came != (kind.status, kind.status, kind.pointer) or kind.fragment not in document["detail"]
    wrong |= not document["title"] or not reply.content.isascii() or not reply.reason.isascii()
    wrong |= len(document["detail"]) > 1000 or any(secret in reply.text for secret in SECRETS)
    expected = kind.status, kind.pointer, kind.fragment
    return f"{kind.name}: expected {expected}, came {reply.text[:700]}" if wrong else ""


# ------------------------------------------------------------------------------------------------------------- makers


def put(value: Any, *path: str) -> Callable[[Fields], Fields]:
    """Puts a value (or what a function makes of the old one) at a path of the observation."""

    def change(fields: Fields) -> Fields:
        inner = fields
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
        return fields

    return change


def drop(*path: str) -> Callable[[Fields], Fields]:
    def change(fields: Fields) -> Fields:
        inner = fields
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return fields

    return change


def same(fields: Fields) -> Fields:
    return fields


def packed(change: Callable[[Fields], Fields], arrays: Any = openpi) -> Make:
    return lambda fields: as_msgpack(change(fields), arrays)


def texted(change: Callable[[Fields], Fields]) -> Make:
    """JSON; the change sees frames as base64 and states as lists."""
    return lambda fields: (JSON, json.dumps(change(lists(fields))).encode())


def raw(headers: dict[str, str], body: bytes) -> Make:
    return lambda fields: (headers, body)


def with_body(encode: Make, change: Callable[[bytes], bytes]) -> Make:
    def make(fields: Fields) -> Body:
        headers, body = encode(fields)
        return headers, change(body)

    return make


def with_headers(encode: Make, **headers: str) -> Make:
    """The request with other headers; underscores stand for hyphens."""

    def make(fields: Fields) -> Body:
        sent, body = encode(fields)
        return {**sent, **{name.replace("_", "-"): value for name, value in headers.items()}}, body

    return make


def typed(content_type: str) -> Make:
    return with_headers(as_json, Content_Type=content_type)


def part(name: str, value: bytes, extra: str = "") -> bytes:
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(fields: Fields, *more: bytes, without: Iterable[str] = ()) -> Body:
    """The observation as a form with the boundary x, and more parts."""
    parts = [(f"video.{key}", png(value[0, 0])) for key, value in fields["video"].items()]
    parts += [(f"state.{key}", json.dumps(value[0].tolist()).encode()) for key, value in fields["state"].items()]
    parts += [("prompt", fields["language"][LANGUAGE][0][0].encode())]
    parts += [("options", json.dumps(fields["options"]).encode())]
    body = b"".join(
        part(name, value, f'; filename="{name}"' if name.startswith("video.") else "")
        for name, value in parts if name not in without
    )  # fmt: skip
    return FORM, body + b"".join(more) + b"--x--\r\n"


def formed(*more: bytes, without: Iterable[str] = ()) -> Make:
    return lambda fields: form(fields, *more, without=without)


def field(value: Any, *path: str) -> Make:
    """msgpack with a raw wrapper or other value in one place."""
    return packed(put(value, *path))


def wrapped(**change: Any) -> dict[bytes, Any]:
    """A float32 array of one row, one step, one value as openpi-client sends it, changed; None leaves a key out."""
    whole = {"__ndarray__": True, "data": b"\0\0\0\0", "dtype": "<f4", "shape": [1, 1, 1], **change}
    return {key.encode(): value for key, value in whole.items() if value is not None}


def npy(header: str, data: bytes = b"\0\0\0\0", version: bytes = b"\1\0") -> dict[str, Any]:
    text = header.encode("latin-1") + b"\n"
    size = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
    return {"__ndarray_class__": True, "as_npy": b"\x93NUMPY" + version + size + text + data}


def header(descr: str, shape: str = "(1, 1, 1)", fortran: bool = False) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"


def twin(key: str | bytes, value: bytes) -> Make:
    """msgpack whose map has one more pair after the observation's own; a key in bytes is msgpack already."""

    def make(fields: Fields) -> Body:
        own = msgpack.packb(openpi(fields))
        return MSGPACK, bytes([own[0] + 1]) + own[1:] + (key if isinstance(key, bytes) else msgpack.packb(key)) + value

    return make


def json_twin(text: str) -> Make:
    return with_body(as_json, lambda body: b"{" + text.encode("utf-8", "surrogatepass") + b", " + body[1:])


def rows(fields: Fields, count: int, **other: int) -> Fields:
    """The observation `count` times along B; `other` keys that many times."""
    for modality in ("video", "state"):
        for key, value in fields[modality].items():
            fields[modality][key] = np.repeat(value, other.get(key, count), 0)
    fields["language"] = {LANGUAGE: [fields["language"][LANGUAGE][0]] * count}
    return fields


# ------------------------------------------------------------------------------------------------------------- images


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_head(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG that announces a size, with a few bytes of data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + data + chunk(b"IEND", b"")


def picture(mode: str, format: str = "PNG", size: tuple[int, int] = (64, 64), **save: Any) -> bytes:
    """A gradient in a mode of Pillow's, the same at every call."""
    width, height = size
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width)).astype(np.uint8)
    if mode == "I;16":
        image = Image.fromarray(ramp.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(np.stack([ramp, ramp.T if ramp.shape[0] == ramp.shape[1] else ramp, 255 - ramp], -1))
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, format, **save)
    return file.getvalue()


def animated() -> bytes:
    frames = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (0, 90, 200)]
    file = io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def multi_picture() -> bytes:
    frames = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (0, 90)]
    file = io.BytesIO()
    frames[0].save(file, "MPO", save_all=True, append_images=frames[1:])
    return file.getvalue()


def rgb16() -> bytes:
    """A true 16-bit RGB PNG of 8 x 8, which Pillow would cut to 8 bits without a word."""
    data = zlib.compress((b"\0" + b"\x12\x34" * 24) * 8)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def transparent_palette() -> bytes:
    file = io.BytesIO()
    Image.new("P", (64, 64)).save(file, "PNG", transparency=0)
    return file.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture("RGB", "JPEG", (80, 64), exif=exif.tobytes())


def many_scans() -> bytes:
    """A JPEG with 30 empty scans more than it needs."""
    data = picture("RGB", "JPEG", progressive=True)
    return data[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" * 30 + data[-2:]


def text_bomb() -> bytes:
    """A PNG whose text chunk unpacks to 100 MB."""
    return png_head(64, 64, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 100_000_000)))


IMAGE = ("video", "image")
AT_IMAGE = "/video/image"


def image(data: Any) -> Make:
    """msgpack with one camera as an encoded file; made when it is sent, since some take a while to make."""
    return lambda fields: as_msgpack(put([[data() if callable(data) else data]], *IMAGE)(fields))


def base64_image(text: Any) -> Make:
    return texted(put(text, *IMAGE))


def pixels(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))[None, None]


def good_image(name: str, data: bytes, frames: np.ndarray | None = None) -> Good:
    return Good(f"image {name}", image(data), put(pixels(data) if frames is None else frames, *IMAGE))


# -------------------------------------------------------------------------------------------------------- the broken

X, AT_X = ("state", "x"), "/state/x"
TAG, AT_TAG = ("options", "embodiment_tag"), "/options/embodiment_tag"
F32 = np.ones((1, 1, 1), np.float32)
DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]

BODIES = [
    Kind("json empty", raw(JSON, b""), 400, None, "an empty body"),
    Kind("msgpack empty", raw(MSGPACK, b""), 400, None, "an empty body"),
    Kind("form empty", raw(FORM, b"--x--\r\n"), 400, None, "an empty form"),
    Kind("json cut", with_body(as_json, lambda b: b[: len(b) // 2]), 400, None, "not JSON: Unterminated string"),
    Kind("json cut by one byte", with_body(as_json, lambda b: b[:-1]), 400, None, "not JSON"),
    Kind("msgpack cut", with_body(as_msgpack, lambda b: b[: len(b) // 2]), 400, None, "Not msgpack, or cut short."),
    Kind("msgpack cut by one byte", with_body(as_msgpack, lambda b: b[:-1]), 400, None, "cut short"),
    Kind("gr00t msgpack cut", with_body(packed(same, gr00t), lambda b: b[:-9]), 400, None, "cut short"),
    Kind("json twice", with_body(as_json, lambda b: b + b), 400, None, "Extra data at line 1"),
    Kind("json and NUL", with_body(as_json, lambda b: b + b"\0"), 400, None, "Extra data"),
    Kind("msgpack twice", with_body(as_msgpack, lambda b: b + b), 400, None, "Bytes follow the msgpack message"),
    Kind("msgpack and one byte", with_body(as_msgpack, lambda b: b + b"\xc0"), 400, None, "Bytes follow"),
    Kind("json list", raw(JSON, b"[1, 2]"), 400, None, "came a list"),
    Kind("json NaN alone", raw(JSON, b"NaN"), 400, None, "came a number"),
    Kind("json text", raw(JSON, b'"video"'), 400, None, "came text"),
    Kind("msgpack nil", raw(MSGPACK, b"\xc0"), 400, None, "came null"),
    Kind("msgpack array alone", raw(MSGPACK, msgpack.packb(openpi(F32))), 400, None, "came an array"),
    Kind("json empty mapping", raw(JSON, b"{}"), 422, "/options/embodiment_tag", "options.embodiment_tag is missing"),
    Kind("json latin-1", raw(JSON, b'{"prompt": "caf\xe9"}'), 400, None, "JSON must be UTF-8; byte 15 is not."),
    Kind("json utf-16", raw(JSON, '{"prompt": "a"}'.encode("utf-16")), 400, None, "byte 0 is not"),
    Kind("json utf-8 BOM", with_body(as_json, lambda b: b"\xef\xbb\xbf" + b), 400, None, "not JSON"),
    Kind("json single quotes", raw(JSON, b"{'prompt': 'a'}"), 400, None, "property name"),
    Kind("msgpack as json", lambda f: (JSON, as_msgpack(f)[1]), 400, None, "JSON must be UTF-8"),
    Kind("json as msgpack", lambda f: (MSGPACK, as_json(f)[1]), 400, None, "Bytes follow"),
    Kind("pickle as msgpack", raw(MSGPACK, pickle.dumps({"video": 1})), 400, None, "Bytes follow"),
    Kind("msgpack text not utf-8", raw(MSGPACK, b"\x81\xa6prompt\xa2\xff\xfe"), 400, None, "text that is not UTF-8"),
    Kind("msgpack list of 4 billion", raw(MSGPACK, b"\xdd\xff\xff\xff\xff"), 413, None, "more than 65536 items"),
    Kind("msgpack map of 4 billion", raw(MSGPACK, b"\xdf\xff\xff\xff\xff"), 413, None, "more than 65536 items"),
    Kind("msgpack 4 GB announced", raw(MSGPACK, b"\x81\xa1a\xc6\xff\xff\xff\xff"), 400, None, "cut short"),
    Kind("msgpack reserved byte", raw(MSGPACK, b"\xc1"), 400, None, "Not msgpack"),
    Kind("msgpack ext", field(msgpack.ExtType(5, b"a"), *X), 400, AT_X, "extension types"),
    Kind("msgpack timestamp", field(msgpack.Timestamp(1), "options", "timestamp"), 400, "/options/timestamp",
         "extension types and timestamps are not taken"),
    Kind("json half a million lists", raw(JSON, b'{"state": ' + b"[" * (MAX_LISTS + 1)), 413, None,
         f"{MAX_LISTS} lists"),
    Kind("json million values", raw(JSON, b'{"state": [%s1]}' % (b"0," * MAX_VALUES)), 413, None,
         f"{MAX_VALUES} values"),
    Kind("json 5000 keys", texted(lambda f: f | {f"k{i}": 1 for i in range(5000)}), 413, None, f"{MAX_KEYS} keys"),
    Kind("msgpack 5000 keys", packed(lambda f: f | {f"k{i}": 1 for i in range(5000)}), 413, None, f"{MAX_KEYS} keys"),
    Kind("msgpack million values", raw(MSGPACK, b"\x81\xa1a\xdc\x00\x20" + (b"\xdd\0\0\xff\xff" + b"\0" * 65535) * 32),
         413, None, f"{MAX_VALUES} values"),
]

NESTING = [
    Kind("json 41 deep", texted(put(DEEP, *X)), 400, AT_X + "/0" * 31, "nested deeper than 32 levels"),
    Kind("json 100000 deep", raw(JSON, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400, None,
         "deeper than 32"),
    Kind("json 100000 maps deep", raw(JSON, b'{"a":' * 100_000), 400, None, "deeper than 32"),
    Kind("msgpack 41 deep", field(DEEP, *X), 400, AT_X + "/0" * 31, "nested deeper than 32 levels"),
    Kind("msgpack 100000 deep", raw(MSGPACK, b"\x91" * 100_000 + b"\xc0"), 400, None, "deeper than 32"),
    Kind("form state 100000 deep", formed(part("state.x", b"[" * 100_000), without=["state.x"]), 400, "/state.x",
         "deeper than 32"),
    Kind("wrapper in a wrapper", field(wrapped(data=wrapped()), *X), 422, AT_X, "expected an array as"),
]

KEYS = [
    Kind("json duplicate", json_twin('"state": {}'), 400, None, "The key 'state' came twice"),
    Kind("json duplicate by escape", json_twin('"st\\u0061te": {}'), 400, None, "The key 'state' came twice"),
    Kind("msgpack duplicate", twin("state", b"\x80"), 400, None, "The key 'state' came twice"),
    Kind("msgpack bytes and text", twin(b"\xc4\x05state", b"\x80"), 400, None, "The key 'state' came twice"),
    Kind("msgpack duplicate in a wrapper", raw(MSGPACK, b"\x81\xa1a\x82\xa4data\x01\xc4\x04data\x02"), 400, None,
         "The key 'data' came twice"),
    Kind("msgpack key not utf-8", twin(b"\xc4\x02\xff\xfe", b"\x80"), 400, None,
         r"Keys must be UTF-8 text; came the key b'\xff\xfe'"),
    Kind("msgpack integer key", twin(b"\x07", b"\x80"), 400, None, "came a number as a key"),
    Kind("msgpack nil key", twin(b"\xc0", b"\x80"), 400, None, "came null as a key"),
    Kind("msgpack list key", twin(b"\x91\x01", b"\x80"), 400, None, "came a list as a key"),
    Kind("json half a surrogate pair", json_twin(r'"\ud800": 1'), 400, None, r"came the key '\ud800'"),
    Kind("key of 300", json_twin('"%s": 1' % ("k" * 300)), 400, None, "A key of 300 characters; at most 256"),
    Kind("key of 1 MB", json_twin('"%s": 1' % ("k" * 1_000_000)), 400, None, "A key of 1000000 characters"),
    Kind("key NUL", json_twin(r'"\u0000": 1'), 422, "/\0", r"unknown field '\x00'"),
    Kind("key with line ends", json_twin(r'"a\r\nX-Injected: 1": 1'), 422, "/a\r\nX-Injected: 1", r"'a\r\nX-Inj"),
    Kind("key empty", json_twin('"": 1'), 422, "/", "unknown field ''"),
    Kind("key not ascii", json_twin('"r\u00f6b\u00f6t\U0001f916": 1'), 422, "/r\u00f6b\u00f6t\U0001f916", r"r\xf6b"),
    Kind("key to be escaped in a pointer", packed(put(1, "state", "a/b~c")), 422, "/state/a~1b~0c",
         "unknown state key"),
    Kind("key body", texted(put("x", "body")), 422, "/body", "unknown field 'body'"),
    Kind("key data", packed(put(b"x", "data")), 422, "/data", "unknown field 'data'"),
    Kind("key describe", packed(put("True", "describe")), 422, "/describe", "unknown field 'describe'"),
    Kind("key like a header", texted(put("a/b", "Content-Type")), 422, "/Content-Type", "unknown field 'Content-Type'"),
    Kind("key requestId", packed(put("1", "requestId")), 422, "/requestId", "unknown field 'requestId'"),
    Kind("key __class__", texted(put("1", "__class__")), 422, "/__class__", "unknown field '__class__'"),
    Kind("key of another case", packed(lambda f: {**f, "Video": f.pop("video")}), 422, "/Video",
         "unknown field 'Video'"),
    Kind("camera of another case", packed(put(1, "video", "Image")), 422, "/video/Image", "did you mean 'image'?"),
    Kind("camera twice by images", packed(lambda f: {**f, "images": f["video"]}), 422, "/images/image", "given twice"),
    Kind("camera twice by a flat key", packed(put(1, "video.image")), 422, "/video.image", "given twice"),
    Kind("state missing", packed(drop(*X)), 422, AT_X, "state 'x' is missing"),
    Kind("camera missing", packed(drop(*IMAGE)), 422, AT_IMAGE, "camera 'image' is missing"),
    Kind("video is a list", texted(put([], "video")), 422, "/video", "video must be a mapping of keys, got a list"),
    Kind("state is null", texted(put(None, "state")), 422, "/state", "got nothing"),
    Kind("another robot's state", packed(put(F32, "state", "eef_9d")), 422, "/state/eef_9d", "unknown state key"),
    Kind("annotation of another robot", packed(put("a", "annotation.language.language_instruction")), 422,
         "/annotation.language.language_instruction", "unknown language key"),
]

PARTS = [
    Kind("part body", formed(part("body", b"x")), 422, "/body", "unknown field 'body'"),
    Kind("part data", formed(part("data", b"x")), 422, "/data", "unknown field 'data'"),
    Kind("part like a header", formed(part("Content-Type", b"application/json")), 422, "/Content-Type",
         "unknown field"),
    Kind("part authorization", formed(part("Authorization", b"x")), 422, "/Authorization", "unknown field"),
    Kind("part describe", formed(part("describe", b"True")), 422, "/describe", "unknown field 'describe'"),
    Kind("part explain", formed(part("explain", b"True")), 422, "/explain", "unknown field 'explain'"),
    Kind("part body with all of json", lambda f: (FORM, part("body", as_json(f)[1]) + b"--x--\r\n"), 422,
         "/options/embodiment_tag", "is missing"),
    Kind("part not ascii", formed(part("r\u00f6bot", b"x")), 422, "/r\u00f6bot", r"unknown field 'r\xf6bot'"),
    Kind("part video", formed(part("video", b"x")), 422, "/video", "video must be a mapping of keys"),
    Kind("part video.", formed(part("video.", b"x")), 422, "/video.", "unknown video key ''"),
    Kind("part of a key of 300", formed(part("k" * 300, b"x")), 400, None, "A key of 300 characters"),
    Kind("part prompt twice", formed(part("prompt", b"x")), 400, "/prompt", "this part came twice"),
    Kind("part options twice", formed(part("options", b"{}")), 400, "/options", "this part came twice"),
    Kind("part state twice", formed(part("state.x", b"1")), 400, "/state.x", "this part came twice"),
    Kind("part video twice", formed(part("video.image", picture("RGB"), '; filename="a"')), 422, "/video.image",
         "so T = 2, expected (B, T, H, W, 3) with T = 1"),

    Kind("part video twice in two sizes",
         formed(part("video.image", picture("RGB", size=(32, 32)), '; filename="a"')), 422, "/video.image",
         "must all have one size"),
    # What follows the last complete part is dropped by TorchServe, so the handler never learns that the form was cut.
    # Where a default embodiment makes `options` optional, a form that is cut there is answered without them.
    Kind("form cut in its prompt", with_body(formed(part("prompt", b"pick up the bowl and leave"), without=["prompt"]),
                                             lambda b: b[:-20]), 422, f"/language/{LANGUAGE}", "is missing"),
    Kind("form cut", with_body(formed(), lambda b: b[: len(b) // 2]), 422, AT_TAG, "is missing"),
    Kind("form cut before its end", with_body(formed(), lambda b: b[:-7]), 422, AT_TAG, "is missing"),
    Kind("form with a preamble", with_body(formed(), lambda b: b"before\r\n" + b), 400, None, "an empty form"),
    Kind("form of another boundary", with_headers(formed(), Content_Type="multipart/form-data; boundary=y"), 400, None,
         "an empty form"),
    Kind("part prompt not utf-8", formed(part("prompt", b"\xff\xfe"), without=["prompt"]), 400, "/prompt",
         "UTF-8 text"),
    Kind("part options not json", formed(part("options", b"{'a'}"), without=["options"]), 400, "/options", "not JSON"),
    Kind("part options a list", formed(part("options", b"[]"), without=["options"]), 422, "/options", "a JSON mapping"),
    Kind("part state a mapping", formed(part("state.x", b"{}"), without=["state.x"]), 422, "/state.x",
         "came a mapping"),
    Kind("part state a text", formed(part("state.x", b'"1"'), without=["state.x"]), 422, "/state.x", "came text"),
    Kind("part state true", formed(part("state.x", b"true"), without=["state.x"]), 422, "/state.x", "came a boolean"),
    Kind("part state a pickle", formed(part("state.x", pickle.dumps([1.0])), without=["state.x"]), 400, "/state.x",
         "JSON must be UTF-8"),
    Kind("part state a pickled npy", formed(part("state.x", npy(header("'|O'"), pickle.dumps([1]))["as_npy"]),
                                            without=["state.x"]), 422, "/state.x", "came '|O'"),
    Kind("part state empty", formed(part("state.x", b""), without=["state.x"]), 400, "/state.x", "not JSON"),
    Kind("part video empty", formed(part("video.image", b""), without=["video.image"]), 422, "/video.image",
         "came nothing"),
    Kind("5000 parts", formed(*(part(f"p{i}", b"") for i in range(5000))), 413, None, f"{MAX_KEYS} keys"),
]

NUMBERS = [
    Kind("NaN", field(F32 * np.nan, *X), 422, AT_X, "value 0 of step 0 of row 0 is nan"),
    Kind("1e30", field(F32 * 1e30, *X), 422, AT_X, "lies too far outside the checkpoint's statistics"),
    Kind("-1e30 in json", texted(put(-1e30, *X)), 422, AT_X, "lies too far outside the checkpoint's statistics"),
    Kind("infinity", field(F32 * np.inf, *X), 422, AT_X, "is inf as float32"),
    Kind("minus infinity", field(F32 * -np.inf, "state", "gripper"), 422, "/state/gripper", "shape is [1, 1, 1]"),
    Kind("NaN of float16", field((F32 * np.nan).astype(np.float16), *X), 422, AT_X, "is nan"),
    Kind("json NaN", texted(put([[[float("nan")]]], *X)), 422, AT_X, "is nan"),
    Kind("json -Infinity", texted(put([[[-float("inf")]]], *X)), 422, AT_X, "is -inf"),
    Kind("json 1e999", with_body(texted(put("@", *X)), lambda b: b.replace(b'"@"', b"1e999")), 422, AT_X, "is inf"),
    Kind("1e39", field(np.full((1, 1, 1), 1e39), *X), 422, AT_X, "is inf as float32"),
    Kind("integer of 100 bits", texted(put(2**100, *X)), 400, AT_X, "an integer of more than 64 bits"),
    Kind("integer of 5000 digits", with_body(texted(put("@", *X)), lambda b: b.replace(b'"@"', b"9" * 5000)), 400, None,
         "an integer of more than 64 bits"),
    Kind("integer not in float32", field(np.full((1, 1, 1), 2**53 + 1), *X), 422, AT_X, "int64 values are too large"),
    Kind("uint64 not in float32", field(np.full((1, 1, 1), 2**64 - 1, np.uint64), *X), 422, AT_X,
         "uint64 values are too"),
    Kind("json integers of 64 bits", texted(put([2**64 - 1], *X)), 422, AT_X, "uint64 values are too large"),
    Kind("bool array", field(np.ones((1, 1, 1), bool), *X), 422, AT_X, "values are bool, expected float32"),
    Kind("json true", texted(put(True, *X)), 422, AT_X, "expected numbers, got a boolean"),
    Kind("json trues", texted(put([[[True]]], *X)), 422, AT_X, "expected numbers, got a boolean"),
    Kind("number as text", texted(put("1.5", *X)), 422, AT_X, "expected numbers, got a text"),
    Kind("numbers as texts", texted(put([[["1.5"]]], *X)), 422, AT_X, "expected numbers, got a text"),
    Kind("bytes", field(b"\0\0\0\0", *X), 422, AT_X, "expected numbers, got bytes"),
    Kind("null", texted(put(None, *X)), 422, AT_X, "expected numbers, got nothing"),
    Kind("mapping", texted(put({"0": 1}, *X)), 422, AT_X, "expected numbers, got a mapping"),
    Kind("npgeneric of text", field({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}, *X), 422, AT_X,
         "one float32; came text"),
    Kind("npgeneric out of range", field({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}, *X), 422, AT_X,
         "one uint8; came a number"),
]

SHAPES = [
    Kind("state without axes", field(np.ones((), np.float32), "state", "gripper"), 422, "/state/gripper",
         "has shape []"),
    Kind("state of 4 axes", field(F32[None], *X), 422, AT_X, "array has shape [1, 1, 1, 1]"),
    Kind("state of two steps", field(np.ones((1, 2, 1), np.float32), *X), 422, AT_X, "so T = 2"),
    Kind("state of three wide", field(np.ones((1, 1, 3), np.float32), *X), 422, AT_X, "shape is [1, 1, 3]"),
    Kind("state ragged", texted(put([[[1.0], [1.0, 2.0]]], *X)), 422, AT_X, "rows differ in length"),
    Kind("state empty list", texted(put([], *X)), 422, AT_X, "shape is [0]"),
    Kind("state no rows", texted(put([[[]]], *X)), 422, AT_X, "shape is [1, 1, 0]"),
    Kind("state zero axis", field(np.zeros((0, 1, 1), np.float32), *X), 422, AT_X, "whole numbers above zero"),
    Kind("state zero axis in gr00t", packed(put(np.zeros((1, 0, 1), np.float32), *X), gr00t), 422, AT_X, "above zero"),
    Kind("state of two rows", packed(lambda f: rows(f, 1, x=2)), 422, "/video/image", "1 rows (B), others have 2"),
    Kind("camera of two rows", packed(lambda f: rows(f, 1, wrist_image=2)), 422, "/video/image", "others have 2"),
    Kind("camera of three rows of two", packed(lambda f: rows(f, 2, wrist_image=1)), 422, "/video/wrist_image",
         "1 rows (B), others have 2"),
    Kind("33 rows", packed(lambda f: rows(put(np.zeros((1, 1, 8, 8, 3), np.uint8), "video", "wrist_image")(
        put(np.zeros((1, 1, 8, 8, 3), np.uint8), *IMAGE)(f)), 33)), 413, None, "33 rows in one request; at most 32"),
    Kind("a million rows of state", field(np.zeros((1_000_000, 1, 1), np.float32), *X), 422, AT_IMAGE, "1000000"),
    Kind("two prompts for one row", packed(put([["a"], ["b"]], "language", LANGUAGE)), 422,
         f"/language/{LANGUAGE}", "the instruction has 2 rows (B), others have 1"),
    Kind("video of two frames", packed(put(lambda v: np.repeat(v, 2, 1), *IMAGE)), 422, AT_IMAGE, "so T = 2"),
    Kind("video grey array", packed(put(lambda v: v[..., 0], *IMAGE)), 422, AT_IMAGE, "64 channels"),
    Kind("video of 4 channels", packed(put(lambda v: np.repeat(v, 2, -1)[..., :4], *IMAGE)), 422, AT_IMAGE,
         "4 channels"),
    Kind("video channels first", packed(put(lambda v: np.moveaxis(v, -1, 2).copy(), *IMAGE)), 422, AT_IMAGE,
         "channels"),
    Kind("video flat", packed(put(lambda v: v.reshape(-1), *IMAGE)), 422, AT_IMAGE, "video has shape"),
    Kind("video of floats", packed(put(lambda v: v.astype(np.float32), *IMAGE)), 422, AT_IMAGE, "video is float32"),
    Kind("video of bools", packed(put(lambda v: v > 9, *IMAGE)), 422, AT_IMAGE, "video is bool"),
    Kind("video of 300", packed(put(lambda v: v.astype(np.int16) + 300, *IMAGE)), 422, AT_IMAGE, "outside 0..255"),
    Kind("video of -1", packed(put(lambda v: v.astype(np.int64) - 1, *IMAGE)), 422, AT_IMAGE, "outside 0..255"),
    Kind("video null", packed(put(None, *IMAGE)), 422, AT_IMAGE, "expected numbers, got nothing"),
    Kind("video a number", packed(put(3, *IMAGE)), 422, AT_IMAGE, "video has shape []"),
    Kind("video zero height", packed(put(np.zeros((1, 1, 0, 9, 3), np.uint8), *IMAGE)), 422, AT_IMAGE, "above zero"),
    Kind("video empty list", texted(put([], *IMAGE)), 422, AT_IMAGE, "video is empty: shape [0]"),
]

DECLARED = [
    Kind("shape too large", field(wrapped(shape=[1, 1, 2]), *X), 422, AT_X, "does not fit the 4 bytes of data"),
    Kind("shape too small", field(wrapped(data=b"\0" * 8), *X), 422, AT_X, "does not fit the 8 bytes of data"),
    Kind("shape of 2^70", field(wrapped(shape=[2**35, 2**35, 1]), *X), 422, AT_X, "does not fit the 4 bytes"),
    Kind("shape that wraps around", field(wrapped(shape=[2**62, 4, 1]), *X), 422, AT_X, "does not fit the 4 bytes"),
    Kind("shape negative", field(wrapped(shape=[-1, 1, 1]), *X), 422, AT_X, "whole numbers above zero"),
    Kind("shape twice negative", field(wrapped(shape=[-1, -1, 1]), *X), 422, AT_X, "whole numbers above zero"),
    Kind("shape of bools", field(wrapped(shape=[True, 1, 1]), *X), 422, AT_X, "whole numbers above zero"),
    Kind("shape of floats", field(wrapped(shape=[1.0, 1, 1]), *X), 422, AT_X, "whole numbers above zero"),
    Kind("shape of texts", field(wrapped(shape=["1", 1, 1]), *X), 422, AT_X, "whole numbers above zero"),
    Kind("shape a number", field(wrapped(shape=1), *X), 422, AT_X, "expected an array as"),
    Kind("shape missing", field(wrapped(shape=None), *X), 422, AT_X, "expected an array as"),
    Kind("shape of 9 axes", field(wrapped(shape=[1] * 9), *X), 422, AT_X, "9 axes; at most 8"),
    Kind("shape of 60000 axes", field(wrapped(shape=[1] * 60_000), *X), 422, AT_X, "60000 axes; at most 8"),
    Kind("data a text", field(wrapped(data="abcd"), *X), 422, AT_X, "expected an array as"),
    Kind("data missing", field(wrapped(data=None), *X), 422, AT_X, "expected an array as"),
    Kind("data a list", field(wrapped(data=[0, 0, 0, 0]), *X), 422, AT_X, "expected an array as"),
    Kind("data empty", field(wrapped(data=b""), *X), 422, AT_X, "does not fit the 0 bytes"),
    Kind("npy missing", field({"__ndarray_class__": True}, *X), 422, AT_X, "as_npy"),
    Kind("npy a text", field({"__ndarray_class__": True, "as_npy": "a"}, *X), 422, AT_X, "bytes of a .npy file"),
    Kind("npy empty", field({"__ndarray_class__": True, "as_npy": b""}, *X), 422, AT_X, "not a .npy file"),
    Kind("npy cut", field(npy(header("'<f4'"), b"\0\0"), *X), 422, AT_X, "does not fit the 2 bytes"),
    Kind("npy too long", field(npy(header("'<f4'"), b"\0" * 9), *X), 422, AT_X, "does not fit the 9 bytes"),
    Kind("npy of version 9", field(npy(header("'<f4'"), version=b"\t\0"), *X), 422, AT_X, "not a .npy file"),
    Kind("npy header announces 4 GB", field({"__ndarray_class__": True,
         "as_npy": b"\x93NUMPY\2\0\xff\xff\xff\xff{"}, *X),
         422, AT_X, "not a .npy file"),
    Kind("npy header of 60 kB", field(npy(header("'<f4'") + " " * 60_000), *X), 422, AT_X, "not a .npy file"),
    Kind("npy header nested", field(npy("[" * 900), *X), 422, AT_X, "not a .npy file"),
    Kind("npy header of code", field(npy("__import__('os').getcwd()"), *X), 422, AT_X, "not a .npy file"),
    Kind("npy shape of 2^70", field(npy(header("'<f4'", "(2**35, 2**35)")), *X), 422, AT_X, "not a .npy file"),
    Kind("npy shape of 10^40", field(npy(header("'<f4'", f"({10**40},)")), *X), 422, AT_X, "does not fit the 4 bytes"),
    Kind("npy shape negative", field(npy(header("'<f4'", "(-1,)")), *X), 422, AT_X, "whole numbers above zero"),
    Kind("npz", field({"__ndarray_class__": True, "as_npy": b"PK\3\4" + b"\0" * 60}, *X), 422, AT_X, "not a .npy file"),
    Kind("pickle as npy", field({"__ndarray_class__": True, "as_npy": pickle.dumps(F32)}, *X), 422, AT_X, "not a .npy"),
    Kind("pickle in npy", field(npy(header("'|O'"), pickle.dumps([1.0])), *X), 422, AT_X, "came '|O'"),
]

DTYPES = [
    Kind(f"dtype {name}", field(wrapped(dtype=dtype), *X), 422, AT_X, fragment)
    for name, dtype, fragment in (
        ("object", "|O", "came '|O'"),
        ("object by name", "object", "came 'object'"),
        ("complex", "<c8", "came '<c8'"),
        ("void", "|V4", "came '|V4'"),
        ("datetime", "<M8[ns]", "came '<M8[ns]'"),
        ("timedelta", "<m8[s]", "came '<m8[s]'"),
        ("text", "<U1", "came '<U1'"),
        ("bytes", "|S4", "came '|S4'"),
        ("long double", "<f16", "came '<f16'"),
        ("record", "f4,i4", "came 'f4,i4'"),
        ("sub-array", "(2,)f2", "came '(2,)f2'"),
        ("record as a list", [["a", "<f4"]], "came a list"),
        ("missing", None, "came null"),
        ("a number", 4, "came a number"),
        ("not ascii", "<f4\u00e9", r"came '<f4\xe9'"),
        ("of 100 kB", "f" * 100_000, "ffff'..."),
        ("with a line end", "<f4\n", r"came '<f4\n'"),
    )
] + [
    Kind("npy complex", packed(put(F32.astype(np.complex64), *X), gr00t), 422, AT_X, "came '<c8'"),
    Kind("npy datetime", packed(put(np.zeros((1, 1, 1), "M8[s]"), *X), gr00t), 422, AT_X, "came '<M8[s]'"),
    Kind("npy record", packed(put(np.zeros((1, 1, 1), "f4,i4"), *X), gr00t), 422, AT_X, "came '|V8'"),
    Kind("npy void", packed(put(np.zeros((1, 1, 1), "V4"), *X), gr00t), 422, AT_X, "came '|V4'"),
    Kind("npy text", packed(put(np.array([[["a"]]]), *X), gr00t), 422, AT_X, "came '<U1'"),
]  # fmt: skip

IMAGES = [
    Kind("image bomb", image(png_head(60_000, 60_000)), 413, AT_IMAGE, "at most 33554432 pixels are taken"),
    Kind("image just over", image(png_head(8192, 4097)), 413, AT_IMAGE, "came 8192 x 4097"),
    Kind("image 2^31 wide", image(png_head(2**31 - 1, 2**31 - 1)), 413, AT_IMAGE, "pixels are taken"),
    Kind("image of no size", image(png_head(0, 0)), 422, AT_IMAGE, "damaged or cut"),
    Kind("image text bomb", image(text_bomb), 422, AT_IMAGE, "damaged or cut"),
    Kind("image of 30 scans", image(many_scans), 422, AT_IMAGE, "a JPEG of more than 20 scans"),
    Kind("image animated", image(animated), 422, AT_IMAGE, "animated or multi-picture"),
    Kind("image multi-picture", image(multi_picture), 422, AT_IMAGE, "animated or multi-picture"),
    Kind("image CMYK", image(picture("CMYK", "JPEG")), 422, AT_IMAGE, "a CMYK picture. Convert it"),
    Kind("image 16-bit grey", image(picture("I;16")), 422, AT_IMAGE, "a 16-bit PNG. Scale it"),
    Kind("image 16-bit RGB", image(rgb16), 422, AT_IMAGE, "a 16-bit PNG. Scale it"),
    Kind("image RGBA", image(picture("RGBA")), 422, AT_IMAGE, "alpha or transparency. Flatten it"),
    Kind("image LA", image(picture("LA")), 422, AT_IMAGE, "alpha or transparency"),
    Kind("image palette with transparency", image(transparent_palette), 422, AT_IMAGE, "alpha or transparency"),
    Kind("image png cut", image(picture("RGB")[:-60]), 422, AT_IMAGE, "a damaged or cut JPEG or PNG file"),
    Kind("image jpeg cut", image(picture("RGB", "JPEG")[:-200]), 422, AT_IMAGE, "a damaged or cut JPEG or PNG file"),
    Kind("image png head only", image(b"\x89PNG\r\n\x1a\n"), 422, AT_IMAGE, "damaged or cut"),
    Kind("image GIF", image(picture("P", "GIF")), 422, AT_IMAGE, "bytes that start b'GIF87a"),
    Kind("image BMP", image(picture("RGB", "BMP")), 422, AT_IMAGE, "expected a JPEG or PNG file; came bytes"),
    Kind("image TIFF", image(picture("RGB", "TIFF")), 422, AT_IMAGE, "expected a JPEG or PNG file; came bytes"),
    Kind("image SVG", image(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), 422, AT_IMAGE, "bytes that start b'<svg"),
    Kind("image of nothing", image(b""), 422, AT_IMAGE, "came nothing"),
    Kind("image pickle", image(pickle.dumps([1])), 422, AT_IMAGE, r"bytes that start b'\x80"),
    Kind("image a path", base64_image("/etc/passwd"), 422, AT_IMAGE, "expected the base64 text"),
    Kind("image a URL", base64_image("http://127.0.0.1/a.png"), 422, AT_IMAGE, "expected the base64 text"),
    Kind("image base64 cut", base64_image("iVBORw0KGgo"), 422, AT_IMAGE, "expected the base64 text"),
    Kind("image base64 with line ends", base64_image("iVBORw0K\nGgo="), 422, AT_IMAGE, r"came 'iVBORw0K\nGgo='"),
    Kind("image base64 not ascii", base64_image("\u00e9\U0001f916"), 422, AT_IMAGE, r"came '\xe9\U0001f916'"),
    Kind("image base64 of text", base64_image(base64.b64encode(b"hello").decode()), 422, AT_IMAGE, "start b'hello'"),
    Kind("image in 4 lists", base64_image([[[["aaaa"]]]]), 422, AT_IMAGE, "B lists of T, got a list"),
    Kind("image and number", base64_image([[base64.b64encode(picture("L")).decode(), 1]]), 422, AT_IMAGE,
         "B lists of T, got a number"),
    Kind("images of two sizes", packed(put([[picture("RGB")], [picture("RGB", size=(32, 64))]], *IMAGE)), 422, AT_IMAGE,
         "must all have one size"),
    Kind("60000 images", packed(put([b""] * 60_000, *IMAGE)), 413, AT_IMAGE, "a list of 60000 images or rows"),
    Kind("image 1 x 2000", image(picture("RGB", size=(2000, 1))), 422, AT_IMAGE, "more than 200 times the other"),
    Kind("image 2000 x 1", image(picture("RGB", size=(1, 2000))), 422, AT_IMAGE, "more than 200 times the other"),
    Kind("image 190 x 1", image(picture("RGB", size=(190, 1))), 413, AT_IMAGE, "send images of another shape"),
    Kind("frames 1 x 2000", packed(put(np.zeros((1, 1, 1, 2000, 3), np.uint8), *IMAGE)), 422, AT_IMAGE, "200 times"),
]

AT_PROMPT = f"/language/{LANGUAGE}"


def prompt(value: Any) -> Make:
    return packed(put(value, "language", LANGUAGE))


PROMPTS = [
    Kind("prompt missing", packed(drop("language")), 422, AT_PROMPT, "is missing"),
    Kind("prompt of 100 kB", prompt([["a" * 100_000]]), 413, AT_PROMPT, "has 100000 characters; at most 4096"),
    Kind("prompt of 100 kB in a form", formed(part("prompt", b"a" * 100_000), without=["prompt"]), 413, "/prompt",
         "has 100000 characters"),
    Kind("prompt of 4097", prompt("a" * 4097), 413, AT_PROMPT, "has 4097 characters; at most 4096"),
    Kind("prompt of too many tokens", prompt("\u4dc0\u1234" * 2048), 413, AT_PROMPT, "tokens ("),
    Kind("prompt a number", prompt(7), 422, AT_PROMPT, "got a number"),
    Kind("prompt bytes", prompt(b"pick"), 422, AT_PROMPT, "got bytes"),
    Kind("prompt null", prompt(None), 422, AT_PROMPT, "got nothing"),
    Kind("prompt a mapping", prompt({"a": "b"}), 422, AT_PROMPT, "got a mapping"),
    Kind("prompt an array", prompt(F32), 422, AT_PROMPT, "got an array of float32"),
    Kind("prompt no rows", prompt([]), 422, AT_PROMPT, "an empty list"),
    Kind("prompt no texts", prompt([[]]), 422, AT_PROMPT, "got a list"),
    Kind("prompt two in a row", prompt([["a", "b"]]), 422, AT_PROMPT, "got a list"),
    Kind("prompt twice", packed(put("a", "prompt")), 422, "/prompt", "given twice"),
    Kind("prompt half a surrogate pair", with_body(texted(put("@", "language", LANGUAGE)),
                                                   lambda b: b.replace(b'"@"', rb'"\ud83e"')), 400, AT_PROMPT,
         "half a surrogate pair"),
]

EMBODIMENTS = [
    Kind(f"embodiment {name}", packed(put(tag, *TAG)), 422, AT_TAG, fragment)
    for name, tag, fragment in (
        ("unknown", "pr2", "unknown embodiment 'pr2'; this server has libero_sim"),
        ("of another case", "LIBERO_SIM", "(did you mean 'libero_sim'?)"),
        ("with a space", "libero_sim ", "did you mean"),
        ("with a line end", "libero_sim\r\nX: 1", r"'libero_sim\r\nX: 1'"),
        ("empty", "", "unknown embodiment ''"),
        ("null", None, "options.embodiment_tag is missing"),
        ("a number", 2, "unknown embodiment 2"),
        ("a boolean", True, "unknown embodiment True"),
        ("NaN", float("nan"), "unknown embodiment nan"),
        ("bytes", b"libero_sim", "unknown embodiment bytes"),
        ("a list", ["libero_sim"], "unknown embodiment a list"),
        ("a mapping", {"a": 1}, "unknown embodiment a mapping"),
        ("an array", F32, "unknown embodiment an array of float32"),
        ("not ascii", "l\u00edbero_sim\U0001f916", r"unknown embodiment 'l\xedbero_sim\U0001f916'"),
        ("right to left", "\u202emis_orebil", r"'\u202emis_orebil'"),
        ("of 100 kB", "libero_sim" * 10_000, "libero_sim'..."),
        ("a path", "../../etc/passwd", "unknown embodiment '../../etc/passwd'"),
    )
] + [
    Kind("embodiment of another robot", packed(put("oxe_droid_relative_eef_relative_joint", *TAG)), 422, AT_IMAGE,
         "unknown video key 'image'"),
    Kind("options a list", packed(put([1], "options")), 422, "/options", "options must be a mapping, got a list"),
    Kind("options a text", texted(put("seed", "options")), 422, "/options", "got a text"),
    Kind("options missing", packed(drop("options")), 422, AT_TAG, "is missing; this server has libero_sim"),
    Kind("option unknown", packed(put(1, "options", "Seed")), 422, "/options/Seed", "did you mean 'seed'?"),
    Kind("option not ascii", packed(put(1, "options", "s\u00e9\u00e9d")), 422,
         "/options/s\u00e9\u00e9d", r"'s\xe9\xe9d'"),
    Kind("timestamp NaN", packed(put(float("nan"), "options", "timestamp")), 422, "/options/timestamp",
         "finite number"),
    Kind("timestamp of 1 kB", packed(put("a" * 1000, "options", "timestamp")), 422, "/options/timestamp",
         "64 characters"),
    Kind("timestamp a list", packed(put([1], "options", "timestamp")), 422, "/options/timestamp", "finite number"),
    Kind("timestamp true", packed(put(True, "options", "timestamp")), 422, "/options/timestamp", "finite number"),
    *(
        Kind(f"deadline {name}", packed(put(value, "options", "deadline_ms")), 422, "/options/deadline_ms",
             "must be a Unix time in milliseconds")
        for name, value in (("a duration", 200), ("in seconds", 1.7e9), ("NaN", float("nan")), ("a text", "now"),
                            ("true", True), ("an array", np.arange(2)), ("far away", 1e15))
    ),
    Kind("deadline over", packed(put(1.6e12, "options", "deadline_ms")), 504, None, "after its deadline"),
    Kind("deadline over by headers", with_headers(as_msgpack, X_Request_Start="t=1600000000.250",
                                                  X_Request_Timeout_Ms="100"), 504, None, "after its deadline"),
    Kind("timeout without a start", with_headers(as_json, X_Request_Timeout_Ms="100"), 400, None, "came none"),
    *(
        Kind(f"timeout {value!r}", with_headers(as_multipart, X_Request_Start="t=1600000000",
                                                X_Request_Timeout_Ms=value), 400, None, "must be whole milliseconds")
        for value in ("1e3", "-1", "0x10", "99999999", "soon")
    ),
    *(
        Kind(f"start {value!r}", with_headers(as_msgpack, X_Request_Timeout_Ms="100", X_Request_Start=value), 400, None,
             "must be a Unix time such as")
        for value in ("now", "t=16", "1600000000.2.5", "t=-1600000000")
    ),
]  # fmt: skip

SEEDS = [
    Kind(f"seed {name}", packed(put(seed, "options", "seed")), 422, "/options/seed", fragment)
    for name, seed, fragment in (
        ("negative", -1, "must be a whole number from 0 to 9223372036854775807, got -1"),
        ("of 64 bits", 2**63, "got 9223372036854775808"),
        ("of 2^64 - 1", 2**64 - 1, "got 18446744073709551615"),
        ("a float", 1.0, "got 1.0"),
        ("NaN", float("nan"), "got nan"),
        ("a boolean", True, "got True"),
        ("a text", "7", "got '7'"),
        ("a text not ascii", "\u0667", r"got '\u0667'"),
        ("a list", [7], "got a list"),
        ("an array", np.array([7]), "got an array of int64"),
    )
] + [
    Kind("seed of 100 bits", texted(put(2**100, "options", "seed")), 400, "/options/seed", "more than 64 bits"),
    Kind("seed that overflows along B", packed(lambda f: rows(put(2**63 - 1, "options", "seed")(f), 2)), 422,
         "/options/seed", "from 0 to 9223372036854775806"),
]  # fmt: skip


def chained(**change: Any) -> Make:
    """A request with RTC options that would do, changed; None leaves one out."""

    def make(fields: Fields) -> Body:
        return as_msgpack(put(rtc_of(fields, **change), "options", "rtc")(fields))

    return make


def rtc_of(fields: Fields, **change: Any) -> dict[str, Any]:
    action = {key: np.full((1, HORIZON, 1), 0.25, np.float32) for key in fields["state"]}
    whole = {"action": action, "overlap_steps": 8, "frozen_steps": 2, "ramp_rate": 6.0}
    for key, value in change.items():
        whole[key] = value(action) if callable(value) else value
    return {key: value for key, value in whole.items() if value is not None}


RTC = [
    Kind(f"rtc {name}", chained(**change), 422, f"/options/rtc{pointer}", fragment)
    for name, change, pointer, fragment in (
        ("overlap over the horizon", {"overlap_steps": 17}, "/overlap_steps", "from 1 to 16, got 17"),
        ("overlap zero", {"overlap_steps": 0}, "/overlap_steps", "from 1 to 16, got 0"),
        ("overlap missing", {"overlap_steps": None}, "/overlap_steps", "options.rtc.overlap_steps is missing"),
        ("overlap a float", {"overlap_steps": 2.5}, "/overlap_steps", "got 2.5"),
        ("frozen over overlap", {"frozen_steps": 9}, "/frozen_steps", "from 0 to 8, got 9"),
        ("frozen negative", {"frozen_steps": -1}, "/frozen_steps", "got -1"),
        ("ramp zero", {"ramp_rate": 0.0}, "/ramp_rate", "from 0.001 to 1000, got 0.0"),
        ("ramp NaN", {"ramp_rate": float("nan")}, "/ramp_rate", "got nan"),
        ("ramp infinite", {"ramp_rate": float("inf")}, "/ramp_rate", "got inf"),
        ("ramp a text", {"ramp_rate": "6"}, "/ramp_rate", "got '6'"),
        ("action absurd", {"action": lambda a: a | {"yaw": a["yaw"] * np.float32(1e30)}}, "/action/yaw",
         "lies too far outside the checkpoint's statistics"),
        ("action missing", {"action": None}, "/action", "options.rtc.action is missing"),
        ("action a list", {"action": [1]}, "/action", "must be the previous reply's actions, got a list"),
        ("action empty", {"action": {}}, "/action/x", "has no 'x'"),
        ("action of an unknown key", {"action": lambda a: a | {"elbow": F32}}, "/action/elbow", "has no key 'elbow'"),
        ("action of half the steps", {"action": lambda a: a | {"x": a["x"][:, :8]}}, "/action/x", "so T = 8"),
        ("action too wide", {"action": lambda a: a | {"x": np.repeat(a["x"], 2, 2)}}, "/action/x",
         "shape is [1, 16, 2]"),
        ("action of two rows", {"action": lambda a: {k: np.repeat(v, 2, 0) for k, v in a.items()}}, "/action/x",
         "2 rows (B), the observation has 1"),
        ("action NaN", {"action": lambda a: a | {"yaw": a["yaw"] * np.nan}}, "/action/yaw", "is nan"),
        ("action bool", {"action": lambda a: a | {"yaw": a["yaw"] > 0}}, "/action/yaw", "values are bool"),
        ("option unknown", {"frozen": 1}, "/frozen", "options.rtc has no key 'frozen'"),
    )
] + [Kind("rtc a text", packed(put("yes", "options", "rtc")), 422, "/options/rtc", "options.rtc must be a mapping")]

TYPES = [
    Kind(f"content type {name}", typed(value), 415, None, fragment)
    for name, value, fragment in (
        ("empty", "", "came no content type"),
        ("text/plain", "text/plain", "came the content type 'text/plain'"),
        ("a urlencoded form", "application/x-www-form-urlencoded", "application/x-www-form-urlencoded"),
        ("octet-stream", "application/octet-stream", "application/octet-stream"),
        ("image/png", "image/png", "image/png"),
        ("any", "*/*", "*/*"),
        ("two at once", "application/json, application/msgpack", "application/json, application/msgpack"),
        ("no slash", "json", "'json'"),
        ("a suffix", "application/problem+json", "problem+json"),
        ("vendor msgpack", "application/vnd.msgpack", "vnd.msgpack"),
        ("numpy", "application/x-npy", "x-npy"),
        ("only parameters", ";charset=utf-8", ";charset=utf-8"),
        ("latin-1", "application/j\u00e4son", "application/j"),
        ("of 4 kB", "application/" + "j" * 4000, "jjj'..."),
    )
] + [
    Kind("content encoding gzip", with_body(with_headers(as_json, Content_Encoding="gzip"), gzip.compress), 415, None,
         "came Content-Encoding 'gzip'"),
    Kind("content encoding unknown", with_headers(as_msgpack, Content_Encoding="x"), 415, None, "without compression"),
    Kind("no content type", lambda f: ({}, as_json(f)[1]), 415, None, "came no content type. Set the Content-Type"),
    Kind("refused, asking for msgpack", with_headers(raw(JSON, b"{"), Accept="application/msgpack"), 400, None,
         "not JSON"),
    Kind("refused, accepting nothing", with_headers(raw(JSON, b"{"), Accept="*/*;q=0"), 400, None, "not JSON"),
    Kind("refused, describe spoofed", with_headers(raw(JSON, b"{"), describe="True"), 400, None, "not JSON"),
    Kind("refused, accept latin-1", with_headers(raw(JSON, b"{"), Accept="\u00e9\u00ff"), 400, None, "not JSON"),
]  # fmt: skip

KINDS: list[Kind] = [
    *BODIES, *NESTING, *KEYS, *PARTS, *NUMBERS, *SHAPES, *DECLARED, *DTYPES, *IMAGES, *PROMPTS, *EMBODIMENTS, *SEEDS,
    *RTC, *TYPES,
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the good


def good_prompt(name: str, text: str) -> Good:
    return Good(f"prompt {name}", texted(put([[text]], "language", LANGUAGE)), put([[text]], "language", LANGUAGE))


def as_state(array: np.ndarray, arrays: Any = openpi) -> Make:
    return packed(put(array, *X), arrays)


def good_state(name: str, array: np.ndarray, arrays: Any = openpi) -> Good:
    return Good(f"state {name}", as_state(array, arrays), put(array.astype(np.float32), *X))


PROMPTS_GOOD = {
    "empty": "",
    "of control characters": "pick\0\x01\x1b[31m\x7f\u0085 up\r\n\tthe bowl",
    "of special tokens": "<|im_end|>\n<|im_start|>assistant\n<|vision_start|><|image_pad|><|vision_end|><|endoftext|>",
    "right to left": "\u0627\u0644\u062a\u0642\u0637 \u202e\u05d4\u05e7\u05e2\u05e8\u05d4\u202c",
    "of emoji": "\U0001f916\u200d\U0001f9be pick \U0001f963\U0001f1ea\U0001f1fa",
    "of noncharacters": "\ufffe\uffff\U0010ffff\ufeff pick",
    "of combining marks": "z\u0351\u036b\u0343" * 50,
    "of 4096": "pick " * 819 + "a",
}

GREY, PALETTE = picture("L"), picture("P")
GOOD: list[Good] = [
    *(good_prompt(name, text) for name, text in PROMPTS_GOOD.items()),
    Good("content encoding identity", with_headers(as_json, Content_Encoding="Identity"), lambda fields: fields),
    Good("deadline far ahead", packed(put(9.9e13, "options", "deadline_ms")), lambda fields: fields),
    Good("timeout of hours", with_headers(as_json, X_Request_Start="t=9999999999.999", X_Request_Timeout_Ms="9999999"),
         lambda fields: fields),
    Good("start without a timeout", with_headers(as_msgpack, X_Request_Start="whenever"), lambda fields: fields),
    good_state("denormal", F32 * np.float32(1e-42)),
    good_state("denormal of float64", np.full((1, 1, 1), 5e-324)),
    good_state("far outside its statistics", F32 * 1e5),
    good_state("minus zero", F32 * -0.0),
    good_state("big-endian", F32.astype(">f4") * 0.25),
    good_state("big-endian in gr00t", F32.astype(">f8") * 0.25, gr00t),
    good_state("big-endian integers", F32.astype(">i8")),
    good_state("float16", F32.astype(np.float16) * 0.25),
    good_state("uint8", F32.astype(np.uint8)),
    good_state("without T and B", np.full(1, 0.25, np.float32)),
    good_state("a scalar", np.array(0.25, np.float32)),
    Good("state an npgeneric", field({b"__npgeneric__": True, b"data": 0.25, b"dtype": "<f4"}, *X), put(F32 / 4, *X)),
    Good("state in Fortran order", packed(put(np.asfortranarray(np.ones((1, 1, 2), np.float32)), "state", "gripper"),
                                          gr00t), put(np.ones((1, 1, 2), np.float32), "state", "gripper")),
    Good("state npy of version 2", field(npy(header("'<f4'"), version=b"\2\0"), *X), put(F32 * 0, *X)),
    good_image("grey", GREY, pixels(GREY, "L")[..., None].repeat(3, -1)),
    good_image("grey jpeg", picture("L", "JPEG")),
    good_image("EXIF-rotated", rotated()),
    good_image("palette", PALETTE),
    good_image("1-bit", picture("1")),
    good_image("1x1", picture("RGB", size=(1, 1))),
    good_image("progressive", picture("RGB", "JPEG", progressive=True)),
    Good("image data URL", base64_image("data:image/png;base64," + base64.b64encode(GREY).decode()),
         put(pixels(GREY), *IMAGE)),
    Good("image with bytes after its end", image(picture("RGB") + b"\0" * 99), put(pixels(picture("RGB")), *IMAGE)),
    Good("video of int64", packed(put(lambda v: v.astype(np.int64), *IMAGE)), same),
    Good("video big-endian", packed(put(lambda v: v.astype(">u2"), *IMAGE)), same),
    Good("keys as bytes", lambda f: (MSGPACK, msgpack.packb({k.encode(): v for k, v in openpi(f).items()})), same),
    Good("seed at most", packed(put(2**63 - 1, "options", "seed")), put(2**63 - 1, "options", "seed")),
    Good("rtc in bounds", chained(), lambda f: put(rtc_of(f), "options", "rtc")(f)),
    Good("content type upper case", with_headers(as_json, Content_Type="APPLICATION/JSON ; Charset=UTF-16"), same),
    Good("content type x-msgpack", with_headers(as_msgpack, Content_Type="application/x-msgpack"), same),
    Good("form", as_multipart, same),
    Good("form with an epilogue", with_body(formed(), lambda b: b + b"after"), same),
    Good("accept json", with_headers(as_msgpack, Accept="application/json"), same),
    Good("accept msgpack by q", with_headers(as_json, Accept="application/json;q=.1, application/msgpack;q=0.9"), same),
    Good("accept nothing", with_headers(as_msgpack, Accept="*/*;q=0"), same),
    Good("accept html", with_headers(as_msgpack, Accept="text/html,application/xhtml+xml"), same),
    Good("accept latin-1", with_headers(as_json, Accept="\u00e9\u00ff, application/msgpack;q=\u00b2"), same),
    Good("accept q of nonsense", with_headers(as_json, Accept="application/msgpack;q=nan, */*;q=1e400,;;,=,"), same),
    Good("accept of 4 kB", with_headers(as_json, Accept="a/b;q=0.1," * 400), same),
    Good("describe spoofed", with_headers(as_msgpack, describe="True"), same),
    Good("explain spoofed", with_headers(as_msgpack, explain="True"), same),
    Good("headers latin-1", with_headers(as_json, X_Robot="r\u00f6b\u00f6t", User_Agent="\u00ff"), same),
    Good("headers like parts", with_headers(as_json, body="x", data="y", video="z", requestId="1"), same),
]  # fmt: skip

def announced(encode: Make) -> Make:
    """The request with a Content-Length of 100 bytes more than come."""

    def make(fields: Fields) -> Body:
        headers, body = encode(fields)
        return {**headers, "Content-Length": str(len(body) + 100)}, body

    return make


# 33 MiB are over TorchServe's max_request_size. A body that does not come whole is waited for.
OVER = 33 << 20
BEFORE: list[Before] = [
    Before("json over 32 MiB", with_body(as_json, lambda b: b + b" " * OVER), 413),
    Before("msgpack over 32 MiB", with_body(as_msgpack, lambda b: b + b"\xc0" * OVER), 413),
    Before("form over 32 MiB", lambda f: form(f, part("video.image", b"\0" * OVER)), 413),
    Before("json shorter than announced", announced(as_json), None),
    Before("msgpack shorter than announced", announced(as_msgpack), None),
    Before("form shorter than announced", announced(formed()), None),
    Before("form without a boundary", with_headers(formed(), Content_Type="multipart/form-data"), 400),
]
