"""What a gated MLP multiplies, act(gate) * up, and its gradients, by the kernels that are there for it.

Where one product gives both, gate and then up, it stands for gate, up is None, and one tensor has both gradients.
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


class _ReluSquared(torch.autograd.Function):
    """Of its steps autograd keeps two tensors, on a GPU under autocast one of them in fp32; this keeps what it reads.

    Products of two narrow numbers, rounded once, are what autocast's wide ones are when they are narrowed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        positive = torch.relu(x)
        return positive.mul_(positive)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.relu(x).mul_(2).mul_(grad)


def _relu2_slope(inner: torch.Tensor, gate: torch.Tensor) -> None:
    inner.mul_(2).mul_(torch.relu(gate))


SILU, GELU_TANH = Act("silu", F.silu, _silu_slope), _gelu("gelu_pytorch_tanh", "tanh")
ACTS = (SILU, GELU_TANH, _gelu("gelu", "none"), Act("relu2", _ReluSquared.apply, _relu2_slope))


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.chunk(2, dim=-1) if up is None else (gate, up)  # type: ignore[return-value]


def _in_liger(act: Act, gate: torch.Tensor, up: torch.Tensor) -> bool:
    return act is SILU and gpu_kernels.takes("MLP", gate, up)


def _is_narrow(act: Act, gate: torch.Tensor, up: torch.Tensor | None) -> bool:
    tensors = [one for one in (gate, up) if one is not None]
    fits = all(one.dtype is torch.bfloat16 and one.is_contiguous() for one in tensors)
    return act in (SILU, GELU_TANH) and fits and native.serves(*tensors)


def times(act: Act, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    if up is not None and _in_liger(act, gate, up):
        return gpu_kernels.silu_times(gate, up)
    if _is_narrow(act, gate, up):
        return native.gate_times(gate, up, gelu=act is GELU_TANH)
    gate, up = _halves(gate, up)
    return act.value(gate).mul_(up)


def times_kept(act: Act, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """The same, of which autograd knows, and keeps gate and up."""
    if up is not None and _in_liger(act, gate, up):
        return gpu_kernels.silu_times(gate, up)
    answer: torch.Tensor = Gated.apply(gate, up, act)
    return answer


def gradients(
    act: Act, gate: torch.Tensor, up: torch.Tensor | None, of_both: Callable[[], torch.Tensor],
    learn: Callable[[torch.Tensor], None] | None, *, in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Of gate and up, from that of act(gate) * up, rows of which are given to `learn`.

    `in_place`: kernels may write over all that they are given.
    """
    shape = _halves(gate, up)[0].shape

    def find() -> torch.Tensor:
        return of_both().reshape(shape)

    def show(both: torch.Tensor) -> None:
        if learn is not None:
            learn(both.view(-1, shape[-1]))

    if in_place and up is not None and _in_liger(act, gate, up):

        def show_and_find(both: torch.Tensor) -> torch.Tensor:
            show(both)
            return find()

        return gpu_kernels.silu_times_backward(gate, up, show_and_find)
    if _is_narrow(act, gate, up):
        gate_grad, up_grad, both = native.gate_times_backward(
            find().contiguous(), gate, up, gelu=act is GELU_TANH, again=learn is not None, in_place=in_place
        )
        if both is not None:
            show(both)
        return gate_grad, up_grad
    pair = _halves(gate, up)
    value = act.value(pair[0])
    if learn is not None:
        show(value * pair[1])
    inner = find()
    joined = torch.empty_like(gate) if up is None else None
    places = (None, value) if joined is None else joined.chunk(2, dim=-1)
    gate_grad = torch.mul(inner, pair[1], out=places[0])
    act.times_slope(gate_grad, pair[0])
    up_grad = torch.mul(value, inner, out=places[1])
    return (gate_grad, up_grad) if joined is None else (joined, None)


class Gated(torch.autograd.Function):
    """act(gate) * up, which keeps the two and computes act again: a quarter less memory for the MLP."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, act: Act = SILU) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return times(act, gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        return *gradients(ctx.act, gate, up, lambda: grad, None, in_place=False), None
