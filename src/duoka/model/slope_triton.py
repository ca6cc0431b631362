"""Cross entropy over rows of logits on GPUs, in Triton: a row is read twice and written once, in place, however wide.

torch's operators pass over it seven times, in fp32. Imported where Triton is there, which torch brings for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_AT_ONCE = 16384  # logits of a row that a program holds at once
# In place of -inf, from which nothing can be taken away: a row may begin with words that are ruled out.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _slope(logits, labels, losses, stride, num_words, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    # A label outside of the head's words makes the loss NaN, which the step finds.
    exists = (label >= 0) & (label < num_words)
    picked = tl.load(logits + label, mask=exists, other=float("nan")).to(tl.float32)
    peak = tl.full((), _LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_words, at_once):
        at = start + tl.arange(0, at_once)
        found = tl.load(logits + at, mask=at < num_words, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(found, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(found - higher), axis=0)
        peak = higher
    for start in range(0, num_words, at_once):
        at = start + tl.arange(0, at_once)
        found = tl.load(logits + at, mask=at < num_words, other=float("-inf")).to(tl.float32)
        slope = tl.exp(found - peak) / total
        slope = tl.where(at == label, slope - 1.0, slope)
        tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < num_words)
    tl.store(losses + row, peak + tl.log(total) - picked)


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p of each row's label (fp32); the logits become the slope of its sum: softmax less 1 at the label."""
    rows, num_words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    at_once = min(_AT_ONCE, triton.next_power_of_2(num_words))
    how = {"num_warps": 16 if at_once >= 8192 else 4}
    _slope[(rows,)](logits, labels, losses, logits.stride(0), num_words, at_once, **how)
    return losses
