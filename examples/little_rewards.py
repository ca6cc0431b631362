"""What an answer is worth in examples/little.yaml: how far it is right, so that a nearly right one counts too."""

from __future__ import annotations

import itertools
from typing import Any


def far(messages: list[dict[str, str]], completion: str, example: dict[str, Any]) -> float:
    """The share of the right answer that comes before the first mistake: from 0 to 1."""
    said, wanted = completion.strip(), example["answer"]
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, wanted, strict=False))
    return len(list(alike)) / max(len(said), len(wanted))
