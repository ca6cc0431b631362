"""Iterable data sets whose items are not the same on every rank: read by rank 0 for all, or each rank's own.

Both are ExactStreams with another way to come by a step's items; ranks agree on each step, so that all end together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from duoka.comm.world import World
from duoka.data.feed.map_loader import ExactStream, deal
from duoka.errors import ConfigError


class DispatchedStream(ExactStream):
    """Rank 0 reads and hands every rank its items: for data that gives other items each time it is walked."""

    world: World

    def walk(self) -> Iterator[Any]:
        return super().walk() if self.world.is_main else iter(())

    def groups(self, items: Iterator[Any]) -> Iterator[tuple[list[Any], slice, int]]:
        while group := self.world.agree(list(itertools.islice(items, self.global_batch))):
            yield group, deal(group, self.rank, self.num_ranks), len(group)


class OwnStream(ExactStream):
    """Each rank has items that no other has (a set that was split by rank). Ranks may run out at different steps."""

    world: World

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": None, "num_ranks": self.num_ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["num_ranks"] != self.num_ranks:
            raise ConfigError(
                f"the data was read by {state['num_ranks']} ranks, each its own part, and here are {self.num_ranks}",
                fix=f"go on with {state['num_ranks']} processes, or give every rank the same data",
            )
        super().load_state_dict(state)

    def groups(self, items: Iterator[Any]) -> Iterator[tuple[list[Any], slice, int]]:
        spare: list[Any] = []
        while True:
            mine = list(itertools.islice(items, self.global_batch // self.num_ranks))
            spare = mine[:1] or spare
            counts = self.world.gather((len(mine), bool(spare)))
            if not any(count for count, _ in counts):
                return
            if not all(has_any for _, has_any in counts):
                # A rank that never had an item runs with another rank's first one, which counts for nothing.
                offers = self.world.gather(spare)
                spare = spare or next(offer for offer in offers if offer)
            yield mine or spare, slice(0, len(mine)), sum(count for count, _ in counts)

    def places_per_step(self, num_global: int) -> int:
        return self.global_batch  # also of a rank that has run out

    def walk(self) -> Iterator[Any]:
        return itertools.islice(iter(self.dataset), self.num_seen // self.num_ranks, None)
