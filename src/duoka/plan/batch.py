"""The arithmetic of the batch: global batch = ranks x micro-batch x accumulation, and how many optimizer steps.

The global batch is what training means; everything else here only says how a world gets through it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from duoka.config.derive import count_batch_tokens
from duoka.config.schema import RunConfig, TrainConfig
from duoka.plan.flops import products
from duoka.plan.sizes import ModelShape
from duoka.units import Amount, format_count, parse_amount, parse_budget


@dataclass(frozen=True)
class BatchArithmetic:
    """How one global batch is spread. `accumulation` is the most micro-batches a rank may need, for longest samples."""

    global_batch: Amount
    num_ranks: int
    micro: Amount
    max_length: int
    accumulation: int
    accumulation_likely: int | None = None  # from the mean length, when that is known
    tokens_per_micro_batch: int = 0  # the most that one micro-batch holds

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
    train: TrainConfig, micro: Amount, num_ranks: int, max_length: int, mean_length: float | None = None
) -> BatchArithmetic:
    """How `num_ranks` get through one global batch."""
    step = parse_amount(train.global_batch)
    most = _accumulation(step, num_ranks, micro, max_length)
    likely = None
    if mean_length is not None and not (micro.unit == step.unit == "samples"):
        likely = min(most, _accumulation(step, num_ranks, micro, max(1.0, mean_length)))
    return BatchArithmetic(
        global_batch=step,
        num_ranks=num_ranks,
        micro=micro,
        max_length=max_length,
        accumulation=most,
        accumulation_likely=likely,
        tokens_per_micro_batch=tokens_in_micro_batch(step, num_ranks, micro, max_length),
    )


def _accumulation(step: Amount, num_ranks: int, micro: Amount, length: float) -> int:
    """Micro-batches per rank and step when every sample is `length` long."""
    if step.unit == "samples":
        samples = math.ceil(step.count / num_ranks)
    else:
        samples = math.ceil(step.count / num_ranks / length)
    per_micro = micro.count if micro.unit == "samples" else max(1, int(micro.count / length))
    return max(1, math.ceil(samples / per_micro))


def tokens_in_micro_batch(step: Amount, num_ranks: int, micro: Amount, max_length: int) -> int:
    """The most tokens that one micro-batch can hold: its own limit, or the rank's whole share when that is less."""
    if step.unit == "samples":
        share = math.ceil(step.count / num_ranks) * max_length
    else:
        share = max(max_length, math.ceil(step.count / num_ranks))
    limit = micro.count * max_length if micro.unit == "samples" else max(micro.count, max_length)
    return min(limit, share)


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
            return f"{self.total:,} optimizer steps ({about}{epochs:g} epochs of {about}{self.per_epoch:,})"
        return f"{about}{self.total:,} optimizer steps ({epochs:g} epochs of {about}{self.per_epoch:,})"


@dataclass(frozen=True)
class Horizon:
    """What `train.tokens` comes to: so much text, in so many steps."""

    tokens: int
    steps: int
    per_parameter: float  # of those that multiply: all but the input embedding
    tokens_per_step: int

    def sentence(self) -> str:
        return (
            f"{format_count(self.tokens)} tokens ({self.per_parameter:.3g} per parameter that multiplies) "
            f"/ {self.tokens_per_step:,} a step = {self.steps:,} steps"
        )


def find_horizon(config: RunConfig, shape: ModelShape) -> Horizon | None:
    """The budget in steps; None without `train.tokens`."""
    if config.train.tokens is None:
        return None
    per_step = count_batch_tokens(config)
    number = products(shape)
    tokens = parse_budget(config.train.tokens).tokens(number)
    return Horizon(tokens, max(1, round(tokens / per_step)), tokens / number, per_step)


def count_steps(
    train: TrainConfig, num_samples: int | None, mean_length: float | None = None, horizon: Horizon | None = None
) -> Steps | None:
    """Optimizer steps, or None while the data is unknown. The short last batch of an epoch is a step of its own."""
    step = parse_amount(train.global_batch)
    if num_samples is None or (step.unit == "tokens" and mean_length is None):
        return None
    if step.unit == "samples":
        per_epoch = math.ceil(num_samples / step.count)
    else:
        per_epoch = math.ceil(num_samples * (mean_length or 0.0) / step.count)
    ends = [steps for steps in (train.max_steps, horizon.steps if horizon else None) if steps is not None]
    if train.epochs is not None:
        whole, part = divmod(train.epochs, 1.0)
        ends.append(max(1, int(whole) * per_epoch + math.ceil(part * per_epoch - 1e-9)))
    total = min(ends)
    return Steps(per_epoch, total, is_exact=step.unit == "samples")
