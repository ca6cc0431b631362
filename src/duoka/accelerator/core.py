"""The Accelerator: every verb of it, most in a few lines; what is behind them lives in the files beside this one.

All ranks call the verbs together unless a verb says otherwise. Gradients are exact means over the whole window: see
window.py and docs/accelerator.md.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from duoka.accelerator import profiling
from duoka.accelerator.graph import find_reach, scaled_leaves
from duoka.accelerator.loaders import LoaderSettings, PreparedLoader, SkippedLoader, prepare_loader
from duoka.accelerator.nested import tensors_in
from duoka.accelerator.prepared import (
    Counting,
    PreparedOptimizer,
    PreparedScheduler,
    check_all_prepared,
    prepare_model,
)
from duoka.accelerator.readings import Readings
from duoka.accelerator.roles import Roles
from duoka.accelerator.saving import Saving
from duoka.accelerator.settings import choose_layout, read_parallel, read_precision, read_steps, refuse_others
from duoka.accelerator.snapshot import Parts
from duoka.accelerator.trackers import Tracking
from duoka.accelerator.window import Weighed, Window
from duoka.comm.world import end_world, join_world
from duoka.data.feed.prefetch import EpochLoader
from duoka.errors import ConfigError
from duoka.model.build import named_part
from duoka.optim.clip import clip_gradients
from duoka.optim.host import local_part
from duoka.parallel.mesh import build_mesh
from duoka.parallel.precision import build_numerics, compute_in


class Accelerator(Saving, Tracking, Roles):
    """duoka's engine for your own loop: `prepare` what you have, and keep the rest of your code."""

    def __init__(
        self,
        gradient_accumulation_steps: int | None = None,
        mixed_precision: str | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        *,
        strategy: str | None = None,
        parallel: Mapping[str, Any] | None = None,
        split_batches: bool = False,
        dispatch_batches: bool = False,
        seed: int = 0,
        debug: bool = False,
        step_scheduler_with_optimizer: bool = True,
        adjust_scheduler: bool = False,
        **others: Any,
    ) -> None:
        """`strategy`: single, ddp, zero1, zero2, zero3 (fsdp) or hsdp; `parallel`: further keys of the YAML's block.

        `seed` orders shuffled loaders; `split_batches`: a loader's batch size is that of all ranks together;
        `dispatch_batches`: rank 0 reads iterable data for all; `debug`: compare shapes before each collective.
        `adjust_scheduler`: a scheduler steps once for each process at an optimizer step, as Accelerate's do; without
        `step_scheduler_with_optimizer` it steps whenever it is told.
        `others` are refused by name, with what to write instead of Accelerate's.
        """
        refuse_others(others)
        asked = read_parallel(strategy, parallel)
        Tracking.__init__(self, log_with)
        world, started = join_world(asked)
        Roles.__init__(self, world, debug)
        if started:
            atexit.register(end_world, world)
        precision, note = read_precision(mixed_precision, world.device.type == "cpu")
        if note:
            self.print(note)
        self.parallel = asked
        self.layout = choose_layout(asked, precision, world)
        self.mesh = build_mesh(self.layout, world)
        self.project_dir = None if project_dir is None else str(project_dir)
        self.settings = LoaderSettings(seed, split_batches, dispatch_batches)
        self.parts = Parts()
        self.numerics = build_numerics(precision, world.device)
        self.readings = Readings(world.device)
        self.window = Window(self.mesh.loss, self.readings, read_steps(gradient_accumulation_steps))
        self.optimizer_step_was_skipped = False
        self._said_how_schedules_count = False
        self.counting = self._choose_counting(step_scheduler_with_optimizer, adjust_scheduler)
        self._scale_is_due = False
        self._is_joining = False

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def mixed_precision(self) -> str:
        return "no" if self.layout.precision == "fp32" else self.layout.precision

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.window.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.window.num_steps = read_steps(steps)

    @property
    def sync_gradients(self) -> bool:
        """True in the micro-batch that ends a window: here the optimizer steps."""
        return self.window.sync

    @property
    def scaler(self) -> torch.amp.GradScaler:
        self.settle_scale()
        return self.numerics.scaler

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # the process group and what was prepared are there once

    # ------------------------------------------------------------------------------------------ prepare

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, loaders and schedulers, any number in any order; returned in that order."""
        ready: dict[int, Any] = {id(one): self.prepare_model(one) for one in things if isinstance(one, torch.nn.Module)}
        for one in things:
            if id(one) not in ready:
                ready[id(one)] = self._prepare_other(one)
        answers = tuple(ready[id(one)] for one in things)
        return answers[0] if len(answers) == 1 else answers

    def _prepare_other(self, one: Any) -> Any:
        if isinstance(one, torch.optim.Optimizer):
            return self.prepare_optimizer(one)
        if isinstance(one, (torch.utils.data.DataLoader, EpochLoader, PreparedLoader)):
            return self.prepare_data_loader(one)
        if isinstance(one, PreparedScheduler) or (hasattr(one, "step") and hasattr(one, "state_dict")):
            return self.prepare_scheduler(one)
        return one

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        for prepared in self.parts.models:
            if model in (prepared.engine.model, prepared.bare):
                return prepared.engine.model
        prepared = prepare_model(model, self.layout, self.parallel, self.mesh, self.readings)
        self.parts.models.append(prepared)
        for optimizer in self.parts.optimizers:
            optimizer.repoint(prepared.replaced)
        return prepared.engine.model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(optimizer, self)
        for model in self.parts.models:
            prepared.repoint(model.replaced)
        self.parts.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        self.parts.schedulers.append(PreparedScheduler(scheduler, self))
        if self.counting.is_unsaid and not self._said_how_schedules_count:
            self._said_how_schedules_count = True
            self.print(
                "a prepared scheduler steps once for each optimizer step, on any number of processes. A schedule whose "
                f"length was counted for Accelerate (times {self.num_processes}, or in batches before prepare) would "
                "end too early in it: for such a one write   Accelerator(adjust_scheduler=True)"
            )
        return self.parts.schedulers[-1]

    def _choose_counting(self, with_optimizer: bool, adjust: bool) -> Counting:
        if adjust and not with_optimizer:
            raise ConfigError("adjust_scheduler has no meaning without step_scheduler_with_optimizer")
        several = self.world.size > 1 and not self.settings.split_batches
        times = self.world.size if adjust and several else 1
        return Counting(times, with_optimizer, is_unsaid=several and with_optimizer and not adjust)

    def prepare_data_loader(self, loader: Any, *, own_items: bool = False) -> PreparedLoader:
        """`own_items`: an iterable data set that gives this rank items which no other rank gets."""
        if isinstance(loader, PreparedLoader):
            return loader
        self.parts.loaders.append(prepare_loader(loader, self.mesh.data, self.readings, self.settings, own_items))
        return self.parts.loaders[-1]

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> SkippedLoader:
        """The epoch of `loader` without its first batches, which are not read. After load_state, its place wins."""
        return SkippedLoader(self.prepare_data_loader(loader), num_batches, self.print)

    def free_memory(self, *things: Any) -> Any:
        """Let go of everything that was prepared. Returns a None for each thing, to assign to its name."""
        for model in self.parts.models:
            model.forget()
        self.parts = Parts()
        self.readings.clear()
        self.window.close()
        profiling.empty_caches()
        return tuple(None for _ in things)

    clear = free_memory

    # ------------------------------------------------------------------------------------------ the step

    @contextlib.contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-batch of a window of `gradient_accumulation_steps`, or of fewer at the loader's end."""
        self.window.begin_micro_batch()
        with contextlib.ExitStack() as stack:
            for model in self.find_models(models):
                stack.enter_context(model.engine.exchange(self.window.sync))
            try:
                yield
            finally:
                self.window.end_micro_batch()
        self._exchange_again(models)

    @contextlib.contextmanager
    def no_sync(self, *models: torch.nn.Module) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients and exchange nothing."""
        before, self.window.sync = self.window.sync, False
        with contextlib.ExitStack() as stack:
            for model in self.find_models(models):
                stack.enter_context(model.engine.exchange(False))
            try:
                yield
            finally:
                self.window.sync = before
        self._exchange_again(models)

    def _exchange_again(self, models: tuple[torch.nn.Module, ...]) -> None:
        for model in self.find_models(models):
            if model.layout.is_sharded:
                with model.engine.exchange(True):
                    pass

    def backward(self, loss: torch.Tensor, *, mean_over: Any = None, sum_over: Any = None, **options: Any) -> None:
        """Add the gradient of `loss`, as its part of the window's mean over all micro-batches and ranks.

        A plain loss is a mean over its samples. When target tokens count, say how many this one is the mean of
        (`mean_over`) or the sum of (`sum_over`): the step is then exact whatever the counts are. `options` are those
        of torch's own backward (retain_graph, ...). Tensors outside of prepared models get this rank's own gradient,
        divided by the steps of a window.
        """
        weighed = self._weigh(loss, mean_over, sum_over)
        reach = find_reach(loss, self._known())
        reached = [m for m in self.parts.models if m in reach.models or (m.is_opaque and m.was_called)]
        for model in reached:
            model.before_backward(weighed.is_nothing)
        with scaled_leaves(reach.leaves, weighed.outside):
            self.scaler.scale(weighed.loss).backward(**options)
        for model in reached:
            model.after_backward(self.window.sync, self.window.correction)
        if self.window.sync:
            self.window.settle_counted(grad for model in reached for grad in model.grads())

    def _weigh(self, loss: torch.Tensor, mean_over: Any, sum_over: Any) -> Weighed:
        if mean_over is not None and sum_over is not None:
            raise ConfigError("backward: a loss is a mean over targets or a sum over them, not both")
        if mean_over is not None or sum_over is not None:
            self._check_countable()
            count, is_mean = (mean_over, True) if sum_over is None else (sum_over, False)
            return self.window.weigh_counted(loss, count, is_mean)
        if self.window.scale is not None:
            raise ConfigError("backward: this window's losses were counted (mean_over, sum_over); count this one too")
        return self.window.weigh(loss)

    def _check_countable(self) -> None:
        if self._is_joining:
            raise ConfigError(
                "counted losses need every rank, and inside join_uneven_inputs some have left",
                fix="prepare the loader: then every rank makes equally many steps and nothing needs joining",
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Shorten gradients to one global norm under any strategy; returns it. None while a window is not full."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ knows the 2-norm, not norm_type={norm_type}")
        parameters = self._unscaled(parameters, "clip_grad_norm_")
        return clip_gradients(parameters, float(max_norm)) if self.sync_gradients else None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        for parameter in self._unscaled(parameters, "clip_grad_value_"):
            if self.sync_gradients and parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_value, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the fp16 scaler's factor out of the gradients."""
        if self.sync_gradients:
            for one in self.parts.optimizers if optimizer is None else [optimizer]:
                one.unscale(self.numerics)

    def _unscaled(self, parameters: Any, verb: str) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.parts.models:
            check_all_prepared(given, self._known(), verb)
        wanted = {id(p) for p in given}
        if self.sync_gradients:
            for model in self.parts.models:
                model.merge()
            for optimizer in self.parts.optimizers:
                if any(id(p) in wanted for p in optimizer.parameters()):
                    optimizer.unscale(self.numerics)
        return given

    def _known(self) -> set[int]:
        return {id(p) for model in self.parts.models for p in named_part(model.bare).parameters()}

    def step_now(self, optimizer: PreparedOptimizer, closure: Any) -> Any:
        """A prepared optimizer's step, when the window is full."""
        if self.world.size > 1:
            trained = (p for p in optimizer.parameters() if p.requires_grad)
            check_all_prepared(trained, self._known(), "the optimizer")
        for model in self.parts.models:
            model.merge()
        scaler = self.numerics.scaler
        if not scaler.is_enabled():
            answer = optimizer.inner.step(closure) if closure is not None else optimizer.inner.step()
        else:
            optimizer.unscale(self.numerics)
            overflows = scaler._found_inf_per_device(optimizer.inner).values()
            self.optimizer_step_was_skipped = optimizer.was_skipped = any(one.item() for one in overflows)
            answer = scaler.step(optimizer.inner)
            self._scale_is_due = True
        self.window.close()
        if optimizer is self.parts.optimizers[0]:
            self.step += not self.optimizer_step_was_skipped
        return answer

    def settle_scale(self) -> None:
        """A new scale after a step, and not before the next loss: a second optimizer's gradients have the old one."""
        if self._scale_is_due:
            self._scale_is_due = False
            self.numerics.scaler.update()

    def gradients_are_gone(self, optimizer: PreparedOptimizer | None = None) -> None:
        """All of them, or those of one optimizer: of several, each drops its own."""
        gone = None if optimizer is None else {id(p) for p in optimizer.parameters()}
        for model in self.parts.models:
            if gone is None or all(p.grad is None or id(p) in gone for p in model.parameters.values()):
                model.forget()
        self.window.close()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks may run out of batches at different steps inside. Prepared loaders never do, and need none of this."""
        models = self.find_models(tuple(one for one in joinables if isinstance(one, torch.nn.Module)))
        if self.world.size == 1:
            yield
            return
        if any(model.layout.is_sharded for model in models):
            raise ConfigError(
                f"join_uneven_inputs needs strategy ddp, not {self.layout.strategy}",
                fix="prepare the loader: then every rank makes equally many steps and nothing needs joining",
            )
        from torch.distributed.algorithms.join import Join

        self._is_joining = True
        try:
            with Join([model.engine.model for model in models]):  # type: ignore[misc]
                yield
        finally:
            self._is_joining = False

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """This run's arithmetic, for what is computed outside of a prepared model."""
        with compute_in(self.layout.precision, self.device):
            yield

    def profile(self, **options: Any) -> Any:
        """torch's profiler around what is inside; each rank's trace goes to project_dir/profile."""
        return profiling.profile(self.project_dir, self.world, options)

    # ------------------------------------------------------------------------------------------ metrics

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """What all ranks have for this batch, each sample once: filling at the end of an epoch is left out.

        Tensors end to end, in the order of the data set; other things in lists; nested as they were given.
        """
        current, loader = self.window.current_of(tensors_in(value))
        drop = bool(current and not current.num_own)
        if use_gather_object:
            return self.collect.gather_objects([] if drop else list(value))
        if current and loader and not drop:
            value = loader.cut_rows(value, current)
        return self.collect.gather(value, drop=drop)
