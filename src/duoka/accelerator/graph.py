"""What a loss reaches: which prepared models had a part in it, and which tensors outside of them get gradients.

A prepared model's answers are marked in autograd's graph, so that a walk from the loss need not go into the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from duoka.accelerator.nested import tensors_in

_MARK = "duoka"


@dataclass(frozen=True)
class Call:
    """One call of a prepared model: what came in that has gradients of its own."""

    model: Any
    inputs: tuple[torch.Tensor, ...]


@dataclass
class Reach:
    """`models`: those that have a part in a loss; `leaves`: tensors of no prepared model that get gradients."""

    models: list[Any] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


def mark_call(model: Any, inputs: Any, answer: Any) -> None:
    """`model.before_gradients` will see, and may change, all gradients that enter this call of the model."""
    call = Call(model, tuple(tensor for tensor in tensors_in(inputs) if tensor.requires_grad))
    answers = list(_answers_in(answer))
    nodes = {tensor.grad_fn for tensor in answers if tensor.grad_fn is not None}
    for node in nodes:
        node.metadata.setdefault(_MARK, []).append(call)
        node.register_prehook(model.before_gradients)
    model.is_opaque = not answers


def find_reach(loss: torch.Tensor, known: set[int]) -> Reach:
    """Walk from `loss` to the calls of prepared models and to other leaves; `known`: parameters of those models."""
    reach = Reach()
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves[id(leaf)] = leaf
            continue
        calls = node.metadata.get(_MARK, ())
        is_passed_on = not calls
        for call in calls:
            reach.models += [] if call.model in reach.models else [call.model]
            for tensor in call.inputs:
                is_passed_on = is_passed_on or tensor.grad_fn is node  # a model that answers with what it was given
                if tensor.grad_fn is None:
                    leaves[id(tensor)] = tensor
                stack.append(tensor.grad_fn)
        if is_passed_on:
            stack += [one for one, _ in node.next_functions]
    reach.leaves = [leaf for place, leaf in leaves.items() if place not in known]
    return reach


@contextlib.contextmanager
def scaled_leaves(leaves: Iterable[torch.Tensor], factor: Any) -> Iterator[None]:
    """Gradients that come to `leaves` inside are multiplied with `factor`."""
    if not isinstance(factor, torch.Tensor) and factor in (0.0, 1.0):
        yield
        return

    def scale(grad: torch.Tensor) -> torch.Tensor:
        return grad * (factor.to(grad) if isinstance(factor, torch.Tensor) else factor)

    hooks = [leaf.register_hook(scale) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _answers_in(answer: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors of an answer, also where it is a user's own object."""
    found = list(tensors_in(answer))
    yield from found
    if not found and depth and hasattr(answer, "__dict__"):
        for part in vars(answer).values():
            yield from _answers_in(part, depth - 1)
