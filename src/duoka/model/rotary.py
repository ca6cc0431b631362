"""Rotary embedding with few kernels on a GPU: x * cos + rotate_half(x) * sin, without a rotated copy.

transformers writes it as ten small kernels and twenty more for its gradient, in fp32 where the residual stream is, and
attention casts what comes. Here each tensor takes four, and its gradient four. CPUs keep transformers' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

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
def rotation_on_gpu(theirs: Any) -> Callable[..., Rotated] | None:
    """A model's own function on CPUs, ours on GPUs; None where ours would not answer the same."""
    if not callable(theirs) or not answers_alike(theirs):
        return None

    def turn(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *how: Any, **named: Any
    ) -> Any:
        fits = query.is_cuda and cos.ndim == 3 and cos.shape[-1] == query.shape[-1] == key.shape[-1]
        if fits and not how and not named and not cos.requires_grad:
            return rotate(query, key, cos, sin)
        return theirs(query, key, cos, sin, *how, **named)

    return turn


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
