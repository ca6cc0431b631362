"""A fixed number of nodes, each started by hand with the same command and the environment that guides show.

FORCE_TORCHRUN, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE and their kin are read and checked here,
before anything starts. `FixedNodes` starts this machine's ranks, each with its fixed rank, and waits for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from duoka.cluster.blame import DOCUMENTED, has_lost_peer, own_reasons, signal_name, stopped_unsaved
from duoka.cluster.launch import ALLOW_LOOPBACK, check_port, wait_for_name
from duoka.cluster.launcher import Say, Spec
from duoka.cluster.meeting import Rules
from duoka.cluster.patience import StopPatience
from duoka.cluster.ranks import START_NAMES, RankPlace, Ranks, node_environment
from duoka.cluster.supervise import Request, listen_to_signals
from duoka.cluster.verdict import INTERRUPTED, KIND_OF_CODE, LEFT_AT_ONCE, Kind, Verdict, failed, stopped
from duoka.errors import ConfigError, Fault, Faults
from duoka.process.exits import ENDED_BY_STOP, RankExit
from duoka.process.interface import find_addresses, interface_environment, is_own_address, means_loopback
from duoka.process.kubernetes import IN_POD
from duoka.runs.folder import RunFolder
from duoka.runs.stop_request import write_stop_request
from duoka.units import parse_seconds

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class NodeStart:
    """This machine's part of a start."""

    num_nodes: int = 1
    node: int = 0
    num_processes: int | None = None  # here; None: as without the environment
    master_addr: str = ""
    master_port: int = 0
    restarts: int = 0
    elastic: Rules | None = None  # elastic: machines may leave and come back
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flags:
    """What was typed behind `duoka train`."""

    nproc: int | None = None
    port: int | None = None
    restarts: int = 0
    nodes: str = ""  # MIN:MAX
    meet: str = ""  # HOST:PORT
    wait: str = ""


def read_node_start(flags: Flags, env: Mapping[str, str] = os.environ) -> NodeStart:
    """What the environment asks for beside the flags. Raises Faults with all that is wrong or contradictory."""
    given = {name: env[name].strip() for name in START_NAMES if env.get(name, "").strip()}
    if "MASTER_ADDR" in given:
        given["MASTER_ADDR"] = given["MASTER_ADDR"].strip("[]")  # torch knows no brackets around IPv6 addresses
    read = _Reader(given, env)
    num_nodes = read.whole("NNODES", 1, least=1)
    node = read.whole("NODE_RANK", 0)
    num_processes = read.whole("NPROC_PER_NODE", 0)
    master_port = read.whole("MASTER_PORT", 0)
    restarts = read.whole("MAX_RESTARTS", 0) or flags.restarts
    read.both("NPROC_PER_NODE", num_processes, "--nproc", flags.nproc)
    read.both("MASTER_PORT", master_port, "--port", flags.port)
    read.both("MAX_RESTARTS", restarts, "--restarts", flags.restarts or None)
    if master_port > 65535:
        read.refuse(f"MASTER_PORT is {master_port}; ports are 1 to 65535", "write for example:   MASTER_PORT=29500")
    elastic = read.rules(num_nodes, restarts, flags)
    if elastic is None and num_nodes > 1:
        read.check_several(num_nodes, node)
    elif elastic is None and node > 0:
        read.refuse(
            f"NODE_RANK is {node}, and NNODES is {given.get('NNODES', 'not given')}: this node would train alone",
            f"write on every node:   NNODES={node + 1}   (or as many as there are)",
        )
    if read.faults:
        raise Faults(read.faults, title="config error")
    return NodeStart(
        num_nodes, node, num_processes or flags.nproc, given.get("MASTER_ADDR", ""), master_port or flags.port or 0,
        restarts, elastic, tuple(read.notes),
    )  # fmt: skip


class _Reader:
    """The variables with what is wrong about them."""

    def __init__(self, given: Mapping[str, str], env: Mapping[str, str]) -> None:
        self.given, self.env = given, env
        self.faults: list[Fault] = []
        self.notes: list[str] = []

    def refuse(self, what: str, fix: str) -> None:
        self.faults.append(Fault(what, file="command line" if what.startswith("--") else "environment", fix=fix))

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

    def rules(self, num_nodes: int, restarts: int, flags: Flags) -> Rules | None:
        """How machines that may leave and come back meet; None where each has its fixed place."""
        if flags.nodes or flags.meet or flags.wait:
            return self._typed_rules(restarts, flags)
        least, most = (self.whole(name, num_nodes, least=1) for name in ("MIN_NNODES", "MAX_NNODES"))
        if least == most == num_nodes and not (restarts and num_nodes > 1):
            if "RDZV_ID" in self.given:
                text = "RDZV_ID is not used: each rank is fixed by NODE_RANK, and the port tells two runs apart"
                self.notes.append(text)
            return None
        if least > most:
            self.refuse(f"MIN_NNODES is {least} and MAX_NNODES is {most}", "write for example:   MIN_NNODES=1")
        example = f"MIN_NNODES={least} MAX_NNODES={most} MASTER_ADDR=192.168.1.100 MASTER_PORT=29500"
        self._check_address(example)
        host, port = self.given.get("MASTER_ADDR", ""), self.whole("MASTER_PORT", 0)
        return Rules(least, most, host, port, restarts=restarts)

    def _typed_rules(self, restarts: int, flags: Flags) -> Rules | None:
        before = len(self.faults)
        ours = [name for name in ("NNODES", "MIN_NNODES", "MAX_NNODES", "MASTER_ADDR") if name in self.given]
        if ours:
            self.refuse(f"--nodes and --meet are typed, and {', '.join(ours)} set too", "keep one of the two forms")
        low, _, high = flags.nodes.partition(":")
        counts = [int(text) if text.isdecimal() else 0 for text in (low, high or low)]
        if not 1 <= counts[0] <= counts[1]:
            what = f'--nodes is "{flags.nodes}"' if flags.nodes else "--nodes is not given"
            self.refuse(what, "write the fewest and the most machines, for example:   --nodes 1:2")
        host, _, port = flags.meet.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            what = f'--meet is "{flags.meet}"' if flags.meet else "--meet is not given (the rendezvous address)"
            self.refuse(what, "write on all of them the address of one that stays:   --meet 192.168.1.100:29500")
        else:
            self._refuse_loopback("--meet", host)
        wait_s = Rules.wait_s
        try:
            wait_s = parse_seconds(flags.wait) if flags.wait else wait_s
        except ValueError as error:
            self.refuse(f"--wait: {error}", "write for example:   --wait 10min")
        if len(self.faults) > before:
            return None
        return Rules(counts[0], counts[1], host, int(port), wait_s, restarts)

    def check_several(self, num_nodes: int, node: int) -> None:
        if "NODE_RANK" not in self.given:
            self.refuse(
                f"NNODES is {num_nodes}, and NODE_RANK is not given: which of the nodes is this one?",
                f"write NODE_RANK=0 on the first node, up to NODE_RANK={num_nodes - 1} on the last",
            )
        elif node >= num_nodes:
            self.refuse(f"NODE_RANK is {node}, and NNODES is {num_nodes}", f"nodes count from 0 to {num_nodes - 1}")
        self._check_address(f"NNODES={num_nodes} NODE_RANK=0 MASTER_ADDR=192.168.1.100 MASTER_PORT=29500")

    def _check_address(self, example: str) -> None:
        address = self.given.get("MASTER_ADDR")
        if address is None:
            self.refuse(
                "MASTER_ADDR is not given: the nodes need a rendezvous address",
                f"write the first node's address on all nodes:   {example}",
            )
        else:
            self._refuse_loopback("MASTER_ADDR", address)
        if "MASTER_PORT" not in self.given:
            self.refuse("MASTER_PORT is not given: all nodes need the same one", f"write on all nodes:   {example}")

    def _refuse_loopback(self, name: str, address: str) -> None:
        if means_loopback(address) and not self.env.get(ALLOW_LOOPBACK):
            self.refuse(
                f"{name} is {address}, the loopback address: on each node it means that node itself",
                "write the first node's address in your network (hostname -I prints it); to try it out on one machine, "
                f"set {ALLOW_LOOPBACK}=1 too",
            )


@dataclass(frozen=True)
class FixedNodes:
    """The launcher of one of several machines, each started by hand with its fixed place."""

    num_machines: int
    node: int
    master_addr: str
    master_port: int
    num_processes: int | None = None
    notes: tuple[str, ...] = ()
    prepares: bool = False

    def check(self) -> None:
        try:
            find_addresses(self.master_addr)
        except OSError as error:
            if IN_POD not in os.environ:  # else it will come with the pod that has it, and is waited for
                raise ConfigError(
                    f"MASTER_ADDR is {self.master_addr}, which does not resolve: {error.strerror}",
                    fix="write the first node's address in your network (hostname -I prints it there), or add the name "
                    "to /etc/hosts",
                ) from None
        if self.node == 0:
            check_port(
                self.master_port,
                "write another one on all nodes, such as MASTER_PORT=29501; under srun start the step again: the next "
                "one has another",
            )
        elif is_own_address(self.master_addr) and not os.environ.get(ALLOW_LOOPBACK):
            raise ConfigError(
                f"NODE_RANK is {self.node} here, and MASTER_ADDR={self.master_addr} is this machine's own address",
                where="rank 0 would wait on another machine than the others look for it on",
                fix="write NODE_RANK=0 on this machine, or the address of the machine that has NODE_RANK=0",
            )

    def start(self, spec: Spec, say: Say) -> Verdict:
        """This machine's ranks, until all have ended; the first failure ends the rest. Ranks print their own errors."""
        place = RankPlace(self.node, self.num_machines, spec.num_processes, self.master_addr, self.master_port)
        say(str(place))
        request, patience = Request(), StopPatience(spec.run, spec.stop_within_s)
        with listen_to_signals(request, spec.forks):
            wait_for_name(self.master_addr, say, is_stopped=lambda: bool(request.stop_by))
            if request.stop_by:
                return stopped(f"stopped by {request.stop_by} before anything was started; the same command starts")
            env = node_environment(spec.num_processes) | dict(spec.env)
            env |= interface_environment(self.master_addr, env)
            ranks = Ranks(place, spec.command, env, patience=patience, forks=spec.forks)
            try:
                while ranks.look() and not request.leave_now:
                    if request.stop_by and not ranks.is_asked:
                        write_stop_request(spec.run, request.stop_by)
                        ranks.ask()
                    time.sleep(_LOOK_EVERY_S)
            finally:
                ranks.close()
        if request.leave_now:
            return stopped(LEFT_AT_ONCE, INTERRUPTED)
        return judge_node(spec.run, place, ranks.watch.first_failure, request.stop_by, resumes=spec.resumes)


def judge_node(
    run: RunFolder, place: RankPlace, end: RankExit | None, stopped_by: str, *, resumes: bool = True
) -> Verdict:
    if end is None:
        return Verdict(Kind.DONE)
    if stopped_by and end.code in ENDED_BY_STOP:
        return stopped_unsaved(run, stopped_by, resumes=resumes)
    if end.code < 0:
        name = signal_name(-end.code)
        fixes = ["  the same command on every node goes on from the newest checkpoint"] if resumes else []
        who = f"rank {end.rank} of {place.size}"
        if stopped_by and end.by_us:
            limit = "the time of faults.stop_within" if resumes else "--grace seconds"
            text = f"{who} did not stop within {limit} after {stopped_by}, and was killed"
            return failed(Kind.NOT_STOPPING, text, *fixes, rank=end.rank, cause=name)
        return failed(Kind.WORKER_DIED, f"{who} was killed by {name}", *fixes, rank=end.rank, cause=name)
    kind, cause = KIND_OF_CODE.get(end.code, Kind.WORKER_DIED), f"exit code {end.code}"
    if not resumes or end.code in DOCUMENTED:
        return Verdict(kind, end.code, rank=end.rank, cause=cause)
    who, fix = f"rank {end.rank} of {place.size}", "  the same command on every node goes on from the newest checkpoint"
    if not has_lost_peer(run, end):
        return failed(kind, f"{who} ended with an error of its own, shown above", fix, rank=end.rank, cause=cause)
    local = range(place.first, place.first + place.num_processes)
    unknown = "  the other machines say more: one was ended, or the network between them is cut"
    told = own_reasons(run, but=local) or [unknown]
    text = f"{who} lost its connection to a rank of another machine"
    return failed(Kind.LOST_RANK, text, *told, fix, rank=end.rank, cause=cause)
