"""The one global gradient norm, and the limit on it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from duoka.optim.host import local_part
from duoka.optim.spread import Groups, Spread, add_over, device_type, spread_of
from duoka.torch_private import foreach_mul_, foreach_norm


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float, spread: Spread = spread_of) -> torch.Tensor:
    """Shorten all gradients together when their global norm exceeds `limit` (0: only measure). Returns the norm.

    `spread` names the groups of ranks that hold different parts of a parameter's gradient.
    """
    parameters = list(parameters)
    norm = global_norm(parameters, spread)
    shorten(parameters, norm, limit)
    return norm


def shorten(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Shorten gradients whose global norm is `norm` to `limit`, where that is less; 0: leave them."""
    shorten_all([local_part(p.grad) for p in parameters if p.grad is not None], norm, limit)


def shorten_all(grads: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """The same of gradients, or of this rank's parts of them."""
    if limit > 0 and grads:
        # As torch.nn.utils.clip_grads_with_norm_, on each rank's own part: the norm is a plain number everywhere.
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        foreach_mul_(grads, factor.to(grads[0].device))


def global_norm(parameters: list[torch.nn.Parameter], spread: Spread = spread_of) -> torch.Tensor:
    """The norm over all ranks: squares are added over the ranks that hold different parts of a tensor."""
    parts: dict[Groups, list[torch.Tensor]] = {}
    for parameter in parameters:
        # A rank that holds nothing of a spread gradient still comes to the sum.
        part = parts.setdefault(spread(parameter), [])
        if parameter.grad is not None:
            part.append(local_part(parameter.grad))
    kind = device_type(parameters)
    whole = parts.pop((), [])
    if not parts:
        return torch.nn.utils.get_total_norm(whole)
    total = torch.nn.utils.get_total_norm(whole).square() if whole else torch.zeros((), device=kind)
    for groups, local in parts.items():
        square = torch.stack(foreach_norm(local)).square().sum() if local else torch.zeros(())
        total = total.to(kind) + add_over(square, groups, kind)
    return total.sqrt()
