"""Any data set over any number of ranks, each sample exactly once: no duplicates to even things out, none dropped.

For people's own data sets and loops. Every rank makes equally many steps; a rank for which a step has no sample gets
`batch=None` there and still takes part in collectives. `num_global` is what all ranks together hold, for the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, default_collate

from duoka.data.epoch_plan import shuffled
from duoka.errors import ConfigError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Share:
    """One rank's part of a global batch; `batch` is None when it has none."""

    batch: Any
    sample_ids: tuple[int, ...]
    num_global: int


class _Exact:
    """What both wrappers are told: the data, and which rank's part of which batches they give."""

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
    ) -> None:
        super().__init__(dataset, global_batch=global_batch, rank=rank, num_ranks=num_ranks, collate=collate)
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.index = 0

    def __len__(self) -> int:
        """Steps in an epoch, the same on every rank."""
        return -(-len(self.dataset) // self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.index = epoch, 0

    def state_dict(self) -> dict[str, int]:
        facts = {"num_samples": len(self.dataset), "seed": self.seed, "global_batch": self.global_batch}
        return {"epoch": self.epoch, "index": self.index, "shuffle": int(self.shuffle), **facts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        _check_state(state, self.state_dict())
        self.epoch, self.index = state["epoch"], state["index"]

    def __iter__(self) -> Iterator[Share]:
        """The rest of the epoch. Only the samples that are still to come are read."""
        if self.index >= len(self) > 0:
            self.set_epoch(self.epoch + 1)
        count = len(self.dataset)
        order = shuffled(count, f"exact/{self.seed}/{self.epoch}") if self.shuffle else np.arange(count)
        globals_ = [
            order[at : at + self.global_batch] for at in range(self.index * self.global_batch, count, self.global_batch)
        ]
        # Turns shift with the step, so that the rank which goes without in short steps is not always the same.
        shares = [
            [int(i) for i in ids[(self.rank + step) % self.num_ranks :: self.num_ranks]]
            for step, ids in enumerate(globals_, start=self.index)
        ]
        batches = DataLoader(
            _Lists(self.dataset),
            batch_sampler=shares,
            collate_fn=_CollateAny(self.collate),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        for ids, everyone, batch in zip(shares, globals_, batches, strict=True):
            self.index += 1
            yield Share(batch, tuple(ids), len(everyone))


class ExactStream(_Exact):
    """An iterable data set that gives the same items in the same order everywhere, in global batches.

    Each rank walks all of it and keeps its turn: so every rank knows where it ends without asking, and none hangs.
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
    ) -> None:
        super().__init__(dataset, global_batch=global_batch, rank=rank, num_ranks=num_ranks, collate=collate)
        self.num_seen = 0
        self._inner: Any = None
        self._knows_its_place = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.num_seen, self._inner = epoch, 0, None
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        facts = {"global_batch": self.global_batch, "num_seen": self.num_seen}
        return {"epoch": self.epoch, **facts, "inner": self._inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_state({"global_batch": state["global_batch"]}, {"global_batch": self.global_batch})
        self.set_epoch(state["epoch"])
        self.num_seen, self._inner = state["num_seen"], state["inner"]

    def __iter__(self) -> Iterator[Share]:
        if self._inner is not None and self._knows_its_place:
            self.dataset.load_state_dict(self._inner)
            items = iter(self.dataset)
        else:
            items = itertools.islice(iter(self.dataset), self.num_seen, None)
        while group := list(itertools.islice(items, self.global_batch)):
            step = self.num_seen // self.global_batch
            first = (self.rank + step) % self.num_ranks
            mine = group[first :: self.num_ranks]
            ids = tuple(range(self.num_seen + first, self.num_seen + len(group), self.num_ranks))
            self.num_seen += len(group)
            self._inner = self.dataset.state_dict() if self._knows_its_place else None
            yield Share(self.collate(mine) if mine else None, ids, len(group))
        self.set_epoch(self.epoch + 1)


class _Lists(Dataset[list[Any]]):
    """Hands a step's samples over together; an empty list stays one, whatever the data set thinks of it."""

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


def _check_state(state: dict[str, Any], here: dict[str, Any]) -> None:
    for name, value in here.items():
        if name not in ("epoch", "index") and state[name] != value:
            raise ConfigError(f"the saved place belongs to other data: its {name} is {state[name]}, here it is {value}")
