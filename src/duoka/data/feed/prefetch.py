"""duoka's loader in other people's loops: an epoch at a time, with state, prefetched, in pinned memory.

Wraps `Loader`, whose place in the data is (epoch, batch index): saving is two numbers, resuming replays nothing. For
data sets that are no token store, see map_loader.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from duoka.data.feed.loader import Batch, GlobalBatch, Loader
from duoka.errors import ConfigError

T = TypeVar("T")
_POLL_S = 0.05


class EpochLoader:
    """Iterating gives the rest of the epoch, as GlobalBatches of this rank; the next `for` gives the next epoch."""

    def __init__(self, loader: Loader, *, prefetch: int = 2, pin_memory: bool = False) -> None:
        """`prefetch`: global batches that a thread builds ahead; 0 builds each when it is asked for."""
        self.loader = loader
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.epoch = 0
        self.index = 0

    def __len__(self) -> int:
        """Global batches of a whole epoch, the same on every rank."""
        return self.loader.plan.num_batches()

    def __iter__(self) -> Iterator[GlobalBatch]:
        if self.index >= len(self):
            self.set_epoch(self.epoch + 1)
        epoch = self.epoch
        batches: Iterator[GlobalBatch] = map(
            self._pinned, (self.loader.global_batch(epoch, index) for index in range(self.index, len(self)))
        )
        for batch in prefetched(batches, self.prefetch) if self.prefetch else batches:
            # Counted when it is handed over, not when it was built: what is ahead in the queue was not seen yet.
            self.index = batch.index + 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.index = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was handed over; JSON, and the same on every rank."""
        plan = self.loader.plan
        facts = {"data": plan.fingerprint, "seed": plan.seed, "global_batch": str(plan.global_batch)}
        return {"epoch": self.epoch, "index": self.index, **facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place, on any number of ranks. Refuses the place of another order of batches."""
        for name, value in self.state_dict().items():
            if name not in ("epoch", "index") and state[name] != value:
                what = f"the saved place belongs to another order: its {name} is {state[name]}, here it is {value}"
                raise ConfigError(what, fix="use the data, seed and global batch of the run that saved it")
        self.epoch, self.index = int(state["epoch"]), int(state["index"])

    def _pinned(self, batch: GlobalBatch) -> GlobalBatch:
        if not self.pin_memory:
            return batch
        return replace(batch, micro_batches=[_pin(micro) for micro in batch.micro_batches])


def _pin(batch: Batch) -> Batch:
    tensors: dict[str, Any] = {
        name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def prefetched(items: Iterable[T], count: int) -> Iterator[T]:
    """The same items, up to `count` of them made ahead by a thread, which ends when this iterator does."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=count)
    stop = threading.Event()

    def put(item: tuple[str, Any]) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(("item", item))
                if stop.is_set():
                    return
            put(("end", None))
        except BaseException as error:
            # It belongs to whoever asks for the next item; a thread that dies silently would leave them waiting.
            put(("error", error))
            if not isinstance(error, Exception):
                raise

    thread = threading.Thread(target=work, name="duoka-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            what, item = ready.get()
            if what == "end":
                return
            if what == "error":
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
