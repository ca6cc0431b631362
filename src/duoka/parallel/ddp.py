"""Replicas with summed gradients: DistributedDataParallel, told to add instead of average.

The loss is `sum / targets of the global batch` on every rank, so gradients of ranks must be *added*; DDP's mean is
undone here and nowhere else, by the communication hook. The hook also tells the ledger what is sent, and when.
"""

# No postponed annotations here: DDP reads the hook's, and wants types, not strings.
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from duoka.torch_private import NormBase, foreach_zero_, form_buckets, unused_parameters


@dataclass
class Summing:
    """State of the communication hook: how gradients are sent."""

    compress: str
    power: PowerSGD | None
    heart: Heart
    group: dist.ProcessGroup | None
    sent_all: bool = False  # of the last exchange's buckets


def sum_gradients(summing: Summing, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks."""
    LEDGER.handed_over, ended = time.perf_counter(), LEDGER.begin()
    summing.heart.begin_exchange(f"all_reduce of gradients, bucket {bucket.index()}")
    summing.sent_all = bucket.is_last()
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


class Places:
    """Where gradients lie in DDP's buckets, so that the micro-batches of a step add up there.

    A backward pass that finds no gradient makes one of its own, which the exchange copies to a bucket that is there
    all the time: those of several micro-batches would be held twice.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.views: list[torch.Tensor] = []
        self.num_taken = 0
        self.are_due = False  # DDP is about to form its buckets again, as it does once

    def take(self, form: Callable[[], bool]) -> None:
        """Those in the buckets that `form` makes, with nothing left of earlier ones meanwhile."""
        self.views, self.are_due, self.num_taken = [], False, self.num_taken + 1
        for parameter in self.parameters:  # zeros without memory, in whose place DDP puts views
            parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        if form():
            self.views = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for parameter in self.parameters:
            parameter.grad = None

    def were_sent(self) -> None:
        self.are_due = self.num_taken == 1

    def fill(self) -> None:
        """Zeros, where a step has no gradients yet."""
        if self.views and all(parameter.grad is None for parameter in self.parameters):
            foreach_zero_(self.views)
            for parameter, view in zip(self.parameters, self.views, strict=True):
                parameter.grad = view


UNUSED_FIX = "write:   find_unused_parameters: true   under parallel:, or freeze it"


class Ddp(Engine):
    """Gradients are exchanged once per optimizer step, in the backward pass of its last micro-batch."""

    exchanges_whole_gradients = True

    def __init__(self, spec: EngineSpec) -> None:
        parallel, world = spec.parallel, spec.mesh.loss
        bring(spec)
        # Else prepared models look right after the backward pass: gradients may be gone by the end of `accumulate`.
        self.checks_all_used = spec.drives_passes and not parallel.may_be_unused
        # One without a part in the loss has no gradient, and the optimizer leaves it alone: none is made for it then.
        self.places = Places(spec.bare) if parallel.bucket_view and self.checks_all_used else None
        if self.places is None:
            self._wrap(spec)
        else:
            self.places.take(lambda: self._wrap(spec))
        super().__init__(spec, self.replica)
        self.power: PowerSGD | None = None
        gradients = parallel.compression.gradients
        if gradients == "powersgd":
            self.power = PowerSGD(spec.mesh.everyone.rank, self.named_trainable(), world.group)
        self.summing = Summing(gradients, self.power, world.heart, world.group)
        self.replica.register_comm_hook(self.summing, sum_gradients)
        # A static graph is learned in a first pass that exchanges; DDP breaks when that pass is one without. And its
        # first pass forms the buckets of all later ones: a run that goes on must have these before its first sum.
        self.needs_rehearsal = parallel.static_graph

    def _wrap(self, spec: EngineSpec) -> bool:
        bare, parallel, world = spec.bare, spec.parallel, spec.mesh.loss
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
                # Through copies of all weights, frozen ones too: in runs they are compared (train/replicas.py).
                init_sync=not spec.drives_passes,
                # Only statistics gathered in training differ between ranks; tables of a model never do.
                broadcast_buffers=any(isinstance(m, NormBase) and m.track_running_stats for m in bare.modules()),
            )
        return True

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
        if self.places is not None and not last:
            self.places.fill()
        with contextlib.nullcontext() if last else self.replica.no_sync():
            yield
        if last and self.checks_all_used:
            self.check_all_used(UNUSED_FIX)
        if last and self.places is not None:
            self.places.were_sent()

    def check_all_used(self, fix: str) -> None:
        if self.replica.find_unused_parameters:
            return
        sent_all, self.summing.sent_all = self.summing.sent_all, False
        if not sent_all:
            unused = set(map(id, unused_parameters(self.replica)))
            refuse_unused([name for name, parameter in self.bare.named_parameters() if id(parameter) in unused], fix)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        super().zero_grad(optimizer)
        self._form_buckets()

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._form_buckets()

    def _form_buckets(self) -> None:
        """Once, on all ranks, after the first exchange."""
        if self.places is not None and self.places.are_due:
            with self.world.heart.exchange("broadcast of DDP's buckets"):
                self.places.take(lambda: form_buckets(self.replica))

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
        self._form_buckets()
        if self.places is not None and not last:
            self.places.fill()
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


def refuse_unused(names: Sequence[str], fix: str) -> None:
    """DDP waits for the gradient of each trained parameter, and would fail obscurely at the next step."""
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ConfigError(
            f"the parameter {names[0].removeprefix('lm.')}{more} is trained but had no part in the loss", fix=fix
        )
