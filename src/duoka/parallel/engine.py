"""The engine: one model under one layout, and the verbs of an optimizer step on it.

`Engine` is the plain form: a loop over micro-batches in one process, with nothing exchanged. Each strategy (single.py,
dp.py, ddp.py, sharded.py) overrides what it does otherwise. Made by apply.py; called by train/step.py, by evaluations,
by checkpoints (`extra_tensors`) and by the accelerator. What a strategy needs it asks for here; none asks which it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from duoka.comm.ledger import LEDGER
from duoka.config.schema import ParallelConfig
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.model.build import named_part, named_weights
from duoka.model.lora import count_parameters
from duoka.model.shards import Weights
from duoka.optim.build import optimizer_tensors
from duoka.optim.clip import clip_gradients
from duoka.optim.host import local_part
from duoka.optim.muon import Sharing, WholeMatrices
from duoka.optim.spread import Groups, spread_of
from duoka.parallel import inject
from duoka.parallel.activations import Moved
from duoka.parallel.expert import is_shared_expert, sum_copies
from duoka.parallel.gpu_clock import GpuClock
from duoka.parallel.matrices import RowMatrices
from duoka.parallel.mesh import Mesh
from duoka.parallel.objective import Objective, mean_loss, no_loss
from duoka.parallel.out_of_memory import Shortage, describe_shortage, is_out_of_memory
from duoka.parallel.precision import build_numerics, compute_in
from duoka.parallel.sequence import cut_rows
from duoka.parallel.tensor import parts_of_gradients, sum_parts
from duoka.plan.layout import Layout


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. With `source` the model is on the meta device still, and gets its weights from it."""

    bare: torch.nn.Module
    layout: Layout = field(default_factory=Layout)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    mesh: Mesh = field(default_factory=Mesh)
    source: Weights | None = None
    matrices: Collection[str] = ()  # that the optimizer needs whole
    folder: Path = Path()  # of what lies on a disk
    row_tokens: int = 0  # of every row; 0: they vary
    drives_passes: bool = True  # not in people's own loops, where not every window has a backward pass of each model
    moved: Moved = field(default_factory=Moved)  # filled by the steps


@dataclass
class StepTimes:
    """Seconds of this rank's step by what it did; `wait_s` is the exchange that no work of its own hid.

    On a CPU, of the host's clock: with gloo it is all of it, under every strategy. On a GPU, `forward_s` and
    `backward_s` are the GPU's own times, and NCCL's waiting lies inside them, because kernels wait there.
    """

    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class RankSums:
    """What one rank's passes of a step came to: sums by name (fp64, on the device), all zero where memory ran out.

    Nobody reads them before they are summed over ranks: a GPU's host would wait there for all that it has launched.
    """

    losses: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]
    times: StepTimes
    shortage: Shortage | None = None
    clock: GpuClock | None = None

    def read_clock(self) -> None:
        """The GPU's times of the passes, once it has done them."""
        if self.clock is not None:
            self.times.forward_s, self.times.backward_s = self.clock.read()


class PassObserver:
    """Told of the passes over micro-batches; this one does nothing."""

    def forward(self, num_tokens: int) -> AbstractContextManager[None]:
        """Around a forward pass whose backward comes after it."""
        return contextlib.nullcontext()

    def after_backward(self) -> None:
        """A micro-batch's gradients are there. No-op."""


NO_OBSERVER = PassObserver()


class Engine:
    """`model` is called in training; `bare` is the same model without its wrapper, for names and for saving."""

    # An exchange sends all of a gradient, with what an earlier exchange summed already (see accelerator/prepared.py).
    exchanges_whole_gradients = False
    # Ranks exchange weights inside a pass: one that fails in it leaves the others waiting there.
    exchanges_in_passes = False
    # It keeps the optimizer's state in host memory by itself: it is given an optimizer that does not.
    offloads_itself = False

    def __init__(self, spec: EngineSpec, model: torch.nn.Module | None = None) -> None:
        self.bare = spec.bare
        self.model = spec.bare if model is None else model
        self.mesh = spec.mesh
        self.world = spec.mesh.everyone  # this process: its device, its heart, and the rank that faults name
        self.moved = spec.moved
        self.numerics = build_numerics(spec.layout.precision, self.world.device)

    # --- what is trained, and where it lies ---

    def named_trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by the names that checkpoints use; shards where weights are sharded."""
        return self._trainable

    @cached_property
    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        # Looked up once, before the first pass: FSDP shows gathered weights under the same names while it computes.
        return {name: p for name, p in named_weights(self.bare).items() if p.requires_grad}

    @cached_property
    def _parts(self) -> list[torch.nn.Parameter]:
        """Trained parameters of whose gradients each tensor-parallel rank has a part."""
        names = set(parts_of_gradients(named_part(self.bare)))
        return [parameter for name, parameter in self._trainable.items() if name in names]

    @cached_property
    def _experts(self) -> list[torch.nn.Parameter]:
        """Trained experts of which each rank of the expert axis has some."""
        return [parameter for parameter in self._trainable.values() if is_shared_expert(parameter)]

    def count_parameters(self) -> tuple[int, int]:
        """(all, trained) of the whole model, shared ones once."""
        return count_parameters(named_part(self.bare))

    def lasting_weights(self) -> list[torch.Tensor]:
        """What this rank has of the weights, frozen ones too, while no pass has gathered any."""
        return list(self.bare.parameters())

    def masters(self) -> list[torch.Tensor]:
        """What the optimizer steps on where that lies beside the weights that passes use."""
        return []

    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the gradients, live."""
        return [local_part(p.grad) for p in self.named_trainable().values() if p.grad is not None]

    def spread_of(self, parameter: torch.Tensor) -> Groups:
        """The groups whose ranks hold different parts of a parameter's gradient."""
        return spread_of(parameter)

    def held_twice(self) -> dict[str, torch.Tensor]:
        """Trained tensors that another rank of the same copy of the model has too."""
        return {}

    def share_matrices(self, matrices: list[torch.nn.Parameter]) -> Sharing:
        """How whole matrices come to the ranks that work on them."""
        sharded = [matrix for matrix in matrices if isinstance(matrix, DTensor)]
        return RowMatrices(sharded) if sharded else WholeMatrices(matrices)

    def extra_tensors(self, model: str = "") -> dict[str, torch.Tensor]:
        """What belongs into checkpoints beside the model and the optimizer; `model` stands before names of several."""
        return {}

    def build_optimizer(
        self, make: Callable[[Mapping[str, torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """The optimizer that `make` builds of what is trained. Once, before the first pass."""
        return make(self.named_trainable())

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """What checkpoints save of the model and fill in place, by name: whole, or this rank's parts."""
        return {name: parameter.detach() for name, parameter in self.named_trainable().items()}

    def optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """And of the optimizer, as `kind.parameter-name`; state that is not there yet is made first."""
        return optimizer_tensors(optimizer, self.named_trainable())

    def filled(self) -> None:
        """These were filled in place: bring up to date what is made of them."""

    @property
    def disk_bytes(self) -> int:
        """Of files in which weights, gradients and activations lie."""
        return self.moved.disk_bytes

    @property
    def let_go(self) -> Callable[[], None] | None:
        """Unmaps what lies in such files."""
        return None

    def resumed(self) -> None:
        """Weights and state came from a checkpoint: the first step must add as the later ones of that run did."""

    # --- one optimizer step ---

    def forward_backward(
        self, batch: GlobalBatch, objective: Objective, observer: PassObserver = NO_OBSERVER
    ) -> RankSums:
        """Gradients of the global batch's loss, summed over ranks; returns this rank's sums.

        A rank out of memory for a micro-batch drops its gradients, and joins the pending exchange where it can.
        """
        sums = self._run_passes(batch, objective, observer)
        # Only now are the tensors of a pass that failed gone.
        if sums.shortage is not None:
            self._drop_gradients()
            rejoined = self.rejoin(sums.shortage, batch, objective)
            return replace(sums, shortage=replace(sums.shortage, rejoined=rejoined))
        self.sum_axes()
        times = sums.times
        overlapped_s = min(LEDGER.overlapped_s(), times.backward_s)
        times.wait_s += overlapped_s
        times.backward_s -= overlapped_s
        return sums

    def sum_axes(self) -> None:
        """After a step's last pass: add what ranks of the tensor axis, and copies of experts, have parts of."""
        sum_parts(self._parts, self.mesh.tensor)
        sum_copies(self._experts, self.mesh.expert_copies)

    def _run_passes(self, batch: GlobalBatch, objective: Objective, observer: PassObserver) -> RankSums:
        world, device, times = self.world, self.world.device, StepTimes()
        step, last = world.heart.beat.step + 1, len(batch.micro_batches) - 1
        denominators = objective.denominators(batch)
        clock = GpuClock() if device.type == "cuda" else None
        totals = [
            {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
            for names in (denominators, objective.metrics)
        ]
        for place, micro in enumerate(batch.micro_batches):
            part = self.part_of(micro)
            started, waited = time.perf_counter(), LEDGER.waited_s
            world.heart.tell("forward", part=(which := f"micro-batch {place + 1} of {last + 1}"))
            if clock is not None:
                clock.mark("forward")
            try:
                # Forward belongs inside too: DDP decides there whether this pass will exchange gradients.
                with self.exchange(place == last):
                    inject.strike_forward(step, world.rank)
                    with observer.forward(part.input_ids.numel()), compute_in(self.numerics.precision, device):
                        sums = objective.sums(self.model, part, device)
                    losses = {k: inject.strike_loss(loss, step, world.rank) for k, loss in sums.losses.items()}
                    middle, waited_forward = time.perf_counter(), LEDGER.waited_s - waited
                    world.heart.tell("backward", part=which)
                    if clock is not None:
                        clock.mark("backward")
                    self.backward(self.numerics.scaler.scale(mean_loss(losses, denominators)))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                shortage = describe_shortage(micro, error, world, is_last=place == last)
                nothing = [{name: torch.zeros_like(total) for name, total in names.items()} for names in totals]
                return RankSums(nothing[0], nothing[1], times, shortage)
            observer.after_backward()
            for total, own in zip(totals, (losses, sums.metrics), strict=True):
                for name, value in own.items():
                    total[name] += value.detach()
            waited_backward = LEDGER.waited_s - waited - waited_forward
            times.forward_s += middle - started - waited_forward
            times.backward_s += time.perf_counter() - middle - waited_backward
            times.wait_s += waited_forward + waited_backward
        if clock is not None:
            clock.mark("end")
        return RankSums(totals[0], totals[1], times, clock=clock)

    def part_of(self, micro: Batch) -> Batch:
        """What this rank computes of a micro-batch of its data rank: all, or its stretch of every row."""
        return cut_rows(micro, self.mesh.sequence.rank, self.mesh.sequence.size)

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Around the passes of one micro-batch: what they exchange. `last`: of the step."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """A micro-batch's backward pass, from its part of the step's loss."""
        loss.backward()

    def check_all_used(self, fix: str) -> None:
        """Refuse a trained parameter without a gradient, where that would break the next exchange."""

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, *, is_scaled: bool = True) -> torch.Tensor:
        """Shorten all gradients together to a global norm of `max_norm` (0: only measure).

        Returns the norm before, on the device.
        """
        if is_scaled:
            self.numerics.scaler.unscale_(optimizer)
        return clip_gradients(self.named_trainable().values(), max_norm, self.spread_of, self.let_go)

    def step(self, optimizer: torch.optim.Optimizer, *, overflowed: bool = False) -> None:
        """Change the weights. `overflowed`: a rank's norm is not finite; with fp16 all ranks skip the update."""
        if overflowed:
            self.numerics.note_overflow(optimizer)
        self.numerics.scaler.step(optimizer)
        self.numerics.scaler.update()

    def discard_exchange(self, optimizer: torch.optim.Optimizer, *, is_short: bool, overflowed: bool) -> None:
        """Discard the step just exchanged, because its sums are not finite or memory was short."""
        if overflowed and not is_short:
            self.numerics.note_overflow(optimizer)
        scaler = self.numerics.scaler
        scaler.update(scaler.get_scale() if is_short else None)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def forget_gradients(self) -> None:
        """Throw away what a pass left that was no step's."""
        self.model.zero_grad(set_to_none=True)

    def _drop_gradients(self) -> None:
        for parameter in self.named_trainable().values():
            parameter.grad = None

    # --- passes that are no step ---

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[torch.nn.Module]:
        """The model for passes without a backward."""
        yield self.bare
        self.settle()

    def settle(self) -> None:
        """Give back what passes without a backward left gathered."""

    # --- too little memory ---

    def rejoin(self, shortage: Shortage, batch: GlobalBatch, objective: Objective) -> bool:
        """Join the pending gradient exchange after an out-of-memory error in a pass; False when that is impossible.

        As where ranks compute a layer together: the others wait in the middle of it.
        """
        return self.mesh.tensor.size * self.mesh.experts.size == 1

    def rehearse(self, micro: Batch, objective: Objective, *, is_last: bool = True) -> None:
        """A pass with a step's last exchange or one before it; its random numbers are drawn again.

        Gradients of the last one are thrown away, and what was gathered until then.
        """
        device = self.world.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.rehearsing(is_last):
            self.world.heart.tell("forward")
            with compute_in(self.numerics.precision, device):
                sums = objective.sums(self.model, self.part_of(micro), device)
            self.world.heart.tell("backward")
            self.backward(no_loss(sums.losses))
        if is_last:
            self.forget_gradients()

    def rehearsing(self, last: bool) -> AbstractContextManager[None]:
        """Around one pass whose gradients are thrown away."""
        return self.exchange(last)

    def try_rehearsal(self, batch: GlobalBatch, objective: Objective) -> Shortage | None:
        """`rehearse` with the batch's micro-batches: what this rank had no memory for."""
        shortage = None
        for micro in batch.micro_batches:
            is_last = micro is batch.micro_batches[-1]
            try:
                inject.strike_forward(self.world.heart.beat.step + 1, self.world.rank)
                self.rehearse(micro, objective, is_last=is_last)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                shortage = describe_shortage(micro, error, self.world, is_last=is_last)
                break
        if shortage is not None:
            self._drop_gradients()
            with self.unrecorded():
                shortage = replace(shortage, rejoined=self.rejoin(shortage, batch, objective))
            self._drop_gradients()
        LEDGER.take()  # discard its traffic: it belongs to no step
        return shortage

    def unrecorded(self) -> AbstractContextManager[None]:
        """Around exchanges that are no step's: `extra_tensors` stay as they are."""
        return contextlib.nullcontext()
