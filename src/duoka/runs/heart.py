"""A rank's heartbeat: logs/beat-rank00000.json, one short line, overwritten in place at every sign of progress.

Written by ranks through `Heart`, read by supervisors (the launcher, `duoka chaos`). A rank that is stopped
or waits for ever cannot say so; that its line no longer changes says it. A beat is one write of less than a kilobyte.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from duoka.runs.folder import RunFolder, read_json

ASK_FOR_STACKS = "SIGUSR1"
AUTO_S = 300.0  # and not less than ten times what a step's slowest part has taken so far
AUTO_FACTOR = 10.0
SLOW_S = 1800.0
STOP_S = 60.0  # and not less than three times what a part of a step, or a save, has taken so far
STOP_FACTOR = 3.0
LOOK_EVERY_S = 1.0
_LINE_BYTES = 768
# Nothing beats on the way through these, and a large model or a slow disk takes what it takes.
_SLOW_PHASES = ("start", "save", "end")


@dataclass
class Beat:
    """What a rank did last. `count` rises with every sign of progress, `num_collectives` with every exchange begun."""

    rank: int = 0
    pid: int = 0
    step: int = 0  # finished ones
    phase: str = "start"
    is_slow: bool = True  # no beat is to be expected soon: loading, compiling, saving
    collective: str = ""  # the last one that was begun
    is_inside: bool = False  # and not come back from
    num_collectives: int = 0
    count: int = 0
    time: float = 0.0  # wall clock, for people: who watches uses a clock of his own
    slowest_s: float = 0.0  # the longest silence outside of slow phases
    slowest_save_s: float = 0.0  # the longest save, or silence in one
    place: str = ""  # on the layout's axes, where it has some: "pipeline rank 1 of 2"
    part: str = ""  # what of the step the phase computes: "micro-batch 3 in stage 1"


class Heart:
    """Writes one rank's beats. Without a file (tests, people's own loops) it only counts."""

    def __init__(self, run: RunFolder | None = None, rank: int = 0) -> None:
        self.beat = Beat(rank=rank, pid=os.getpid())
        self._is_warm = False
        self._at = time.monotonic()
        self._file = -1
        if run is not None:
            with contextlib.suppress(OSError):  # a full disk is reported by who cannot do without
                self._file = os.open(beat_path(run, rank), os.O_WRONLY | os.O_CREAT, 0o644)
                _listen_for_stacks(stacks_path(run, rank))
        self._write()

    def stand_at(self, place: str) -> None:
        """This rank's place on the axes, for who has to be told which one it was."""
        self.beat.place = place
        self._write()

    def tell(self, phase: str, step: int | None = None, part: str = "") -> None:
        """Progress: `phase` begins, or goes on. With `step`, one was finished: from now on silence means something."""
        now = time.monotonic()
        beat = self.beat
        if not beat.is_slow:
            beat.slowest_s = round(max(beat.slowest_s, now - self._at), 3)
        elif beat.phase == "save":
            self.note_save(now - self._at)
        self._at = now
        if step is not None:
            beat.step = step
        beat.phase, beat.part = phase, part
        # The first step compiles, allocates and reads files for the first time.
        beat.is_slow = phase in _SLOW_PHASES or not self._is_warm
        beat.count += 1
        self._write()

    def note_save(self, seconds: float) -> None:
        """A save took so long, beside training or not; the next line that is written says so."""
        self.beat.slowest_save_s = round(max(self.beat.slowest_save_s, seconds), 3)

    def warm_up(self) -> None:
        """What is slow only once is done."""
        self._is_warm = True

    @contextlib.contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Around a collective that this rank waits in."""
        self.beat.is_inside = True
        self.begin_exchange(name)
        yield
        self.beat.is_inside = False
        self.beat.count += 1
        self._at = time.monotonic()
        self._write()

    def begin_exchange(self, name: str) -> None:
        """A collective begins; it may go on by itself."""
        self.beat.collective = name
        self.beat.num_collectives += 1
        self.beat.count += 1
        self._write()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self) -> None:
        if self._file < 0:
            return
        self.beat.time = round(time.time(), 3)
        line = json.dumps(asdict(self.beat)).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._file, line.ljust(_LINE_BYTES - 1) + b"\n", 0)


def patience_s(beat: Beat, after_s: float | None) -> float:
    """The silence after this beat that means a hang; `after_s` as configured, None for auto."""
    steady_s = max(AUTO_S, AUTO_FACTOR * beat.slowest_s) if after_s is None else after_s
    return max(SLOW_S, steady_s) if beat.is_slow else steady_s


def stop_patience_s(beat: Beat) -> float:
    """The silence after this beat that means that a request to stop is not followed."""
    if beat.is_slow and not (beat.phase == "save" and beat.slowest_save_s):  # nobody knows yet what this takes
        return SLOW_S
    return max(STOP_S, STOP_FACTOR * max(beat.slowest_s, beat.slowest_save_s))


def describe_place(beat: Beat) -> str:
    """`pipeline rank 1 of 2, in backward of micro-batch 3 after step 12; last collective: ..., in which it waits`."""
    place, part = f"{beat.place}, " if beat.place else "", f" of {beat.part}" if beat.part else ""
    first = " (the first)" if beat.is_slow and beat.phase in ("forward", "backward") else ""
    last = f"; last collective: {beat.collective}" if beat.collective else ""
    waits = ", in which it waits" if beat.is_inside else ""
    return f"{place}in {beat.phase}{part}{first} after step {beat.step}{last}{waits}"


def watch_itself(
    heart: Heart, run: RunFolder, after_s: float | None, on_hang: Callable[[str], None]
) -> threading.Thread:
    """For a rank that nobody supervises: a thread that sees it stand still, writes its stacks, and calls `on_hang`."""

    def look() -> None:
        seen, moved_at, looked_at = -1, time.monotonic(), time.monotonic()
        while True:
            time.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            if heart.beat.count != seen or now - looked_at > 10 * LOOK_EVERY_S:  # or we were stopped ourselves
                seen, moved_at = heart.beat.count, now
            looked_at = now
            if now - moved_at > patience_s(heart.beat, after_s):
                with (
                    contextlib.suppress(OSError),
                    stacks_path(run, heart.beat.rank).open("a", encoding="utf-8") as file,
                ):
                    faulthandler.dump_traceback(file, all_threads=True)
                return on_hang(
                    f"rank {heart.beat.rank} has not moved for {now - moved_at:.0f} s: {describe_place(heart.beat)}"
                )

    thread = threading.Thread(target=look, name="duoka-hang-watch", daemon=True)
    if after_s != math.inf:
        thread.start()
    return thread


def beat_path(run: RunFolder, rank: int) -> Path:
    return run.logs / f"beat-rank{rank:05d}.json"


def stacks_path(run: RunFolder, rank: int) -> Path:
    return run.logs / f"stacks-rank{rank:05d}.txt"


def read_beats(run: RunFolder) -> dict[int, Beat]:
    """Every rank's last beat; one that is being written at this moment is left out."""
    known = {field.name for field in fields(Beat)}
    found = {}
    for path in sorted(run.logs.glob("beat-rank*.json")):
        raw = read_json(path)
        if raw is not None and known <= raw.keys():
            beat = Beat(**{name: raw[name] for name in known})
            found[beat.rank] = beat
    return found


def clear_beats(run: RunFolder) -> None:
    """Beats of an earlier start would be taken for those of ranks that hang; empty files of stacks say nothing."""
    for path in run.logs.glob("beat-rank*.json"):
        path.unlink(missing_ok=True)
    for path in run.logs.glob("stacks-rank*.txt"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def _listen_for_stacks(path: Path) -> None:
    """At SIGUSR1 the Python stacks of all threads go to `path`, also while the process waits in compiled code."""
    number = getattr(signal, ASK_FOR_STACKS, None)
    if number is not None and hasattr(faulthandler, "register"):
        file = path.open("a", encoding="utf-8")
        faulthandler.register(number, file=file, all_threads=True)
