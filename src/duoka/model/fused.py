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
from duoka.model.adapted import forward_adapted, is_frozen_with_adapter
from duoka.model.gated import forward_gated
from duoka.model.remade import can_be_remade
from duoka.model.rotary import own_rotation, repeats_tables

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
        return "adapters", forward_adapted if is_frozen_with_adapter(module) else None
    return "", None


@functools.cache
def _with_forward(kind: type, forward: Any, part: str) -> type:
    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, _PART: part})


# --- RMS norm: x * weight / rms(x) ---


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, inverse = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

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


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * weight / rms(x), 1 / rms of each row)."""
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight), inverse


class NarrowRmsNorm(torch.autograd.Function):
    """The same where products are bf16, on a CPU: its answer is narrow at once, so that nobody casts it again.

    Autocast would leave that to each projection behind the norm, and each would keep its own copy.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: contiguous."""
        out, inverse = native.norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        return *native.norm_backward(grad.contiguous(), x, weight, inverse, ctx.needs_input_grad[:2]), None


def _forward_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x, weight, eps = hidden_states, self.weight, self.variance_epsilon
    if native.narrows(x, weight):
        x = x.contiguous()  # here, so that what makes it again keeps no other
        narrow: torch.Tensor = NarrowRmsNorm.apply(x, weight, eps)
        return can_be_remade(narrow, lambda x, weight: native.norm_forward(x, weight, eps)[0], x, weight)
    if x.is_cuda and (x.dtype == weight.dtype or torch.is_autocast_enabled("cuda")):
        return norm_on_gpu(x, weight, eps)
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        return super(type(self), self).forward(x)  # type: ignore[misc, no-any-return]
    answer: torch.Tensor = RmsNorm.apply(x, weight, eps)
    return can_be_remade(answer, lambda x, weight: _norm(x, weight, eps)[0], x, weight)


def norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Duoka's kernel or torch's; under autocast the answer is narrow at once.

    Autocast would widen a narrow input, and leave it to every projection behind the norm to cast the same numbers again
    and to keep its own copy of them.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    norm = functools.partial(_norm_to, eps=eps, dtype=dtype)
    return can_be_remade(norm(x, weight), norm, x, weight)


def _norm_to(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
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
