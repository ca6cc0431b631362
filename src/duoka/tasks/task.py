"""What a task is: questions with checked answers, used as data (`task:NAME`), as a score (`duoka eval --tasks`).

Made by the files beside this one, found by find.py. Nothing here knows a tokenizer or a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Kind = Literal["choice", "generate", "text"]  # text: to read, without questions
Split = Literal["train", "test"]
# How an option is measured: log-probability of its tokens, or that by token; greedy: whether each is the likeliest.
Measure = Literal["sum", "mean", "greedy"]


@dataclass(frozen=True)
class Option:
    """An answer to choose. `text` follows the question in a chat; with `before`, it follows that as plain text."""

    label: str
    text: str
    before: str | None = None


@dataclass(frozen=True)
class Item:
    """One question. `id` is its own within the task, `answer` what data teaches and, of a choice, the right label."""

    id: str
    question: tuple[tuple[str, str], ...] = ()  # (role, text) up to where the assistant answers
    answer: str = ""
    options: tuple[Option, ...] = ()  # kind choice
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the task's check needs beside

    @property
    def right(self) -> int:
        """The place of the right option."""
        return next(place for place, option in enumerate(self.options) if option.label == self.answer)


class Task(ABC):
    """Questions of one kind; every method is a pure function, so that all processes see the same items."""

    name: str
    kind: Kind = "generate"
    measure: Measure = "sum"
    max_new_tokens: ClassVar[int] = 64  # an answer's usual end, for kind generate
    chance: float = 0.0  # what guessing scores
    runs_code: ClassVar[bool] = False  # its check runs what the model wrote

    @abstractmethod
    def items(self, split: Split) -> Sequence[Item]:
        """In a fixed order; empty where the task has no such split."""

    def example(self, item: Item) -> list[dict[str, str]]:
        """The item as a conversation to learn from; empty when it is none."""
        if not item.question:
            return []
        turns = [{"role": role, "content": text} for role, text in item.question]
        return [*turns, {"role": "assistant", "content": item.answer}]

    def texts(self, split: Split) -> Sequence[str]:
        """Of kind text: what there is to read."""
        return ()

    def check(self, item: Item, answer: str) -> float:
        """How good an answer is, from 0 to 1; of a choice, the answer is the label."""
        return float(answer.strip() == item.answer)


def ask(text: str) -> tuple[tuple[str, str], ...]:
    """A question of one turn."""
    return (("user", text),)
