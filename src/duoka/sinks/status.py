"""Where the run stands, for `duoka runs`: rank 0's file, and the leader's file where no launcher leads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from duoka.process.lifeline import is_supervised, launcher_speaks, parent_pid
from duoka.runs.folder import RunFolder
from duoka.runs.status import ProgressFile, leader_identity, update_status
from duoka.sinks.sink import RunFacts, Sink, StepNumbers

_EVERY_S = 1.0


class StatusFiles(Sink):
    name = "status"
    trouble = "progress.json cannot be written"

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        self._run = RunFolder(facts.folder)
        self._facts = facts
        self._written_at = 0.0
        # An elastic world is led by its launcher, which writes when a world has ended; until then we say who it is.
        self._leads = not is_supervised() and not launcher_speaks()

    def started(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        state = {"state": "running", "world_size": self._facts.world_size, "exit_code": None, "cause": ""}
        try:
            if self._leads:
                update_status(self._run, **state, **leader_identity())
        finally:  # a full disk now may have room at the next step
            self._progress = ProgressFile(self._run)
        leader = leader_identity(parent_pid()) if launcher_speaks() else {}
        self._progress.update(**state, step=step, total_steps=self._facts.total_steps, **leader)

    def step(self, now: StepNumbers) -> None:
        if time.monotonic() - self._written_at < _EVERY_S and now.step < self._facts.total_steps:
            return
        self._written_at = time.monotonic()
        loss, speed = now.numbers["loss"], round(now.recent_tokens_per_s, 2)
        self._progress.update(step=now.step, loss=loss, tokens_per_s=speed)

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        if exit_code and launcher_speaks():
            self._progress.update(step=step)  # it may be only the world that ends: the launcher says which
            return
        state = {"state": "stopped" if exit_code else "done", "exit_code": exit_code, "cause": cause}
        self._progress.update(step=step, **state)
        if self._leads:
            update_status(self._run, **state)
