"""One optimizer step on one global batch: forward and backward over this rank's micro-batches, clip, update.

How a layout does each of these is its engine's (parallel/engine.py); here is the order, and what all ranks must know
before a weight changes. The loss is `sum over k of sum_k / denominator_k`; denominators are global and known beforehand
on every rank, so each micro-batch is divided by them at once, and gradients are summed, never averaged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from duoka.comm.ledger import LEDGER, Traffic
from duoka.data.feed.loader import GlobalBatch
from duoka.optim.disk import DiskAdamW
from duoka.parallel import inject
from duoka.parallel.engine import NO_OBSERVER, Engine, PassObserver, RankSums, StepTimes
from duoka.parallel.look_ahead import Looked, look_ahead
from duoka.parallel.mesh import Mesh
from duoka.parallel.objective import LooksAhead, Objective
from duoka.parallel.out_of_memory import Shortage
from duoka.plan.hardware import available_memory_bytes

PAGE_CACHE_PART = 4  # of free memory, a quarter may hold what the optimizer will read from a disk


@dataclass
class StepResult:
    """Global numbers: the loss, the sums it is made of, means of metrics, the norm before clipping, `flag_counts`.

    `flag_counts` are the local flags summed over ranks; `traffic` is what this rank exchanged. The weights changed only
    if `is_finite` and not `is_short`.
    """

    loss: float = 0.0
    norm: float = 0.0  # NaN on all ranks when it is not finite on one
    losses: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    flag_counts: list[float] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    is_finite: bool = True
    is_short: bool = False  # of memory, on some rank
    shortage: Shortage | None = None  # on this one
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    exchanged_s: float = 0.0  # while any of it was under way, seen by the host's clock (gloo)
    num_micro_batches: int = 1
    num_shared: int = 0  # tokens of all ranks that were not computed: others of their micro-batch begin with the same

    @property
    def seen_exchange_s(self) -> float:
        """0 where not all ends were seen: on a GPU, and of what stages of a pipeline send."""
        return 0.0 if "send" in self.traffic else self.exchanged_s


def optimizer_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: GlobalBatch,
    objective: Objective,
    *,
    clip: float,
    local_flags: Callable[[], Sequence[float]] = tuple,
    observer: PassObserver = NO_OBSERVER,
) -> StepResult:
    """Learn from one global batch, unless its numbers are not finite or memory is short: then nothing changes.

    `local_flags` gives numbers of this rank's own, summed over ranks together with the loss: one exchange tells
    everything before the optimizer has changed a weight.
    """
    began = time.perf_counter()
    LEDGER.take()  # what an evaluation or a check exchanged belongs to no step
    looked = Looked()
    if isinstance(objective, LooksAhead):
        looked = look_ahead(engine, batch, objective)
        if looked.is_short:
            return StepResult(is_short=True, shortage=looked.shortage)
    world = engine.mesh.everyone
    if isinstance(optimizer, DiskAdamW):
        optimizer.read_ahead(available_memory_bytes() // (PAGE_CACHE_PART * world.local_size))
    shared_before = _count_shared(engine)
    sums = engine.forward_backward(batch, objective, observer)
    num_shared = _count_shared(engine) - shared_before
    shortage, times = sums.shortage, sums.times
    if shortage is not None and not shortage.rejoined:
        return StepResult(is_short=True, shortage=shortage)
    waited, spent = LEDGER.waited_s, time.perf_counter() - began
    inject.strike_gradients(engine.gradients, world.heart.beat.step + 1, world.rank)
    norm = engine.clip(optimizer, clip, is_scaled=shortage is None)
    result = _sum_over_ranks(engine.mesh, batch, objective, sums, norm, local_flags(), num_shared)
    overflowed = not math.isfinite(result.norm)
    # With fp16, a norm that overflowed means a scale that was too high: the scaler leaves the update out by itself.
    result.is_finite = math.isfinite(result.loss) and (not overflowed or engine.numerics.scaler.is_enabled())
    if result.is_finite and not result.is_short:
        engine.step(optimizer, overflowed=overflowed)
    else:
        engine.discard_exchange(optimizer, is_short=result.is_short, overflowed=overflowed)
    engine.zero_grad(optimizer)
    waited = LEDGER.waited_s - waited  # for the norm and the sums
    if sums.clock is not None:
        # The host launches and goes on: what it spent until the sums were there is the GPU's time of both passes.
        sums.read_clock()
        spent = times.forward_s + times.backward_s + looked.pass_s + looked.wait_s
    times.forward_s += looked.pass_s
    times.wait_s += waited + looked.wait_s
    times.optimizer_s = max(0.0, time.perf_counter() - began - spent - waited)
    result.exchanged_s = LEDGER.exchanged_s() if world.device.type == "cpu" else 0.0
    result.traffic, result.num_micro_batches = LEDGER.take(), len(batch.micro_batches)
    return result


def _count_shared(engine: Engine) -> int:
    return int(getattr(engine.bare, "num_shared", 0))


def _sum_over_ranks(
    mesh: Mesh,
    batch: GlobalBatch,
    objective: Objective,
    sums: RankSums,
    norm: torch.Tensor,
    flags: Sequence[float],
    num_shared: int,
) -> StepResult:
    """The step's one exchange of numbers. From here on every rank decides alike, because it knows the same.

    And the one place where the host waits for the device: all numbers come over together.
    """
    own = torch.stack([*sums.losses.values(), *sums.metrics.values()])
    if not mesh.counts_loss:  # ranks that cut one model between them have one loss together, or the same one each
        own = torch.zeros_like(own)
    norm = norm.to(own)
    shared = float(num_shared) if mesh.counts_loss else 0.0
    told = torch.tensor([float(sums.shortage is not None), *flags, shared], dtype=own.dtype)
    # The norm is not summed: replicas have it from copies of the same gradients. But a fault may be in one copy only.
    is_broken = (~norm.isfinite()).to(own)
    everything = torch.cat((own, told.to(own.device, non_blocking=True), is_broken[None]))
    *numbers, own_norm = torch.cat((mesh.everyone.sum_tensor(everything), norm[None])).tolist()
    totals = iter(numbers)
    losses = {name: next(totals) for name in sums.losses}
    denominators = objective.denominators(batch)
    found = {name: next(totals) for name in sums.metrics}
    counts = {name: denominators[objective.metrics[name]] for name in found}
    metrics = {name: total / counts[name] for name, total in found.items() if counts[name]}
    num_short, *flag_counts, all_shared, num_broken = totals
    return StepResult(
        # A name that only counts a metric, and counts none in this step, has no part in the loss.
        loss=sum(total / denominators[name] for name, total in losses.items() if denominators[name]),
        norm=math.nan if num_broken and math.isfinite(own_norm) else own_norm,
        losses=losses,
        metrics={**metrics, **batch.facts},
        flag_counts=flag_counts,
        times=sums.times,
        is_short=num_short > 0,
        shortage=sums.shortage,
        num_shared=round(all_shared),
    )
