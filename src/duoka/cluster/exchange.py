"""`duoka doctor --hosts a,b --level net`, at last: ranks of all machines exchange and train, and all must agree.

Called by survey.py once every pair connects. The work is bench/exchange.py's, one process a machine; here it is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duoka.cluster.findings import NodeFinding, both, odd_ones
from duoka.cluster.ssh import CONNECT_S, Connection, Reader, ask, in_folder, silent, why_lost
from duoka.config.hosts import Host
from duoka.process.interpreter import python_module

EXCHANGE_S = 15.0
_START_S = CONNECT_S + 120.0  # to import torch from a slow disk

Told = Mapping[str, Any]  # bench/exchange.py:Exchanged as JSON, or its error


def exchange_nodes(hosts: Sequence[Host], folder: str, addresses: Mapping[str, str]) -> list[NodeFinding]:
    """The first host's address is where the others meet."""
    reader = Reader()
    nodes = [Connection(host, in_folder(folder, python_module("duoka.bench.exchange"))) for host in hosts]
    try:
        for node in nodes:
            reader.add(node)
        (first,) = ask(nodes[:1], reader, [{"serve": True}], _START_S) or [""]
        if isinstance(first, str):
            return [_unheard(nodes[0], first)]
        place = {"host": addresses[str(hosts[0])], "port": first["port"], "size": len(nodes), "seconds": EXCHANGE_S}
        asks = [{"meet": {**place, "rank": rank}} for rank in range(len(nodes))]
        answers = ask(nodes, reader, asks, _START_S + 4 * EXCHANGE_S) or []
        lost = [_unheard(node, one) for node, one in zip(nodes, answers, strict=True) if isinstance(one, str)]
        told = {str(node.host): one for node, one in zip(nodes, answers, strict=True) if not isinstance(one, str)}
        return lost + judge_exchanged(told)
    finally:
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.close(2)
        reader.close()


def _unheard(node: Connection, said: str) -> NodeFinding:
    cause, fix = why_lost(node, said) if node.code is not None else silent(node, _START_S)
    return NodeFinding("fail", "exchange", {str(node.host): "no answer"}, cause, fix)


def judge_exchanged(told: Mapping[str, Told]) -> list[NodeFinding]:
    """Who did not meet, who added wrong, whose weights differ, whose GPUs garble copies; or that all is well."""
    errors = {name: str(one["error"]) for name, one in told.items() if "error" in one}
    found = {name: one["exchanged"] for name, one in told.items() if "exchanged" in one}
    findings = []
    if errors:
        cause = "pairs connect, and an exchange between all did not come about: ports above 1024 that only ranks use, "
        cause += "a card that *_SOCKET_IFNAME names wrongly, or another torch"
        fix = "duoka doctor --hosts shows the cards; open ports 1024-65535 between the machines"
        findings.append(NodeFinding("fail", "exchange", errors, cause, fix))
    if wrong := {name: f"{one['num_wrong']:,} sums wrong" for name, one in found.items() if one["num_wrong"]}:
        cause = "numbers change on their way: a card, its driver or memory is broken, and runs over it are worthless"
        findings.append(
            NodeFinding("fail", "exchange", wrong, cause, "leave it out (--exclude), and have it looked at")
        )
    _, strays = odd_ones({name: one["together"] for name, one in found.items()})
    if strays and not wrong:
        shown = both({name: one["together"] for name, one in found.items()}, strays)
        cause = "after three steps with the same gradients its weights are others: copies of a model would part"
        fix = "duoka doctor --level burn says whether it computes wrong; compare its torch"
        findings.append(NodeFinding("fail", "same weights", shown, cause, fix))
    if copies := {name: ", ".join(one["bad_copies"]) for name, one in found.items() if one["bad_copies"]}:
        cause = (
            "bytes change between these GPUs: direct copies (P2P) are promised and do not work, mostly by ACS or IOMMU"
        )
        fix = "turn ACS or the IOMMU off in the BIOS, or go around:   export NCCL_P2P_DISABLE=1"
        findings.append(NodeFinding("fail", "copies between GPUs", copies, cause, fix))
    if found and not findings:
        backends = "/".join(sorted({one["backend"] for one in found.values()}))
        words = f"{len(found)} ranks over {backends}: sums right, the same weights after three steps"
        findings.append(NodeFinding("ok", "exchange", {"all": words}))
        findings += _judge_alone({name: one["alone"] for name, one in found.items()})
    return findings


def _judge_alone(digests: Mapping[str, str]) -> list[NodeFinding]:
    """The same steps on the same data, each for itself."""
    _, others = odd_ones(digests)
    if not others:
        return []
    cause = "alone, on the same data, it learns other last digits: another kind of processor, or another torch"
    fix = "runs are right; a run that goes on with other machines is the same within rounding, not bit for bit"
    return [NodeFinding("warn", "same digits", both(digests, others), cause, fix)]
