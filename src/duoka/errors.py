"""What can go wrong, in users' words, and the exit code that each fault ends with.

DuokaError                1   a bug, unless a subclass says otherwise
├── ConfigError           2   the YAML, a flag, or a path in it
│   └── DataError         2   a record or file of training data
├── DoctorError           3   the machine has a blocker
├── DoesNotFit            4   the plan says that memory is not enough
├── WorkerFailed          5   a process of the run died or hung
├── StorageError          6   full, read-only or damaged storage
└── StoppedEarly         75   saved and left: start the same command to go on

An error carries what was seen, where, and what to do. `Faults` bundles all faults of one file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass


class DuokaError(Exception):
    """A fault that a user can act on: `what` was seen, `where`, and how to `fix` it."""

    exit_code = 1
    title = "error"

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def lines(self) -> list[str]:
        """The message as printed, one line each."""
        out = [f"{self.title}: {self.what}"]
        out += [f"  {line}" for line in (self.where or "").splitlines()]
        out += [f"  {line}" for line in (self.fix or "").splitlines()]
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


class ConfigError(DuokaError):
    exit_code = 2
    title = "config error"


class DataError(ConfigError):
    title = "data error"


class DoctorError(DuokaError):
    exit_code = 3
    title = "doctor"


class DoesNotFit(DuokaError):
    exit_code = 4
    title = "does not fit"


class WorkerFailed(DuokaError):
    exit_code = 5
    title = "worker failed"


class StorageError(DuokaError):
    exit_code = 6
    title = "storage error"


class StoppedEarly(DuokaError):
    exit_code = 75
    title = "stopped early"


@dataclass(frozen=True)
class Fault:
    """One fault of a file: what is wrong with the value, at which line and key, what to write instead."""

    what: str
    key: str = ""
    file: str = ""
    line: int = 0  # 1-based; 0 when there is no line
    source: str = ""  # the line as the user wrote it
    fix: str = ""

    def lines(self) -> list[str]:
        place = ", ".join(part for part in (self.file, f"line {self.line}" if self.line else "") if part)
        shown = f"{place}:   {self.source.strip()}" if place and self.source.strip() else place
        return [self.what] + [f"  {line}" for text in (shown, self.fix) for line in text.splitlines()]


class Faults(ConfigError):
    """Every fault of one input, reported together, so that nobody mends a file ten times."""

    def __init__(self, faults: Sequence[Fault], *, title: str = "config error") -> None:
        self.faults = tuple(faults)
        self.title = title
        super().__init__(self.faults[0].what if self.faults else "")

    def lines(self) -> list[str]:
        out: list[str] = []
        for fault in self.faults:
            first, *rest = fault.lines()
            out += [f"{self.title}: {first}", *rest]
        return out


def typed(word: object) -> str:
    """A path or name as it is typed in a command that a message shows: in quotes where a shell would cut it."""
    text = str(word)
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else shlex.quote(text)
