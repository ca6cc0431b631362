"""The model that a run began with, for the distance from it: a copy of what is trained, and nothing else.

Under adapters that is the adapter as it starts, above a base that never changes; else all weights. Its
log-probabilities of a step's answers are computed once, when they are drawn, and recorded with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from duoka.data.feed.epoch_plan import share_batch
from duoka.data.feed.loader import IGNORED
from duoka.model.build import LossModel
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
        return cls({f"lm.{name}": p.detach().clone() for name, p in engine.named_trainable().items()})

    @torch.no_grad()
    def add(
        self, rollouts: Sequence[Rollout], engine: Engine, layout: Layout, *, max_length: int, pad_id: int,
        temperature: float,
    ) -> list[Rollout]:  # fmt: skip
        """The same answers with their log-probabilities here, on all ranks together."""
        mesh, device, model = engine.mesh, engine.world.device, engine.bare
        assert isinstance(model, LossModel)
        rows = AnswerRows([Learned(place, one, 0.0) for place, one in enumerate(rollouts)])
        shares = share_batch(
            np.arange(len(rows)), rows.lengths, mesh.data.size, layout.micro, packing=layout.packing,
            max_length=max_length,
        )  # fmt: skip
        was_training = model.training
        model.eval()
        own: dict[int, tuple[float, ...]] = {}
        for plan in shares[mesh.data.rank]:
            micro = build_answers(rows, plan, layout.packing, pad_id)
            if not isinstance(micro, AnswerBatch):
                continue
            mesh.everyone.heart.tell("reference")
            asked = {**model_inputs(micro, device), "answer": "logps", "temperature": temperature}
            with compute_in(layout.precision, device):
                logps, _ = torch.func.functional_call(model, self.weights, (), asked)
            flat = logps.double()[(micro.labels != IGNORED).to(device)].cpu()
            sizes = [len(rollouts[place].ids) for place in micro.places]
            for place, values in zip(micro.places, flat.split(sizes), strict=True):
                own[place] = tuple(values.tolist())
        model.train(was_training)
        found = {place: values for part in mesh.data.gather(own) for place, values in part.items()}
        return [replace(one, start=found[place]) for place, one in enumerate(rollouts)]
