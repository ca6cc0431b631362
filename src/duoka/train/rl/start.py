"""The model that a run began with, for the distance from it: a copy of what is trained, and nothing else.

Under adapters that is the adapter as it starts, above a base that never changes; else all weights; of sharded weights
each rank has a copy of its own part. For the passes that compute its log-probabilities, once for each step's answers,
it changes places with what is trained: whatever a strategy makes of its weights, it makes of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from duoka.data.feed.epoch_plan import share_batch
from duoka.data.feed.loader import IGNORED
from duoka.parallel.engine import Engine
from duoka.parallel.inputs import model_inputs
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.train.rl.batch import AnswerBatch, AnswerRows, Learned, build_answers
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

    @torch.no_grad()
    def add(
        self, rollouts: Sequence[Rollout], engine: Engine, layout: Layout, *, max_length: int, pad_id: int,
        temperature: float,
    ) -> list[Rollout]:  # fmt: skip
        """The same answers with their log-probabilities here, on all ranks together."""
        mesh, device = engine.mesh, engine.world.device
        rows = AnswerRows([Learned(place, one, 0.0) for place, one in enumerate(rollouts)])
        shares = share_batch(
            np.arange(len(rows)), rows.lengths, mesh.data.size, layout.micro, packing=layout.packing,
            max_length=max_length,
        )  # fmt: skip
        own: dict[int, tuple[float, ...]] = {}
        with self.in_place(engine), engine.evaluate() as model:
            was_training = model.training
            model.eval()
            for plan in shares[mesh.data.rank]:
                micro = build_answers(rows, plan, layout.packing, pad_id)
                mesh.everyone.heart.tell("reference")
                with compute_in(layout.precision, device):  # also of no answers: ranks may gather weights together
                    logps, _ = model(**model_inputs(micro, device), answer="logps", temperature=temperature)
                if not isinstance(micro, AnswerBatch):
                    continue
                flat = logps.double()[(micro.labels != IGNORED).to(device)].cpu()
                sizes = [len(rollouts[place].ids) for place in micro.places]
                for place, values in zip(micro.places, flat.split(sizes), strict=True):
                    own[place] = tuple(values.tolist())
            model.train(was_training)
        found = {place: values for part in mesh.data.gather(own) for place, values in part.items()}
        return [replace(one, start=found[place]) for place, one in enumerate(rollouts)]
