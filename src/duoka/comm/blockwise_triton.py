"""Packing and unpacking of blockwise.py on GPUs: one pass over the numbers each, in Triton. The same bytes.

Imported where numbers lie on a GPU and Triton is there, which torch brings for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_AT_ONCE = 4096  # numbers of a program
# Adding and taking away 1.5 * 2^23 rounds a small number to the nearest whole one, ties to the even, as torch does.
_ROUNDS = tl.constexpr(12582912.0)
_BIASED = tl.constexpr(8)


@triton.jit
def _scale_of(largest, is_nan, levels: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(is_nan > 0, float("nan"), tl.div_rn(largest, tl.full(largest.shape, levels, tl.float32)))


@triton.jit
def _whole(values, divisors):  # type: ignore[no-untyped-def]
    found = tl.div_rn(values, tl.broadcast_to(divisors, values.shape))
    return tl.where(found != found, 0.0, (found + _ROUNDS) - _ROUNDS)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    values, numbers, scales, count, num_blocks, row_bytes, row_scales, first_scale,
    bits: tl.constexpr, block: tl.constexpr, num: tl.constexpr,
):  # fmt: skip
    row, levels = tl.program_id(0).to(tl.int64), 127 if bits == 8 else 7
    blocks = tl.program_id(1) * num + tl.arange(0, num)
    per_byte: tl.constexpr = 8 // bits
    width: tl.constexpr = block // per_byte
    bytes_at = blocks[:, None] * width + tl.arange(0, width)[None, :]
    at = bytes_at * per_byte
    exists = blocks[:, None] < num_blocks
    first = tl.load(values + row * count + at, mask=exists & (at < count), other=0.0).to(tl.float32)
    if bits == 4:
        second = tl.load(values + row * count + at + 1, mask=exists & (at + 1 < count), other=0.0).to(tl.float32)
    else:
        second = first
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
    is_nan = tl.max(((first != first) | (second != second)).to(tl.int32), axis=1)
    scale = _scale_of(largest, is_nan, levels)
    divisor = tl.where(scale == 0.0, 1.0, scale)[:, None]
    if bits == 4:
        low, high = _whole(first, divisor).to(tl.int32) + _BIASED, _whole(second, divisor).to(tl.int32) + _BIASED
        found = (low | (high << 4)).to(tl.uint8)
    else:
        found = _whole(first, divisor).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(numbers + row * row_bytes + bytes_at, found, mask=exists)
    tl.store(scales + row * row_scales + first_scale + blocks, scale, mask=blocks < num_blocks)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    numbers, scales, out, count, num_blocks, row_bytes, row_scales, first_scale,
    bits: tl.constexpr, block: tl.constexpr, num: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * num + tl.arange(0, num)
    per_byte: tl.constexpr = 8 // bits
    width: tl.constexpr = block // per_byte
    bytes_at = blocks[:, None] * width + tl.arange(0, width)[None, :]
    at = bytes_at * per_byte
    exists = blocks[:, None] < num_blocks
    found = tl.load(numbers + row * row_bytes + bytes_at, mask=exists, other=0)
    scale = tl.load(scales + row * row_scales + first_scale + blocks, mask=blocks < num_blocks, other=0.0)[:, None]
    kind = out.dtype.element_ty
    if bits == 4:
        low, high = (found & 15).to(tl.float32) - _BIASED, (found >> 4).to(tl.float32) - _BIASED
        tl.store(out + row * count + at, (low * scale).to(kind), mask=exists & (at < count))
        tl.store(out + row * count + at + 1, (high * scale).to(kind), mask=exists & (at + 1 < count))
    else:
        signed = found.to(tl.int8, bitcast=True).to(tl.float32)
        tl.store(out + row * count + at, (signed * scale).to(kind), mask=exists & (at < count))


def _laid_out(rows: int, count: int, bits: int, block: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The programs of a call, and what each of both kernels is told of rows of bytes."""
    num_blocks, num = -(-count // block), _AT_ONCE // block
    size = num_blocks * block * bits // 8
    row_bytes = size + 4 * num_blocks
    told = {
        "count": count, "num_blocks": num_blocks, "row_bytes": row_bytes, "row_scales": row_bytes // 4,
        "first_scale": size // 4, "bits": bits, "block": block, "num": num,
    }  # fmt: skip
    return (rows, -(-num_blocks // num)), told


def pack(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """As blockwise.pack."""
    rows, count = values.shape
    grid, told = _laid_out(rows, count, bits, block)
    out = torch.empty((rows, told["row_bytes"]), dtype=torch.uint8, device=values.device)
    _pack[grid](values.contiguous(), out, out.view(torch.float32), **told)
    return out


def unpack(packed: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """As blockwise.unpack, of rows that lie one after the other."""
    rows, count = out.shape
    grid, told = _laid_out(rows, count, bits, block)
    assert packed.is_contiguous() and out.is_contiguous() and packed.shape[1] == told["row_bytes"]
    _unpack[grid](packed, packed.view(torch.float32), out, **told)
    return out
