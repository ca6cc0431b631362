"""Pipeline parallelism: each rank has a part of the stack of layers, and micro-batches go through one after another.

The schedule is the plan's (plan/pipeline.py), what travels is pipeline_wire.py's; here are the passes, and what all
stages must do alike. Every rank reads the same samples: labels, positions and documents' edges are each stage's own
reading, only hidden states travel. The loss is divided by its global count before the backward pass, on the last stage.
Data ranks share the work as an engine of sharded.py inside does, or add gradients once a step (ddp). Ranks that cut a
stage's matrices, or its rows, are stages of pipelines beside each other: each sends to its own place in the next stage.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from duoka.comm.collectives import all_reduce, start_receive, start_send
from duoka.comm.ledger import LEDGER
from duoka.data.feed.loader import GlobalBatch
from duoka.model.build import LossModel
from duoka.model.split_products import Waiting, split_products
from duoka.optim.clip import global_norm, shorten
from duoka.optim.host import local_part
from duoka.optim.muon import Sharing
from duoka.optim.spread import Groups, add_over
from duoka.parallel import inject
from duoka.parallel.ddp import refuse_unused
from duoka.parallel.engine import NO_OBSERVER, Engine, EngineSpec, PassObserver, RankSums, StepTimes
from duoka.parallel.gpu_clock import GpuClock
from duoka.parallel.inputs import model_inputs
from duoka.parallel.objective import Objective, Sums, mean_loss, no_loss
from duoka.parallel.out_of_memory import Shortage, describe_shortage, is_out_of_memory
from duoka.parallel.pipeline_through import Through
from duoka.parallel.pipeline_wire import Wire, check_same, needed_before, sent_after
from duoka.parallel.precision import compute_in
from duoka.parallel.sharded import Sharded
from duoka.parallel.single import Single
from duoka.plan.pipeline import SPLIT, Pass, passes_of

_ADDED_AT_ONCE = 25 * 2**20  # bytes of gradients


@dataclass
class _Step:
    """One rank's passes of a step as they are under way."""

    batch: GlobalBatch
    objective: Objective
    observer: PassObserver
    weigh: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    wire: Wire
    times: StepTimes
    totals: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    clock: GpuClock | None
    # Of each stage and micro-batch between its passes: what came in, and what went out (a loss at the end).
    open: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)
    # What their backward passes leave for passes of weights, under a schedule that has such.
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)


class Pipeline(Engine):
    """A stage, or several, of one model that all ranks of `mesh.pipeline` make together."""

    def __init__(self, spec: EngineSpec) -> None:
        bare = spec.bare
        assert isinstance(bare, LossModel) and bare.stages is not None
        self.stages = bare.stages
        self.inner: Engine = Sharded(spec) if spec.layout.is_sharded else Single(spec)
        super().__init__(spec, self.inner.model)
        self.core: Any = bare.core
        self.layout = spec.layout
        self.pipeline = spec.mesh.pipeline
        self.later = split_products(bare.lm) if spec.layout.schedule in SPLIT else None
        self.adds_gradients = not spec.layout.is_sharded and spec.mesh.loss.size > 1
        self.edges = spec.mesh.pipeline_edges()
        self.through = Through(bare, self.stages, self.world, self.pipeline, self.edges)

    # --- what is trained, and where it lies ---

    def spread_of(self, parameter: torch.Tensor) -> Groups:
        return self.inner.spread_of(parameter)

    def share_matrices(self, matrices: list[torch.nn.Parameter]) -> Sharing:
        return self.inner.share_matrices(matrices)

    def count_parameters(self) -> tuple[int, int]:
        return self.stages.num_parameters

    def held_twice(self) -> dict[str, torch.Tensor]:
        return dict(self._twins())

    def _twins(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters that the first and the last rank both have: a tied embedding and head.

        And what such a head has beside the shared weight, a bias or an adapter, of which the first computes nothing.
        """
        if not self.stages.is_tied or self.stages.has_first == self.stages.has_last:
            return {}
        ends = (self.core.get_input_embeddings(), self.core.get_output_embeddings())
        shared = {id(p) for end in ends for p in end.parameters()}
        return {name: p for name, p in self.named_trainable().items() if id(p) in shared}

    # --- one optimizer step ---

    def forward_backward(
        self, batch: GlobalBatch, objective: Objective, observer: PassObserver = NO_OBSERVER
    ) -> RankSums:
        denominators, scaler = objective.denominators(batch), self.numerics.scaler
        sums = self._run(batch, objective, observer, lambda losses: scaler.scale(mean_loss(losses, denominators)))
        if sums.shortage is None and self.adds_gradients:
            for parameter in self._twins().values():
                _gradient(parameter)  # which the other end may have alone
            own = self.bare.named_parameters()
            refuse_unused([name for name, p in own if p.requires_grad and p.grad is None], "freeze it")
        if sums.shortage is None or sums.shortage.rejoined:
            self.sum_axes()
            self._add_gradients()
        return sums

    def _run(
        self,
        batch: GlobalBatch,
        objective: Objective,
        observer: PassObserver,
        weigh: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    ) -> RankSums:
        """All passes of a step in the schedule's order; a rank out of memory goes on with nothing but messages."""
        step = self._begin(batch, objective, observer, weigh)
        order = self.passes(self.pipeline.rank, len(batch.micro_batches))
        last_backward = max((at for at, one in enumerate(order) if one.kind == "backward"), default=-1)
        shortage: Shortage | None = None
        for at, one in enumerate(order):
            if shortage is None:
                try:
                    self._pass(step, one, is_last=at == last_backward)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    shortage = describe_shortage(batch.micro_batches[one.micro], error, self.world, is_last=False)
            if shortage is not None:
                # Only here are the tensors of a pass that failed gone.
                step.open.clear()
                step.waiting.clear()
                self._drop_gradients()
                if self._is_awaited:
                    return self._nothing(step, shortage)
                self._stand_in(step.wire, one)
        step.wire.finish()
        if step.clock is not None:
            step.clock.mark("end")
        if shortage is not None:
            return self._nothing(step, replace(shortage, rejoined=True))
        return RankSums(step.totals[0], step.totals[1], step.times, clock=step.clock)

    @property
    def _is_awaited(self) -> bool:
        """Whether other ranks wait for this one inside of its passes: data ranks of one state, ranks of one layer."""
        mesh = self.mesh
        return (self.layout.is_sharded and mesh.loss.size > 1) or mesh.tensor.size * mesh.sequence.size > 1

    def _begin(
        self,
        batch: GlobalBatch,
        objective: Objective,
        observer: PassObserver,
        weigh: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    ) -> _Step:
        batch = replace(batch, micro_batches=[self.part_of(micro) for micro in batch.micro_batches])
        self._check_same_batch(batch)
        shapes = [(one.input_ids.shape[0], one.input_ids.shape[1]) for one in batch.micro_batches]
        wire = Wire(
            self.stages, self.world, self.pipeline, self.edges, lambda rank: self.passes(rank, len(shapes)),
            lambda micro: shapes[micro],
        )  # fmt: skip
        names = objective.denominators(batch), objective.metrics
        device = self.world.device
        zeros = [{name: torch.zeros((), dtype=torch.float64, device=device) for name in some} for some in names]
        clock = GpuClock() if device.type == "cuda" else None
        return _Step(batch, objective, observer, weigh, wire, StepTimes(), (zeros[0], zeros[1]), clock)

    def passes(self, rank: int, num_micro: int) -> list[Pass]:
        """What a rank of the pipeline computes in a step, in order; nothing goes back where nothing is trained."""
        layout = self.layout
        order, stages = passes_of(layout.schedule, layout.pp, layout.virtual, num_micro, rank), self.stages
        needed = {"backward": stages.has_backward, "weights": lambda stage: stages.trains[stage]}
        return [one for one in order if one.kind == "forward" or needed[one.kind](one.stage)]

    def _nothing(self, step: _Step, shortage: Shortage) -> RankSums:
        totals = [{name: torch.zeros_like(total) for name, total in some.items()} for some in step.totals]
        return RankSums(totals[0], totals[1], step.times, shortage)

    def _pass(self, step: _Step, one: Pass, *, is_last: bool) -> None:
        started, waited = time.perf_counter(), LEDGER.waited_s
        which = f"micro-batch {one.micro + 1} of {len(step.batch.micro_batches)} in stage {one.stage}"
        self.world.heart.tell(one.kind, part=which)
        if step.clock is not None:
            step.clock.mark("forward" if one.kind == "forward" else "backward")
        if one.kind == "weights":
            step.waiting.pop((one.stage, one.micro)).finish()
        else:
            with self.leaving(step.waiting, one):
                if one.kind == "forward":
                    self._forward(step, one)
                else:
                    self._backward(step, one, is_last=is_last)
        waited = LEDGER.waited_s - waited
        spent = time.perf_counter() - started - waited
        step.times.wait_s += waited
        if one.kind == "forward":
            step.times.forward_s += spent
        else:
            step.times.backward_s += spent

    @contextlib.contextmanager
    def leaving(self, waiting: dict[tuple[int, int], Waiting], one: Pass) -> Iterator[None]:
        """Inside, products leave weights' gradients for the pass that is to compute them, where there is one."""
        if self.later is None or not self.stages.trains[one.stage]:
            yield
            return
        self.later.now = waiting.setdefault((one.stage, one.micro), Waiting())
        try:
            yield
        finally:
            self.later.now = None

    def _forward(self, step: _Step, one: Pass) -> None:
        micro, device, number = step.batch.micro_batches[one.micro], self.world.device, self.world.heart.beat.step + 1
        entered: torch.Tensor | None = None
        if (message := needed_before(one, self.stages)) is not None:
            entered = step.wire.receive(message, one.stage - 1)
            entered.requires_grad_(self.stages.has_backward(one.stage - 1))
        inject.strike_forward(number, self.world.rank)
        with step.observer.forward(micro.input_ids.numel()), compute_in(self.numerics.precision, device):
            if self.stages.is_last(one.stage):
                sums = step.objective.sums(_LastStage(self.model, entered, one.stage), micro, device)
            else:
                states, _ = self.model(**model_inputs(micro, device), hidden=entered, stage=one.stage)
        if self.stages.is_last(one.stage):
            states = step.weigh(self._note_sums(step, sums, number))
        if (message := sent_after(one, self.stages)) is not None:
            step.wire.send(message, states)
        if self.stages.has_backward(one.stage):
            step.open[one.stage, one.micro] = entered, states

    def _note_sums(self, step: _Step, sums: Sums, number: int) -> Mapping[str, torch.Tensor]:
        losses = {name: inject.strike_loss(loss, number, self.world.rank) for name, loss in sums.losses.items()}
        for total, own in zip(step.totals, (losses, sums.metrics), strict=True):
            for name, value in own.items():
                total[name] += value.detach()
        return losses

    def _backward(self, step: _Step, one: Pass, *, is_last: bool) -> None:
        gradient: torch.Tensor | None = None
        if (message := needed_before(one, self.stages)) is not None:
            gradient = step.wire.receive(message, one.stage + 1)
        entered, states = step.open.pop((one.stage, one.micro))
        with self.inner.exchange(is_last):
            torch.autograd.backward(states, gradient)
        if (message := sent_after(one, self.stages)) is not None:
            assert entered is not None
            step.wire.send(message, entered.grad)
        step.observer.after_backward()

    def _stand_in(self, wire: Wire, one: Pass) -> None:
        """A pass that is not computed: the other ranks get zeros, and what they send is let go."""
        if (message := needed_before(one, self.stages)) is not None:
            wire.drop(message, one.stage + (1 if one.kind == "backward" else -1))
        if (message := sent_after(one, self.stages)) is not None:
            wire.send(message, None)

    def _check_same_batch(self, batch: GlobalBatch) -> None:
        """A receiver that planned another length would train on what its memory held before, silently."""
        digest = 0
        for micro in batch.micro_batches:
            digest = zlib.crc32(str(tuple(micro.input_ids.shape)).encode(), digest)
            digest = zlib.crc32(micro.input_ids.cpu().numpy().tobytes(), digest)
        shapes = [tuple(micro.input_ids.shape) for micro in batch.micro_batches]
        check_same(digest, shapes, self.world, self.pipeline)

    # --- gradients of more than one rank ---

    def _add_gradients(self) -> None:
        """Sums over data ranks where no engine inside did that, and over the two ends of a tied embedding."""
        if self.adds_gradients:
            self._add_over_copies(list(self.named_trainable().values()))
        twins = list(self._twins().values())
        if not twins:
            return
        other = 0 if self.stages.has_last else self.pipeline.size - 1
        here = self.pipeline.rank
        for parameter in twins:
            own = local_part(_gradient(parameter))
            from_other, to_send = torch.empty_like(own), own.clone()
            with self.world.heart.exchange("exchange of the tied embedding's gradients"):
                sent = start_send(to_send, self.edges[here, other], other > here)
                start_receive(from_other, self.edges[other, here], other > here).wait()
                sent.wait()
            own.add_(from_other)

    def _add_over_copies(self, parameters: list[torch.nn.Parameter]) -> None:
        """As ddp does, after the last backward pass: gradients of earlier micro-batches come between those of later."""
        part: list[torch.Tensor] = []
        for parameter in parameters:
            part.append(_gradient(parameter))
            if sum(one.numel() * one.element_size() for one in part) >= _ADDED_AT_ONCE:
                self._add_part(part)
                part = []
        if part:
            self._add_part(part)

    def _add_part(self, gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([one.reshape(-1) for one in gradients])
        with self.world.heart.exchange("all_reduce of gradients"):
            all_reduce(flat, self.mesh.loss.group)
        for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, *, is_scaled: bool = True) -> torch.Tensor:
        """One norm over all stages, in which a tied embedding counts once: on the first."""
        if is_scaled:
            self.numerics.scaler.unscale_(optimizer)
        named = self.named_trainable()
        twins = {} if self.stages.has_first else self._twins()
        own = global_norm([p for name, p in named.items() if name not in twins], self.spread_of)
        squares = add_over(own.square(), (self.pipeline.group,), self.world.device.type)
        norm = squares.sqrt()
        shorten(named.values(), norm, max_norm)
        return norm

    # --- passes that are no step ---

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[torch.nn.Module]:
        """All ranks of a pipeline call what this yields, with the same batches, and get the same answers."""
        yield self.through.train(self.bare.training)
        self.inner.settle()

    def try_rehearsal(self, batch: GlobalBatch, objective: Objective) -> Shortage | None:
        """The whole schedule, so that as many micro-batches are under way at once as in a step."""
        device = self.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            sums = self._run(batch, objective, NO_OBSERVER, no_loss)
        self._drop_gradients()
        LEDGER.take()  # discard its traffic: it belongs to no step
        return sums.shortage


class _LastStage(torch.nn.Module):
    """The model as an objective calls it, with what the stages before it have computed."""

    def __init__(self, model: torch.nn.Module, hidden: torch.Tensor | None, stage: int) -> None:
        super().__init__()
        self.model, self.hidden, self.stage = model, hidden, stage

    def forward(self, **inputs: object) -> object:
        return self.model(**inputs, hidden=self.hidden, stage=self.stage)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros where this rank found none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
