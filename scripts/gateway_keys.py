"""The gateway's own keys: made here, handed to robots, kept as hashes in a file that may change while it serves.

TorchServe has one key, which renewing replaces in place; these live as long as their owner says. A name may hold two,
so that a fleet can move from one to the next: making a third drops the oldest.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()  # of 256 random bits: no salt needed


class Keys:
    """The keys in a file: {"keys": [{"name", "sha256", "until"}]}, `until` in Unix seconds.

    Raises ValueError, here and in `name_of`, when the file cannot be read as that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._read()

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None when nobody's, or when its time is over."""
        self._read()
        name, until = self._keys.get(_hash(key), (None, 0.0))
        return name if time.time() < until else None

    def _read(self) -> None:
        try:
            status = self.path.stat()
            if self._stamp == (stamp := (status.st_mtime_ns, status.st_ino)):
                return
            entries = json.loads(self.path.read_text(encoding="utf-8"))["keys"]
            self._keys = {str(e["sha256"]): (str(e["name"]), float(e["until"])) for e in entries}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the key file cannot be read: {type(error).__name__}; make it with --new-key") from None
        self._stamp = stamp


def new_key(path: Path, name: str, days: float) -> str:
    """Adds a key for `name` to the file, which it makes if need be (mode 0600), and returns it: it is kept nowhere."""
    entries: list[dict[str, Any]] = []
    if path.exists():
        Keys(path)  # whether it is one
        entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
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
