"""Replicas with summed gradients: DistributedDataParallel, told to add instead of average.

The loss is `sum / targets of the global batch` on every rank, so gradients of ranks must be *added*; DDP's mean is
undone here and nowhere else, by the communication hook. The hook also measures the communication that nothing hides.
"""

# No postponed annotations here: DDP reads the hook's, and wants types, not strings.
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from duoka.config.schema import ParallelConfig
from duoka.parallel.world import World


@dataclass
class CommunicationClock:
    """When the last bucket was handed over and when it came back, on the host's clock."""

    handed_over: float = 0.0
    came_back: float = 0.0

    def exposed_s(self) -> float:
        """Seconds between the end of this rank's own work and the end of the exchange."""
        return max(0.0, self.came_back - self.handed_over)

    def reset(self) -> None:
        self.handed_over = self.came_back = 0.0


def sum_gradients(clock: CommunicationClock, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks."""
    clock.handed_over = time.perf_counter()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        clock.came_back = time.perf_counter()
        return future.value()[0]

    return work.get_future().then(done)


def apply_ddp(
    model: torch.nn.Module, parallel: ParallelConfig, world: World
) -> tuple[DistributedDataParallel, CommunicationClock]:
    """Wrap the model; rank 0's weights go to all."""
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        find_unused_parameters=parallel.find_unused_parameters,
        gradient_as_bucket_view=parallel.bucket_view,
        broadcast_buffers=False,
    )
    clock = CommunicationClock()
    replica.register_comm_hook(clock, sum_gradients)
    return replica, clock


@dataclass(frozen=True)
class DdpExchange:
    """Gradients are exchanged once per optimizer step, in the backward pass of its last micro-batch."""

    model: DistributedDataParallel

    @contextlib.contextmanager
    def __call__(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.model.no_sync():
            yield
