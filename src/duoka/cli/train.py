"""`duoka train`: from a YAML to a finished run. The parent checks, prepares and supervises; ranks train.

The same command has three parts to play: the one a user types (starts a world), a rank that duoka started (works),
and a rank that torchrun or Slurm started (rank 0 prepares, the others wait, then all work).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli import processes
from duoka.cli.hosts import host_options
from duoka.cli.outcome import print_plan, print_verdict
from duoka.cli.prepare import Say, finish, load_checked, machine_counts, prepare_run

if TYPE_CHECKING:
    from duoka.cluster.launcher import Launcher, Spec
    from duoka.cluster.nodes import Flags
    from duoka.cluster.verdict import Verdict
    from duoka.config.loaded import Loaded
    from duoka.plan.hardware import Machine
    from duoka.process.environ import RankEnvironment
    from duoka.runs.folder import RunFolder


@click.command("train")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--nproc", type=processes.nproc, metavar="N", help="Processes, or auto; default: one per GPU, on a CPU one."
)
@click.option("--port", type=int, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash or hang.")
@click.option("--nodes", default="", metavar="MIN:MAX", help="Machines, which may leave and come back.")
@click.option("--meet", default="", metavar="HOST:PORT", help="The rendezvous: the address of the machine that stays.")
@click.option("--wait", default="", metavar="TIME", help="How long to wait for machines; default: 30min.")
@host_options
@click.option("--slurm", default="", metavar="KEY=VALUE,...", help="As a batch job: partition=gpu,nodes=2,time=2h.")
@click.option("--sweep", multiple=True, metavar="KEY=[A,B]", help="Of --slurm: a run for each value; all combinations.")
@click.option("--k8s", default="", metavar="KEY=VALUE,...", help="As a manifest: image=...,nodes=2,volume=CLAIM:/data.")
@click.option("-o", "--out", default="", metavar="FILE", help="Of --k8s: the file to write; default: print it.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
def command(
    config: str, overrides: tuple[str, ...], dry_run: bool, hosts: str = "", hostfile: str = "", include: str = "",
    exclude: str = "", slurm: str = "", sweep: tuple[str, ...] = (), k8s: str = "", out: str = "", **flags: Any,
) -> int:  # fmt: skip
    """Train as CONFIG says, with values of it replaced: optim.lr=1e-4 data.max_length=1024.

    The output folder of a run that was stopped, or that crashed, is gone on with by the same command.
    Several machines: --hosts A,B starts them all over ssh. Or type it on each, with --nodes 2 --meet HOST:PORT behind
    it (HOST is one of them), or with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in front.
    """
    from duoka.cli.hosts import HostFlags, find_hosts, train_on
    from duoka.cli.kubernetes import write_manifest
    from duoka.cli.slurm import train_in_job
    from duoka.cluster.nodes import Flags
    from duoka.errors import ConfigError
    from duoka.process.environ import read_rank_environment
    from duoka.process.kubernetes import lonely_pod
    from duoka.process.place import adopt_place, refused_once
    from duoka.process.slurm import unused_nodes

    adopt_place(os.environ)
    place = read_rank_environment()
    typed = HostFlags(hosts, hostfile, include, exclude)
    _refuse_contradictions(slurm, k8s, out, sweep, typed != HostFlags())
    if place is None and flags["nproc"] == processes.AUTO:
        _refuse_auto(slurm, k8s, flags["nodes"], typed != HostFlags())
        flags["nproc"] = processes.resolve(processes.AUTO, config, overrides)
    if place is None and k8s:
        return write_manifest(k8s, out, config, overrides, Flags(**flags))
    if place is None and slurm:
        return train_in_job(slurm, config, overrides, Flags(**flags), dry_run=dry_run, sweep=sweep)
    if place is None:
        if note := unused_nodes(os.environ) or lonely_pod(os.environ):
            click.echo(f"note: {note}", err=True)
        found = find_hosts(config, overrides, typed, Flags(**flags))
        if found:
            return train_on(found, config, overrides, Flags(**flags), dry_run=dry_run)
        return start_here(config, overrides, Flags(**flags), dry_run=dry_run)
    if any(flags.values()) or dry_run or slurm or k8s or typed != HostFlags():
        error = ConfigError(
            "--nproc, --nodes, --hosts, --dry-run and the like start a world, and this process is part of one already",
            where="RANK and WORLD_SIZE are set in the environment",
            fix="leave the flags to the launcher, or unset these variables",
        )
        raise refused_once(error)
    return _be_a_rank(config, overrides, place)


def _be_a_rank(config: str, overrides: tuple[str, ...], place: RankEnvironment) -> int:
    from duoka.cli.asked_to_leave import leave_at_once
    from duoka.process.lifeline import is_supervised, parent_pid

    with contextlib.ExitStack() as leaves:
        if parent_pid() != os.getppid():  # no launcher of ours, which would know what it asked for
            leaves.enter_context(leave_at_once(speaks=place.rank == 0))
        from duoka.cli.work import join_world, work_for_supervisor

        if is_supervised():
            return work_for_supervisor(config, place.rank)
        return join_world(config, overrides, place)


def _refuse_contradictions(slurm: str, k8s: str, out: str, sweep: tuple[str, ...], hosts: bool) -> None:
    from duoka.errors import ConfigError

    given = [name for name, is_given in (("--slurm", slurm), ("--k8s", k8s), ("--hosts", hosts)) if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given", fix="keep one of them")
    if out and not k8s:
        raise ConfigError("-o is for what --k8s writes", fix="the run's own folder is a key:   output=runs/NAME")
    if sweep and not slurm:
        raise ConfigError(
            "--sweep makes a job array of Slurm", fix="write --slurm too, or type a command for each value"
        )


def _refuse_auto(slurm: str, k8s: str, nodes: str, hosts: bool) -> None:
    from duoka.errors import ConfigError

    by_hand = os.environ.get("NNODES", "").strip() not in ("", "1")
    others = (("--slurm", slurm), ("--k8s", k8s), ("--nodes", nodes), ("--hosts", hosts), ("NNODES", by_hand))
    if beside := [name for name, is_given in others if is_given]:
        raise ConfigError(
            f"--nproc auto is planned for this machine, and {' and '.join(beside)} starts others",
            fix="write the number of processes of each machine, such as --nproc 8",
        )


# --- the process that a user starts ---


def start_here(config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool) -> int:
    """Choose a launcher, check, prepare, start, report."""
    from duoka.cli.asked_to_leave import AskedToLeave, leave_when_asked
    from duoka.cluster.verdict import stopped

    try:
        # Until the launcher listens. A container's first process would not even die of a SIGTERM that it ignores.
        with contextlib.ExitStack() as leaves:
            leaves.enter_context(leave_when_asked())
            return _start_here(config, overrides, flags, leaves.close, dry_run=dry_run)
    except AskedToLeave as asked:
        how = f"stopped by {asked.signal_name} while model and data were prepared"
        return _report(stopped(f"{how}; what is finished is kept, and the same command goes on"))


def _start_here(
    config: str, overrides: tuple[str, ...], flags: Flags, is_prepared: Callable[[], None], *, dry_run: bool
) -> int:
    """`is_prepared` is called when the launcher takes over."""
    from duoka.cluster.choose import choose_launcher
    from duoka.cluster.forks import imports_of, imports_of_model, open_fork_server
    from duoka.cluster.launch import count_processes, share_of_machine
    from duoka.cluster.run_lock import check_claim, find_run_folder, hold_run
    from duoka.hub.models import known_folder
    from duoka.plan.hardware import count_usable_cores, read_machine
    from duoka.process.allocator import allocator_environment

    launcher, restarts = choose_launcher(flags)
    for note in launcher.notes:
        click.echo(f"note: {note}", err=True)
    machine = read_machine()
    num_processes = count_processes(launcher.num_processes, len(machine.gpus))
    num_ranks = launcher.num_machines * num_processes
    # For several machines rank 0 prints the notes about the config; for a dry run the plan does.
    says = launcher.prepares and not dry_run
    loaded = load_checked(config, overrides, machine, num_ranks, local_size=num_processes, say=says)
    if loaded.task == "prepare" and not dry_run:
        return _prepare_only(loaded)
    launcher.check()
    if launcher.num_processes is None and launcher.num_machines == 1 and not machine.gpus and not dry_run:
        better = processes.hint(config, overrides, num_processes)
        click.echo(f"note: {better}" if better else "", err=True, nl=bool(better))
    run = find_run_folder(loaded)
    if dry_run:
        return print_plan(config, overrides, run, check_claim(loaded, run), num_ranks)
    if _is_finished(loaded, run, launcher):
        click.echo(f"{run.path} is finished; its result is in {run.final}")
        return finish(run) if launcher.prepares else 0
    heap = {} if machine.gpus else allocator_environment(keeps=not loaded.config.parallel.offloads.uses_disk)
    shared = share_of_machine(num_processes, count_usable_cores(), {**os.environ, **heap})
    with open_fork_server(imports_of(loaded.config), shared) as forks:
        how = {"env": heap, "restarts": restarts, "forks": forks}
        if not launcher.prepares:
            here = known_folder(loaded.config.model, loaded.base)
            if forks is not None and here is not None:
                forks.imports += imports_of_model(here)
            counts = machine_counts(loaded, machine, launcher, num_processes)
            spec = _spec(loaded, run, num_processes, config, *overrides, counts=counts, **how)
            is_prepared()
            return _report(launcher.start(spec, Say()))
        with hold_run(run):
            folder = _prepare(loaded, run, machine, num_processes)
            if forks is not None:
                forks.imports += imports_of_model(folder)
            # Ranks read the config that lies in the run folder now.
            spec = _spec(loaded, run, num_processes, str(run.config.resolve()), **how)
            is_prepared()
            return _report(launcher.start(spec, Say()), run)


def _is_finished(loaded: Loaded, run: RunFolder, launcher: Launcher) -> bool:
    """Raises when this start must not be. Where rank 0 prepares, it is rank 0 that looks at a run that goes on."""
    from duoka.cluster.run_lock import check_claim
    from duoka.runs.status import read_status

    status = read_status(run)
    is_done = status is not None and status.state == "done"
    return (launcher.prepares or is_done) and check_claim(loaded, run) == "finished"


def _prepare(loaded: Loaded, run: RunFolder, machine: Machine, num_processes: int) -> Path:
    """What ranks of this machine find ready; a new run that is refused here has ended. Returns the model's folder."""
    from duoka.cluster.run_lock import check_claim
    from duoka.cluster.supervise import write_end
    from duoka.cluster.verdict import verdict_of
    from duoka.errors import DuokaError

    kind = check_claim(loaded, run)  # again: another process may have worked here until a moment ago
    try:
        return prepare_run(loaded, run, machine, num_processes)
    except DuokaError as error:
        if kind == "new":  # else the existing run keeps its own end
            write_end(run, verdict_of(error))
        raise


def _spec(loaded: Loaded, run: RunFolder, num_processes: int, *arguments: str, **how: Any) -> Spec:
    """`arguments` are those of `duoka train`; `how` are fields of Spec."""
    from importlib.metadata import version

    from duoka import __version__
    from duoka.cluster.launcher import Spec
    from duoka.config.load import result_values
    from duoka.process.interpreter import python_module

    faults = loaded.config.faults
    versions = {"duoka": __version__} | {name: version(name) for name in ("torch", "transformers")}
    return Spec(
        python_module("duoka", "train", *arguments), num_processes, run,
        stop_within_s=faults.stop_within_s, hang_after_s=faults.patience_s,
        identity={**versions, **result_values(loaded)}, **how,
    )  # fmt: skip


def _report(verdict: Verdict, run: RunFolder | None = None) -> int:
    """Print the verdict; of a finished run that no other machine reports on, the closing report."""
    print_verdict(verdict)
    return finish(run) if run is not None and verdict.exit_code == 0 else verdict.exit_code


def _prepare_only(loaded: Loaded) -> int:
    """A file of LLaMA-Factory with tokenized_path and without do_train: tokens are made, nothing is trained."""
    from duoka.data.prepare import prepare_data
    from duoka.errors import typed
    from duoka.hub.models import model_folder

    folder = model_folder(loaded.config.model, loaded.base, Say())
    prepared = prepare_data(loaded.config, loaded.base, folder, say=Say())
    click.echo("\n".join(prepared.report.lines()))
    again = f"duoka train {typed(loaded.path)} do_train=true"
    click.echo(f"tokens are ready, and nothing was trained; to train:   {again}")
    return 0
