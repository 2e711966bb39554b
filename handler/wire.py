"""One request's bytes to a mapping, and a reply to bytes. Nothing here knows the model.

Bodies come from strangers: sizes are checked before anything of that size is made, nothing is unpickled, and whatever a
body holds, the outcome is a mapping of plain values or a Problem.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np
from numpy.lib import format as npy_format

from handler.problem import Problem

JSON = "application/json"
MSGPACK = "application/msgpack"
MULTIPART = "multipart/form-data"
PROBLEM = "application/problem+json"
CONTENT_TYPES = {JSON: JSON, MSGPACK: MSGPACK, "application/x-msgpack": MSGPACK, MULTIPART: MULTIPART}

MAX_DEPTH = 32  # mappings and lists inside each other; video/KEY/B/T/H/W/C needs 7
MAX_RANK = 8  # axes of an array
MAX_KEY = 256  # characters of a key: pointers repeat them
MAX_LIST = 1 << 16  # msgpack reserves what a list's head announces, before its items have come
MAX_VALUES = 5 << 18  # values in one body: an empty list costs two bytes to send and 56 to hold
MAX_LISTS = 1 << 19  # lists among them: each costs a look of its own (four 256x256 frames as pixel lists have 2^18)
MAX_KEYS = 1 << 12  # keys in one body, of all its mappings together; an array in msgpack has two to four
MAX_REQUEST_ID = 128  # characters
MAX_NPY_HEADER = 1024  # numpy evaluates the header as a Python literal

DTYPES = "bool, int8 to int64, uint8 to uint64, float16, float32 or float64"
_DTYPE = re.compile(r"[<>|=]?(\?|b1|[iu][1248]|f[248])|bool|u?int(8|16|32|64)|float(16|32|64)")


@dataclass(frozen=True)
class Part:
    """One body, or one part of a form."""

    name: str
    content_type: str
    value: bytes | bytearray


@dataclass(frozen=True)
class Request:
    """One request as TorchServe hands it over, undecoded.

    headers: names as sent.
    parts: a plain body is the single part "body"; of a form, every part in order, where names may repeat.
    own_id: TorchServe's id of it.
    """

    headers: dict[str, str]
    parts: list[Part]
    own_id: str = ""

    @property
    def request_id(self) -> str:
        """The header X-Request-Id, at most 128 harmless characters of it, the others as "_"; without it, `own_id`.

        It goes into the log and into a header of the reply.
        """
        sent = (self.header("x-request-id") or "").strip()[:MAX_REQUEST_ID]
        return re.sub(r"[^0-9A-Za-z._:/+=@-]", "_", sent) or self.own_id

    def header(self, name: str) -> str | None:
        """The header's value whatever the case of its name; None without it."""
        return self._lowered.get(name.lower())

    @functools.cached_property
    def _lowered(self) -> dict[str, str]:
        return {key.lower(): value for key, value in reversed(self.headers.items())}  # the first of equals


@dataclass(frozen=True)
class ReplyForm:
    """How a client wants its reply: content type, and for msgpack how arrays are written ("openpi" or "gr00t")."""

    content_type: str
    arrays: str


def reply_form(request: Request) -> ReplyForm:
    """The reply's form from the headers alone; never raises.

    The highest q in Accept wins, the first of equals; wildcards, or nothing usable, mean the request's own encoding,
    which for forms and unknown types is JSON. `decode` may still turn arrays to "gr00t".
    """
    return _reply_form(request.header("accept") or "", MSGPACK if _kind(request) == MSGPACK else JSON)


@functools.lru_cache(maxsize=64)
def _reply_form(accept: str, own: str) -> ReplyForm:
    best, best_q = own, 0.0
    for entry in accept.split(","):
        media, *parameters = (field.strip().lower() for field in entry.split(";"))
        offered = own if media in ("*/*", "application/*") else CONTENT_TYPES.get(media)
        q = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
        # An entry with a q that is no q-value is skipped.
        if offered in (JSON, MSGPACK) and re.fullmatch(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?", q) and float(q) > best_q:
            best, best_q = offered, float(q)
    return ReplyForm(best, "openpi")


def decode(request: Request) -> tuple[dict[str, Any], ReplyForm]:
    """The request's mapping and the form of its reply.

    Keys are str. Values are numeric np.ndarray (kinds b, i, u, f; any byte order; read-only views of the body where
    possible), None, bool, int (of 64 bits), float (NaN and infinities included), str, bytes, lists and mappings. Forms
    keep their flat part names: "video.KEY" is bytes, or a list of bytes when repeated.

    Raises Problem: 400 undecodable, 413 too many values, 415 unknown content type, 422 an array or part that breaks
    its own rules. Pointers name the field as the client sent it.
    """
    kind, form = _kind(request), reply_form(request)
    coding = request.header("content-encoding")
    if coding is not None and coding.strip().lower() != "identity":
        raise Problem(415, f"Expected a body without compression; came Content-Encoding {quote(coding)}. JPEG or PNG "
                      "files make bodies small.")  # fmt: skip
    if kind is None:
        sent = request.header("content-type")
        came = f"the content type {quote(sent)}" if sent else "no content type"
        raise Problem(415, f"Expected one of {', '.join(CONTENT_TYPES)}; came {came}. Set the Content-Type header.")
    if kind == MULTIPART:
        return _form(request.parts), form
    if not request.parts or (len(request.parts) == 1 and not request.parts[0].value):
        raise Problem(400, f"Expected an observation as {kind}; came an empty body.")
    if len(request.parts) > 1:
        raise Problem(400, "Expected one body; came other parts or query parameters too. Put all fields in the body.")
    if kind == JSON:
        tree = _json(request.parts[0].value, _Count())
    else:
        tree, form = _msgpack(request.parts[0].value, form)
    if not isinstance(tree, dict):
        raise Problem(400, f"Expected a mapping at the top of the body; came {_kind_of(tree)}.")
    return tree, form


def header_deadline(request: Request) -> float | None:
    """Unix time in seconds: X-Request-Start, as the client or a proxy stamps it, and X-Request-Timeout-Ms after that.

    None without X-Request-Timeout-Ms. TorchServe does not tell how long a request has waited in its queue.
    Raises Problem 400 where the two headers do not say it.
    """
    timeout, start = request.header("x-request-timeout-ms"), request.header("x-request-start")
    if timeout is None:
        return None
    if not re.fullmatch("[0-9]{1,7}", timeout, re.ASCII):
        raise Problem(400, f"The header X-Request-Timeout-Ms must be whole milliseconds, up to 9999999; came "
                      f"{quote(timeout)}.")  # fmt: skip
    # Seconds as nginx ("t=${msec}") or Python's time.time() writes them, milliseconds or microseconds.
    stamp = re.fullmatch(r"(?:t=)?([0-9]{10})(?:\.([0-9]{1,9})|([0-9]{3}|[0-9]{6}))?", start or "", re.ASCII)
    if stamp is None:
        raise Problem(
            400, "X-Request-Timeout-Ms counts from the header X-Request-Start, which must be a Unix time such as "
            f"t=1700000000.250; came {quote(start) if start else 'none'}. Let the client or a proxy set it, or send "
            "options.deadline_ms.",
        )  # fmt: skip
    return float(f"{stamp[1]}.{stamp[2] or stamp[3] or 0}") + int(timeout) / 1000


def encode_reply(form: ReplyForm, actions: dict[str, np.ndarray], info: dict[str, Any]) -> tuple[str, bytes]:
    """The content type and body of {"actions": ..., "info": ...}.

    JSON writes arrays as nested lists that give every float32 back exactly. In msgpack keys are str, but the keys
    inside an OpenPI array are bytes, the only ones that openpi-client reads. `info` holds plain values.
    Raises Problem 500 where a value cannot be written in that encoding (NaN in JSON, say).
    """
    try:
        if form.content_type == MSGPACK:
            write = write_gr00t if form.arrays == "gr00t" else write_openpi
            reply = {"actions": {key: write(array) for key, array in actions.items()}, "info": info}
            return MSGPACK, msgpack.packb(reply)
        reply = {"actions": {key: array.tolist() for key, array in actions.items()}, "info": info}
        return JSON, json.dumps(reply, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, OverflowError):
        raise Problem(500, f"The reply could not be written as {form.content_type}.") from None


def encode_problem(problem: Problem, request_id: str | None = None) -> tuple[str, bytes]:
    """The content type and ASCII body of an RFC 9457 problem, with the request's id where there is one."""
    body = {"type": "about:blank", "title": problem.title, "status": problem.status, "detail": problem.detail}
    if problem.pointer is not None:
        body["pointer"] = problem.pointer
    if request_id is not None:
        body["request_id"] = request_id
    return PROBLEM, json.dumps(body).encode("ascii")


@functools.lru_cache(maxsize=1024)  # robots send the same fields at every step
def pointer(*keys: str | int) -> str:
    """The RFC 6901 pointer to a field: pointer("state", "a/b") == "/state/a~1b"."""
    return "".join(["/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys])


def quote(text: str | bytes, limit: int = 80) -> str:
    """A client's text for an error's detail: at most `limit` characters of it, ASCII-escaped and in quotes."""
    return ascii(text[:limit]) + ("..." if len(text) > limit else "")


def _kind(request: Request) -> str | None:
    return CONTENT_TYPES.get((request.header("content-type") or "").partition(";")[0].strip().lower())


def _refuse(path: tuple[str | int, ...], text: str, status: int = 422) -> NoReturn:
    where = pointer(*path)
    raise Problem(status, f"{quote(where)}: {text}" if path else text, where or None)


def _kind_of(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bytes: "bytes", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "an array" if isinstance(value, np.ndarray) else "a number")


# ---- The encodings ----


class _Count:
    """What one body holds so far; 413 beyond the limits."""

    def __init__(self) -> None:
        self.values = self.lists = self.keys = 0

    def add(self, values: int, lists: int, keys: int) -> None:
        self.values, self.lists, self.keys = self.values + values, self.lists + lists, self.keys + keys
        if self.values <= MAX_VALUES and self.lists <= MAX_LISTS and self.keys <= MAX_KEYS:
            return
        for count, most, name in (
            (self.values, MAX_VALUES, "values"),
            (self.lists, MAX_LISTS, "lists"),
            (self.keys, MAX_KEYS, "keys"),
        ):
            if count > most:
                raise Problem(413, f"More than {most} {name} in one body. Send images and states as arrays or files.")

    def mapping(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self.add(0, 0, len(pairs))
        return _mapping(pairs)


def _json(text: bytes | bytearray, count: _Count, *path: str) -> Any:
    """The checked value of a JSON text; `path` is where it stands when it is a part of a form."""
    try:
        lists = text.count(b"[")
        count.add(text.count(b",") + lists + text.count(b"{"), lists, 0)  # before anything is made
        tree = json.loads(text.decode("utf-8"), object_pairs_hook=count.mapping)
    except Problem as problem:  # from what does not know where it is
        _refuse(path, problem.detail, problem.status)
    except UnicodeDecodeError as error:
        _refuse(path, f"JSON must be UTF-8; byte {error.start} is not.", 400)
    except json.JSONDecodeError as error:
        _refuse(path, f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}.", 400)
    except RecursionError:
        _refuse(path, f"JSON nested deeper than {MAX_DEPTH} levels.", 400)
    except ValueError:  # Python's own limit on the digits of an integer
        _refuse(path, "JSON with an integer of more than 64 bits.", 400)
    _check(tree, path)
    return tree


def _msgpack(body: bytes | bytearray, form: ReplyForm) -> tuple[Any, ReplyForm]:
    """The checked value of a msgpack body, arrays made; the reply's arrays follow the request's."""
    count = _Count()
    marks: dict[str, bool] = {}  # of wrapped arrays, and whether one of them could not be made

    def listed(items: list[Any]) -> list[Any]:
        count.add(1 + len(items), 1, 0)
        return items

    def mapped(pairs: list[tuple[Any, Any]]) -> Any:
        mapping = count.mapping(pairs)
        for mark, read in _WRAPPERS.items():
            if mark in mapping:
                try:
                    array = read(mapping, ())
                    marks.setdefault(mark, False)
                    return array
                except Problem:  # said below, with its path
                    marks[mark] = True
                    break
        return mapping

    try:
        tree = msgpack.unpackb(
            body,
            object_pairs_hook=mapped,
            list_hook=listed,
            strict_map_key=False,  # _mapping says more about a bad key
            max_array_len=MAX_LIST,
            max_map_len=MAX_LIST,
        )
    except msgpack.ExtraData:
        raise Problem(400, "Bytes follow the msgpack message. Send one message a request.") from None
    except UnicodeDecodeError:
        raise Problem(400, "msgpack with text that is not UTF-8. Send bytes as bin.") from None
    except (msgpack.StackError, RecursionError):
        raise Problem(400, f"msgpack nested deeper than {MAX_DEPTH} levels.") from None
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, MemoryError) as error:
        if "exceeds max_" in str(error):
            raise Problem(413, f"A msgpack list or mapping of more than {MAX_LIST} items. Send an array.") from None
        raise Problem(400, "Not msgpack, or cut short.") from None
    _check(tree, ())
    if any(marks.values()):
        _refuse_first_array(tree, ())
    return tree, ReplyForm(form.content_type, "gr00t" if "__ndarray_class__" in marks else "openpi")


def _form(parts: list[Part]) -> dict[str, Any]:
    """The mapping of a form's parts; the names "video.KEY", "state.KEY" and "options" decide how a part is read."""
    if not parts:
        raise Problem(400, "Expected form parts (video.KEY, state.KEY, prompt); came an empty form.")
    mapping: dict[str, Any] = {}
    count = _Count()
    count.add(0, 0, len(parts))
    for part in parts:
        name, value = _key(part.name), bytes(part.value)
        camera = name.startswith(("video.", "images."))
        if name in mapping and not camera:
            _refuse((name,), "this part came twice. Only video.KEY may repeat, one part a frame.", 400)
        if camera:
            mapping.setdefault(name, []).append(value)
        elif name.startswith("state."):
            is_npy = value.startswith(npy_format.MAGIC_PREFIX)
            mapping[name] = _npy(value, (name,)) if is_npy else _json(value, count, name)
            if not isinstance(mapping[name], np.ndarray | list | int | float) or isinstance(mapping[name], bool):
                _refuse((name,), f"expected a .npy file or a JSON list or number; came {_kind_of(mapping[name])}.")
        elif name == "options":
            mapping[name] = _json(value, count, name)
            if not isinstance(mapping[name], dict):
                _refuse((name,), f"expected a JSON mapping; came {_kind_of(mapping[name])}.")
        else:
            try:
                mapping[name] = value.decode("utf-8")
            except UnicodeDecodeError:
                _refuse((name,), "expected UTF-8 text. Camera files go in parts named video.KEY.", 400)
    cameras = (name for name in list(mapping) if name.startswith(("video.", "images.")))
    return mapping | {name: mapping[name][0] for name in cameras if len(mapping[name]) == 1}


# ---- Keys and values ----


# As openpi-client writes them.
_ARRAY_KEYS = {name.encode(): name for name in ("__ndarray__", "data", "dtype", "shape")}


def _key(raw: Any) -> str:
    if not isinstance(raw, str | bytes):
        raise Problem(400, f"Keys must be text; came {_kind_of(raw)} as a key.")
    try:
        key = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        key.encode("utf-8")  # JSON can spell half a surrogate pair, which nothing later could encode
    except UnicodeError:
        raise Problem(400, f"Keys must be UTF-8 text; came the key {quote(raw)}.") from None
    if len(key) > MAX_KEY:
        raise Problem(400, f"A key of {len(key)} characters; at most {MAX_KEY} are taken. It starts {quote(key, 40)}.")
    return key


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    try:  # the short way, for nearly all
        mapping = dict(pairs)
        if len(mapping) == len(pairs):
            if mapping.keys() == _ARRAY_KEYS.keys():
                return {name: mapping[raw] for raw, name in _ARRAY_KEYS.items()}
            joined = "".join(mapping)
            if joined.isascii() and len(joined) <= MAX_KEY:
                return mapping
    except TypeError:  # a key that is no text
        pass
    mapping = {}
    for raw, value in pairs:
        key = _key(raw)
        if key in mapping:
            raise Problem(400, f"The key {quote(key)} came twice in one mapping (as text or as bytes). Send it once.")
        mapping[key] = value
    return mapping


def _check(tree: Any, path: tuple[str | int, ...]) -> None:
    """Refuses what no observation holds: too deep nesting, integers over 64 bits, half surrogate pairs, extensions.

    Walks level by level and keeps no paths: a hostile body may hold half a million lists. Where something is wrong,
    `_refuse_first` walks once more, to name it.
    """
    level, depth = [tree], len(path)
    while level:
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict or kind is list:
                items = value.values() if kind is dict else value
                kinds = set(map(type, items))
                wrong = depth >= MAX_DEPTH and bool(kinds)
                if not kinds <= _PLAIN:  # the bulk of a large body is lists of numbers
                    below += [item for item in items if type(item) not in _HARMLESS]
                elif int in kinds:
                    wrong = wrong or not all([-(2**63) <= item < 2**64 for item in items if type(item) is int])
            else:
                wrong = bool(_unfit(value))
            if wrong:
                _refuse_first(tree, path)
        level, depth = below, depth + 1


_HARMLESS = {bool, float, bytes, np.ndarray, type(None)}
_PLAIN = _HARMLESS | {int}


def _refuse_first(value: Any, path: tuple[str | int, ...]) -> None:
    """Refuses the first value that is unfit, by its path."""
    if len(path) > MAX_DEPTH:
        _refuse(path, f"nested deeper than {MAX_DEPTH} levels.", 400)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_first(item, (*path, key))
    elif reason := _unfit(value):
        _refuse(path, reason, 400)


def _unfit(value: Any) -> str:
    """Why a single value is refused, or nothing."""
    if isinstance(value, str):
        try:
            if not value.isascii():
                value.encode("utf-8")
        except UnicodeEncodeError:
            return "text with half a surrogate pair, which is not Unicode."
    elif isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else "an integer of more than 64 bits."
    elif value is not None and not isinstance(value, float | bytes | np.ndarray):
        return "msgpack extension types and timestamps are not taken. Send numbers, text or arrays."
    return ""


def _refuse_first_array(value: Any, path: tuple[str | int, ...]) -> None:
    """Refuses the first wrapped array that cannot be made, by its path."""
    if isinstance(value, dict):
        for mark, read in _WRAPPERS.items():
            if mark in value:
                read(value, path)
                raise AssertionError("this array was not made at first")
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_first_array(item, (*path, key))


# ---- Arrays ----


_known_dtypes: dict[str, np.dtype[Any]] = {}  # of the few texts that _DTYPE lets through


def _dtype(name: Any, path: tuple[str | int, ...]) -> np.dtype[Any]:
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if not isinstance(text, str):
        _refuse(path, f"expected the dtype {DTYPES}; came {_kind_of(text)}.")
    known = _known_dtypes.get(text)
    if known is None:
        # Checked as text: np.dtype would also make records, objects and sub-arrays.
        if not _DTYPE.fullmatch(text):
            _refuse(path, f"expected the dtype {DTYPES}; came {quote(text)}.")
        known = _known_dtypes[text] = np.dtype(text)
    return known


def _array(
    data: bytes, offset: int, dtype: np.dtype[Any], shape: list[Any], order: Any, path: tuple[str | int, ...]
) -> np.ndarray:
    """The array on data[offset:], once its size is known to be right (in Python's integers, which cannot overflow)."""
    if len(shape) > MAX_RANK:
        _refuse(path, f"an array of {len(shape)} axes; at most {MAX_RANK} are taken.")
    if not all([type(length) is int and length > 0 for length in shape]):
        _refuse(path, "expected a shape of whole numbers above zero.")
    need, came = math.prod(shape) * dtype.itemsize, len(data) - offset
    if need != came:
        _refuse(path, f"shape {quote(str(shape))} of {dtype.name} does not fit the {came} bytes of data that came.")
    array = np.frombuffer(data, dtype, offset=offset).reshape(shape, order=order)
    return array if not offset or array.flags.aligned else array.copy(order)  # after an odd .npy header it is not


def _openpi(wrapper: dict[str, Any], path: tuple[str | int, ...]) -> np.ndarray:
    data, shape = wrapper.get("data"), wrapper.get("shape")
    if not isinstance(data, bytes) or not isinstance(shape, list):
        _refuse(path, "expected an array as {__ndarray__: true, data: bytes, dtype: text, shape: list of integers}.")
    return _array(data, 0, _dtype(wrapper.get("dtype"), path), shape, "C", path)


def _openpi_scalar(wrapper: dict[str, Any], path: tuple[str | int, ...]) -> bool | int | float:
    data, dtype = wrapper.get("data"), _dtype(wrapper.get("dtype"), path)
    if dtype.kind == "b" and isinstance(data, bool):
        return data
    if isinstance(data, int | float) and not isinstance(data, bool):
        if dtype.kind == "f":
            return float(data)
        if dtype.kind in "iu" and isinstance(data, int) and np.iinfo(dtype).min <= data <= np.iinfo(dtype).max:
            return data
    _refuse(path, f"expected data that is one {dtype.name}; came {_kind_of(data)} that is none.")


def _gr00t(wrapper: dict[str, Any], path: tuple[str | int, ...]) -> np.ndarray:
    data = wrapper.get("as_npy")
    if not isinstance(data, bytes):
        _refuse(path, "expected an array as {__ndarray_class__: true, as_npy: bytes of a .npy file}.")
    return _npy(data, path)


def _npy(data: bytes, path: tuple[str | int, ...]) -> np.ndarray:
    file = io.BytesIO(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = npy_format.read_magic(file)
            if version == (1, 0):
                shape, fortran, dtype = npy_format.read_array_header_1_0(file, max_header_size=MAX_NPY_HEADER)  # type: ignore
            elif version in ((2, 0), (3, 0)):  # 3 differs in the names of record fields only, which are refused
                shape, fortran, dtype = npy_format.read_array_header_2_0(file, max_header_size=MAX_NPY_HEADER)  # type: ignore
            else:
                raise ValueError("unknown version")
    except Exception:  # on hostile text Python's parser raises more kinds than it documents
        _refuse(path, "not a .npy file that numpy.save writes (version 1 to 3, one plain array).")
    # .str of a record or sub-array names its bytes only ("|V8"), so neither passes.
    return _array(data, file.tell(), _dtype(dtype.str, path), list(shape), "F" if fortran else "C", path)


_WRAPPERS = {"__ndarray__": _openpi, "__npgeneric__": _openpi_scalar, "__ndarray_class__": _gr00t}


def write_openpi(array: np.ndarray) -> dict[bytes, Any]:
    """An array as openpi-client's msgpack_numpy writes it."""
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def write_gr00t(array: np.ndarray) -> dict[str, Any]:
    """An array as GR00T's own client writes it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}
