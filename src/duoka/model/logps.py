"""The log-probability of each target token, and more of what was possible there, never holding all logits.

For losses in which the weight of a token depends on other tokens or sequences (preference pairs, policy gradients).
Forward keeps a number a token; backward computes each chunk's logits again. loss.py, whose weights are known
beforehand, makes its gradients at once and saves that product with the head.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from duoka.model.chunks import STRAIGHT, Bend, ChunkedLogits, LowRank, Places, take_targets, wide
from duoka.model.vocabulary import WHOLE, Vocabulary

# What is asked for beside log-probabilities: entropy in nats; 1 where the target is the likeliest token.
More = Literal["", "entropy", "likeliest"]


class TokenLogps(NamedTuple):  # a tuple, in which wrappers of models find the tensors
    """Of each position, shaped as the labels; 0 where there is no target."""

    logps: torch.Tensor
    more: torch.Tensor | None  # when asked for


def token_logps(
    hidden: torch.Tensor,  # (..., dim)
    weight: torch.Tensor,  # (vocab, dim)
    labels: torch.Tensor,  # (...)
    *,
    bias: torch.Tensor | None = None,
    low: LowRank | None = None,
    bend: Bend = STRAIGHT,
    more: More = "",
    places: Places | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> TokenLogps:
    """log p(label) of every target; it and the entropy have gradients."""
    targets = take_targets(hidden, labels, low, places, vocabulary)
    logps, others = _TokenLogps.apply(
        targets.rows, weight, bias, targets.low_rows, low.weight if low else None, targets.labels, bend, more,
        vocabulary,
    )  # fmt: skip
    return TokenLogps(place(logps, labels, targets.places), place(others, labels, targets.places) if more else None)


def place(values: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Values of target tokens, in order, where their labels stand."""
    return values.new_zeros(labels.numel()).index_put((places,), values).view(labels.shape)


class _TokenLogps(torch.autograd.Function):
    """Inputs: rows, weight, bias, rows and weight of the adapter (the last three may be None), labels, ..."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rows: torch.Tensor | None,
        low_weight: torch.Tensor | None,
        labels: torch.Tensor,
        bend: Bend,
        more: More,
        vocabulary: Vocabulary,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logps = torch.empty(len(labels), dtype=wide(rows), device=rows.device)
        norms = torch.empty_like(logps)  # log of the sum of exp(logits)
        others = torch.empty_like(logps) if more else None
        inputs = (rows, weight, bias, low_rows, low_weight)
        with torch.autocast(rows.device.type, enabled=False):
            for chunk in ChunkedLogits(inputs, bend, [False] * 5, vocabulary).chunks():
                here, logits = slice(chunk.start, chunk.end), chunk.logits
                peak = vocabulary.largest(logits.amax(dim=-1, keepdim=True))
                logits.sub_(peak)
                picked = vocabulary.pick(logits, labels[here]).squeeze(1)
                if others is not None and more == "likeliest":
                    others[here] = (vocabulary.likeliest(logits) == labels[here]).to(others.dtype)
                powers = logits.exp() if more == "entropy" else logits.exp_()
                total, picked = vocabulary.total(powers.sum(dim=-1), picked)
                log_total = total.log()
                logps[here] = picked - log_total
                norms[here] = peak.squeeze(1) + log_total
                if others is not None and more == "entropy":
                    (mean,) = vocabulary.total(powers.mul_(logits).sum(dim=-1))
                    others[here] = log_total - mean / total
                del powers  # it may be as large as the logits, and the next chunk makes another
        ctx.save_for_backward(*inputs, labels, norms, others if more == "entropy" else None)
        ctx.bend, ctx.vocabulary = bend, vocabulary
        return logps, others

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(  # type: ignore[override]
        ctx: Any, by_logp: torch.Tensor, by_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, labels, norms, entropy = ctx.saved_tensors
        with torch.autocast(norms.device.type, enabled=False):
            head = ChunkedLogits(inputs, ctx.bend, ctx.needs_input_grad[:5], ctx.vocabulary)
            for chunk in head.chunks():
                here, logits = slice(chunk.start, chunk.end), chunk.logits
                logits.sub_(norms[here, None])  # log p of every word
                factor = -by_logp[here, None]
                if entropy is not None and by_entropy is not None:
                    factor = (logits + entropy[here, None]).mul_(-by_entropy[here, None]).add_(factor)
                logits.exp_().mul_(factor)
                del factor  # not beside what learning takes
                ctx.vocabulary.add_at_(logits, labels[here], by_logp[here, None])
                head.learn(chunk)
        gradients = zip(head.gradients(), inputs, strict=True)
        return *(None if one is None else one.to(of.dtype) for one, of in gradients), None, None, None, None
