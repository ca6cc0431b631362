"""`duoka train run.yaml --slurm partition=gpu,nodes=2,time=2h`: the run as a batch job of Slurm."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from duoka.cli.prepare import Say

if TYPE_CHECKING:
    from duoka.cluster.nodes import Flags
    from duoka.cluster.slurm import Job


def train_in_job(slurm: str, config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool) -> int:
    """Print the batch script, or submit it and follow its log; the exit code is the run's."""
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.slurm import follow, render, submit

    typed = shlex.join(["duoka", "train", config, *overrides, "--slurm", slurm])
    job = _job(slurm, config, overrides, flags)
    if dry_run:
        click.echo(render(job, typed), nl=False)
        return 0
    number = submit(job, typed)
    say = Say()
    say(f"job {number} is submitted: {job.script}; its log: {job.log.replace('%j', number)}")
    verdict = follow(job, number, say)
    print_verdict(verdict)
    return verdict.exit_code


def _job(slurm: str, config: str, overrides: tuple[str, ...], flags: Flags) -> Job:
    from duoka.cluster.run_lock import find_run_folder
    from duoka.cluster.slurm import Job, read_asked
    from duoka.config.load import load_config
    from duoka.errors import ConfigError
    from duoka.process.interpreter import python_module

    if flags.nodes or flags.meet or flags.wait or flags.port:
        raise ConfigError(
            "--nodes, --meet, --wait and --port are not for --slurm", fix="Slurm knows the nodes:   --slurm nodes=2"
        )
    asked = read_asked(slurm)
    loaded = load_config(config, overrides)
    words = (("--nproc", flags.nproc), ("--restarts", flags.restarts))
    passed = [part for name, value in words if value for part in (name, str(value))]
    # The YAML's own hosts are for who starts machines by ssh.
    alone = ["cluster.hosts=[]"] if loaded.config.cluster.hosts else []
    command = python_module("duoka", "train", config, *overrides, *alone, *passed)
    return Job(asked, command, os.getcwd(), find_run_folder(loaded).path)
