"""How a rank says why it ended: logs/failure-rank00001.json, written by the dying process itself.

The supervisor reads these to find the one cause of a world's end. A process that is killed by a signal writes
none; its exit status is all there is. Nothing here decides who is to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from duoka.errors import DuokaError
from duoka.runs.folder import RunFolder, read_json, write_json_atomic

_SPARE = ".failure-rank"  # how the names of reserved files begin
_SPARE_BYTES = 4096


@dataclass(frozen=True)
class Failure:
    """One rank's own account. `traceback` is empty for a fault that a user can act on."""

    rank: int
    pid: int
    time: float  # wall clock, when the error reached the top
    step: int  # the last optimizer step that was finished
    exit_code: int
    kind: str  # the exception's type
    lines: tuple[str, ...]  # the message
    traceback: str = ""


def reserve_account(run: RunFolder, rank: int) -> None:
    """Take the room of one account on the disk: when a full disk is what a rank dies of, it can say so there."""
    with contextlib.suppress(OSError):
        _spare(run, rank).write_bytes(b" " * _SPARE_BYTES)


def drop_reserved(run: RunFolder) -> None:
    for path in run.logs.glob(f"{_SPARE}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _spare(run: RunFolder, rank: int) -> Path:
    return run.logs / f"{_SPARE}{rank:05d}"


def _write_reserved(path: Path, failure: Failure) -> None:
    """Over what is there already, so that no new block is needed; what an account may do without is left out."""
    facts = {**asdict(failure), "traceback": failure.traceback[-_SPARE_BYTES // 4 :]}
    line = json.dumps(facts).encode()
    if len(line) > _SPARE_BYTES:
        facts |= {"traceback": "", "lines": [text[:300] for text in failure.lines[:3]]}
        line = json.dumps(facts).encode()
    with path.open("r+b") as file:
        file.write(line.ljust(_SPARE_BYTES))


def write_failure(run: RunFolder, rank: int, error: BaseException, step: int) -> Failure:
    """Leave the account where the supervisor looks for it; a full disk must not hide the error itself."""
    known = isinstance(error, DuokaError)
    failure = Failure(
        rank=rank,
        pid=os.getpid(),
        time=time.time(),
        step=step,
        exit_code=error.exit_code if isinstance(error, DuokaError) else 1,
        kind=type(error).__name__,
        lines=tuple(error.lines() if isinstance(error, DuokaError) else str(error).splitlines()),
        traceback="" if known else "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    )
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
        write_json_atomic(run.logs / f"failure-rank{rank:05d}.json", asdict(failure))
    except OSError:
        try:
            _write_reserved(_spare(run, rank), failure)
        except OSError:
            traceback.print_exception(type(error), error, error.__traceback__)
    return failure


def read_failures(run: RunFolder) -> list[Failure]:
    """All accounts that are there, the earliest first."""
    known = {field.name for field in fields(Failure)}
    found = []
    for path in [*sorted(run.logs.glob("failure-rank*.json")), *sorted(run.logs.glob(f"{_SPARE}*"))]:
        raw = read_json(path)
        if raw is None:
            continue
        try:
            values = {key: value for key, value in raw.items() if key in known}
            found.append(Failure(**{**values, "lines": tuple(raw.get("lines", ()))}))
        except TypeError:
            continue
    return sorted(found, key=lambda failure: failure.time)


def clear_failures(run: RunFolder) -> None:
    """Accounts of an earlier start would be taken for the cause of this one's end."""
    drop_reserved(run)
    for path in run.logs.glob("failure-rank*.json"):
        path.unlink(missing_ok=True)
