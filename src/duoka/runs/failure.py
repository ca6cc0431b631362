"""How a rank says why it ended: logs/failure-rank00001.json, written by the dying process itself.

The supervisor reads these to find the one cause of a world's end. A process that is killed by a signal writes
none; its exit status is all there is. Nothing here decides who is to blame.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import asdict, dataclass, fields

from duoka.errors import DuokaError
from duoka.runs.folder import RunFolder, read_json, write_json_atomic


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
        traceback.print_exception(type(error), error, error.__traceback__)
    return failure


def read_failures(run: RunFolder) -> list[Failure]:
    """All accounts that are there, the earliest first."""
    known = {field.name for field in fields(Failure)}
    found = []
    for path in sorted(run.logs.glob("failure-rank*.json")):
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
    for path in run.logs.glob("failure-rank*.json"):
        path.unlink(missing_ok=True)
