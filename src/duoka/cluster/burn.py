"""`duoka doctor --level burn`: which processor is slow, or computes wrong? Asked of all machines at the same time.

Called by cli/doctor.py. The work is bench/burn.py's, in a process of its own, here or over ssh; here it is judged.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from duoka.cluster.findings import NodeFinding
from duoka.cluster.node_probe import ANSWER
from duoka.cluster.ssh import CONNECT_S, Connection, Reader, ask, in_folder, silent, why_lost
from duoka.config.hosts import Host
from duoka.process.interpreter import python_module

SLOW, VERY_SLOW = 0.93, 0.7  # of the median of its kind: the slowest sets the pace of all
SECONDS = 10.0
_START_S = CONNECT_S + 120.0  # to import torch from a slow disk, and to make the matrices

Burned = Mapping[str, Any]  # bench/burn.py:Burned as JSON


def _command(seconds: float) -> tuple[str, ...]:
    return python_module("duoka.bench.burn", "--seconds", f"{seconds:g}")


def burn_here(seconds: float = SECONDS) -> list[NodeFinding]:
    """This machine's processors, one against the other."""
    try:
        started = subprocess.Popen(
            _command(seconds), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return [_silent("this machine", error.strerror or str(error))]
    patience = threading.Timer(_START_S + seconds, started.kill)
    patience.start()
    with started:
        try:
            assert started.stdout is not None and started.stderr is not None
            line = next((one for one in started.stdout if one.startswith(ANSWER)), "")
            said = "" if line else started.stderr.read()
        finally:
            patience.cancel()
            started.kill()
    if not line:
        return [_silent("this machine", (said.strip().splitlines() or ["it said nothing"])[-1])]
    return judge_burned({"": json.loads(line[len(ANSWER) :])["burned"]})


def burn_nodes(hosts: Sequence[Host], folder: str, seconds: float = SECONDS) -> list[NodeFinding]:
    """All processors of all machines, against each other."""
    reader = Reader()
    nodes = [Connection(host, in_folder(folder, _command(seconds))) for host in hosts]
    try:
        for node in nodes:
            reader.add(node)
        answers = ask(nodes, reader, [{"burn": True}] * len(nodes), _START_S + seconds) or []
        findings: list[NodeFinding] = []
        burned: dict[str, Sequence[Burned]] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, str):
                cause, fix = why_lost(node, answer) if node.code is not None else silent(node, _START_S + seconds)
                findings.append(NodeFinding("fail", "burn", {str(node.host): "no answer"}, cause, fix))
            else:
                burned[str(node.host)] = answer["burned"]
        return findings + judge_burned(burned)
    finally:
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.close(2)
        reader.close()


def _silent(name: str, why: str) -> NodeFinding:
    return NodeFinding("fail", "burn", {name: "no answer"}, why, "duoka doctor says what its environment lacks")


def judge_burned(burned: Mapping[str, Sequence[Burned]]) -> list[NodeFinding]:
    """Wrong ones, slow ones among those of a kind, or one line that says how fast they are."""
    named = {f"{node} {one['device']}".strip(): one for node, found in burned.items() for one in found}
    wrong = {
        name: f"{one['num_wrong']:,} of {one['num_products']:,} products wrong"
        for name, one in named.items()
        if one["num_wrong"]
    }
    findings = []
    if wrong:
        cause = "it computes other values than it must: processor or memory is broken, and runs on it are worthless"
        fix = "leave it out (CUDA_VISIBLE_DEVICES, --exclude), and have it replaced"
        findings.append(NodeFinding("fail", "arithmetic", wrong, cause, fix))
    good = {name: one for name, one in named.items() if name not in wrong}
    for kind in dict.fromkeys(one["kind"] for one in good.values()):
        findings.append(_judge_kind(kind, {name: one["flops"] for name, one in good.items() if one["kind"] == kind}))
    return findings


def _judge_kind(kind: str, flops: Mapping[str, float]) -> NodeFinding:
    usual = statistics.median_low(sorted(flops.values()))
    if len(flops) == 2:  # of two the slower one is in question
        usual = max(flops.values())
    slow = {name: one for name, one in flops.items() if one < SLOW * usual}
    if not slow:
        words = f"{len(flops)} x {kind}, {min(flops.values()) / 1e12:.3g} to {max(flops.values()) / 1e12:.3g} TFLOP/s"
        return NodeFinding("ok", "speed", {"all": f"{words}, and every product right"})
    shown = {name: f"{one / 1e12:.3g} TFLOP/s, {1 - one / usual:.0%} below the others" for name, one in slow.items()}
    cause = f"the others of {kind} make {usual / 1e12:.3g}; all wait for the slowest at every step"
    fix = "look for heat, a power limit or another program there: nvidia-smi -q -d PERFORMANCE,TEMPERATURE; top"
    is_far = any(one < VERY_SLOW * usual for one in slow.values())
    return NodeFinding("fail" if is_far else "warn", "speed", shown, cause, fix)
