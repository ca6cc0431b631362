"""What is to be trained, whatever the layout, and what a rank has of it under one: tokens at once, load of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from duoka.config.schema import RunConfig
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths, Rows, tokens_at_once
from duoka.plan.memory import Memory, estimate_memory
from duoka.plan.recipe import Work
from duoka.plan.speed import Load
from duoka.units import Amount, parse_amount


@dataclass(frozen=True)
class Task:
    """One optimizer step's tokens, in sequences of `length`. Without `lengths`, samples are as long as they may be."""

    work: Work
    step: Amount
    max_length: int
    lengths: Lengths | None = None
    fixed_rows: bool = False
    measures: bool = False  # evaluates on the way

    @property
    def length(self) -> float:
        """That attention sees, on average."""
        return self.lengths.mean if self.lengths else float(self.max_length)

    @property
    def tokens_per_step(self) -> float:
        return float(self.step.count) if self.step.unit == "tokens" else self.step.count * self.length

    def rows(self, layout: Layout) -> Rows:
        return Rows(self.max_length, layout.packing, self.fixed_rows)

    def at_once(self, layout: Layout) -> int:
        """The most tokens that a rank computes at once: expected, or at most where lengths are not known."""
        return tokens_at_once(self.step, layout.dp, layout.micro, self.rows(layout), self.lengths)


def task_of(config: RunConfig, work: Work, lengths: Lengths | None) -> Task:
    step = parse_amount(config.train.global_batch)
    return Task(work, step, config.data.max_length, lengths, config.data.fixed_rows, bool(config.data.eval))


def memory_of(task: Task, layout: Layout) -> Memory:
    """The peak of one rank."""
    accumulation, micro = math.ceil(load_of(task, layout).accumulation), layout.micro
    full = micro.count if micro.unit == "tokens" else micro.count * task.max_length
    return estimate_memory(
        task.work, layout, task.at_once(layout), accumulates=accumulation > 1,
        accumulation=accumulation, length=task.max_length, eval_tokens=max(full, task.max_length) * task.measures,
    )  # fmt: skip


def load_of(task: Task, layout: Layout) -> Load:
    """How a rank gets through a step under that layout."""
    share, micro = task.tokens_per_step / layout.dp, layout.micro
    tokens = min(float(micro.count if micro.unit == "tokens" else micro.count * task.length), share)
    return Load(max(1.0, share / max(1.0, tokens)), tokens, min(task.length, tokens), task.tokens_per_step)
