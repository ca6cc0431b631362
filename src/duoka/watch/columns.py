"""The steps of a run as columns of numbers: 100,000 of them are some megabytes, and a curve is one column.

Made by History from the event log's lines. A value that a line lacks, or that was not finite, is NaN here and None in
a `LoggedStep`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

PARTS = ("rollouts", "data", "forward", "backward", "wait", "optimizer", "checkpoint")
_NOT_VALUES = ("v", "t", "step")
_MOST_COLUMNS = 64  # a damaged log could name ever new ones
_NAN = math.nan
_LARGEST = sys.float_info.max  # damage makes whole numbers that are larger than any float, and than any step
_LARGEST_STEP = 2**63 - 1


@dataclass(frozen=True)
class LoggedStep:
    """One optimizer step, global numbers; None where the log has no number."""

    step: int
    epoch: float | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    num_tokens: float | None
    num_samples: float | None
    step_s: float | None
    memory_bytes: float | None
    times: Mapping[str, float]
    sent_bytes: float | None = None  # by rank 0, to the others


class StepColumns(Sequence[LoggedStep]):
    """Steps rise, each once: one that comes again, without a resume in between, counts as the later."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._totals: dict[str, tuple[int, float, int]] = {}  # by name: steps counted, their sum, how many are NaN

    def put(self, step: int, event: Mapping[str, Any]) -> None:
        count = len(self._steps)
        if count and step <= self._steps[-1]:
            self._put_back(step, event)
            return
        self._steps.append(step)
        columns = self._columns
        for key, value in event.items():
            kind = type(value)
            if (kind is float or kind is int) and key not in _NOT_VALUES:
                column = columns.get(key)
                if column is None:
                    if len(columns) >= _MOST_COLUMNS:
                        continue
                    column = columns[key] = array("d", itertools.repeat(_NAN, count))
                column.append(value if -_LARGEST <= value <= _LARGEST else _NAN)
        for column in columns.values():
            if len(column) == count:
                column.append(_NAN)

    def _put_back(self, step: int, event: Mapping[str, Any]) -> None:
        """One that does not come last."""
        self._totals.clear()
        place = bisect.bisect_left(self._steps, step)
        is_known = self._steps[place] == step
        self._steps[place : place + is_known] = array("q", [step])
        for key in event.keys() - self._columns.keys() - set(_NOT_VALUES):
            if number(event[key]) is not None and len(self._columns) < _MOST_COLUMNS:
                self._columns[key] = array("d", itertools.repeat(_NAN, len(self._steps) - 1 + is_known))
        for key, column in self._columns.items():
            value = number(event.get(key))
            column[place : place + is_known] = array("d", [_NAN if value is None else value])

    def drop_after(self, step: int) -> int:
        """How many are gone."""
        self._totals.clear()
        place = bisect.bisect_right(self._steps, step)
        count = len(self._steps) - place
        del self._steps[place:]
        for column in self._columns.values():
            del column[place:]
        return count

    def names(self) -> list[str]:
        return list(self._columns)

    def numbers(self) -> array[int]:
        """The steps' own numbers."""
        return self._steps[:]

    def column(self, name: str, last: int | None = None) -> array[float]:
        """One value of all steps, or of the last ones; NaN where there is none."""
        found = self._columns.get(name)
        count = len(self._steps) if last is None else min(last, len(self._steps))
        return array("d", itertools.repeat(_NAN, count)) if found is None else found[len(found) - count :]

    def total(self, name: str, last: int | None = None) -> float:
        """The sum of what is above zero."""
        if last is None:
            return self._count(name)[1]
        return sum(value for value in self.column(name, last) if value > 0)

    def num_missing(self, name: str) -> int:
        """Steps without a number of this name."""
        return self._count(name)[2]

    def _count(self, name: str) -> tuple[int, float, int]:
        """Over all steps; those that were counted before are not looked at again."""
        seen, total, missing = self._totals.get(name, (0, 0.0, 0))
        new = self.column(name, len(self._steps) - seen)
        total += sum(value for value in new if value > 0)
        missing += sum(map(math.isnan, new))
        self._totals[name] = len(self._steps), total, missing
        return self._totals[name]

    def num_bytes(self) -> int:
        return len(self._steps) * self._steps.itemsize * (1 + len(self._columns))

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> LoggedStep: ...
    @overload
    def __getitem__(self, place: slice) -> list[LoggedStep]: ...
    def __getitem__(self, place: int | slice) -> LoggedStep | list[LoggedStep]:
        if isinstance(place, slice):
            return [self._at(one) for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self._at(place % len(self))

    def __iter__(self) -> Iterator[LoggedStep]:
        return (self._at(place) for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """NaN is equal to NaN here; a column without any value is as good as none."""
        return isinstance(other, StepColumns) and list(self) == list(other)

    def __hash__(self) -> int:
        return id(self)

    def _at(self, place: int) -> LoggedStep:
        def value(name: str) -> float | None:
            column = self._columns.get(name)
            return None if column is None or math.isnan(column[place]) else column[place]

        times = {name: value(f"{name}_s") for name in PARTS}
        return LoggedStep(
            step=self._steps[place],
            epoch=value("epoch"),
            loss=value("loss"),
            grad_norm=value("grad_norm"),
            lr=value("lr"),
            num_tokens=value("num_tokens"),
            num_samples=value("num_samples"),
            step_s=value("step_s"),
            memory_bytes=value("memory_bytes"),
            times={name: seconds for name, seconds in times.items() if seconds is not None and seconds > 0},
            sent_bytes=value("sent_bytes"),
        )


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a log may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST else None


def whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None or abs(found) > _LARGEST_STEP else int(found)
