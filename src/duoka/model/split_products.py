"""Backward passes in two parts: what the layer before waits for at once, and the gradients of matrices later.

A pipeline's schedule asks for it (plan/pipeline.py:SPLIT). The product of a layer then gives its input's gradient, and
leaves what its weight's needs, both of which are there anyway, in the pass's `Waiting`. Vectors' gradients, those of
the head, which the loss computes in one with its own, and those of small adapters come at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_LATER = "later"


class Waiting:
    """What one backward pass left out."""

    def __init__(self) -> None:
        self._left: deque[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = deque()

    def leave(self, weight: torch.Tensor, find: Callable[[], torch.Tensor]) -> None:
        """`weight`: a parameter, or what was made of one (a cast, this rank's part), through which gradients go on."""
        self._left.append((weight, find))

    def finish(self) -> None:
        """Compute it, in the order of the backward pass; each product's tensors are let go when it is done."""
        while self._left:
            weight, find = self._left.popleft()
            with torch.no_grad():
                grad = find()
            torch.autograd.backward(weight, grad)


class Later:
    """Where the products of a model leave what can wait: in the pass under way; without one they wait for nothing.

    An attribute of an object, not of a thread: layers that are computed again are so on autograd's threads.
    """

    now: Waiting | None = None


def split_products(model: torch.nn.Module) -> Later:
    """Let trained linear layers ask where to leave their weights' gradients. In place; nothing changes until it is set.

    A head is read by the loss, and no layer.
    """
    find_head = getattr(model, "get_output_embeddings", None)
    head, later = find_head() if find_head else None, Later()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head and module.weight.requires_grad:
            setattr(module, _LATER, later)
            if type(module) is torch.nn.Linear:
                module.__class__ = SplitLinear
    return later


class SplitLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self, x, self.weight, self.bias)


def product(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear of a module that `split_products` has seen; of others it is that."""
    waiting = waiting_of(module, x, weight)
    if waiting is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    answer: torch.Tensor = _SplitProduct.apply(x, weight.detach(), bias, (waiting, weight))
    return answer


def waiting_of(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor) -> Waiting | None:
    """Where to leave a weight's gradient: only where the layer before waits for its input's."""
    later: Later | None = getattr(module, _LATER, None)
    is_apart = later is not None and x.requires_grad and weight.requires_grad and torch.is_grad_enabled()
    return later.now if later is not None and is_apart else None


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, left: tuple[Waiting, torch.Tensor]
    ) -> torch.Tensor:
        """`left`: in a tuple autograd does not see the weight, whose gradient it would take for none."""
        ctx.save_for_backward(x, weight)
        ctx.left = left
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            x_grad = (rows @ weight).view(x.shape)
            bias_grad = rows.sum(0) if ctx.needs_input_grad[2] else None
        waiting, source = ctx.left
        waiting.leave(source, lambda: rows.t() @ x.reshape(-1, x.shape[-1]))
        return x_grad, None, bias_grad, None
