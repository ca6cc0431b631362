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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError
from duoka.parallel.collectives import is_gloo, start_all_reduce
from duoka.parallel.ledger import LEDGER
from duoka.parallel.world import World
from duoka.runs.heart import Heart

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# PowerSGD exchanges two thin matrices of this rank instead of each gradient, once the first wild steps are over.
POWERSGD_RANK, POWERSGD_FROM_STEP = 4, 10


@dataclass
class Summing:
    """What the hook knows: how gradients travel."""

    compress: str
    power: powerSGD_hook.PowerSGDState | None
    heart: Heart


def sum_gradients(summing: Summing, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks."""
    LEDGER.handed_over = time.perf_counter()
    summing.heart.begin_exchange(f"all_reduce of gradients, bucket {bucket.index()}")
    if summing.power is not None:
        return _sum_by_thin_matrices(summing.power, bucket)
    buffer = bucket.buffer()
    travels = buffer.to(HALF[summing.compress]) if summing.compress in HALF else buffer
    work = start_all_reduce(travels)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        LEDGER.came_back = time.perf_counter()
        total = future.value()[0]
        return total if total.dtype == buffer.dtype else buffer.copy_(total)

    return work.get_future().then(done)


def _sum_by_thin_matrices(
    power: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    begins, before = power.iter < power.start_powerSGD_iter, power.total_numel_after_compression
    mean = powerSGD_hook.powerSGD_hook(power, bucket)
    if is_gloo(None, bucket.buffer().device):
        # Its later exchanges begin in gloo's threads when the earlier end: with several buckets under way, ranks would
        # begin them in different orders, and abort.
        mean.wait()
    # Torch's hook sends by itself and tells how much: before it begins to compress, the whole bucket.
    buffer = bucket.buffer()
    numel = buffer.numel() if begins else power.total_numel_after_compression - before
    LEDGER.note("all-reduce", numel * buffer.element_size(), dist.get_world_size())

    def scaled(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        LEDGER.came_back = time.perf_counter()
        return future.value().mul_(dist.get_world_size())

    return mean.then(scaled)


def apply_ddp(model: torch.nn.Module, parallel: ParallelConfig, world: World) -> DistributedDataParallel:
    """Wrap the model; rank 0's weights go to all."""
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
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_FROM_STEP
        )
    replica.register_comm_hook(Summing(parallel.compress, power, world.heart), sum_gradients)
    return replica


@dataclass
class DdpExchange:
    """Gradients are exchanged once per optimizer step, in the backward pass of its last micro-batch."""

    model: DistributedDataParallel
    looks_for_unused: bool = False  # by itself, or somebody else calls check_all_used
    # A static graph is learnt in a first pass that exchanges; DDP breaks when that pass is one without.
    needs_rehearsal: bool = False

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
