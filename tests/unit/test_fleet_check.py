"""`duoka train --hosts` refuses before anything starts: another config, other code, or no place to write on a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duoka.cluster import fleet_check
from duoka.cluster.fleet_check import NodesUnfit, check_nodes, check_shared
from duoka.config.hosts import parse_hosts

GOOD = {"config": "c1", "code": "d1", "python": "3.11.7", "cannot_write": ""}
ASK = {"look": {"config": "/w/run.yaml"}}


def check(monkeypatch: pytest.MonkeyPatch, *answers: Any, code: int | None = None) -> Any:
    nodes = [SimpleNamespace(host=host, code=code, errors=[]) for host in parse_hosts("a,me@b:2222")]
    monkeypatch.setattr(fleet_check, "ask", lambda *_: list(answers))
    return check_nodes(nodes, None, SimpleNamespace(stop_by=""), [ASK, ASK], "d1", "c1")  # type: ignore[arg-type]


def test_nodes_alike_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, GOOD, GOOD) == [GOOD, GOOD]


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"config": ""}, "me@b:2222: there is no /w/run.yaml", "shared disk"),
        (
            {"config": "c2"},
            "me@b:2222: /w/run.yaml is another file there than here",
            "scp -P 2222 /w/run.yaml me@b:",
        ),
        ({"code": "d2"}, "me@b:2222: duoka there is other code than here (Python 3.11.7)", "the same version"),
        ({"cannot_write": "/w/runs"}, "me@b:2222: cannot write in /w/runs", "output:"),
    ],
)
def test_a_node_that_differs_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str, fix: str
) -> None:
    with pytest.raises(NodesUnfit) as caught:
        check(monkeypatch, GOOD, {**GOOD, **change})
    assert len(caught.value.faults) == 1
    assert words in caught.value.faults[0][0] and fix in caught.value.faults[0][1]
    assert caught.value.lines()[-1] == "  nothing was started" and caught.value.exit_code == 3


def test_all_faults_of_all_nodes_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NodesUnfit) as caught:
        check(monkeypatch, {**GOOD, "config": "c2", "code": "d2"}, {**GOOD, "cannot_write": "/w"})
    assert len(caught.value.faults) == 3


def test_a_disk_that_is_not_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [SimpleNamespace(host=host, code=None) for host in parse_hosts("a,b,c")]
    monkeypatch.setattr(fleet_check, "ask", lambda *_: [{"seen": True}, {"seen": False}])
    with pytest.raises(NodesUnfit, match="c does not see what a writes in /w"):
        check_shared(nodes, None, SimpleNamespace(stop_by=""), {"mark": "/w/.mark"})  # type: ignore[arg-type]
