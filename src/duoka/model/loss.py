"""Cross entropy from hidden states and the head's weight, summed over target tokens, never holding all logits.

Only positions that are targets go through the head. Rows are taken in chunks; each chunk's gradient is computed at
once, in the buffer that its logits lay in. Exact: the same sums as the plain form, in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100
# Logits of one chunk (fp32): enough rows for an efficient matrix product, small beside a layer's activations.
CHUNK_BYTES = 64 * 2**20
# On a CPU no more rows pay, where the vocabulary is small: what lies in the cache is not read from memory again.
CPU_CHUNK_ROWS = 512


@dataclass(frozen=True)
class Bend:
    """What a model does to its logits after the head: logits * scale, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Goal:
    """What training wants of a target token, beside its likelihood.

    `smoothing`: the share of the target that all tokens get alike. `by_probability`: each token's loss is weighted with
    the probability that the model gives it now, itself no target of the gradient (dynamic fine-tuning, DFT).
    """

    smoothing: float = 0.0
    by_probability: bool = False


STRAIGHT = Bend()
LIKELIHOOD = Goal()


@dataclass(frozen=True)
class LowRank:
    """What an adapter on the head adds to its logits: rows @ weight.T."""

    rows: torch.Tensor  # (..., rank), already scaled
    weight: torch.Tensor  # (vocab, rank)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of -log p(label) over target rows, how many targets are the likeliest token: counted when asked)."""
    flat = labels.reshape(-1)
    chosen = (flat != IGNORED).nonzero().squeeze(1)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        # All rows are targets in pretraining: no copy then.
        return rows if len(chosen) == len(flat) else rows[chosen]

    low_rows, low_weight = (take(low.rows), low.weight) if low else (None, None)
    how = _How(bend, goal, count)
    answer: tuple[torch.Tensor, torch.Tensor]
    answer = _HeadLoss.apply(take(hidden), weight, bias, low_rows, low_weight, flat[chosen], how)
    return answer


@dataclass(frozen=True)
class _How:
    bend: Bend
    goal: Goal
    count: bool


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
            pairs = [_Pair(rows, weight, *ctx.needs_input_grad[:2])]
            if low_rows is not None and low_weight is not None:
                pairs.append(_Pair(low_rows, low_weight, *ctx.needs_input_grad[3:5]))
            bias_grad = torch.zeros_like(bias, dtype=_wide(bias)) if ctx.needs_input_grad[2] else None
            loss = torch.zeros((), dtype=torch.float64, device=rows.device)
            correct = torch.zeros((), dtype=torch.long, device=rows.device)
            for logits, start, end in _chunks(pairs):
                if bias is not None:
                    logits += bias
                slope = _bend_(logits, how.bend)
                targets = labels[start:end]
                if how.count:
                    correct += (logits.argmax(dim=-1) == targets).sum()
                loss += _to_slope_(logits, targets, how.goal)
                if not any(ctx.needs_input_grad):
                    continue
                if slope is not None:
                    logits *= slope
                if how.bend.scale != 1.0:
                    logits *= how.bend.scale
                if bias_grad is not None:
                    bias_grad += logits.sum(dim=0)
                narrow = logits.to(rows.dtype)
                for pair in pairs:
                    pair.learn(narrow, start, end)
        # Not save_for_backward: these are given away in the backward pass, so that nobody has to copy them.
        ctx.gradients = [pairs[0].row_grad, pairs[0].weight_grad, bias_grad]
        ctx.gradients += [pairs[1].row_grad, pairs[1].weight_grad] if len(pairs) > 1 else [None, None]
        ctx.types = [None if one is None else one.dtype for one in (rows, weight, bias, low_rows, low_weight)]
        ctx.mark_non_differentiable(correct)
        return loss.to(_wide(rows)), correct

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss's gradient was taken twice: call the model again, or sum losses first")
        return *_scaled(gradients, slope, ctx.types), None, None


def _scaled(
    gradients: list[torch.Tensor | None], slope: torch.Tensor, types: list[torch.dtype]
) -> list[torch.Tensor | None]:
    """In place: a copy of the head's gradient is as large as the head."""
    return [
        None if one is None else one.mul_(slope.to(one.dtype)).to(dtype)
        for one, dtype in zip(gradients, types, strict=True)
    ]


class _Pair:
    """A part of the logits, rows @ weight.T, and the gradients of both factors as chunks add to them."""

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, want_rows: bool, want_weight: bool) -> None:
        self.rows, self.weight = rows, weight.to(rows.dtype)
        self.row_grad = torch.empty_like(rows) if want_rows else None
        # Summed over chunks in fp32: bf16 sums over many chunks lose what small gradients add. The first chunk writes
        # where later ones add: filling a head's worth of memory with zeros first takes as long as many rows.
        make = torch.empty_like if rows.shape[0] else torch.zeros_like
        self.weight_grad = make(weight, dtype=_wide(weight)) if want_weight else None

    def learn(self, slope: torch.Tensor, start: int, end: int) -> None:
        if self.row_grad is not None:
            torch.mm(slope, self.weight, out=self.row_grad[start:end])
        if self.weight_grad is None:
            return
        part = self.rows[start:end]
        if slope.dtype != self.weight_grad.dtype:
            product = slope.t() @ part
            self.weight_grad = self.weight_grad.copy_(product) if start == 0 else self.weight_grad.add_(product)
        elif start == 0:
            torch.mm(slope.t(), part, out=self.weight_grad)
        else:
            self.weight_grad.addmm_(slope.t(), part)


def _chunks(pairs: list[_Pair]) -> Any:
    """(logits, first row, row after the last), in one buffer for all: fresh memory costs more than the arithmetic."""
    rows, weight = pairs[0].rows, pairs[0].weight
    num_rows, vocab = rows.shape[0], weight.shape[0]
    if not num_rows:
        return
    most = max(1, CHUNK_BYTES // (4 * vocab))
    num_chunks = math.ceil(num_rows / (min(most, CPU_CHUNK_ROWS) if rows.device.type == "cpu" else most))
    size = math.ceil(num_rows / num_chunks)  # alike, so that no chunk of a few rows pays for the head's whole gradient
    buffer = torch.empty(size, vocab, dtype=_wide(rows), device=rows.device)
    for start in range(0, num_rows, size):
        end = min(start + size, num_rows)
        logits = buffer[: end - start]
        for index, pair in enumerate(pairs):
            part = pair.rows[start:end]
            if part.dtype != buffer.dtype:
                product = part @ pair.weight.t()
                logits = logits.copy_(product) if index == 0 else logits.add_(product)
            elif index == 0:
                torch.mm(part, pair.weight.t(), out=logits)
            else:
                logits.addmm_(part, pair.weight.t())
        yield logits, start, end


def _bend_(logits: torch.Tensor, bend: Bend) -> torch.Tensor | None:
    """Bend in place; returns the softcap's slope where there is one."""
    if bend.scale != 1.0:
        logits *= bend.scale
    if bend.softcap is None:
        return None
    logits.div_(bend.softcap).tanh_()
    slope = (logits * logits).neg_().add_(1.0)
    logits *= bend.softcap
    return slope


def _to_slope_(logits: torch.Tensor, targets: torch.Tensor, goal: Goal) -> torch.Tensor:
    """Replace logits by d loss / d logits = softmax - target distribution; returns the loss summed over rows (fp64)."""
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


def _wide(tensor: Any) -> torch.dtype:
    """The type to sum in: fp32, or fp64 when the input is."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
