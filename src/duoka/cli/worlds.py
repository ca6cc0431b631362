"""Commands that start themselves on every rank of a world: `duoka eval`, `duoka score`, `duoka comm test`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cluster.launcher import Launcher
    from duoka.process.environ import RankEnvironment


@dataclass(frozen=True)
class Part:
    """This process's part in such a command: a rank of somebody's world, or who starts ranks, here or on each node."""

    place: RankEnvironment | None  # None: it starts ranks
    node: Mapping[str, str]  # of several, each with a launcher: as srun says it; empty: this machine alone

    @property
    def speaks(self) -> bool:
        """Whether notes are this process's to print: they are printed once, for the whole world."""
        from duoka.process.lifeline import parent_pid

        if self.place is None:
            return self.node.get("NODE_RANK", "0") == "0"
        return self.place.rank == 0 and parent_pid() is None

    @property
    def num_nodes(self) -> int:
        return int(self.node.get("NNODES", "1"))

    @property
    def launcher(self) -> Launcher:
        from duoka.cluster.nodes import FixedNodes
        from duoka.cluster.restart import LocalLauncher

        if not self.node:
            return LocalLauncher()
        place = int(self.node["NODE_RANK"])
        return FixedNodes(self.num_nodes, place, self.node["MASTER_ADDR"], int(self.node["MASTER_PORT"]))

    def starts(self, num_processes: int) -> bool:
        """Whether ranks are to be started: a process alone is a rank itself."""
        return self.place is None and (num_processes > 1 or bool(self.node))


def find_part(nproc: int | None) -> Part:
    """By the environment; `nproc` is what was typed."""
    from duoka.errors import ConfigError
    from duoka.process.environ import read_rank_environment
    from duoka.process.place import adopt_step, refused_once

    node = adopt_step(os.environ)
    place = read_rank_environment()
    if place is not None and nproc not in (None, place.size):
        error = ConfigError(
            f"--nproc is {nproc}, and this process is one of {place.size} that were started already",
            where="RANK and WORLD_SIZE are set in the environment, or are what srun or mpirun says",
            fix="leave --nproc out, or start the command once",
        )
        raise refused_once(error)
    return Part(place, node)


def run_same_command(
    arguments: Sequence[str], num_processes: int, part: Part, env: Mapping[str, str] | None = None
) -> int:
    """`duoka ARGUMENTS` on every rank, with `env` beside the environment: `num_processes` here, and on each other node
    of which a process does the same.

    Logs go to a temporary folder, which stays only when they explain a failure.
    """
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.launcher import Spec
    from duoka.process.interpreter import python_module
    from duoka.runs.folder import RunFolder
    from duoka.runs.heart import STOP_S

    launcher = part.launcher
    launcher.check()
    folder = Path(tempfile.mkdtemp(prefix=f"duoka-{arguments[0]}-"))
    run = RunFolder(folder)
    run.make()
    spec = Spec(
        python_module("duoka", *arguments), num_processes, run, env=env or {}, resumes=False, stop_within_s=STOP_S
    )
    verdict = launcher.start(spec, lambda text: click.echo(text, err=True))
    if verdict.exit_code == 0 or verdict.stopped:
        shutil.rmtree(folder, ignore_errors=True)
    print_verdict(verdict)
    return verdict.exit_code
