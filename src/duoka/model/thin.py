"""Thin products of adapters: of rows (n, width), contiguous in width, and a matrix (rank, width).

On CPUs by our kernels (thin.cpp), where torch's library writes a program for each number of rows in bf16; elsewhere by
torch's products.
"""

from __future__ import annotations

import torch

from duoka.model import native
from duoka.model.chunks import wide

_LANES = 16  # what widths come in


def squeeze(rows: torch.Tensor, matrix: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """(n, rank): scale * rows matrix^T."""
    if not _fits(rows, matrix):
        # Thin matrices lie down, (rank, rows): standing up, CPU libraries take up to 12 times as long for these.
        return (matrix @ rows.t()).mul_(scale).t()
    out = rows.new_empty((len(rows), len(matrix)))
    _call("thin_squeeze", rows, (rows, matrix, out), len(matrix), scale)
    return out


def spread_(rows: torch.Tensor, thin: torch.Tensor, matrix: torch.Tensor, scale: float = 1.0) -> None:
    """rows += scale * thin matrix."""
    if _fits(rows, matrix) and thin.is_contiguous():
        _call("thin_spread", rows, (rows, thin, matrix), len(matrix), scale)
    else:
        rows.addmm_(thin, matrix, alpha=scale)


def collect(thin: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """(rank, width): scale * thin^T rows, at least in fp32 where a kernel finds it."""
    if not (_fits(rows, rows) and thin.is_contiguous()):
        return (thin.t() @ rows).mul_(scale)
    out = rows.new_empty((thin.shape[1], rows.shape[1]), dtype=wide(rows))
    _call("thin_collect", rows, (rows, thin, out), thin.shape[1], scale)
    return out


def _fits(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    lies = rows.stride(1) == 1 and matrix.is_contiguous()
    return lies and rows.shape[1] % _LANES == 0 and rows.dtype == matrix.dtype and native.serves(rows, matrix)


def _call(name: str, rows: torch.Tensor, tensors: tuple[torch.Tensor, ...], rank: int, scale: float) -> None:
    sizes = (len(rows), rows.stride(0), rows.shape[1], rank)
    how = (scale, rows.dtype is torch.float32, torch.get_num_threads())
    getattr(native.library(), name)(*(one.data_ptr() for one in tensors), *sizes, *how)
