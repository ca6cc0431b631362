"""Several machines, each started by hand with the same command and the environment that guides show.

FORCE_TORCHRUN, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE and their kin are read and checked here,
before anything starts. `run_node` starts this machine's ranks, each with its fixed place, and sees them to their end.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from duoka.cluster.launch import check_port, python_module, threads_per_process
from duoka.cluster.probe import count_usable_cores
from duoka.cluster.supervise import Request, listen_to_signals
from duoka.errors import Fault, Faults, WorkerFailed
from duoka.parallel.lifeline import JOINS, PARENT_PID

ALLOW_LOOPBACK = "DUOKA_ALLOW_LOOPBACK"  # two starts on one machine, to try it out
_NAMES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES",
          "MAX_RESTARTS", "RDZV_ID", "FORCE_TORCHRUN")  # fmt: skip
_LOOK_EVERY_S = 0.1
_DRAIN_S, _TERM_S = 10.0, 15.0  # for the others to say why they end too; from SIGTERM to SIGKILL


@dataclass(frozen=True)
class NodeStart:
    """This machine's part of a start."""

    num_nodes: int = 1
    node: int = 0
    num_processes: int | None = None  # here; None: as without the environment
    master_addr: str = ""
    master_port: int = 0
    restarts: int = 0
    notes: tuple[str, ...] = ()


def read_node_start(
    env: Mapping[str, str] = os.environ, *, nproc: int | None = None, port: int | None = None, restarts: int = 0
) -> NodeStart:
    """What the environment asks for beside the flags. Raises Faults with all that is wrong or contradictory."""
    given = {name: env[name].strip() for name in _NAMES if env.get(name, "").strip()}
    if not given:
        return NodeStart(num_processes=nproc, master_port=port or 0, restarts=restarts)
    read = _Reader(given)
    num_nodes = read.whole("NNODES", 1, least=1)
    node = read.whole("NODE_RANK", 0)
    num_processes = read.whole("NPROC_PER_NODE", 0)
    master_port = read.whole("MASTER_PORT", 0)
    max_restarts = read.whole("MAX_RESTARTS", 0)
    read.both("NPROC_PER_NODE", num_processes, "--nproc", nproc)
    read.both("MASTER_PORT", master_port, "--port", port)
    read.both("MAX_RESTARTS", max_restarts, "--restarts", restarts or None)
    read.check_elastic(num_nodes)
    if master_port > 65535:
        read.refuse(f"MASTER_PORT is {master_port}; ports are 1 to 65535", "write for example:   MASTER_PORT=29500")
    if num_nodes > 1:
        read.check_several(num_nodes, node, env)
    elif node > 0:
        read.refuse(
            f"NODE_RANK is {node}, and NNODES is {given.get('NNODES', 'not given')}: this node would train alone",
            f"write on every node:   NNODES={node + 1}   (or as many as there are)",
        )
    if num_nodes > 1 and (max_restarts or restarts):
        read.refuse(
            "restarting a world of several nodes is not there yet",
            "leave MAX_RESTARTS out: the same command on every node goes on from the newest checkpoint",
        )
    if read.faults:
        raise Faults(read.faults, title="config error")
    return NodeStart(
        num_nodes, node, num_processes or nproc, given.get("MASTER_ADDR", ""), master_port or port or 0,
        max_restarts or restarts, tuple(read.notes),
    )  # fmt: skip


class _Reader:
    """The variables with what is wrong about them."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given
        self.faults: list[Fault] = []
        self.notes: list[str] = []

    def refuse(self, what: str, fix: str) -> None:
        self.faults.append(Fault(what, file="environment", fix=fix))

    def whole(self, name: str, default: int, least: int = 0) -> int:
        text = self.given.get(name)
        if text is None:
            return default
        if name == "NPROC_PER_NODE" and text in ("gpu", "auto", "cpu"):
            return 0
        if not text.isdecimal() or int(text) < least:
            self.refuse(f'{name} is "{text}", which is no whole number of at least {least}', f"write:   {name}=2")
            return default
        return int(text)

    def both(self, name: str, value: int, flag: str, given: int | None) -> None:
        if value and given is not None and value != given:
            self.refuse(f"{name} is {value} and {flag} is {given}", "keep one of them")

    def check_elastic(self, num_nodes: int) -> None:
        least, most = (self.whole(name, num_nodes, least=1) for name in ("MIN_NNODES", "MAX_NNODES"))
        if not least == most == num_nodes:
            self.refuse(
                f"MIN_NNODES {least} to MAX_NNODES {most} is a world that grows and shrinks, which is not there yet",
                f"write:   NNODES={most}   on every node; started again with another number, a run goes on with that",
            )
        if "RDZV_ID" in self.given:
            self.notes.append("RDZV_ID is of no use: every rank has its fixed place, and the port tells two runs apart")

    def check_several(self, num_nodes: int, node: int, env: Mapping[str, str]) -> None:
        example = f"NNODES={num_nodes} NODE_RANK=0 MASTER_ADDR=192.168.1.100 MASTER_PORT=29500"
        if "NODE_RANK" not in self.given:
            self.refuse(
                f"NNODES is {num_nodes}, and NODE_RANK is not given: which of the nodes is this one?",
                f"write NODE_RANK=0 on the first node, up to NODE_RANK={num_nodes - 1} on the last",
            )
        elif node >= num_nodes:
            self.refuse(f"NODE_RANK is {node}, and NNODES is {num_nodes}", f"nodes count from 0 to {num_nodes - 1}")
        address = self.given.get("MASTER_ADDR")
        if address is None:
            self.refuse(
                "MASTER_ADDR is not given: where do the nodes meet?",
                f"write the first node's address on all nodes:   {example}",
            )
        elif _is_loopback(address) and not env.get(ALLOW_LOOPBACK):
            self.refuse(
                f"MASTER_ADDR is {address}, which on every node means that node itself: they never meet there",
                "write the first node's address in your network (hostname -I prints it); to try it out on one machine, "
                f"set {ALLOW_LOOPBACK}=1 too",
            )
        if "MASTER_PORT" not in self.given:
            self.refuse("MASTER_PORT is not given: all nodes need the same one", f"write on all nodes:   {example}")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return address.lower() in ("localhost", "localhost.localdomain")
    return found.is_loopback or found.is_unspecified


def run_node(start: NodeStart, num_processes: int, command: Sequence[str], say: Callable[[str], None]) -> int:
    """This machine's ranks, each `command`, until all have ended; the first failure's code ends the rest."""
    if start.node == 0:
        check_port(start.master_port)
    size, first = start.num_nodes * num_processes, start.node * num_processes
    say(
        f"node {start.node} of {start.num_nodes}: ranks {first} to {first + num_processes - 1} of {size}, "
        f"meeting at {start.master_addr}:{start.master_port}"
    )
    request = Request()
    with listen_to_signals(request):
        ranks = {first + local: _start_rank(start, num_processes, local, command) for local in range(num_processes)}
        try:
            code = _wait_for(ranks, request)
        finally:
            for process in ranks.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
    if code < 0:
        rank = next(rank for rank, process in ranks.items() if process.returncode == code)
        raise WorkerFailed(
            f"rank {rank} of {size} was killed by {signal.Signals(-code).name}",
            fix="the same command on every node goes on from the newest checkpoint",
        )
    return code


def _start_rank(start: NodeStart, num_processes: int, local: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _NAMES}
    env.setdefault("OMP_NUM_THREADS", str(threads_per_process(count_usable_cores(), num_processes)))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env |= {
        "RANK": str(start.node * num_processes + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(start.node),
        "WORLD_SIZE": str(start.num_nodes * num_processes), "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": start.master_addr, "MASTER_PORT": str(start.master_port), "PYTHONUNBUFFERED": "1",
        PARENT_PID: str(os.getpid()), JOINS: "1",
    }  # fmt: skip
    words = [*python_module("duoka.parallel.rank"), *command]
    # A session of its own: a Ctrl-C in the terminal is ours to pass on, once.
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait_for(ranks: Mapping[int, subprocess.Popen[bytes]], request: Request) -> int:
    """The code that all ended with, or that of the first rank that failed."""
    failed, failed_at, sent_at = 0, 0.0, 0.0
    while True:
        running = [process for process in ranks.values() if process.poll() is None]
        codes = [process.returncode for process in ranks.values() if process.returncode]
        now = time.monotonic()
        if codes and not failed:
            failed, failed_at = codes[0], now
        if not running:
            return failed
        asked = bool(request.stop_by) or (failed and now - failed_at > _DRAIN_S)
        if asked and not sent_at:
            sent_at = now
            for process in running:
                process.send_signal(signal.SIGTERM)
        # A stop on request may save for as long as it takes; after a failure there is nothing to wait for.
        if request.leave_now or (sent_at and failed and now - sent_at > _TERM_S):
            for process in running:
                process.kill()
        time.sleep(_LOOK_EVERY_S)
