"""Replicas with summed gradients: DistributedDataParallel, told to add instead of average.

The loss is `sum / targets of the global batch` on every rank, so gradients of ranks must be *added*; DDP's mean is
undone here and nowhere else, by the communication hook. The hook also tells the ledger what is sent, and when.
"""

# No postponed annotations here: DDP reads the hook's, and wants types, not strings.
import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from duoka.comm.collectives import start_all_reduce
from duoka.comm.ledger import LEDGER
from duoka.data.feed.loader import GlobalBatch
from duoka.errors import ConfigError
from duoka.parallel.engine import NO_OBSERVER, Engine, EngineSpec, PassObserver, RankSums
from duoka.parallel.objective import Objective, no_loss
from duoka.parallel.out_of_memory import Shortage, smallest_batch
from duoka.parallel.powersgd import PowerSGD
from duoka.parallel.precision import HALF, compute_in
from duoka.parallel.single import bring
from duoka.runs.heart import Heart
from duoka.torch_private import NormBase


@dataclass
class Summing:
    """State of the communication hook: how gradients are sent."""

    compress: str
    power: PowerSGD | None
    heart: Heart
    group: dist.ProcessGroup | None


def sum_gradients(summing: Summing, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks."""
    LEDGER.handed_over, ended = time.perf_counter(), LEDGER.begin()
    summing.heart.begin_exchange(f"all_reduce of gradients, bucket {bucket.index()}")
    if summing.power is not None and summing.power.takes(bucket):
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed.set_result(summing.power.sum_over_ranks(bucket))
        ended()
        return summed
    buffer = bucket.buffer()
    travels = buffer.to(HALF[summing.compress]) if summing.compress in HALF else buffer
    work = start_all_reduce(travels, summing.group)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        LEDGER.came_back = time.perf_counter()
        ended()
        total = future.value()[0]
        return total if total.dtype == buffer.dtype else buffer.copy_(total)

    return work.get_future().then(done)


UNUSED_FIX = "write:   find_unused_parameters: true   under parallel:, or freeze it"


class Ddp(Engine):
    """Gradients are exchanged once per optimizer step, in the backward pass of its last micro-batch."""

    exchanges_whole_gradients = True

    def __init__(self, spec: EngineSpec) -> None:
        bare, parallel, world = spec.bare, spec.parallel, spec.mesh.loss
        bring(spec)
        with warnings.catch_warnings():
            # Torch's new name for broadcast_buffers has no way yet to leave the first broadcast out.
            warnings.simplefilter("ignore", FutureWarning)
            self.replica = DistributedDataParallel(
                bare,
                process_group=world.group,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                find_unused_parameters=parallel.find_unused_parameters,
                gradient_as_bucket_view=parallel.bucket_view,
                static_graph=parallel.static_graph,
                bucket_cap_mb=parallel.bucket_mb,
                # Only statistics gathered in training differ between ranks; tables of a model never do.
                broadcast_buffers=any(isinstance(m, NormBase) and m.track_running_stats for m in bare.modules()),
            )
        super().__init__(spec, self.replica)
        self.power: PowerSGD | None = None
        gradients = parallel.compression.gradients
        if gradients == "powersgd":
            self.power = PowerSGD(spec.mesh.everyone.rank, self.named_trainable(), world.group)
        self.replica.register_comm_hook(Summing(gradients, self.power, world.heart, world.group), sum_gradients)
        # With a static graph DDP finds by itself which parameters are never used.
        self.checks_all_used = not (parallel.find_unused_parameters or parallel.static_graph)
        # A static graph is learned in a first pass that exchanges; DDP breaks when that pass is one without. And its
        # first pass forms the buckets of all later ones: a run that goes on must have these before its first sum.
        self.needs_rehearsal = parallel.static_graph

    def resumed(self) -> None:
        """Where a gradient lies in its bucket says in which order gloo adds more than two of them, and so what the
        last bit is."""
        self.needs_rehearsal = self.needs_rehearsal or self.mesh.loss.size > 2

    def extra_tensors(self, model: str = "") -> dict[str, torch.Tensor]:
        """PowerSGD's error-feedback residuals and factors."""
        return {} if self.power is None else self.power.tensors(model)

    def forward_backward(
        self, batch: GlobalBatch, objective: Objective, observer: PassObserver = NO_OBSERVER
    ) -> RankSums:
        if self.needs_rehearsal:
            self.rehearse(batch.micro_batches[0], objective)
            LEDGER.take()  # discard its traffic: it belongs to no step
        return super().forward_backward(batch, objective, observer)

    @contextlib.contextmanager
    def exchange(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.replica.no_sync():
            yield
        if last and self.checks_all_used:
            check_all_used(self.bare)

    def check_all_used(self, fix: str) -> None:
        if not self.replica.find_unused_parameters:
            check_all_used(self.bare, fix)

    def discard_exchange(self, optimizer: torch.optim.Optimizer, *, is_short: bool, overflowed: bool) -> None:
        super().discard_exchange(optimizer, is_short=is_short, overflowed=overflowed)
        if self.power is not None:
            self.power.take_back()  # restore the residuals from before this exchange

    def rejoin(self, shortage: Shortage, batch: GlobalBatch, objective: Objective) -> bool:
        """Join the pending gradient exchange, by a pass over one token in place of the one that ran out of memory."""
        # Ranks that share rows exchange in every layer: it stopped between two of them, and others wait in the next.
        if (shortage.is_in_exchange and self.mesh.loss.size > 1) or self.mesh.sequence.size > 1:
            return False
        device = self.world.device
        with self.exchange(True):
            with compute_in(self.numerics.precision, device):
                sums = objective.sums(self.model, smallest_batch(batch.micro_batches[0]), device)
            no_loss(sums.losses).backward()
        return True

    @contextlib.contextmanager
    def rehearsing(self, last: bool) -> Iterator[None]:
        """Always with an exchange, which forms the buckets."""
        with self.unrecorded(), self.exchange(True):
            yield
        self.needs_rehearsal = False

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Compression is off meanwhile: no residual changes."""
        if self.power is not None:
            self.power.is_rehearsing = True
        try:
            yield
        finally:
            if self.power is not None:
                self.power.is_rehearsing = False


def check_all_used(model: torch.nn.Module, fix: str = UNUSED_FIX) -> None:
    """Name a trained parameter that got no gradient: DDP waits for it, and would fail obscurely at the next step."""
    unused = [name.removeprefix("lm.") for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        more = f" (and {len(unused) - 1} more)" if len(unused) > 1 else ""
        raise ConfigError(
            f"the parameter {unused[0]}{more} is trained but had no part in the loss",
            fix=fix,
        )
