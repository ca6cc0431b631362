"""After an OOM: the estimate is corrected by the measurement, and gives the micro-batch to try next.

One rule for a step in the middle of a run, for the rehearsal before it, and for a world that begins again. What
weights, gradients and state take is counted and stands; what is scaled is the estimated part, which grows with tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from duoka.plan.batch import spread_batch
from duoka.plan.layout import Layout
from duoka.plan.memory import TIGHT, Memory, estimate_memory
from duoka.plan.recipe import Work
from duoka.plan.report import Plan, judge
from duoka.plan.task import memory_of
from duoka.units import Amount, format_bytes

# The failed step needed more than there was by an unknown amount: at least so much is assumed.
AT_LEAST_MORE = 1.1
# Sizes to try, as shares of what failed. Half at most: a step that fails again costs more than a smaller micro-batch.
_SHARES = (1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16, 1 / 32)
_COUNTED = ("weights", "gradients", "optimizer", "framework", "checkpoint copy")


@dataclass(frozen=True)
class Shortfall:
    """What was seen: a micro-batch of `tokens`, padding included, did not fit in `room_bytes`, all that a rank has."""

    tokens: int
    room_bytes: int
    held_bytes: int = 0  # the most that the rank ever held, and what it asked for then; 0: not known


@dataclass(frozen=True)
class Correction:
    """`factor` times the estimated part is what was really needed, at least; `tokens` at once should fit."""

    tokens: int
    factor: float
    expected_bytes: int
    planned_bytes: int  # for what failed
    room_bytes: int

    def sentence(self) -> str:
        """Why so many, for the line that a run prints."""
        return (
            f"planned {format_bytes(self.planned_bytes)}, and {format_bytes(self.room_bytes)} were not enough: what is "
            f"estimated counts {self.factor:.2f} times from here, and {self.tokens:,} tokens should take "
            f"{format_bytes(self.expected_bytes)}"
        )


def correct_plan(work: Work, layout: Layout, seen: Shortfall) -> Correction:
    """The largest share of what failed that fits by the corrected estimate; the smallest when none does."""

    def estimate(tokens: int) -> tuple[int, int]:
        """(counted, estimated) bytes at the peak."""
        memory = estimate_memory(work, layout, tokens)
        return counted_bytes(memory), memory.peak_bytes - counted_bytes(memory)

    counted, loose = estimate(seen.tokens)
    needed = max(AT_LEAST_MORE * (seen.room_bytes - counted), seen.held_bytes - counted)
    factor = max(1.0, needed / max(1, loose))
    tried = 0, 0
    for share in _SHARES:
        tokens = max(1, int(share * seen.tokens))
        fixed, rest = estimate(tokens)
        tried = tokens, round(fixed + factor * rest)
        if tried[1] <= TIGHT * seen.room_bytes:
            break
    return Correction(*tried[:1], factor, tried[1], counted + loose, seen.room_bytes)


def plan_with_less(plan: Plan, most_tokens: int, ran_out_at: int | None = None) -> Plan:
    """The same run with at most `most_tokens` at once, since `ran_out_at` did not fit into what was available."""
    layout = replace(plan.layout, micro=Amount(most_tokens, "tokens"))
    memory, warnings = memory_of(plan.task, layout), plan.warnings
    if ran_out_at is not None:
        found = correct_plan(plan.work, plan.layout, Shortfall(ran_out_at, plan.available_bytes))
        fixed = counted_bytes(memory)
        seen = round(fixed + found.factor * (memory.peak_bytes - fixed))
        memory = replace(memory, high_bytes=max(memory.high_bytes, seen))
        warnings += (f"memory ran out with {ran_out_at:,} tokens at once: {found.sentence()}",)
    return replace(
        plan,
        layout=layout,
        memory=memory,
        at_most_bytes=memory_of(replace(plan.task, lengths=None), layout).peak_bytes,
        batch=spread_batch(plan.task.step, layout.micro, layout.dp, plan.task.rows(layout), plan.lengths),
        warnings=warnings,
        verdict=judge(memory, plan.available_bytes),
        reasons={**plan.reasons, "train.micro_batch": f"{most_tokens:,} tokens: memory was short with more"},
    )


def counted_bytes(memory: Memory) -> int:
    """What is known exactly of the peak: everything but what grows with tokens or passes by."""
    return sum(memory.parts.get(name, 0) for name in _COUNTED)
