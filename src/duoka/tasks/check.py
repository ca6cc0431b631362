"""Faults of the tasks that a config names for scoring while it trains: said before anything starts."""

from __future__ import annotations

from pathlib import Path

from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, Fault
from duoka.tasks.find import find_tasks


def check_tasks(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of `train.eval_tasks`."""
    faults = []
    for place, name in enumerate(config.train.eval_tasks):
        key = f"train.eval_tasks.{place}"
        try:
            tasks = find_tasks(name, base)
            if any(task.runs_code for task in tasks):
                what = f"task {name} runs programs that the model wrote, and no training does that"
                faults.append(
                    Fault(what, key=key, fix="score it after the run:   duoka eval RUN --tasks ... --run-code")
                )
            elif not all(task.items("test") for task in tasks):
                faults.append(Fault(f"task {name} has no test items", key=key))
        except ConfigError as error:
            faults.append(Fault(error.what, key=key, fix=error.fix or ""))
    return faults
