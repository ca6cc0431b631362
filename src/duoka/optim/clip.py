"""The one global gradient norm, and the limit on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from duoka.optim.host import local_part
from duoka.optim.spread import Groups, Spread, add_over, device_type, spread_of
from duoka.torch_private import foreach_mul_, foreach_norm

LetGo = Callable[[], None]  # of a gradient that was read, where it lies in a file


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], limit: float, spread: Spread = spread_of, let_go: LetGo | None = None
) -> torch.Tensor:
    """Shorten all gradients together when their global norm exceeds `limit` (0: only measure). Returns the norm.

    `spread` names the groups of ranks that hold different parts of a parameter's gradient. With `let_go` gradients are
    read one by one for the norm, and it is called after each: the numbers are the same.
    """
    parameters = list(parameters)
    norm = global_norm(parameters, spread, let_go)
    shorten(parameters, norm, limit)
    return norm


def shorten(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, limit: float) -> None:
    """Shorten gradients whose global norm is `norm` to `limit`, where that is less; 0: leave them."""
    shorten_all([local_part(p.grad) for p in parameters if p.grad is not None], norm, limit)


def shorten_all(grads: list[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """The same of gradients, or of this rank's parts of them."""
    if limit > 0 and grads:
        foreach_mul_(grads, shortening(norm, limit).to(grads[0].device))


def shortening(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients whose global norm is `norm` are multiplied by, 1 at the most."""
    # As torch.nn.utils.clip_grads_with_norm_, on each rank's own part: the norm is a plain number everywhere.
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def global_norm(
    parameters: list[torch.nn.Parameter], spread: Spread = spread_of, let_go: LetGo | None = None
) -> torch.Tensor:
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
        return _total_norm(whole, let_go)
    total = _total_norm(whole, let_go).square() if whole else torch.zeros((), device=kind)
    for groups, local in parts.items():
        square = torch.stack(_norms(local, let_go)).square().sum() if local else torch.zeros(())
        total = total.to(kind) + add_over(square, groups, kind)
    return total.sqrt()


def _total_norm(grads: list[torch.Tensor], let_go: LetGo | None) -> torch.Tensor:
    if (let_go is None and not any(grad.dtype is torch.bfloat16 for grad in grads)) or not grads:
        return torch.nn.utils.get_total_norm(grads)
    return torch.linalg.vector_norm(torch.stack(_norms(grads, let_go)))


def _norms(grads: list[torch.Tensor], let_go: LetGo | None) -> list[torch.Tensor]:
    if let_go is None:
        return _foreach(grads)
    norms: list[torch.Tensor] = []
    for grad in grads:
        norms += _foreach([grad])
        let_go()
    return norms


def _foreach(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of bf16 gradients too in fp32: a norm of 8 bits would clip by another factor."""
    narrow = any(grad.dtype is torch.bfloat16 for grad in grads)
    return list(foreach_norm(grads, dtype=torch.float32) if narrow else foreach_norm(grads))
