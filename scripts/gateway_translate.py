"""What a robot sends -> what the checkpoint takes, and what it answers -> what the robot reads."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from handler.observation import MAX_SEED
from handler.problem import TITLES, Problem
from handler.wire import MAX_KEY, MSGPACK, PROBLEM, Part, Request, decode, pointer, write_openpi
from scripts.gateway_upstream import Reply

Fields = dict[str, Any]
RANKS = {"video": 3, "state": 1}  # axes of one step of what may come with earlier ones
MAX_HISTORY = 64 << 20  # bytes of one camera's earlier frames
CONTROL = {"endpoint", "session_id", "options"}  # what of a message is no observation
MAX_CONTROL = 1 << 16  # bytes of one of these in an ordinary message
MAX_ENTRIES = 256  # of an ordinary message: each is looked at in Python


class Translation:
    """Translates by the gateway's settings and the server's contract.

    contract: what the management API's describe gives, see `Gr00tPolicy.describe`.
    key_map: {robot's key: the checkpoint's as "video.KEY" or "state.KEY", or a list of states to cut the value into}.
    """

    def __init__(
        self, contract: dict[str, Any], tag: str | None, key_map: dict[str, str | list[str]], steps_per_request: int
    ) -> None:
        self.tag = tag or contract.get("default_embodiment")
        self.embodiments: dict[str, Any] = contract["embodiments"]
        self.key_map, self.steps_per_request = key_map, steps_per_request
        if self.tag is not None and self.tag not in self.embodiments:
            raise ValueError(f"embodiment_tag: the server has no {self.tag!r}; it has {', '.join(self.embodiments)}")

    def default(self) -> tuple[str, dict[str, Any]]:
        """The tag and contract of the embodiment that observations are of when they name none, or of the first."""
        tag = self.tag or next(iter(self.embodiments))
        return tag, self.embodiments[tag]

    def embodiment(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """The contract of the embodiment that an observation is of; None when it names none that there is."""
        options = fields.get("options")
        tag = options.get("embodiment_tag") if isinstance(options, Mapping) else None
        tag = self.tag if tag is None else tag
        return self.embodiments.get(tag) if isinstance(tag, str) else None

    def fields(self, sent: Mapping[str, Any], episode: Episode) -> tuple[Fields, History]:
        """The observation in the server's terms: keys mapped, embodiment named, earlier steps put before the last; and
        what the episode is to remember once it is answered.

        sent: decoded by `handler.wire`. What is wrong with it otherwise, the server says.
        Raises Problem 422: a mapped value that cannot be cut as the key map says, or that comes under two names.
        """
        out: Fields = {}
        options = sent.get("options")
        if self.tag is not None and (options is None or isinstance(options, Mapping)):
            out["options"] = self._named(options)
        embodiment = self.embodiment({**sent, **out})
        for name, value in sent.items():
            target = self.key_map.get(name, name)
            if name == "options" and "options" in out:
                continue
            new = self._cut(name, value, target, embodiment) if isinstance(target, list) else {target: value}
            if twice := new.keys() & out.keys():
                raise Problem(422, f"{', '.join(sorted(twice))} is given twice, here by the gateway's key map",
                              pointer(name))  # fmt: skip
            out.update(new)
        return out, episode.complete(out, embodiment, self.steps_per_request) if embodiment else {}

    def passes(self, outline: Outline) -> bytes | None:
        """The message as the server takes it, its arrays unread; None where it must be read for that: keys to map,
        earlier steps to put before, or anything out of the ordinary."""
        options, embodiment = outline.options, self.embodiment({"options": outline.options})
        if embodiment is None or self.key_map.keys() & outline.entries.keys():
            return None
        if any(len(embodiment["delta_indices"][modality]) > 1 for modality in RANKS):
            return None
        if self.tag is not None:
            options = self._named(options)
        if options == outline.options and not outline.entries.keys() & {"endpoint", "session_id"}:
            return outline.body
        packer = msgpack.Packer()
        kept = [outline.body[begin:end] for name, (begin, end) in outline.entries.items() if name not in CONTROL]
        own = [] if options is None else [packer.pack("options"), packer.pack(options)]
        return b"".join([packer.pack_map_header(len(kept) + bool(own)), *own, *kept])

    def _named(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Options that name an embodiment: the robot's own, or the one by default."""
        return {"embodiment_tag": self.tag, **{k: v for k, v in (options or {}).items() if v is not None}}

    def robots_own(self, problem: Problem) -> Problem:
        """The problem with its pointer in the robot's terms, where the key map gave the field another name."""
        names = {target: name for name, targets in self.key_map.items()
                 for target in (targets if isinstance(targets, list) else [targets])}  # fmt: skip
        first, *rest = (part.replace("~1", "/").replace("~0", "~") for part in (problem.pointer or "/")[1:].split("/"))
        if first in names:  # as it was mapped: "video.KEY"
            where = pointer(names[first], *rest)
        elif rest and f"{first}.{rest[0]}" in names:  # how the server names a field that is missing
            where = pointer(names[f"{first}.{rest[0]}"], *rest[1:])
        else:
            return problem
        return Problem(problem.status, problem.detail, where, problem.retry_after)

    @staticmethod
    def _cut(name: str, value: Any, targets: list[str], embodiment: dict[str, Any] | None) -> Fields:
        """A concatenated state, cut along its last axis by the widths of these keys."""
        states = embodiment["state"] if embodiment else {}
        widths = [states.get(target.removeprefix("state."), {}).get("width") for target in targets]
        if None in widths:
            raise Problem(422, f"the gateway's key map cuts this into {', '.join(targets)}, but the embodiment has not "
                          "all of these states", pointer(name))  # fmt: skip
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            array = np.array(None)
        if array.dtype.kind not in "fiu":
            raise Problem(422, f"expected {sum(widths)} numbers; came something else", pointer(name))
        if array.ndim == 0 or array.shape[-1] != sum(widths):
            raise Problem(422, f"expected {sum(widths)} numbers ({', '.join(targets)}); came the shape "
                          f"{list(array.shape)}", pointer(name))  # fmt: skip
        return dict(zip(targets, np.split(array, np.cumsum(widths)[:-1], axis=-1), strict=True))


@dataclass(frozen=True)
class Outline:
    """A message's top level without its arrays.

    entries: where in `body` each key with its value stands. options, session: see the message; None without.
    """

    body: bytes
    entries: dict[str, tuple[int, int]]
    options: dict[str, Any] | None
    session: str | int | None


def outline_of(body: bytes) -> Outline | None:
    """The outline of an ordinary observation; None for all else, about which `handler.wire.decode` says more.

    Ordinary: a msgpack mapping of text keys, options and session plain and small, no endpoint but `infer`. The other
    values are skipped, not made.
    """
    reader = msgpack.Unpacker(max_buffer_size=0, strict_map_key=False)
    reader.feed(body)
    entries: dict[str, tuple[int, int]] = {}
    try:
        count = reader.read_map_header()
        if count > MAX_ENTRIES:
            return None
        for _ in range(count):
            begin = reader.tell()
            reader.skip()
            name = msgpack.unpackb(body[begin : min(reader.tell(), begin + MAX_KEY)])
            reader.skip()
            if not isinstance(name, str) or name in entries:
                return None
            entries[name] = begin, reader.tell()
        if reader.tell() != len(body) or any(end - begin > MAX_CONTROL for name, (begin, end) in entries.items()
                                             if name in CONTROL):  # fmt: skip
            return None
        control: dict[str, Any] = {}
        for name in CONTROL & entries.keys():
            begin, end = entries[name]
            control |= msgpack.unpackb(b"\x81" + body[begin:end], strict_map_key=False)  # a mapping of one
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError):
        return None
    options, session = control.get("options"), control.get("session_id")
    if not isinstance(options, dict | None) or not isinstance(session, str | int | None):
        return None
    plain = all(isinstance(key, str) for key in options or ())
    if not plain or isinstance((options or {}).get("deadline_ms"), dict) or control.get("endpoint", "infer") != "infer":
        return None
    return Outline(body, entries, options, session)


History = dict[str, deque[Any]]  # by "MODALITY.KEY"


class Episode:
    """What one connection has sent since its last reset: earlier frames and states, where the checkpoint wants them.

    Only what was answered counts: a robot sends an observation again that was refused.
    """

    def __init__(self) -> None:
        self.history: History = {}

    def reset(self) -> None:
        """A new episode begins: nothing of the last one counts."""
        self.history.clear()

    def complete(self, fields: Fields, embodiment: dict[str, Any], steps_per_request: int) -> History:
        """Puts earlier steps before values that come without a time axis: (H, W, 3) or a file -> T of them, (D,) -> T.

        The step `delta` before now is that of the request `delta / steps_per_request` ago, or the first there is.
        Returns the history with this step, for `history.update` once it is answered.
        """
        news: History = {}
        for modality, rank in RANKS.items():
            deltas = embodiment["delta_indices"][modality]
            if len(deltas) == 1:
                continue
            ago = [round(-delta / steps_per_request) for delta in deltas]
            keys = embodiment["video"]["keys"] if modality == "video" else list(embodiment["state"])
            for key in keys:
                for holder, name in _places(fields, modality, key):
                    now = holder[name]
                    if modality == "state" and isinstance(now, int | float | list):
                        with contextlib.suppress(ValueError, TypeError):  # then the server says what is wrong
                            now = np.atleast_1d(np.asarray(now, np.float32))
                    file = modality == "video" and isinstance(now, bytes | str)
                    if file or (isinstance(now, np.ndarray) and now.ndim == rank):
                        past = news[f"{modality}.{key}"] = self._with(f"{modality}.{key}", now, max(ago) + 1)
                        steps = [past[max(0, len(past) - 1 - n)] for n in ago]
                        holder[name] = steps if file else np.stack(steps)
        return news

    def _with(self, key: str, now: Any, length: int) -> deque[Any]:
        """The steps of this key so far and now. Raises Problem 413 when they would take too much."""
        if (len(now) if isinstance(now, bytes | str) else now.nbytes) * length > MAX_HISTORY:
            raise Problem(413, f"the gateway would have to keep {length} of these frames, which is too much: send "
                          "smaller ones, or all that the checkpoint takes", pointer(key))  # fmt: skip
        past = self.history.get(key, deque())
        if past and not (type(past[-1]) is type(now) and np.shape(past[-1]) == np.shape(now)):
            past = deque()  # another camera: earlier frames do not fit
        # A copy: the message that an array is a view of may go.
        return deque([*past, now.copy() if isinstance(now, np.ndarray) else now], maxlen=length)


def _places(fields: Fields, modality: str, key: str) -> list[tuple[Fields, str]]:
    """Where in an observation a key's value stands: nested or flat, in the forms that the server takes."""
    names = ("video", "images") if modality == "video" else ("state",)
    flat = [(fields, f"{name}.{key}") for name in names if f"{name}.{key}" in fields]
    nested = []
    for name in names:
        if isinstance(fields.get(name), dict) and key in fields[name]:
            fields[name] = dict(fields[name])
            nested.append((fields[name], key))
    return flat + nested


def pack(value: Any, write: Callable[[np.ndarray], Any] = write_openpi) -> bytes:
    """A message for OpenPI clients and for the server, or with arrays in another form."""

    def array(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return write(value)
        raise TypeError(type(value).__name__)

    packed: bytes = msgpack.packb(value, default=array)
    return packed


def deadline_of(options: Any) -> float | None:
    """Unix seconds of `options.deadline_ms`, when it is a number (if it is none, the server says so)."""
    value = options.get("deadline_ms") if isinstance(options, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_SEED:
        return None
    return value / 1000


def unpack(body: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The actions, float32 (horizon, width) or (B, horizon, width), and info of the server's msgpack reply."""
    document = msgpack.unpackb(body, strict_map_key=False)
    if any("as_npy" in packed for packed in document["actions"].values()):  # the request had arrays in GR00T's form
        document, _ = decode(Request({"Content-Type": MSGPACK}, [Part("body", "", body)]))
        return document["actions"], document["info"]
    return arrays_of(document["actions"]), document["info"]


def arrays_of(packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that `pack` wrote, of a mapping that msgpack has read."""
    return {key: np.frombuffer(v[b"data"], v[b"dtype"]).reshape(v[b"shape"]) for key, v in packed.items()}


def problem_of(reply: Reply) -> Problem:
    """What went wrong, by an answer that is not 200: the handler's problem, or TorchServe's own words."""
    try:
        body = json.loads(reply.body)
        detail = str(body["detail" if reply.content_type == PROBLEM else "message"])
    except (ValueError, KeyError, TypeError):
        body, detail = {}, f"the server answered {reply.status}"
    status = reply.status if reply.status in TITLES else 500
    wait = reply.headers.get("Retry-After", "")
    return Problem(status, detail, body.get("pointer"), int(wait) if wait.isdecimal() else None)


def in_words(problem: Problem) -> str:
    """A problem as one line, for protocols whose errors are texts."""
    where = f" ({problem.pointer})" if problem.pointer else ""
    return f"{problem.status} {problem.title}: {problem.detail}{where}"


def for_openpi(actions: dict[str, np.ndarray]) -> dict[str, Any]:
    """The actions under their own keys, and all of them side by side as `actions`, in their (modality) order."""
    return {**actions, "actions": np.concatenate(list(actions.values()), axis=-1)}
