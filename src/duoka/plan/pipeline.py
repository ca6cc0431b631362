"""A pipeline by arithmetic: which layers each stage has, and in which order a rank computes its passes.

Plan and engine read both here, so what is planned is what runs. A rank of `virtual` stages has every num_ranks-th of
them: stage s lies on rank s % num_ranks. Orders name no rank's partner: messages follow from them (pipeline_wire.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from duoka.config.schema_running import Schedule as Schedule


class Pass(NamedTuple):
    """One forward or backward pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    micro: int


@dataclass(frozen=True)
class Costs:
    """Of one layer and of what stands at both ends, in any one unit: FLOPs per token, which are as the weights are."""

    layer: float
    head: float
    embedding: float = 0.0  # a lookup computes nothing; its weights have to be kept all the same


def cut_layers(num_layers: int, num_stages: int, costs: Costs) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers at the end: the slowest stage is as fast as can be.

    Among equals a stage with fewer weights takes the layer, then a later one, which keeps fewer micro-batches.
    """
    if not 0 < num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    counts = [1] * num_stages
    ends = [0.0] * num_stages
    ends[-1] += costs.head
    weights = [0.0] * num_stages
    weights[0] += costs.embedding
    weights[-1] += costs.head

    def with_one_more(stage: int) -> tuple[float, float, int]:
        layers = (counts[stage] + 1) * costs.layer
        return layers + ends[stage], layers + weights[stage], -stage

    for _ in range(num_layers - num_stages):
        counts[min(range(num_stages), key=with_one_more)] += 1
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return tuple(firsts)


def passes_of(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, rank: int) -> list[Pass]:
    """What a rank computes in a step, in order. Backward passes of a stage go by micro-batch, as in one process."""
    forward = list(_by_groups(num_ranks, virtual, num_micro, rank, is_backward=False))
    backward = list(_by_groups(num_ranks, virtual, num_micro, rank, is_backward=True))
    if schedule == "gpipe":
        return forward + backward
    ahead = num_ranks - rank - 1
    # With several stages a rank first has a whole round of each but its last, and of its last what is there and back.
    warm = ahead if virtual == 1 else 2 * ahead + (virtual - 1) * len(_rounds(num_ranks, num_micro)[0])
    warm = min(len(forward), warm)
    order = forward[:warm]
    for place, one in enumerate(forward[warm:]):
        order += [one, backward[place]]
    return order + backward[len(forward) - warm :]


def _by_groups(num_ranks: int, virtual: int, num_micro: int, rank: int, *, is_backward: bool) -> Iterator[Pass]:
    """A round of micro-batches through each stage of this rank, then the next round."""
    chunks = range(virtual)[::-1] if is_backward else range(virtual)
    for micros in _rounds(num_ranks, num_micro):
        for chunk in chunks:
            for micro in micros:
                yield Pass("backward" if is_backward else "forward", chunk * num_ranks + rank, micro)


def _rounds(num_ranks: int, num_micro: int) -> list[range]:
    """As many micro-batches as there are ranks, and none with fewer, on which a rank would wait for itself for ever.

    The longest is the first.
    """
    count = max(1, num_micro // num_ranks)
    edges = [-(-num_micro * at // count) for at in range(count + 1)]
    return [range(first, after) for first, after in itertools.pairwise(edges)]


def most_in_flight(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, rank: int) -> float:
    """The most micro-batches whose activations a rank holds at once, each counted as its share of all its stages."""
    held = most = 0
    for one in passes_of(schedule, num_ranks, virtual, num_micro, rank):
        held += 1 if one.kind == "forward" else -1
        most = max(most, held)
    return most / virtual


def bubble(num_ranks: int, virtual: int, num_micro: float) -> float:
    """The time that a rank waits at both ends of a step, as a share of what it computes."""
    return (num_ranks - 1) / (virtual * num_micro)
