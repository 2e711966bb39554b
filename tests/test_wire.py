"""The wire: exact values for what is taken, status and pointer for what is not."""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import warnings
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.problem import Problem
from handler.wire import (
    MAX_DEPTH,
    MAX_KEY,
    MAX_KEYS,
    MAX_LIST,
    MAX_LISTS,
    MAX_VALUES,
    Part,
    ReplyForm,
    Request,
    decode,
    encode_problem,
    encode_reply,
    pointer,
    quote,
    reply_form,
)

JSON, MSGPACK, FORM = "application/json", "application/msgpack", "multipart/form-data; boundary=x"
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]


def plain(body: bytes, content_type: str | None = JSON, accept: str | None = None) -> Request:
    headers = {"Content-Type": content_type, "Accept": accept}
    return Request({key: value for key, value in headers.items() if value is not None}, [Part("body", "", body)])


def form(*parts: tuple[str, bytes]) -> Request:
    return Request({"content-type": FORM}, [Part(name, "", value) for name, value in parts])


def packed(value: Any) -> Request:
    return plain(msgpack.packb(value), MSGPACK)


def openpi(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    wrapper = {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": array.shape}
    return wrapper | changes


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return file.getvalue()


def npy_of(header: str, data: bytes = b"", version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode("utf-8") + data


def refused(request: Request, status: int, where: str | None = None) -> str:
    with pytest.raises(Problem) as caught:
        decode(request)
    assert (caught.value.status, caught.value.pointer) == (status, where), caught.value.detail
    assert caught.value.detail.isascii() and len(caught.value.detail) < 1000
    return caught.value.detail


# What openpi-client's msgpack_numpy does, on both sides.
def openpi_pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return value


def openpi_unpack(value: Any) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    return value


# What Isaac-GR00T's MsgSerializer does.
def gr00t_unpack(value: Any) -> Any:
    return np.load(io.BytesIO(value["as_npy"]), allow_pickle=False) if "__ndarray_class__" in value else value


openpi_packb = functools.partial(msgpack.packb, default=openpi_pack)


class TestHeaders:
    def test_names_have_no_case(self) -> None:
        request = Request({"cOnTeNt-TyPe": "a", "X": "b"}, [])
        assert (request.header("Content-Type"), request.header("x"), request.header("y")) == ("a", "b", None)

    @pytest.mark.parametrize("content_type", [JSON, "Application/JSON; charset=utf-8", " application/json ;x=y"])
    def test_content_type_without_case_and_parameters(self, content_type: str) -> None:
        assert decode(plain(b'{"a": 1}', content_type)) == ({"a": 1}, ReplyForm(JSON, "openpi"))

    @pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/jsonx", "\u00e9" * 999])
    def test_unknown_content_type_lists_the_accepted(self, content_type: str | None) -> None:
        detail = refused(plain(b"{}", content_type), 415)
        for name in (JSON, MSGPACK, "application/x-msgpack", "multipart/form-data"):
            assert name in detail

    @pytest.mark.parametrize("content_type", [JSON, MSGPACK, FORM])
    def test_empty_body(self, content_type: str) -> None:
        assert "empty" in refused(Request({"Content-Type": content_type}, []), 400)
        if content_type != FORM:
            assert "empty" in refused(plain(b"", content_type), 400)

    def test_more_than_the_body(self) -> None:
        refused(Request({"Content-Type": JSON}, [Part("body", "", b"{}"), Part("page", "", b"1")]), 400)

    @pytest.mark.parametrize(
        ("own", "accept", "expected"),
        [
            (JSON, None, JSON),
            (MSGPACK, None, MSGPACK),
            ("application/x-msgpack", None, MSGPACK),
            (FORM, None, JSON),
            (None, None, JSON),
            ("text/plain", "nonsense", JSON),
            (MSGPACK, "*/*", MSGPACK),
            (MSGPACK, "application/*", MSGPACK),
            (MSGPACK, "text/html, image/png", MSGPACK),
            (MSGPACK, "application/json", JSON),
            (JSON, "application/x-msgpack", MSGPACK),
            (FORM, "APPLICATION/MSGPACK", MSGPACK),
            (JSON, "application/msgpack, application/json", MSGPACK),
            (MSGPACK, "application/json, text/plain, */*", JSON),
            (JSON, "application/json;q=0.5, application/msgpack;q=0.9", MSGPACK),
            (JSON, "application/msgpack;q=0.5, application/json", JSON),
            (JSON, "application/msgpack;q=0", JSON),
            (JSON, "application/msgpack;q=7, application/json;q=0.1", JSON),
            (MSGPACK, "application/json; charset=utf-8 ; q=0.1", JSON),
            (MSGPACK, "application/json;q=0.1, */*;q=0.2", MSGPACK),
            (JSON, "multipart/form-data", JSON),
            (MSGPACK, ",;,=;q=,\u00e9", MSGPACK),
        ],
    )
    def test_reply_form(self, own: str | None, accept: str | None, expected: str) -> None:
        assert reply_form(plain(b"", own, accept)) == ReplyForm(expected, "openpi")


class TestMsgpack:
    @pytest.mark.parametrize("content_type", [MSGPACK, "application/x-msgpack", "APPLICATION/MSGPACK; x=y"])
    def test_plain_values(self, content_type: str) -> None:
        value = {"a": 1, "b": [1.5, True, None], "c": {"d": "\u00e9", "e": b"\x00\xff"}, "f": -(2**63), "g": 2**64 - 1}
        assert decode(plain(msgpack.packb(value), content_type)) == (value, ReplyForm(MSGPACK, "openpi"))

    @pytest.mark.parametrize("dtype", [order + name for order in "<>" for name in DTYPES])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (1,) * 8])
    def test_arrays(self, dtype: str, shape: tuple[int, ...]) -> None:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        gr00t = {"__ndarray_class__": True, "as_npy": npy(array)}
        mapping, reply = decode(packed({"text": openpi(array), "bytes": openpi_pack(array), "npy": gr00t}))
        assert reply == ReplyForm(MSGPACK, "gr00t")
        for out in mapping.values():
            assert out.dtype == array.dtype and out.shape == shape
            np.testing.assert_array_equal(out, array)

    def test_openpi_client_is_understood(self) -> None:
        joint = np.array([1, 2], np.float32)
        observation = {"state": {"joint": joint}, "t": np.float32(0.1), "n": np.uint8(255), "b": np.bool_(1)}
        mapping, reply = decode(plain(openpi_packb(observation), MSGPACK))
        np.testing.assert_array_equal(mapping["state"]["joint"], joint)
        assert (mapping["t"], mapping["n"], mapping["b"]) == (float(np.float32(0.1)), 255, True)
        assert [type(mapping[key]) for key in "tnb"] == [float, int, bool] and reply.arrays == "openpi"

    def test_keys_may_be_bytes(self) -> None:
        assert decode(packed({b"a": {"\u00e9".encode(): 1}}))[0] == {"a": {"\u00e9": 1}}

    def test_arrays_are_views(self) -> None:
        mapping, _ = decode(packed({"a": openpi(np.zeros(4, np.float32))}))
        assert mapping["a"].base is not None and not mapping["a"].flags.writeable

    @pytest.mark.parametrize("name", ["float32", "bool", "uint8", b"<f4", "|u1", "?", "=i8"])
    def test_spellings_of_dtypes(self, name: Any) -> None:
        dtype = np.dtype(name.decode() if isinstance(name, bytes) else name)
        assert decode(packed({"a": openpi(np.ones(2, dtype), dtype=name)}))[0]["a"].dtype == dtype

    @pytest.mark.parametrize(
        "name",
        [
            *("O", "|O8", "V4", "<c8", "complex64", "M8[s]", "m8", "S4", "<U1", "f16", "f4,f4", "(2,)f4", "i3", ""),
            *("f4\n", "\u00e9" * 999, None, 4, ["f4"], {"f": "f4"}, b"\xff"),
        ],
    )
    def test_other_dtypes(self, name: Any) -> None:
        array = openpi(np.ones(1, np.float32), dtype=name)
        assert "dtype" in refused(packed({"state": {"a/b": array}}), 422, "/state/a~1b")
        refused(packed({"a": {"__npgeneric__": True, "data": 1, "dtype": name}}), 422, "/a")

    @pytest.mark.parametrize(
        "shape",
        [
            *([3], [2, 2], [1], [], [0], [0, 2**62], [-1], [-1, -2], [2.0], [True, 2], ["2"], [None], [[2]], [1] * 9),
            *(None, 2, "2", {}, [2**63, 2**63, 2, 2**40], [2**62 + 2, 4], [2**64 - 1], [2] + [1] * 8),
        ],
    )
    def test_shapes_that_do_not_fit(self, shape: Any) -> None:
        refused(packed({"a": openpi(np.ones(2, np.float32), shape=shape)}), 422, "/a")

    @pytest.mark.parametrize("data", ["text", None, 5, b"", b"1234567", b"123456789", [1, 2]])
    def test_data_that_does_not_fit(self, data: Any) -> None:
        refused(packed({"x": [{"~": openpi(np.ones(2, np.float32), data=data)}]}), 422, "/x/0/~0")

    def test_missing_pieces(self) -> None:
        for key in ("data", "dtype", "shape"):
            wrapper = openpi(np.ones(2))
            del wrapper[key]
            refused(packed({"a": wrapper}), 422, "/a")
        refused(packed({"a": {"__ndarray_class__": True}}), 422, "/a")
        refused(packed({"a": {"__npgeneric__": True, "dtype": "<f4"}}), 422, "/a")

    @pytest.mark.parametrize(
        ("dtype", "data"),
        [("u1", 256), ("u1", -1), ("i8", 2**63), ("i4", 1.0), ("i4", True), ("?", 1), ("f4", "1"), ("f4", True)],
    )
    def test_scalars_that_do_not_fit(self, dtype: str, data: Any) -> None:
        refused(packed({"a": {"__npgeneric__": True, "data": data, "dtype": dtype}}), 422, "/a")

    @pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
    def test_npy_versions_and_order(self, version: tuple[int, int]) -> None:
        array = np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3))
        mapping, _ = decode(packed({"a": {b"__ndarray_class__": True, b"as_npy": npy(array, version)}}))
        np.testing.assert_array_equal(mapping["a"], array)
        assert mapping["a"].dtype == np.dtype(">i2")

    def test_unaligned_npy_is_copied(self) -> None:
        body = npy_of("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", np.array([1.0, 2.0]).tobytes())
        array = decode(packed({"a": {"__ndarray_class__": True, "as_npy": body}}))[0]["a"]
        assert array.flags.aligned and array.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\x93NUMPY",
            b"\x93NUMPY\x01\x00\xff\xff",
            b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
            b"\x80\x04K\x01.",  # a pickle
            npy(np.ones(2))[:-1],
            npy(np.ones(2)) + b"x",
            npy(np.array(["a"])),
            npy(np.zeros(0)),
            npy(np.ones(1, "c8")),
            npy(np.ones(1, [("a", "f4")])),
            npy_of("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\x80\x04K\x01."),
            npy_of("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}", bytes(8)),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", bytes(4)),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}", bytes(4)),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (%s,)}" % ("9" * 900), bytes(4)),
            npy_of("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", bytes(4)),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1L,,)}", bytes(4)),
            npy_of("{'descr': [('\u00e9', '<f4')], 'fortran_order': False, 'shape': (1,)}", bytes(4), version=3),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 2000, bytes(4)),
            npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(4), version=4),
            npy_of("(" * 1000),
            npy_of("-" * 1000 + "1"),
            npy_of("'\\d'"),
            "text",
            None,
        ],
    )
    def test_other_npy(self, body: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refused(packed({"a": {"__ndarray_class__": True, "as_npy": body}}), 422, "/a")

    @pytest.mark.parametrize(
        "body",
        [
            msgpack.packb({"a": 1}) + b"\x00",
            msgpack.packb({"a": "text"})[:-1],
            b"\xc1",
            b"\x81",
            b"\x81\xa1a\xc7\x01\x05a",  # an extension type
            b"\x81\xa1a" + msgpack.packb(msgpack.Timestamp(1)),
            b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,  # a bad timestamp
            b"\x81\xa1a\xa1\xff",  # not UTF-8
            b"\x81\xc4\x01\xff\x01",  # a key that is not UTF-8
            b"\x82\xa1a\x01\xa1a\x02",
            b"\x82\xa1a\x01\xc4\x01a\x02",
            b"\x81\x01\x01",
            b"\x81\xc0\x01",
            b"\x81\x90\x01",
            b"\x81\x80\x01",
            b"\x81\xd6\xff\x00\x00\x00\x00\x01",
            msgpack.packb({"k" * (MAX_KEY + 1): 1}),
            b"\x81\xa1a\xdd\x00\x00\xff\xff",  # a list without its items
            b"\x81\xa1a\xc6\xff\xff\xff\xff",
            msgpack.packb([1]),
            msgpack.packb(1),
            msgpack.packb(openpi(np.ones(2))),
            b"\x91" * 100_000,
            b"\x81\xa1a" * 100_000,
        ],
    )
    def test_undecodable(self, body: bytes) -> None:
        with pytest.raises(Problem) as caught:
            decode(plain(body, MSGPACK))
        assert caught.value.status == 400 and caught.value.detail.isascii()

    def test_extension_types_are_pointed_at(self) -> None:
        refused(packed({"x": {"y": [0, msgpack.ExtType(5, b"")]}}), 400, "/x/y/1")

    def test_depth(self) -> None:
        def nested(depth: int) -> Any:
            return {"a": nested(depth - 1)} if depth else 1

        assert decode(packed(nested(MAX_DEPTH)))[0] == nested(MAX_DEPTH)
        refused(packed(nested(MAX_DEPTH + 1)), 400, "/a" * (MAX_DEPTH + 1))
        refused(plain(json.dumps(nested(MAX_DEPTH + 1)).encode()), 400, "/a" * (MAX_DEPTH + 1))

    def test_number_of_arrays_is_bounded(self) -> None:
        array = {"__ndarray__": True, "data": b"1", "dtype": "|u1", "shape": [1]}
        assert len(decode(packed({"a": [array] * (MAX_KEYS // 4 - 1)}))[0]["a"]) == MAX_KEYS // 4 - 1
        refused(packed({"a": [array] * (MAX_KEYS // 4)}), 413)

    def test_sizes_are_bounded(self) -> None:
        assert len(decode(packed({"a": [0] * MAX_LIST}))[0]["a"]) == MAX_LIST
        refused(packed({"a": [0] * (MAX_LIST + 1)}), 413)
        refused(plain(b"\x81\xa1a\xdd\xff\xff\xff\xff", MSGPACK), 413)
        lists = msgpack.packb([[]] * MAX_LIST)
        refused(plain(b"\x81\xa1a\xdc\x00\x40" + lists * 64, MSGPACK), 413)


class TestJson:
    def test_values(self) -> None:
        value = {"a": [[1, 2.5], [-3, 1e300]], "b": {"c": "\u00e9\U0001f600"}, "d": None, "e": True, "f": 2**64 - 1}
        for ascii_only in (True, False):
            assert decode(plain(json.dumps(value, ensure_ascii=ascii_only).encode()))[0] == value

    def test_not_a_number_is_parsed(self) -> None:
        mapping, _ = decode(plain(b'{"a": [NaN, Infinity, -Infinity, 1e999]}'))
        np.testing.assert_array_equal(mapping["a"], [np.nan, np.inf, -np.inf, np.inf])

    @pytest.mark.parametrize(
        "body",
        [
            b"{",
            b"nope",
            b" ",
            b'{"a": 1} x',
            b'{"a": 1, "a": 2}',
            b'{"x": {"a": 1, "\\u0061": 2}}',
            b'{"a": "\xff"}',
            '{"a": 1}'.encode("utf-16"),
            '{"a": 1}'.encode("utf-32-le"),
            b"\xef\xbb\xbf{}",
            b"[]",
            b"1",
            b"null",
            b'"text"',
            b'{"\\ud800": 1}',
            b'{"%s": 1}' % (b"k" * (MAX_KEY + 1)),
            b'{"a": %s}' % (b"9" * 5000),
            b"9" * 5000,
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
        ],
    )
    def test_undecodable(self, body: bytes) -> None:
        with pytest.raises(Problem) as caught:
            decode(plain(body))
        assert caught.value.status == 400 and caught.value.detail.isascii()

    def test_where_it_breaks(self) -> None:
        assert "line 2, column 6" in refused(plain(b'{\n"a": }'), 400)
        for body in (b'{"s": {"j": [1, %d]}}', b'{"s": {"j": [1.5, %d]}}'):
            for number in (2**64, -(2**63) - 1):
                refused(plain(body % number), 400, "/s/j/1")
        refused(plain(b'{"s": ["\\ud800"]}'), 400, "/s/0")

    def test_arrays_are_not_taken(self) -> None:
        body = b'{"a": {"__ndarray__": true, "data": "", "dtype": "O", "shape": [1]}}'
        assert isinstance(decode(plain(body))[0]["a"], dict)

    def test_four_frames_as_pixel_lists_fit(self) -> None:
        frame = b"[%s]" % b",".join([b"[%s]" % b",".join([b"[1,2,3]"] * 256)] * 256)
        frames = decode(plain(b'{"a": [%s]}' % b",".join([frame] * 4)))[0]["a"]
        assert np.array(frames, np.uint8).shape == (4, 256, 256, 3)

    def test_number_of_values_is_bounded(self) -> None:
        refused(plain(b'{"a": [%s 1]}' % (b"1," * MAX_VALUES)), 413)
        refused(plain(b'{"a": [%s 1]}' % (b"[]," * MAX_LISTS)), 413)
        keys = ",".join(f'"{i}": 0' for i in range(MAX_KEYS))
        assert len(decode(plain(b"{%s}" % keys.encode()))[0]) == MAX_KEYS
        refused(plain(b'{"a": {%s}}' % keys.encode()), 413)


class TestForm:
    def test_limits_hold_for_all_parts_together(self) -> None:
        half = b"[%s1]" % (b"[]," * (MAX_LISTS // 2))
        assert len(decode(form(("state.a", half)))[0]["state.a"]) == MAX_LISTS // 2 + 1
        refused(form(("state.a", half), ("state.b", half)), 413, "/state.b")
        refused(form(*((f"video.{i}", b"x") for i in range(MAX_KEYS + 1))), 413)

    def test_images_is_another_name_for_video(self) -> None:
        mapping, _ = decode(form(("images.front", b"\xff\xd8one"), ("images.front", b"\xff\xd8two")))
        assert mapping == {"images.front": [b"\xff\xd8one", b"\xff\xd8two"]}

    def test_parts(self) -> None:
        array = np.array([[1, 2]], np.float32)
        mapping, reply = decode(
            form(
                ("video.front", b"\xff\xd8one"),
                ("state.joint", npy(array)),
                ("video.wrist", b"1"),
                ("state.gripper", b" [0.5, 1]"),
                ("video.wrist", b"2"),
                ("state.height", b"3"),
                ("prompt", "pick \u00e9".encode()),
                ("options", b'{"seed": 7, "rtc": {"action": {"x": [1]}}}'),
                ("video.wrist", b"3"),
                ("body", b"b"),
                ("data", b""),
                ("Content-Type", b"c"),
            )
        )
        np.testing.assert_array_equal(mapping.pop("state.joint"), array)
        assert mapping == {
            "video.front": b"\xff\xd8one",
            "video.wrist": [b"1", b"2", b"3"],
            "state.gripper": [0.5, 1],
            "state.height": 3,
            "prompt": "pick \u00e9",
            "options": {"seed": 7, "rtc": {"action": {"x": [1]}}},
            "body": "b",
            "data": "",
            "Content-Type": "c",
        }
        assert reply == ReplyForm(JSON, "openpi")

    @pytest.mark.parametrize("name", ["prompt", "state.a", "options", "body", "video"])
    def test_only_video_repeats(self, name: str) -> None:
        value = b"{}" if name == "options" else b"1"
        assert "video.KEY" in refused(form((name, value), ("video.a", b"1"), (name, value)), 400, f"/{name}")

    @pytest.mark.parametrize(
        ("name", "value", "status"),
        [
            ("state.a", b"", 400),
            ("state.a", b"nope", 400),
            ("state.a", b"\xff\xd8", 400),
            ("state.a", b'[{"a": 1, "a": 2}]', 400),
            ("state.a", b"[" * 100_000, 400),
            ("state.a", b"9" * 5000, 400),
            ("state.a", b'"text"', 422),
            ("state.a", b"{}", 422),
            ("state.a", b"true", 422),
            ("state.a", b"null", 422),
            ("state.a", npy(np.ones(2))[:-1], 422),
            ("state.a", npy(np.array(["a"])), 422),
            ("state.a", b"\x93NUMPY", 422),
            ("options", b"{", 400),
            ("options", b'{"seed": 1, "seed": 2}', 400),
            ("options", b"[]", 422),
            ("options", npy(np.ones(2)), 400),
            ("prompt", b"\xff", 400),
            ("front/~", b"\xff\xd8", 400),
        ],
    )
    def test_bad_parts(self, name: str, value: bytes, status: int) -> None:
        refused(form(("video.a", b"1"), (name, value)), status, pointer(name))

    def test_pointers_inside_a_part(self) -> None:
        refused(form(("options", b'{"seed": 99999999999999999999}')), 400, "/options/seed")

    def test_long_names(self) -> None:
        refused(form(("k" * (MAX_KEY + 1), b"1")), 400)


ACTIONS = {"arm/x": np.array([[0.1, -1e-30], [3.4e38, 1 / 3]], np.float32), "grip": np.zeros((1, 2, 3), np.float32)}
INFO = {"seed": None, "wave_rows": 3, "inference_ms": 1.5, "checkpoint": "abc", "group_rows": [1, 2]}


class TestReplies:
    def test_json_gives_float32_back_exactly(self) -> None:
        content_type, body = encode_reply(ReplyForm(JSON, "openpi"), ACTIONS, INFO)
        reply = json.loads(body)
        assert content_type == JSON and list(reply) == ["actions", "info"] and reply["info"] == INFO
        assert reply["actions"]["arm/x"][0][0] == float(np.float32(0.1))
        for key, array in ACTIONS.items():
            np.testing.assert_array_equal(np.array(reply["actions"][key], np.float32), array)

    @pytest.mark.parametrize(("arrays", "hook"), [("openpi", openpi_unpack), ("gr00t", gr00t_unpack)])
    def test_msgpack_is_read_by_its_clients(self, arrays: str, hook: Any) -> None:
        content_type, body = encode_reply(ReplyForm(MSGPACK, arrays), ACTIONS, INFO)
        reply = msgpack.unpackb(body, object_hook=hook)
        assert content_type == MSGPACK and list(reply) == ["actions", "info"] and reply["info"] == INFO
        for key, array in ACTIONS.items():
            assert reply["actions"][key].dtype == np.float32
            np.testing.assert_array_equal(reply["actions"][key], array)

    def test_arrays_that_are_not_contiguous(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3).T
        for arrays, hook in (("openpi", openpi_unpack), ("gr00t", gr00t_unpack)):
            _, body = encode_reply(ReplyForm(MSGPACK, arrays), {"a": array}, {})
            np.testing.assert_array_equal(msgpack.unpackb(body, object_hook=hook)["actions"]["a"], array)

    def test_what_comes_out_goes_in(self) -> None:
        for reply in (ReplyForm(MSGPACK, "openpi"), ReplyForm(MSGPACK, "gr00t")):
            content_type, body = encode_reply(reply, ACTIONS, INFO)
            mapping, back = decode(plain(body, content_type))
            assert back == reply and mapping["info"] == INFO
            np.testing.assert_array_equal(mapping["actions"]["arm/x"], ACTIONS["arm/x"])

    @pytest.mark.parametrize(
        ("content_type", "value"),
        [(JSON, float("nan")), (JSON, b"1"), (JSON, np.ones(1)), (MSGPACK, 2**70), (MSGPACK, object())],
    )
    def test_what_cannot_be_written_is_a_problem(self, content_type: str, value: Any) -> None:
        with pytest.raises(Problem) as caught:
            encode_reply(ReplyForm(content_type, "openpi"), {}, {"timestamp": value})
        assert caught.value.status == 500

    def test_problems(self) -> None:
        content_type, body = encode_problem(Problem(422, "caf\u00e9", "/\u00e9"))
        assert content_type == "application/problem+json" and body.isascii()
        assert json.loads(body) == {
            "type": "about:blank",
            "title": "Unprocessable Content",
            "status": 422,
            "detail": "caf\u00e9",
            "pointer": "/\u00e9",
        }
        assert list(json.loads(encode_problem(Problem(400, "x"))[1])) == ["type", "title", "status", "detail"]


def test_pointer() -> None:
    assert pointer() == "" and pointer("") == "/"
    assert pointer("state", "a/b") == "/state/a~1b"
    assert pointer("~1", 0, "video.front") == "/~01/0/video.front"


def test_quote() -> None:
    assert quote("a\n\u00e9'") == '"a\\n\\xe9\'"'
    assert quote(b"\xff") == "b'\\xff'"
    assert quote("x" * 80) == f"'{'x' * 80}'" and quote("x" * 81) == f"'{'x' * 80}'..."


@pytest.mark.parametrize(
    "request_",
    [
        plain(json.dumps({"\u00e9" * 10_000: 1}).encode()),
        plain(b'{"a": 1, "a": 2}'.replace(b"a", b"\\u00e9" * 200)),
        packed({"\u00e9" * 10_000: 1}),
        packed({"\u00e9" * 200: {"__ndarray__": True, "data": b"", "dtype": "\u00e9" * 10_000, "shape": []}}),
        form(("\u00e9" * 10_000, b"1")),
        form(("\u00e9" * 200, b"\xff")),
        plain(b"", "\u00e9" * 10_000),
    ],
)
def test_details_quote_80_characters_at_most(request_: Request) -> None:
    with pytest.raises(Problem) as caught:
        decode(request_)
    assert caught.value.detail.isascii() and not re.search(r"(\\xe9){81}", caught.value.detail)


# ---- Anything at all ----

integers = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | integers | st.floats() | st.text() | st.binary()
keys = st.sampled_from(["__ndarray__", "__npgeneric__", "__ndarray_class__", "data", "dtype", "as_npy", b"data", "a"])
dtypes = st.sampled_from([*DTYPES, "float32", "O", "V4", "<U1"])
headers = st.tuples(dtypes, st.lists(st.integers(-1, 3) | integers, max_size=3).map(tuple), st.binary()).map(
    lambda it: npy_of(f"{{'descr': {it[0]!r}, 'fortran_order': False, 'shape': {it[1]!r}}}", it[2])
)
wrappers = st.fixed_dictionaries(
    {"data": st.binary() | scalars, "dtype": dtypes | scalars},
    optional={
        "as_npy": headers | st.binary().map(npy(np.ones(1)).__add__),
        "__ndarray__": st.just(True),
        "__npgeneric__": st.just(True),
        "__ndarray_class__": st.just(True),
        "shape": st.lists(st.integers(-1, 3) | integers, max_size=3),
    },
)
trees = st.recursive(
    scalars | wrappers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | st.text() | integers, inner, max_size=5),
    max_leaves=12,
)
bodies = (
    st.binary()
    | trees.map(msgpack.packb)
    | st.dictionaries(keys | st.text(), trees, max_size=3).map(msgpack.packb)
    | st.tuples(st.dictionaries(keys, trees, max_size=3).map(msgpack.packb), st.binary(max_size=3)).map(b"".join)
    | headers
    | st.text(alphabet='{}[]",:0123456789eE.-+ \\udNaInfity').map(str.encode)
    | trees.map(lambda tree: json.dumps(tree, default=repr, skipkeys=True).encode())
)
types = st.sampled_from([JSON, MSGPACK, "application/x-msgpack", FORM, "text/plain"]) | st.text()
names = st.sampled_from(["body", "video.a", "state.a", "options", "prompt", "state."]) | st.text()


def check_plain(value: Any) -> None:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for item in value.values():
            check_plain(item)
    elif isinstance(value, list):
        for item in value:
            check_plain(item)
    elif isinstance(value, np.ndarray):
        assert value.dtype.kind in "biuf" and value.size and value.ndim <= 8
    else:
        assert value is None or isinstance(value, bool | int | float | str | bytes)


@settings(max_examples=400, deadline=None, database=None)
@given(types, st.none() | st.text(), st.lists(st.tuples(names, bodies), max_size=4), st.booleans())
def test_any_request_gives_a_mapping_or_a_problem(
    content_type: str, accept: str | None, parts: list[tuple[str, bytes]], one: bool
) -> None:
    headers = {"content-type": content_type} | ({"accept": accept} if accept is not None else {})
    request = Request(headers, [Part(name, "", value) for name, value in parts[: 1 if one else 4]])
    assert reply_form(request).content_type in (JSON, MSGPACK)
    try:
        mapping, reply = decode(request)
    except Problem as problem:
        assert problem.status in (400, 413, 415, 422) and problem.detail.isascii()
        assert encode_problem(problem)[1].isascii()
    else:
        assert isinstance(mapping, dict) and reply.content_type in (JSON, MSGPACK)
        check_plain(mapping)
