"""Commands that start themselves on every rank of a world: `duoka eval`, `duoka comm test`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click


def run_same_command(arguments: Sequence[str], num_processes: int, env: Mapping[str, str] | None = None) -> int:
    """`duoka ARGUMENTS` on every rank, with `env` beside the environment.

    Logs go to a temporary folder, which stays only when they explain a failure.
    """
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.launcher import Spec
    from duoka.cluster.restart import LocalLauncher
    from duoka.process.interpreter import python_module
    from duoka.runs.folder import RunFolder
    from duoka.runs.heart import STOP_S

    folder = Path(tempfile.mkdtemp(prefix=f"duoka-{arguments[0]}-"))
    run = RunFolder(folder)
    run.make()
    spec = Spec(
        python_module("duoka", *arguments), num_processes, run, env=env or {}, resumes=False, stop_within_s=STOP_S
    )
    verdict = LocalLauncher().start(spec, lambda text: click.echo(text, err=True))
    if verdict.exit_code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    print_verdict(verdict)
    return verdict.exit_code
