"""Parts of a transformer with fewer passes over memory, and with less kept for the backward pass, than written plainly.

`apply_fused` looks for norms, gated MLPs and adapters, tries each kind beside the model's own code on random numbers,
and replaces those that answer the same. What it does not recognize stays as it is. Not for torch.compile, which fuses.
"""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import gpu_kernels, native
from duoka.model.dropout import CountedDropout, drop_units, keep_scale, level_of
from duoka.model.gated import forward_gated
from duoka.model.head import plain_adapter
from duoka.model.quantize import Packed, dtype_of, is_packed, weight_in
from duoka.model.rotary import own_rotation, repeats_tables
from duoka.torch_private import in_shape_of

CLOSE = 1e-5
_PART = "fused_part"  # of a class


def apply_fused(lm: torch.nn.Module, *, keeps_products: bool = False) -> int:
    """Replace what can be replaced, in place; returns how many modules.

    `keeps_products`: selective recompute keeps what products and attention give, as torch's operators. So adapters and
    rotations may not work in place on products, and attention is torch's.
    """
    find_head = getattr(lm, "get_output_embeddings", None)
    head = find_head() if find_head else None
    in_place = not keeps_products and not gpu_kernels.why_not()["rotation"] and repeats_tables(lm)
    count = 0
    for module in lm.modules():
        part, kind = ("", None) if module is head else _find_kind(module, not keeps_products, in_place)
        if kind is not None:
            # A class, not a method of this object: replicas that torch makes of it must not call the original.
            module.__class__ = _with_forward(type(module), kind, part)  # type: ignore[arg-type]
            count += 1
        if hasattr(module, "q_proj") and not keeps_products:
            setattr(module, native.OWN_ATTENTION, True)
    return count


def fused_parts(lm: torch.nn.Module) -> frozenset[str]:
    """The kinds of parts that were replaced, by the names of the kernels' table: norm, rotation, MLP, adapters."""
    return frozenset(filter(None, (getattr(type(module), _PART, "") for module in lm.modules())))


def _find_kind(module: torch.nn.Module, adapters: bool, in_place: bool) -> tuple[str, Any]:
    """(which part it is, the forward that takes its own's place; None: it stays)."""
    if hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
        return "norm", _forward_norm if _is_rms_norm(type(module)) else None  # type: ignore[arg-type]
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        kinds = type(module), type(module.act_fn)
        return "MLP", forward_gated if _is_gated_silu(*kinds) else None  # type: ignore[arg-type]
    if hasattr(module, "q_proj"):
        return "rotation", _forward_rotated(type(module).forward, in_place)
    if adapters and hasattr(module, "lora_A"):
        return "adapters", _forward_adapted if _is_frozen_with_adapter(module) else None
    return "", None


@functools.cache
def _with_forward(kind: type, forward: Any, part: str) -> type:
    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, _PART: part})


# --- RMS norm: x * weight / rms(x) ---


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dim = x.shape[-1]
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        dim = x.shape[-1]
        # Norms of queries and keys get a gradient whose heads and tokens are swapped: what follows lies in x's order.
        both = torch.mul(grad, x, out=torch.empty(x.shape, dtype=x.dtype)).view(-1, dim)
        flat = inverse.reshape(-1, 1)
        weight_grad = (both.t() @ flat).squeeze(1) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        # d x = (g w) / rms - x * (g . x w) / (dim rms^3)
        along = (both @ weight)[:, None].mul_(flat.pow(3)).div_(-dim).view(inverse.shape)
        x_grad = torch.mul(grad, weight, out=torch.empty(x.shape, dtype=x.dtype)).mul_(inverse).addcmul_(x, along)
        return x_grad, weight_grad, None


class NarrowRmsNorm(torch.autograd.Function):
    """The same where products are bf16, on a CPU: its answer is narrow at once, so that nobody casts it again.

    Autocast would leave that to each projection behind the norm, and each would keep its own copy.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out, inverse = native.norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        return *native.norm_backward(grad.contiguous(), x, weight, inverse, ctx.needs_input_grad[:2]), None


def _forward_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    if native.narrows(hidden_states, weight):
        narrow: torch.Tensor = NarrowRmsNorm.apply(hidden_states, weight, self.variance_epsilon)
        return narrow
    if hidden_states.is_cuda and (hidden_states.dtype == weight.dtype or torch.is_autocast_enabled("cuda")):
        return norm_on_gpu(hidden_states, weight, self.variance_epsilon)
    if hidden_states.dtype != weight.dtype:
        return super(type(self), self).forward(hidden_states)  # type: ignore[misc, no-any-return]
    if hidden_states.dtype not in (torch.float32, torch.float64):
        return super(type(self), self).forward(hidden_states)  # type: ignore[misc, no-any-return]
    answer: torch.Tensor = RmsNorm.apply(hidden_states, weight, self.variance_epsilon)
    return answer


def norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Duoka's kernel or torch's; under autocast the answer is narrow at once.

    Autocast would widen a narrow input, and leave it to every projection behind the norm to cast the same numbers again
    and to keep its own copy of them.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    with torch.autocast("cuda", enabled=False):
        if gpu_kernels.takes("norm", x, weight):
            return gpu_kernels.norm(x, weight, eps, dtype)
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(dtype)


@functools.cache
def _is_rms_norm(kind: type) -> bool:
    stub = SimpleNamespace(weight=_draw(8), variance_epsilon=1e-3)
    return _answers_alike(kind, stub, _draw(3, 8), lambda x: RmsNorm.apply(x, stub.weight, 1e-3))


# --- rotary embedding: written out in the attention's forward, by a function of its file ---

_ROTATION = "apply_rotary_pos_emb"


@functools.cache
def _forward_rotated(forward: Any, in_place: bool) -> Any:
    """The same forward with our rotation in place of the one that it calls; None when it calls none that we know.

    `in_place`: it may write over the products that it turns, and read half of the tables.
    """
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:  # decorated, as where an argument has another name since a later version
        again = _forward_rotated(inner, in_place)
        return None if again is None else _decorated(forward, inner, again)
    if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names or forward.__closure__:
        return None
    ours = own_rotation(forward.__globals__.get(_ROTATION), in_place)
    return None if ours is None else _copy(forward, {**forward.__globals__, _ROTATION: ours}, None)


def _decorated(outer: Any, inner: Any, again: Any) -> Any:
    """The decorator's function, around `again` in place of `inner`; None where that is not to be seen in it."""
    cells = outer.__closure__ or () if isinstance(outer, FunctionType) else ()
    held = [cell.cell_contents is inner for cell in cells]
    if held.count(True) != 1:
        return None
    closure = tuple(CellType(again) if it else cell for it, cell in zip(held, cells, strict=True))
    copy = _copy(outer, outer.__globals__, closure)
    copy.__wrapped__ = again
    return copy


def _copy(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> Any:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# --- gated MLP: down(silu(gate(x)) * up(x)) (gated.py) ---


@functools.cache
def _is_gated_silu(kind: type, activation: type) -> bool:
    gate, up, down = _draw(8, 12), _draw(8, 12), _draw(12, 8)
    try:
        act = activation()
    except TypeError:
        return False
    stub = SimpleNamespace(
        gate_proj=lambda x: x @ gate, up_proj=lambda x: x @ up, down_proj=lambda x: x @ down, act_fn=act
    )
    return _answers_alike(kind, stub, _draw(3, 8), lambda x: forward_gated(stub, x))


def _draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator)


def _answers_alike(kind: type, stub: Any, x: torch.Tensor, ours: Any) -> bool:
    """Does the class's own forward, on an object with nothing but what we know of, give what ours gives?"""
    if len(inspect.signature(kind.forward).parameters) != 2:  # type: ignore[attr-defined]
        return False  # it can be given more than we know of, as a gate beside a norm's input
    try:
        want = kind.forward(stub, x)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, RuntimeError):
        return False  # it reads something that we do not know of
    return isinstance(want, torch.Tensor) and torch.allclose(ours(x), want, rtol=CLOSE, atol=CLOSE)


# --- adapters beside a frozen layer: x W + scale (x A) B ---


class AdaptedProduct(torch.autograd.Function):
    """The small products are added inside the large ones' results: no pass over memory of their own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None, down: torch.Tensor,
        up: torch.Tensor, scale: float, keys: torch.Tensor | None = None, place: int = 0, level: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """With `keys`, the adapter's input is dropped as `place` and `level` say; the mask is computed again later.

        A packed weight is unpacked for each product, forward and backward.
        """
        flat = x.reshape(-1, x.shape[-1])
        read = flat
        if keys is not None:
            scale *= keep_scale(level)
            read = drop_units(flat, keys, place, level)
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(flat, _unpacked(weight, flat.dtype), bias)
            low = read @ down.t()
            out.addmm_(low, up.t(), alpha=scale)
        kept, ctx.packed = (None, weight) if isinstance(weight, Packed) else (weight, None)
        ctx.save_for_backward(flat, kept, down, up, low, keys)
        ctx.scale, ctx.place, ctx.level = scale, place, level
        return in_shape_of(x, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, kept, down, up, low, keys = ctx.saved_tensors
        weight = kept if ctx.packed is None else ctx.packed
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            # Thin matrices lie down, (rank, rows): standing up, CPU libraries take up to 12 times as long for these.
            low_grad = (up.t() @ rows.t()).mul_(ctx.scale)
            x_grad = None
            if keys is not None:
                if ctx.needs_input_grad[0]:
                    x_grad = drop_units(low_grad.t() @ down, keys, ctx.place, ctx.level, in_place=True)
                    x_grad = x_grad.addmm_(rows, _unpacked(weight, rows.dtype)).view(*grad.shape[:-1], -1)
                flat = drop_units(flat, keys, ctx.place, ctx.level)
            elif ctx.needs_input_grad[0]:
                x_grad = (rows @ _unpacked(weight, rows.dtype)).addmm_(low_grad.t(), down).view(*grad.shape[:-1], -1)
            down_grad = low_grad @ flat if ctx.needs_input_grad[3] else None
            up_grad = (low.t() @ rows).mul_(ctx.scale).t() if ctx.needs_input_grad[4] else None
        return x_grad, None, None, down_grad, up_grad, None, None, None, None


def _unpacked(weight: torch.Tensor | Packed, dtype: torch.dtype) -> torch.Tensor:
    return weight.unpack(dtype) if isinstance(weight, Packed) else weight


def _forward_adapted(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    name = self.active_adapters[0]
    drop = self.lora_dropout[name]
    keys = drop.counted_keys(x) if isinstance(drop, CountedDropout) else None
    is_drawn = keys is None and self.training and not isinstance(drop, _NO_DROPOUT)
    # Rows and tokens may lie in one dim (OPT's MLP, shared experts).
    fits = keys is None or x.shape[:-1] in (keys.shape, (keys.numel(),))
    if args or kwargs or self.disable_adapters or self.merged or is_drawn or not fits:
        return super(type(self), self).forward(x, *args, **kwargs)  # type: ignore[misc, no-any-return]
    base, is_narrowed = self.base_layer, torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_narrowed else dtype_of(base)
    bias = None if base.bias is None else base.bias.to(dtype)
    answer: torch.Tensor = AdaptedProduct.apply(
        x.to(dtype), weight_in(base, dtype), bias, self.lora_A[name].weight.to(dtype),
        self.lora_B[name].weight.to(dtype), self.scaling[name],
        *(() if keys is None else (keys.reshape(-1), drop.place, level_of(drop.p))),
    )  # fmt: skip
    return answer


_NO_DROPOUT = torch.nn.Identity


def _is_frozen_with_adapter(module: Any) -> bool:
    name = plain_adapter(module)
    if name is None or not (type(module.base_layer) is torch.nn.Linear or is_packed(module.base_layer)):
        return False
    frozen = not any(p.requires_grad for p in module.base_layer.parameters())
    return frozen and isinstance(module.lora_dropout[name], (_NO_DROPOUT, CountedDropout))
