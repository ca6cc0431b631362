"""The update of narrow.py on GPUs: one pass over weight, gradient and moments, in Triton. The same chances.

Imported where numbers lie on a GPU and Triton is there, which torch brings for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_AT_ONCE = 1024  # numbers of a program
# splitmix64, as model/dropout.py counts it; signed, as Triton has whole numbers of 64 bits.
_STEP = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _rounded_at_random(values, noise):  # type: ignore[no-untyped-def]
    bits = values.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    narrow = (bits + tl.where(is_finite, noise.to(tl.int32), 0)) & -65536
    return narrow.to(tl.float32, bitcast=True).to(tl.bfloat16)  # exact: the bits that fall away are 0


@triton.jit(do_not_specialize=["count", "first", "key"])
def _update(  # type: ignore[no-untyped-def]
    weight, grad, average, square, count, first, key, lr, beta1, beta2, eps, decay, first_scale, second_scale,
    size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    exists = at < count
    hashes = key + (first + at) * _STEP
    hashes = (hashes ^ (hashes >> 32)) * _FIRST
    hashes = (hashes ^ (hashes >> 29)) * _SECOND
    slope = tl.load(grad + at, mask=exists, other=0.0).to(tl.float32)
    one = tl.load(average + at, mask=exists, other=0.0).to(tl.float32) * beta1 + slope * (1.0 - beta1)
    two = tl.load(square + at, mask=exists, other=0.0).to(tl.float32) * beta2 + slope * slope * (1.0 - beta2)
    below = tl.sqrt(two) * second_scale + eps
    moved = tl.load(weight + at, mask=exists, other=0.0).to(tl.float32) * (1.0 - lr * decay)
    moved -= lr * (one * first_scale) / below
    tl.store(weight + at, _rounded_at_random(moved, hashes & 0xFFFF), mask=exists)
    tl.store(average + at, _rounded_at_random(one, (hashes >> 16) & 0xFFFF), mask=exists)
    tl.store(square + at, _rounded_at_random(two, (hashes >> 32) & 0xFFFF), mask=exists)


def update_narrow(
    weight: torch.Tensor, grad: torch.Tensor, average: torch.Tensor, square: torch.Tensor, first: int, key: int,
    *factors: float,
) -> None:  # fmt: skip
    """As narrow.update_narrow, of contiguous tensors of any size."""
    count = weight.numel()
    _update[(triton.cdiv(count, _AT_ONCE),)](weight, grad, average, square, count, first, key, *factors, size=_AT_ONCE)
