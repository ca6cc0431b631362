"""The largest micro-batches first: passes at a run's start, thrown away, so that too little memory shows at once.

`main.py` calls it before the loop, on every rank. Weights, gradients, optimizer steps, random numbers and the order of
the data are as if it had not been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from duoka.comm.world import World
from duoka.config.schema import TrainConfig
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.errors import DoesNotFit
from duoka.model.build import LossModel
from duoka.parallel.engine import Engine
from duoka.parallel.objective import Objective
from duoka.parallel.out_of_memory import is_out_of_memory
from duoka.train.shortage import MemoryGuard
from duoka.train.step import StepResult
from duoka.units import format_bytes


def is_asked(train: TrainConfig, world: World) -> bool:
    """`auto`: where memory is a card's own. Host memory is shared, and swaps before it ends."""
    return train.rehearse is True or (train.rehearse == "auto" and world.device.type == "cuda")


def rehearse_largest(
    engine: Engine, optimizer: torch.optim.Optimizer, objective: Objective, guard: MemoryGuard
) -> None:
    """A forward and a backward pass over as many tokens as any micro-batch will have, beside the optimizer's state.

    Then one over as many as any has that finds gradients of another; DDP's have their place from the start.
    Too little memory is answered as in a step: with less at once where that may be, else by ending the run.
    """
    world = guard.world
    world.heart.tell("rehearsal")
    try:
        # State is made as the first step would make it: it must be there when memory is tried.
        engine.optimizer_tensors(optimizer)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(
            f"the weights and the optimizer's state do not fit on rank {world.rank}",
            where=f"{str(error).splitlines()[0]}; planned: {format_bytes(guard.plan.memory.peak_bytes)} in all",
            fix="write parallel.strategy: fsdp, or lora: {rank: 8}",
        ) from None
    engine.model.train()

    def attempt(batch: GlobalBatch) -> StepResult:
        shortage = engine.try_rehearsal(batch, objective)
        if shortage is not None and not shortage.rejoined:
            return StepResult(is_short=True, shortage=shortage)
        return StepResult(is_short=world.sum([float(shortage is not None)])[0] > 0, shortage=shortage)

    def lay_out() -> GlobalBatch:
        plan = guard.plan
        known = plan.task.lengths
        longest = plan.task.max_length if known is None or known.basis == "sampled" else known.longest
        longest = min(longest, guard.config.data.max_length)  # of a pair, one of its sequences
        sizes = [plan.memory.tokens, 0 if plan.layout.strategy == "ddp" else plan.memory.later]
        sizes = [size * plan.layout.sp for size in sizes]  # planned is what a rank has of them
        micros = [largest_batch(size, longest, plan.layout.packing) for size in sizes if size]
        targets = sum(one.num_targets for one in micros)
        samples, tokens = sum(one.num_samples for one in micros), sum(one.num_tokens for one in micros)
        return GlobalBatch(micros, targets, samples, tokens, 0, 0, np.empty(0, dtype=np.int64))

    with _on_whole_rows(engine.bare):
        guard.until_it_fits(attempt, lay_out(), lay_out)


@contextlib.contextmanager
def _on_whole_rows(bare: torch.nn.Module) -> Iterator[None]:
    """Samples made of one token begin alike, and would be computed once."""
    if not isinstance(bare, LossModel):
        yield
        return
    before, bare.no_sharing = bare.no_sharing, "its tokens are not a text's"
    try:
        yield
    finally:
        bare.no_sharing = before


def largest_batch(tokens: int, max_length: int, packing: bool) -> Batch:
    """`tokens` tokens in samples as long as any may be, in one row or in a row each; all of them are targets."""
    length = min(tokens, max_length)
    shape = (1, tokens) if packing else (-(-tokens // length), length)
    zeros = torch.zeros(shape, dtype=torch.long)
    edges = [*range(0, tokens, length), tokens]
    return Batch(
        input_ids=zeros,
        labels=zeros.clone(),
        position_ids=torch.arange(shape[1]).expand(shape) % length,
        boundaries=torch.tensor(edges, dtype=torch.int32) if packing else None,
        attention_mask=None,
        num_targets=tokens,
        num_tokens=tokens,
        num_samples=len(edges) - 1,
        token_keys=zeros.clone(),
    )
