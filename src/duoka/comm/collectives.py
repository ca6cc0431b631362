"""Collectives on flat tensors, each counted in the ledger, in the form that is honest on its backend.

Gloo's own reduce-scatter sends a whole all-reduce; here it is an all-to-all and a sum of what came, half of that and
several times faster. `shard` tensors hold this rank's part of the whole, equal parts in the order of ranks.
Called by the strategies and by optimizers that share their state; a group of one sends nothing and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.ledger import LEDGER

# torch 2.13 renamed two of them, and warns at each call by the old name.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TimedWork(dist.Work):
    """A collective under way; the time that its `wait` takes is counted as waiting."""

    def __init__(self, work: dist.Work, done: Callable[[], None] | None = None) -> None:
        """`done` is called at its end, which on the host's clock is gloo's alone."""
        super().__init__()
        self._work = work
        if done is not None:
            work.get_future().add_done_callback(lambda _: done())

    def wait(self, timeout: Any = None) -> bool:  # type: ignore[override]
        with LEDGER.waiting():
            done: bool = self._work.wait()
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group)


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True when tensors of `device` travel through gloo in this group."""
    return "gloo" in str(dist.get_backend(group)) and device.type == "cpu"


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Sum over ranks, in place; with another `op`, what that makes of them."""
    if num_ranks(group) > 1:
        LEDGER.note("all-reduce", bytes_of(tensor), num_ranks(group))
        with LEDGER.waiting():
            dist.all_reduce(tensor, op, group)
    return tensor


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Begin a sum in place; the caller looks after its end."""
    LEDGER.note("all-reduce", bytes_of(tensor), num_ranks(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def start_all_gather(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> TimedWork:
    """Begin to fill `whole` with every rank's `shard` (which may be its place in `whole`)."""
    LEDGER.note("all-gather", bytes_of(whole), num_ranks(group))
    done = LEDGER.begin()
    return TimedWork(gather_into(whole, shard, group=group, async_op=True), done)


def all_gather(whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Fill `whole` with every rank's `shard`."""
    if num_ranks(group) == 1:
        return whole.copy_(shard)
    LEDGER.note("all-gather", bytes_of(whole), num_ranks(group))
    with LEDGER.waiting():
        gather_into(whole, shard, group=group)
    return whole


def reduce_scatter(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill `shard` with this rank's part of the sum of every rank's `whole`; `whole` stays as it is.

    Ranks are added in their order, so that the sum is the same however often it is done. `parts`, like `whole`, is
    memory for what arrives.
    """
    size = num_ranks(group)
    if size == 1:
        return shard.copy_(whole)
    LEDGER.note("reduce-scatter", bytes_of(whole), size)
    with LEDGER.waiting():
        if not is_gloo(group, whole.device):
            scatter_into(shard, whole, group=group)
            return shard
        parts = torch.empty_like(whole) if parts is None else parts
        dist.all_to_all_single(parts, whole, group=group)
    # bf16 parts are added in fp32 and rounded once.
    return torch.sum(parts.view(size, -1), dim=0, out=shard)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    received_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> torch.Tensor:
    """Part i of `sent` goes to rank i; part i of `received` comes from it. Parts are equal unless sizes are given."""
    if num_ranks(group) == 1:
        return received.copy_(sent)
    start_all_to_all(received, sent, group, received_sizes, sent_sizes).wait()
    return received


def start_all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    received_sizes: list[int] | None = None,
    sent_sizes: list[int] | None = None,
) -> TimedWork:
    """Begin an exchange of parts; both tensors must live until its end."""
    size, rank = num_ranks(group), dist.get_rank(group)
    kept = sent_sizes[rank] * sent.element_size() if sent_sizes else bytes_of(sent) // size
    LEDGER.note("all-to-all", bytes_of(sent), size, sent_bytes=bytes_of(sent) - kept)
    return TimedWork(dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group, async_op=True))


def broadcast(tensor: torch.Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The tensor of global rank `source`, on every rank, in place."""
    if num_ranks(group) > 1:
        LEDGER.note("broadcast", bytes_of(tensor), num_ranks(group))
        with LEDGER.waiting():
            dist.broadcast(tensor, src=source, group=group)
    return tensor


def start_send(tensor: torch.Tensor, group: dist.ProcessGroup | None, to_later: bool) -> TimedWork:
    """Begin to send to the other rank of a group of two, which comes before or after this one."""
    LEDGER.note("send", bytes_of(tensor), 2, sent_bytes=bytes_of(tensor))
    return _under_way(dist.isend(tensor, group=group, group_dst=int(to_later)))


def start_receive(tensor: torch.Tensor, group: dist.ProcessGroup | None, from_later: bool) -> TimedWork:
    """Begin to fill a tensor with what the other rank of a group of two sends. Its sender counts it."""
    return _under_way(dist.irecv(tensor, group=group, group_src=int(from_later)))


def _under_way(work: dist.Work | None) -> TimedWork:
    assert work is not None, "both ranks of the group are here"
    return TimedWork(work)
