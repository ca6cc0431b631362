"""The fewest ranks on which each strategy holds a model at all: what "70B on fewer GPUs" comes to."""

from __future__ import annotations

from dataclasses import replace

from duoka.plan.layout import Layout, Strategy
from duoka.plan.memory import FITS, estimate_memory
from duoka.plan.task import Task
from duoka.units import Amount

__all__ = ["MOST_RANKS", "fewest_ranks"]

MOST_RANKS = 4096


def fewest_ranks(task: Task, layout: Layout, strategy: Strategy, available_bytes: int) -> int | None:
    """Of data ranks with `available_bytes` each; None: no number up to `MOST_RANKS` is enough.

    Each computes one sample of the greatest length at a time and recomputes every layer; nothing is offloaded. Axes
    are those of `layout`, but for experts, which lie as all else does.
    """

    def fits(ranks: int) -> bool:
        shard = 1 if strategy in ("single", "ddp") else ranks
        frugal = replace(
            layout, strategy=strategy, dp=ranks, shard=shard, recompute="full", offload="none", disk="none",
            micro=Amount(task.max_length, "tokens"), sp=1 if strategy == "single" else layout.sp, ep=1,
        )  # fmt: skip
        length = task.max_length // task.sequences
        memory = estimate_memory(task.work, frugal, task.max_length, later=task.max_length, length=length)
        return memory.peak_bytes <= FITS * available_bytes

    if strategy == "single":
        return 1 if fits(1) else None
    least = 2
    while not fits(least):
        least *= 2
        if least > MOST_RANKS:
            return None
    below = least // 2  # too few, or the 1 that is no layout of several ranks
    while least - below > 1:
        middle = (least + below) // 2
        below, least = (below, middle) if fits(middle) else (middle, least)
    return least
