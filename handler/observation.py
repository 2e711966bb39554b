"""A request's mapping -> an `Observation` that keeps the checkpoint's contract, or a `Problem` that names the field.

Accepted forms: nested `{video, state, language}` or flat `video.KEY`, `state.KEY`, LANGUAGE_KEY; `images` for `video`;
`prompt` for the instruction. The leading batch axis B may be left out, and B and T together where T is 1.
Changes of dtype that lose nothing are made; others are refused.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handler.embodiment import Embodiment, Float32, valid_pose
from handler.images import decode_image, from_base64
from handler.problem import Problem
from handler.wire import pointer, quote

MAX_SEED = 2**63 - 1
OPTIONS = ("embodiment_tag", "seed", "rtc", "timestamp", "deadline_ms", "prepared_with")
KINDS = {dict: "a mapping", list: "a list", str: "a text", bytes: "bytes", bool: "a boolean", int: "a number",
         float: "a number", type(None): "nothing"}
RTC_OPTIONS = ("action", "overlap_steps", "frozen_steps", "ramp_rate")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for; beyond it, 413.

    Attributes:
        max_rows: rows (B) per request, and per forward.
        max_tokens: tokens per row, images included.
        max_prompt_chars: characters per instruction.
        max_image_pixels: pixels of all frames of a request together, once decoded.
    """

    max_rows: int = 32
    max_tokens: int = 2048
    max_prompt_chars: int = 4096
    max_image_pixels: int = 33554432


@dataclass(frozen=True)
class Rtc:
    """Real-time chunking: begin with the previous chunk's last `overlap_steps` rows, repeat `frozen_steps` of them."""

    action: dict[str, Float32]  # (B, horizon, width), physical units
    overlap_steps: int
    frozen_steps: int
    ramp_rate: float


@dataclass(frozen=True)
class Observation:
    """A checked request of B rows of one embodiment.

    Attributes:
        video: {camera: uint8 (B, T, H, W, 3)}.
        state: {key: float32 (B, T, D)}, finite, physical units.
        instructions: B strings.
        seed: row i draws its noise from seed + i; None leaves the choice to the server.
        deadline: Unix time in seconds after which nobody wants the actions any more, or None.
        prepared_with: the image recipe (see `ImageRecipe.describe`) that the client took the frames through, or None.
        batched: the request's arrays had the B axis, so the reply's have it.
        where: pointers to the client's own fields, for problems found later: "video.CAMERA", "language".
    """

    embodiment: Embodiment
    video: dict[str, NDArray[np.uint8]]
    state: dict[str, Float32]
    instructions: list[str]
    seed: int | None = None
    rtc: Rtc | None = None
    timestamp: float | int | str | None = None
    deadline: float | None = None
    prepared_with: dict[str, Any] | None = None
    batched: bool = True
    where: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.instructions)


def check(
    fields: Mapping[str, Any], embodiments: Mapping[str, Embodiment], default_tag: str | None, limits: Limits
) -> Observation:
    """Checks a request's mapping against the contract of its embodiment.

    Raises:
        Problem: 422 breaks the contract, 413 over a limit.
    """
    options = fields.get("options")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise Problem(422, f"options must be a mapping, got {_kind(options)}", pointer("options"))
    _only_known(options, OPTIONS, "options", ("options",))
    embodiment = _embodiment(options, embodiments, default_tag)
    given = _collect(fields, embodiment)

    video, state, axes = {}, {}, {}
    pixels = limits.max_image_pixels
    for camera in embodiment.cameras:
        where, value = _take(given, "video", camera, embodiment)
        video[camera], axes[where] = _frames(value, where, embodiment.frames, pixels, limits.max_rows)
        pixels -= video[camera].size // 3
    for group in embodiment.states:
        where, value = _take(given, "state", group.key, embodiment)
        state[group.key], axes[where] = _state(value, where, embodiment.state_steps, group.width)
    where, value = _take(given, "language", embodiment.language_keys[0], embodiment)
    instructions, batch = _instructions(value, where, limits)

    rows = _rows(axes, limits)
    if batch is None:
        instructions = instructions * rows  # one text for a whole batch of simulators
    elif batch != rows:
        raise Problem(422, f"the instruction has {batch} rows (B), others have {rows}; all must agree", where)
    if not (np.abs(np.concatenate(list(state.values()), axis=-1)) <= embodiment.state_bound).all():
        for group in embodiment.states:
            _within(state[group.key], given["state", group.key][0], group.bound)
    for action in embodiment.actions:
        if action.pose and not valid_pose(state[action.relative_to or ""][:, -1], action.pose):
            raise Problem(
                422,
                f"state {action.relative_to!r} holds no rotation: the six numbers after x, y, z are the first two rows "
                "of a rotation matrix and must be neither zero nor parallel",
                given["state", action.relative_to or ""][0],
            )
    return Observation(
        embodiment=embodiment,
        video=video,
        state=state,
        instructions=instructions,
        seed=_seed(options, rows),
        rtc=_rtc(options, embodiment, rows),
        timestamp=_timestamp(options),
        deadline=_deadline(options),
        prepared_with=_prepared_with(options),
        batched=any(size is not None for size in axes.values()),
        where={**{f"{m}.{k}": at for (m, k), (at, _) in given.items() if m != "language"}, "language": where},
    )


def takes_decoding(fields: Mapping[str, Any]) -> bool:
    """Whether a request's images come as files or lists, which take far longer to make frames of than arrays."""
    for name, value in fields.items():
        if name.partition(".")[0] in ("video", "images"):
            inner = value.values() if isinstance(value, Mapping) else (value,)
            if not all(isinstance(frames, np.ndarray) for frames in inner):
                return True
    return False


# ------------------------------------------------------------------------------------------------- fields and options

Given = dict[tuple[str, str], tuple[str, Any]]  # (modality, key) -> (pointer, value)


def _collect(fields: Mapping[str, Any], embodiment: Embodiment) -> Given:
    """Finds every modality key in any of the accepted forms; refuses what is unknown or given twice."""
    given: Given = {}
    states = [group.key for group in embodiment.states]
    known = {"video": embodiment.cameras, "state": states, "language": embodiment.language_keys}

    def put(modality: str, key: Any, value: Any, where: str) -> None:
        if key not in known[modality]:
            raise Problem(
                422,
                f"unknown {modality} key {_show(key)}{_near(key, known[modality])}; embodiment {embodiment.tag!r} "
                f"has {', '.join(known[modality])}",
                where,
            )
        if (modality, key) in given:
            raise Problem(422, f"{modality} key {_show(key)} is given twice", where)
        given[modality, key] = (where, value)

    for name, value in fields.items():
        modality = "video" if name == "images" else name
        if name == "options":
            continue
        if name == "prompt":
            put("language", embodiment.language_keys[0], value, pointer(name))
        elif modality in known:
            if not isinstance(value, Mapping):
                raise Problem(422, f"{name} must be a mapping of keys, got {_kind(value)}", pointer(name))
            for key, inner in value.items():
                put(modality, key, inner, pointer(name, str(key)))
        elif name.startswith("images."):
            put("video", name.removeprefix("images."), value, pointer(name))
        elif name in embodiment.language_keys:
            put("language", name, value, pointer(name))
        elif name.split(".", 1)[0] in known and "." in name:
            modality, key = name.split(".", 1)
            put(modality, key, value, pointer(name))
        elif name.startswith("annotation."):
            put("language", name, value, pointer(name))
        else:
            raise Problem(
                422, f"unknown field {_show(name)}; expected video, state, language (or prompt) and options",
                pointer(name),
            )
    return given


def _take(given: Given, modality: str, key: str, embodiment: Embodiment) -> tuple[str, Any]:
    """A required key's pointer and value."""
    if (modality, key) not in given:
        what = {"video": "camera", "state": "state", "language": "instruction"}[modality]
        also = " (or prompt)" if modality == "language" else ""
        raise Problem(
            422, f"{what} {key!r} is missing; embodiment {embodiment.tag!r} needs it as {modality}.{key}{also}",
            pointer(modality, key),
        )
    return given[modality, key]


def _embodiment(options: Mapping[str, Any], embodiments: Mapping[str, Embodiment], default: str | None) -> Embodiment:
    where = pointer("options", "embodiment_tag")
    tag = options.get("embodiment_tag")
    tag = default if tag is None else tag
    known = ", ".join(embodiments)
    if tag is None:
        raise Problem(422, f"options.embodiment_tag is missing; this server has {known}", where)
    if not isinstance(tag, str) or tag not in embodiments:
        raise Problem(422, f"unknown embodiment {_show(tag)}{_near(tag, embodiments)}; this server has {known}", where)
    return embodiments[tag]


def _rows(axes: dict[str, int | None], limits: Limits) -> int:
    """The one B that all fields agree on; a field without the axis counts as one row."""
    rows = max((batch for batch in axes.values() if batch is not None), default=1)
    for where, batch in axes.items():
        if (batch or 1) != rows:
            raise Problem(422, f"this field has {batch or 1} rows (B), others have {rows}; all must agree", where)
    if rows > limits.max_rows:
        raise Problem(413, f"{rows} rows in one request; at most {limits.max_rows} are allowed, send several requests")
    return rows


def _integer(value: Any, name: str, where: str, low: int, high: int) -> int:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= int(value) <= high:
        raise Problem(422, f"{name} must be a whole number from {low} to {high}, got {_show(value)}", where)
    return int(value)


def _seed(options: Mapping[str, Any], rows: int) -> int | None:
    if options.get("seed") is None:
        return None
    return _integer(options["seed"], "options.seed", pointer("options", "seed"), 0, MAX_SEED - rows + 1)


def _timestamp(options: Mapping[str, Any]) -> float | int | str | None:
    value = options.get("timestamp")
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or (number and -(2**63) <= value < 2**64) or (isinstance(value, str) and len(value) <= 64):
        return value
    raise Problem(
        422, "options.timestamp must be a finite number or a text of at most 64 characters",
        pointer("options", "timestamp"),
    )


def _deadline(options: Mapping[str, Any]) -> float | None:
    value = options.get("deadline_ms")
    if value is None:
        return None
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    # From 1973 to 5138: whoever sends a duration must not get 504 for ever.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e11 <= value < 1e14:
        raise Problem(
            422, f"options.deadline_ms must be a Unix time in milliseconds, got {_show(value)}; for a duration send "
            "the headers X-Request-Timeout-Ms and X-Request-Start", pointer("options", "deadline_ms"),
        )  # fmt: skip
    return float(value) / 1000


def _prepared_with(options: Mapping[str, Any]) -> dict[str, Any] | None:
    value = options.get("prepared_with")
    if value is None:
        return None
    where = ("options", "prepared_with")
    expected = "must be a mapping of numbers and lists of whole numbers, the contract's image_recipe"
    if not isinstance(value, Mapping):
        raise Problem(422, f"options.prepared_with {expected}; got {_kind(value)}", pointer(*where))
    for key, item in value.items():  # arrays would not compare
        if not isinstance(item, (int, float)) and not (isinstance(item, list) and set(map(type, item)) <= {int}):
            raise Problem(422, f"options.prepared_with {expected}; its {_show(key)} is {_kind(item)}",
                          pointer(*where, key))  # fmt: skip
    return dict(value)


def _rtc(options: Mapping[str, Any], embodiment: Embodiment, rows: int) -> Rtc | None:
    rtc = options.get("rtc")
    if rtc is None:
        return None
    if not isinstance(rtc, Mapping):
        raise Problem(422, f"options.rtc must be a mapping, got {_kind(rtc)}", pointer("options", "rtc"))
    _only_known(rtc, RTC_OPTIONS, "options.rtc", ("options", "rtc"))
    for name in RTC_OPTIONS[:2]:
        if name not in rtc:
            raise Problem(422, f"options.rtc.{name} is missing", pointer("options", "rtc", name))
    horizon = embodiment.horizon
    overlap = _integer(
        rtc["overlap_steps"], "options.rtc.overlap_steps", pointer("options", "rtc", "overlap_steps"), 1, horizon
    )
    frozen = _integer(
        rtc.get("frozen_steps", 0), "options.rtc.frozen_steps", pointer("options", "rtc", "frozen_steps"), 0, overlap
    )
    ramp = rtc.get("ramp_rate", 6.0)
    ramp = ramp.item() if isinstance(ramp, (np.ndarray, np.generic)) and np.ndim(ramp) == 0 else ramp
    if isinstance(ramp, bool) or not isinstance(ramp, (int, float)) or not 1e-3 <= ramp <= 1e3:
        raise Problem(
            422, f"options.rtc.ramp_rate must be a number from 0.001 to 1000, got {_show(ramp)}",
            pointer("options", "rtc", "ramp_rate"),
        )
    given, where = rtc["action"], ("options", "rtc", "action")
    if not isinstance(given, Mapping):
        raise Problem(422, f"options.rtc.action must be the previous reply's actions, got {_kind(given)}",
                      pointer(*where))
    _only_known(given, [group.key for group in embodiment.actions], "options.rtc.action", where)
    action = {}
    for group in embodiment.actions:
        at = pointer(*where, group.key)
        if group.key not in given:
            raise Problem(422, f"options.rtc.action has no {group.key!r}; send the whole previous chunk", at)
        value, batch = _state(given[group.key], at, horizon, group.width)
        _within(value, at, group.bound)
        if (batch or 1) != rows:
            raise Problem(422, f"this field has {batch or 1} rows (B), the observation has {rows}", at)
        if group.pose and not valid_pose(value, group.pose):
            raise Problem(422, f"options.rtc.action.{group.key} holds a pose without rotation", at)
        action[group.key] = value
    return Rtc(action, overlap, frozen, float(ramp))


# ------------------------------------------------------------------------------------------------------ video values


def _frames(
    value: Any, where: str, steps: int, max_pixels: int, max_rows: int
) -> tuple[NDArray[np.uint8], int | None]:
    """Arrays or encoded images -> uint8 (B, T, H, W, 3), and B as the client gave it (None without the axis)."""
    encoded = isinstance(value, (bytes, str)) or (isinstance(value, list) and _leaf_types(value) & {bytes, str})
    array = _decode_frames(value, where, max_pixels, max(max_rows, steps)) if encoded else _array(value, where)
    kind = array.dtype.kind
    if not array.size:
        raise Problem(422, f"video is empty: shape {list(array.shape)}", where)
    if kind == "f":
        raise Problem(
            422, f"video is {array.dtype}, expected uint8 from 0 to 255; a float image may mean 0..1 or 0..255, so "
            "convert it on your side", where,
        )
    if kind not in "ui":
        raise Problem(422, f"video is {array.dtype}, expected uint8 from 0 to 255", where)
    array, batch = _with_axes(array, 5, steps, where, "video", _video_shapes(steps))
    channels = array.shape[-1]
    if channels != 3:
        raise Problem(422, f"video has {channels} channels (shape {list(array.shape)}), expected 3, RGB last", where)
    if array.size // 3 > max_pixels:
        raise Problem(413, f"the frames have {array.size // 3} pixels; at most {max_pixels} more are allowed", where)
    if array.dtype != np.uint8:
        if array.min() < 0 or array.max() > 255:
            raise Problem(422, f"video is {array.dtype} with values outside 0..255, expected uint8", where)
        array = array.astype(np.uint8)
    return array, batch


def _decode_frames(value: Any, where: str, max_pixels: int, most: int, depth: int = 0) -> NDArray[np.uint8]:
    """One encoded image, T of them, or B lists of T -> (H, W, 3), (T, H, W, 3) or (B, T, H, W, 3)."""
    if isinstance(value, str):
        value = from_base64(value, where)
    if isinstance(value, bytes):
        return decode_image(value, where, max_pixels)
    if not isinstance(value, list) or depth == 2:
        raise Problem(422, f"expected an encoded image, T of them, or B lists of T, got {_kind(value)}", where)
    if len(value) > most:  # before the first is decoded: half a million tiny images fit into a body
        raise Problem(413, f"a list of {len(value)} images or rows; at most {most} are allowed", where)
    frames: list[NDArray[np.uint8]] = []
    for item in value:
        frames.append(_decode_frames(item, where, max_pixels, most, depth + 1))
        max_pixels -= frames[-1].size // 3
    if len({frame.shape for frame in frames}) != 1:
        raise Problem(422, "the images of one camera must all have one size, as many frames in every row", where)
    return np.stack(frames)


# ------------------------------------------------------------------------------------------------------ state values


def _state(value: Any, where: str, steps: int, width: int) -> tuple[Float32, int | None]:
    """Numbers -> float32 (B, T, width), infinite where they are too large for it, and B as the client gave it."""
    array = _array(value, where)
    if array.dtype.kind not in "iuf":
        raise Problem(422, f"values are {array.dtype}, expected float32 (other floats and integers are converted)",
                      where)
    if array.ndim == 0 and width == 1:
        array = array[None]
    shapes = _state_shapes(steps, width)
    array, batch = _with_axes(array, 3, steps, where, "array", shapes)
    if array.shape[-1] != width or array.shape[0] == 0:
        raise Problem(422, f"shape is {list(np.shape(value))}, expected {shapes}", where)
    if array.dtype.kind in "iu":
        with np.errstate(invalid="ignore"):
            lossy = not np.array_equal(array.astype(np.float32).astype(array.dtype), array)
        if lossy:
            raise Problem(422, f"{array.dtype} values are too large for float32", where)
    if array.dtype != np.float32:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    return np.ascontiguousarray(array), batch


def _within(values: Float32, where: str, bound: NDArray[np.float64]) -> None:
    """Refuses (B, T, width) values that are not finite, or larger than `bound`."""
    bad = np.argwhere(~(np.abs(values) <= bound))
    if len(bad):
        row, step, index = (int(n) for n in bad[0])
        value = values[row, step, index]
        reason = "lies too far outside the checkpoint's statistics" if np.isfinite(value) else "must be a finite number"
        raise Problem(422, f"value {index} of step {step} of row {row} is {value} as float32; it {reason}", where)


@functools.cache
def _state_shapes(steps: int, width: int) -> str:
    return f"(B, {steps}, {width}), or without B" + (f", or ({width},)" if steps == 1 else "")


@functools.cache
def _video_shapes(steps: int) -> str:
    return f"(B, T, H, W, 3) with T = {steps}, or without B" + (", or (H, W, 3)" if steps == 1 else "")


def _instructions(value: Any, where: str, limits: Limits) -> tuple[list[str], int | None]:
    """A text, B texts, or B lists of one text."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    batch = None
    if not isinstance(value, list):
        value = [value]
    else:
        batch = len(value)
        value = [v[0] if isinstance(v, list) and len(v) == 1 else v for v in value]
    if not value:
        raise Problem(422, "the instruction is an empty list, expected one text per row", where)
    for text in value:
        if not isinstance(text, str):
            raise Problem(422, f"the instruction must be a text, or B lists of one text, got {_kind(text)}", where)
        if len(text) > limits.max_prompt_chars:
            raise Problem(413, f"the instruction has {len(text)} characters; at most {limits.max_prompt_chars} are "
                          "allowed", where)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Problem(422, "the instruction holds half of a surrogate pair, which is no text", where) from None
    return list(value), batch


# ----------------------------------------------------------------------------------------------------------- helpers


def _array(value: Any, where: str) -> NDArray[Any]:
    """Numbers or nested lists of numbers -> an array; anything else, or ragged lists, is a problem."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    kinds = _leaf_types(value) if isinstance(value, list) else {type(value)}
    # Looked at before NumPy does: it would pad a list of texts to the longest one, or read "1.5" as a number.
    for kind in kinds - {int, float, np.ndarray}:
        raise Problem(422, f"expected numbers, got {KINDS.get(kind, kind.__name__)}", where)
    try:
        array = np.array(value)
    except (ValueError, OverflowError, TypeError):
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise Problem(
            422, "the numbers do not form an array: rows differ in length, are nested too deep, or a number is too "
            "large", where,
        )
    return array


def _leaf_types(value: list[Any]) -> set[type]:
    """The types of everything in nested lists that is no list itself."""
    types: set[type] = set()
    lists = [value]
    while lists:
        items = lists.pop()
        types |= set(map(type, items))
        if list in types:
            lists += [item for item in items if type(item) is list]
            types.discard(list)
    return types


def _with_axes(array: NDArray[Any], ndim: int, steps: int, where: str, what: str, shapes: str
               ) -> tuple[NDArray[Any], int | None]:
    """Adds the axes that the client left out; returns the array with all `ndim` axes, and B if it was there."""
    shape = array.shape
    batch: int | None = None
    if array.ndim == ndim:
        batch = array.shape[0]
    elif array.ndim == ndim - 1:
        array = array[None]
    elif array.ndim == ndim - 2 and steps == 1:
        array = array[None, None]
    else:
        raise Problem(422, f"{what} has shape {list(shape)}, expected {shapes}", where)
    if array.shape[1] != steps:
        raise Problem(422, f"{what} has shape {list(shape)}, so T = {array.shape[1]}, expected {shapes}", where)
    return array, batch


def _only_known(given: Mapping[str, Any], known: Any, what: str, path: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise Problem(422, f"{what} has no key {_show(key)}{_near(key, known)}; it has {', '.join(known)}",
                          pointer(*path, str(key)))


def _near(key: Any, known: Any) -> str:
    close = difflib.get_close_matches(key.lower()[:200], list(known), n=1) if isinstance(key, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _show(value: Any) -> str:
    """A client's value in a message: short, and ASCII whatever came (numbers have at most 64 bits, see wire)."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return quote(value) if isinstance(value, str) else repr(value)
    return _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {list(value.shape)}"
    return KINDS.get(type(value), type(value).__name__)
