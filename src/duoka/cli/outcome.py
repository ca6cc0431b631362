"""How a start ended, or would begin, on the screen: for every command that starts processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cluster.verdict import Verdict
    from duoka.runs.folder import RunFolder


def print_verdict(verdict: Verdict) -> None:
    """One message on top, then its traceback once and where the logs are."""
    from duoka.cli import print_error

    if verdict.lines and verdict.stopped:
        click.echo("\n".join((*verdict.lines, *verdict.details)), err=True)
    elif verdict.lines:
        print_error((*verdict.lines, *verdict.details))


def print_plan(config: str, overrides: tuple[str, ...], run: RunFolder, kind: str, num_processes: int) -> int:
    """What would happen, and then the plan of `duoka plan`, with its exit code."""
    from duoka.cli.plan import command as plan

    words = {"new": "a new run", "resumed": "goes on with the run there", "finished": "the run there is finished"}
    click.echo(f"{config}: no fault. {run.path}: {words[kind]}\n")
    assert plan.callback is not None
    return int(plan.callback(config=config, overrides=overrides, nproc=num_processes, as_json=False))
