"""One optimizer step on one global batch: forward and backward over this rank's micro-batches, clip, update.

The loss is the mean over the target tokens of the whole global batch. That number is known beforehand on every rank,
so each micro-batch is divided by it at once, and gradients are summed, never averaged.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from duoka.comm.ledger import LEDGER, Traffic
from duoka.comm.world import World
from duoka.data.feed.loader import IGNORED, Batch, GlobalBatch
from duoka.optim.clip import clip_gradients
from duoka.parallel.apply import Parallelized
from duoka.parallel.ddp import DdpExchange
from duoka.parallel.inputs import model_inputs
from duoka.parallel.matrices import OwnedExchange
from duoka.parallel.precision import Numerics, compute_in
from duoka.parallel.sharded import ShardedExchange
from duoka.train import inject
from duoka.train.memory import NoWatch

NO_WATCH = NoWatch()


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


@dataclass(frozen=True)
class Shortage:
    """A micro-batch that this rank had no memory for."""

    size: tuple[int, int, str]  # samples, tokens, what the allocator said
    phase: str
    is_in_exchange: bool  # its gradients were being exchanged: the pass cannot be left


@dataclass
class StepResult:
    """Global numbers: the loss sum, the norm before clipping, and `wished`, the sums of what ranks asked for.

    `traffic` is what this rank exchanged. The weights changed only if `is_finite` and not `is_short`.
    """

    loss_sum: float
    norm: float
    wished: list[float] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    is_finite: bool = True
    is_short: bool = False  # of memory, on some rank
    shortage: Shortage | None = None  # on this one
    can_try_again: bool = True
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    num_micro_batches: int = 1


def forward_backward(
    parallel: Parallelized,
    batch: GlobalBatch,
    numerics: Numerics,
    world: World,
    times: StepTimes,
    watch: NoWatch = NO_WATCH,
) -> float | Shortage:
    """Gradients of the global batch's mean loss, summed over ranks; returns this rank's share of the loss sum."""
    device, step = world.device, world.heart.beat.step + 1
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    last = len(batch.micro_batches) - 1
    if isinstance(parallel.exchange, DdpExchange) and parallel.exchange.needs_rehearsal:
        rehearse(parallel, batch.micro_batches[0], numerics, world)
        LEDGER.take()  # what it sent is no step's
    for place, micro in enumerate(batch.micro_batches):
        started, waited = time.perf_counter(), LEDGER.waited_s
        world.heart.tell("forward")
        try:
            # Forward belongs inside too: DDP decides there whether this pass will exchange gradients.
            with parallel.exchange(place == last):
                inject.strike_forward(step, world.rank)
                with watch.forward(micro.input_ids.numel()), compute_in(numerics.precision, device):
                    loss, _ = parallel.model(**model_inputs(micro, device))
                loss = inject.strike_loss(loss, step, world.rank)
                middle, waited_forward = time.perf_counter(), LEDGER.waited_s - waited
                world.heart.tell("backward")
                numerics.scaler.scale(loss / batch.global_targets).backward()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return _shortage(micro, error, world, is_last=place == last)
        watch.after_backward()
        loss_sum += loss.detach()
        waited_backward = LEDGER.waited_s - waited - waited_forward
        times.forward_s += middle - started - waited_forward
        times.backward_s += time.perf_counter() - middle - waited_backward
        times.wait_s += waited_forward + waited_backward
    return float(loss_sum)


def _shortage(micro: Batch, error: RuntimeError, world: World, *, is_last: bool) -> Shortage:
    """Returned, not raised: a traceback would keep the tensors that should make room."""
    text, phase = str(error).strip().splitlines()[0][:200], world.heart.beat.phase
    return Shortage((micro.num_samples, micro.num_tokens, text), phase, is_last and phase == "backward")


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator has a type of its own; the CPU's says it in words."""
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in words)


def _can_stand_in(
    shortage: Shortage, parallel: Parallelized, batch: GlobalBatch, numerics: Numerics, world: World
) -> bool:
    """Whether this rank could come to where the others are, although it ran out."""
    return not (shortage.is_in_exchange and world.size > 1) and _take_part(parallel, batch, numerics, world)


def _take_part(parallel: Parallelized, batch: GlobalBatch, numerics: Numerics, world: World) -> bool:
    """Stand in for the pass that ran out, with one token, so that the others' exchange finds this rank there."""
    if isinstance(parallel.exchange, ShardedExchange | OwnedExchange):
        return False  # it stopped between two gathers of layers, and nothing brings it to the others' place
    if not isinstance(parallel.exchange, DdpExchange):
        return True
    micro, device = batch.micro_batches[0], world.device
    one = micro.input_ids[:1, :1]
    tiny = replace(
        micro, input_ids=one, labels=torch.full_like(one, IGNORED), position_ids=torch.zeros_like(one),
        boundaries=None if micro.boundaries is None else torch.tensor([0, 1], dtype=torch.int32),
        attention_mask=None if micro.attention_mask is None else torch.ones_like(one, dtype=torch.bool),
    )  # fmt: skip
    with parallel.exchange(True):
        with compute_in(numerics.precision, device):
            loss, _ = parallel.model(**model_inputs(tiny, device))
        (loss * 0.0).backward()
    return True


def rehearse(parallel: Parallelized, micro: Batch, numerics: Numerics, world: World, *, is_last: bool = True) -> None:
    """A pass with a step's last exchange or one before it; its random numbers are drawn again.

    Gradients of the last one are thrown away, and what was gathered until then.
    """
    device = world.device
    devices = [device] if device.type == "cuda" else []
    exchange = parallel.exchange
    rehearsing = exchange.rehearsing() if isinstance(exchange, DdpExchange) else exchange(is_last)
    with torch.random.fork_rng(devices), rehearsing:
        world.heart.tell("forward")
        with compute_in(numerics.precision, device):
            loss, _ = parallel.model(**model_inputs(micro, device))
        world.heart.tell("backward")
        (loss * 0.0).backward()
    if is_last:
        parallel.model.zero_grad(set_to_none=True)


def try_rehearsal(parallel: Parallelized, batch: GlobalBatch, numerics: Numerics, world: World) -> StepResult:
    """`rehearse` with the batch's micro-batches: whether memory is enough on all ranks, as after a step."""
    shortage = None
    for micro in batch.micro_batches:
        is_last = micro is batch.micro_batches[-1]
        try:
            inject.strike_forward(world.heart.beat.step + 1, world.rank)
            rehearse(parallel, micro, numerics, world, is_last=is_last)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shortage = _shortage(micro, error, world, is_last=is_last)
            break
    if shortage:
        parallel.model.zero_grad(set_to_none=True)
        exchange = parallel.exchange
        with exchange.without_debts() if isinstance(exchange, DdpExchange) else contextlib.nullcontext():
            can_try_again = _can_stand_in(shortage, parallel, batch, numerics, world)
        if not can_try_again:
            return StepResult(0.0, 0.0, is_short=True, shortage=shortage, can_try_again=False)
        parallel.model.zero_grad(set_to_none=True)
    LEDGER.take()  # what it sent is no step's
    is_short = world.sum([float(shortage is not None)])[0] > 0
    return StepResult(0.0, 0.0, is_short=is_short, shortage=shortage)


def optimizer_step(
    parallel: Parallelized,
    optimizer: torch.optim.Optimizer,
    batch: GlobalBatch,
    *,
    numerics: Numerics,
    clip: float,
    world: World,
    wishes: Callable[[], Sequence[float]] = tuple,
    watch: NoWatch = NO_WATCH,
) -> StepResult:
    """Learn from one global batch, unless its numbers are not finite or memory is short: then nothing changes.

    `wishes` gives numbers of this rank's own, summed over ranks together with the loss: one exchange tells everything
    before the optimizer has changed a weight.
    """
    scaler = numerics.scaler
    times = StepTimes()
    LEDGER.take()  # what an evaluation or a check exchanged belongs to no step
    outcome = forward_backward(parallel, batch, numerics, world, times, watch)
    shortage = outcome if isinstance(outcome, Shortage) else None
    if shortage:
        optimizer.zero_grad(set_to_none=True)
        if not _can_stand_in(shortage, parallel, batch, numerics, world):
            return StepResult(0.0, 0.0, is_short=True, shortage=shortage, can_try_again=False)
    overlapped_s = min(LEDGER.overlapped_s(), times.backward_s)
    times.wait_s += overlapped_s
    times.backward_s -= overlapped_s
    started, waited = time.perf_counter(), LEDGER.waited_s
    if not shortage:
        scaler.unscale_(optimizer)
    norm = float(clip_gradients(parallel.named_trainable().values(), clip, parallel.spread_of))
    own = 0.0 if isinstance(outcome, Shortage) else outcome
    loss_sum, num_short, *wished = world.sum([own, float(shortage is not None), *wishes()])
    result = StepResult(loss_sum, norm, wished, times, is_short=num_short > 0, shortage=shortage)
    # With fp16, a norm that overflowed means a scale that was too high: the scaler leaves the update out by itself.
    result.is_finite = math.isfinite(loss_sum) and (math.isfinite(norm) or scaler.is_enabled())
    if result.is_finite and not result.is_short:
        scaler.step(optimizer)
        watch.after_step()
    elif isinstance(parallel.exchange, DdpExchange):
        parallel.exchange.give_up()
    scaler.update(scaler.get_scale() if result.is_short else None)
    optimizer.zero_grad(set_to_none=True)
    waited = LEDGER.waited_s - waited  # for the norm and the sums
    times.wait_s += waited
    times.optimizer_s = time.perf_counter() - started - waited
    result.traffic, result.num_micro_batches = LEDGER.take(), len(batch.micro_batches)
    return result
