"""Cross entropy from hidden states and the head's weight, summed over target tokens, never holding all logits.

Only positions that are targets go through the head. Rows are taken in chunks; each chunk's gradient is computed at
once, so that logits of one chunk live at a time. Exact: the same sums as the plain form, in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100
# Logits of one chunk (fp32): enough rows for an efficient matrix product, small beside a layer's activations.
CHUNK_BYTES = 64 * 2**20


def sum_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of -log p(label) over rows whose label is a target. hidden (..., dim), weight (vocab, dim), labels (...)."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = labels.reshape(-1)
    chosen = (flat != IGNORED).nonzero().squeeze(1)
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(rows[chosen], weight, flat[chosen])
    return loss


def count_correct(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many target tokens are the likeliest token."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = labels.reshape(-1)
    chosen = (flat != IGNORED).nonzero().squeeze(1)
    correct = torch.zeros((), dtype=torch.long, device=hidden.device)
    for part in chosen.split(_rows_per_chunk(weight)):
        correct += (F.linear(rows[part], weight.to(rows.dtype)).argmax(dim=-1) == flat[part]).sum()
    return correct


def _rows_per_chunk(weight: torch.Tensor) -> int:
    return max(1, CHUNK_BYTES // (4 * weight.shape[0]))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        want_rows, want_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.weight_dtype = weight.dtype
        with torch.autocast(rows.device.type, enabled=False):
            weight = weight.to(rows.dtype)
            loss = torch.zeros((), dtype=torch.float64, device=rows.device)
            row_grad = torch.empty_like(rows) if want_rows else None
            # Summed over chunks in fp32: bf16 sums over many chunks lose what small gradients add.
            weight_grad = torch.zeros_like(weight, dtype=_wide(weight)) if want_weight else None
            size = _rows_per_chunk(weight)
            for start in range(0, rows.shape[0], size):
                part, targets = rows[start : start + size], labels[start : start + size]
                logits = F.linear(part, weight).to(_wide(weight))  # (chunk, vocab)
                log_total = logits.logsumexp(dim=-1)
                picked = logits.gather(1, targets[:, None]).squeeze(1)
                loss += (log_total - picked).sum(dtype=torch.float64)
                if not (want_rows or want_weight):
                    continue
                # d loss / d logits = softmax - one-hot, written over the logits.
                logits.sub_(log_total[:, None]).exp_()
                logits.scatter_add_(1, targets[:, None], -torch.ones_like(picked)[:, None])
                slope = logits.to(rows.dtype)
                if row_grad is not None:
                    torch.mm(slope, weight, out=row_grad[start : start + size])
                if weight_grad is not None:
                    weight_grad += slope.t() @ part
        ctx.save_for_backward(row_grad, weight_grad)
        return loss.to(_wide(rows))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        row_grad, weight_grad = ctx.saved_tensors
        rows = None if row_grad is None else row_grad * slope.to(row_grad.dtype)
        weight = None if weight_grad is None else (weight_grad * slope.to(weight_grad.dtype)).to(ctx.weight_dtype)
        return rows, weight, None


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The type to sum in: fp32, or fp64 when the input is."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
