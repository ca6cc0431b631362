"""Weights & Biases: a run there for a run here. WANDB_PROJECT, WANDB_MODE and its other variables mean what they mean.

Its own files lie in the run folder, so that `wandb sync` brings up what could not be sent.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.process.secrets import hide_in_command
from duoka.sinks.sink import RunFacts, Sink, StepNumbers, eval_scalars, step_scalars

_ID_FILE = "duoka-run-id"
_FULL_BYTES = 64 * 2**10  # with less, its next block finds no place
# It would send whatever is printed here, and print lines of its own between ours.
_QUIET = {"console": "off", "silent": True}


class WandbSink(Sink):
    name = "wandb"
    trouble = "Weights & Biases does not get all numbers"
    is_remote = True

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self._wandb = wandb
        options: dict[str, Any] = {"dir": str(facts.folder), "config": dict(facts.config)}
        self._is_duokas = facts.goes_on
        self._exit_code = 1  # until the run says how it ended
        if facts.goes_on:
            sys.argv = hide_in_command(sys.argv)  # it notes the command line
            options |= {"name": os.environ.get("WANDB_NAME") or facts.name, "settings": wandb.Settings(**_QUIET)}
            options |= {"id": os.environ.get("WANDB_RUN_ID") or self._read_id(facts), "resume": "allow"}
        project = os.environ.get("WANDB_PROJECT") if facts.goes_on else None
        self._run = wandb.init(**{"project": project or facts.project, **options, **facts.options})
        self._folder = facts.folder if getattr(self._run, "offline", False) else None
        if facts.goes_on:
            # Its own count of steps never goes back; a run that goes on from a checkpoint does.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
            say(f"Weights & Biases: {getattr(self._run, 'url', None) or f'kept in {self._run.dir}'}")

    def _read_id(self, facts: RunFacts) -> str:
        """The same at every start in this folder: curves go on. A new folder of the same name is another run."""
        path = facts.folder / "wandb" / _ID_FILE
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            path.write_text(secrets.token_hex(4), encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()

    def step(self, now: StepNumbers) -> None:
        self._log({**step_scalars(now), "step": now.step})

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._log({**eval_scalars(values), "step": step})

    def _log(self, values: Mapping[str, Any]) -> None:
        """Offline its file is all there is, written by a process of its own, which tells nobody of a full disk."""
        self._run.log(dict(values))
        if self._folder is not None:
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        table = self._wandb.Table(columns=["beginning", "what follows"], data=[list(pair) for pair in pairs])
        self._log({"samples": table, "step": step})

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step, **options)

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._exit_code = 0  # a run that was stopped has not failed

    def close(self) -> None:
        if not self._is_duokas:
            self._run.finish()
            return
        self._run.finish(exit_code=self._exit_code)
        self._wandb.teardown()  # else its own process outlives this one by a while

    @property
    def handle(self) -> Any:
        return self._run
