"""This process's place among those that `mpirun -n N duoka train X` started, in the words that other launchers use.

Open MPI says OMPI_COMM_WORLD_RANK and its kin, Hydra (MPICH, Intel MPI) PMI_RANK and MPI_LOCALRANKID, PALS PMI_RANK and
PMI_LOCAL_RANK. None says where processes meet: on one machine they can tell by themselves, on several the user does.
`srun --mpi=pmi2` sets PMI_RANK too, without a place on the node: slurm.py reads that step.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from duoka.errors import ConfigError
from duoka.plan.hardware import count_usable_cores
from duoka.process.environ import LOOPBACK
from duoka.process.slurm import FIRST_PORT, NUM_PORTS

# What each launcher calls RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE")
_WORDS = (_OPEN_MPI, (*_PMI, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), (*_PMI, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def mpi_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What to set before anything else is read; empty outside of an MPI job, and where a place was given already."""
    if any(name in env for name in ("RANK", "WORLD_SIZE", "NNODES", "NODE_RANK")):
        return {}
    words = next((each for each in _WORDS if all(env.get(name, "").isdecimal() for name in each)), None)
    if words is None:
        _refuse_unknown(env)
        return {}
    found = {ours: env[theirs] for ours, theirs in zip(_OURS, words, strict=True)}
    size, local_size = int(found["WORLD_SIZE"]), int(found["LOCAL_WORLD_SIZE"])
    if size < 2:
        return {}
    if local_size < size:
        _check_meeting(env, size, local_size)
    else:
        meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(_own_port(env, words[0]))}
        found |= {name: env.get(name, value) for name, value in meeting.items()}
    # Open MPI gives each process one core or a socket, Hydra all: then they would slow each other down several times.
    return found | {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", str(max(1, count_usable_cores() // local_size)))}


def mpi_rank(env: Mapping[str, str]) -> str:
    """As mpirun says it, also where nothing else is known; empty outside of its jobs."""
    return env.get(_OPEN_MPI[0]) or ("" if "SLURM_STEP_ID" in env else env.get(_PMI[0], ""))


def _refuse_unknown(env: Mapping[str, str]) -> None:
    """One of several whose place on the machine nothing tells would train alone, in the folder of the others."""
    if env.get("PMI_SIZE", "1") in ("", "0", "1") or "SLURM_STEP_ID" in env:
        return
    raise ConfigError(
        f"this is one of {env['PMI_SIZE']} processes of an MPI job, and nothing says which one on its machine it is",
        where="PMI_RANK and PMI_SIZE are set; MPI_LOCALRANKID, MPI_LOCALNRANKS, PMI_LOCAL_RANK, PMI_LOCAL_SIZE are not",
        fix="set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, or start on one "
        "machine with   duoka train CONFIG --nproc N   and on several with --hosts",
    )


def _check_meeting(env: Mapping[str, str], size: int, local_size: int) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if not missing:
        return
    how = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ... COMMAND"
    if not env.get(_OPEN_MPI[0]):
        how = "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ... COMMAND"
    raise ConfigError(
        f"mpirun started {size} processes on several machines ({local_size} on this one), and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set",
        where="MPI does not say where the machine of rank 0 is",
        fix=f"name that machine and a free port of it:   {how}",
    )


def _own_port(env: Mapping[str, str], rank_name: str) -> int:
    """The same for all processes of a job on this machine without asking; two jobs have different ones."""
    job = f"{_launcher_pid(rank_name)} {env.get('PMIX_NAMESPACE', '')}"
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def _launcher_pid(rank_name: str) -> int:
    """The nearest process above that has no rank itself: a shell or a wrapper between has its child's."""
    import psutil

    pid = os.getppid()
    try:
        for parent in psutil.Process().parents():
            pid = parent.pid
            if rank_name not in parent.environ():
                break
    except psutil.Error:
        pass
    return pid
