"""trackio: a run there for a run here, in SQLite files. TRACKIO_DIR, _SPACE_ID and _SERVER_URL mean their own.

Without them its files lie in the run folder: `TRACKIO_DIR=RUN/trackio trackio show` shows them, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, eval_scalars, step_scalars

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # there nothing is renamed from here


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
        self._options = {**options, **facts.options}
        self._is_here = facts.goes_on and not any(os.environ.get(name) for name in _ELSEWHERE)
        self._begin(facts.kept_steps)
        if facts.goes_on:
            say(f"trackio: {os.environ.get('TRACKIO_SPACE_ID') or 'kept in ' + os.environ['TRACKIO_DIR']}")

    def _begin(self, last: int) -> None:
        """trackio deletes whole runs alone. Where steps after `last` were thrown away, what counts is another run, and
        the old one has another name."""
        kept = self._put_aside(last) if self._is_here else None
        self._run = self._trackio.init(**{**self._options, **({} if kept is None else {"resume": "never"})})
        for row in kept or ():
            numbers = {key: value for key, value in row.items() if key not in ("step", "timestamp")}
            self._run.log(numbers, step=row["step"])

    def _put_aside(self, last: int) -> list[dict[str, Any]] | None:
        """The rows of the old run that count; None where all of them do."""
        from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found, unused-ignore]

        project, name = self._options["project"], self._options["name"]
        if not SQLiteStorage.get_project_db_path(project).exists():
            return None
        runs = list(self._trackio.Api().runs(project))
        old = next((run for run in runs if run.name == name), None)
        rows = [] if old is None else SQLiteStorage.get_logs(project, name, run_id=old.id)
        if old is None or all(row["step"] <= last for row in rows):
            return None
        aside, taken = f"{name}, went back to step {last}", {run.name for run in runs}
        old.rename(next(one for one in (aside, *(f"{aside} ({i})" for i in range(2, 999))) if one not in taken))
        return [row for row in rows if row["step"] <= last]

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        if type == "resume":  # a rollback in the middle of a run
            self._run.finish()
            self._begin(step)

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
