"""All sinks of a run as one: each hears everything, in a fixed order, and none of them can stop training.

Made by the trainer's recorder on rank 0, and by an Accelerator for each of its trackers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from duoka.config.trackers import TRACKERS
from duoka.process.secrets import hide_secrets
from duoka.sinks.background import Background
from duoka.sinks.sink import RunFacts, Sink, StepNumbers
from duoka.sinks.trouble import Troubles


def build_sink(name: str) -> Sink:
    """The sink of a tracker that `log.to` or `log_with` names."""
    module, _, kind = TRACKERS[name].sink.partition(":")
    made = getattr(importlib.import_module(module), kind)()
    assert isinstance(made, Sink)
    return made


class Sinks:
    """`tell` takes lines for people where the screen is no sink itself; `warn` one line for each trouble."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        tell: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        say = tell or self.say
        self._tell = lambda text: say(hide_secrets(text))  # a tracker's address may hold a login
        self._troubles = Troubles(warn or say)
        self._sinks: list[Sink] = [Background(sink, self._troubles) if sink.is_remote else sink for sink in sinks]

    def open(self, facts: RunFacts) -> None:
        for sink in tuple(self._sinks):
            if not self._troubles.attempt(sink, partial(sink.open, facts, self._tell)):
                self._sinks.remove(sink)

    def open_now(self, facts: RunFacts) -> None:
        """As `open`, for who wants to hear of trouble: it is raised, and nothing is left to a thread."""
        for sink in self._sinks:
            (sink.open_now if isinstance(sink, Background) else sink.open)(facts, self._tell)

    def started(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.started(kind, step, facts))

    def step(self, now: StepNumbers) -> None:
        self._each(lambda sink: sink.step(now))

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.evaluated(step, values))

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        self._each(lambda sink: sink.samples(step, pairs))

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.event(type, step, values))

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.scalars(values, step, options))

    def say(self, text: str) -> None:
        self._each(lambda sink: sink.say(text))

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._each(lambda sink: sink.ended(step, reason, exit_code, cause))

    def close(self) -> None:
        """The last made is closed first: the screen outlives those whose trouble it shows."""
        for sink in reversed(self._sinks):
            self._troubles.attempt(sink, sink.close)
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):  # a sink's thread may warn while others are opened
            self._troubles.attempt(sink, partial(call, sink))
