"""Which heap a rank on a CPU gets. The C library's gives memory back to the system and asks for it again in each step
(docs/decisions.md has figures), so the launcher preloads tcmalloc or jemalloc where the machine has one.

A user's own LD_PRELOAD stays as it is, and DUOKA_MALLOC=0 leaves the heap alone. Results are the same bits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from duoka.plan.heap import LIBRARIES, PRELOAD, SWITCH, find_allocator

# What is compiled for each shape of a product is kept, 1,024 of them: once by oneDNN, once more by what torch calls it
# through (ideep). With rows of other lengths in every step each keeps 10 MiB a step, for shapes that do not come again.
# So many are enough for the layers of one length.
FEW_PRIMITIVES: Mapping[str, str] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
_RATE = "TCMALLOC_RELEASE_RATE"
_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def allocator_environment(env: Mapping[str, str] = os.environ, *, keeps: bool = True) -> dict[str, str]:
    """What ranks that compute on a CPU get beside `env`. `keeps`: speed matters more than the last bytes of memory."""
    if sys.platform != "linux" or env.get(PRELOAD) or env.get(SWITCH) == "0":
        return {}
    path = find_allocator()
    if path is None:
        # The C library's heap raises its threshold by what was freed, and keeps layers that are gone.
        return {} if keeps or _THRESHOLD in env else {_THRESHOLD: "131072"}
    # At its own rate tcmalloc gives pages back that the next micro-batch asks for: a tenth of the first steps' speed.
    is_slow = keeps and _RATE not in env and LIBRARIES[path.name] == "tcmalloc"
    return {PRELOAD: str(path), **({_RATE: "0"} if is_slow else {})}
