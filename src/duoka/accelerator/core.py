"""The Accelerator: every verb of it, most in a few lines; what is behind them lives in the files beside this one.

All ranks call the verbs together unless a verb says otherwise. Gradients are exact means over the whole window: see
window.py and docs/accelerator.md.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from duoka.accelerator import profiling
from duoka.accelerator.loaders import LoaderSettings, PreparedLoader, SkippedLoader, prepare_loader
from duoka.accelerator.names.arguments import (
    add_launchers,
    agreed,
    check_asks_nothing,
    read_arguments,
    read_project,
)
from duoka.accelerator.names.described import Described
from duoka.accelerator.names.newest import remember
from duoka.accelerator.names.plugins import ProfileKwargs
from duoka.accelerator.prepared import Counting, PreparedOptimizer, PreparedScheduler, prepare_model
from duoka.accelerator.readings import Readings
from duoka.accelerator.roles import Roles
from duoka.accelerator.saving import Saving
from duoka.accelerator.settings import (
    add_ddp_options,
    check_parallel,
    choose_layout,
    read_parallel,
    read_precision,
    read_steps,
)
from duoka.accelerator.snapshot import Parts
from duoka.accelerator.stepping import Stepping
from duoka.accelerator.trackers import Tracking
from duoka.accelerator.window import Window
from duoka.comm.world import end_world, join_world
from duoka.data.feed.prefetch import EpochLoader
from duoka.errors import ConfigError
from duoka.parallel.mesh import build_mesh
from duoka.parallel.precision import Numerics, build_numerics


class Accelerator(Stepping, Saving, Tracking, Described, Roles):
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
        `others` are Accelerate's: what they say is taken over, or refused by name with what to write instead.
        """
        said = read_arguments(others)
        notes = add_launchers(said, strategy or (parallel or {}).get("strategy"))
        asked = read_parallel(agreed(said, "strategy", strategy), {**said["parallel"], **(parallel or {})})
        asked, note = add_ddp_options(asked, said.get("ddp", {}))
        Tracking.__init__(self, log_with)
        Saving.__init__(self)
        world, started = join_world(asked)
        Roles.__init__(self, world, debug)
        if started:
            atexit.register(end_world, world)
        precision, other_note = read_precision(mixed_precision, world.device.type == "cpu")
        for line in filter(None, (*notes, note, other_note)):
            self.print(line)
        check_parallel(asked, precision)
        self.parallel = asked
        self.layout = choose_layout(asked, precision, world)
        self.mesh = build_mesh(self.layout, world)
        self.project_configuration = read_project(project_dir, said.get("project"))
        self.settings = LoaderSettings(
            said.get("seed", seed),
            split_batches or said.get("split_batches", False),
            dispatch_batches or said.get("dispatch_batches", False),
        )
        self.parts = Parts()
        self.plugins = said.get("plugins", {})
        self.profile_settings = said.get("profile") or ProfileKwargs()
        self.numerics = build_numerics(precision, world.device)
        if precision == "fp16" and "scaler" in said:
            self.numerics = Numerics(precision, torch.amp.GradScaler(world.device.type, **said["scaler"]))
        self.readings = Readings(world.device)
        steps = agreed(said, "gradient_accumulation_steps", gradient_accumulation_steps)
        self.window = Window(self.mesh.loss, self.readings, read_steps(steps))
        self._said_how_schedules_count = False
        self.counting = self._choose_counting(step_scheduler_with_optimizer, adjust_scheduler)
        remember(self)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # the process group and what was prepared are there once

    # ------------------------------------------------------------------------------------------ prepare

    def prepare(self, *things: Any, device_placement: Any = None) -> Any:
        """Models, optimizers, loaders and schedulers, any number in any order; returned in that order."""
        for one in device_placement or ():
            check_asks_nothing("device_placement", one)
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

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """`evaluation_mode`: it is not trained, and exchanges nothing."""
        check_asks_nothing("device_placement", device_placement)
        for prepared in self.parts.models:
            if model in (prepared.engine.model, prepared.bare):
                return prepared.engine.model
        layout = self.layout
        is_trained = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if not is_trained and not layout.is_sharded:
            layout = replace(layout, strategy="single")
        prepared = prepare_model(model, layout, self.parallel, self.mesh, self.readings)
        self.parts.models.append(prepared)
        for optimizer in self.parts.optimizers:
            optimizer.repoint(prepared.replaced)
        return prepared.engine.model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        check_asks_nothing("device_placement", device_placement)
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

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
        *,
        own_items: bool = False,
    ) -> PreparedLoader:
        """`own_items`: an iterable data set that gives this rank items which no other rank gets."""
        check_asks_nothing("device_placement", device_placement)
        check_asks_nothing("slice_fn_for_dispatch", slice_fn_for_dispatch)
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        self.parts.loaders.append(prepare_loader(data_loader, self.mesh.data, self.readings, self.settings, own_items))
        return self.parts.loaders[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedLoader:
        """The epoch of `dataloader` without its first batches, which are not read. After load_state, its place wins."""
        return SkippedLoader(self.prepare_data_loader(dataloader), num_batches, self.print)

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
