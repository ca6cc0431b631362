"""`duoka doctor --hosts a,b`: every node is asked what it is like (node_probe.py), and the leader compares.

Called by cli/doctor.py. Nodes are asked side by side over ssh; what they answer is judged in compare.py. Nothing is
installed, changed or left on a node.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from duoka.cluster import node_probe
from duoka.cluster.compare import COMPARISONS, compare_links, compare_rates
from duoka.cluster.compare_run import judge_writes
from duoka.cluster.exchange import exchange_nodes
from duoka.cluster.findings import NodeFinding, Survey
from duoka.cluster.ssh import CONNECT_S, Connection, Reader, ask, run_sent_python, silent, why_lost
from duoka.config.hosts import Host
from duoka.process.interface import address_towards
from duoka.process.slurm import find_address

Level = Literal["quick", "net"]
LOOK_S = CONNECT_S + 45.0
SEEN_S = 10.0
WRITTEN_BYTES, WRITE_S = 1 << 28, 120.0
MOST_ROUNDS = 30  # of half a second each: enough pairs of each machine to tell which one is slow
CONNECT_PAIR_S = 4.0  # longer than the kernel takes to find that nobody has an address (3 s)


@dataclass(frozen=True)
class Question:
    """What the nodes are to look at: paths of the config, from `folder`."""

    paths: Sequence[str] = ()
    output: str = "runs"
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    checkpoint_bytes: int = 0  # of the run that is meant; 0: of none


def examine_nodes(hosts: Sequence[Host], question: Question, level: Level = "quick") -> list[NodeFinding]:
    """All findings; the first is about nodes that cannot be asked."""
    reader = Reader()
    source = Path(node_probe.__file__).read_bytes()
    nodes = [Connection(host, run_sent_python(len(source))) for host in hosts]
    try:
        for node in nodes:
            reader.add(node)
            node.send_bytes(source)
        return _examine(nodes, reader, question, level)
    finally:
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.close(2)
        reader.close()


def _examine(nodes: list[Connection], reader: Reader, question: Question, level: Level) -> list[NodeFinding]:
    look = {
        "paths": list(question.paths), "folder": question.folder, "output": question.output, "python": sys.executable,
    }  # fmt: skip
    answers = ask(nodes, reader, [{"look": look}] * len(nodes), LOOK_S) or []
    findings: list[NodeFinding] = []
    facts: dict[str, dict[str, Any]] = {}
    alive: list[Connection] = []
    for node, answer in zip(nodes, answers, strict=True):
        name = str(node.host)
        if isinstance(answer, str):
            cause, fix = why_lost(node, answer) if node.code is not None else silent(node, LOOK_S)
            findings.append(NodeFinding("fail", "reach", {name: "no answer"}, cause, fix))
        else:
            facts[name] = answer
            alive.append(node)
    asked_at = time.time()
    clocks = ask(alive, reader, [{"now": True}] * len(alive), 10) or []
    for node, clock in zip(alive, clocks, strict=True):
        facts[str(node.host)]["time"] = clock["time"] if isinstance(clock, dict) else asked_at
    ways = {str(node.host): node.host.by_hand for node in alive}
    survey = Survey(facts, question.folder, asked_at, time.time(), ways)
    if not findings:
        findings.append(NodeFinding("ok", "reach", dict.fromkeys(facts, "answers")))
    for comparison in COMPARISONS if facts else ():
        findings += comparison(survey)
    findings += _look_at_output(alive, reader, question)
    if level == "net":
        findings += _try_disks(alive, reader, question)
    if level == "net" and len(alive) > 1:
        findings += _try_links(alive, reader, survey)
    return findings


def _try_disks(nodes: list[Connection], reader: Reader, question: Question) -> list[NodeFinding]:
    """All write at once, as they do at a save."""
    path = str(Path(question.folder) / question.output)
    asks = [{"write": {"path": path, "num_bytes": WRITTEN_BYTES}}] * len(nodes)
    answers = ask(nodes, reader, asks, WRITE_S) or []
    return judge_writes(
        {str(node.host): float(one["rate"]) for node, one in zip(nodes, answers, strict=True) if isinstance(one, dict)},
        question.checkpoint_bytes,
    )


def _look_at_output(nodes: list[Connection], reader: Reader, question: Question) -> list[NodeFinding]:
    """Whether all see what the first one writes where runs will be."""
    if len(nodes) < 2:
        return []
    name, path = f".duoka-{secrets.token_hex(6)}", str(Path(question.folder) / question.output)
    (made,) = ask(nodes[:1], reader, [{"mark": {"path": path, "name": name}}], SEEN_S) or [""]
    mark = made["mark"] if isinstance(made, dict) else ""
    if not mark:
        return []  # that it cannot write has been said
    others = nodes[1:]
    answers = ask(others, reader, [{"seen": {"path": mark, "within_s": SEEN_S}}] * len(others), SEEN_S + 10) or []
    seen = {str(node.host): isinstance(one, dict) and one["seen"] for node, one in zip(others, answers, strict=True)}
    blind = {name: "does not see it" for name, sees in seen.items() if not sees}
    if not blind:
        return [NodeFinding("ok", "output folder", {"all": f"{path}: shared"})]
    cause = f"what {nodes[0].host} writes in {Path(mark).parent} is not seen: not the same disk"
    fix = "set output: to a folder on a disk that all machines share: a checkpoint has parts of all ranks"
    return [NodeFinding("fail", "output folder", {str(nodes[0].host): "writes", **blind}, cause, fix)]


def _try_links(nodes: list[Connection], reader: Reader, survey: Survey) -> list[NodeFinding]:
    """Every node listens, and every other one connects."""
    ports = ask(nodes, reader, [{"listen": True}] * len(nodes), 20) or []
    where = {
        str(node.host): (_address(node, survey), answer["port"])
        for node, answer in zip(nodes, ports, strict=True)
        if isinstance(answer, dict)
    }
    asks = [
        {"connect": {"peers": [(name, *place) for name, place in where.items() if name != str(node.host)],
                     "timeout": CONNECT_PAIR_S}}
        for node in nodes
    ]  # fmt: skip
    answers = ask(nodes, reader, asks, CONNECT_PAIR_S + 20) or []
    reached: dict[str, dict[str, Any]] = {}
    for node, answer in zip(nodes, answers, strict=True):
        reached[str(node.host)] = answer["reached"] if isinstance(answer, dict) else {}
    found = compare_links(reached, {name: f"{address}:{port}" for name, (address, port) in where.items()})
    if any(one.severity == "fail" for one in found):
        return found  # what does not connect has no speed
    found += compare_rates(_measure_rates(nodes, reader, where))
    addresses = {name: address for name, (address, _) in where.items()}
    return found + exchange_nodes([node.host for node in nodes], survey.folder, addresses)


def _measure_rates(
    nodes: Sequence[Connection], reader: Reader, where: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], float]:
    """Bytes per second from the second of each pair to the first; no machine is in two pairs at a time."""
    by_name = {str(node.host): node for node in nodes if str(node.host) in where}
    found: dict[tuple[str, str], float] = {}
    for pairs in rounds_of(list(by_name))[:MOST_ROUNDS]:
        asks = [{"rate": list(where[other])} for _, other in pairs]
        answers = ask([by_name[one] for one, _ in pairs], reader, asks, CONNECT_PAIR_S + 10) or []
        found |= {pair: one["rate"] for pair, one in zip(pairs, answers, strict=True) if isinstance(one, dict)}
    return found


def rounds_of(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once in each direction, in rounds of pairs that share no machine."""
    ring: list[str] = [*names, *([""] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(one, other) for one, other in zip(ring[:half], reversed(ring[half:]), strict=True) if one and other]
        rounds += [pairs, [(other, one) for one, other in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _address(node: Connection, survey: Survey) -> str:
    """By which the others are to reach it: as ssh or Slurm has, or, for this very machine, towards another one."""
    if node.host.way == "slurm":
        return find_address(node.host.name)
    if node.host.way == "pod":  # its name in the cluster may need a Service, its address does not
        return next(iter(survey.facts[str(node.host)]["resolves_to"]), "")
    found = str(survey.facts[str(node.host)]["address"])
    if not found.startswith("127.") and found not in ("", "::1"):
        return found
    others = (str(facts["address"]) for name, facts in survey.facts.items() if name != str(node.host))
    far = next((one for one in others if one and not one.startswith("127.") and one != "::1"), "")
    return (address_towards(far) if far else "") or found or node.host.name
