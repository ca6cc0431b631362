"""What the doctor says about machines, and what they have told it: the words of compare.py and compare_devices.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["ok", "warn", "fail", "skip"]
MOST_SHOWN = 5


@dataclass(frozen=True)
class NodeFinding:
    """One answer, with each node's own value."""

    severity: Severity
    check: str
    nodes: Mapping[str, str] = field(default_factory=dict)
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Survey:
    """What the nodes have told, by name."""

    facts: Mapping[str, Mapping[str, Any]]
    folder: str
    asked_at: float  # by the leader's clock
    answered_at: float
    ssh: Mapping[str, str]  # how to get to a node

    def values(self, *keys: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, facts in self.facts.items():
            value: Any = facts
            for key in keys:
                value = value[key]
            found[name] = value
        return found


Comparison = Callable[[Survey], Iterator[NodeFinding]]


def odd_ones(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What most nodes have (the first of equals), and the nodes that have something else."""
    counts = Counter(map(str, values.values()))
    if not counts:
        return "", {}
    most = counts.most_common(1)[0][0]
    usual = next(value for value in values.values() if str(value) == most)
    return usual, {name: value for name, value in values.items() if str(value) != most}


def both(values: Mapping[str, Any], odd: Mapping[str, Any]) -> dict[str, str]:
    """The odd ones, and one of the others for comparison."""
    other = next((name for name in values if name not in odd), "")
    shown = {**({other: values[other]} if other else {}), **odd}
    return {name: str(value) or "none" for name, value in shown.items()}
