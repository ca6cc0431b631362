"""`duoka eval RUN --tasks a,b`: scores of tasks. Not a command itself: eval.py calls it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.serve.load_run import Trained
    from duoka.serve.score_tasks import Asked


@dataclass(frozen=True)
class TaskFlags:
    """The flags of `duoka eval` that are for tasks."""

    tasks: str | None
    limit: int | None
    batch: int
    out: str | None
    run_code: bool

    def read(self, precision: str, data: Sequence[str]) -> Asked | None:
        """None without --tasks. Refuses what is no task before anything is loaded."""
        from duoka.errors import ConfigError
        from duoka.serve.score_tasks import Asked, find_asked

        if self.tasks is None:
            if self.limit or self.out or self.run_code:
                raise ConfigError(
                    "--limit, --out and --run-code are for tasks", fix="add --tasks A,B, or leave them out"
                )
            return None
        if data:
            raise ConfigError("--data and --tasks are two ways to measure", fix="give one of them")
        names = tuple(name.strip() for name in self.tasks.split(",") if name.strip())
        if not names:
            raise ConfigError("--tasks names no task", fix="write for example:   --tasks arithmetic,gsm8k:FOLDER")
        asked = Asked(names, self.limit, self.batch, "fp32" if precision == "auto" else precision, self.run_code)
        find_asked(asked)
        return asked

    def words(self) -> list[str]:
        """The same flags, for each process of a world."""
        if self.tasks is None:
            return []
        given = {"limit": self.limit, "out": self.out}
        words = [f"--tasks={self.tasks}", f"--batch={self.batch}", *(["--run-code"] if self.run_code else [])]
        return [*words, *(f"--{name}={value}" for name, value in given.items() if value is not None)]

    def folder(self, trained: Trained) -> Path:
        """Of a run, its own folder evals; of a model, one under ./evals."""
        if self.out is not None:
            return Path(self.out).expanduser()
        if trained.run is not None:
            return trained.run.path / "evals"
        return Path("evals") / (re.sub(r"[^\w.-]+", "-", trained.name.strip("/")) or "model")


def score(trained: Trained, asked: Asked, out: Path, *, base: bool, as_json: bool, speaks: bool) -> int:
    """Measure in this process's world, and print on rank 0: each task's score when it is there."""
    from duoka.serve.score_tasks import score_tasks

    is_shown = speaks and not as_json
    if is_shown:
        click.echo(f"{trained.name} before training" if base else trained.name)

    def show(sentence: str) -> None:
        if is_shown:
            click.echo(f"  {sentence}")

    found = score_tasks(trained, asked, out, base_only=base, say=show)
    if speaks and as_json:
        click.echo(json.dumps({"model": trained.name, "folder": str(out), "tasks": [asdict(one) for one in found]}))
    if not is_shown:
        return 0
    core = [one for one in found if one.task.startswith("core/")]
    if len(core) > 1:
        mean = sum(one.centered for one in core) / len(core)
        click.echo(f"  CORE {mean:.4f} (mean of {len(core)} centered scores)")
    click.echo(f"  every item: {out}")
    return 0
