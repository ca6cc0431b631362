"""The largest micro-batch first: one pass at a run's start, thrown away, so that too little memory shows at once.

`main.py` calls it before the loop, on every rank. Weights, gradients, optimizer steps, random numbers and the order of
the data are as if it had not been.
"""

from __future__ import annotations

import torch

from duoka.config.schema import RunConfig
from duoka.data.loader import Batch
from duoka.errors import DoesNotFit
from duoka.optim.build import optimizer_tensors
from duoka.parallel.apply import Parallelized
from duoka.parallel.ledger import LEDGER
from duoka.parallel.world import World
from duoka.plan.report import Plan
from duoka.train.step import Numerics, rehearse
from duoka.units import format_bytes


def is_asked(config: RunConfig, world: World) -> bool:
    """`auto`: where memory is a card's own. Host memory is shared, and swaps before it ends."""
    return config.train.rehearse is True or (config.train.rehearse == "auto" and world.device.type == "cuda")


def rehearse_largest(
    parallel: Parallelized, optimizer: torch.optim.Optimizer, plan: Plan, numerics: Numerics, world: World
) -> None:
    """A forward and a backward pass over as many tokens as any micro-batch will have, beside the optimizer's state."""
    tokens = plan.memory.tokens
    world.heart.tell("rehearsal")
    try:
        # State is made as the first step would make it: it must be there when memory is tried.
        optimizer_tensors(optimizer, parallel.named_trainable())
        parallel.model.train()
        rehearse(parallel, largest_batch(tokens, plan.task.max_length, plan.layout.packing), numerics, world.device)
        LEDGER.take()  # what it sent is no step's
        problem = ""
    except RuntimeError as error:  # how an allocator refuses; anything else is raised again
        problem = str(error).splitlines()[0]
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in problem:
            raise
    # A rank that ran out has left its exchanges, so others may hang in theirs: it must speak up alone, at once.
    if problem:
        raise DoesNotFit(
            f"the largest micro-batch of this run, {tokens:,} tokens, does not fit on rank {world.rank}",
            where=f"{problem}; the plan expected {format_bytes(plan.memory.peak_bytes)}",
            fix="write a smaller train.micro_batch, train.recompute: full, or parallel.strategy: fsdp",
        )


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
    )
