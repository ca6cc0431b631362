"""An allocation that failed in a pass: what is known of it, and the smallest pass that can stand in for it.

Engines catch it (engine.py); what follows, smaller micro-batches or the end of the run, is train/shortage.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duoka.comm.world import World
from duoka.data.feed.loader import IGNORED, Batch
from duoka.data.feed.token_keys import PADDING_KEY


@dataclass(frozen=True)
class Shortage:
    """A micro-batch that this rank had no memory for."""

    size: tuple[int, int, str]  # samples, tokens, what the allocator said
    phase: str
    is_in_exchange: bool  # its gradients were being exchanged: the pass cannot be left
    rejoined: bool = False  # this rank stood in for its pass: the step ends together, and can be tried again


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator has a type of its own; the CPU's says it in words."""
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in words)


def describe_shortage(micro: Batch, error: RuntimeError, world: World, *, is_last: bool) -> Shortage:
    """Returned, not raised: a traceback would keep the tensors that should make room."""
    text, phase = str(error).strip().splitlines()[0][:200], world.heart.beat.phase
    return Shortage((micro.num_samples, micro.num_tokens, text), phase, is_last and phase == "backward")


def smallest_batch(micro: Batch) -> Batch:
    """One token, which is no target and of no sample: laid out as `micro` is, and with nothing of what lies beside it.

    What is known of its documents (whose answers they are, where its targets stand) fits no other number of tokens.
    """
    one = micro.input_ids[:1, :1]
    return Batch(
        input_ids=one, labels=torch.full_like(one, IGNORED), position_ids=torch.zeros_like(one),
        boundaries=None if micro.boundaries is None else torch.tensor([0, 1], dtype=torch.int32),
        attention_mask=None if micro.attention_mask is None else torch.ones_like(one, dtype=torch.bool),
        num_targets=0, num_tokens=0, num_samples=0,
        token_keys=None if micro.token_keys is None else torch.full_like(one, PADDING_KEY),
    )  # fmt: skip
