"""Replicas with summed gradients: DistributedDataParallel, told to add instead of average.

The loss is `sum / targets of the global batch` on every rank, so gradients of ranks must be *added*; DDP's mean is
undone here and nowhere else, by the communication hook. The hook also tells the ledger what travels, and when.
"""

# No postponed annotations here: DDP reads the hook's, and wants types, not strings.
import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from duoka.comm.collectives import start_all_reduce
from duoka.comm.ledger import LEDGER
from duoka.comm.world import World
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError
from duoka.model.build import named_part
from duoka.parallel.powersgd import PowerSGD
from duoka.runs.heart import Heart

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Summing:
    """What the hook knows: how gradients travel."""

    compress: str
    power: PowerSGD | None
    heart: Heart


def sum_gradients(summing: Summing, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks."""
    LEDGER.handed_over = time.perf_counter()
    summing.heart.begin_exchange(f"all_reduce of gradients, bucket {bucket.index()}")
    if summing.power is not None and summing.power.takes(bucket):
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed.set_result(summing.power.sum_over_ranks(bucket))
        return summed
    buffer = bucket.buffer()
    travels = buffer.to(HALF[summing.compress]) if summing.compress in HALF else buffer
    work = start_all_reduce(travels)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        LEDGER.came_back = time.perf_counter()
        total = future.value()[0]
        return total if total.dtype == buffer.dtype else buffer.copy_(total)

    return work.get_future().then(done)


def apply_ddp(
    model: torch.nn.Module, parallel: ParallelConfig, world: World
) -> tuple[DistributedDataParallel, PowerSGD | None]:
    """Wrap the model; rank 0's weights go to all. With it, the compressed exchange where that was asked for."""
    with warnings.catch_warnings():
        # Torch's new name for broadcast_buffers has no way yet to leave the first broadcast out.
        warnings.simplefilter("ignore", FutureWarning)
        replica = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            find_unused_parameters=parallel.find_unused_parameters,
            gradient_as_bucket_view=parallel.bucket_view,
            static_graph=parallel.static_graph,
            bucket_cap_mb=parallel.bucket_mb,
            # Only statistics gathered in training differ between ranks; tables of a model never do.
            broadcast_buffers=any(isinstance(m, _NormBase) and m.track_running_stats for m in model.modules()),
        )
    power = None
    if parallel.compress == "powersgd":
        trained = {name: p for name, p in named_part(model).named_parameters() if p.requires_grad}
        power = PowerSGD(world.rank, trained)
    replica.register_comm_hook(Summing(parallel.compress, power, world.heart), sum_gradients)
    return replica, power


@dataclass
class DdpExchange:
    """Gradients are exchanged once per optimizer step, in the backward pass of its last micro-batch."""

    model: DistributedDataParallel
    looks_for_unused: bool = False  # by itself, or somebody else calls check_all_used
    # A static graph is learnt in a first pass that exchanges; DDP breaks when that pass is one without. And its first
    # pass forms the buckets of all later ones: a run that goes on must have these before its first sum.
    needs_rehearsal: bool = False
    power: PowerSGD | None = None

    def go_on(self) -> None:
        """Of a run that a checkpoint continues. Where a gradient lies in its bucket says in which order gloo adds more
        than two of them, and so what the last bit is."""
        self.needs_rehearsal = self.needs_rehearsal or dist.get_world_size() > 2

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around one pass with an exchange whose sums are thrown away."""
        with self.without_debts(), self(True):
            yield
        self.needs_rehearsal = False

    @contextlib.contextmanager
    def without_debts(self) -> Iterator[None]:
        """What is left out of a compressed sum meanwhile is no step's."""
        if self.power is not None:
            self.power.is_rehearsing = True
        try:
            yield
        finally:
            if self.power is not None:
                self.power.is_rehearsing = False

    def give_up(self) -> None:
        """The sums of the step just exchanged change nothing: what they left out is owed as before."""
        if self.power is not None:
            self.power.take_back()

    @contextlib.contextmanager
    def __call__(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.model.no_sync():
            yield
        if last and not self.looks_for_unused:
            check_all_used(self.model.module)


UNUSED_FIX = "write:   find_unused_parameters: true   under parallel:, or freeze it"


def check_all_used(model: torch.nn.Module, fix: str = UNUSED_FIX) -> None:
    """Name a trained parameter that got no gradient: DDP waits for it, and would fail obscurely at the next step."""
    unused = [name.removeprefix("lm.") for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise ConfigError(
            f"the parameter {unused[0]}{more} is trained but had no part in the loss",
            fix=fix,
        )
