"""The gateway's own keys: made here and kept as hashes, or given as they are; the file may change while it serves.

TorchServe has one key, which renewing replaces in place; these live as long as their owner says. A name may hold two,
so that a fleet can move from one to the next: making a third drops the oldest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("gateway")

SHORTEST = 16  # characters of a key that is given, not made here


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()  # of 256 random bits: no salt needed


def _plain(text: str) -> dict[str, tuple[str, float]]:
    """{hash: (name, for ever)} of NAME=KEY pairs, one a line or with commas between. Raises ValueError."""
    keys = {}
    for pair in filter(None, map(str.strip, text.replace(",", "\n").splitlines())):
        name, _, key = pair.partition("=")
        if not name or len(key) < SHORTEST:
            raise ValueError(f"expected NAME=KEY, with {SHORTEST} characters or more of key")
        keys[_hash(key)] = (name, float("inf"))
    if not keys:
        raise ValueError("it is empty")
    return keys


class Keys:
    """The keys in a file: {"keys": [{"name", "sha256", "until"}]}, `until` in Unix seconds; or NAME=KEY lines, as a
    mounted secret has them, in a file that others cannot read. `env:VARIABLE` stands for such lines in the environment.

    Raises ValueError when they cannot be read as that.
    """

    def __init__(self, source: Path | str) -> None:
        self._stamp: tuple[int, int] | None = None
        self.path: Path | None = None
        if str(source).startswith("env:"):
            variable = str(source)[len("env:"):]
            try:
                self._keys = _plain(os.environ.get(variable, ""))
            except ValueError as error:
                raise ValueError(f"the keys in the environment variable {variable} cannot be used: {error}") from None
        else:
            self.path = Path(source)
            self._read()

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None when nobody's, or when its time is over."""
        self._read()
        name, until = self._keys.get(_hash(key), (None, 0.0))
        return name if time.time() < until else None

    def _read(self) -> None:
        if self.path is None:
            return
        try:
            status = self.path.stat()
            if self._stamp == (stamp := (status.st_mtime_ns, status.st_ino)):
                return
            text = self.path.read_text(encoding="utf-8")
            if text.lstrip().startswith("{"):
                entries = json.loads(text)["keys"]
                self._keys = {str(e["sha256"]): (str(e["name"]), float(e["until"])) for e in entries}
            else:
                if status.st_mode & 0o007:
                    raise ValueError("it has plain keys and others can read it; chmod 0600 or 0400")
                self._keys = _plain(text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self._stamp is not None:  # being written, or mistyped: robots keep their keys
                logger.error("the key file cannot be read (%s): the keys stay as they were", type(error).__name__)
                return
            reason = error if type(error) is ValueError else type(error).__name__
            raise ValueError(f"the key file cannot be read: {reason}; make it with --new-key") from None
        self._stamp = stamp


def new_key(path: Path, name: str, days: float) -> str:
    """Adds a key for `name` to the file, which it makes if need be (mode 0600), and returns it: it is kept nowhere.

    Raises ValueError for a file of plain keys, whose owner writes it.
    """
    entries: list[dict[str, Any]] = []
    if path.exists():
        Keys(path)  # whether it is one
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
        except ValueError:
            raise ValueError("the key file has plain keys: add a line NAME=KEY yourself") from None
    entries = [entry for entry in entries if entry["until"] > time.time()]
    own = [entry for entry in entries if entry["name"] == name]
    entries = [entry for entry in entries if entry not in own[:-1]]
    key = secrets.token_urlsafe(32)
    entries.append({"name": name, "sha256": _hash(key), "until": round(time.time() + days * 86400)})
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump({"keys": entries}, file, indent=2)
    fresh.replace(path)
    return key
