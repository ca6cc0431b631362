"""Audit of data sharding: the samples, or row groups, that each rank of a world trains on, and that each is there once.

`duoka data audit` prints it. It uses the same epoch plan as training, for a world that need not exist.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duoka.config.schema import RunConfig
from duoka.data.build_feed import build_feed
from duoka.data.feed.epoch_plan import cost_of
from duoka.data.feed.loader import Loader
from duoka.data.feed.stream_source import StreamSource
from duoka.data.prepare import PreparedData
from duoka.plan.layout import Layout
from duoka.units import Amount, parse_amount

_SHOWN = 8


@dataclass(frozen=True)
class RankShare:
    """One rank's samples in the audited global batches."""

    rank: int
    count: int  # samples, or row groups (or parts of them) of an epoch
    num_tokens: int  # documents, of a stream
    cost: float  # of the mean over ranks
    first: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """`num_twice` and `num_missing` count over a whole epoch; anything but 0 is a bug."""

    epoch: int
    what: str
    total: int
    num_twice: int
    num_missing: int
    looked_at: str
    ranks: tuple[RankShare, ...]
    # For comparison: DistributedSampler repeats samples until ranks have equally many, Accelerate until their batches
    # are full. 0: not counted in samples.
    num_padded: int = 0
    num_evened: int = 0

    @property
    def is_exact(self) -> bool:
        return not self.num_twice and not self.num_missing

    def lines(self) -> list[str]:
        out = [f"epoch {self.epoch}: {self.total:,} {self.what}, {self.looked_at}"]
        for one in self.ranks:
            more = ", ..." if one.count > len(one.first) else ""
            first = f"{', '.join(one.first)}{more}" if one.first else "none"
            out.append(f"  rank {one.rank}: {one.count:,} ({one.cost:.0%} of the mean work): {first}")
        verdict = "each once" if self.is_exact else "NOT each once, which is a bug of duoka"
        out.append(f"{verdict}: {self.num_twice:,} twice, {self.num_missing:,} missing")
        if self.num_padded > self.total or self.num_evened > self.total:
            evened = f", batches evened out {self.num_evened:,}" if self.num_evened else ""
            out.append(f"elsewhere: DistributedSampler would make {self.num_padded:,} of them{evened}")
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_exact": self.is_exact}


def evened_out(count: int, size: int) -> int:
    """The next multiple: what a sampler makes of `count` samples that repeats some until `size` ranks have as many."""
    return -(-count // size) * size


def audit_data(
    prepared: PreparedData, config: RunConfig, num_ranks: int, *, epoch: int = 0, num_batches: int = 1000
) -> Audit:
    """The shares of `num_ranks` ranks in the first `num_batches` of an epoch; of a stream, in all of it."""
    if isinstance(prepared.train, StreamSource):
        return _audit_stream(prepared.train, num_ranks, epoch)
    # How a rank cuts its share into micro-batches does not matter here.
    micro = Amount(config.sample_tokens, "tokens")
    layout = Layout(num_ranks, "ddp" if num_ranks > 1 else "single", micro=micro, packing=config.data.packs)
    feed = build_feed(config, prepared, layout, 0, lambda values: values)
    assert isinstance(feed, Loader)
    total = len(prepared.train)
    seen = np.zeros(total, np.int64)
    for index in range(feed.steps_per_epoch):
        np.add.at(seen, feed.plan.batch(epoch, index), 1)
    looked_at = min(num_batches, feed.steps_per_epoch)
    ids: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in range(looked_at):
        batch = feed.plan.batch(epoch, index)
        shares = feed.shares(batch)
        for rank, share in enumerate(shares):
            ids[rank] += [sample for micro in share for sample in micro.sample_ids]
        shared = np.sort(np.concatenate([[i for m in share for i in m.sample_ids] for share in shares])).astype(int)
        if not np.array_equal(shared, np.sort(batch)):
            wrong = np.bincount(shared, minlength=total) - np.bincount(batch, minlength=total)
            seen += wrong
    lengths = feed.plan.lengths
    costs = [sum(cost_of(int(lengths[i])) for i in own) for own in ids]
    mean = max(1.0, sum(costs) / len(costs))
    ranks = tuple(
        RankShare(rank, len(own), int(lengths[own].sum()) if own else 0, cost / mean, tuple(map(str, own[:_SHOWN])))
        for rank, (own, cost) in enumerate(zip(ids, costs, strict=True))
    )
    words = f"shares of {looked_at:,} of {feed.steps_per_epoch:,} global batches"
    what = "rows of text" if prepared.report.row_tokens else prepared.report.noun or "samples"
    asked = parse_amount(config.train.global_batch)
    # As DistributedSampler counts: the same number on every rank of every step.
    whole = evened_out(asked.count, num_ranks) if asked.unit == "samples" else 0
    padded, evened = evened_out(total, num_ranks), evened_out(total, whole) if whole else 0
    return Audit(epoch, what, total, int((seen > 1).sum()), int((seen < 1).sum()), words, ranks, padded, evened)


def _audit_stream(source: StreamSource, num_ranks: int, epoch: int) -> Audit:
    plan = source.plan
    ranks, every = [], []
    for rank in range(num_ranks):
        streams = range(rank, plan.num_streams, num_ranks)
        units = [unit for stream in streams for unit in plan.units_of(stream, epoch)]
        every += units
        names = tuple(f"{Path(one.file).name}:{one.group}[{one.start}:{one.end}]" for one in units[:_SHOWN])
        documents = sum(unit.end - unit.start for unit in units)
        ranks.append(RankShare(rank, len(units), documents, len(streams) * num_ranks / plan.num_streams, names))
    twice = len(every) - len(set(every))
    missing = len(set(plan.units) - set(every))
    words = f"read by {plan.num_streams} streams"
    what = "row groups" if len(plan.units) == len({(u.file, u.group) for u in plan.units}) else "parts of row groups"
    return Audit(epoch, what, len(plan.units), twice, missing, words, tuple(ranks))
