"""Whole matrices for Muon where ranks share the work: owners, and how matrices come to them and go back.

`OwnedMatrices` (zero1, zero2): weights are whole on every rank, gradients go to the owner in the backward pass, new
weights come back after the step. `RowMatrices` (fsdp, hsdp): each rank keeps rows of everything; what moves is the
blended gradient, once there and once back. Both are all-to-alls, so the bytes on the wire are the bytes that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.comm.collectives import TimedWork, all_to_all, start_all_to_all
from duoka.errors import ConfigError
from duoka.optim.owners import Bucket, share_matrices


@dataclass
class Underway:
    """A bucket's gradients on their way to their owners."""

    work: TimedWork | None
    arriving: torch.Tensor
    sent: torch.Tensor  # kept alive until it has left


@dataclass
class OwnedMatrices:
    """Each matrix has one rank that keeps its gradient sum and its momentum; the weights are on all ranks.

    Gradients leave bucket by bucket, in a fixed order, as the backward pass completes them: of the step's last
    micro-batch only, or of each (`every_pass`), when no rank should keep gradients that are not its own.
    """

    matrices: Sequence[torch.nn.Parameter]
    num_ranks: int
    rank: int
    group: dist.ProcessGroup | None
    every_pass: bool
    wire: torch.dtype = torch.float32  # how gradients travel; they are added in fp32
    buckets: list[Bucket] = field(init=False)

    def __post_init__(self) -> None:
        # The last layer's gradients come first.
        shapes = [(p.shape[0], p.shape[1]) for p in reversed(self.matrices)]
        last = len(shapes) - 1
        self.buckets = [
            Bucket(bucket.shape, tuple(last - member for member in bucket.members), bucket.owners)
            for bucket in share_matrices(shapes, self.num_ranks)
        ]
        self._owner = {
            id(self.matrices[member]): owner
            for bucket in self.buckets
            for member, owner in zip(bucket.members, bucket.owners, strict=True)
        }
        bucket_of = {member: number for number, bucket in enumerate(self.buckets) for member in bucket.members}
        self._sums: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        self._active = False
        self._reset()
        for place, parameter in enumerate(self.matrices):
            number = bucket_of[place]
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._arrived(number, p))

    def holds(self, parameter: torch.Tensor) -> bool:
        return self._owner[id(parameter)] == self.rank

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether the matrix is shared by this object at all."""
        return id(parameter) in self._owner

    def _reset(self) -> None:
        self._missing = [len(bucket.members) for bucket in self.buckets]
        self._underway: list[Underway] = []

    def begin(self, last: bool) -> None:
        """Before a micro-batch: do its gradients travel?"""
        self._active = last or self.every_pass
        self._reset()

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        self._seen.add(id(parameter))
        if not self._active:
            return
        self._missing[number] -= 1
        # In the order of buckets, on every rank the same: collectives of one group must never cross.
        while len(self._underway) < len(self.buckets) and not self._missing[len(self._underway)]:
            self._send(self.buckets[len(self._underway)])

    def _send(self, bucket: Bucket) -> None:
        parts = []
        for rank in range(self.num_ranks):
            for member in bucket.owned_by(rank):
                parameter = self.matrices[member]
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                parts.append(gradient.reshape(-1).to(self.wire))
        sent = torch.cat(parts)
        size = bucket.shape[0] * bucket.shape[1]
        counts = bucket.counts(self.num_ranks)
        own = counts[self.rank] * size
        arriving = sent.new_empty(self.num_ranks * own)
        work = None
        if self.num_ranks > 1:
            sizes = [own] * self.num_ranks, [count * size for count in counts]
            work = start_all_to_all(arriving, sent, self.group, *sizes)
        else:
            arriving = sent
        self._underway.append(Underway(work, arriving, sent))
        for member in bucket.members:
            self.matrices[member].grad = None

    def finish(self, last: bool) -> None:
        """After a micro-batch's backward pass: the sums are complete on their owners, as gradients after the last."""
        if not self._active:
            return
        for bucket in self.buckets[len(self._underway) :]:
            self._send(bucket)
        for bucket, underway in zip(self.buckets, self._underway, strict=True):
            if underway.work is not None:
                underway.work.wait()
            # Added in the order of ranks: the same bits whatever arrived first.
            own = underway.arriving.view(self.num_ranks, -1, *bucket.shape).sum(0, dtype=torch.float32)
            for member, gradient in zip(bucket.owned_by(self.rank), own, strict=True):
                key = id(self.matrices[member])
                self._sums[key] = self._sums[key].add_(gradient) if key in self._sums else gradient
        self._active = False
        self._reset()
        if last:
            for parameter in self.matrices:
                # What only other ranks used has a gradient too; what no rank used has none, and does not decay.
                if self.holds(parameter) and (id(parameter) in self._seen or self._sums[id(parameter)].any()):
                    parameter.grad = self._sums[id(parameter)].to(parameter.dtype)
            self._sums.clear()
            self._seen.clear()

    def to_owners(self, bucket: Bucket, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts) if parts else torch.empty(0, *bucket.shape)

    def from_owners(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.unbind())

    def publish(self) -> None:
        """New weights from their owners to all."""
        if self.num_ranks == 1:
            return
        underway = []
        for bucket in self.buckets:
            like = self.matrices[bucket.members[0]]
            size = like.numel()
            own = [self.matrices[member].detach().reshape(-1) for member in bucket.owned_by(self.rank)]
            sent = torch.cat(own * self.num_ranks) if own else like.new_empty(0)
            counts = [count * size for count in bucket.counts(self.num_ranks)]
            arriving = like.detach().new_empty(sum(counts))
            work = start_all_to_all(arriving, sent, self.group, counts, [len(own) * size] * self.num_ranks)
            underway.append((bucket, work, arriving, sent))
        for bucket, work, arriving, _ in underway:
            work.wait()
            places = [member for rank in range(self.num_ranks) for member in bucket.owned_by(rank)]
            for place, values in zip(places, arriving.view(-1, *bucket.shape), strict=True):
                if not self.holds(self.matrices[place]):
                    self.matrices[place].detach().copy_(values)


class RowMatrices:
    """Matrices whose rows lie on different ranks (FSDP2): to their owners and back within each copy of the model."""

    def __init__(self, matrices: Sequence[DTensor]) -> None:
        self.matrices = matrices
        self.group = matrices[0].device_mesh.get_group(_row_axis(matrices[0]))
        self.num_ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.buckets = share_matrices([(m.shape[0], m.shape[1]) for m in matrices], self.num_ranks)
        self._rows: Mapping[int, list[int]] = {m.shape[0]: rows_per_rank(m) for m in matrices}

    def holds(self, parameter: torch.Tensor) -> bool:
        return True

    def to_owners(self, bucket: Bucket, parts: list[torch.Tensor]) -> torch.Tensor:
        rows, columns = self._rows[bucket.shape[0]], bucket.shape[1]
        counts = bucket.counts(self.num_ranks)
        by_member = dict(zip(bucket.members, parts, strict=True))
        sent = torch.cat(
            [by_member[member].reshape(-1) for rank in range(self.num_ranks) for member in bucket.owned_by(rank)]
        )
        own = counts[self.rank]
        arriving = sent.new_empty(own * bucket.shape[0] * columns)
        sizes = [own * num * columns for num in rows]
        all_to_all(arriving, sent, self.group, sizes, [count * rows[self.rank] * columns for count in counts])
        if not own:
            return sent.new_empty(0, *bucket.shape)
        return torch.cat([part.view(own, -1, columns) for part in arriving.split(sizes) if part.numel()], 1)

    def from_owners(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = self._rows[bucket.shape[0]], bucket.shape[1]
        counts = bucket.counts(self.num_ranks)
        mine = rows[self.rank]
        sent = torch.cat([part.reshape(-1) for part in whole.split(rows, 1)])
        arriving = sent.new_empty(sum(counts) * mine * columns)
        sizes = [count * mine * columns for count in counts], [counts[self.rank] * num * columns for num in rows]
        all_to_all(arriving, sent, self.group, *sizes)
        places = [member for rank in range(self.num_ranks) for member in bucket.owned_by(rank)]
        found = dict(zip(places, arriving.view(len(places), mine, columns), strict=True))
        return [found[member] for member in bucket.members]

    def publish(self) -> None:
        pass


def rows_per_rank(matrix: DTensor) -> list[int]:
    """How many rows of a matrix each rank of its shard group has, by FSDP2's cutting."""
    num_ranks = matrix.device_mesh.size(_row_axis(matrix))
    each = -(-matrix.shape[0] // num_ranks)
    return [max(0, min(each, matrix.shape[0] - rank * each)) for rank in range(num_ranks)]


def _row_axis(matrix: DTensor) -> int:
    """The one axis of its mesh that cuts the matrix, by rows; the others repeat it."""
    cutting = [axis for axis, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    if len(cutting) != 1 or not matrix.placements[cutting[0]].is_shard(0):
        raise ConfigError(
            f"optim.name is muon, and a matrix is cut by {', '.join(map(str, matrix.placements))}: it can bring "
            "together rows of one axis only",
            fix="write   name: adamw   or leave the tensor axis out",
        )
    return cutting[0]
