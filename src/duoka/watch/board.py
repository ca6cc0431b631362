"""What `duoka board` knows: the runs of a folder, followed as they are asked for, as answers in JSON.

Knows files and no network; server.py asks. Names come from a page: a run is found among those that are listed, a log
among a run's own, and nothing that a page says is ever made part of a path.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.errors import DuokaError
from duoka.runs.events import global_log
from duoka.runs.find import runs_in, written_at
from duoka.runs.folder import RunFolder, open_plain
from duoka.runs.status import read_status
from duoka.watch.columns import number, whole
from duoka.watch.differences import find_differences
from duoka.watch.follow import FollowedRun, Pace
from duoka.watch.heat import HeatMap
from duoka.watch.history import History
from duoka.watch.ranks import sample_events
from duoka.watch.report import report_page
from duoka.watch.series import AXES, axis_of, place_of, short, thin_curve
from duoka.watch.standing import read_standing
from duoka.watch.stop_cause import has_died

LOG_BYTES = 64 * 1024
READ_S = 0.25  # of reading before an answer: a long log is shown while it is read
KEPT_BYTES = 120 * 2**20  # of steps, over all runs; those that nobody looks at go first
_MOST_POINTS = 2000
_FIRST_STEPS = 500  # of a long log, at even distances: what is shown while it is read
_PACE = 150.0  # the next look is this many times as far away as this one took


class NotThere(Exception):
    """A page asks for what is not, or is no longer, there."""


@dataclass(frozen=True)
class Asked:
    """What a page shows of some runs."""

    runs: tuple[str, ...] = ()
    focus: str = ""
    keys: tuple[str, ...] = ()
    axis: str = "step"
    most: int = 600
    low: float = float("-inf")
    high: float = float("inf")
    log: bool = False
    since: str = ""


class Board:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()  # one page at a time; no answer takes long
        self._followed: OrderedDict[Path, FollowedRun] = OrderedDict()
        self._curves: dict[Path, _Curves] = {}
        self._heat: dict[Path, HeatMap] = {}
        self._heat_at: dict[Path, float] = {}
        self._pace = Pace(2.0, _PACE)
        self._met: dict[Path, tuple[float, float]] = {}  # of files of the future: their time, and ours when first seen

    # --- which runs ---

    def runs(self) -> dict[str, RunFolder]:
        try:
            return {run.name or run.path.resolve().name: run for run in runs_in(self.folder)}
        except (DuokaError, OSError):
            return {}  # moved away: the page says that no run is there

    def find(self, name: str) -> RunFolder:
        found = self.runs().get(name)
        if found is None:
            raise NotThere(f"there is no run {name} in {self.folder} (any more)")
        return found

    def follow(self, run: RunFolder) -> FollowedRun:
        """The run, as far as it can be read in the time of an answer."""
        followed = self._followed.get(run.path)
        if followed is None:
            followed = self._followed[run.path] = FollowedRun(run)
        self._followed.move_to_end(run.path)
        followed.catch_up(READ_S)
        kept = sum(one.history.steps.num_bytes() for one in self._followed.values())
        while kept > KEPT_BYTES and len(self._followed) > 1:
            path, oldest = self._followed.popitem(last=False)
            self._curves.pop(path, None)
            kept -= oldest.history.steps.num_bytes()
        return followed

    @property
    def num_followed(self) -> int:
        """Whose steps are in memory."""
        return len(self._followed)

    # --- answers ---

    def look(self, asked: Asked) -> dict[str, Any]:
        """The list of runs, and the curves of those that are chosen where something has changed since `asked.since`."""
        before = time.thread_time()
        there = self.runs()
        chosen = {name: self.follow(there[name]) for name in asked.runs if name in there}
        focus = chosen.get(asked.focus) or (self.follow(there[asked.focus]) if asked.focus in there else None)
        version = ",".join(f"{name}:{_version(one)}" for name, one in chosen.items())
        version += f";{asked.focus}:{_version(focus)}" if focus else ""
        listed = [_brief(name, run, self._age_s(run)) for name, run in there.items()]
        answer: dict[str, Any] = {"runs": listed, "version": version}
        if version != asked.since:
            answer["series"] = {name: self._series(one, asked) for name, one in chosen.items()}
        if focus is not None:
            # Ages and states change while nothing is written: that is what they are for.
            answer["focus"] = self._focus(focus, asked, is_new=version != asked.since)
        answer["share_read"] = {name: one.share_read for name, one in chosen.items()}
        answer["is_behind"] = any(one.is_behind for one in (*chosen.values(), *([focus] if focus else [])))
        next_s = self._pace.next_s(time.thread_time() - before, is_behind=answer["is_behind"])
        answer["next_s"] = round(next_s, 2)
        return answer

    def _age_s(self, run: RunFolder) -> float:
        """Where a clock was set back: since the file was first seen here, as of a run that is followed."""
        written = written_at(run)
        age_s = time.time() - written
        if age_s < 0:
            if self._met.get(run.path, (0.0, 0.0))[0] != written:
                self._met[run.path] = written, time.monotonic()
            age_s = time.monotonic() - self._met[run.path][1]
        return age_s

    def _series(self, followed: FollowedRun, asked: Asked) -> dict[str, Any]:
        curves = self._curves.get(followed.run.path)
        if curves is None or curves.followed is not followed:
            curves = self._curves[followed.run.path] = _Curves(followed)
        return curves.answer(asked)

    def _focus(self, followed: FollowedRun, asked: Asked, *, is_new: bool) -> dict[str, Any]:
        now = read_standing(followed, num_notes=300)
        found = now.to_json()
        if is_new:
            history = followed.history
            found |= {"held": history.held, "samples": history.samples[-50:], "evals": history.evals[-50:]}
            found["logs"] = [{"name": path.name, "size": path.stat().st_size} for path in self._logs(followed.run)]
        else:
            del found["notes"]
        return {**found, "share_read": followed.share_read, "is_new": is_new}

    def heat(self, name: str) -> dict[str, Any]:
        """The map as far as it has been read; a finished one is made anew when the run has gone on."""
        run = self.find(name)
        followed = self.follow(run)
        last = followed.history.steps[-1].step if followed.history.steps else 0
        known, now = self._heat.get(run.path), time.monotonic()
        is_due = known is None or (
            known.is_whole and known.last_step != last and now - self._heat_at[run.path] > _PACE * known.cost_s
        )
        if is_due or known is None:
            known, self._heat_at[run.path] = HeatMap(run, last), now
            self._heat = {run.path: known}  # of one run at a time
        known.catch_up(READ_S)
        answer = known.to_json()
        # The pace counts what drawing up the answer takes too.
        known.cost_s = max(known.cost_s, 0.001)
        return {**answer, "next_s": 0.1 if not known.is_whole else max(5.0, _PACE * known.cost_s)}

    def differences(self, names: Sequence[str]) -> dict[str, Any]:
        return {"runs": list(names), "rows": find_differences([self.find(name) for name in names])}

    def log(self, name: str, file: str, start: int | None) -> dict[str, Any]:
        """A piece of a run's log from `start` on; without it the log's end."""
        path = next((one for one in self._logs(self.find(name)) if one.name == file), None)
        if path is None:
            raise NotThere(f"the run {name} has no log {file}")
        try:
            with open_plain(path) as stream:
                size = stream.seek(0, 2)
                begin = max(0, size - LOG_BYTES) if start is None or start > size else start
                stream.seek(begin)
                piece = stream.read(LOG_BYTES)
        except OSError as error:
            raise NotThere(f"{file} cannot be read: {error.strerror}") from None
        cut = _last_whole_letter(piece)
        return {"start": begin, "end": begin + cut, "size": size, "text": piece[:cut].decode("utf-8", "replace")}

    def report(self, name: str) -> str:
        followed = self.follow(self.find(name))
        followed.catch_up()
        followed.history.ranks = followed.ranks()
        return report_page(followed.history)

    def _logs(self, run: RunFolder) -> list[Path]:
        """The run's own log files; a link to elsewhere is none of them."""
        if not run.logs.is_dir():
            return []
        files = [path for pattern in ("*.log", "*.txt") for path in run.logs.glob(pattern)]
        return sorted(path for path in files if path.is_file() and not path.is_symlink())


def _version(followed: FollowedRun) -> str:
    """A log that is being read has one version until it has been read."""
    return "reading" if followed.is_behind else str(followed.version)


def _skeleton(followed: FollowedRun) -> History:
    """The whole run in a few hundred of its steps, before its log has been read."""
    history = History(followed.run)
    for event in sample_events(global_log(followed.run), _FIRST_STEPS):
        history.apply(event)
    return history


class _Curves:
    """One run's curves, kept until its log grows: several pages, and a page that is drawn again, cost nothing."""

    def __init__(self, followed: FollowedRun) -> None:
        self.followed = followed
        self._version = ""
        self._axes: dict[str, array[float]] = {}
        self._answers: dict[Asked, dict[str, Any]] = {}

    def answer(self, asked: Asked) -> dict[str, Any]:
        if self._version != _version(self.followed):
            self._version = _version(self.followed)
            self._axes.clear()
            self._answers.clear()
        key = Asked(asked.runs, "", asked.keys, asked.axis, asked.most, asked.low, asked.high, asked.log)
        if key not in self._answers:
            self._answers = {key: self._make(asked)}
        return self._answers[key]

    def _make(self, asked: Asked) -> dict[str, Any]:
        # Sums over a few of the steps would be no tokens and no time: on these axes a curve waits for its log.
        is_first = self.followed.is_behind and asked.axis == "step"
        history = _skeleton(self.followed) if is_first else self.followed.history
        steps = history.steps
        axis = asked.axis if asked.axis in AXES else "step"
        xs = self._axes.get(axis)
        if xs is None:
            xs = self._axes[axis] = axis_of(steps, axis)
        most = min(_MOST_POINTS, max(20, asked.most))
        zoom: dict[str, Any] = {"low": asked.low, "high": asked.high, "log": asked.log}
        known = [name for name in asked.keys if name in steps.names()]
        numbers = steps.numbers()
        marks = [[note.kind, note.step, place_of(numbers, xs, note.step), note.text] for note in history.notes[-300:]]
        evals = [
            [place_of(numbers, xs, whole(one.get("step")) or 0), number(one.get("loss"))]
            for one in history.evals[-300:]
        ]
        return {
            "curves": {name: thin_curve(xs, steps.column(name), most, **zoom) for name in known},
            "names": steps.names(), "marks": marks, "evals": evals,
            "x": [short(xs[0]), short(xs[-1])] if xs else None, "num_steps": len(steps),
        }  # fmt: skip


def _brief(name: str, run: RunFolder, age_s: float) -> dict[str, Any]:
    """A line of the list, from the status files alone."""
    status = read_status(run)
    if status is None:
        return {"name": name, "state": "unknown", "step": 0, "total_steps": 0, "loss": None, "age_s": round(age_s, 1)}
    state = "dead" if has_died(status) else status.state
    return {
        "name": name, "state": state, "step": status.step, "total_steps": status.total_steps, "loss": status.loss,
        "age_s": round(age_s, 1),
    }  # fmt: skip


def _last_whole_letter(piece: bytes) -> int:
    """The length without a letter whose bytes are cut at the end."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte < 0x80:
            return len(piece)
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(piece) if back >= width else len(piece) - back
    return len(piece)
