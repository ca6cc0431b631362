"""`--slurm key=value,...` and `--k8s key=value,...`: what was typed for a scheduler, as pairs."""

from __future__ import annotations

import re
from collections.abc import Collection

from duoka.errors import ConfigError
from duoka.registry import nearest

_VALUE = re.compile(r"[\w.:/@+\[\],-]+")


def read_pairs(flag: str, text: str, keys: Collection[str], example: str) -> list[tuple[str, str]]:
    """In the order typed. Raises ConfigError with the keys that there are."""
    pairs = []
    # A comma inside of [] belongs to a list of nodes.
    for part in re.split(r",(?![^\[]*\])", text):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in keys:
            near = nearest(key, list(keys))
            hint = f"did you mean {near}?" if near else f"there are: {', '.join(keys)}"
            raise ConfigError(f"{flag}: {key or part!r} is not known", fix=hint)
        if not _VALUE.fullmatch(value):
            raise ConfigError(f'{flag}: {key} is "{value}"', fix=f"write for example:   {example}")
        pairs.append((key, value))
    return pairs
