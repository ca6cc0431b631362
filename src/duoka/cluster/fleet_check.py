"""Are the nodes of `--hosts` fit and alike? Asked over the connections that the run will use, before anything starts.

Called by fleet.py. Every fault of every node in one message; the doctor (survey.py) looks at far more than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duoka.cluster.ssh import CONNECT_S, Connection, Reader, ask, silent, why_lost
from duoka.cluster.supervise import Request
from duoka.cluster.tether import SEEN_WITHIN_S
from duoka.errors import DoctorError

ANSWER_S = CONNECT_S + 45.0  # to connect, and to start Python there


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
    answers = ask(nodes, reader, asks, ANSWER_S, lambda: bool(request.stop_by))
    if answers is None:
        return None
    faults = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, str):
            faults.append(why_lost(node, answer) if node.code is not None else silent(node, ANSWER_S))
            continue
        if not answer["config"]:
            path = asks[0]["look"]["config"]
            faults.append(
                (f"{node.host}: there is no {path}", "the same files must be on all machines, or on a shared disk")
            )
        elif answer["config"] != config:
            path, host = asks[0]["look"]["config"], node.host
            port = f"-P {host.port} " if host.port else ""
            fix = f"scp {port}{path} {host.target}:{path}"
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
    answers = ask(
        others, reader, [{"seen": first["mark"]}] * len(others), SEEN_WITHIN_S + 20, lambda: bool(request.stop_by)
    )
    if answers is None:
        return False
    faults = []
    for node, answer in zip(others, answers, strict=True):
        if isinstance(answer, str):
            faults.append(why_lost(node, answer) if node.code is not None else silent(node, SEEN_WITHIN_S + 20))
        elif not answer["seen"]:
            folder = str(first["mark"]).rpartition("/")[0]
            what = f"{node.host} does not see what {nodes[0].host} writes in {folder}"
            faults.append(
                (what, "set output: to a folder on a disk that all machines share: checkpoints have parts of all")
            )
    if faults:
        raise NodesUnfit(faults)
    return True
