"""The event log: append-only JSON lines that training writes and everything else reads.

Every line has `v` (schema), `type`, `t` (wall clock). Types: run, step, traffic (what a step exchanges), memory (what
each rank holds), eval, checkpoint, resume, warning, end in events/run.jsonl (global numbers, written by rank 0); rank
in events/rankNNNNN.jsonl (a rank's own times).
NaN and infinity are written as null, with their names in `nonfinite`; a step whose batch was left out for them is a
warning with its loss and grad_norm.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from duoka.errors import StorageError
from duoka.runs.folder import RunFolder, open_plain

SCHEMA = 1
_HEAD_BYTES = 256


def global_log(run: RunFolder) -> Path:
    return run.events / "run.jsonl"


def rank_log(run: RunFolder, rank: int) -> Path:
    return run.events / f"rank{rank:05d}.jsonl"


def log_size(run: RunFolder) -> int:
    """Bytes of the global log: what is written from now on lies behind them."""
    try:
        return global_log(run).stat().st_size
    except OSError:
        return 0


class EventWriter:
    """Appends one line per event, each with one write, so that a reader sees whole lines or a cut last one.

    A disk that takes no more does not end a run for its log's sake: `fault` says so, and later events are tried again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a named pipe would wait for a reader
            raise StorageError(f"{path} is no plain file, and the run's log is written there", fix="move it away")
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
    with open_plain(path) as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a log, in the order written; a cut or damaged line is passed over."""
    try:
        file = open_plain(path)
    except OSError:
        return
    with file:
        for line in file:
            event = _parse(line)
            if event is not None:
                yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a line of nothing but brackets
        return None
    return event if isinstance(event, dict) else None


class EventTail:
    """Reads a log that grows: each `read` gives the events that came since the one before.

    A last line that is not whole yet stays for the next time. `offset` is where the next read begins: who keeps it may
    go on from there in another process. When the file was replaced or cut, `read` begins anew at its first line,
    and `replaced` says so: what was read before belongs to a log that is gone.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.replaced = False
        self.num_left = 0  # bytes that the last `read` left for the next one, by its `most_bytes`
        self._inode: int | None = None
        self._head = b""  # the file's first bytes: a log that was cut and has grown again keeps its inode

    def read(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """All that came; or of a long log the next `most_bytes`, and always one whole line."""
        self.replaced, self.num_left = False, 0
        try:
            file = open_plain(self.path)
        except OSError:
            return []  # not there yet, or between two files
        with file:
            if not self._is_same(file):
                self.replaced, self.offset, self._head = True, 0, b""
            self._inode = os.fstat(file.fileno()).st_ino
            if len(self._head) < _HEAD_BYTES:
                file.seek(0)
                self._head = file.read(_HEAD_BYTES)
            file.seek(self.offset)
            new = file.read(most_bytes)
            while most_bytes > 0 and b"\n" not in new and (more := file.read(most_bytes)):
                new += more
            if most_bytes > 0:
                self.num_left = max(0, os.fstat(file.fileno()).st_size - file.tell())
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [event for line in whole.split(b"\n") if (event := _parse(line)) is not None]

    def _is_same(self, file: BinaryIO) -> bool:
        """Whether this is the file that `offset` was counted in, as far as can be told."""
        if self._inode not in (None, os.fstat(file.fileno()).st_ino) or file.read(len(self._head)) != self._head:
            return False
        if self.offset == 0:
            return True
        file.seek(self.offset - 1)
        return file.read(1) == b"\n"  # nothing, when the file is shorter


def read_steps(run: RunFolder) -> list[dict[str, Any]]:
    """The run's steps, rising, each once: steps that a crash threw away and a resume did again count as the later."""
    by_step: dict[int, dict[str, Any]] = {}
    for event in read_events(global_log(run)):
        kind, number = event.get("type"), event.get("step", None if event.get("type") == "step" else 0)
        if not isinstance(number, int):  # damaged
            continue
        if kind in ("run", "resume"):  # "run": from the beginning, perhaps once more
            by_step = {step: value for step, value in by_step.items() if step <= number}
        elif kind == "step":
            by_step[number] = event
    return [by_step[step] for step in sorted(by_step)]
