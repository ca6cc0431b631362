"""Passes without a backward through all stages of a pipeline: evaluations, and samples of what the model writes.

One stage after the other computes each batch; every rank gets the last one's answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from duoka.comm.world import World
from duoka.model.build import LossModel
from duoka.model.pipeline_stages import PipelineStages
from duoka.parallel.pipeline_wire import Edges, Wire, check_same, needed_before, sent_after
from duoka.plan.pipeline import Pass

# From a stage and what it received (None at the first) to what it computes.
Compute = Callable[[int, torch.Tensor | None], tuple[torch.Tensor | None, ...]]


class Through(torch.nn.Module):
    """The whole model, as all ranks of its pipeline compute it together; called by all, with the same batches."""

    def __init__(self, bare: LossModel, stages: PipelineStages, world: World, pipeline: World, edges: Edges) -> None:
        super().__init__()
        self.bare = bare
        self.stages, self.world, self.pipeline, self.edges = stages, world, pipeline, edges

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(summed loss, correct target tokens), on every rank."""

        def compute(stage: int, entered: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            answer: tuple[torch.Tensor | None, ...] = self.bare(**inputs, hidden=entered, stage=stage)
            return answer

        return self._tell(self._pass(inputs["input_ids"], compute), 2)

    def next_token(self, input_ids: torch.Tensor) -> int:
        """The likeliest token after one row, on every rank."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        edges = torch.tensor([0, input_ids.shape[1]], dtype=torch.int32)

        def compute(stage: int, entered: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if self.stages.is_last(stage):
                return (torch.tensor(float(self.bare.next_token(input_ids, entered))),)
            answer: tuple[torch.Tensor | None, ...]
            answer = self.bare(input_ids, input_ids, places, edges, hidden=entered, stage=stage)
            return answer

        with self.bare.on_whole_rows():
            return int(self._tell(self._pass(input_ids, compute), 1)[0])

    def _pass(self, input_ids: torch.Tensor, compute: Compute) -> tuple[torch.Tensor | None, ...]:
        """What the last stage computes; () on other ranks."""
        shape = (input_ids.shape[0], input_ids.shape[1])
        check_same(zlib.crc32(input_ids.cpu().numpy().tobytes()), [shape], self.world, self.pipeline)

        def passes(rank: int) -> list[Pass]:
            own = (stage for stage in range(self.stages.num_stages) if self.stages.rank_of(stage) == rank)
            return [Pass("forward", stage, 0) for stage in own]

        wire = Wire(self.stages, self.world, self.pipeline, self.edges, passes, lambda _: shape)
        answer: tuple[torch.Tensor | None, ...] = ()
        for one in passes(self.pipeline.rank):
            message = needed_before(one, self.stages)
            entered = None if message is None else wire.receive(message, one.stage - 1)
            found = compute(one.stage, entered)
            if (message := sent_after(one, self.stages)) is not None:
                wire.send(message, found[0])
            else:
                answer = found
        wire.finish()
        return answer

    def _tell(self, found: tuple[torch.Tensor | None, ...], count: int) -> tuple[torch.Tensor, ...]:
        """`count` numbers that the last stage has found, on every rank: a sum to which the others add nothing."""
        numbers = torch.zeros(count, dtype=torch.float64, device=self.world.device)
        for place, one in enumerate(found):
            if one is not None:
                numbers[place] = one
        return tuple(self.pipeline.sum_tensor(numbers))
