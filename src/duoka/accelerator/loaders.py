"""Prepared loaders: a plain DataLoader, over all ranks, each sample exactly once, with a place that can be saved.

`prepare_loader` chooses how: by sample numbers, by the batches of a user's own batch sampler, or as a stream. What a
loop gets are batches on the device; what the verbs ask (how many samples are real, is it the last) is `current`.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from duoka.accelerator.nested import map_tensors, send, tensors_in
from duoka.accelerator.readings import Current, Reading, Readings
from duoka.accelerator.streams import DispatchedStream, OwnStream
from duoka.comm.world import World
from duoka.data.feed.map_loader import ExactLoader, ExactStream
from duoka.data.feed.prefetch import EpochLoader
from duoka.errors import ConfigError
from duoka.parallel.inputs import model_inputs

# What goes on to the loader that reads; batching, order and collation are taken over.
_PASSED_ON = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers")

# What people ask a loader for.
_FACTS = (
    "dataset", "batch_size", "collate_fn", "sampler", "batch_sampler", "drop_last", "generator", "prefetch_factor",
    *(name for name in _PASSED_ON if name != "multiprocessing_context"),
)  # fmt: skip


class PreparedLoader(DataLoader[Any]):
    """What `prepare` makes of a loader. Iterating gives an epoch, or after a resume what was left of one."""

    def __init__(self, source: Any, device: torch.device, readings: Readings, **facts: Any) -> None:
        self.source = source
        self.device = device
        self.facts = facts  # of the original loader: dataset, batch_size, ...
        self.current: Current | None = None
        self.is_restored = False
        self._readings = readings
        self.num_open = 0  # of a restored place: batches before it that were read and are to be done again
        self._num_gathered = 0  # calls of gather_for_metrics with the current batch
        self._rows_of_full: dict[tuple[int, int], int] = {}  # by call and tensor: rows that a full batch gave
        self._place = source.state_dict()
        self.place_before = self._place  # before the batch that the loop works on

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"a prepared loader has no {name!r}")

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every rank."""
        try:
            return len(self.source)
        except TypeError:
            raise TypeError("a stream has no length: it is read until it ends") from None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives, or that the current one is in."""
        return int(self._place["epoch"])

    @property
    def total_batch_size(self) -> int:
        return int(self.source.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. Not needed: each iteration is the next one. A restored place stays."""
        if not (self.is_restored and epoch == self.epoch):
            self._go_to({**self._place, "epoch": epoch, **self._beginning()})

    def state_dict(self) -> dict[str, Any]:
        return dict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._go_to(state)
        self.is_restored = True

    def skip_to(self, num_batches: int) -> None:
        self._go_to({**self._place, **self._beginning(), **self._after(num_batches)})
        self.is_restored = True

    def place_after(self, num_batches: int) -> dict[str, Any]:
        return {**self._place, **self._after(num_batches)}

    def _after(self, num_batches: int) -> dict[str, Any]:
        return {"num_seen": num_batches * self.source.global_batch}

    def _beginning(self) -> dict[str, Any]:
        return {"num_seen": 0} | ({"inner": None} if "inner" in self._place else {})

    def _go_to(self, place: dict[str, Any]) -> None:
        self.source.load_state_dict(place)
        self._place = dict(place)
        self.is_restored = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self.is_restored:
            # Left in the middle, an epoch begins again, as any loader's does.
            self._go_to({**self._place, **self._beginning()})
        self.is_restored = False
        self._readings.begin(self)
        steps = self._steps()
        try:
            while True:
                random_before = self._readings.random_state()
                step = next(steps, None)
                if step is None:
                    break
                batch, current, place = step
                self.current, self.place_before, self._place = current, self._place, place
                self._num_gathered = 0
                batch = send(batch, self.device, non_blocking=True)
                held = [weakref.ref(tensor) for tensor in tensors_in(batch)]
                self._readings.add(Reading(current, self, self.place_before, random_before, held))
                yield batch
        finally:
            steps.close()
            self._readings.end(self)
            self.current = None

    def cut_rows(self, value: Any, current: Current) -> Any:
        """`value` with a row for each sample, where the loop made it of as many rows as full batches have
        (`loss.repeat(batch_size)`): a short batch would count more than it holds."""
        full = getattr(self.source, "global_batch", 0) // max(1, getattr(self.source, "num_ranks", 1))
        call, self._num_gathered = self._num_gathered, self._num_gathered + 1
        leaf = -1

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal leaf
            leaf += 1
            rows = tensor.shape[0] if tensor.ndim else 1
            if current.num_own >= full:
                self._rows_of_full[call, leaf] = rows
                return tensor
            # What has several rows for a sample in full batches has so in short ones: it is no repetition.
            is_repeated = rows == full > 1 and self._rows_of_full.get((call, leaf), full) == full
            return tensor[: current.num_own] if is_repeated else tensor

        return map_tensors(value, cut)

    def _steps(self) -> Any:
        """(batch, what it weighs, the place after it). The last batch's place is the next epoch's beginning."""
        source = self.source
        ahead: tuple[Any, dict[str, Any]] | None = None
        for share in source:
            place = source.state_dict()
            if ahead is not None:
                yield self._step(*ahead, is_last=False)
                ahead = None
            if isinstance(source, ExactLoader):
                yield self._step(share, place, is_last=source.is_at_end)
            else:
                ahead = (share, place)  # where a stream ends is only known one item later
        if ahead is not None:
            yield self._step(*ahead, is_last=True)

    def _step(self, share: Any, place: dict[str, Any], is_last: bool) -> tuple[Any, Current, dict[str, Any]]:
        if is_last:
            place = {**place, "epoch": place["epoch"] + 1, **self._beginning()}
        return share.batch, Current(len(share.sample_ids), share.num_global, is_last), place


class PreparedEpochs(PreparedLoader):
    """duoka's own loader: gives micro-batches, knows where windows end and how many targets each one has."""

    @property
    def total_batch_size(self) -> int:
        raise AttributeError("duoka's batches are of the size that their plan says: " + str(self.source.loader.plan))

    def _after(self, num_batches: int) -> dict[str, Any]:
        return {"index": num_batches}

    def _beginning(self) -> dict[str, Any]:
        return {"index": 0}

    def _steps(self) -> Iterator[tuple[Any, Current, dict[str, Any]]]:
        before = self.source.state_dict()
        for batch in self.source:
            is_last = batch.index + 1 == len(self.source)
            after = {**before, "epoch": batch.epoch + is_last, "index": 0 if is_last else batch.index + 1}
            end = len(batch.micro_batches) - 1
            for at, micro in enumerate(batch.micro_batches):
                ends = at == end
                weight = Current(micro.num_targets, batch.global_targets, is_last and ends, batch.global_targets, ends)
                yield model_inputs(micro, self.device), weight, after if ends else before
            before = after


class SkippedLoader:
    """What `skip_first_batches` gives: the rest of the loader's epoch, once; the loader itself goes on after it."""

    def __init__(self, loader: PreparedLoader, num_batches: int, say: Callable[[str], None]) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self._say = say

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.num_batches)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        if loader.is_restored:
            # load_state knows the place by sample; a count of batches is right at one world size only.
            place, num_open = loader.state_dict(), loader.num_open
            if num_open and place == loader.place_after(self.num_batches - num_open):
                self._say(
                    f"skip_first_batches({self.num_batches}): the checkpoint was saved inside of a window, after "
                    f"{num_open} of its micro-batches, which are done again: going on after "
                    f"{self.num_batches - num_open} batches"
                )
            elif place != loader.place_after(self.num_batches):
                self._say(
                    f"skip_first_batches({self.num_batches}) would lead elsewhere than where the checkpoint was saved "
                    "(another batch size or number of processes?): going on from the checkpoint's place"
                )
        else:
            loader.skip_to(self.num_batches)
        yield from loader


@dataclass(frozen=True)
class LoaderSettings:
    """How loaders are spread. `split_batches`: the batch size given is that of all ranks together."""

    seed: int = 0
    split_batches: bool = False
    dispatch_batches: bool = False


def prepare_loader(
    loader: Any, world: World, readings: Readings, settings: LoaderSettings, own_items: bool = False
) -> PreparedLoader:
    """`own_items`: an iterable data set that gives this rank items which no other rank gets."""
    if isinstance(loader, EpochLoader):
        return PreparedEpochs(loader, world.device, readings, dataset=loader.loader.store, batch_size=None)
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a loader must be a torch DataLoader or a duoka EpochLoader, not {type(loader).__name__}")
    facts = {name: getattr(loader, name) for name in _FACTS}
    if isinstance(loader.dataset, IterableDataset):
        source: Any = _stream(loader, world, settings, own_items)
    else:
        source = _by_number(loader, world, settings)
    return PreparedLoader(source, world.device, readings, **facts)


def _global_batch(loader: DataLoader[Any], world: World, settings: LoaderSettings) -> int:
    """Members of a step's group; None as batch size means that the data set gives whole batches."""
    if loader.batch_size is None:
        return world.size
    return loader.batch_size if settings.split_batches else loader.batch_size * world.size


def _by_number(loader: DataLoader[Any], world: World, settings: LoaderSettings) -> ExactLoader:
    sampler, seed, shuffle, order, drop_last = loader.sampler, settings.seed, False, None, False
    collate = loader.collate_fn if loader.batch_sampler is not None else _TheOne(loader.collate_fn)
    members = _global_batch(loader, world, settings)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        order, members = partial(_replay, loader.batch_sampler, seed), world.size
    else:
        drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
        if isinstance(sampler, DistributedSampler):
            shuffle, seed, drop_last = sampler.shuffle, sampler.seed, drop_last or sampler.drop_last
        elif type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
            shuffle = True
            seed = sampler.generator.initial_seed() % 2**31 if sampler.generator else seed
        elif type(sampler) is not SequentialSampler:
            order = partial(_replay, sampler, seed)
    options = {name: getattr(loader, name) for name in _PASSED_ON if name not in ("num_workers", "pin_memory")}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return ExactLoader(
        loader.dataset, global_batch=members, rank=world.rank, num_ranks=world.size, seed=seed, shuffle=shuffle,
        collate=collate, num_workers=loader.num_workers, pin_memory=loader.pin_memory and world.device.type == "cuda",
        order=order, fill=True, drop_last=drop_last, options=options,
        whole_units=loader.batch_sampler is None,
    )  # fmt: skip


def _stream(loader: DataLoader[Any], world: World, settings: LoaderSettings, own_items: bool) -> ExactStream:
    kind = OwnStream if own_items else DispatchedStream if settings.dispatch_batches else ExactStream
    items: Any = loader.dataset
    if loader.num_workers:
        options = {name: getattr(loader, name) for name in (*_PASSED_ON, "prefetch_factor")}
        generator = torch.Generator().manual_seed(settings.seed)
        items = DataLoader(items, batch_size=None, collate_fn=_as_it_is, generator=generator, **options)
    members = _global_batch(loader, world, settings)
    collate = _TheOne(loader.collate_fn) if loader.batch_size is None else loader.collate_fn
    stream = kind(
        items, global_batch=members, rank=world.rank, num_ranks=world.size, fill=True, collate=collate,
        drop_last=loader.drop_last,
    )  # fmt: skip
    if isinstance(stream, (DispatchedStream, OwnStream)):
        stream.world = world
    return stream


@dataclass(frozen=True)
class _TheOne:
    """The data set gives whole batches: a step's list holds one."""

    collate: Callable[[Any], Any]

    def __call__(self, items: list[Any]) -> Any:
        return self.collate(items[0])


def _as_it_is(item: Any) -> Any:
    return item


def _replay(sampler: Any, seed: int, epoch: int) -> Sequence[Any]:
    """What a user's sampler gives in an epoch: the same on every rank, and again after a resume."""
    with seeded(seed * 1_000_003 + epoch):
        parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for part in parts:
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed * 1_000_003 + epoch)
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        return list(sampler)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's generators begin from `seed` inside, and go on as before after it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
