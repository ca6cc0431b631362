"""What an answer is worth in examples/little.yaml: how far it is right, so that a nearly right one counts too."""

from __future__ import annotations

from typing import Any


def far(messages: list[dict[str, str]], completion: str, example: dict[str, Any]) -> float:
    """The share of the right answer that comes before the first mistake: from 0 to 1."""
    said, wanted = completion.strip(), example["answer"]
    pairs = list(zip(said, wanted, strict=False))
    right = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
    return right / max(len(said), len(wanted))
