"""Adapters beside a frozen layer, x W + scale (x A) B: the small products are added inside the large ones' results.

Where x is cheap to make again (remade.py) it is not kept: an adapter reads it for the gradient of its A alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from duoka.model.dropout import CountedDropout, drop_units, keep_scale, level_of
from duoka.model.head import here, plain_adapter
from duoka.model.quantize import Packed, dtype_of, is_packed, weight_in
from duoka.model.remade import Remade, remade
from duoka.torch_private import in_shape_of

_NO_DROPOUT = torch.nn.Identity


class Call(NamedTuple):
    """What one call multiplies with, as the functions of autograd take it behind their input.

    With `keys`, the adapter's input is dropped as `place` and `level` say; the mask is computed again later. A packed
    weight is unpacked for each product, forward and backward.
    """

    weight: torch.Tensor | Packed
    bias: torch.Tensor | None
    down: torch.Tensor
    up: torch.Tensor
    scale: float
    keys: torch.Tensor | None = None
    place: int = 0
    level: int = 0

    def dropped(self, x: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        return x if self.keys is None else drop_units(x, self.keys, self.place, self.level, in_place=in_place)

    @property
    def full_scale(self) -> float:
        return self.scale if self.keys is None else self.scale * keep_scale(self.level)


def multiply(ctx: Any, flat: torch.Tensor, call: Call, *sources: torch.Tensor | None) -> torch.Tensor:
    """Of rows; keeps what `rebuilt` and the gradients ask for: `sources`, of which `flat` is made again, or is one."""
    with torch.autocast(flat.device.type, enabled=False):
        out = F.linear(flat, _unpacked(call.weight, flat.dtype), call.bias)
        low = call.dropped(flat) @ call.down.t()
        out.addmm_(low, call.up.t(), alpha=call.full_scale)
    kept, packed = (None, call.weight) if isinstance(call.weight, Packed) else (call.weight, None)
    ctx.save_for_backward(*sources, kept, call.down, call.up, low, call.keys)
    ctx.packed, ctx.numbers = packed, (call.scale, call.place, call.level)
    return out


@dataclass(frozen=True)
class Gradients:
    """Of one call, from that of what it gave: rows of it."""

    rows: torch.Tensor
    call: Call
    low: torch.Tensor  # x A
    low_grad: torch.Tensor

    def of_input(self) -> torch.Tensor:
        call, rows = self.call, self.rows
        with torch.autocast(rows.device.type, enabled=False):
            if call.keys is None:
                return (rows @ _unpacked(call.weight, rows.dtype)).addmm_(self.low_grad.t(), call.down)
            x_grad = call.dropped(self.low_grad.t() @ call.down, in_place=True)
            return x_grad.addmm_(rows, _unpacked(call.weight, rows.dtype))

    def of_down(self, flat: torch.Tensor) -> torch.Tensor:
        with torch.autocast(flat.device.type, enabled=False):
            return self.low_grad @ self.call.dropped(flat)

    def of_up(self) -> torch.Tensor:
        with torch.autocast(self.rows.device.type, enabled=False):
            return (self.low.t() @ self.rows).mul_(self.call.full_scale).t()


def rebuilt(ctx: Any, grad: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Gradients]:
    """(the sources, what finds the gradients)."""
    *sources, kept, down, up, low, keys = ctx.saved_tensors
    scale, place, level = ctx.numbers
    call = Call(kept if ctx.packed is None else ctx.packed, None, down, up, scale, keys, place, level)
    rows = grad.reshape(-1, grad.shape[-1])
    with torch.autocast(grad.device.type, enabled=False):
        # Thin matrices lie down, (rank, rows): standing up, CPU libraries take up to 12 times as long for these.
        low_grad = (up.t() @ rows.t()).mul_(call.full_scale)
    return tuple(sources), Gradients(rows, call, low, low_grad)


class AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None, down: torch.Tensor,
        up: torch.Tensor, scale: float, keys: torch.Tensor | None = None, place: int = 0, level: int = 0,
        again: Remade | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`again`: how x is made of what is kept in its place."""
        flat = x.reshape(-1, x.shape[-1])
        ctx.recipe = None if again is None else again.recipe
        if again is not None:
            again.recipe.add_reader()
        sources = (flat,) if again is None else again.sources
        return in_shape_of(x, multiply(ctx, flat, Call(weight, bias, down, up, scale, keys, place, level), *sources))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        sources, gradients = rebuilt(ctx, grad)
        x_grad = gradients.of_input().view(*grad.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        down_grad = None
        if ctx.needs_input_grad[3]:
            x = sources[0] if ctx.recipe is None else ctx.recipe.make(sources).to(grad.dtype)
            down_grad = gradients.of_down(x.reshape(-1, x.shape[-1]))
        up_grad = gradients.of_up() if ctx.needs_input_grad[4] else None
        return x_grad, None, None, down_grad, up_grad, None, None, None, None, None


def _unpacked(weight: torch.Tensor | Packed, dtype: torch.dtype) -> torch.Tensor:
    return weight.unpack(dtype) if isinstance(weight, Packed) else weight


def call_of(module: Any, x: torch.Tensor) -> Call | None:
    """What a layer with an adapter multiplies x with, or what is shaped so; None: PEFT's forward has to."""
    name = module.active_adapters[0]
    drop = module.lora_dropout[name]
    keys = drop.counted_keys(x) if isinstance(drop, CountedDropout) else None
    is_drawn = keys is None and module.training and not isinstance(drop, _NO_DROPOUT)
    # Rows and tokens may lie in one dim (OPT's MLP, shared experts).
    fits = keys is None or x.shape[:-1] in (keys.shape, (keys.numel(),))
    if module.disable_adapters or module.merged or is_drawn or not fits:
        return None
    base, is_narrowed = module.base_layer, torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_narrowed else dtype_of(base)
    adds_bias = base.bias is not None and not getattr(base, "takes_parts", False)  # else to what ranks sum up
    bias = here(base.bias).to(dtype) if adds_bias else None
    down, up = (here(one[name].weight).to(dtype) for one in (module.lora_A, module.lora_B))
    weight = weight_in(base, dtype) if is_packed(base) else here(base.weight).to(dtype)
    call = Call(weight, bias, down, up, module.scaling[name])
    return call if keys is None else call._replace(keys=keys.reshape(-1), place=drop.place, level=level_of(drop.p))


def forward_adapted(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    is_plain = not (args or kwargs)
    call = call_of(self, x) if is_plain else None
    if call is None and is_plain and _is_shared(self.base_layer) and not (self.disable_adapters or self.merged):
        return _forward_steps(self, x)
    if call is None:
        return super(type(self), self).forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]
    answer: torch.Tensor = AdaptedProduct.apply(x.to(call.down.dtype), *call, remade(x))
    return given(self, answer)


def given(module: Any, out: torch.Tensor) -> torch.Tensor:
    """What a layer with an adapter gives; of one that ranks share (parallel/tensor.py), out of this rank's."""
    base = module.base_layer
    whole: torch.Tensor = base.given(out) if hasattr(base, "given") else out
    return whole


def is_fused(module: Any) -> bool:
    return getattr(type(module), "forward", None) is forward_adapted


def is_frozen_with_adapter(module: Any) -> bool:
    name = plain_adapter(module)
    if name is None:
        return False
    base = module.base_layer
    if not (type(base) is torch.nn.Linear or is_packed(base) or _is_shared(base)):
        return False
    frozen = not any(p.requires_grad for p in base.parameters())
    return frozen and isinstance(module.lora_dropout[name], (_NO_DROPOUT, CountedDropout))


def _is_shared(base: Any) -> bool:
    """Whether ranks have parts of a layer's weight, and each computes its adapter's part with it."""
    return bool(getattr(base, "adapts_parts", False))


def _forward_steps(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a layer that ranks share, where `call_of` has none: PEFT's forward would sum x A over ranks, and then the
    gradient of B be whole on each."""
    name, base = module.active_adapters[0], module.base_layer
    low = F.linear(module.lora_dropout[name](x), here(module.lora_A[name].weight))
    bias = None if getattr(base, "takes_parts", False) else here(base.bias)
    out = F.linear(x, here(base.weight), bias)
    return given(module, out + module.scaling[name] * F.linear(low, here(module.lora_B[name].weight)))
