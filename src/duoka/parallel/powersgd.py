"""PowerSGD: gradients are sent as two low-rank factors each; the residual is added to the next step's (error feedback).

Kept by parameter, not by DDP's buckets: buckets are formed anew at each start, and residuals must outlive that.
After Vogels, Karimireddy and Jaggi, "PowerSGD" (2019), with error feedback and a warm start. Called by ddp.py's hook;
checkpoints save and fill `tensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from duoka.comm.collectives import all_reduce, num_ranks

# The rank of the factors; compression begins once the first, steep steps are over.
NUM_COLUMNS, FROM_STEP = 4, 10
PREFIX = "powersgd"


@dataclass
class ThinGradient:
    """State of one parameter: this rank's residual, and the factor that the next power iteration starts from."""

    owed: torch.Tensor  # the residual (rows, columns), this rank's own
    factor: torch.Tensor  # (columns, NUM_COLUMNS), the same on all ranks
    before: tuple[torch.Tensor, torch.Tensor] | None = None  # both, ahead of the latest exchange

    def remember(self) -> None:
        self.before = self.before or (torch.empty_like(self.owed), torch.empty_like(self.factor))
        self.before[0].copy_(self.owed)
        self.before[1].copy_(self.factor)

    def take_back(self) -> None:
        if self.before is not None:
            self.owed.copy_(self.before[0])
            self.factor.copy_(self.before[1])


class PowerSGD:
    """The compressed exchange of one model's gradients; `named` are those trained, by the names of checkpoints."""

    def __init__(
        self, rank: int, named: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.group = group
        self.kept: dict[str, ThinGradient] = {}
        self.num_steps = torch.zeros((), dtype=torch.int64)
        self.is_rehearsing = False  # the gradients exchanged now are discarded
        self._by_id: dict[int, ThinGradient] = {}
        for place, (name, parameter) in enumerate(named.items()):
            rows, columns = _as_matrix(parameter).shape if parameter.is_contiguous() else (1, 1)
            if NUM_COLUMNS * (rows + columns) * 2 >= rows * columns:
                continue
            # Every rank draws the same numbers, and no global generator advances.
            generator = torch.Generator().manual_seed(place)
            factor = torch.randn(columns, NUM_COLUMNS, generator=generator).to(parameter.device)
            owed = torch.zeros(rows, columns, device=parameter.device)
            self.kept[name] = self._by_id[id(parameter)] = ThinGradient(owed, factor)

    def takes(self, bucket: dist.GradBucket) -> bool:
        """Whether this bucket is compressed. The last one of a step counts the step."""
        if self.is_rehearsing:
            return False
        is_due = int(self.num_steps) >= FROM_STEP
        self.num_steps += bucket.is_last()
        return is_due

    def sum_over_ranks(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The bucket, with nearly the sum of all ranks' in it. One exchange after the other, in the order of calls.

        On gloo there is no other way: exchanges that begin when others end do so in another order on each rank.
        """
        thin, whole = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            kept = self._by_id.get(id(parameter))
            if kept is None:
                whole.append(gradient)
            else:
                thin.append((kept, _as_matrix(gradient)))
        _sum_flat(whole, self.group)
        if not thin:
            return bucket.buffer()
        # The two products of a power iteration; what travels is their thin results, of all matrices at once.
        for kept, gradient in thin:
            kept.remember()
            kept.owed.add_(gradient)
        left = [kept.owed @ torch.linalg.qr(kept.factor).Q for kept, _ in thin]  # (rows, NUM_COLUMNS) each
        _sum_flat(left, self.group)
        left = [torch.linalg.qr(one).Q for one in left]
        right = [kept.owed.t() @ one for (kept, _), one in zip(thin, left, strict=True)]  # (columns, NUM_COLUMNS)
        _sum_flat(right, self.group)
        for (kept, gradient), rows, columns in zip(thin, left, right, strict=True):
            total = rows @ columns.t()
            gradient.copy_(total)
            kept.owed.sub_(total, alpha=1.0 / num_ranks(self.group))
            # An overflow is this step's alone: it must not come back with every step after it.
            kept.owed.nan_to_num_(0.0, 0.0, 0.0)
            kept.factor.copy_(torch.where(columns.isfinite().all(), columns, kept.factor))
        return bucket.buffer()

    def take_back(self) -> None:
        """Restore residuals and factors from before the last exchange, whose step is discarded and does not count."""
        self.num_steps -= 1
        for kept in self.kept.values():
            kept.take_back()

    # --- for checkpoints ---

    def tensors(self, model: str = "") -> dict[str, torch.Tensor]:
        """What a checkpoint keeps: factors and the count once, residuals under each rank's own name.

        `model` stands before the names where there are several.
        """
        named = {f"{PREFIX}.steps.{model}": self.num_steps}
        for name, kept in ((model + name, kept) for name, kept in self.kept.items()):
            named[f"{PREFIX}.factor.{name}"] = kept.factor
            named[_owed_name(self.rank, name)] = kept.owed
        return named


def is_ranks_own(name: str) -> bool:
    """Whether each rank saves a tensor of its own under such a name."""
    return name.startswith(f"{PREFIX}.owed.")


def changes_in_passes(names: Iterable[str]) -> bool:
    """Whether one of these tensors changes while gradients are exchanged, not only when the optimizer steps."""
    return any(name.startswith(PREFIX) for name in names)


def _owed_name(rank: int, name: str) -> str:
    return f"{PREFIX}.owed.{rank}.{name}"


@dataclass(frozen=True)
class Inheritance:
    """What to read of a checkpoint, by name, and which of it is added to what after that."""

    named: dict[str, torch.Tensor]
    debts: list[tuple[torch.Tensor, torch.Tensor]]

    def settle(self) -> None:
        for mine, others in self.debts:
            mine.add_(others)


def inherit(named: Mapping[str, torch.Tensor], saved: Collection[str], rank: int, num_ranks: int) -> Inheritance:
    """Fit `named` to a checkpoint of any number of ranks: each residual in it goes to one of the ranks of now.

    Their sum over ranks stays the same. New ranks begin with zeros; a checkpoint without residuals leaves all as is.
    """
    found = Inheritance({name: t for name, t in named.items() if name in saved or not name.startswith(PREFIX)}, [])
    for name, mine in named.items():
        other = rank + num_ranks
        while is_ranks_own(name) and (theirs := _owed_name(other, name.split(".", 3)[3])) in saved:
            found.named[theirs] = torch.empty_like(mine)
            found.debts.append((mine, found.named[theirs]))
            other += num_ranks
    return found


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1) if tensor.ndim else tensor.view(1, 1)


def _sum_flat(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Each tensor summed over the group's ranks, in place, in one exchange."""
    if not tensors:
        return
    flat = all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
