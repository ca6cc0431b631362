"""What a run sees to beside learning, each a `Concern` with its own file and state, at four moments of the run.

run.py builds them as one ordered tuple; the loop and the step tell `Moments`, which tells each in that order. All
ranks have the same concerns and reach the same moments, so a concern may communicate in `after_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from duoka.parallel.engine import PassObserver


@dataclass(frozen=True)
class StepEnd:
    """A step as the loop ends it: recorded, and evaluated where that was due; not saved yet. The same on all ranks."""

    step: int
    has_learned: bool = True  # else its numbers were not finite and the batch was left out
    is_evaluated: bool = False


class Concern(PassObserver):
    """Overrides the moments that it cares for: these, a pass's forward and its `after_backward`."""

    def start(self) -> None:
        """Everything is built, and no batch was seen."""

    def after_step(self, end: StepEnd) -> None:
        """Between two steps."""

    def end(self) -> None:
        """The run is over, however it ended."""


class Moments(Concern):
    """All concerns of a run as one."""

    def __init__(self, concerns: tuple[Concern, ...] = ()) -> None:
        self.concerns = concerns

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """The run's length: from `start` to `end`, which each hears, also when one before it raises."""
        with contextlib.ExitStack() as stack:
            for concern in self.concerns:
                stack.callback(concern.end)
                concern.start()
            yield

    @contextlib.contextmanager
    def forward(self, num_tokens: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for concern in self.concerns:
                stack.enter_context(concern.forward(num_tokens))
            yield

    def after_backward(self) -> None:
        for concern in self.concerns:
            concern.after_backward()

    def after_step(self, end: StepEnd) -> None:
        for concern in self.concerns:
            concern.after_step(end)
