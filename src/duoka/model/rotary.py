"""Rotary embedding with few passes over memory: x * cos + rotate_half(x) * sin, without a rotated copy.

transformers writes it as ten small kernels and twenty more for its gradient, in fp32 where the residual stream is, and
attention casts what comes. Here each tensor takes four on a GPU, and its gradient four, or both one by Liger's kernel
(gpu_kernels.py); in bf16 on a CPU one each (native.cpp). In fp32 CPUs keep transformers' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from duoka.model import gpu_kernels, native

CLOSE = 1e-5
Rotated = tuple[torch.Tensor, torch.Tensor]


class _Rotation(torch.autograd.Function):
    """One rotation after the other is one: the gradient is turned back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x: (rows, heads, tokens, dim); cos and sin: (rows, 1, tokens, dim)."""
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        half = sin.shape[-1] // 2
        return _turn(x, cos, sin[..., :half], sin[..., half:], -1.0).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        half = sin.shape[-1] // 2
        return _turn(grad, cos, sin[..., half:], sin[..., :half], 1.0).to(ctx.dtype), None, None, None


class _NarrowRotation(torch.autograd.Function):
    """Of bf16 on a CPU, with tables of either width."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: (rows, heads, tokens, dim); cos and sin: (rows, tokens, dim)."""
        ctx.save_for_backward(cos, sin)
        return native.rotate(native.laid_by_token(x), cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return native.rotate(native.laid_by_token(grad), cos, sin, -1.0), None, None


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin_first: torch.Tensor, sin_second: torch.Tensor, sign: float
) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin_first, value=sign)
    out[..., half:].addcmul_(x[..., :half], sin_second, value=-sign)
    return out


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    """query, key: (rows, heads, tokens, dim); cos and sin: (rows, tokens, dim). Under autocast the answer is narrow."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.result_type(query, cos)
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    return _Rotation.apply(query, *tables, dtype), _Rotation.apply(key, *tables, dtype)  # type: ignore[return-value]


@functools.cache
def own_rotation(theirs: Any, in_place: bool = False) -> Callable[..., Rotated] | None:
    """Ours on GPUs and in bf16, a model's own function elsewhere; None where ours would not answer the same.

    `in_place`: nobody reads again what is turned, and tables are repeated halves, so that Liger's may do it.
    """
    if not callable(theirs) or not answers_alike(theirs):
        return None

    def turn(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *how: Any, **named: Any
    ) -> Any:
        fits = cos.ndim == 3 and cos.shape == sin.shape and cos.shape[-1] == query.shape[-1] == key.shape[-1]
        fits = fits and query.ndim == 4 and cos.shape[1] == query.shape[2] == key.shape[2]
        if fits and not how and not named and not cos.requires_grad:
            if query.is_cuda:
                by_liger = in_place and _is_for_liger(query, key, cos, sin)
                return (gpu_kernels.rotate if by_liger else rotate)(query, key, cos, sin)
            if _is_narrow(query, key, cos, sin):
                tables = (table.expand(query.shape[0], -1, -1).contiguous() for table in (cos, sin))
                return tuple(_NarrowRotation.apply(x, *both) for both in [tuple(tables)] for x in (query, key))
        return theirs(query, key, cos, sin, *how, **named)

    return turn


def _is_for_liger(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Its answer is as wide as what it is given; ours as attention computes."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    wide = autocast or torch.result_type(query, cos)
    return query.dtype is key.dtype is wide and gpu_kernels.takes("rotation", query, key, cos, sin)


def repeats_tables(lm: torch.nn.Module) -> bool:
    """Whether the second half of each rotary table is the first again: seen from one made anew, of the same config."""
    found = [module for module in lm.modules() if hasattr(module, "inv_freq")]
    try:
        return bool(found) and all(_is_repeated(type(module), module.config) for module in found)
    except (AttributeError, TypeError, RuntimeError, ValueError, KeyError):
        return False  # it is made otherwise


def _is_repeated(kind: Any, config: Any) -> bool:
    with torch.device("cpu"):
        tables = kind(config=config)(torch.zeros(1, 5, 8), torch.arange(5)[None])
    return all(torch.equal(*table.chunk(2, dim=-1)) for table in tables)


def _is_narrow(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    halves = query.dtype is key.dtype is torch.bfloat16 and cos.dtype is sin.dtype
    return halves and query.ndim == key.ndim == 4 and native.narrows(query, key, cos, sin)


def answers_alike(theirs: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 5, 8), (1, 1, 5, 8), (1, 5, 8), (1, 5, 8)
    query, key, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        want = theirs(query, key, cos, sin)
        pairs = list(zip(rotate(query, key, cos, sin), want, strict=True))
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False
    return all(torch.allclose(one, two, rtol=CLOSE, atol=CLOSE) for one, two in pairs)
