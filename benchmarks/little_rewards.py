"""Rewards for the controls of little.py: what is given where learning must not help. Functions of `rl.rewards`."""

from __future__ import annotations

from collections import deque
from typing import Any

from duoka.tasks.find import find_tasks
from duoka.tasks.task import Item

SHIFT = 20  # answers; a prompt has 8, so that a reward comes from another prompt's answer
_waiting: deque[float] = deque()  # one process computes all rewards of a run, in the order of the answers


def right(question: str, wanted: str, said: str) -> float:
    """What the task itself says of an answer."""
    (task,) = find_tasks(question.partition("/")[0])
    return task.check(Item(question, answer=wanted), said)


def negated(messages: Any, completion: str, example: dict[str, Any]) -> float:
    return -right(example["id"], example["answer"], completion)


def constant(messages: Any, completion: str, example: dict[str, Any]) -> float:
    return 1.0


def permuted(messages: Any, completion: str, example: dict[str, Any]) -> float | None:
    """The rewards that were earned, each given to an answer that comes later, to another prompt."""
    _waiting.append(right(example["id"], example["answer"], completion))
    return _waiting.popleft() if len(_waiting) > SHIFT else None
