"""Are the nodes of `--hosts` fit and alike? Asked over the connections that the run will use, before anything starts.

Called by fleet.py. Every fault of every node in one message; the doctor (survey.py) looks at far more than this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from duoka.cluster.ssh import CONNECT_S, Connection, Reader, why_lost
from duoka.cluster.supervise import Request
from duoka.cluster.tether import GREETING, SEEN_WITHIN_S
from duoka.errors import DoctorError

ANSWER_S = CONNECT_S + 45.0  # to connect, and to start Python there
_LOOK_EVERY_S = 0.1


class NodesUnfit(DoctorError):
    """What is wrong with which nodes; each fault with what to do."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(faults[0][0], fix=faults[0][1])
        self.faults = tuple(faults)

    def lines(self) -> list[str]:
        out = []
        for what, fix in self.faults:
            out += [f"{self.title}: {what}", f"  {fix}"]
        return [*out, "  nothing was started"]


def check_nodes(
    nodes: Sequence[Connection], reader: Reader, request: Request, asks: Sequence[Mapping[str, Any]], code: str,
    config: str,
) -> list[dict[str, Any]] | None:  # fmt: skip
    """The facts of every node; None when a signal asked to stop. Raises NodesUnfit. `code`, `config`: digests here."""
    answers = _ask(nodes, reader, request, asks, ANSWER_S)
    if answers is None:
        return None
    faults = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, str):
            faults.append(why_lost(node, answer) if node.code is not None else _silent(node, ANSWER_S))
            continue
        if not answer["config"]:
            path = asks[0]["look"]["config"]
            faults.append(
                (f"{node.host}: there is no {path}", "the same files must be on all machines, or on a shared disk")
            )
        elif answer["config"] != config:
            path, host = asks[0]["look"]["config"], node.host
            fix = f"scp {path} {host.target}:{path}"
            faults.append((f"{host}: {path} is another file there than here", fix))
        if answer["code"] != code:
            what = f"{node.host}: duoka there is other code than here (Python {answer['python']})"
            faults.append((what, "install the same version on all machines"))
        if answer["cannot_write"]:
            faults.append(
                (f"{node.host}: cannot write in {answer['cannot_write']}", "set output: to a folder for writing")
            )
    if faults:
        raise NodesUnfit(faults)
    return [answer for answer in answers if not isinstance(answer, str)]


def check_shared(nodes: Sequence[Connection], reader: Reader, request: Request, first: Mapping[str, Any]) -> bool:
    """All nodes see the file that the first one left where the run will be; False when a signal asked to stop."""
    others = nodes[1:]
    answers = _ask(others, reader, request, [{"seen": first["mark"]}] * len(others), SEEN_WITHIN_S + 20)
    if answers is None:
        return False
    faults = []
    for node, answer in zip(others, answers, strict=True):
        if isinstance(answer, str):
            faults.append(why_lost(node, answer) if node.code is not None else _silent(node, SEEN_WITHIN_S + 20))
        elif not answer["seen"]:
            folder = str(first["mark"]).rpartition("/")[0]
            what = f"{node.host} does not see what {nodes[0].host} writes in {folder}"
            faults.append(
                (what, "set output: to a folder on a disk that all machines share: checkpoints have parts of all")
            )
    if faults:
        raise NodesUnfit(faults)
    return True


def _silent(node: Connection, seconds: float) -> tuple[str, str]:
    return f"{node.host} has not answered within {seconds:.0f} s", f"try it by hand:   ssh {node.host.target} true"


def _ask(
    nodes: Sequence[Connection], reader: Reader, request: Request, asks: Sequence[Mapping[str, Any]], within_s: float
) -> list[dict[str, Any] | str] | None:
    """One answer of each; in its place what a node has said on stderr, when it ended or kept silent."""
    answers: dict[Connection, dict[str, Any]] = {}
    output = {node: [b"", b""] for node in nodes}
    for node, ask in zip(nodes, asks, strict=True):
        node.send(dict(ask))
    until, ended_at = time.monotonic() + within_s, 0.0
    while len(answers) < len(nodes) and time.monotonic() < until:
        if request.stop_by:
            return None
        for node, stream, data in reader.read(_LOOK_EVERY_S):
            if node in output:
                output[node][stream] += data
                found = _find_answer(output[node][0])
                if found is not None:
                    answers[node] = found
        waiting = [node for node in nodes if node not in answers]
        alive = [node for node in waiting if node.look()]
        if alive:
            ended_at = 0.0
        elif waiting:  # their last words may still be on the way
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > 1:
                break
        for node in waiting:
            node.flush()
    return [answers[node] if node in answers else output[node][1].decode(errors="replace") for node in nodes]


def _find_answer(data: bytes) -> dict[str, Any] | None:
    for line in data.split(b"\n")[:-1]:
        if line.startswith(GREETING.encode()):
            found = json.loads(line[len(GREETING) :])
            return found if isinstance(found, dict) else None
    return None
