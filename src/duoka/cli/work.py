"""The processes that train, as the command line sees them: a rank that duoka started works; of ranks that torchrun or
Slurm started, rank 0 prepares, the others wait, then all work.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from duoka.cli.prepare import finish, load_checked, prepare_run

if TYPE_CHECKING:
    from duoka.config.loaded import Loaded
    from duoka.plan.hardware import Machine
    from duoka.process.environ import RankEnvironment
    from duoka.runs.folder import RunFolder


def work_for_supervisor(config: str, rank: int) -> int:
    """A rank of a world that duoka started: the config is resolved, the folder is ready, errors go to the parent."""
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder

    run = RunFolder(Path(config).parent)
    return work(lambda: load_config(config), run, rank, supervised=True)


def join_world(config: str, overrides: tuple[str, ...], place: RankEnvironment) -> int:
    """A rank of a world that a foreign launcher started, or duoka's launchers on several machines."""
    from duoka.cluster.join import RefusedElsewhere
    from duoka.cluster.run_lock import find_run_folder
    from duoka.errors import DuokaError, StorageError
    from duoka.plan.hardware import read_machine
    from duoka.process.lifeline import launcher_speaks
    from duoka.process.place import SaidElsewhere, let_first_speak
    from duoka.runs.failure import write_failure

    machine, quiet = read_machine(), launcher_speaks()
    try:
        loaded = load_checked(
            config, overrides, machine, place.size, local_size=place.local_size, say=place.rank == 0 and not quiet
        )
    except DuokaError as error:  # MPICH's mpirun ends no others when one has said it
        raise error if place.rank == 0 else let_first_speak(error, 0 if quiet else place.local_rank) from None
    run = find_run_folder(loaded)
    try:
        return _join_run(loaded, run, machine, place, quiet=quiet)
    except DuokaError as error:
        if quiet:
            write_failure(run, place.rank, error, 0)
            end_process(error.exit_code)
        if isinstance(error, RefusedElsewhere) and place.local_rank != 0:
            raise SaidElsewhere(error) from None
        is_of_machine = isinstance(error, StorageError) and place.rank != 0
        raise let_first_speak(error, place.local_rank) if is_of_machine else error from None


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
    from duoka.runs.events import log_size
    from duoka.runs.failure import reserve_account, write_failure
    from duoka.runs.heart import stacks_path

    log_from, parent = log_size(run), parent_pid()
    if supervised or quiet:  # elsewhere nobody reads it
        reserve_account(run, rank)
    if supervised and parent is not None and sys.platform != "linux":
        die_with_parent(parent)  # on Linux this came with the process
    # Libraries warn their own developers; a user can do nothing about it, N times.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* view")  # of heads: nothing of ours writes there

    def end_hanging(what: str) -> None:
        error = WorkerFailed(what, where=f"stacks: {stacks_path(run, rank)}")
        write_failure(run, rank, error, last_step(run, log_from))
        if not quiet:
            click.echo("\n".join(error.lines()), err=True)
        end_process(error.exit_code)

    try:
        from duoka.train.main import run_worker

        return run_worker(load(), run, None if supervised else end_hanging)
    # A rank's outermost frame: every failure must be in the run folder before the process ends. An exit(0) in code of
    # the model or the data is one too: without others that miss this rank, the run would pass for done.
    except (Exception, SystemExit) as error:
        from duoka.cli import find_known_fault

        known = find_known_fault(error)
        failure = write_failure(run, rank, known or error, last_step(run, log_from))
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
