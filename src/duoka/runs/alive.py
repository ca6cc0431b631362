"""`python -m duoka.runs.alive RUN`: exit code 1 when no rank of the run has moved for too long. A pod's liveness probe.

A rank or launcher that hangs says so by itself, with stacks; this is for one that can no longer say anything. It has
more patience than they have. A run of which nothing is heard yet (it loads, it prepares data) is alive.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from duoka.runs.folder import RunFolder
from duoka.runs.heart import Beat, patience_s, read_beats

MARGIN_S = 120.0


def main(words: list[str]) -> int:
    read = argparse.ArgumentParser(prog="python -m duoka.runs.alive")
    read.add_argument("run", type=Path)
    read.add_argument("--hang-after", type=float, default=None, help="seconds, as faults.hang_after has; default: auto")
    given = read.parse_args(words)
    beats = list(read_beats(RunFolder(given.run)).values())
    silence_s = find_silence(beats, time.time(), started_at(), given.hang_after)
    if silence_s is None:
        return 0
    print(f"no rank of {given.run} has moved for {silence_s:.0f} s", file=sys.stderr)
    return 1


def find_silence(beats: list[Beat], now: float, since: float, hang_after_s: float | None) -> float | None:
    """Seconds without any rank's sign of life, when that is too long. Beats from before `since` are another start's."""
    recent = [beat for beat in beats if beat.time >= since]
    if not recent:
        return None
    silence_s = now - max(beat.time for beat in recent)
    allowed_s = max(patience_s(beat, hang_after_s) for beat in recent) + MARGIN_S
    return silence_s if silence_s > allowed_s else None


def started_at() -> float:
    """When this container began: its first process did."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(1).create_time())
    return 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
