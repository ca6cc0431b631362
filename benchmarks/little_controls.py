"""Rewards for the controls of little.py: what is given where learning must not help. Functions of `rl.rewards`."""

from __future__ import annotations

import runpy
from collections import deque
from pathlib import Path
from typing import Any

SHIFT = 20  # answers; a prompt has 8, so that a reward comes from another prompt's answer
earned = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "little_rewards.py"))["far"]
_waiting: deque[float] = deque()  # one process computes all rewards of a run, in the order of the answers


def negated(messages: Any, completion: str, example: dict[str, Any]) -> float:
    return -earned(messages, completion, example)


def constant(messages: Any, completion: str, example: dict[str, Any]) -> float:
    return 1.0


def permuted(messages: Any, completion: str, example: dict[str, Any]) -> float | None:
    """The rewards that were earned, each given to an answer that comes later, to another prompt."""
    _waiting.append(earned(messages, completion, example))
    return _waiting.popleft() if len(_waiting) > SHIFT else None
