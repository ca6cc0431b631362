"""`duoka train run.yaml --slurm partition=gpu,nodes=2,time=2h`: the run as a batch job of Slurm."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from duoka.cli.prepare import Say

if TYPE_CHECKING:
    from duoka.cluster.nodes import Flags
    from duoka.cluster.slurm import Job


def train_in_job(
    slurm: str, config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool, sweep: tuple[str, ...] = ()
) -> int:  # fmt: skip
    """Print the batch script, or submit it and follow its log; the exit code is the run's."""
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.slurm import follow, render, submit
    from duoka.cluster.slurm_jobs import note_job

    swept = [word for text in sweep for word in ("--sweep", text)]
    typed = shlex.join(["duoka", "train", config, *overrides, *swept, "--slurm", slurm])
    job = _job(slurm, config, overrides, flags, sweep)
    if dry_run:
        click.echo(render(job, typed), nl=False)
        return 0
    number = submit(job, typed)
    say = Say()
    if job.points:
        for task, run in enumerate(_runs_of(job)):
            note_job(run, f"{number}_{task}")
        say(f"job {number} is submitted with {len(job.points)} runs: {job.script}")
        say(f"they stand in:   duoka runs {job.run.parent}")
        return 0
    note_job(job.run, number)
    say(f"job {number} is submitted: {job.script}; its log: {job.log.replace('%j', number)}")
    verdict = follow(job, number, say)
    print_verdict(verdict)
    return verdict.exit_code


def _runs_of(job: Job) -> list[Path]:
    return [Path(point[-1].removeprefix("output=")) for point in job.points]


def _job(slurm: str, config: str, overrides: tuple[str, ...], flags: Flags, sweep: tuple[str, ...] = ()) -> Job:
    from duoka.cluster.run_lock import find_run_folder
    from duoka.cluster.slurm import Job, read_asked
    from duoka.cluster.slurm_jobs import point_name, read_sweep
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
    run = find_run_folder(loaded).path
    swept = read_sweep(sweep) if sweep else []
    names = [point_name(point) for point in swept]
    if len(set(names)) < len(names):  # a/b and a-b
        names = [f"{number},{name}" for number, name in enumerate(names)]
    points = [
        (*point, f"output={run.with_name(f'{run.name}-{name}')}") for point, name in zip(swept, names, strict=True)
    ]
    for point in points:  # what is refused is refused now, and not in the night
        load_config(config, (*overrides, *point))
    return Job(asked, command, os.getcwd(), run, points)
