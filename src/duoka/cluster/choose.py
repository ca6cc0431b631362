"""Which launcher a start means: what was typed behind the command, and the environment that guides show."""

from __future__ import annotations

from duoka.cluster.elastic import ComingAndGoing
from duoka.cluster.launcher import Launcher
from duoka.cluster.nodes import FixedNodes, Flags, read_node_start
from duoka.cluster.restart import LocalLauncher


def choose_launcher(flags: Flags) -> tuple[Launcher, int]:
    """The launcher, and how often ranks may fail under it. Raises Faults for what is wrong or contradictory."""
    start = read_node_start(flags)
    shared = (start.num_processes, start.notes)
    if start.elastic is not None:
        return ComingAndGoing(start.elastic, start.node, *shared), start.restarts
    if start.num_nodes > 1:
        return FixedNodes(start.num_nodes, start.node, start.master_addr, start.master_port, *shared), start.restarts
    return LocalLauncher(start.master_port, *shared), start.restarts
