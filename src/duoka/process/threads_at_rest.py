"""Let this process's other threads come to rest before the interpreter ends.

A thread of gloo's lets go of a collective's tensors a moment after the collective was waited for, and needs Python's
lock for it. Where the interpreter is ending by then, Python ends the thread in the middle of C++ code, and C++ the
whole process: "terminate called without an active exception", after work that is done.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_LOOKS = 3  # in a row that see all others asleep: one may be between two naps
_PAUSE_S = 0.002  # Python's lock is free meanwhile


def let_threads_rest(limit_s: float = 0.5, tasks: Path = Path("/proc/self/task")) -> None:
    """Return when all other threads sleep; after `limit_s` at the latest, for a user's thread may never."""
    own, until, calm = str(threading.get_native_id()), time.monotonic() + limit_s, 0
    while calm < _LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE_S)
        calm = calm + 1 if _all_sleep(tasks, own) else 0


def _all_sleep(tasks: Path, own: str) -> bool:
    """True too where the system does not tell: then a few pauses have to do."""
    try:
        others = [one for one in os.listdir(tasks) if one != own]
    except OSError:
        return True
    return all(_state(tasks / one / "stat") in "SI" for one in others)


def _state(path: Path) -> str:
    try:  # the name before the state is in brackets, and may hold any
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "S"  # gone
