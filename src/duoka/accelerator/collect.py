"""Collectives over nested structures: gathered, reduced, sent from one rank to all, padded to one shape.

Ranks tell each other the shapes before they gather: what does not fit is an error that names both, never a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from duoka.accelerator.nested import map_tensors, parts_of, rebuild, tensors_in
from duoka.comm.world import World
from duoka.errors import ConfigError


@dataclass(frozen=True)
class Collector:
    """Collectives of one world. `checks`: also those that need no shapes compare them first."""

    world: World
    checks: bool = False

    def gather(self, value: Any, *, drop: bool = False) -> Any:
        """Every rank's tensors, end to end; other things in lists. Ranks may hold different numbers of rows.

        `drop`: this rank's part is filling, and is left out.
        """
        if self.world.size == 1:
            return _nothing(_alone(value)) if drop else _alone(value)
        leaves = _leaves(value)
        rows = [self._row(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rows = [row[:0] if drop else row for row in rows]
        lists = [[] if drop else _things_in(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        everyone = self.world.gather(([_describe(row) for row in rows], lists))
        _check_alike("gather", [facts for facts, _ in everyone], rows_may_differ=True)
        tensors = iter(
            [self._gather_rows(row, [facts[i][0][0] for facts, _ in everyone]) for i, row in enumerate(rows)]
        )
        things = iter([[one for _, theirs in everyone for one in theirs[i]] for i in range(len(lists))])
        return _refill(value, lambda leaf: next(tensors if isinstance(leaf, torch.Tensor) else things))

    def gather_objects(self, things: list[Any]) -> list[Any]:
        return [thing for part in self.world.gather(things) for thing in part]

    def _row(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(self.world.device)
        return (tensor[None] if tensor.ndim == 0 else tensor).contiguous()

    def _gather_rows(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        most = max(rows)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def reduce(self, value: Any, how: str = "mean", scale: float = 1.0) -> Any:
        """Sum, mean or max over ranks, of copies: what is given stays as it is."""
        if how not in ("sum", "mean", "max", "none"):
            raise ConfigError(f"reduce knows sum, mean and max, not {how!r}")
        if self.checks and self.world.size > 1:
            self.check("reduce", value)

        def one(tensor: torch.Tensor) -> torch.Tensor:
            total = tensor.detach().to(self.world.device, copy=True)
            if self.world.size > 1 and how != "none":
                dist.all_reduce(total, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
            # Divided afterwards: gloo has no mean of whole numbers.
            total = total / self.world.size if how == "mean" else total
            return total * scale if scale != 1.0 else total

        return map_tensors(value, one)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The tensors of rank `source` on every rank."""
        if self.world.size == 1:
            return value
        if self.checks:
            self.check("broadcast", value)

        def one(tensor: torch.Tensor) -> torch.Tensor:
            sent = tensor.detach().to(self.world.device, copy=True)
            dist.broadcast(sent, src=source)
            return sent

        return map_tensors(value, one)

    def broadcast_objects(self, things: list[Any], source: int = 0) -> list[Any]:
        """Rank `source`'s things, also written into the list that was given."""
        if self.world.size > 1:
            dist.broadcast_object_list(things, src=source, device=self.world.device)
        return things

    def pad(self, value: Any, axis: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors made as long as the longest of all ranks along `axis`."""

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if axis >= tensor.ndim or axis < -tensor.ndim:
                return tensor
            most = max(self.world.gather(int(tensor.shape[axis])))
            missing = most - tensor.shape[axis]
            if not missing:
                return tensor
            shape = list(tensor.shape)
            shape[axis] = missing
            filling = tensor.new_full(shape, pad_index)
            return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=axis)

        return map_tensors(value, one)

    def check(self, verb: str, value: Any) -> None:
        facts = [_describe(tensor) for tensor in tensors_in(value)]
        _check_alike(verb, self.world.gather(facts), rows_may_differ=False)


Facts = tuple[tuple[int, ...], str]


def _describe(tensor: torch.Tensor) -> Facts:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _check_alike(verb: str, everyone: list[list[Facts]], rows_may_differ: bool) -> None:
    """Refuse what no collective can do, on all ranks at once, with the shapes of both."""

    def comparable(facts: list[Facts]) -> list[Facts]:
        return [(shape[1:] if rows_may_differ else shape, kind) for shape, kind in facts]

    for rank, facts in enumerate(everyone):
        if comparable(facts) == comparable(everyone[0]):
            continue
        if len(facts) != len(everyone[0]):
            raise ConfigError(
                f"{verb}: rank 0 brings {len(everyone[0])} tensors and rank {rank} brings {len(facts)}",
                where=f"rank 0: {_shown(everyone[0])}\nrank {rank}: {_shown(facts)}",
                fix="call it on every rank with the same structure",
            )
        fix = "bring them to one length first:   accelerator.pad_across_processes(value, dim=1)"
        if verb != "gather":
            fix = "give every rank the same shape, or use accelerator.gather, which takes different numbers of rows"
        raise ConfigError(
            f"{verb}: the tensors of rank 0 and rank {rank} do not fit together",
            where=f"rank 0: {_shown(everyone[0])}\nrank {rank}: {_shown(facts)}",
            fix=fix,
        )


def _shown(facts: list[Facts]) -> str:
    return ", ".join(f"{kind} {tuple(shape)}" for shape, kind in facts) or "none"


def _things_in(value: Any) -> list[Any]:
    """What a rank gives to a gathered list: the members of a list, or the one thing."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _leaves(value: Any) -> list[Any]:
    """Tensors, and what holds none: a list of texts is one thing, a pair of a tensor and such a list is two."""
    if isinstance(value, torch.Tensor) or not any(True for _ in tensors_in(value)):
        return [value]
    return [leaf for part in parts_of(value) for leaf in _leaves(part)]


def _refill(value: Any, fill: Callable[[Any], Any]) -> Any:
    """The same structure with `fill` of each of its leaves."""
    if isinstance(value, torch.Tensor) or not any(True for _ in tensors_in(value)):
        return fill(value)
    return rebuild(value, [_refill(part, fill) for part in parts_of(value)])


def _alone(value: Any) -> Any:
    """What gathering gives in a world of one: the same forms as in larger ones."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _things_in(leaf)
        return leaf.detach()[None] if leaf.ndim == 0 else leaf.detach()

    return _refill(value, one)


def _nothing(value: Any) -> Any:
    return _refill(value, lambda leaf: leaf[:0])
