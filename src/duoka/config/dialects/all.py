"""The dialects by name, and which of them a file is in."""

from __future__ import annotations

from functools import cache

from duoka.config.catalog import known_keys
from duoka.config.dialects.accelerate import accelerate
from duoka.config.dialects.deepspeed import deepspeed
from duoka.config.dialects.engine import leaves_of
from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.nested import nested
from duoka.config.dialects.rows import Dialect
from duoka.config.yaml_lines import Tree


@cache
def dialects() -> dict[str, Dialect]:
    return {dialect.id: dialect for dialect in (llamafactory(), nested(), accelerate(), deepspeed())}


def speaks(tree: Tree, dialect: Dialect) -> bool:
    """Whether a file that extends one in `dialect` goes on in its words.

    Both are one file then: what the other tool does where a file is silent is asked of all that is written.
    """
    own = recognise(tree)
    if own is not None or not tree.value:
        return own is dialect
    return all(
        leaf.name in dialect.rows and not (leaf.name in known_keys() and isinstance(leaf.tree.value, dict))
        for leaf in leaves_of(dialect, tree)
    )


def recognise(tree: Tree) -> Dialect | None:
    """The dialect that a file is in, judged by its keys; None for duoka's own."""
    top = tree.plain_value()
    if not isinstance(top, dict):
        return None
    return next((dialect for dialect in dialects().values() if dialect.fits(top)), None)
