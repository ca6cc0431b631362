"""The arithmetic of the batch: global batch = ranks x micro-batch x accumulation, and how many optimizer steps.

Only the global batch decides results; the rest is how a world gets through it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from duoka.config.schema import TrainConfig
from duoka.plan.horizon import Horizon
from duoka.plan.lengths import Lengths, Rows, rows_at_once, rows_of_step, tokens_at_once
from duoka.units import Amount, parse_amount, steps_of_epochs


@dataclass(frozen=True)
class BatchArithmetic:
    """How one global batch is spread. `accumulation` is the most micro-batches a rank may need, for longest samples."""

    global_batch: Amount
    num_ranks: int
    micro: Amount
    max_length: int
    accumulation: int
    accumulation_likely: int | None = None  # from the mean length, when that is known
    tokens_at_once: int = 0  # in the fullest micro-batch: expected where lengths are known, else as `tokens_at_most`
    tokens_at_most: int = 0  # if all samples were as long as they may be

    def sentence(self) -> str:
        """`16 samples per step = 2 ranks x 8 samples, in 1 micro-batch of up to 4,096 tokens`."""
        step, ranks = self.global_batch, self.num_ranks
        share = _share_in_words(step, ranks)
        likely = self.accumulation if self.accumulation_likely is None else self.accumulation_likely
        size = f"{self.micro.count:,} {self.micro.unit}"
        if self.micro.unit == step.unit == "samples" and step.count == ranks * self.micro.count * self.accumulation:
            factors = [_count(ranks, "rank"), size, _count(self.accumulation, "micro-batch")]
            return f"{step} per step = {' x '.join(factors)}"
        number = _count(self.accumulation, "micro-batch")
        if likely < self.accumulation:
            number = f"about {likely} (at most {self.accumulation}) micro-batches"
        return f"{step} per step = {_count(ranks, 'rank')} x {share}, in {number} of up to {size}"

    def to_json(self) -> dict[str, Any]:
        whole = asdict(self)
        whole["global_batch"], whole["micro"] = str(self.global_batch), str(self.micro)
        return whole | {"sentence": self.sentence()}


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _share_in_words(step: Amount, ranks: int) -> str:
    low, rest = divmod(step.count, ranks)
    if step.unit == "tokens":
        return f"about {low:,} tokens" if ranks > 1 else f"{step.count:,} tokens"
    if not rest:
        return f"{low:,} {'sample' if low == 1 else 'samples'}"
    return f"{low:,} to {low + 1:,} samples"


def spread_batch(
    step: Amount, micro: Amount, num_ranks: int, rows: Rows, lengths: Lengths | None = None
) -> BatchArithmetic:
    """How `num_ranks` get through one global batch."""
    most = _accumulation(step, num_ranks, micro, rows.max_length)
    likely = None
    if rows.fixed:
        own = math.ceil(rows_of_step(step, rows, lengths) / num_ranks)
        likely = min(most, math.ceil(own / rows_at_once(micro, rows.max_length)))
    elif lengths is not None and not (micro.unit == step.unit == "samples"):
        likely = min(most, _accumulation(step, num_ranks, micro, max(1.0, lengths.mean)))
    return BatchArithmetic(
        global_batch=step,
        num_ranks=num_ranks,
        micro=micro,
        max_length=rows.max_length,
        accumulation=most,
        accumulation_likely=likely,
        tokens_at_once=tokens_at_once(step, num_ranks, micro, rows, lengths),
        tokens_at_most=tokens_at_once(step, num_ranks, micro, rows),
    )


def _accumulation(step: Amount, num_ranks: int, micro: Amount, length: float) -> int:
    """Micro-batches per rank and step when every sample is `length` long."""
    if step.unit == "samples":
        samples = math.ceil(step.count / num_ranks)
    else:
        samples = math.ceil(step.count / num_ranks / length)
    per_micro = micro.count if micro.unit == "samples" else max(1, int(micro.count / length))
    return max(1, math.ceil(samples / per_micro))


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of the whole run. `is_exact` is False when lengths decide and only their mean is known."""

    per_epoch: int
    total: int
    is_exact: bool

    def sentence(self, epochs: float | None) -> str:
        about = "" if self.is_exact else "about "
        if epochs is None:
            epochs = round(self.total / self.per_epoch, 2)
            return f"{self.total:,} optimizer steps ({about}{epochs:,.4g} epochs of {about}{self.per_epoch:,})"
        return f"{about}{self.total:,} optimizer steps ({epochs:,.4g} epochs of {about}{self.per_epoch:,})"


def count_steps(
    train: TrainConfig, lengths: Lengths | None, horizon: Horizon | None = None, *, updates: int = 1
) -> Steps | None:
    """Optimizer steps, or None while the data is unknown. The short last batch of an epoch is a step of its own.

    `updates`: steps on each global batch.
    """
    step = parse_amount(train.global_batch)
    if lengths is None or lengths.num_samples is None:
        return None
    if step.unit == "samples":
        per_epoch = math.ceil(lengths.num_samples / step.count)
    else:  # windows of about as many tokens, as the epoch plan cuts them
        per_epoch = min(lengths.num_samples, max(1, round(lengths.num_samples * lengths.mean / step.count)))
    per_epoch *= updates
    ends = [steps for steps in (train.max_steps, horizon.steps if horizon else None) if steps is not None]
    if train.epochs is not None:
        ends.append(steps_of_epochs(train.epochs, per_epoch))
    return Steps(per_epoch, min(ends), is_exact=lengths.basis == "tokenized")
