"""The event log as a sink: every global number and event of a run, one JSON line each (runs/events.py says which)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.runs.events import EventWriter, global_log
from duoka.runs.folder import RunFolder
from duoka.sinks.sink import RunFacts, Sink, StepNumbers


class EventLog(Sink):
    name = "event log"
    trouble = "the event log cannot be written"

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        self._log = EventWriter(global_log(RunFolder(facts.folder)))

    def started(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self._write(kind, step=step, **facts)

    def step(self, now: StepNumbers) -> None:
        self._write(
            "step", step=now.step, **now.numbers, **now.metrics, tokens_per_s=round(now.tokens_per_s, 2),
            step_s=round(now.step_s, 6), **now.own, memory_bytes=now.memory_bytes,
        )  # fmt: skip

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._write("eval", step=step, **values)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        self._write("samples", step=step, samples=[{"prompt": one, "text": text} for one, text in pairs])

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        self._write(type, step=step, **values)

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._write("end", step=step, reason=reason)

    def _write(self, type: str, **values: Any) -> None:
        self._log.write(type, **values)
        if self._log.fault:
            raise OSError(self._log.fault)

    def close(self) -> None:
        self._log.close()
