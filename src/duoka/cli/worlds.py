"""Commands that start themselves again as every rank of a world: `duoka eval`, `duoka comm test`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path


def run_same_command(arguments: Sequence[str], num_processes: int) -> int:
    """`duoka ARGUMENTS` on every rank. Logs go to a temporary folder, which stays only when they explain a failure."""
    from duoka.cli.train import print_verdict
    from duoka.cluster.launch import WorldSpec, python_module
    from duoka.cluster.supervise import run_world
    from duoka.runs.folder import RunFolder

    folder = Path(tempfile.mkdtemp(prefix=f"duoka-{arguments[0]}-"))
    run = RunFolder(folder)
    run.make()
    verdict = run_world(WorldSpec(python_module("duoka", *arguments), num_processes, run, resumes=False))
    if verdict.exit_code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    print_verdict(verdict)
    return verdict.exit_code
