"""Fault injection from outside a run: signals to ranks, found by their heartbeats.

Used by `duoka chaos` and by duoka's own tests, so that both mean the same. Only processes of the given run get signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from duoka.runs.folder import RunFolder
from duoka.runs.heart import Beat, read_beats


def living_ranks(run: RunFolder) -> dict[int, Beat]:
    """The ranks of the run that have a process now."""
    import psutil

    found = {}
    for rank, beat in read_beats(run).items():
        with contextlib.suppress(psutil.Error):
            if psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                found[rank] = beat
    return found


def wait_for_ranks(
    run: RunFolder, size: int, is_ready: Callable[[Beat], bool], *, old_pids: Iterable[int] = (), within_s: float
) -> dict[int, Beat]:
    """Until `size` living ranks, none of them with a pid in `old_pids` (of an earlier world), are all ready."""
    old, deadline = set(old_pids), time.monotonic() + within_s
    while time.monotonic() < deadline:
        ranks = living_ranks(run)
        if len(ranks) == size and all(beat.pid not in old and is_ready(beat) for beat in ranks.values()):
            return ranks
        time.sleep(0.01)
    raise TimeoutError(f"the {size} ranks of {run.path} were not ready within {within_s:g} s; last seen: {ranks}")


def strike(beats: Iterable[Beat], name: str) -> list[int]:
    """Send the signal to these ranks; returns their pids."""
    pids = [beat.pid for beat in beats]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))
    return pids
