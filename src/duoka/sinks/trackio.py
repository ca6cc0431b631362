"""trackio: a run there for a run here, in SQLite files. TRACKIO_DIR, _SPACE_ID and _SERVER_URL mean their own.

Without them its files lie in the run folder: `TRACKIO_DIR=RUN/trackio trackio show` shows them, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, eval_scalars, step_scalars


class TrackioSink(Sink):
    name = "trackio"
    trouble = "trackio does not get all numbers"
    is_remote = True

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        folder = facts.folder / "trackio"
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))  # read when it is imported
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio  # type: ignore[import-not-found, unused-ignore]

        self._trackio = trackio
        options: dict[str, Any] = {
            "project": os.environ.get("TRACKIO_PROJECT") or facts.project, "name": facts.name, "embed": False,
            "config": dict(facts.config), "auto_log_gpu": False, "auto_log_cpu": False,
            "resume": "allow" if facts.goes_on else "never",
        }  # fmt: skip
        self._run = trackio.init(**{**options, **facts.options})
        if facts.goes_on:
            say(f"trackio: {os.environ.get('TRACKIO_SPACE_ID') or 'kept in ' + os.environ['TRACKIO_DIR']}")

    def step(self, now: StepNumbers) -> None:
        self._run.log(step_scalars(now), step=now.step)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(eval_scalars(values), step=step)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        text = "\n\n".join(f"{one}|{text}" for one, text in pairs)
        self._run.log({"samples": self._trackio.Markdown(text)}, step=step)

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step, **options)

    def close(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def handle(self) -> Any:
        return self._run
