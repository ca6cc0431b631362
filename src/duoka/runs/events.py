"""The event log: append-only JSON lines that training writes and everything else reads.

Every line has `v` (schema), `type`, `t` (wall clock). Types: run, step, traffic (what a step exchanges), memory (what
each rank holds), eval, checkpoint, resume, warning, end in events/run.jsonl (global numbers, written by rank 0); rank
in events/rankNNNNN.jsonl (a rank's own times).
NaN and infinity are written as null, with their names in `nonfinite`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder

SCHEMA = 1


def global_log(run: RunFolder) -> Path:
    return run.events / "run.jsonl"


def rank_log(run: RunFolder, rank: int) -> Path:
    return run.events / f"rank{rank:05d}.jsonl"


class EventWriter:
    """Appends one line per event, each with one write, so that a reader sees whole lines or a cut last one.

    A disk that takes no more does not end a run for its log's sake: `fault` says so, and later events are tried again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.fault = ""
        # A killed writer left half a line: close it, or the next event would be lost with it.
        self._is_cut = _ends_mid_line(path)

    def write(self, type: str, **values: Any) -> None:
        event: dict[str, Any] = {"v": SCHEMA, "type": type, "t": round(time.time(), 3)}
        nonfinite = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        event.update({key: None if key in nonfinite else value for key, value in values.items()})
        if nonfinite:
            event["nonfinite"] = {key: str(values[key]) for key in nonfinite}
        line = (json.dumps(event, ensure_ascii=False) + "\n").encode()
        try:
            if self._is_cut:
                line = b"\n" + line
            written = os.write(self._file, line)
            self._is_cut = 0 < written < len(line)
        except OSError as error:
            self.fault = error.strerror or str(error)

    def close(self) -> None:
        os.close(self._file)


def _ends_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a log, in the order written; a cut or damaged line is passed over."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def read_steps(run: RunFolder) -> list[dict[str, Any]]:
    """The run's steps, rising, each once: steps that a crash threw away and a resume did again count as the later."""
    by_step: dict[int, dict[str, Any]] = {}
    for event in read_events(global_log(run)):
        if event.get("type") == "resume":
            by_step = {step: value for step, value in by_step.items() if step <= int(event.get("step", 0))}
        elif event.get("type") == "step":
            by_step[int(event["step"])] = event
    return [by_step[step] for step in sorted(by_step)]
