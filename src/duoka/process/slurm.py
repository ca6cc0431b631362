"""This process's place in a Slurm step (`srun duoka train X`), in the words that other launchers use.

Only variables of the step are read: a job may have more nodes than the step that this process is in. Read inside each
task, never expanded in the batch script, where all nodes would become number 0.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

_INTERACTIVE_STEP = "4294967290"  # the shell of salloc
FIRST_PORT, NUM_PORTS = 12000, 20000  # below those that Linux gives to connections


def slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What to set before anything else is read; empty outside of a step, and where a place was given already.

    One task per node: each is a launcher (NNODES, NODE_RANK). More tasks: each is a rank (RANK, WORLD_SIZE).
    """
    if any(name in env for name in ("RANK", "WORLD_SIZE", "NNODES", "NODE_RANK")):
        return {}
    if not task_of_several(env):
        return {}
    num_nodes, num_tasks = (_whole(env, f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    meeting = {"MASTER_ADDR": find_address(first_node(env["SLURM_STEP_NODELIST"])), "MASTER_PORT": str(step_port(env))}
    if num_tasks == num_nodes:
        return {"NNODES": str(num_nodes), "NODE_RANK": env["SLURM_NODEID"], **meeting}
    node = _whole(env, "SLURM_NODEID")
    counts = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": env["SLURM_PROCID"], "LOCAL_RANK": env["SLURM_LOCALID"], "WORLD_SIZE": str(num_tasks),
        "LOCAL_WORLD_SIZE": str(counts[node]), "GROUP_RANK": str(node), **meeting,
    }  # fmt: skip


def task_of_several(env: Mapping[str, str]) -> str:
    """This task's number in a step that has more; else empty."""
    in_step = "SLURM_STEP_ID" in env and env["SLURM_STEP_ID"] != _INTERACTIVE_STEP
    return env.get("SLURM_PROCID", "0") if in_step and _whole(env, "SLURM_STEP_NUM_TASKS") > 1 else ""


def unused_nodes(env: Mapping[str, str]) -> str:
    """A note for who is in a job of several nodes, and started here without srun."""
    num_nodes = _whole(env, "SLURM_JOB_NUM_NODES")
    in_step = "SLURM_STEP_ID" in env and env["SLURM_STEP_ID"] != _INTERACTIVE_STEP
    if num_nodes < 2 or in_step:
        return ""
    return f"this Slurm job has {num_nodes} nodes, and only this one trains; all of them:   srun duoka train ..."


def step_port(env: Mapping[str, str]) -> int:
    """The same on all nodes without asking; jobs and their steps that share a node have different ones."""
    job, step = _whole(env, "SLURM_JOB_ID"), _whole(env, "SLURM_STEP_ID")
    return FIRST_PORT + (job * 10 + step % 10) % NUM_PORTS


def first_node(names: str) -> str:
    """Of `n[03-05,9],m1`: n03. Slurm's own order, which decides who is node 0."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group(0) if first else names)


def tasks_per_node(text: str) -> list[int]:
    """Of `2(x3),1`: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def find_address(node: str) -> str:
    """A node's name where it resolves; else the address that Slurm itself uses."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        command = ["scontrol", "show", "node", node, "--oneliner"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found.group(1) if found else node


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0
