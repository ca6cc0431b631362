"""One optimizer step on one global batch: forward and backward over this rank's micro-batches, clip, update.

The loss is the mean over the target tokens of the whole global batch. That number is known beforehand on every rank,
so each micro-batch is divided by it at once, and gradients are summed, never averaged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from duoka.data.loader import Batch, GlobalBatch
from duoka.errors import WorkerFailed
from duoka.optim.clip import clip_gradients
from duoka.parallel.apply import Parallelized
from duoka.parallel.ddp import DdpExchange
from duoka.parallel.ledger import LEDGER, Traffic
from duoka.parallel.precision import compute_in
from duoka.parallel.world import World
from duoka.train.memory import NoWatch

NO_WATCH = NoWatch()


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a step; the scaler does nothing unless the precision is fp16."""

    precision: str
    scaler: torch.amp.GradScaler


def build_numerics(precision: str, device: torch.device) -> Numerics:
    return Numerics(precision, torch.amp.GradScaler(device.type, enabled=precision == "fp16"))


@dataclass
class StepTimes:
    """Seconds of this rank's step by what it did; `wait_s` is the exchange that no work of its own hid.

    On the host's clock: with gloo it is all of it, under every strategy. NCCL's waiting lies inside `forward_s` and
    `backward_s`, because kernels wait there and the host goes on.
    """

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass
class StepResult:
    """`loss_sum` is this rank's share; `norm` is global, before clipping; `traffic` is what this rank exchanged."""

    loss_sum: float
    norm: float
    times: StepTimes = field(default_factory=StepTimes)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    num_micro_batches: int = 1


def forward_backward(
    parallel: Parallelized,
    batch: GlobalBatch,
    numerics: Numerics,
    world: World,
    times: StepTimes,
    watch: NoWatch = NO_WATCH,
) -> float:
    """Gradients of the global batch's mean loss, summed over ranks; returns this rank's share of the loss sum."""
    device = world.device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    last = len(batch.micro_batches) - 1
    if (
        isinstance(parallel.exchange, DdpExchange)
        and parallel.exchange.needs_rehearsal
        and (last or parallel.exchange.power)
    ):
        _rehearse(parallel, batch.micro_batches[0], numerics, device)
    for place, micro in enumerate(batch.micro_batches):
        started, waited = time.perf_counter(), LEDGER.waited_s
        world.heart.tell("forward")
        # Forward belongs inside too: DDP decides there whether this pass will exchange gradients.
        with parallel.exchange(place == last):
            with watch.forward(micro.input_ids.numel()), compute_in(numerics.precision, device):
                loss, _ = parallel.model(**model_inputs(micro, device))
            middle, waited_forward = time.perf_counter(), LEDGER.waited_s - waited
            world.heart.tell("backward")
            numerics.scaler.scale(loss / batch.global_targets).backward()
        watch.after_backward()
        loss_sum += loss.detach()
        waited_backward = LEDGER.waited_s - waited - waited_forward
        times.forward_s += middle - started - waited_forward
        times.backward_s += time.perf_counter() - middle - waited_backward
        times.wait_s += waited_forward + waited_backward
    return float(loss_sum)


def _rehearse(parallel: Parallelized, micro: Batch, numerics: Numerics, device: torch.device) -> None:
    """One pass with an exchange, whose gradients are thrown away and whose random numbers are drawn again."""
    assert isinstance(parallel.exchange, DdpExchange)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), parallel.exchange(True):
        with compute_in(numerics.precision, device):
            loss, _ = parallel.model(**model_inputs(micro, device))
        (loss * 0.0).backward()
    parallel.model.zero_grad(set_to_none=True)
    parallel.exchange.rehearsed()


def model_inputs(micro: Batch, device: torch.device) -> dict[str, torch.Tensor | None]:
    """What LossModel.forward takes, on the device. Padding needs no mask: it stands right of all that looks back."""
    return {
        "input_ids": micro.input_ids.to(device, non_blocking=True),
        "labels": micro.labels.to(device, non_blocking=True),
        "position_ids": micro.position_ids.to(device, non_blocking=True),
        "boundaries": micro.boundaries,  # stays on the host: attention cuts the row by it
    }


def optimizer_step(
    parallel: Parallelized,
    optimizer: torch.optim.Optimizer,
    batch: GlobalBatch,
    *,
    numerics: Numerics,
    clip: float,
    world: World,
    step: int,
    watch: NoWatch = NO_WATCH,
) -> StepResult:
    """Learn from one global batch. A gradient that is not finite stops the run before the weights change."""
    scaler = numerics.scaler
    times = StepTimes()
    LEDGER.take()  # what an evaluation or a check exchanged belongs to no step
    loss_sum = forward_backward(parallel, batch, numerics, world, times, watch)
    overlapped_s = min(LEDGER.overlapped_s(), times.backward_s)
    times.wait_s += overlapped_s
    times.backward_s -= overlapped_s
    started, waited = time.perf_counter(), LEDGER.waited_s
    scaler.unscale_(optimizer)
    norm = float(clip_gradients(parallel.named_trainable().values(), clip))
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise WorkerFailed(
            f"the gradient of step {step} is not finite (norm {norm}, this rank's loss sum {loss_sum:.6g})",
            where=f"samples of the batch: {batch.sample_ids[:16].tolist()}"
            + (f" and {len(batch.sample_ids) - 16} more" if len(batch.sample_ids) > 16 else ""),
            fix="lower optim.lr, raise optim.warmup, or look at these samples; the weights were not changed",
        )
    # With fp16, a norm that overflowed means a scale that was too high: this update is left out, the scale halved.
    scaler.step(optimizer)
    scaler.update()
    watch.after_step()
    optimizer.zero_grad(set_to_none=True)
    waited = LEDGER.waited_s - waited  # for the norm
    times.wait_s += waited
    times.optimizer_s = time.perf_counter() - started - waited
    return StepResult(loss_sum, norm, times, LEDGER.take(), len(batch.micro_batches))
