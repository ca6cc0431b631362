"""The verbs of a step: micro-batches and windows, backward, clipping, what the prepared optimizers call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from duoka.accelerator import profiling
from duoka.accelerator.collect import Collector
from duoka.accelerator.graph import find_reach, scaled_leaves
from duoka.accelerator.names.plugins import AutocastKwargs, ProfileKwargs
from duoka.accelerator.nested import tensors_in
from duoka.accelerator.prepared import PreparedModel, PreparedOptimizer, check_all_prepared
from duoka.accelerator.snapshot import Parts
from duoka.accelerator.window import Weighed, Window
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.model.build import named_part
from duoka.optim.clip import clip_gradients
from duoka.optim.host import local_part
from duoka.parallel.precision import Numerics, compute_in
from duoka.plan.layout import Layout
from duoka.torch_private import found_inf


class Stepping:
    """A part of the Accelerator."""

    world: World
    device: torch.device
    parts: Parts
    numerics: Numerics
    window: Window
    layout: Layout
    collect: Collector
    project_dir: str | None
    profile_settings: ProfileKwargs
    find_models: Callable[[tuple[torch.nn.Module, ...]], list[PreparedModel]]
    step: int
    optimizer_step_was_skipped = False
    _scale_is_due = False
    _is_joining = False

    @property
    def sync_gradients(self) -> bool:
        """True in the micro-batch that ends a window: here the optimizer steps."""
        return self.window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.window.sync = bool(sync)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        self.settle_scale()
        return self.numerics.scaler

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
    def no_sync(self, model: torch.nn.Module | None = None, *others: torch.nn.Module) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients and exchange nothing."""
        models = (*(() if model is None else (model,)), *others)
        before, self.window.sync = self.window.sync, False
        with contextlib.ExitStack() as stack:
            for prepared in self.find_models(models):
                stack.enter_context(prepared.engine.exchange(False))
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
        if self.window.is_local:
            raise ConfigError("counted losses are those of all ranks, and LocalSGD steps on each by itself")
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
        given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
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
            overflows = found_inf(scaler, optimizer.inner)
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
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """This run's arithmetic, for what is computed outside of a prepared model."""
        is_off = autocast_handler is not None and not autocast_handler.enabled
        with compute_in("fp32" if is_off else self.layout.precision, self.device):
            yield

    def profile(self, profile_handler: ProfileKwargs | None = None, **options: Any) -> Any:
        """torch's profiler around what is inside; each rank's trace goes to project_dir/profile."""
        asked = profiling.read_settings(profile_handler or self.profile_settings)
        folder = asked.pop("folder", None) or self.project_dir
        return profiling.profile(folder, self.world, {**asked, **options})

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all ranks have for this batch, each sample once: filling at the end of an epoch is left out.

        Tensors end to end, in the order of the data set; other things in lists; nested as they were given.
        """
        current, loader = self.window.current_of(tensors_in(input_data))
        drop = bool(current and not current.num_own)
        if use_gather_object:
            return self.collect.gather_objects([] if drop else list(input_data))
        if current is not None and loader is not None and not drop:
            input_data = loader.cut_rows(input_data, current)
        return self.collect.gather(input_data, drop=drop)
