"""Norms with a gate beside what they norm (Mamba 2, Qwen3.5, Kimi Linear): what they read is kept, and nothing else.

Autograd keeps four to six wide tensors of such a norm. Here the backward pass computes it again by the model's own
code, some rows after the others, which a processor's caches hold.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from duoka.model.alike import CLOSE, draw

# Numbers that are computed together.
AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 28}


def forward_gated_norm(module: torch.nn.Module) -> Any:
    """Our forward for this class of norms; None where it is something else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if list(inspect.signature(module.forward).parameters) != ["hidden_states", "gate"]:
        return None
    x, gate = (draw(1, rows, len(weight))[:, :4] for rows in (4, 5))
    code = type(module).forward
    norm = functools.partial(_answer, code, module, draw(len(weight)))
    try:
        with torch.no_grad():
            whole, halves = norm(x, gate), [norm(x[:, some], gate[:, some]) for some in (slice(2), slice(2, 4))]
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None  # it reads something that we do not know of
    is_by_row = torch.allclose(whole, torch.cat(halves, dim=1), rtol=CLOSE, atol=CLOSE)
    return _forward_by(code) if is_by_row else None


@functools.cache
def _forward_by(code: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is None or gate.shape != hidden_states.shape:
            return code(self, hidden_states, gate)  # type: ignore[no-any-return]
        return _Again.apply(code, self, hidden_states, gate, self.weight)  # type: ignore[no-any-return, no-untyped-call]

    return forward


def _answer(code: Any, module: Any, weight: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """What the model's own code gives with this weight; the object's own stays where it is."""
    again = object.__new__(type(module))
    again.__dict__ = {**module.__dict__, "_parameters": {"weight": weight}}
    answer: torch.Tensor = code(again, x, gate)
    return answer


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, code: Any, module: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.norm = functools.partial(_answer, code, module)
        rows, gates = (one.reshape(1, -1, x.shape[-1]) for one in (x, gate))
        return torch.cat([ctx.norm(weight, rows[:, some], gates[:, some]) for some in _rows(rows)], dim=1).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight = ctx.saved_tensors  # once: what is computed again comes once
        shape = x.shape
        x, gate, gradient = (one.reshape(1, -1, shape[-1]) for one in (x, gate, gradient))
        of_x, of_gate = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x, gate))
        of_weight = torch.zeros_like(weight)
        for some in _rows(x):
            own = [one.detach().requires_grad_() for one in (x[:, some], gate[:, some], weight)]
            with torch.enable_grad():
                found = ctx.norm(own[2], *own[:2])
            of_x[:, some], of_gate[:, some], part = torch.autograd.grad(found, own, gradient[:, some])
            of_weight += part
        return None, None, of_x.view(shape), of_gate.view(shape), of_weight


def _rows(x: torch.Tensor) -> Iterator[slice]:
    at_once = max(1, AT_ONCE.get(x.device.type, AT_ONCE["cuda"]) // x.shape[-1])
    for first in range(0, max(1, x.shape[1]), at_once):
        yield slice(first, first + at_once)
