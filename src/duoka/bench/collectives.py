"""`duoka comm test`: every collective on the real world, its values checked, its time and bus bandwidth measured.

Values are whole numbers that fp32 holds exactly, different on every rank and at every place, so that a wrong order,
a missing rank or a torn buffer shows. Times are those of the slowest rank. Bus bandwidth is counted as nccl-tests do:
bytes / time, times what the algorithm sends per byte, so that kinds and world sizes can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm import collectives
from duoka.comm.world import World
from duoka.errors import WorkerFailed
from duoka.units import format_bytes

_PERIOD = 1009  # of the pattern; a prime, so that parts of a buffer never look alike


@dataclass(frozen=True)
class Case:
    """One collective: `run` fills `out` from `own` (or from what `out` held); `wanted` is the right answer."""

    name: str
    buffer_bytes: int
    sent_per_byte: float  # by a rank, of the buffer: the factor of the bus bandwidth
    own: Callable[[], torch.Tensor]
    out: Callable[[], torch.Tensor]
    run: Callable[[torch.Tensor, torch.Tensor], object]
    wanted: Callable[[], torch.Tensor | None]  # None: this rank gets nothing


@dataclass(frozen=True)
class Timing:
    """`seconds` is the best of several rounds, each as long as its slowest rank."""

    name: str
    buffer_bytes: int
    seconds: float
    bus_bytes_per_s: float | None  # None for what moves no bytes


@dataclass(frozen=True)
class CommReport:
    """What the world did."""

    world_size: int
    num_nodes: int
    backend: str
    device: str
    rounds: int
    collectives: tuple[Timing, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        nodes = "1 machine" if self.num_nodes == 1 else f"{self.num_nodes} machines"
        out = [
            f"{self.world_size} processes on {nodes}, {self.backend} on {self.device}: every value is right",
            f"  {'collective':<16}{'bytes':>10}{'time':>12}{'bus bandwidth':>16}",
        ]
        for one in self.collectives:
            size = format_bytes(one.buffer_bytes) if one.buffer_bytes else "-"
            speed = f"{one.bus_bytes_per_s / 1e9:.2f} GB/s" if one.bus_bytes_per_s is not None else "-"
            out.append(f"  {one.name:<16}{size:>10}{one.seconds * 1e3:>9.2f} ms{speed:>16}")
        return [*out, f"  best of {self.rounds} rounds, of the slowest rank; bytes are the whole buffer of fp32"]


def check_collectives(world: World, buffer_bytes: int, rounds: int) -> CommReport:
    """Run, check and time every collective. Raises WorkerFailed where a value is wrong or a call fails."""
    share = max(1, buffer_bytes // 4 // world.size)
    measured = tuple(_measure(case, world, rounds) for case in _cases(world, share))
    nodes = len(set(world.gather(world.node)))
    return CommReport(world.size, nodes, world.backend, world.device.type, rounds, measured)


def _measure(case: Case, world: World, rounds: int) -> Timing:
    best = float("inf")
    for _ in range(rounds):
        own, out = case.own(), case.out()
        _settle(world)
        dist.barrier()
        started = time.perf_counter()
        try:
            case.run(own, out)
        except RuntimeError as error:
            raise _failed(case, world, error) from error
        _settle(world)
        seconds = time.perf_counter() - started
        wrong = world.gather(_describe_wrong(case.wanted(), out))
        if any(wrong):
            rank = next(rank for rank, text in enumerate(wrong) if text)
            raise WorkerFailed(
                f"{case.name} gave rank {rank} wrong values: {wrong[rank]}",
                fix="run `duoka doctor` on that machine; with NCCL try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1",
            )
        best = min(best, max(world.gather(seconds)))
    speed = case.sent_per_byte * case.buffer_bytes / best if case.buffer_bytes else None
    return Timing(case.name, case.buffer_bytes, best, speed)


def _settle(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _failed(case: Case, world: World, error: RuntimeError) -> WorkerFailed:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return WorkerFailed(
        f"{case.name} failed on rank {world.rank}: {lines[0]}",
        fix="another rank has ended or does not answer: see its own message, and `duoka doctor` on its machine",
    )


def _describe_wrong(wanted: torch.Tensor | None, got: torch.Tensor) -> str:
    if wanted is None or torch.equal(wanted, got):
        return ""
    differs = (wanted != got).nonzero().flatten()
    place = int(differs[0])
    return (
        f"{len(differs):,} of {got.numel():,}, first at place {place:,}: "
        f"{got[place].item():g} instead of {wanted[place].item():g}"
    )


def _cases(world: World, share: int) -> list[Case]:
    """`share` numbers for each rank; the whole buffer is as many times longer as there are ranks."""
    size, rank, device = world.size, world.rank, world.device
    whole = share * size

    def of(owner: int, numel: int = whole, start: int = 0) -> torch.Tensor:
        """What rank `owner` has to say, from place `start` of its buffer on."""
        places = torch.arange(start, start + numel, device=device)
        return ((places + 31 * owner) % _PERIOD).float()

    def part(owner: int, index: int) -> torch.Tensor:
        return of(owner, share, share * index)

    def total(numel: int = whole, start: int = 0) -> torch.Tensor:
        return torch.stack([of(owner, numel, start) for owner in range(size)]).sum(0)

    def joined(index: int | None = None) -> torch.Tensor:
        """Parts of all ranks in order: of each its first, or its part `index`."""
        return torch.cat([part(owner, index or 0) for owner in range(size)])

    def empty(numel: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.full((numel,), torch.nan, device=device)

    def mine(numel: int) -> Callable[[], torch.Tensor]:
        return lambda: of(rank, numel)

    main, last = rank == 0, size - 1
    others = (size - 1) / size
    size_bytes = 4 * whole
    return [
        Case("all-reduce", size_bytes, 2 * others, mine(whole), mine(whole),
             lambda own, out: collectives.all_reduce(out), total),
        Case("reduce-scatter", size_bytes, others, mine(whole), empty(share),
             lambda own, out: collectives.reduce_scatter(out, own), lambda: total(share, share * rank)),
        Case("all-gather", size_bytes, others, mine(share), empty(whole),
             lambda own, out: collectives.all_gather(out, own), joined),
        Case("all-to-all", size_bytes, others, mine(whole), empty(whole),
             lambda own, out: collectives.all_to_all(out, own), lambda: joined(rank)),
        # From the last rank: rank 0 is what a broken world has by accident.
        Case("broadcast", size_bytes, 1.0, mine(whole), mine(whole),
             lambda own, out: collectives.broadcast(out, last), lambda: of(last)),
        Case("reduce", size_bytes, 1.0, mine(whole), mine(whole),
             lambda own, out: dist.reduce(out, dst=0), lambda: total() if main else None),
        Case("scatter", size_bytes, others, mine(whole), empty(share),
             lambda own, out: dist.scatter(out, list(own.chunk(size)) if main else None, src=0),
             lambda: part(0, rank)),
        Case("gather", size_bytes, others, mine(share), empty(whole),
             lambda own, out: dist.gather(own, list(out.chunk(size)) if main else None, dst=0),
             lambda: joined() if main else None),
        Case("send/recv", size_bytes, 1.0, mine(whole), empty(whole), lambda own, out: _pass_on(own, out, world),
             lambda: of((rank - 1) % size)),
        Case("barrier", 0, 0.0, mine(1), mine(1), lambda own, out: dist.barrier(), lambda: of(rank, 1)),
    ]  # fmt: skip


def _pass_on(own: torch.Tensor, out: torch.Tensor, world: World) -> None:
    """A ring: to the next rank, from the one before."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    operations = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, out, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
