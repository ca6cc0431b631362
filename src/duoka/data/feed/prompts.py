"""Prompts to be answered while a model is trained: what stands where a TokenStore does in stage rl.

The epoch plan orders them as it orders samples. What is learned from are answers, which train/rl draws.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from duoka.data.tokens.template import Sample


@dataclass(frozen=True)
class Question:
    """A prompt, and what a reward may want to know of it: the right answer where there is one, the record's facts."""

    source: str  # the data set, task:NAME for a task
    id: str
    messages: tuple[tuple[str, str], ...]  # (role, text) up to where the assistant answers
    answer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PromptRows:
    """Sample i is question i: its prompt as tokens, none of which is learned."""

    def __init__(self, questions: Sequence[Question], ids: Sequence[Sequence[int]]) -> None:
        if len(questions) != len(ids) or not questions:
            raise ValueError(f"{len(questions)} questions, and {len(ids)} prompts")
        self.questions = tuple(questions)
        self.ids = tuple(tuple(own) for own in ids)
        self.lengths = np.array([len(own) for own in ids], np.int32)
        self.num_targets = np.zeros(len(ids), np.int32)

    def __len__(self) -> int:
        return len(self.questions)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for question, ids in zip(self.questions, self.ids, strict=True):
            facts = json.dumps([question.to_json(), ids], sort_keys=True, ensure_ascii=False, default=str)
            digest.update(facts.encode())
        return digest.hexdigest()

    def segments(self, index: int) -> list[Sample]:
        ids = np.array(self.ids[index], np.int32)
        return [Sample(ids, np.zeros(len(ids), bool))]

    def of_sources(self) -> Iterator[str]:
        """The data sets, each once."""
        yield from dict.fromkeys(question.source for question in self.questions)
