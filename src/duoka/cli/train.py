"""`duoka train`: from a YAML to a finished run. The parent checks, prepares and supervises; ranks train.

The same command has three parts to play: the one a user types (starts a world), a rank that duoka started (works),
and a rank that torchrun or Slurm started (rank 0 prepares, the others wait, then all work).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.cluster.launcher import Launcher, Spec
    from duoka.cluster.nodes import Flags
    from duoka.cluster.verdict import Verdict
    from duoka.config.loaded import Loaded
    from duoka.plan.hardware import Machine
    from duoka.plan.report import Plan
    from duoka.process.environ import RankEnvironment
    from duoka.runs.folder import RunFolder

# Under a foreign launcher every rank finds the same fault: rank 0 prints it, and the launcher then ends the others.
_RANK_0_SPEAKS_S = 3.0


@click.command("train")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=int, help="Processes; default: one per GPU, on a CPU one.")
@click.option("--port", type=int, help="Port of the rendezvous; default: a free one.")
@click.option("--restarts", type=click.IntRange(0), default=0, help="Start again up to N times after a crash or hang.")
@click.option("--nodes", default="", metavar="MIN:MAX", help="Machines, which may leave and come back.")
@click.option("--meet", default="", metavar="HOST:PORT", help="The rendezvous: the address of the machine that stays.")
@click.option("--wait", default="", metavar="TIME", help="How long to wait for machines; default: 30min.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, start nothing.")
def command(config: str, overrides: tuple[str, ...], dry_run: bool, **flags: Any) -> int:
    """Train as CONFIG says, with values of it replaced: optim.lr=1e-4 data.max_length=1024.

    The output folder of a run that was stopped, or that crashed, is gone on with by the same command.
    On several machines type it on each, with --nodes 2 --meet HOST:PORT behind it (HOST is one of them), or with
    NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in front.
    """
    from duoka.cluster.nodes import Flags
    from duoka.errors import ConfigError
    from duoka.process.environ import read_rank_environment
    from duoka.process.lifeline import is_supervised

    place = read_rank_environment()
    if place is None:
        return start_here(config, overrides, Flags(**flags), dry_run=dry_run)
    if any(flags.values()) or dry_run:
        raise ConfigError(
            "--nproc, --port, --restarts, --nodes and --dry-run start a world, and this process is part of one already",
            where="RANK and WORLD_SIZE are set in the environment",
            fix="leave the flags to the launcher, or unset these variables",
        )
    if is_supervised():
        return work_for_supervisor(config, place.rank)
    return join_world(config, overrides, place)


# --- the process that a user starts ---


def start_here(config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool) -> int:
    """Choose a launcher, check, prepare, start, report."""
    from duoka.cli.asked_to_leave import AskedToLeave
    from duoka.cluster.verdict import stopped

    try:
        return _start_here(config, overrides, flags, dry_run=dry_run)
    except AskedToLeave as asked:
        how = f"stopped by {asked.signal_name} while model and data were prepared"
        return _report(stopped(f"{how}; what is finished is kept, and the same command goes on"))


def _start_here(config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool) -> int:
    from duoka.cluster.choose import choose_launcher
    from duoka.cluster.launch import count_processes
    from duoka.cluster.run_lock import check_claim, find_run_folder, hold_run
    from duoka.plan.hardware import read_machine

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
    run = find_run_folder(loaded)
    if dry_run:
        return _print_dry_run(config, overrides, run, check_claim(loaded, run), num_ranks)
    if _is_finished(loaded, run, launcher):
        click.echo(f"{run.path} is finished; its result is in {run.final}")
        return finish(run) if launcher.prepares else 0
    if not launcher.prepares:
        return _report(launcher.start(_spec(loaded, run, num_processes, restarts, config, overrides), _Say()))
    with hold_run(run):
        _prepare(loaded, run, machine, num_processes)
        # Ranks read the config that lies in the run folder now.
        verdict = launcher.start(_spec(loaded, run, num_processes, restarts, str(run.config.resolve())), _Say())
        return _report(verdict, run)


def _is_finished(loaded: Loaded, run: RunFolder, launcher: Launcher) -> bool:
    """Raises when this start must not be. Where rank 0 prepares, it is rank 0 that looks at a run that goes on."""
    from duoka.cluster.run_lock import check_claim
    from duoka.runs.status import read_status

    status = read_status(run)
    is_done = status is not None and status.state == "done"
    return (launcher.prepares or is_done) and check_claim(loaded, run) == "finished"


def _prepare(loaded: Loaded, run: RunFolder, machine: Machine, num_processes: int) -> None:
    """Prepare the run folder for this machine's ranks; a new run that is refused here has ended."""
    from duoka.cli.asked_to_leave import leave_when_asked
    from duoka.cluster.run_lock import check_claim
    from duoka.cluster.supervise import write_end
    from duoka.cluster.verdict import verdict_of
    from duoka.errors import DuokaError

    kind = check_claim(loaded, run)  # again: another process may have worked here until a moment ago
    try:
        with leave_when_asked():
            prepare_run(loaded, run, machine, num_processes)
    except DuokaError as error:
        if kind == "new":  # else the existing run keeps its own end
            write_end(run, verdict_of(error))
        raise


def _spec(
    loaded: Loaded, run: RunFolder, num_processes: int, restarts: int, config: str, overrides: tuple[str, ...] = ()
) -> Spec:
    from importlib.metadata import version

    from duoka.cluster.launch import python_module
    from duoka.cluster.launcher import Spec
    from duoka.config.load import result_values

    faults = loaded.config.faults
    versions = {name: version(name) for name in ("duoka", "torch", "transformers")}
    return Spec(
        python_module("duoka", "train", config, *overrides), num_processes, run, restarts=restarts,
        stop_within_s=faults.stop_within_s, hang_after_s=faults.patience_s,
        identity={**versions, **result_values(loaded)},
    )  # fmt: skip


def _report(verdict: Verdict, run: RunFolder | None = None) -> int:
    """Print the verdict; of a finished run that no other machine reports on, the closing report."""
    print_verdict(verdict)
    return finish(run) if run is not None and verdict.exit_code == 0 else verdict.exit_code


def _prepare_only(loaded: Loaded) -> int:
    """A file of LLaMA-Factory with tokenized_path and without do_train: tokens are made, nothing is trained."""
    from duoka.cli.asked_to_leave import leave_when_asked
    from duoka.data.prepare import prepare_data
    from duoka.hub.models import model_folder

    with leave_when_asked():
        folder = model_folder(loaded.config.model, loaded.base, _Say())
        prepared = prepare_data(loaded.config, loaded.base, folder, say=_Say())
    click.echo("\n".join(prepared.report.lines()))
    click.echo(f"tokens are ready, and nothing was trained; to train:   duoka train {loaded.path} do_train=true")
    return 0


def load_checked(
    config: str, overrides: tuple[str, ...], machine: Machine, world_size: int, *, local_size: int, say: bool = True
) -> Loaded:
    """The config with every check that needs no start; notes go to stderr."""
    from duoka.config.load import Start, load_config
    from duoka.data.read.registry import check_data
    from duoka.hub.models import check_model
    from duoka.plan.choose import check_machine, check_packages

    def check_here(config: object, base: Path) -> list[object]:
        found = check_machine(config, machine, world_size, local_size)  # type: ignore[arg-type]
        return [*found, *check_packages(config)]  # type: ignore[arg-type]

    checks = (check_model, check_data, check_here)
    start = Start(world_size, bool(machine.gpus))
    loaded = load_config(config, overrides, checks=checks, start=start)  # type: ignore[arg-type]
    for note in loaded.notes if say else ():
        click.echo(f"note: {note}", err=True)
    return loaded


@dataclass(frozen=True)
class _Say:
    """Messages of preparation and supervision, to stderr."""

    def __call__(self, text: str) -> None:
        click.echo(text, err=True)


def prepare_run(
    loaded: Loaded, run: RunFolder, machine: Machine, world_size: int, local_size: int | None = None
) -> None:
    """Everything that is done once before ranks start: the model's folder, tokens, plan, and the run's own files."""
    from duoka.cluster.probe import read_environment_facts
    from duoka.config.load import resolved_yaml
    from duoka.data.dataset_lengths import lengths_of, remember_lengths
    from duoka.data.prepare import prepare_data
    from duoka.data.report import write_data_report
    from duoka.hub.models import model_folder
    from duoka.plan.catalog import local_cluster
    from duoka.plan.report import make_plan
    from duoka.plan.shape import read_shape
    from duoka.runs.folder import write_json_atomic, write_text_atomic

    say: Callable[[str], None] = _Say()
    folder = model_folder(loaded.config.model, loaded.base, say)
    prepared = prepare_data(loaded.config, loaded.base, folder, say=say)
    prepared.check_world(world_size)
    local = local_size or world_size
    lengths = lengths_of(prepared, loaded.config)
    remember_lengths(lengths, loaded.config, loaded.base)
    plan = make_plan(
        loaded.config, read_shape(folder), machine, world_size, lengths=lengths, local_size=local,
        cluster=local_cluster(machine, world_size, local),
    )  # fmt: skip
    _refuse_what_does_not_fit(plan)
    if loaded.path.resolve() != run.config.resolve():
        write_text_atomic(run.config, resolved_yaml(loaded, plan.reasons))
    write_json_atomic(run.plan, plan.to_json())
    write_data_report(prepared.report, run.path)
    write_json_atomic(run.env, read_environment_facts(Path.cwd(), sys.argv))


def _refuse_what_does_not_fit(plan: Plan) -> None:
    refusal = plan.refusal()
    if refusal is not None:
        raise refusal


def print_verdict(verdict: Verdict) -> None:
    """One message on top, then its traceback once and where the logs are."""
    from duoka.cli import print_error

    if verdict.lines and verdict.stopped:
        click.echo("\n".join((*verdict.lines, *verdict.details)), err=True)
    elif verdict.lines:
        print_error((*verdict.lines, *verdict.details))


def finish(run: RunFolder) -> int:
    """The closing report: on screen, and as a page in the run folder."""
    from duoka.watch.report import end_lines, write_report

    write_report(run)
    click.echo("\n".join(end_lines(run)))
    return 0


def _print_dry_run(config: str, overrides: tuple[str, ...], run: RunFolder, kind: str, num_processes: int) -> int:
    """What would happen, and then the plan of `duoka plan`, with its exit code."""
    from duoka.cli.plan import command as plan

    words = {"new": "a new run", "resumed": "goes on with the run there", "finished": "the run there is finished"}
    click.echo(f"{config}: no fault. {run.path}: {words[kind]}\n")
    assert plan.callback is not None
    return int(plan.callback(config=config, overrides=overrides, nproc=num_processes, as_json=False))


# --- the processes that train ---


def work_for_supervisor(config: str, rank: int) -> int:
    """A rank of a world that duoka started: the config is resolved, the folder is ready, errors go to the parent."""
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder

    run = RunFolder(Path(config).parent)
    return work(lambda: load_config(config), run, rank, supervised=True)


def join_world(config: str, overrides: tuple[str, ...], place: RankEnvironment) -> int:
    """A rank of a world that a foreign launcher started, or duoka's launchers on several machines."""
    from duoka.cluster.run_lock import find_run_folder
    from duoka.errors import DuokaError
    from duoka.plan.hardware import read_machine
    from duoka.process.lifeline import launcher_speaks
    from duoka.runs.failure import write_failure

    machine, quiet = read_machine(), launcher_speaks()
    try:
        loaded = load_checked(
            config, overrides, machine, place.size, local_size=place.local_size, say=place.rank == 0 and not quiet
        )
    except DuokaError:
        if place.rank != 0:
            time.sleep(_RANK_0_SPEAKS_S)
        raise
    run = find_run_folder(loaded)
    try:
        return _join_run(loaded, run, machine, place, quiet=quiet)
    except DuokaError as error:
        if not quiet:
            raise
        write_failure(run, place.rank, error, 0)
        end_process(error.exit_code)
        raise


def _join_run(loaded: Loaded, run: RunFolder, machine: Machine, place: RankEnvironment, *, quiet: bool) -> int:
    from duoka.cluster.join import follow, lead
    from duoka.cluster.run_lock import check_claim, hold_run
    from duoka.runs.failure import clear_failures
    from duoka.runs.stop_request import clear_stop_request

    if place.rank != 0:
        follow(run, place.rank)
        return work(lambda: loaded, run, place.rank, supervised=False, quiet=quiet)
    with lead(run) as leader:
        kind = check_claim(loaded, run)
        with hold_run(run):
            if kind != "finished":
                clear_failures(run)
                clear_stop_request(run)
                prepare_run(loaded, run, machine, place.size, place.local_size)
            leader.ready()
            code = work(lambda: loaded, run, 0, supervised=False, quiet=quiet)
        return finish(run) if code == 0 else code


def work(load: Callable[[], Loaded], run: RunFolder, rank: int, *, supervised: bool, quiet: bool = False) -> int:
    """Train as one rank. A failure is recorded for the supervisor, and ends this process at once.

    `quiet`: no supervisor watches this rank, but a launcher prints its recorded failure after it has ended.
    """
    from duoka.cluster.blame import last_step
    from duoka.errors import WorkerFailed
    from duoka.process.lifeline import die_with_parent, parent_pid
    from duoka.runs.failure import write_failure
    from duoka.runs.heart import stacks_path

    started, parent = time.time(), parent_pid()
    if supervised and parent is not None and sys.platform != "linux":
        die_with_parent(parent)  # on Linux this came with the process
    # Libraries warn their own developers; a user can do nothing about it, N times.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)

    def end_hanging(what: str) -> None:
        error = WorkerFailed(what, where=f"stacks: {stacks_path(run, rank)}")
        write_failure(run, rank, error, last_step(run, started))
        if not quiet:
            click.echo("\n".join(error.lines()), err=True)
        end_process(error.exit_code)

    try:
        from duoka.train.main import run_worker

        return run_worker(load(), run, None if supervised else end_hanging)
    # A rank's outermost frame: every failure must be in the run folder before the process ends.
    except Exception as error:
        from duoka.cli import find_known_fault

        known = find_known_fault(error)
        failure = write_failure(run, rank, known or error, last_step(run, started))
        if rank > 0 or not (supervised or quiet):  # rank 0 shares the supervisor's terminal, which prints it once
            if known is None:
                traceback.print_exc()
            else:
                click.echo("\n".join((*known.lines(), f"  (seen by rank {rank})")), err=True)
        end_process(failure.exit_code)
        raise


def end_process(code: int) -> None:
    """End without joining threads: a process group that lost a peer may block its own ones forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
