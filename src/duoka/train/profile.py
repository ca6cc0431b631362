"""`duoka profile`: some optimizer steps as a run takes them, timed plainly first, and then under torch's profiler.

Model, layout, data and optimizer are the run's own; nothing is recorded, evaluated or saved. What the profiler costs
stays out of the speed: that is taken from the plain steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from duoka.comm.world import World
from duoka.data.feed.ahead import Walk
from duoka.data.feed.loader import GlobalBatch, Place
from duoka.errors import DoesNotFit
from duoka.model.build import find_core
from duoka.model.layers import find_layers
from duoka.parallel.engine import Engine, PassObserver
from duoka.train.record import peak_memory_bytes
from duoka.train.run import Inputs, Run, build_run
from duoka.train.step import StepResult, optimizer_step

WARM_UP = 2  # steps that nobody counts: buffers, the optimizer's state, the libraries' choices
_MODULE = "module: "  # before the names of our own ranges
_PASS = "forward pass"


@dataclass(frozen=True)
class Row:
    """One kind of work in a step, on this rank."""

    name: str
    seconds: float  # a step; of the GPU where there is one
    share: float  # of all rows' kind
    calls: float  # a step


@dataclass(frozen=True)
class StepProfile:
    """Means over the steps of one rank; `phases` and `step_s` are of the plain ones, the last four of all ranks."""

    num_steps: int
    num_ranks: int
    layout: str
    device: str
    num_samples: float
    num_tokens: float
    num_micro_batches: float
    step_s: float
    profiled_step_s: float
    phases: dict[str, float]
    modules: tuple[Row, ...]  # their forward passes, with all that they call
    operators: tuple[Row, ...]  # each without what it calls
    trace: str
    peak_bytes: int = 0  # of the fullest rank
    planned_bytes: int = 0
    sent_bytes: float = 0.0  # a step, of the rank that sends most
    exchanged_s: float = 0.0  # a step, of rank 0: while an exchange was under way
    hidden_share: float | None = None  # of that, while rank 0 computed
    planned_step_s: float | None = None
    busy_share: float | None = None  # of a plain step, what this rank's GPU computes or moves; None: a CPU

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def profile_run(inputs: Inputs, world: World, num_steps: int, folder: Path) -> StepProfile:
    """All ranks call it together; each writes its trace to `folder`, and returns what it saw."""
    run = build_run(inputs, world, at_least=WARM_UP + 2 * num_steps)
    try:
        num_epochs = float(WARM_UP + 2 * num_steps)  # each holds a step at least: the data may be few
        with Walk[Place, GlobalBatch](lambda place: run.feed.batches(place, num_epochs)) as batches:
            batches.go_to(run.contents.state.place)
            run.contents.engine.model.train()
            for _ in range(WARM_UP):
                _step(run, next(batches))
            plain = [_timed_step(run, batches) for _ in range(num_steps)]
            trace = folder / f"trace-rank{world.rank:05d}.json.gz"
            seen = profile(activities=_activities(world.device))
            with _ranges(run):
                with _without_stderr():
                    seen.start()
                profiled = [_timed_step(run, batches, _Marks()) for _ in range(num_steps)]
                with _without_stderr():
                    seen.stop()
            seen.export_chrome_trace(str(trace))
    finally:
        run.stage.end()
        run.store.close()
    found = _sum_up(run, plain, profiled, seen.key_averages(), trace)
    sent = sum(kind.sent_bytes for one in plain for kind in one.result.traffic.values()) / num_steps
    exchanged_s = sum(one.result.seen_exchange_s for one in plain) / num_steps
    ranks = world.gather([peak_memory_bytes(), sent])
    return replace(
        found,
        peak_bytes=max(int(peak) for peak, _ in ranks),
        planned_bytes=run.plan.memory.peak_bytes,
        sent_bytes=max(sent for _, sent in ranks),
        exchanged_s=exchanged_s,
        hidden_share=max(0.0, 1 - found.phases["wait"] / exchanged_s) if exchanged_s else None,
        planned_step_s=run.plan.speed.step_s if run.plan.speed else None,
    )


@dataclass(frozen=True)
class _Timed:
    batch: GlobalBatch
    result: StepResult
    seconds: float


class _Marks(PassObserver):
    def forward(self, num_tokens: int) -> AbstractContextManager[None]:
        return record_function(_PASS)  # type: ignore[return-value]


def _step(run: Run, batch: GlobalBatch, observer: PassObserver | None = None) -> StepResult:
    result = optimizer_step(
        run.contents.engine, run.contents.optimizer, batch, run.objective_of(batch),
        clip=run.settings.config.optim.clip, observer=observer or PassObserver(),
    )  # fmt: skip
    run.world.heart.tell("step")
    if result.is_short:
        raise DoesNotFit(
            "memory ran out in a profiled step",
            where=f"in {result.shortage.phase}" if result.shortage is not None else "on another rank",
            fix="write a smaller train.micro_batch, or see what fits:   duoka plan CONFIG",
        )
    run.stage.after_step()
    return result


def _timed_step(run: Run, batches: Walk[Place, GlobalBatch], observer: PassObserver | None = None) -> _Timed:
    """With what a run waits for: its data, or that answers are drawn and rewarded."""
    started = time.perf_counter()
    batch = next(batches)
    data_s = time.perf_counter() - started
    result = _step(run, batch, observer)
    if run.world.device.type == "cuda":
        torch.cuda.synchronize(run.world.device)
    result.times.data_s = data_s
    return _Timed(batch, result, time.perf_counter() - started)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """torch's profiler writes lines of its own when it starts and stops, below Python."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


@contextlib.contextmanager
def _ranges(run: Run) -> Iterator[None]:
    """A range around the forward pass of each part of a layer, by its name, and of what stands beside the layers."""
    open_ranges: list[Any] = []
    hooks = []

    def enter(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            opened = record_function(name)
            opened.__enter__()
            open_ranges.append(opened)

        return hook

    def leave(module: Any, inputs: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    if not run.plan.layout.compile:  # hooks would cut compiled layers to pieces
        for name, module in _parts(run.contents.engine):
            hooks.append(module.register_forward_pre_hook(enter(_MODULE + name)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parts(engine: Engine) -> Iterator[tuple[str, torch.nn.Module]]:
    core = find_core(engine.bare)
    layers = find_layers(core)
    for layer in layers:
        yield from layer.named_children()
    embedding = core.get_input_embeddings()  # type: ignore[operator]
    if isinstance(embedding, torch.nn.Module):
        yield "embedding", embedding


def _sum_up(
    run: Run, plain: Sequence[_Timed], profiled: Sequence[_Timed], events: Sequence[Any], trace: Path
) -> StepProfile:
    count, on_gpu = len(plain), run.world.device.type == "cuda"
    times = [asdict(one.result.times) for one in plain]
    phases = {name.removesuffix("_s"): sum(one[name] for one in times) / count for name in times[0]}
    if run.inputs.config.stage.kind.draws:
        phases = {"rollouts": phases.pop("data"), **phases}
    modules, operators = rows_of(events, count, on_gpu=on_gpu)
    step_s = sum(one.seconds for one in plain) / count
    return StepProfile(
        num_steps=count,
        num_ranks=run.world.size,
        layout=run.plan.layout.name,
        device=run.world.device.type,
        num_samples=sum(one.batch.num_samples for one in plain) / count,
        num_tokens=sum(one.batch.num_tokens for one in plain) / count,
        num_micro_batches=sum(one.result.num_micro_batches for one in plain) / count,
        step_s=step_s,
        profiled_step_s=sum(one.seconds for one in profiled) / count,
        phases=phases,
        modules=modules,
        operators=operators,
        trace=str(trace),
        busy_share=min(1.0, sum(row.seconds for row in operators) / step_s) if on_gpu else None,
    )


def rows_of(events: Sequence[Any], num_steps: int, *, on_gpu: bool) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Of modules, and of operators, from the profiler's sums by name."""
    modules, operators = [], []
    for event in events:
        # A GPU has ranges of its own for modules; its kernels are told twice, by themselves and by their operators.
        is_gpus = event.device_type != DeviceType.CPU
        if event.key.startswith(_MODULE):
            used = event.device_time_total if on_gpu else event.cpu_time_total
            modules += [(event.key.removeprefix(_MODULE), used, event.count)] if is_gpus == on_gpu else []
        elif event.key != _PASS and not is_gpus and not event.key.startswith("ProfilerStep"):
            used = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if not (on_gpu and event.is_user_annotation):  # a range, whose time is that of operators inside
                operators.append((event.key, used, event.count))
    return _rows(modules, num_steps), _rows(operators, num_steps)


def _rows(seen: Sequence[tuple[str, float, int]], num_steps: int) -> tuple[Row, ...]:
    """The most expensive first; the profiler counts microseconds."""
    whole = sum(used for _, used, _ in seen) or 1.0
    ordered = sorted(seen, key=lambda one: -one[1])
    return tuple(Row(name, used / 1e6 / num_steps, used / whole, calls / num_steps) for name, used, calls in ordered)
