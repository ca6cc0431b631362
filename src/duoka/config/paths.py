"""Paths as users write them: what a name that may be anything means on a disk.

Names of 300 letters, with a NUL, or of a user who is not there, are no paths; Python raises where "not there" is
meant. Rooms that look up what a config names do it through here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def given_path(name: str | Path) -> Path:
    """The path with ~ filled in; of a user whom nobody knows, as it stands."""
    with contextlib.suppress(RuntimeError, ValueError):
        return Path(name).expanduser()
    return Path(name)


def is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.is_dir()
    return False


def is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.is_file()
    return False


def is_there(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.exists()
    return False
