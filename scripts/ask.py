"""Sends one observation to a running server and prints the actions that come back.

Cameras without an --image get a test picture, states get plausible values: this shows that a server works, and what
its actions look like. It is no robot client.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
from numpy.typing import NDArray
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
KEY_FILE = ROOT / ".run" / "key_file.json"
Actions = dict[str, NDArray[np.float64]]  # {key: (horizon, width)}


class AskError(RuntimeError):
    """Why there is no action, in words for the terminal."""


def keys(given: str | None, key_file: Path = KEY_FILE) -> tuple[str | None, str | None]:
    """(inference key, management key): --key or GR00T_KEY for the first, else both as ./scripts/serve left them."""
    inference, management = given or os.environ.get("GR00T_KEY"), None
    try:
        stored = json.loads(key_file.read_text(encoding="utf-8"))
        inference, management = inference or stored["inference"]["key"], stored["management"]["key"]
    except (OSError, ValueError, KeyError):  # a server without authorization, or on another machine
        pass
    return inference, management


def contract(management_url: str, key: str | None, model: str = "gr00t") -> dict[str, Any]:
    """What the checkpoint of a model (NAME or NAME/VERSION) expects, from the management API. Raises AskError."""
    reply = _call("GET", f"{management_url}/models/{model}", key, params={"customized": "true"})
    _check(reply)
    metadata: dict[str, Any] = reply.json()[0].get("customizedMetadata") or {}
    if not metadata.get("embodiments"):
        raise AskError("the server did not describe what it expects; its logs may say why")
    return metadata


def choose_embodiment(metadata: dict[str, Any], wanted: str | None) -> str:
    """The tag asked for, else the server's default, else that of its example, else its first."""
    tags = list(metadata["embodiments"])
    if wanted is not None and wanted not in tags:
        raise AskError(f"the checkpoint has no embodiment {wanted!r}; it has: {', '.join(tags)}")
    example = metadata.get("example", {}).get("options", {}).get("embodiment_tag")
    candidates: list[str | None] = [wanted, metadata.get("default_embodiment"), example]
    return next((tag for tag in candidates if tag in tags and tag is not None), tags[0])


def request_parts(
    metadata: dict[str, Any], tag: str, images: list[str], prompt: str, seed: int | None
) -> list[tuple[str, tuple[str | None, bytes | str, str]]]:
    """The multipart form of one observation. `images`: FILE, for the cameras in order, or CAMERA=FILE."""
    embodiment = metadata["embodiments"][tag]
    cameras: list[str] = embodiment["video"]["keys"]
    pictures: dict[str, bytes] = {}
    for image in images:
        name, _, file = image.partition("=")
        if name not in cameras:
            name, file = next((camera for camera in cameras if camera not in pictures), ""), image
        if not name:
            raise AskError(f"{len(images)} images, but the cameras are {', '.join(cameras)}")
        try:
            pictures[name] = Path(file).read_bytes()
        except OSError as error:
            raise AskError(f"{file}: {error.strerror}") from None

    parts: list[tuple[str, tuple[str | None, bytes | str, str]]] = []
    for number, camera in enumerate(cameras):
        picture = pictures.get(camera) or test_picture(number)
        parts += [(f"video.{camera}", (camera, picture, "application/octet-stream"))] * embodiment["video"]["frames"]
    example = metadata.get("example", {})
    known = example.get("state", {}) if example.get("options", {}).get("embodiment_tag") == tag else {}
    for key, shape in embodiment["state"].items():
        state = np.reshape(known[key], (shape["steps"], shape["width"])) if key in known else plain_state(key, shape)
        parts.append((f"state.{key}", (None, json.dumps(state.tolist()), "application/json")))
    options = {"embodiment_tag": tag} | ({} if seed is None else {"seed": seed})
    parts.append(("prompt", (None, prompt, "text/plain")))
    parts.append(("options", (None, json.dumps(options), "application/json")))
    return parts


def plain_state(key: str, shape: dict[str, int]) -> NDArray[np.float64]:
    """Zeros (steps, width); an end-effector pose of 9 numbers gets no rotation, since zeros name none."""
    state = np.zeros((shape["steps"], shape["width"]))
    if shape["width"] == 9 and "eef" in key:
        state[:, [3, 7]] = 1.0
    return state


def test_picture(number: int) -> bytes:
    """A PNG, 320 x 240: a colour gradient with a bright block whose place depends on `number`."""
    down, across = np.mgrid[0:240, 0:320]
    picture = np.stack([across * 255 // 319, down * 255 // 239, np.full_like(down, 96)], axis=-1).astype(np.uint8)
    left = 40 + 120 * (number % 3)
    picture[140:200, left : left + 60] = (240, 220, 40)
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


def ask(
    url: str, key: str | None, parts: list[tuple[str, Any]], model: str = "gr00t"
) -> tuple[Actions, dict[str, Any]]:
    """(actions of the one row, info), from a model (NAME or NAME/VERSION). Raises AskError with the server's words."""
    reply = _call("POST", f"{url}/predictions/{model}", key, files=parts, headers={"Accept": "application/json"})
    _check(reply)
    body = reply.json()
    return {name: np.asarray(values, np.float64) for name, values in body["actions"].items()}, body["info"]


def _call(method: str, url: str, key: str | None, headers: dict[str, str] | None = None, **more: Any) -> Any:
    headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with requests.Session() as session:
            session.trust_env = urlsplit(url).hostname not in ("127.0.0.1", "localhost")  # no proxy sees a local key
            return session.request(method, url, headers=headers, timeout=300, **more)
    except requests.ConnectionError:
        raise AskError(f"nothing answers at {url}; start it with ./scripts/serve") from None
    except requests.RequestException as error:
        raise AskError(f"{url}: {error}") from None


def _check(reply: requests.Response) -> None:
    """A reply with an error status becomes an AskError: the handler's problems, or TorchServe's own errors."""
    if reply.ok:
        return
    try:
        problem = reply.json()
    except ValueError:
        problem = {}
    title = problem.get("title") or problem.get("type") or reply.reason
    lines = [f"{reply.status_code} {title}", problem.get("detail") or problem.get("message") or reply.text]
    if problem.get("pointer"):
        lines.append(f"at {problem['pointer']}")
    if title == "InvalidKeyException":
        lines.append("the key is in .run/key_file.json where ./scripts/serve runs; pass it with --key or GR00T_KEY")
    raise AskError("\n  ".join(lines))


def table(actions: Actions) -> str:
    """The chunk as text: steps down, keys across, 4 decimals."""
    columns = {key: [" ".join(f"{x:9.4f}" for x in row) for row in values] for key, values in actions.items()}
    widths = {key: max(len(key), *map(len, rows)) for key, rows in columns.items()}
    steps = max(map(len, columns.values()))
    lines = ["step  " + "  ".join(key.rjust(widths[key]) for key in columns)]
    for step in range(steps):
        cells = ((rows[step] if step < len(rows) else "").rjust(widths[key]) for key, rows in columns.items())
        lines.append(f"{step:4}  " + "  ".join(cells))
    return "\n".join(lines)


def plot(actions: Actions, file: Path) -> None:
    """Writes a PNG of the trajectories, one panel per action key."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    across = min(3, len(actions))
    down = -(-len(actions) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(4.2 * across, 2.8 * down), squeeze=False, sharex=True)
    for panel in axes.flat[len(actions) :]:
        panel.set_visible(False)
    for panel, (key, values) in zip(axes.flat, actions.items(), strict=False):
        lines = panel.plot(values, marker=".", markersize=3, linewidth=1)
        panel.set_title(key, fontsize=10)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.grid(alpha=0.3)
        if len(lines) > 1:
            panel.legend(lines, range(len(lines)), fontsize=6, ncols=3)
    figure.tight_layout()
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise AskError(f"{file}: {error.strerror}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="ask", description="Send one observation to the server, print the actions.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8080", help="the inference API (default: %(default)s)")
    add("--model", default="gr00t", metavar="NAME[/VERSION]", help="(default: %(default)s, its default version)")
    add("--image", nargs="+", action="extend", default=[], metavar="F",
        help="JPEG or PNG files, for the cameras in order, or CAMERA=FILE")  # fmt: skip
    add("--prompt", default="pick up the object", metavar="TEXT", help="the instruction (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="write a PNG of the trajectories")
    add("--embodiment", metavar="TAG", help="the embodiment (default: the server's)")
    add("--seed", type=int, metavar="N", help="of the noise; the same seed gives the same actions")
    add("--key", help="the inference key (default: GR00T_KEY, else from the key file)")
    add("--key-file", type=Path, default=KEY_FILE, help="TorchServe's (default: .run/key_file.json)")
    args = parser.parse_args()
    url = urlsplit(args.url.rstrip("/"))
    if url.scheme not in ("http", "https") or not url.hostname or url.port is None:
        parser.error(f"--url must be like http://127.0.0.1:8080, not {args.url!r}")
    management_url = f"{url.scheme}://{url.hostname}:{url.port + 1}"
    try:
        key, management_key = keys(args.key, args.key_file)
        metadata = contract(management_url, management_key, args.model)
        tag = choose_embodiment(metadata, args.embodiment)
        parts = request_parts(metadata, tag, args.image, args.prompt, args.seed)
        actions, info = ask(args.url.rstrip("/"), key, parts, args.model)
        print(f'{tag}, "{args.prompt}"')
        print(table(actions))
        print("info: " + "  ".join(f"{name}={value}" for name, value in info.items()))
        if args.plot:
            plot(actions, args.plot)
            print(f"wrote {args.plot}")
    except AskError as error:
        print(f"ask: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
