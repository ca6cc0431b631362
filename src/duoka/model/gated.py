"""The gated MLP of a fused model: down(act(gate(x)) * up(x)), with less kept for the backward pass.

`forward_gated` takes the place of a module's forward where fused.py found that the two answer the same; gates.py
computes what lies between the products, fp8.py those of 8 bits. Without `up`, `gate` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from duoka.model.adapted import Call, call_of, given, is_fused, multiply, rebuilt
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
from duoka.model.gates import SILU, Act, gradients, times, times_kept
from duoka.model.split_products import SplitLinear, Waiting, waiting_of
from duoka.torch_private import in_shape_of


class GatedDown(torch.autograd.Function):
    """(act(gate) * up) W, which keeps the two and computes their product again: half of the MLP's memory."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor,
        left: tuple[Waiting, torch.Tensor] | None = None, act: Act = SILU,
    ) -> torch.Tensor:  # fmt: skip
        """`left`: where the weight's gradient waits, and whose it is."""
        ctx.save_for_backward(gate, up, weight)
        ctx.left, ctx.act = left, act
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(times(act, gate, up), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        rows, act = grad.reshape(-1, grad.shape[-1]), ctx.act
        found: list[torch.Tensor] = []
        learn = (lambda both: found.append(rows.t() @ both)) if ctx.needs_input_grad[2] else None
        is_left = ctx.left is not None  # and reads gate and up again
        if ctx.left is not None:
            waiting, source = ctx.left
            waiting.leave(source, lambda: rows.t() @ times(act, gate, up).view(-1, weight.shape[-1]))
        with torch.autocast(grad.device.type, enabled=False):
            slopes = gradients(act, gate, up, lambda: rows @ weight, learn, in_place=not is_left)
        return *slopes, found[0] if found else None, None, None


class GatedAdapted(torch.autograd.Function):
    """The same before a frozen product with an adapter, which reads act(gate) * up for a gradient too."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, act: Act, *call: Any) -> torch.Tensor:
        ctx.act = act
        both = times(act, gate, up).flatten(0, -2)
        return in_shape_of(gate, multiply(ctx, both, Call(*call), gate, up))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (gate, up), slope = rebuilt(ctx, grad)
        wants_gate, wants_up, _, _, _, wants_low, wants_high, *others = ctx.needs_input_grad
        found: list[torch.Tensor] = []
        learn: Callable[[torch.Tensor], None] | None = None
        if wants_low:
            learn = lambda both: found.append(slope.of_down(both))  # noqa: E731
        slopes: tuple[torch.Tensor | None, ...] = (None, None)
        if wants_gate or wants_up:
            slopes = gradients(ctx.act, gate, up, slope.of_input, learn, in_place=True)
        elif learn is not None:
            learn(times(ctx.act, gate, up).flatten(0, -2))
        of_low, of_high = found[0] if found else None, slope.of_up() if wants_high else None
        return *slopes, None, None, None, of_low, of_high, *(None for _ in others)


class GatedDownFp8(torch.autograd.Function):
    """The same in 8 bits: what it keeps is as wide as without them, and the product is rounded again."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, again: bool, act: Act = SILU
    ) -> torch.Tensor:  # fmt: skip
        narrow = narrow_weight(weight, gate.dtype)
        ctx.save_for_backward(gate, up, *kept_weight(weight, narrow, again=again))
        ctx.weight_dtype, ctx.act = weight.dtype, act
        out = product(_narrow_inside(act, gate, up), narrow, gate.dtype)
        return in_shape_of(gate, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up, *kept = ctx.saved_tensors
        rows, weight_grad = quantize(grad.reshape(-1, grad.shape[-1]), E5M2), None
        if ctx.needs_input_grad[2]:
            weight_grad = weight_gradient(rows, _narrow_inside(ctx.act, gate, up), grad.dtype).to(ctx.weight_dtype)
        inner = input_gradient(rows, weight_again(kept, grad.dtype), grad.dtype)
        return *gradients(ctx.act, gate, up, lambda: inner, None, in_place=False), weight_grad, None, None


def _narrow_inside(act: Act, gate: torch.Tensor, up: torch.Tensor | None) -> Narrow:
    return quantize(times(act, gate, up).flatten(0, -2), E4M3)


class Mlp(NamedTuple):
    """What its parts are called."""

    gate: str  # or of one product for gate and up
    up: str | None
    down: str
    act: str | None  # None: SiLU is written in its forward


MLPS = (
    Mlp("gate_proj", "up_proj", "down_proj", "act_fn"),
    Mlp("gate_up_proj", None, "down_proj", "activation_fn"),
    Mlp("input_linear", None, "output_linear", "activation"),  # Granite's mixtures and hybrids
    Mlp("w1", "w3", "w2", None),  # LFM2
)


def forward_gated(self: Any, x: torch.Tensor, act: Act = SILU, names: Mlp = MLPS[0]) -> torch.Tensor:
    gate, up = getattr(self, names.gate), None if names.up is None else getattr(self, names.up)
    return _multiply_down(getattr(self, names.down), gate(x), None if up is None else up(x), act)


def _multiply_down(down: Any, gate: torch.Tensor, up: torch.Tensor | None, act: Act) -> torch.Tensor:
    is_cut = getattr(down, "takes_parts", False)  # of what ranks share: parallel/tensor.py
    is_watched = any(getattr(down, hooks, None) for hooks in ("_forward_hooks", "_forward_pre_hooks"))
    if is_fused(down) and not is_watched:
        call = call_of(down, gate)
        if call is not None and call.down.dtype == gate.dtype:
            return given(down, GatedAdapted.apply(gate, up, act, *call))  # type: ignore[no-untyped-call]
    is_plain = type(down) in (torch.nn.Linear, SplitLinear, Fp8Linear) and down.bias is None
    if not (is_plain or is_cut) or is_watched:
        return down(times_kept(act, gate, up))  # type: ignore[no-any-return]
    if type(down) is Fp8Linear:
        if not gate.numel():
            return down(times_kept(act, gate, up))  # type: ignore[no-any-return]
        return GatedDownFp8.apply(gate, up, down.weight, down.rounds_again, act)  # type: ignore[no-any-return]
    weight = (down.own_weight() if is_cut else down.weight).to(gate.dtype)
    waiting = waiting_of(down, gate, weight)
    left = None if waiting is None else (waiting, weight)
    answer: torch.Tensor = GatedDown.apply(gate, up, weight.detach() if left else weight, left, act)
    return down.given(answer) if is_cut else answer
