"""The dialects by name, and which of them a file is in."""

from __future__ import annotations

from functools import cache

from duoka.config.dialects.accelerate import accelerate
from duoka.config.dialects.deepspeed import deepspeed
from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.nested import nested
from duoka.config.dialects.rows import Dialect
from duoka.config.yaml_lines import Tree


@cache
def dialects() -> dict[str, Dialect]:
    return {dialect.id: dialect for dialect in (llamafactory(), nested(), accelerate(), deepspeed())}


def recognise(tree: Tree) -> Dialect | None:
    """The dialect that a file is in, judged by its keys; None for duoka's own."""
    top = tree.plain_value()
    if not isinstance(top, dict):
        return None
    return next((dialect for dialect in dialects().values() if dialect.fits(top)), None)
