"""Workers that share a GPU compute in turns, so that one prepares its wave while another's runs.

Side by side they gain nothing: a GPU slices its time between processes, so two forwards both end when the later one
would have, and then both hosts prepare at once while it idles.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType


class Turn:
    """A lock among processes, for `with`. The system frees it when its holder dies.

    Whoever waits longer than `patience` seconds goes ahead without it, and does not wait again until it was free once:
    a turn makes things faster, and a worker that hangs must not stop its neighbours.

    Args:
        file: made where it does not exist; the same for all who share the turn.
    """

    def __init__(self, file: Path, patience: float = 1.0) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.patience, self._hopeless = patience, False

    def __enter__(self) -> None:
        end = time.monotonic() + self.patience
        while not self._free():
            if self._hopeless or time.monotonic() > end:
                self._hopeless = True
                return
            time.sleep(5e-5)  # flock knows no timeout; the holder needs milliseconds
        self._hopeless = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:  # fmt: skip
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _free(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
