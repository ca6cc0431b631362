"""This process's place in whatever started it, in the words that other launchers use (process/environ.py reads them).

`duoka train` asks first thing. A script of someone's own is asked when it makes its world: there one task on each node
is a rank, where a command would be a launcher.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, MutableMapping

from duoka.errors import ConfigError, DuokaError
from duoka.process.kubernetes import adopt_pod_place
from duoka.process.lifeline import parent_pid
from duoka.process.mpi import mpi_rank, mpi_variables
from duoka.process.slurm import slurm_variables, task_of_several

# Under a foreign launcher every rank finds the same fault: rank 0 prints it, and most launchers then end the others.
RANK_0_SPEAKS_S = 3.0
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")


def adopt_place(env: MutableMapping[str, str]) -> None:
    """Set what mpirun, srun or Kubernetes say of this process; a place that was given already stays."""
    env.update(_read_mpi(env))  # first: mpirun in a Slurm job starts its helpers as a step
    env.update(slurm_variables(env))
    adopt_pod_place(env)


def adopt_step(env: MutableMapping[str, str]) -> dict[str, str]:
    """The same for commands that measure (`duoka eval`). Returns which of several nodes this is, where srun started one
    task on each. A pod's place is left alone: people type such a command in one pod of a run."""
    if "SLURM_PTY_PORT" in env:
        return {}
    found = _read_mpi(env) or slurm_variables(env)
    if "NNODES" in found:
        return found
    env.update(found)
    return {}


class SaidElsewhere(DuokaError):
    """A fault that another rank prints, such as one of the command line: nothing is printed here."""

    def __init__(self, error: DuokaError) -> None:
        super().__init__(error.what)
        self.exit_code = error.exit_code

    def lines(self) -> list[str]:
        return []


def refused_once(error: ConfigError, env: Mapping[str, str] = os.environ) -> DuokaError:
    """What to raise in each process of a world that finds `error`: not every launcher ends the others."""
    return SaidElsewhere(error) if let_rank_0_speak(env) else error


def let_rank_0_speak(env: Mapping[str, str] = os.environ) -> bool:
    """To be called by who is about to print a fault that others of its world may find too: waits in all but rank 0, and
    returns whether it is one of them. Our own launchers print once."""
    if parent_pid(env) == os.getppid():
        return False
    rank = env["RANK"] if env.get("RANK", "").isdecimal() else mpi_rank(env) or task_of_several(env)
    if rank in ("", "0"):
        return False
    time.sleep(RANK_0_SPEAKS_S)
    return True


def let_first_speak(error: DuokaError, local_rank: int) -> DuokaError:
    """What to raise in a rank other than 0 whose machine, and so the first rank on it, may have the same fault. That
    one prints it and has left meanwhile; what a rank finds alone, it says itself."""
    time.sleep(RANK_0_SPEAKS_S)
    return SaidElsewhere(error) if local_rank != 0 and _first_has_left() else error


def _first_has_left() -> bool:
    """Whether the first of the ranks that were started here is no more. False where that cannot be seen."""
    import psutil

    try:
        launcher = psutil.Process().parent()
        while launcher is not None and any(name in launcher.environ() for name in _LOCAL_RANKS):  # a shell of this rank
            launcher = launcher.parent()
        if launcher is None:
            return False
        for one in launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # also of one that has ended and is not yet taken leave of
                if any(one.environ().get(name) == "0" for name in _LOCAL_RANKS):
                    return False
    except psutil.Error:
        return False
    return True


def _read_mpi(env: Mapping[str, str]) -> dict[str, str]:
    try:
        return mpi_variables(env)
    except ConfigError as error:
        raise refused_once(error, env) from None


def script_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What a script that mpirun or srun started as one of several has to set to be a rank; empty: it is alone."""
    if "SLURM_PTY_PORT" in env:  # the shell of srun --pty: somebody types here, and the other tasks have no part in it
        return {}
    found = mpi_variables(env) or slurm_variables(env)
    if "NNODES" not in found:
        return found
    node, size = found.pop("NODE_RANK"), found.pop("NNODES")
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {"RANK": node, "WORLD_SIZE": size, "GROUP_RANK": node, **alone, **found}
