"""The gated MLP of a fused model: down(silu(gate(x)) * up(x)), with less kept for the backward pass.

`forward_gated` takes the place of a module's forward where fused.py found that the two answer the same. Which kernels
compute it, by device: Liger's (gpu_kernels.py), the compiled ones (native.py), those of 8 bits (fp8.py), or torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import gpu_kernels, native
from duoka.model.adapted import Call, call_of, forward_adapted, multiply, rebuilt
from duoka.model.fp8 import (
    E4M3,
    E5M2,
    Fp8Linear,
    Narrow,
    input_gradient,
    kept_weight,
    narrow_weight,
    product,
    quantize,
    weight_again,
    weight_gradient,
)
from duoka.model.split_products import SplitLinear, Waiting, waiting_of
from duoka.torch_private import in_shape_of


class SiluTimes(torch.autograd.Function):
    """silu(gate) * up, which keeps the two and computes silu again: a quarter less memory for the MLP."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_times(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        if _is_narrow(gate, up, grad):
            gate_grad, up_grad, _ = native.silu_times_backward(grad, gate, up, again=False, in_place=False)
            return gate_grad, up_grad
        return _gate_gradient(grad, gate, up), F.silu(gate).mul_(grad)


class SiluTimesDown(torch.autograd.Function):
    """(silu(gate) * up) W, which keeps the two and computes their product again: half of the MLP's memory."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor,
        left: tuple[Waiting, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`left`: where the weight's gradient waits, and whose it is."""
        ctx.save_for_backward(gate, up, weight)
        ctx.left = left
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(_silu_times(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        rows, found = grad.reshape(-1, grad.shape[-1]), []
        if ctx.left is not None:
            waiting, source = ctx.left
            waiting.leave(source, lambda: rows.t() @ _silu_times(gate, up).view(-1, up.shape[-1]))
        with torch.autocast(grad.device.type, enabled=False):
            slopes = _gradients(
                gate,
                up,
                lambda: (rows @ weight).view_as(up),
                (lambda both: found.append(rows.t() @ both)) if ctx.needs_input_grad[2] else None,
                in_place=ctx.left is None,  # what waits reads gate and up again
            )
        return *slopes, found[0] if found else None, None


class SiluTimesAdapted(torch.autograd.Function):
    """The same before a frozen product with an adapter, which reads silu(gate) * up for a gradient too."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, *call: Any) -> torch.Tensor:
        both = _silu_times(gate, up).view(-1, up.shape[-1])
        return in_shape_of(gate, multiply(ctx, both, Call(*call), gate, up))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (gate, up), gradients = rebuilt(ctx, grad)
        found: list[torch.Tensor] = []
        learn = (lambda both: found.append(gradients.of_down(both))) if ctx.needs_input_grad[4] else None
        slopes: tuple[torch.Tensor | None, ...] = (None, None)
        if any(ctx.needs_input_grad[:2]):
            slopes = _gradients(gate, up, lambda: gradients.of_input().view_as(up), learn, in_place=True)
        elif learn is not None:
            learn(_silu_times(gate, up).view(-1, up.shape[-1]))
        up_grad = gradients.of_up() if ctx.needs_input_grad[5] else None
        return *slopes, None, None, found[0] if found else None, up_grad, None, None, None, None


def _gradients(
    gate: torch.Tensor, up: torch.Tensor, of_both: Callable[[], torch.Tensor],
    learn: Callable[[torch.Tensor], None] | None, *, in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of gate and up, from that of silu(gate) * up, rows of which are given to `learn`.

    `in_place`: a GPU's kernel may write over gate and up.
    """
    width = up.shape[-1]
    if in_place and gpu_kernels.takes("MLP", gate, up):

        def find(both: torch.Tensor) -> torch.Tensor:
            if learn is not None:
                learn(both.view(-1, width))
            return of_both()

        return gpu_kernels.silu_times_backward(gate, up, find)
    if _is_narrow(gate, up):
        gate_grad, up_grad, both = native.silu_times_backward(of_both(), gate, up, again=learn is not None)
        if both is not None and learn is not None:
            learn(both.view(-1, width))
        return gate_grad, up_grad
    silu = F.silu(gate)
    if learn is not None:
        learn((silu * up).view(-1, width))
    inner = of_both()
    return _gate_gradient(inner, gate, up), silu.mul_(inner)


class SiluTimesDownFp8(torch.autograd.Function):
    """The same in 8 bits: what it keeps is as wide as without them, and the product is rounded again."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, again: bool
    ) -> torch.Tensor:  # fmt: skip
        narrow = narrow_weight(weight, gate.dtype)
        ctx.save_for_backward(gate, up, *kept_weight(weight, narrow, again=again))
        ctx.weight_dtype = weight.dtype
        out = product(_narrow_inside(gate, up), narrow, gate.dtype)
        return in_shape_of(gate, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up, *kept = ctx.saved_tensors
        rows, weight_grad = quantize(grad.reshape(-1, grad.shape[-1]), E5M2), None
        if ctx.needs_input_grad[2]:
            weight_grad = weight_gradient(rows, _narrow_inside(gate, up), grad.dtype).to(ctx.weight_dtype)
        inner = input_gradient(rows, weight_again(kept, grad.dtype), grad.dtype).view_as(up)
        return *_gradients(gate, up, lambda: inner, None, in_place=False), weight_grad, None


def _narrow_inside(gate: torch.Tensor, up: torch.Tensor) -> Narrow:
    return quantize(_silu_times(gate, up).view(-1, up.shape[-1]), E4M3)


def _is_narrow(*tensors: torch.Tensor) -> bool:
    return all(one.dtype is torch.bfloat16 and one.is_contiguous() for one in tensors) and native.serves(*tensors)


def _silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gpu_kernels.takes("MLP", gate, up):
        return gpu_kernels.silu_times(gate, up)
    return native.silu_times(gate, up) if _is_narrow(gate, up) else F.silu(gate).mul_(up)


def _gate_gradient(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inner = grad * up
    torch.ops.aten.silu_backward.grad_input(inner, gate, grad_input=inner)
    return inner


def forward_gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    is_cut = getattr(down, "takes_parts", False)  # of what ranks share: parallel/tensor.py
    if getattr(type(down), "forward", None) is forward_adapted and not (down._forward_hooks or down._forward_pre_hooks):
        call = call_of(down, gate)
        if call is not None and call.down.dtype == gate.dtype:
            return SiluTimesAdapted.apply(gate, up, *call)  # type: ignore[no-any-return]
    is_plain = type(down) in (torch.nn.Linear, SplitLinear, Fp8Linear) and down.bias is None
    if not (is_plain or is_cut) or down._forward_hooks or down._forward_pre_hooks:
        times = gpu_kernels.silu_times if gpu_kernels.takes("MLP", gate, up) else SiluTimes.apply
        return down(times(gate, up))  # type: ignore[no-any-return]
    if type(down) is Fp8Linear:
        return _down_fp8(down, gate, up)
    weight = (down.own_weight() if is_cut else down.weight).to(gate.dtype)
    waiting = waiting_of(down, gate, weight)
    left = () if waiting is None else ((waiting, weight),)
    answer: torch.Tensor = SiluTimesDown.apply(gate, up, weight.detach() if left else weight, *left)
    return down.sum_over_ranks(answer) if is_cut else answer


def _down_fp8(down: Fp8Linear, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not gate.numel():
        return down(SiluTimes.apply(gate, up))  # type: ignore[no-any-return]
    answer: torch.Tensor = SiluTimesDownFp8.apply(gate, up, down.weight, down.rounds_again)
    return answer
