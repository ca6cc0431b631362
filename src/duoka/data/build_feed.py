"""The training loop's dataloader, for all kinds of data: samples, rows of text, or a stream read while training.

`build_feed` chooses; the loop knows only `Feed`. A new kind of data for training is a class with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from duoka.config.schema import RunConfig
from duoka.data.feed.epoch_plan import ORDER_VERSION, plan_epochs
from duoka.data.feed.loader import GlobalBatch, Loader, Place
from duoka.data.feed.stream_feed import StreamFeed
from duoka.data.feed.stream_source import StreamSource
from duoka.data.prepare import PreparedData
from duoka.plan.layout import Layout


class Feed(Protocol):
    """One rank's part of every global batch."""

    @property
    def steps_per_epoch(self) -> int | None:
        """None where it is unknown before all data has been read."""
        ...

    def num_steps(self, num_epochs: float) -> int | None: ...

    def num_samples_between(self, start: int, end: int) -> int:
        """Samples, or rows, of the steps [start, end) counted from the first epoch."""
        ...

    def batches(self, place: Place, num_epochs: float) -> Generator[GlobalBatch]:
        """Global batches from a place on, prefetched by a thread that ends when this is closed.

        A collective: all ranks iterate together, as streams reduce a few numbers per batch.
        """
        ...

    def summary(self) -> str:
        """Data statistics since the start, where there are more than the number of samples."""
        ...


def build_feed(
    config: RunConfig,
    prepared: PreparedData,
    layout: Layout,
    rank: int,
    sum_over_ranks: Callable[[list[float]], list[float]],
    *,
    pin_memory: bool = False,
) -> Feed:
    """This rank's feed of a prepared config."""
    train = prepared.train
    if isinstance(train, StreamSource):
        return StreamFeed(
            train, rank=rank, num_ranks=layout.dp, micro=layout.micro, pad_id=prepared.pad_id,
            sum_over_ranks=sum_over_ranks, pin_memory=pin_memory,
        )  # fmt: skip
    return Loader(
        train, plan_epochs(train, config.train), rank=rank, num_ranks=layout.dp, micro=layout.micro,
        packing=layout.packing, max_length=config.sample_tokens, pad_id=prepared.pad_id,
        fixed_rows=config.data.fixed_rows, pin_memory=pin_memory,
    )  # fmt: skip


def data_order(prepared: PreparedData) -> str:
    """Fingerprint of data and order that a place is valid for; with the run's settings it fixes every global batch."""
    return f"{ORDER_VERSION}/{prepared.train.fingerprint}"
