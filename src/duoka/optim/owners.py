"""Which rank updates which matrix (its owner), load-balanced as evenly as whole matrices allow.

Pure arithmetic on shapes, the same on every rank. Called when matrices are shared for Muon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Matrices of one shape that travel and are worked on together: `members` are places in the list given."""

    shape: tuple[int, int]
    members: tuple[int, ...]
    owners: tuple[int, ...]  # the rank of each member

    def owned_by(self, rank: int) -> list[int]:
        """Members of `rank`, as places in the list given."""
        return [member for member, owner in zip(self.members, self.owners, strict=True) if owner == rank]

    def counts(self, num_ranks: int) -> list[int]:
        return [self.owners.count(rank) for rank in range(num_ranks)]


def share_matrices(
    shapes: Sequence[tuple[int, int]], num_ranks: int, *, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order of their last member, so that they fill one after the other as gradients come."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(place)
    cut: list[tuple[tuple[int, int], list[int]]] = []
    for shape, places in by_shape.items():
        # A bucket has at least one matrix for each rank, when there are so many.
        size = max(num_ranks, bucket_bytes // (4 * shape[0] * shape[1]), 1)
        cut += [(shape, places[start : start + size]) for start in range(0, len(places), size)]
    owner = _spread([shape for shape, members in cut for _ in members], num_ranks)
    buckets, start = [], 0
    for shape, members in cut:
        buckets.append(Bucket(shape, tuple(members), tuple(owner[start : start + len(members)])))
        start += len(members)
    return sorted(buckets, key=lambda bucket: bucket.members[-1])


def work_of(shape: tuple[int, int]) -> int:
    """Multiplications of one Newton-Schulz step, up to a factor: the smaller side counts twice."""
    return shape[0] * shape[1] * min(shape)


def _spread(shapes: Sequence[tuple[int, int]], num_ranks: int) -> list[int]:
    """An owner for each: the largest first, each to the least loaded rank (and then the one with fewest bytes)."""
    work, held = [0] * num_ranks, [0] * num_ranks
    owners = [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -work_of(shapes[place])):
        rank = min(range(num_ranks), key=lambda rank: (work[rank], held[rank], rank))
        owners[place] = rank
        work[rank] += work_of(shapes[place])
        held[rank] += shapes[place][0] * shapes[place][1]
    return owners
