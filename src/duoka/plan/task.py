"""What is to be trained, whatever the layout, and what a rank has of it under one: tokens at once, load of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from duoka.config.schema import RunConfig
from duoka.plan.batch import spread_batch
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths, Rows, rows_at_once, rows_of_step, tokens_at_once, tokens_later
from duoka.plan.memory import Memory, estimate_memory
from duoka.plan.prefixes import shares, why_not_under
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
    eval_share: float = 0.0  # of the samples that evaluations measure; 1: data of its own, however much
    sequences: int = 1  # of a sample, each of up to data.max_length
    drawn_rows: int = 0  # of a step's samples, drawn by the model first: how many at once on a rank
    shares: bool = False  # what samples of a micro-batch begin with alike is computed once

    @property
    def length(self) -> float:
        """Of a sample, on average."""
        return self.lengths.mean if self.lengths else float(self.max_length)

    @property
    def seen(self) -> float:
        """How long is what attention sees: a sample, or of a row of documents one of them."""
        return (self.lengths.document if self.lengths else 0.0) or self.length

    @property
    def tokens_per_step(self) -> float:
        return float(self.step.count) if self.step.unit == "tokens" else self.step.count * self.length

    def fixed_rows_of(self, layout: Layout) -> int:
        """Rows of a rank and step, where they have one length."""
        return math.ceil(rows_of_step(self.step, self.rows(layout), self.lengths) / layout.dp)

    def rows(self, layout: Layout) -> Rows:
        return Rows(self.max_length, layout.packing, self.fixed_rows)

    def at_once(self, layout: Layout) -> int:
        """The most tokens that a rank computes at once: expected, or at most where lengths are not known."""
        return tokens_at_once(self.step, layout.dp, layout.micro, self.rows(layout), self.lengths)

    def later(self, layout: Layout) -> int:
        """The most that it computes at once beside gradients of an earlier micro-batch; 0: a step has one."""
        at_once, lengths = self.at_once(layout), self.lengths
        if lengths is None or not lengths.batch or self.fixed_rows or layout.pp > 1:
            return at_once if math.ceil(load_of(self, layout).accumulation) > 1 else 0
        return min(at_once, tokens_later(lengths, layout.dp, layout.micro, layout.packing))

    def shared(self, layout: Layout) -> tuple[float, float]:
        """Of a micro-batch's tokens, those that are not computed since others begin with the same; at least."""
        if not self.shares or self.lengths is None or not layout.packing or why_not_under(layout):
            return 0.0, 0.0
        return self.lengths.shared, self.lengths.least_shared

    def eval_tokens(self, layout: Layout) -> int:
        """The most that a rank measures at once; 0: no evaluations."""
        if not self.eval_share:
            return 0
        micro, known = layout.micro, self.lengths
        most = max(micro.count if micro.unit == "tokens" else micro.count * self.max_length, self.max_length)
        if known is None or known.num_samples is None or self.eval_share >= 1:
            return most
        samples = math.ceil(known.num_samples * self.eval_share / (1 - self.eval_share) / layout.dp)
        return min(most, max(1, samples) * self.max_length)

    def cache_bytes(self, layout: Layout) -> int:
        """The most that keys and values take on a rank while it draws: they are gone when it learns."""
        shape, rows = self.work.shape, min(self.drawn_rows, math.ceil(self.step.count / layout.dp))
        known = self.lengths is not None and self.lengths.basis == "tokenized"
        length = min(self.max_length, self.lengths.longest) if self.lengths and known else self.max_length
        width = 4 if layout.precision == "fp32" else 2
        return rows * length * shape.num_layers * 2 * shape.kv_size * width


def task_of(config: RunConfig, work: Work, lengths: Lengths | None) -> Task:
    step, aside = parse_amount(config.train.global_batch), config.data.eval
    if config.stage.kind.draws:  # a step's samples are answers, several to each prompt
        step = Amount(step.count * config.rl.samples, step.unit)
    # The reference's pass is over all data, and takes what an evaluation takes.
    share = 1.0 if config.stage.has_reference else aside if isinstance(aside, float) else 1.0
    return Task(
        work, step, config.sample_tokens, lengths, config.data.fixed_rows, share, config.stage.kind.sequences,
        config.rl.rows if config.stage.kind.draws and config.rl.engine is None and config.rl.replay is None else 0,
        shares(config),
    )  # fmt: skip


def memory_of(task: Task, layout: Layout) -> Memory:
    """The peak of one rank."""
    load, computed = load_of(task, layout), 1 - task.shared(layout)[1]
    at_once, later = (round(tokens * computed) for tokens in (task.at_once(layout), task.later(layout)))
    return estimate_memory(
        task.work, layout, at_once, later=later, accumulation=math.ceil(load.accumulation),
        length=task.max_length // task.sequences, eval_tokens=task.eval_tokens(layout),
        cache=task.cache_bytes(layout),
    )  # fmt: skip


def load_of(task: Task, layout: Layout) -> Load:
    """How the rank that has most gets through a step under that layout: others wait for it."""
    batch = spread_batch(task.step, layout.micro, layout.dp, task.rows(layout), task.lengths)
    if task.step.unit == "samples":
        share = math.ceil(task.step.count / layout.dp) * task.length
    else:
        share = max(task.length, task.tokens_per_step / layout.dp)
    number = batch.accumulation_likely or batch.accumulation
    tokens = share / number
    if task.fixed_rows:  # computed to their end, filled or not
        tokens = float(rows_at_once(layout.micro, task.max_length) * task.max_length)
    varies = task.lengths is not None and bool(task.lengths.batch) and not task.fixed_rows
    return Load(number, tokens, min(task.seen, tokens), task.tokens_per_step, varies, task.shared(layout)[0])
