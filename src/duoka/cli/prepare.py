"""Before and after the processes that train: the config with its checks, the run folder's files, the closing report.

Called by the process that a user starts (train.py), and by rank 0 where another launcher started the ranks (work.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cluster.launcher import Launcher
    from duoka.config.loaded import Loaded
    from duoka.config.schema import RunConfig
    from duoka.errors import Fault
    from duoka.plan.hardware import Machine
    from duoka.plan.report import Plan
    from duoka.runs.folder import RunFolder


def load_checked(
    config: str, overrides: tuple[str, ...], machine: Machine, world_size: int, *, local_size: int, say: bool = True
) -> Loaded:
    """The config with every check that needs no start; notes go to stderr."""
    from duoka.cli.model_facts import shape_for_axes
    from duoka.config.load import Start, load_config
    from duoka.data.read.registry import check_data
    from duoka.hub.models import check_model
    from duoka.plan.choose import check_machine, check_packages
    from duoka.tasks.check import check_tasks

    def check_here(config: RunConfig, base: Path) -> list[Fault]:
        found = check_machine(config, machine, world_size, local_size, shape_for_axes(config, base))
        return [*found, *check_packages(config)]

    checks = (check_model, check_data, check_tasks, check_here)
    start = Start(world_size, bool(machine.gpus))
    loaded = load_config(config, overrides, checks=checks, start=start)
    for note in loaded.notes if say else ():
        click.echo(f"note: {note}", err=True)
    return loaded


def machine_counts(loaded: Loaded, machine: Machine, launcher: Launcher, num_processes: int) -> tuple[int, ...]:
    """Of machines that come and go: how many may train together, for `tensor: 4` is no matter of any number of ranks.

    Without this a run ended, refused by its own config, when a machine was lost. Others than these are said.
    """
    from duoka.cli.model_facts import shape_for_axes
    from duoka.cluster.elastic import ComingAndGoing
    from duoka.plan.choose import check_machine

    if not isinstance(launcher, ComingAndGoing):
        return ()
    shape = shape_for_axes(loaded.config, loaded.base)
    counts, faults = [], {}
    for count in range(launcher.rules.least, launcher.rules.most + 1):
        found = check_machine(loaded.config, machine, count * num_processes, num_processes, shape)
        if found:
            faults[count] = found[0].what
        else:
            counts.append(count)
    if faults:
        most = max(faults)
        many = f"{' or '.join(map(str, counts))} machines can train together, and others wait"
        click.echo(f"note: {many}; with {most}: {faults[most]}", err=True)
    return tuple(counts)


@dataclass(frozen=True)
class Say:
    """Messages of preparation and supervision, to stderr."""

    def __call__(self, text: str) -> None:
        click.echo(text, err=True)


def prepare_run(
    loaded: Loaded, run: RunFolder, machine: Machine, world_size: int, local_size: int | None = None
) -> Path:
    """What is done once before ranks start: tokens, plan, the run's own files, and the model's folder, returned."""
    from duoka.cli.model_facts import measured
    from duoka.cluster.probe import read_environment_facts
    from duoka.config.load import resolved_yaml
    from duoka.data.dataset_lengths import lengths_of, remember_lengths
    from duoka.data.prepare import prepare_data
    from duoka.data.report import write_data_report
    from duoka.errors import Faults
    from duoka.hub.models import model_folder
    from duoka.plan.axes import check_shape, data_ranks
    from duoka.plan.catalog import local_cluster
    from duoka.plan.offload import with_disk
    from duoka.plan.report import make_plan
    from duoka.plan.shape import read_facts, read_shape
    from duoka.runs.folder import write_json_atomic, write_text_atomic

    say: Callable[[str], None] = Say()
    folder = model_folder(loaded.config.model, loaded.base, say)
    shape = measured(read_shape(folder), read_facts(folder), loaded.config)
    if faults := check_shape(loaded.config.parallel, shape, world_size):
        raise Faults(faults)  # before the data are read, which may take long
    prepared = prepare_data(loaded.config, loaded.base, folder, say=say)
    prepared.check_world(data_ranks(loaded.config.parallel, world_size))
    local = local_size or world_size
    lengths = lengths_of(prepared, loaded.config)
    remember_lengths(lengths, loaded.config, loaded.base)
    machine = with_disk(machine, loaded.config.parallel.offloads, run.path)
    plan = make_plan(
        loaded.config, shape, machine, world_size, lengths=lengths, local_size=local,
        cluster=local_cluster(machine, world_size, local),
    )  # fmt: skip
    _refuse_what_does_not_fit(plan)
    if loaded.path.resolve() != run.config.resolve():
        write_text_atomic(run.config, resolved_yaml(loaded, plan.reasons))
    write_json_atomic(run.plan, plan.to_json())
    write_data_report(prepared.report, run.path)
    write_json_atomic(run.env, read_environment_facts(Path.cwd(), sys.argv))
    return folder


def _refuse_what_does_not_fit(plan: Plan) -> None:
    refusal = plan.refusal()
    if refusal is not None:
        raise refusal


def finish(run: RunFolder) -> int:
    """The closing report: on screen, and as a page in the run folder."""
    from duoka.watch.report import end_lines, write_report

    write_report(run)
    click.echo("\n".join(end_lines(run)))
    return 0
