"""This process's place in whatever started it, in the words that other launchers use (process/environ.py reads them).

`duoka train` asks first thing. A script of someone's own is asked when it makes its world: there one task on each node
is a rank, where a command would be a launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from duoka.process.kubernetes import adopt_pod_place
from duoka.process.mpi import mpi_variables
from duoka.process.slurm import slurm_variables


def adopt_place(env: MutableMapping[str, str]) -> None:
    """Set what mpirun, srun or Kubernetes say of this process; a place that was given already stays."""
    env.update(mpi_variables(env))  # first: mpirun in a Slurm job starts its helpers as a step
    env.update(slurm_variables(env))
    adopt_pod_place(env)


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
