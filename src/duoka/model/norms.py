"""RMS norms in place of a model's own: x * weight / rms(x), or with 1 + weight, as Gemma and Qwen3.5 have it.

What a norm gives can be made again (remade.py), so that adapters need not keep it.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import gpu_kernels, native
from duoka.model.alike import answers_alike, draw
from duoka.model.remade import can_be_remade

_EPSILONS = ("variance_epsilon", "eps")


def may_be_norm(module: torch.nn.Module) -> bool:
    has_scale = isinstance(getattr(module, "weight", None), torch.Tensor)  # a class may have some without
    return has_scale and any(hasattr(module, name) for name in _EPSILONS)


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


@functools.cache
def forward_normed(kind: type) -> Any:
    """Our forward for norms of this class; None when it answers otherwise."""
    for epsilon, shift in itertools.product(_EPSILONS, (0.0, 1.0)):
        stub = SimpleNamespace(weight=draw(8), with_scale=True, **{epsilon: 1e-3})
        if callable(inner := getattr(kind, "_norm", None)):
            stub._norm = functools.partial(inner, stub)
        if answers_alike(kind, stub, draw(3, 8), lambda x, w=stub.weight + shift: RmsNorm.apply(x, w, 1e-3)):
            return _forward_by(epsilon, shift)
    return None


def _forward_by(epsilon: str, shift: float) -> Any:
    def forward(self: Any, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (x,) = (*inputs, *named.values())  # of one, whatever the model calls it
        return _forward_norm(self, x, getattr(self, epsilon), shift)

    return forward


def _forward_norm(self: Any, x: torch.Tensor, eps: float, shift: float) -> torch.Tensor:
    weight = self.weight.float() + shift if shift else self.weight
    if native.narrows(x, weight):
        x = x.contiguous()  # here, so that what makes it again keeps no other
        narrow: torch.Tensor = NarrowRmsNorm.apply(x, weight, eps)
        return can_be_remade(narrow, lambda x, weight: native.norm_forward(x, weight, eps)[0], x, weight)
    if x.is_cuda and (x.dtype == weight.dtype or torch.is_autocast_enabled("cuda")):
        return norm_on_gpu(x, weight, eps, is_shifted=bool(shift))
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        return super(type(self), self).forward(x)  # type: ignore[misc, no-any-return]
    answer: torch.Tensor = RmsNorm.apply(x, weight, eps)
    return can_be_remade(answer, lambda x, weight: _norm(x, weight, eps)[0], x, weight)


def norm_on_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_shifted: bool = False) -> torch.Tensor:
    """Duoka's kernel or torch's; under autocast the answer is narrow at once.

    Autocast would widen a narrow input, and leave it to every projection behind the norm to cast the same numbers again
    and to keep its own copy of them.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    norm = functools.partial(_norm_to, eps=eps, dtype=dtype, is_shifted=is_shifted)
    return can_be_remade(norm(x, weight), norm, x, weight)


def _norm_to(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, is_shifted: bool) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        if gpu_kernels.takes("norm", x, weight):
            return gpu_kernels.norm(x, weight, eps, dtype)
        if is_shifted:  # its weight is wide, and rounded to what x is the 1 in it would swallow the rest
            x = x.float()
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(dtype)
