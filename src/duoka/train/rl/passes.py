"""A pass without gradients over a step's answers, on all ranks together: numbers of each answer's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from duoka.data.feed.loader import IGNORED
from duoka.model.build import Answer
from duoka.parallel.engine import Engine
from duoka.parallel.inputs import model_inputs
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.train.rl.batch import AnswerBatch, AnswerRows, Learned, build_answers
from duoka.train.rl.rollouts import Rollout

Answered = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class AnswerPass:
    """Where answers are computed once more."""

    engine: Engine
    layout: Layout
    max_length: int
    pad_id: int
    temperature: float

    @torch.no_grad()
    def numbers(
        self, rollouts: Sequence[Rollout], answer: Answer, choose: Callable[[Answered], torch.Tensor], said: str
    ) -> list[tuple[float, ...]]:
        """What `choose` takes of the model's answers, (rows, tokens), by answer; `said` tells the heart."""
        engine, layout, mesh, device = self.engine, self.layout, self.engine.mesh, self.engine.world.device
        rows = AnswerRows([Learned(place, one, 0.0) for place, one in enumerate(rollouts)])
        shares = rows.share(engine, layout.micro, packing=layout.packing, max_length=self.max_length)
        own: dict[int, tuple[float, ...]] = {}
        with engine.evaluate() as model:
            was_training = model.training
            model.eval()
            for plan in shares[mesh.data.rank]:
                micro = build_answers(rows, plan, layout.packing, self.pad_id)
                mesh.everyone.heart.tell(said)
                with compute_in(layout.precision, device):  # also of no answers: ranks may gather weights together
                    found = choose(model(**model_inputs(micro, device), answer=answer, temperature=self.temperature))
                if not isinstance(micro, AnswerBatch):
                    continue
                flat = found.double()[(micro.labels != IGNORED).to(device)].cpu()
                sizes = [rollouts[place].num_own for place in micro.places]
                for place, values in zip(micro.places, flat.split(sizes), strict=True):
                    own[place] = tuple(values.tolist())
            model.train(was_training)
        every = {place: values for part in mesh.data.gather(own) for place, values in part.items()}
        return [every[place] for place in range(len(rollouts))]


def take_logps(answered: Answered) -> torch.Tensor:
    return answered[0]


def take_values(answered: Answered) -> torch.Tensor:
    assert answered[1] is not None
    return answered[1][1]
