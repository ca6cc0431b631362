"""Products of fp32 matrices by oneDNN, on AMD's CPUs with AVX-512.

torch multiplies fp32 by MKL, which uses no AVX-512 on other makers' processors: on Zen 5 half of what they can
(docs/decisions.md). Where oneDNN is the faster one, it takes the place of torch's kernels in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from duoka.model.replaced import PIECE, replace_kernel
from duoka.plan.hardware import halves_avx512, mkl_is_slow
from duoka.torch_private import onednn_product

_THIN = 64  # sides below are MKL's
_LEAST = 1 << 26  # multiplications from which on it pays: oneDNN compiles for each shape, for almost a millisecond


@functools.cache
def use_onednn() -> bool:
    """Whether it multiplies from now on."""
    if onednn_product is None or not torch.backends.mkl.is_available() or not mkl_is_slow():
        return False
    replace_kernel("mm", _gains, _multiply)
    replace_kernel("mm.out", _gains, _multiply_into)
    replace_kernel("addmm", _gains_beside, _multiply_and_add)
    replace_kernel("addmm_", _gains_in_sum, _add_to)
    return True


@functools.cache
def takes_across() -> bool:
    """Whether it pays where the left side lies across, as for a weight's gradient: oneDNN copies such a one."""
    return not halves_avx512()


def _gains(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> bool:
    """A right side that lies in a larger matrix oneDNN multiplies by its definition, some hundred times as slowly."""
    if onednn_product is None or any(one is not None and one.dtype is not torch.float32 for one in (a, b, out)):
        return False
    rows, inner, columns = *a.shape, b.shape[1]
    fits = inner == b.shape[0] and (b.is_contiguous() or b.t().is_contiguous())
    fits = fits and (a.is_contiguous() or takes_across())
    return fits and min(rows, inner, columns) >= _THIN and rows * inner * columns >= _LEAST


def _gains_beside(other: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> bool:
    fits = other.shape in (b.shape[1:], (a.shape[0], b.shape[1])) and other.dtype is torch.float32
    return fits and beta != 0 and _gains(a, b)  # times 0, what is no number is to be gone


def _gains_in_sum(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> bool:
    is_plain = beta == 1 and alpha == 1 and sums.dtype is torch.float32
    return is_plain and sums.shape == (a.shape[0], b.shape[1]) and _gains(a, b)


def _multiply(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_contiguous() or a.numel() <= PIECE:
        return _product(a, b)
    return _put(a.new_empty(a.shape[0], b.shape[1]), a, b)


def _multiply_into(_: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return _put(out.resize_(a.shape[0], b.shape[1]), a, b)


def _put(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for part, product in _pieces(out, a, b):
        part.copy_(product)
    return out


def _multiply_and_add(
    _: Any, other: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == alpha == 1 and other.ndim == 1 and other.is_contiguous():
        return _product(a, b, other)
    out = _multiply(_, a, b)
    return (out if alpha == 1 else out.mul_(alpha)).add_(other, alpha=beta)


def _add_to(_: Any, sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any) -> torch.Tensor:
    for part, product in _pieces(sums, a, b):
        part.add_(product)
    return sums


def _pieces(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of `out`, what belongs there): oneDNN makes its own answer, and copies an `a` that lies across.

    Along the longer side, where it leaves parts of `b` in one piece.
    """
    rows, inner, columns = *a.shape, b.shape[1]
    if rows >= columns or not b.t().is_contiguous():
        size = max(_THIN, PIECE // max(inner, columns))
        for part, piece in zip(out.split(size), a.split(size), strict=True):
            yield part, _product(piece, b)
    else:
        size = max(_THIN, PIECE // max(inner, rows))
        for part, piece in zip(out.split(size, dim=1), b.split(size, dim=1), strict=True):
            yield part, _product(a, piece)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert onednn_product is not None
    return onednn_product(a, b.t(), bias)
