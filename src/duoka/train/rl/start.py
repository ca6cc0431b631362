"""The model that a run began with, for the distance from it: a copy of what is trained, and nothing else.

Under adapters that is the adapter as it starts, above a base that never changes; else all weights; of sharded weights
each rank has a copy of its own part. For the passes that compute its log-probabilities, once for each step's answers,
it changes places with what is trained: whatever a strategy makes of its weights, it makes of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from duoka.parallel.engine import Engine
from duoka.train.rl.passes import AnswerPass, take_logps
from duoka.train.rl.rollouts import Rollout


@dataclass
class StartWeights:
    """Taken before a checkpoint is read: the run's beginning, wherever it goes on."""

    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, engine: Engine) -> StartWeights:
        return cls({name: p.detach().clone() for name, p in engine.named_trainable().items()})

    @contextlib.contextmanager
    def in_place(self, engine: Engine) -> Iterator[None]:
        """The engine has these weights meanwhile; bit for bit its own again after."""
        self._change_places(engine)
        try:
            yield
        finally:
            self._change_places(engine)

    @torch.no_grad()
    def _change_places(self, engine: Engine) -> None:
        for name, parameter in engine.named_trainable().items():
            kept, own = self.weights[name], parameter.detach()
            meanwhile = own.clone()
            own.copy_(kept)
            kept.copy_(meanwhile)

    def add(self, rollouts: Sequence[Rollout], over: AnswerPass) -> list[Rollout]:
        """The same answers with their log-probabilities here, on all ranks together."""
        with self.in_place(over.engine):
            found = over.numbers(rollouts, "logps", take_logps, "reference")
        return [replace(one, start=values) for one, values in zip(rollouts, found, strict=True)]
