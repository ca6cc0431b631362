"""Any data set over any number of ranks, each sample exactly once: no padding with duplicates, none dropped.

For users' own data sets and loops. Every rank makes equally many steps. A rank for which a step has no sample gets
`batch=None` there, or with `fill` a sample of weight zero to run with, so that it takes part in collectives.
`num_global` is what all ranks together hold, for the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from duoka.data.feed.epoch_plan import shuffled
from duoka.errors import ConfigError

Collate = Callable[[list[Any]], Any]
Order = Callable[[int], Sequence[Any]]  # of an epoch: sample numbers, or whole batches of them


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a global batch. Without samples, `batch` is None, or filler of weight zero."""

    batch: Any
    sample_ids: tuple[int, ...]
    num_global: int


def deal(units: Sequence[Any], rank: int, num_ranks: int) -> slice:
    """This rank's part of a step's units: end to end in the order of ranks, sizes that differ by one at most."""
    base, more = divmod(len(units), num_ranks)
    start = rank * base + min(rank, more)
    return slice(start, start + base + (rank < more))


class _Exact:
    """Arguments of both wrappers: the data, rank and number of ranks, and the global batch."""

    def __init__(self, dataset: Any, *, global_batch: int, rank: int, num_ranks: int, collate: Collate) -> None:
        if global_batch < 1 or not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} of {num_ranks} with a global batch of {global_batch} cannot be")
        self.dataset = dataset
        self.global_batch = global_batch
        self.rank = rank
        self.num_ranks = num_ranks
        self.collate = collate
        self.epoch = 0


class ExactLoader(_Exact):
    """A map-style data set (`len` and `[i]`), shuffled by seed and epoch, in global batches."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        rank: int,
        num_ranks: int,
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate = default_collate,
        num_workers: int = 0,
        pin_memory: bool = False,
        order: Order | None = None,
        fill: bool = False,
        drop_last: bool = False,
        options: Mapping[str, Any] | None = None,
        whole_units: bool = False,
    ) -> None:
        """`order`: of each epoch, instead of a shuffle; its members are sample numbers, or batches of them, of which
        `global_batch` make a step. `whole_units`: the data set is asked for such a batch at once, by its list.
        `options`: further settings of torch's DataLoader."""
        super().__init__(dataset, global_batch=global_batch, rank=rank, num_ranks=num_ranks, collate=collate)
        self.seed = seed
        self.shuffle = shuffle
        self.order = order
        self.fill = fill
        self.drop_last = drop_last
        self.whole_units = whole_units
        self.options = {"num_workers": num_workers, "pin_memory": pin_memory, **(options or {})}
        self.num_seen = 0  # of the epoch's samples, or batches: the place does not depend on the world size
        self._units: tuple[int, Sequence[Any]] | None = None

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        return -(-self._count() // self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.num_seen = epoch, 0

    def state_dict(self) -> dict[str, int]:
        facts = {"num_samples": len(self.dataset), "seed": self.seed, "shuffle": int(self.shuffle)}
        return {"epoch": self.epoch, "num_seen": self.num_seen, **facts}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        _check_state(state, self.state_dict())
        self.epoch, self.num_seen = state["epoch"], state["num_seen"]

    @property
    def is_at_end(self) -> bool:
        """Whether this epoch is used up."""
        return self.num_seen >= self._count() > 0

    def _count(self) -> int:
        count = len(self._read_order(self.epoch)) if self.order else len(self.dataset)
        return count - count % self.global_batch if self.drop_last else count

    def _read_order(self, epoch: int) -> Any:
        if self.order is None:
            count = len(self.dataset)
            return shuffled(count, f"exact/{self.seed}/{epoch}") if self.shuffle else np.arange(count)
        if self._units is None or self._units[0] != epoch:
            self._units = (epoch, self.order(epoch))
        return self._units[1]

    def __iter__(self) -> Iterator[RankShare]:
        """The rest of the epoch. Only the samples that are still to come are read."""
        if self.is_at_end:
            self.set_epoch(self.epoch + 1)
        units, end = self._read_order(self.epoch), self._count()
        groups = [units[at : min(at + self.global_batch, end)] for at in range(self.num_seen, end, self.global_batch)]
        own = [group[deal(group, self.rank, self.num_ranks)] for group in groups]
        wanted = [self._asked(mine, group) for mine, group in zip(own, groups, strict=True)]
        batches = DataLoader(
            _Lists(self.dataset),
            batch_sampler=wanted,
            collate_fn=_CollateAny(self.collate),
            # A generator of its own: creating an iterator must not advance the global RNG, which dropout uses.
            generator=torch.Generator().manual_seed(self.seed + self.epoch),
            **self.options,
        )
        for mine, group, batch in zip(own, groups, batches, strict=True):
            self.num_seen += len(group)
            yield RankShare(batch, tuple(_sample_ids(mine)), len(_sample_ids(group)))

    def _asked(self, share: Any, group: Any) -> list[Any]:
        """Indices to fetch; for a rank without samples, the group's first as filler."""
        flat = _plain_units if self.whole_units else _sample_ids
        return flat(share) or (flat(group)[:1] if self.fill else [])


def _plain_units(units: Sequence[Any]) -> list[Any]:
    return [list(unit) if isinstance(unit, (list, tuple)) else int(unit) for unit in units]


def _sample_ids(units: Sequence[Any]) -> list[int]:
    """Numbers of samples, out of numbers or of batches of numbers."""
    return [int(i) for unit in units for i in (unit if isinstance(unit, (list, tuple)) else (unit,))]


class ExactStream(_Exact):
    """An iterable data set that gives the same items in the same order everywhere, in global batches.

    Each rank iterates over all of it and keeps its own items: so all see the end at the same step, none hangs.
    A data set with `state_dict` and `load_state_dict` of its own resumes by them; another one is walked again.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        global_batch: int,
        rank: int,
        num_ranks: int,
        collate: Collate = default_collate,
        fill: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, global_batch=global_batch, rank=rank, num_ranks=num_ranks, collate=collate)
        self.fill = fill
        self.drop_last = drop_last
        self.num_seen = 0
        self._inner: Any = None

    @cached_property
    def _knows_its_place(self) -> bool:
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    is_at_end = False  # at its end a stream is at the beginning of its next epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.num_seen, self._inner = epoch, 0, None
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "num_seen": self.num_seen, "inner": self._inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_epoch(state["epoch"])
        self.num_seen, self._inner = state["num_seen"], state["inner"]

    def groups(self, items: Iterator[Any]) -> Iterator[tuple[list[Any], slice, int]]:
        """(items that this rank has at hand, which of them are its own, how many all ranks have) of each step."""
        while group := list(itertools.islice(items, self.global_batch)):
            yield group, deal(group, self.rank, self.num_ranks), len(group)

    def places_per_step(self, num_global: int) -> int:
        """How far a step with so many items goes on."""
        return num_global

    def walk(self) -> Iterator[Any]:
        """The items that are still to come."""
        if self._inner is not None and self._knows_its_place:
            self.dataset.load_state_dict(self._inner)
            return iter(self.dataset)
        return itertools.islice(iter(self.dataset), self.num_seen, None)

    def __iter__(self) -> Iterator[RankShare]:
        for group, mine, num_global in self.groups(self.walk()):
            if self.drop_last and num_global < self.global_batch:
                break
            own = group[mine]
            first = self.num_seen + mine.start
            self.num_seen += self.places_per_step(num_global)
            self._inner = self.dataset.state_dict() if self._knows_its_place else None
            filled = own or (group[:1] if self.fill else [])
            yield RankShare(self.collate(filled) if filled else None, tuple(range(first, first + len(own))), num_global)
        self.set_epoch(self.epoch + 1)


class _Lists(Dataset[list[Any]]):
    """Fetches a step's samples in one call; an empty list stays empty, even if the data set rejects it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset) if isinstance(self.dataset, Sized) else 0

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self.dataset[i] for i in ids]


@dataclass(frozen=True)
class _CollateAny:
    collate: Collate

    def __call__(self, items: list[Any]) -> Any:
        return self.collate(items) if items else None


def _check_state(state: Mapping[str, Any], here: dict[str, Any]) -> None:
    for name, value in here.items():
        if name not in ("epoch", "num_seen") and state[name] != value:
            raise ConfigError(f"the saved place belongs to other data: its {name} is {state[name]}, here it is {value}")
