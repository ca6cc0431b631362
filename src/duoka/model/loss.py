"""Cross entropy from hidden states and the head's weight, summed over target tokens, never holding all logits.

Only positions that are targets go through the head. Rows are taken in chunks (chunks.py); each chunk's gradient is
computed at once, in the buffer that its logits lay in. Exact: the same sums as the plain form, in another order.
Where the weight of a token depends on other tokens, logps.py is what to take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from duoka.model import gpu_kernels, native
from duoka.model.chunks import STRAIGHT, Bend, ChunkedLogits, LowRank, Places, take_targets, wide
from duoka.model.vocabulary import WHOLE, SharedVocabulary, Vocabulary


@dataclass(frozen=True)
class Goal:
    """What training wants of a target token, beside its likelihood.

    `smoothing`: the share of the target that all tokens get alike. `by_probability`: each token's loss is weighted with
    the probability that the model gives it now, itself no target of the gradient (dynamic fine-tuning, DFT).
    """

    smoothing: float = 0.0
    by_probability: bool = False


LIKELIHOOD = Goal()


def sum_cross_entropy(
    hidden: torch.Tensor,  # (..., dim)
    weight: torch.Tensor,  # (vocab, dim)
    labels: torch.Tensor,  # (...)
    *,
    bias: torch.Tensor | None = None,
    low: LowRank | None = None,
    bend: Bend = STRAIGHT,
    goal: Goal = LIKELIHOOD,
    count: bool = False,
    places: Places | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of -log p(label) over target rows, how many targets are the likeliest token: counted when asked).

    `weight` has the rows of this rank's words only, where `vocabulary` is shared.
    """
    targets = take_targets(hidden, labels, low, places, vocabulary)
    answer: tuple[torch.Tensor, torch.Tensor]
    answer = _HeadLoss.apply(
        targets.rows, weight, bias, targets.low_rows, low.weight if low else None, targets.labels,
        _How(bend, goal, count, vocabulary),
    )  # fmt: skip
    return answer


@dataclass(frozen=True)
class _How:
    bend: Bend
    goal: Goal
    count: bool
    vocabulary: Vocabulary


class _HeadLoss(torch.autograd.Function):
    """Inputs: rows, weight, bias, rows and weight of the adapter (the last three may be None), labels, how."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rows: torch.Tensor | None,
        low_weight: torch.Tensor | None,
        labels: torch.Tensor,
        how: _How,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            inputs = (rows, weight, bias, low_rows, low_weight)
            # Logits stay as narrow as the product gives them where one call makes them their slope.
            plain = how == _How(STRAIGHT, LIKELIHOOD, False, WHOLE) and bias is None and low_rows is None
            at_once = _find_kernel(rows, weight) if plain else None
            head = ChunkedLogits(inputs, how.bend, ctx.needs_input_grad[:5], how.vocabulary, narrow=at_once is not None)
            loss = torch.zeros((), dtype=torch.float64, device=rows.device)
            correct = torch.zeros((), dtype=torch.long, device=rows.device)
            for chunk in head.chunks():
                targets = labels[chunk.start : chunk.end]
                if how.count:
                    correct += (how.vocabulary.likeliest(chunk.logits) == targets).sum()
                if at_once is not None:
                    loss += at_once(chunk.logits, targets).sum(dtype=torch.float64)
                else:
                    loss += _to_slope_(chunk.logits, targets, how.goal, how.vocabulary)
                if head.wants_any:
                    head.learn(chunk)
        # Not save_for_backward: these are given away in the backward pass, so that nobody has to copy them.
        ctx.gradients = head.gradients()
        ctx.types = [None if one is None else one.dtype for one in (rows, weight, bias, low_rows, low_weight)]
        ctx.mark_non_differentiable(correct)
        return loss.to(wide(rows)), correct

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss's gradient was taken twice: call the model again, or sum losses first")
        return *_scaled(gradients, slope, ctx.types), None, None


def _find_kernel(rows: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """What makes logits as narrow as the rows their slope, and returns each row's loss; None: torch's operators do."""
    if rows.dtype is torch.bfloat16 and native.serves(rows, weight):
        return native.cross_entropy_
    return gpu_kernels.cross_entropy_ if gpu_kernels.takes("loss", rows) else None


def _scaled(
    gradients: list[torch.Tensor | None], slope: torch.Tensor, types: list[torch.dtype]
) -> list[torch.Tensor | None]:
    """In place: a copy of the head's gradient is as large as the head."""
    return [
        None if one is None else one.mul_(slope.to(one.dtype)).to(dtype)
        for one, dtype in zip(gradients, types, strict=True)
    ]


def _to_slope_(logits: torch.Tensor, targets: torch.Tensor, goal: Goal, vocabulary: Vocabulary) -> torch.Tensor:
    """Replace logits by d loss / d logits = softmax - target distribution; returns the loss summed over rows (fp64)."""
    if isinstance(vocabulary, SharedVocabulary):
        return _to_shared_slope_(logits, targets, goal, vocabulary)
    index, smoothing = targets[:, None], goal.smoothing
    picked = logits.gather(1, index)
    mean = logits.mean(dim=-1, keepdim=True) if smoothing else 0.0
    peak = logits.amax(dim=-1, keepdim=True)
    if logits.device.type == "cpu":
        # Row by row in the cache, three passes in one. It reads a row before it writes it: a test holds torch to that.
        torch.softmax(logits, dim=-1, out=logits)
        total = logits.amax(dim=-1, keepdim=True).reciprocal_()
    else:
        logits.sub_(peak).exp_()
        total = logits.sum(dim=-1, keepdim=True)
        logits.div_(total)
    losses = peak - (1.0 - smoothing) * picked - smoothing * mean + total.log()
    weights = logits.gather(1, index) if goal.by_probability else None
    logits.scatter_add_(1, index, torch.full_like(picked, smoothing - 1.0))
    if smoothing:
        logits -= smoothing / logits.shape[-1]
    if weights is not None:
        losses *= weights
        logits *= weights
    return losses.sum(dtype=torch.float64)


def _to_shared_slope_(
    logits: torch.Tensor, targets: torch.Tensor, goal: Goal, vocabulary: SharedVocabulary
) -> torch.Tensor:
    """As `_to_slope_`, of logits whose columns are this rank's words: two exchanges of a few numbers a row."""
    smoothing, num_words = goal.smoothing, vocabulary.num_words
    peak = vocabulary.largest(logits.amax(dim=-1, keepdim=True))
    picked = vocabulary.pick(logits, targets)
    summed = logits.sum(dim=-1, keepdim=True) if smoothing else torch.zeros_like(picked)
    logits.sub_(peak).exp_()
    total, picked, summed = vocabulary.total(logits.sum(dim=-1, keepdim=True), picked, summed)
    logits.div_(total)
    losses = peak - (1.0 - smoothing) * picked - smoothing * summed / num_words + total.log()
    vocabulary.add_at_(logits, targets, torch.full_like(picked, smoothing - 1.0))
    if smoothing:
        logits -= smoothing / num_words
    if goal.by_probability:
        weights = (picked - peak).exp_().div_(total)
        losses *= weights
        logits *= weights
    return losses.sum(dtype=torch.float64)
