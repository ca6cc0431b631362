"""A pipeline by arithmetic: which layers each stage has, and in which order a rank computes its passes.

Plan and engine read both here, so what is planned is what runs. A rank of `virtual` stages has every num_ranks-th of
them: stage s lies on rank s % num_ranks; under zbv stages go down the ranks and up again. Orders name no rank's
partner: messages follow from them (pipeline_wire.py).

Two schedules compute a backward pass in parts: what the stage before waits for, and later the weights' gradients, for
which nobody waits ("weights"). zero-bubble is 1f1b so (Qi et al., ZB-H1); zbv has two stages on each rank (ZB-V).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from duoka.config.schema_running import ADDS_ONCE as ADDS_ONCE
from duoka.config.schema_running import SPLIT as SPLIT
from duoka.config.schema_running import Schedule as Schedule


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage. `weights` is what a split schedule's backward pass left out."""

    kind: Literal["forward", "backward", "weights"]
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


def rank_of(stage: int, schedule: Schedule, num_ranks: int) -> int:
    """Which rank has a stage."""
    if schedule == "zbv" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of(rank: int, schedule: Schedule, num_ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages of a rank, in the order in which a micro-batch meets them."""
    return tuple(stage for stage in range(num_ranks * virtual) if rank_of(stage, schedule, num_ranks) == rank)


@functools.lru_cache(maxsize=4096)
def passes_of(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, rank: int) -> tuple[Pass, ...]:
    """What a rank computes in a step, in order. Backward passes of a stage go by micro-batch, as in one process."""
    if schedule == "zero-bubble":
        return tuple(_without_bubble(num_ranks, num_micro, rank))
    if schedule == "zbv":
        return tuple(_down_and_up(num_ranks, num_micro, rank))
    return tuple(_whole_passes(schedule, num_ranks, virtual, num_micro, rank))


def _whole_passes(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, rank: int) -> list[Pass]:
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


class _Order:
    """An order that is being made; of each kind and stage the micro-batches follow each other."""

    def __init__(self, num_micro: int) -> None:
        self.passes: list[Pass] = []
        self._num_micro = num_micro
        self._done: dict[tuple[str, int], int] = {}

    def add(self, stage: int, *kinds: Literal["forward", "backward", "weights"]) -> None:
        """The next micro-batch's passes, where one is left; of weights, where its backward pass was before."""
        for kind in kinds:
            micro = self._done.get((kind, stage), 0)
            if micro < (self._done.get(("backward", stage), 0) if kind == "weights" else self._num_micro):
                self.passes.append(Pass(kind, stage, micro))
                self._done[kind, stage] = micro + 1

    def lacks(self, kind: str, *stages: int) -> bool:
        return any(self._done.get((kind, stage), 0) < self._num_micro for stage in stages)


def _without_bubble(num_ranks: int, num_micro: int, rank: int) -> list[Pass]:
    """1f1b, whose rank r is r micro-batches late with weights: it fills with these what it would wait at the end.

    So each rank keeps as many micro-batches as the first one of 1f1b.
    """
    order = _Order(num_micro)
    for _ in range(num_ranks - rank - 1):
        order.add(rank, "forward")
    for _ in range(rank):
        order.add(rank, "forward", "backward")
    while order.lacks("forward", rank):
        order.add(rank, "forward", "backward", "weights")
    while order.lacks("weights", rank):
        order.add(rank, "backward", "weights")
    return order.passes


def _down_and_up(num_ranks: int, num_micro: int, rank: int) -> list[Pass]:
    """A rank's first stage is followed by those of the ranks after it, its second by those before it.

    A micro-batch is back at rank r after twice the ranks behind it; until then the first stage goes ahead, and then
    both take turns, all three passes each. What is held is twice num_ranks, of half as large stages: as in 1f1b.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    order = _Order(num_micro)
    for _ in range(2 * (num_ranks - rank) - 1):
        order.add(down, "forward")
    for _ in range(rank):
        order.add(up, "forward")
        order.add(down, "forward")
    for _ in range(num_ranks - rank):
        order.add(up, "forward", "backward", "weights")
    while order.lacks("forward", down, up):
        order.add(down, "forward", "backward", "weights")
        order.add(up, "forward", "backward", "weights")
    for _ in range(rank):  # others wait for these; their weights come when there is nothing else to do
        order.add(down, "backward")
        order.add(up, "backward")
    while order.lacks("backward", down, up):
        order.add(down, "backward", "weights")
        order.add(up, "backward")
    while order.lacks("weights", down, up):
        order.add(down, "weights")
        order.add(up, "weights")
    return order.passes


def most_in_flight(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, rank: int) -> float:
    """The most micro-batches whose activations a rank holds at once, each counted as its share of all its stages."""
    held = most = 0
    frees = "weights" if schedule in SPLIT else "backward"
    for one in passes_of(schedule, num_ranks, virtual, num_micro, rank):
        held += (one.kind == "forward") - (one.kind == frees)
        most = max(most, held)
    return most / virtual


class PassTimes(NamedTuple):
    """Of one micro-batch through all stages of a rank, in any one unit."""

    forward: float
    backward: float  # without what the weights' part is
    weights: float = 0.0


def bubble(schedule: Schedule, num_ranks: int, virtual: int, num_micro: float, times: PassTimes | None = None) -> float:
    """The time that a rank waits at both ends of a step, as a share of what it computes."""
    if schedule not in SPLIT:
        return (num_ranks - 1) / (virtual * num_micro)
    # What is waited at the ends does not grow with what lies between them.
    tried = min(max(1, round(num_micro)), 3 * num_ranks)
    times = times or PassTimes(1.0, 1.0, 1.0)
    each = tuple(round(one / sum(times), 3) for one in times)  # of a stage; rounded, so that few are asked for
    waits = _seconds(schedule, num_ranks, virtual, tried, each) - tried * virtual * sum(each)
    return max(0.0, waits) / (virtual * num_micro)


@functools.lru_cache(maxsize=4096)
def _seconds(schedule: Schedule, num_ranks: int, virtual: int, num_micro: int, each: tuple[float, ...]) -> float:
    """From the first pass of any rank to the last of any, where each begins as soon as its input is there."""
    orders = [passes_of(schedule, num_ranks, virtual, num_micro, rank) for rank in range(num_ranks)]
    last, lasts = num_ranks * virtual - 1, dict(zip(("forward", "backward", "weights"), each, strict=True))
    ended: dict[Pass, float] = {}
    now, at = [0.0] * num_ranks, [0] * num_ranks
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                one = order[at[rank]]
                needs = []
                if one.kind == "forward" and one.stage:
                    needs = [one._replace(stage=one.stage - 1)]
                if one.kind == "backward" and one.stage < last:
                    needs = [one._replace(stage=one.stage + 1)]
                if any(need not in ended for need in needs):
                    break
                now[rank] = max([now[rank], *(ended[need] for need in needs)]) + lasts[one.kind]
                ended[one] = now[rank]
                at[rank] += 1
        if sum(at) == before:
            raise AssertionError(f"{schedule} of {num_micro} micro-batches over {num_ranks} ranks waits for ever")
    return max(now)
