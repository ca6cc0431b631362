"""Give freed memory back to the system: allocators keep it for the next of its kind, which may never come."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Of tcmalloc where it was preloaded, and of the C library's heap where that has such a function."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "MallocExtension_ReleaseFreeMemory"):
        loaded.MallocExtension_ReleaseFreeMemory()
    if hasattr(loaded, "malloc_trim"):
        loaded.malloc_trim(0)
