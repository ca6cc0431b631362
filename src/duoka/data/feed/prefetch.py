"""duoka's loader for users' own loops: an epoch at a time, with state, prefetched, in pinned memory.

Wraps `Loader`, whose place in the data is (epoch, batch index): saving is two numbers, resuming replays nothing. For
data sets that are no token store, see map_loader.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from duoka.data.feed.ahead import prefetched
from duoka.data.feed.loader import GlobalBatch, Loader
from duoka.errors import ConfigError


class EpochLoader:
    """Iterating gives the rest of the epoch, as GlobalBatches of this rank; the next `for` gives the next epoch."""

    def __init__(self, loader: Loader, *, prefetch: int = 2, pin_memory: bool = False) -> None:
        """`prefetch`: global batches that a thread builds ahead; 0 builds each when it is asked for."""
        self.loader = loader
        self.prefetch = prefetch
        loader.pin_memory = loader.pin_memory or pin_memory
        self.epoch = 0
        self.index = 0

    def __len__(self) -> int:
        """Global batches of a whole epoch, the same on every rank."""
        return self.loader.plan.num_batches()

    def __iter__(self) -> Iterator[GlobalBatch]:
        if self.index >= len(self):
            self.set_epoch(self.epoch + 1)
        epoch = self.epoch
        batches = (self.loader.global_batch(epoch, index) for index in range(self.index, len(self)))
        with contextlib.closing(prefetched(batches, self.prefetch) if self.prefetch else batches) as ahead:
            for batch in ahead:
                # Counted when it is yielded, not when it is built: prefetched batches were not trained on yet.
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
