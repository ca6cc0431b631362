"""The heap that ranks on a CPU get: the C library's gives memory back to the system and asks for it again in each step,
and keeps pieces that are free, so the launcher preloads tcmalloc or jemalloc where the machine has one
(process/allocator.py).

Here, because a plan counts with it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SWITCH = "DUOKA_MALLOC"  # 0: the heap is left alone
PRELOAD = "LD_PRELOAD"
INSTALL = "apt install libtcmalloc-minimal4   (Debian, Ubuntu; elsewhere gperftools)"
LIBRARIES = {"libtcmalloc_minimal.so.4": "tcmalloc", "libtcmalloc.so.4": "tcmalloc", "libjemalloc.so.2": "jemalloc"}
_FOLDERS = (f"{sys.prefix}/lib", "/usr/local/lib", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")


def find_allocator(folders: Sequence[str] = _FOLDERS) -> Path | None:
    """The best library there is; the first folder that has one counts, so an environment's own before the system's."""
    for folder in folders:
        for name in LIBRARIES:
            path = Path(folder, name)
            if path.exists():
                return path
    return None


def describe_allocator(env: Mapping[str, str] = os.environ) -> str:
    """The heap of a process that was started with `env`, by its name; empty for the C library's."""
    loaded = {Path(one).name for one in env.get(PRELOAD, "").replace(":", " ").split()}
    return next((heap for name, heap in LIBRARIES.items() if name in loaded), "")


def has_allocator(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks that are started with `env` get one. True also where the C library is none that was measured."""
    if describe_allocator(env) or sys.platform != "linux":
        return True
    return not env.get(PRELOAD) and env.get(SWITCH) != "0" and find_allocator() is not None
