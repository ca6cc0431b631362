"""How much a rank computes at once, and what it computes again, under one layout: what a config leaves to `auto`.

One rule for the run and for each row of the plan's table, so that a row is what the run would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from duoka.config.schema import TrainConfig
from duoka.plan.catalog import Cluster
from duoka.plan.layout import Layout, Strategy
from duoka.plan.lengths import rows_at_once
from duoka.plan.memory import FITS
from duoka.plan.recompute import RUNGS, in_words
from duoka.plan.speed import estimate_speed
from duoka.plan.task import Task, load_of, memory_of
from duoka.units import Amount, format_bytes, parse_amount

# More tokens at once make no CPU faster, they only hold more activations. Measured with 8 layers of SmolLM2-135M, full
# fine-tuning, tokens per CPU second at 256, 512, 1,024, 2,048 and 4,096 tokens: 206, 212, 239, 255, 253.
CPU_TOKENS = 2048
# A GPU is kept busy by this many tokens; more pay only where its host takes longer to launch kernels than they take.
GPU_TOKENS = 16384
# The rest is a margin for what an estimate misses: kernels' workspaces, fragmentation, other programs.
MEMORY_SHARE = 0.6
FEED = 5  # micro-batches for each stage of a pipeline
# These gather weights or add up gradients in each micro-batch, and others once a step: where links are slow, fewer and
# larger micro-batches may be worth more than what recomputing costs.
EXCHANGE_OFTEN: tuple[Strategy, ...] = ("zero2", "fsdp", "hsdp")
# More is computed again, or at once, only where the plan has it faster by this: of less no estimate is sure.
WORTH_IT = 1.1


@dataclass(frozen=True)
class Filled:
    layout: Layout
    reasons: dict[str, str]


@dataclass(frozen=True)
class _Place:
    """What is trained, on which devices, and what a rank may take."""

    task: Task
    cluster: Cluster
    available_bytes: int

    def holds(self, layout: Layout) -> bool:
        return memory_of(self.task, layout).peak_bytes <= FITS * self.available_bytes

    def has_margin(self, layout: Layout) -> bool:
        """Whether what passes by in a step leaves room for what an estimate misses."""
        memory = memory_of(self.task, layout)
        fixed = sum(memory.parts.get(part, 0) for part in ("weights", "optimizer", "gradients", "framework"))
        return memory.peak_bytes - fixed <= max(0.0, MEMORY_SHARE * (self.available_bytes - fixed))

    def tokens_per_s(self, layout: Layout) -> float:
        return estimate_speed(self.task.work, layout, self.cluster, load_of(self.task, layout)).tokens_per_s

    def num_micro(self, layout: Layout) -> float:
        """Micro-batches of a rank and step."""
        return load_of(self.task, layout).accumulation


def fill_in(train: TrainConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> Filled:
    """`layout` with recompute and micro-batch as the config says, or as they fit.

    Of what fits the least is computed again: recomputing is the costlier way to save memory. Unless more of it makes
    room for micro-batches that are worth it.
    """
    place = _Place(task, cluster, available_bytes)
    micro = Amount(task.max_length, "tokens") if train.micro_batch == "auto" else parse_amount(train.micro_batch)
    plain = replace(layout, micro=micro, recompute="none")
    if train.recompute != "auto":
        return _with_micro(place, train, replace(plain, recompute=train.recompute))
    fit = [plain] if place.holds(plain) else []
    if not fit or plain.strategy in EXCHANGE_OFTEN:
        fit += [one for how in RUNGS if place.holds(one := replace(plain, recompute=how))]
    filled = [_with_micro(place, train, one) for one in fit or [replace(plain, recompute="full")]]
    best = _best(place, filled)
    why = _why_recompute(place, plain, filled[0].layout, best.layout)
    return Filled(best.layout, best.reasons | {"train.recompute": why})


def _best(place: _Place, filled: list[Filled]) -> Filled:
    """The first but for those that are worth more."""
    if len({one.layout.micro for one in filled}) == 1:  # recomputing alone makes nothing faster
        return filled[0]
    speeds = [place.tokens_per_s(one.layout) for one in filled]
    return next(one for one, speed in zip(filled, speeds, strict=True) if WORTH_IT * speed > max(speeds))


def _why_recompute(place: _Place, plain: Layout, least: Layout, best: Layout) -> str:
    if best.recompute == "none":
        return "none: activations fit"
    why, need = in_words(best.recompute), memory_of(place.task, plain).peak_bytes
    if best is not least:
        times = place.tokens_per_s(best) / place.tokens_per_s(least)
        why += f", {times:.2g} times as fast with {best.micro} at once as {least.recompute} with {least.micro}"
    elif place.holds(replace(best, micro=plain.micro)):
        why += ", the least that fits"
    if need > FITS * place.available_bytes:
        room = format_bytes(place.available_bytes)
        return f"{why}: without it a rank would need {format_bytes(need)}, and {room} is available"
    return f"{why}: a step exchanges for {place.num_micro(best):,.0f} micro-batches, not {place.num_micro(least):,.0f}"


def _with_micro(place: _Place, train: TrainConfig, layout: Layout) -> Filled:
    if train.micro_batch != "auto":
        return Filled(layout, {})
    chosen, why = _choose_micro(place, layout)
    if place.task.fixed_rows and (even := _even_rows(place.task, chosen)) != chosen:
        chosen, why = even, "the rows that a rank's samples fill, evenly: empty ones are computed too"
    return Filled(chosen, {"train.micro_batch": f"{chosen.micro}: {why}"})


def _choose_micro(place: _Place, layout: Layout) -> tuple[Layout, str]:
    task, on_gpu = place.task, place.task.work.device == "cuda"
    cap = (GPU_TOKENS if on_gpu else CPU_TOKENS) * layout.sp
    longest = task.max_length
    longest_words = f"one {'pair of twice' if task.sequences > 1 else 'sample of'} data.max_length"
    if layout.pp > 1:
        # A pipeline waits less the more micro-batches there are: its bubble is at most a fifth of what it computes.
        fed = task.tokens_per_step / layout.dp / (FEED * layout.pp / layout.virtual)
        cap = min(cap, max(longest, int(fed)))
    for tokens in _ladder(cap, longest):
        rung = replace(layout, micro=Amount(tokens, "tokens"))
        if tokens == longest or place.has_margin(rung):
            break
    if tokens >= cap and layout.pp == 1 and (more := _more_at_once(place, rung)) != rung:
        times = place.tokens_per_s(more) / place.tokens_per_s(rung)
        fewer = "exchanges" if layout.strategy in EXCHANGE_OFTEN and layout.dp > 1 else "launches of kernels"
        return more, f"fewer {fewer} a step, {times:.2g} times as fast as with {rung.micro}"
    if tokens == longest and longest >= cap:
        return rung, f"{longest_words}, which is at least the {cap:,} that keep the device busy"
    if tokens == cap:
        return rung, f"more at once brings nothing on a {'GPU' if on_gpu else 'CPU'}"
    if tokens == longest:
        short = "a pipeline wants many" if cap == longest else "memory is short"
        return rung, f"the smallest, {longest_words}: {short}"
    return rung, f"what fits in {MEMORY_SHARE:.0%} of the free memory per rank"


def _even_rows(task: Task, layout: Layout) -> Layout:
    """With as few rows at once as the same number of micro-batches takes."""
    own = task.fixed_rows_of(layout)
    number = math.ceil(own / rows_at_once(layout.micro, task.max_length))
    return replace(layout, micro=Amount(math.ceil(own / number) * task.max_length, "tokens"))


def _more_at_once(place: _Place, layout: Layout) -> Layout:
    """Twice as many tokens, and again, as long as fewer exchanges, or launches of a GPU's kernels, are worth it."""
    costs_each = layout.strategy in EXCHANGE_OFTEN or place.task.work.device == "cuda"
    while costs_each and place.num_micro(layout) > 1:
        twice = replace(layout, micro=Amount(2 * layout.micro.count, "tokens"))
        is_faster = place.tokens_per_s(twice) >= WORTH_IT * place.tokens_per_s(layout)
        if not is_faster or not place.has_margin(twice):
            break
        layout = twice
    return layout


def _ladder(cap: int, longest: int) -> Iterator[int]:
    """From the cap downwards by halves, to one sample of the greatest length.

    Few rungs on purpose: a little more or less free memory, as between a start and a resume, changes nothing.
    """
    tokens = cap
    while tokens > longest:
        yield tokens
        tokens //= 2
    yield longest
