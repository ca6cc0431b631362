"""What a cross-field rule is: one row of the tables in rules.py and rules_text.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duoka.config.schema import DataSource, RunConfig


@dataclass(frozen=True)
class Rule:
    """One contradiction. `is_broken` looks; `message` may name values, as in {c.optim.lr}."""

    id: str
    keys: tuple[str, ...]  # the fault is shown at the first of them that the user wrote
    is_broken: Callable[[RunConfig], bool]
    message: str
    fix: str
    is_note: bool = False  # said, not refused


def names_of(sources: object) -> list[str]:
    """The names of a list of data sets; of anything else, none."""
    return [source.name for source in sources if isinstance(source, DataSource)] if isinstance(sources, tuple) else []
