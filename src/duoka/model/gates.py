"""What a gated MLP multiplies, act(gate) * up, and its gradients, by the kernels that are there for it.

Liger's on a GPU (gpu_kernels.py) know SiLU, the compiled ones (native.py) GELU by its tanh too; else torch's operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from duoka.model import gpu_kernels, native

_aten = torch.ops.aten


class Act(NamedTuple):
    name: str  # as config.json has it
    value: Callable[[torch.Tensor], torch.Tensor]
    times_slope: Callable[[torch.Tensor, torch.Tensor], None]  # its first times the slope at the second, in place


def _silu_slope(inner: torch.Tensor, gate: torch.Tensor) -> None:
    _aten.silu_backward.grad_input(inner, gate, grad_input=inner)


def _gelu(name: str, approximate: str) -> Act:
    def times_slope(inner: torch.Tensor, gate: torch.Tensor) -> None:
        _aten.gelu_backward.grad_input(inner, gate, approximate=approximate, grad_input=inner)

    return Act(name, functools.partial(F.gelu, approximate=approximate), times_slope)


SILU, GELU_TANH = Act("silu", F.silu, _silu_slope), _gelu("gelu_pytorch_tanh", "tanh")
ACTS = (SILU, GELU_TANH, _gelu("gelu", "none"))


def _in_liger(act: Act, gate: torch.Tensor, up: torch.Tensor) -> bool:
    return act is SILU and gpu_kernels.takes("MLP", gate, up)


def _is_narrow(act: Act, *tensors: torch.Tensor) -> bool:
    fits = all(one.dtype is torch.bfloat16 and one.is_contiguous() for one in tensors)
    return act in (SILU, GELU_TANH) and fits and native.serves(*tensors)


def times(act: Act, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if _in_liger(act, gate, up):
        return gpu_kernels.silu_times(gate, up)
    return native.gate_times(gate, up, gelu=act is GELU_TANH) if _is_narrow(act, gate, up) else act.value(gate).mul_(up)


def times_kept(act: Act, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same, of which autograd knows, and keeps gate and up."""
    if _in_liger(act, gate, up):
        return gpu_kernels.silu_times(gate, up)
    answer: torch.Tensor = Gated.apply(gate, up, act)
    return answer


def gradients(
    act: Act, gate: torch.Tensor, up: torch.Tensor, of_both: Callable[[], torch.Tensor],
    learn: Callable[[torch.Tensor], None] | None, *, in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of gate and up, from that of act(gate) * up, rows of which are given to `learn`.

    `in_place`: kernels may write over all that they are given.
    """
    width = up.shape[-1]
    if in_place and _in_liger(act, gate, up):

        def find(both: torch.Tensor) -> torch.Tensor:
            if learn is not None:
                learn(both.view(-1, width))
            return of_both()

        return gpu_kernels.silu_times_backward(gate, up, find)
    if _is_narrow(act, gate, up):
        gate_grad, up_grad, both = native.gate_times_backward(
            of_both().contiguous(), gate, up, gelu=act is GELU_TANH, again=learn is not None, in_place=in_place
        )
        if both is not None and learn is not None:
            learn(both.view(-1, width))
        return gate_grad, up_grad
    value = act.value(gate)
    if learn is not None:
        learn((value * up).view(-1, width))
    inner = of_both()
    gate_grad = inner * up
    act.times_slope(gate_grad, gate)
    return gate_grad, value.mul_(inner)


class Gated(torch.autograd.Function):
    """act(gate) * up, which keeps the two and computes act again: a quarter less memory for the MLP."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, act: Act = SILU) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return times(act, gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        return *gradients(ctx.act, gate, up, lambda: grad, None, in_place=False), None
