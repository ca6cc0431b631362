"""Products of bf16 matrices on CPUs without bf16 instructions, by the kernels for fp32.

torch computes them one number after the other there, 10 to 60 times as slowly as in fp32 (docs/decisions.md). Widened
by pieces they are as fast as fp32's: products of two bf16 numbers are exact in fp32, both sum in fp32, and both round
the sum once. All of a process computes so from then on: layers, their backward passes, experts, the head, attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from duoka.model.replaced import PIECE, Kernel, kernel_of, replace_kernel
from duoka.plan.hardware import has_cpu_bf16

_ROWS, _NUMBERS = 4, 1 << 16  # from which on it pays


@functools.cache
def widen_products() -> bool:
    """Whether they are widened from now on: not where the CPU multiplies them itself."""
    if has_cpu_bf16():
        return False
    for name, widened in _PRODUCTS.items():
        by_pieces = functools.partial(widened, kernel_of(name))
        replace_kernel(name, _gains, by_pieces)
        replace_kernel(f"{name}.out", _gains, functools.partial(_put, by_pieces))
    for name, widened in _ATTENTION.items():
        replace_kernel(name, _is_narrow, functools.partial(widened, kernel_of(name)))
    return True


# --- products ---


def _gains(*inputs: torch.Tensor, **_: Any) -> bool:
    """Of few rows torch's own way reads the matrix once, as it is; of few numbers anything is quick."""
    a, b = inputs[-2:]
    if b.dtype is not torch.bfloat16:
        return False
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    return min(rows, columns) >= _ROWS and rows * inner * columns >= _NUMBERS


def _multiply(kernel: Kernel, keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    for part_a, part_b, part in _pieces(a, b, out):
        part.copy_(kernel(keys, part_a.float(), part_b.float()))
    return out


def _add(
    kernel: Kernel, keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: float
) -> torch.Tensor:
    out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    for part_a, part_b, part_bias, part in _pieces(a, b, bias.expand(out.shape), out):
        part.copy_(kernel(keys, part_bias.float(), part_a.float(), part_b.float(), **factors))
    return out


def _put(widened: Kernel, keys: Any, *inputs: torch.Tensor, out: torch.Tensor, **factors: float) -> torch.Tensor:
    answer = widened(keys, *inputs, **factors)
    return out.resize_(answer.shape).copy_(answer)


def _pieces(a: torch.Tensor, b: torch.Tensor, *like_out: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of some matrices after others, along the longer side of the answer: (of a, of b, of each that lies like it)."""
    if a.ndim == 3 and len(a) > 1 and sum(one.numel() for one in (a, b, like_out[0])) > PIECE:
        for whole in zip(*(one.split(1) for one in (a, b, *like_out)), strict=True):
            yield from _pieces(*whole)
        return
    rows, columns = like_out[0].shape[-2:]
    along = -1 if columns > rows else -2
    size = max(64, PIECE // max(1, a.shape[-1] + min(rows, columns)))
    parts = (one.split(size, dim=along) for one in like_out)
    moving = (b if columns > rows else a).split(size, dim=along)
    for piece, *others in zip(moving, *parts, strict=True):
        yield (a, piece, *others) if columns > rows else (piece, b, *others)


# --- attention ---


def _is_narrow(query: torch.Tensor, *_: Any, **named: Any) -> bool:
    return query.dtype is torch.bfloat16


def _attend(kernel: Kernel, keys: Any, *inputs: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _wide(kernel, keys, *inputs, **named)
    return out.bfloat16(), sums


def _attend_back(kernel: Kernel, keys: Any, *inputs: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    return tuple(slope.bfloat16() for slope in _wide(kernel, keys, *inputs, **named))


def _wide(kernel: Kernel, keys: Any, *inputs: Any, **named: Any) -> Any:
    widened = [one.float() if isinstance(one, torch.Tensor) else one for one in inputs]
    return kernel(
        keys, *widened, **{name: one.float() if isinstance(one, torch.Tensor) else one for name, one in named.items()}
    )


_PRODUCTS: Mapping[str, Kernel] = {"mm": _multiply, "bmm": _multiply, "addmm": _add, "baddbmm": _add}
_ATTENTION: Mapping[str, Kernel] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attend,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attend_back,
}
