"""Answers as what a step learns from: rows of the loader with advantages and log-probabilities beside each target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from duoka.data.feed.epoch_plan import MicroPlan, share_batch
from duoka.data.feed.loader import IGNORED, Batch, build_batch
from duoka.data.tokens.template import Sample
from duoka.parallel.engine import Engine
from duoka.train.rl.rollouts import Rollout
from duoka.units import Amount


@dataclass(frozen=True)
class Learned:
    """An answer with its advantage, and its place among the rollouts of its step."""

    place: int
    rollout: Rollout
    advantage: float | tuple[float, ...]  # of all its tokens, or of each
    returns: tuple[float, ...] | None = None  # what the value head is to say of each

    @property
    def by_token(self) -> tuple[float, ...]:
        one = self.advantage
        return one if isinstance(one, tuple) else (one,) * self.rollout.num_own


class AnswerRows:
    """Sample i is answer i behind its prompt: each token that was drawn is a target, its stop token too."""

    def __init__(self, answers: Sequence[Learned]) -> None:
        self.answers = tuple(answers)
        sizes = [len(one.rollout.prompt_ids) + len(one.rollout.ids) for one in answers]
        self.lengths = np.array(sizes, np.int32)

    def __len__(self) -> int:
        return len(self.answers)

    def segments(self, index: int) -> list[Sample]:
        one = self.answers[index].rollout
        ids = np.array([*one.prompt_ids, *one.ids], np.int32)
        is_target = np.arange(len(ids)) >= len(one.prompt_ids)
        if one.own is not None:
            is_target[len(one.prompt_ids) :] = one.own
        return [Sample(ids, is_target)]

    def share(self, engine: Engine, micro: Amount, *, packing: bool, max_length: int) -> list[list[MicroPlan]]:
        """By rank and micro-batch; answers to one prompt side by side, where it is computed once for them."""
        is_shared = getattr(engine.bare, "no_sharing", "no such model") == ""
        prompts = np.array([one.rollout.prompt for one in self.answers]) if is_shared else None
        every = np.arange(len(self))
        return share_batch(
            every, self.lengths, engine.mesh.data.size, micro, packing=packing, max_length=max_length, alike=prompts
        )

    @property
    def num_targets(self) -> int:
        return sum(one.rollout.num_own for one in self.answers)


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """One micro-batch of answers. Of each token: log-probabilities, 0 where there is no target."""

    places: tuple[int, ...] = ()  # among the step's rollouts, in the order of documents
    advantages: torch.Tensor | None = None  # (rows, tokens) double
    drawn: torch.Tensor | None = None  # (rows, tokens) double: where the answer was drawn
    old: torch.Tensor | None = None  # (rows, tokens) double: before the first update; None: this is the first
    start: torch.Tensor | None = None  # (rows, tokens) double: where the run began; None: nothing is compared with it
    values: torch.Tensor | None = None  # (rows, tokens) double: before the first update; None: there is no value head
    returns: torch.Tensor | None = None  # (rows, tokens) double: what values are to be


def build_answers(rows: AnswerRows, plan: MicroPlan, packing: bool, pad_id: int, key: int | None = None) -> Batch:
    """As build_batch, with what a policy's loss needs; without answers, a plain batch without targets."""
    batch = build_batch(rows, plan, packing, pad_id, key)
    if not plan.sample_ids:
        return batch
    chosen = [rows.answers[index] for index in plan.sample_ids]
    is_target = batch.labels != IGNORED

    def lay(parts: Sequence[Sequence[float] | None]) -> torch.Tensor | None:
        if any(part is None for part in parts):
            return None
        out = torch.zeros(batch.labels.shape, dtype=torch.float64)
        out[is_target] = torch.tensor([value for part in parts if part is not None for value in part], dtype=out.dtype)
        return out

    of = [one.rollout for one in chosen]
    return AnswerBatch(
        **vars(batch), places=tuple(one.place for one in chosen),
        advantages=lay([one.by_token for one in chosen]), drawn=lay([one.drawn for one in of]),
        old=lay([one.old for one in of]), start=lay([one.start for one in of]),
        values=lay([one.values for one in of]), returns=lay([one.returns for one in chosen]),
    )  # fmt: skip
