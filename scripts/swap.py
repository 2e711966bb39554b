"""Puts another checkpoint into a running server as a new version of the model, with no request failed.

`--checkpoint DIR --version 2.0` packages it, registers it, waits until its workers are READY, sends one real
observation to it, and only then makes it the default of /predictions/gr00t. Both versions hold their memory until
`--remove` takes one away. `--version 1.0` alone is the way back. The server must have been started with
`./scripts/serve --model-api`; when it starts again, it serves what ./scripts/serve is told then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scripts import ask
from scripts.package import MODEL_NAME, ConfigError, archive_name, build, read_config
from scripts.ready import add_arguments, read_keys
from scripts.scale import ManageError, Management, Progress, StartWatch, retire, table, wait_until_ready


def versions(api: Management, model: str) -> dict[str, dict[str, Any]]:
    """TorchServe's description of each registered version; none for a model that it does not have."""
    listed = api.call("GET", "/models", limit=1000)["models"]
    if model not in [entry["modelName"] for entry in listed]:
        return {}
    return {entry["modelVersion"]: entry for entry in api.call("GET", f"/models/{model}/all")}


def package(args: argparse.Namespace, like: dict[str, Any] | None) -> Path:
    """The new version's archive, in the server's model store.

    like: the default version, whose settings and number of workers the new one takes; the overlays go over them.
    """
    out = args.model_store / archive_name(args.model, args.version)
    with tempfile.TemporaryDirectory(prefix="gr00t-swap-") as temp:
        overlays = list(args.overlay)
        if like is not None:
            archive = args.model_store / like["modelUrl"]
            if not archive.is_file():
                raise ManageError(f"there is no {archive}; say where the server's archives are with --model-store")
            running = read_config(archive)
            running.update(minWorkers=like["minWorkers"], maxWorkers=like["maxWorkers"])
            overlays.insert(0, Path(temp) / "running.yaml")
            overlays[0].write_text(yaml.safe_dump(running), encoding="utf-8")
        return build(args.checkpoint, overlays, out, args.embodiment_tag, tokenizer=args.tokenizer, name=args.model,
                     version=args.version)  # fmt: skip


def register(api: Management, archive: Path, model: str, version: str, limit: float, log: Path, show: Progress) -> None:
    """Registers an archive of the model store; returns when its workers are READY. What cannot start is taken away
    again, and ManageError says why.
    """
    config = read_config(archive)
    watch = StartWatch(log, {"modelName": model, "modelVersion": version, "workers": [], **config})
    try:
        api.call("POST", "/models", url=archive.name, synchronous="false")
    except ManageError as error:
        if "TorchServe answers 405" in str(error):
            raise ManageError("this server takes no models: start it with ./scripts/serve --model-api") from None
        raise
    try:
        wait_until_ready(api, model, version, config["minWorkers"], time.monotonic() + limit, watch, show)
    except (ManageError, KeyboardInterrupt):
        api.call("DELETE", f"/models/{model}/{version}")
        raise


def verify(api: Management, url: str, key: str | None, model: str, version: str, tag: str | None) -> str:
    """Sends one observation to a version, whose actions must be finite; returns the hash of its checkpoint."""
    contract = api.call("GET", f"/models/{model}/{version}", customized="true")[0]["customizedMetadata"]
    tag = ask.choose_embodiment(contract, tag)
    parts = ask.request_parts(contract, tag, [], "pick up the object", 0)
    actions, info = ask.ask(url, key, parts, f"{model}/{version}")
    if not all(np.isfinite(values).all() for values in actions.values()):
        raise ManageError(f"version {version} answers actions that are not finite")
    return str(info["checkpoint"])


def remove(api: Management, model: str, version: str, limit: float, show: Progress) -> None:
    """Unregisters a version, when nothing waits for it and its workers have nothing in hand.

    TorchServe would leave what waits without an answer. A request that asks for this very version (/predictions/
    MODEL/VERSION) in the last moment can meet this fate; nothing that asks for the default can.
    """
    found = versions(api, model)
    if version not in found:
        raise ManageError(f"{model} has no version {version}; registered: {', '.join(found) or 'none'}")
    if len(found) > 1 and api.describe(model)["modelVersion"] == version:
        raise ManageError(f"version {version} is the default; make another one that first: ./scripts/swap --version V")
    deadline = time.monotonic() + limit
    while True:
        entry = api.describe(model, version)
        if entry["jobQueueStatus"]["pendingRequests"] == 0:
            ready = [worker["pid"] for worker in entry["workers"] if worker["status"] == "READY"]  # others have no pid
            retire(api, model, version, ready, deadline, show)
            if api.describe(model, version)["jobQueueStatus"]["pendingRequests"] == 0:
                break
        if time.monotonic() > deadline:
            raise ManageError(f"requests for version {version} kept coming until the time was over (--limit)")
        show(f"requests still wait for version {version}")
        time.sleep(0.2)
    api.call("DELETE", f"/models/{model}/{version}")


def swap(args: argparse.Namespace, api: Management, key: str | None, log: Path, show: Progress) -> None:
    """What the command line asks for. Raises ManageError, ConfigError or AskError, with the default as it was."""
    found = versions(api, args.model)
    default = api.describe(args.model)["modelVersion"] if found else None
    if args.version is not None:
        if args.checkpoint is not None:
            if args.version in found:
                raise ManageError(
                    f"{args.model} has a version {args.version} already; give another, or take that away with --remove"
                )
            show("packaging")
            archive = package(args, found[default] if default else None)
            register(api, archive, args.model, args.version, args.limit, log, show)
        elif args.version not in found:
            raise ManageError(
                f"{args.model} has no version {args.version}; registered: {', '.join(found) or 'none'}. "
                "--checkpoint DIR makes it"
            )
        show(f"asking version {args.version}")
        checkpoint = verify(api, args.predict_url, key, args.model, args.version, args.embodiment_tag)
        api.call("PUT", f"/models/{args.model}/{args.version}/set-default")
        show.end()
        print(f"/predictions/{args.model} is version {args.version} now, checkpoint {checkpoint}")
    if args.remove is not None:
        remove(api, args.model, args.remove, args.limit, show)
    show.end()
    for version, entry in versions(api, args.model).items():
        print(f"\n{args.model} {version}, {entry['modelUrl']}, batch size {entry['batchSize']}")
        print(table(entry["workers"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--version", help="what /predictions/NAME shall be; new with --checkpoint")
    add("--checkpoint", type=Path, metavar="DIR", help="the checkpoint folder of a new version")
    add("--remove", metavar="VERSION", help="unregister this version, last of all")
    add("--model", default=MODEL_NAME, metavar="NAME",
        help="another name makes a second model beside the first (default: %(default)s)")  # fmt: skip
    add("--tokenizer", type=Path, metavar="DIR", help="the tokenizer's folder, where the checkpoint has none")
    add("--embodiment-tag", metavar="TAG", help="the embodiment of requests that name none")
    add("--overlay", type=Path, action="append", default=[], metavar="FILE",
        help="merged over the settings of the default version")  # fmt: skip
    add("--limit", type=float, default=900, metavar="S", help="seconds for each step (default: %(default)s)")
    add("--predict-url", default="http://127.0.0.1:8080", help="inference API (default: %(default)s)")
    add("--model-store", type=Path, metavar="DIR", help="the server's (default: model_store beside the key file)")
    add_arguments(parser)
    args = parser.parse_args()
    if args.version is None and args.remove is None:
        parser.error("say --version or --remove")
    args.model_store = args.model_store or args.key_file.parent / "model_store"
    key, management_key = read_keys(args.key_file)
    show = Progress("swap")
    try:
        swap(args, Management(args.url, management_key), key, args.key_file.parent / "logs" / "console.log", show)
    except (ManageError, ConfigError, ask.AskError) as error:
        show.end()
        print(f"swap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        show.end()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
