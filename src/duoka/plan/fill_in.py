"""How much a rank computes at once, and what it computes again, under one layout: what a config leaves to `auto`.

One rule for the run and for each row of the plan's table, so that a row is what the run would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from duoka.config.schema import TrainConfig
from duoka.plan.layout import Layout, Recompute
from duoka.plan.memory import FITS
from duoka.plan.recompute import RUNGS, in_words, part_of_layers
from duoka.plan.speed import RATES
from duoka.plan.task import Task, memory_of
from duoka.units import Amount, format_bytes, parse_amount

# More tokens at once make no CPU faster, they only hold more activations. Measured with 8 layers of SmolLM2-135M, full
# fine-tuning, tokens per CPU second at 256, 512, 1,024, 2,048 and 4,096 tokens: 206, 212, 239, 255, 253.
CPU_TOKENS = 2048
# A GPU is kept busy by this many tokens even with small models; beyond it only memory grows.
GPU_TOKENS = 16384
# The rest is a margin for what an estimate misses: kernels' workspaces, fragmentation, other programs.
MEMORY_SHARE = 0.6
FEED = 5  # micro-batches for each stage of a pipeline


@dataclass(frozen=True)
class Filled:
    layout: Layout
    reasons: dict[str, str]


def fill_in(train: TrainConfig, task: Task, layout: Layout, available_bytes: int) -> Filled:
    """`layout` with recompute and micro-batch as the config says, or as they fit."""
    reasons: dict[str, str] = {}
    micro = Amount(task.max_length, "tokens") if train.micro_batch == "auto" else parse_amount(train.micro_batch)
    layout = replace(layout, micro=micro, recompute="none")
    layout = replace(layout, recompute=_choose_recompute(train, task, layout, available_bytes, reasons))
    if train.micro_batch == "auto":
        layout = _choose_micro(task, layout, available_bytes, reasons)
    return Filled(layout, reasons)


def _choose_recompute(
    train: TrainConfig, task: Task, layout: Layout, available_bytes: int, reasons: dict[str, str]
) -> Recompute:
    """`layout` has the smallest micro-batch that may be chosen: recomputing is the costlier way to save memory."""
    asked = train.recompute
    if asked != "auto":
        return asked
    need = memory_of(task, layout).peak_bytes
    if need <= FITS * available_bytes:
        reasons["train.recompute"] = "none: activations fit"
        return "none"
    tried = {how: replace(layout, recompute=how) for how in RUNGS}
    fit = [how for how, one in tried.items() if memory_of(task, one).peak_bytes <= FITS * available_bytes]
    if train.micro_batch == "auto":
        tried = {how: _choose_micro(task, one, available_bytes, {}) for how, one in tried.items()}
    best = min(fit, key=lambda how: _relative_time(task, tried[how]), default="full")
    why = ""
    if fit and best == fit[0]:
        why = ", the least that fits"
    elif fit:
        why = f", faster with {tried[best].micro} at once than {fit[0]} with {tried[fit[0]].micro}"
    reasons["train.recompute"] = (
        f"{in_words(best)}{why}: without it a rank would need {format_bytes(need)}, and "
        f"{format_bytes(available_bytes)} is available"
    )
    return best


def _relative_time(task: Task, layout: Layout) -> float:
    """Of a token: what is computed again is a forward pass, a third of a step; and small micro-batches fill no GPU."""
    again = 1 + part_of_layers(layout.recompute, task.work.shape.num_layers) / 3
    tokens = layout.micro.count * (1 if layout.micro.unit == "tokens" else task.max_length) / layout.sp
    return again * (1 + RATES.half_tokens / tokens) if task.work.device == "cuda" else again


def _choose_micro(task: Task, layout: Layout, available_bytes: int, reasons: dict[str, str]) -> Layout:
    on_gpu = task.work.device == "cuda"
    cap = (GPU_TOKENS if on_gpu else CPU_TOKENS) * layout.sp
    longest = task.max_length
    longest_words = f"one {'pair of twice' if task.sequences > 1 else 'sample of'} data.max_length"
    if layout.pp > 1:
        # A pipeline waits less the more micro-batches there are: its bubble is at most a fifth of what it computes.
        fed = task.tokens_per_step / layout.dp / (FEED * layout.pp / layout.virtual)
        cap = min(cap, max(longest, int(fed)))
    for tokens in _ladder(cap, longest):
        rung = replace(layout, micro=Amount(tokens, "tokens"))
        memory = memory_of(task, rung)
        fixed = sum(memory.parts.get(part, 0) for part in ("weights", "optimizer", "gradients", "framework"))
        room = max(0.0, MEMORY_SHARE * (available_bytes - fixed))
        if memory.peak_bytes - fixed <= room or tokens == longest:
            break
    if tokens == longest and longest >= cap:
        why = f"{longest_words}, which is at least the {cap:,} that keep the device busy"
    elif tokens == cap:
        why = f"more at once brings nothing on a {'GPU' if on_gpu else 'CPU'}"
    elif tokens == longest:
        why = f"the smallest, {longest_words}: " + ("a pipeline wants many" if cap == longest else "memory is short")
    else:
        why = f"what fits in {MEMORY_SHARE:.0%} of the free memory per rank"
    reasons["train.micro_batch"] = f"{tokens:,} tokens: {why}"
    return rung


def _ladder(cap: int, longest: int) -> Iterator[int]:
    """From the cap downwards by halves, to one sample of the greatest length.

    Few rungs on purpose: a little more or less free memory, as between a start and a resume, changes nothing.
    """
    tokens = cap
    while tokens > longest:
        yield tokens
        tokens //= 2
    yield longest
