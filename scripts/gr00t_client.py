"""A robot's client of this server, in one file to import or to copy: needs NumPy, requests and msgpack.

    with Gr00tClient("http://127.0.0.1:8080", key_file=".run/key_file.json") as client:
        reply = client.get_action({"video": {...}, "state": {...}, "prompt": "pick up the cup"}, seed=7)
        reply.actions["gripper"]  # float32 (horizon, width), physical units

A policy call changes nothing on the server, so one that failed on the way is sent again, with the same seed, and the
answer is the one that was lost. JPEG frames and the client's own resize need OpenCV, too.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import requests
import urllib3
from numpy.typing import NDArray

WAIT = 0.1  # seconds before the first repetition, on top of Retry-After; each further one waits twice as long
MAX_REPLY = 64 * 2**20  # bytes that are taken of an answer; the server's max_response_size


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        actions: {key: float32 (B, horizon, width)}, physical units; without B where the observation's arrays had none.
        info: who shared the wave, milliseconds, the seed, the checkpoint's hash; see README, Replies.
    """

    actions: dict[str, NDArray[np.float32]]
    info: dict[str, Any]


class Gr00tError(RuntimeError):
    """No actions came. Its text is for people.

    Attributes:
        status: of HTTP; None where no answer came.
        title, detail: what is wrong, in the server's words where it answered.
        pointer: RFC 6901 pointer to the field of the request that is to blame, or None.
        retry_after: seconds after which the server expects to serve again, or None.
    """

    def __init__(
        self, status: int | None, title: str, detail: str, pointer: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{title if status is None else f'{status} {title}'}: {detail}")
        self.status, self.title, self.detail = status, title, detail
        self.pointer, self.retry_after = pointer, retry_after


class BadObservation(Gr00tError):
    """400, 413, 415 or 422: the request itself is at fault; sent again it would fail again."""


class Unauthorized(Gr00tError):
    """The key is wrong, expired or missing: 400 of TorchServe, 401 of the gateway and nginx."""


class Late(Gr00tError):
    """504: the wave began after the deadline; or no answer within `timeout` (status None)."""


class Unavailable(Gr00tError):
    """No connection, a full queue, a worker that died or starts again, nginx with no server or over its limits:
    503, 500 or 507, 502, 429, or None.
    """


class Gr00tClient:
    """Asks one model for actions, over connections that stay open.

    For one thread: requests does not promise that its Session may be shared. Clients are cheap; make one a thread.

    Args:
        url: the inference API, such as http://127.0.0.1:8080.
        key: the inference key; or key_file: TorchServe's key_file.json, which holds it. The file is read again when the
            server refuses the key, as after a restart. The client never renews a key: that would cut off all others.
        embodiment_tag: for every request that does not name its own; None leaves it to the server.
        model: its name in TorchServe.
        timeout: seconds that a call may take, with all repetitions. Only a server that sends its headers bit by bit
            could hold it longer.
        retries: how often a request is sent again.

    `session` is the requests.Session; proxies and certificates are set there. Nothing is taken from the environment
    (HTTP_PROXY, .netrc), since a key or a frame must not go to a proxy that nobody meant.

    Raises:
        OSError, ValueError, KeyError: the key file cannot be read, or has no inference key.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        key: str | None = None,
        key_file: str | Path | None = None,
        embodiment_tag: str | None = None,
        model: str = "gr00t",
        timeout: float = 60.0,
        retries: int = 3,
    ) -> None:
        if key is not None and key_file is not None:
            raise ValueError("give a key or a key file, not both")
        self.url = f"{url.rstrip('/')}/predictions/{model}"
        self.key_file = None if key_file is None else Path(key_file)
        self.key = read_key(self.key_file) if self.key_file else key
        self.embodiment_tag, self.timeout, self.retries = embodiment_tag, timeout, retries
        self.session = requests.Session()
        self.session.trust_env = False

    def __enter__(self) -> Gr00tClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self.session.close()

    def get_action(
        self,
        observation: Mapping[str, Any],
        *,
        seed: int | None = None,
        deadline: float | None = None,
        rtc: Mapping[str, Any] | None = None,
        embodiment_tag: str | None = None,
        timestamp: float | str | None = None,
        jpeg: int | None = None,
        prepare_with: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """The actions of one observation.

        Args:
            observation: any form of README's "From a robot", NumPy arrays in it: video uint8 (B, T, H, W, 3), state
                float32 (B, T, D), and the instruction; B, or B and T, may be left out. It is not changed. Its
                `options` stand where the arguments below are None.
            seed: of the noise; row i draws from seed + i. Without one it is drawn here, once for all repetitions.
            deadline: seconds from now. A wave that begins later computes nothing for this request and `Late` is raised;
                nor is the request sent again then. The clocks of robot and server must agree. How long to wait for
                an answer is `timeout`'s matter: a forward that began in time may end after the deadline.
            rtc: real-time chunking: `action` (the last reply's actions), `overlap_steps`, `frozen_steps`, `ramp_rate`.
            embodiment_tag: in place of the client's.
            timestamp: echoed in the reply's info.
            jpeg: sends frames as JPEG of this quality, 1 to 100. Far fewer bytes, but lossy: the actions change a
                little. None sends the pixels as they are.
            prepare_with: the contract's `image_recipe`. Frames are taken through it here, see `prepare_frames`, and the
                smaller ones are sent; without `jpeg` the actions stay the same to the bit.
            timeout: seconds that this call may take, in place of the client's.

        Raises:
            BadObservation, Unauthorized, Late, Unavailable: see there. Gr00tError: another error status.
            ValueError: `jpeg` or `prepare_with` and frames that are no arrays; a recipe that this file does not know.
        """
        began, now = time.monotonic(), time.time()
        options = dict(observation.get("options") or {})
        given = {
            "seed": seed, "rtc": rtc, "timestamp": timestamp, "prepared_with": prepare_with,
            "embodiment_tag": embodiment_tag or options.get("embodiment_tag") or self.embodiment_tag,
            "deadline_ms": None if deadline is None else (now + deadline) * 1000,
        }  # fmt: skip
        options.update({name: value for name, value in given.items() if value is not None})
        if options.get("seed") is None:
            options["seed"] = secrets.randbits(32)
        fields: dict[str, Any] = {**observation, "options": options}
        if prepare_with is not None:
            fields = _with_frames(fields, partial(prepare_frames, recipe=prepare_with))
        if jpeg is not None:
            fields = _with_frames(fields, partial(encode_jpeg, quality=jpeg))
        body = msgpack.packb(fields, default=_openpi)
        end = began + (self.timeout if timeout is None else timeout)
        return self._send(body, end, end if deadline is None else min(end, began + deadline))

    def _send(self, body: bytes, end: float, last: float) -> Reply:
        """Sends, and again while that helps: not after `last`; waits for answers until `end` (both monotonic)."""
        repeated, wait, key_was_read = 0, WAIT, False
        while True:
            try:
                return self._post(body, end)
            except Unauthorized:
                if key_was_read or not self._read_another_key():
                    raise
                key_was_read = True
            except Unavailable as error:
                # Half to one and a half times: a fleet that was refused together must not come back together.
                pause = (error.retry_after or 0) + wait * random.uniform(0.5, 1.5)
                if repeated == self.retries or time.monotonic() + pause >= last:
                    raise
                time.sleep(pause)
                repeated, wait = repeated + 1, wait * 2

    def _read_another_key(self) -> bool:
        """Whether the key file now holds another key than the refused one; it is used from here on."""
        refused = self.key
        if self.key_file is not None:
            with suppress(OSError, ValueError, KeyError):  # gone, or half written: the refusal is the news
                self.key = read_key(self.key_file)
        return self.key != refused

    def _post(self, body: bytes, end: float) -> Reply:
        """One request, whose answer is whole by `end`. Raises the Gr00tError that it, or its lack, means."""
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        headers["Accept-Encoding"] = "identity"  # MAX_REPLY counts what was sent
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        late = Late(None, "Timeout", f"no answer from {self.url} within the time that was left")
        left: Any = urllib3.Timeout(total=max(end - time.monotonic(), 1e-3))  # a number would count anew to connect
        try:
            with self.session.post(
                self.url, data=body, headers=headers, timeout=left, allow_redirects=False, stream=True
            ) as reply:
                content = _content(reply, end)
        except requests.Timeout:
            raise late from None
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:  # refused, reset, cut
            if time.monotonic() >= end:
                raise late from None
            raise Unavailable(None, "No connection", f"{self.url}: {error}") from None
        if time.monotonic() >= end:
            raise late
        if reply.status_code != 200:
            raise _error(reply, content)
        document = msgpack.unpackb(content, strict_map_key=False)
        return Reply({key: _array(value) for key, value in document["actions"].items()}, document["info"])


def read_key(path: Path) -> str:
    """The inference key in TorchServe's key_file.json. Raises OSError, ValueError or KeyError."""
    return str(json.loads(path.read_text(encoding="utf-8"))["inference"]["key"])


# ------------------------------------------------------------------------------------------------------------- frames


def prepare_frames(frames: NDArray[np.uint8], recipe: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Frames (..., H, W, 3) as the checkpoint's recipe leaves them, (..., h, w, 3): exactly what the server would make.

    Sent with `options.prepared_with` = recipe, which says that this is done; the recipe is not one to be applied twice.
    The server checks that the recipe is its own and that the frames have a size that comes out of it.

    Args:
        recipe: `image_recipe` of the contract (GET /models/gr00t?customized=true on the management port).

    Raises:
        ValueError: the recipe is torchvision's (`albumentations` false): its resize is PyTorch's, so send the camera's
            own frames.
    """
    if not recipe["albumentations"]:
        raise ValueError("the recipe is torchvision's (albumentations: false), which needs PyTorch: send whole frames")
    import cv2

    def resize(image: NDArray[Any]) -> NDArray[Any]:
        height, width = image.shape[:2]
        if recipe.get("edge") is not None:
            scale = recipe["edge"] / min(height, width)
            height, width = round(height * scale), round(width * scale)
        else:
            height, width = recipe["target"]
        if image.shape[:2] == (height, width):
            return image
        return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA))

    def prepare(image: NDArray[Any]) -> NDArray[Any]:
        if recipe["letter_box"]:  # black bars to a square
            missing = [max(image.shape[:2]) - side for side in image.shape[:2]]
            image = np.pad(image, [*((n // 2, n - n // 2) for n in missing), (0, 0)])
        image = resize(image)
        height, width = (max(1, int(side * recipe["crop_fraction"])) for side in image.shape[:2])
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return resize(image[top : top + height, left : left + width])

    images = [prepare(image) for image in frames.reshape(-1, *frames.shape[-3:])]
    return np.stack(images).reshape(*frames.shape[:-3], *images[0].shape)


def encode_jpeg(frames: NDArray[np.uint8], quality: int) -> Any:
    """RGB frames (..., H, W, 3) as JPEG files: bytes, or lists of them as deep as there are leading axes. Lossy."""
    if frames.ndim > 3:
        return [encode_jpeg(frame, quality) for frame in frames]
    import cv2

    _, data = cv2.imencode(".jpg", np.ascontiguousarray(frames[..., ::-1]), [cv2.IMWRITE_JPEG_QUALITY, quality])
    return data.tobytes()


def _with_frames(fields: dict[str, Any], change: Callable[[NDArray[np.uint8]], Any]) -> dict[str, Any]:
    """The fields with every camera's frames changed, in the nested and the flat form. Raises ValueError."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(frames) for key, frames in value.items()}
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim < 3 or value.shape[-1] != 3:
            raise ValueError("jpeg and prepare_with take frames as uint8 arrays (..., H, W, 3)")
        return change(value)

    cameras = ("video", "images")
    return {key: changed(value) if key.partition(".")[0] in cameras else value for key, value in fields.items()}


# --------------------------------------------------------------------------------------------------------------- wire


def _openpi(value: Any) -> Any:
    """What msgpack cannot write: arrays and NumPy's numbers, arrays in the form of openpi-client's msgpack_numpy."""
    if isinstance(value, np.ndarray):
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an observation holds no {type(value).__name__}: send arrays, numbers, texts, lists and mappings")


def _array(value: dict[bytes, Any]) -> NDArray[np.float32]:
    return np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"]).copy()


def _content(reply: requests.Response, end: float) -> bytearray:
    """The body of an answer, which is cut off at `end`: the timeout of requests is for each read alone.

    Raises Gr00tError beyond MAX_REPLY, else what requests raises.
    """
    if reply.raw.closed:  # no body
        return bytearray()

    def cut() -> None:
        with suppress(OSError):  # the other side was faster
            line.shutdown(socket.SHUT_RDWR)

    content = bytearray()
    with socket.socket(fileno=os.dup(reply.raw.fileno())) as line:
        timer = threading.Timer(max(end - time.monotonic(), 0), cut)
        timer.start()
        try:
            for piece in reply.iter_content(2**16):
                content += piece
                if len(content) > MAX_REPLY:
                    raise Gr00tError(reply.status_code, "Too large", f"an answer of more than {MAX_REPLY} bytes")
        finally:
            timer.cancel()
    return content


def _error(reply: requests.Response, content: bytearray) -> Gr00tError:
    """An answer that is no action: the handler's problem (RFC 9457), or what TorchServe or nginx says by itself."""
    try:
        document = json.loads(content)
    except ValueError:
        document = {}
    document = document if isinstance(document, dict) else {}
    status = reply.status_code
    title = str(document.get("title") or document.get("type") or reply.reason or "Error")
    text = content[:200].decode("utf-8", "replace")
    detail = str(document.get("detail") or document.get("message") or text or "the answer says no more")
    after = reply.headers.get("Retry-After", "")
    kind = Gr00tError
    if status == 401 or title == "InvalidKeyException":
        kind = Unauthorized
    elif status == 504:
        kind = Late
    elif status in (429, 502, 503) or (status in (500, 507) and detail.startswith("Worker died")):
        kind = Unavailable
    elif status in (400, 413, 415, 422):
        kind = BadObservation
    return kind(status, title, detail, document.get("pointer"), float(after) if after.isdigit() else None)
