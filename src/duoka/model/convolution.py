"""The short convolution of layers with a state (Mamba, linear attention, LFM2): each channel's last few tokens.

By a compiled kernel on CPUs (convolution.cpp), which reads tokens as the product before it lays them, and keeps that
product alone. Elsewhere it stays torch's, and causal-conv1d's where that is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from duoka.model import native
from duoka.torch_private import FakeTensor

NAME, KERNELS = "causal_conv1d_fn", "causal_conv1d"  # transformers' function, and the package that is faster
_MOST_TAPS = 8  # that the kernel takes
_SILU = ("silu", "swish")


def in_place_of(theirs: Any) -> Any:
    def compute(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        fits = weight.shape[-1] <= _MOST_TAPS and (activation is None or activation in _SILU)
        if not fits or not _is_compiled(hidden_states, weight):
            answer: torch.Tensor = theirs(hidden_states, weight, bias, activation, **others)
            return answer
        x = hidden_states.transpose(1, 2)
        x = x if x.stride(2) == 1 and x.stride(1) >= x.shape[2] else x.contiguous()
        return convolve(x, weight, bias, activation is not None).transpose(1, 2)

    return None if theirs is None else compute


def _is_compiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel computes it; of fake tensors, whether it would."""
    if isinstance(x, FakeTensor):
        return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and native.find() is not None
    return x.numel() > 0 and native.serves(x, weight)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, has_silu: bool
) -> torch.Tensor:  # (rows, tokens, channels) each of whose tokens is in one piece; (channels, taps)
    answer: torch.Tensor = _Convolution.apply(x, weight, bias, has_silu)
    return answer


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, has_silu: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.has_silu = has_silu
        answer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _call("convolve_forward", x, weight, bias, (answer,), has_silu)
        return answer

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        of_weight = torch.empty(weight.shape, dtype=torch.float32, device=x.device)
        of_bias = torch.empty(weight.shape[:1], dtype=torch.float32, device=x.device)
        slope = slope.to(x.dtype).contiguous()
        _call("convolve_backward", x, weight, bias, (slope, of_x, of_weight, of_bias), ctx.has_silu)
        return of_x, of_weight.to(weight.dtype), None if bias is None else of_bias.to(bias.dtype), None


def _call(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Any, has_silu: bool
) -> None:
    if isinstance(x, FakeTensor):
        return
    numbers = [None if one is None else one.detach().float().contiguous() for one in (weight, bias)]
    places = (None if one is None else one.data_ptr() for one in (x, *numbers, *others))
    sizes = (*x.shape, weight.shape[1], x.stride(0), x.stride(1))
    getattr(native.find(), name)(*places, *sizes, has_silu, x.dtype is torch.float32, torch.get_num_threads())
