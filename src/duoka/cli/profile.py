"""`duoka profile`: where the time of a training step goes, by phase, module and operator, with a trace to look at."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.train.profile import Row, StepProfile

_MOST_ROWS = 12
_WAITS, _FEEDS = 0.25, 0.05  # shares of a step from which a line says what to change
_BUSY = 0.8  # of a step: below it a GPU waits for its host
_FEW_TOKENS = 1024  # in a micro-batch, for a GPU


@click.command("profile")
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Processes; default: one per GPU, on a CPU one.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to measure.")
@click.option("--out", type=click.Path(file_okay=False), help="Where traces go; default: OUTPUT-profile.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    config: str, overrides: tuple[str, ...], nproc: int | None, steps: int, out: str | None, as_json: bool
) -> int:
    """Take some steps of CONFIG's run under torch's profiler. Nothing is saved but the traces, one of each rank.

    The speed and the phases are those of steps without the profiler.
    """
    from duoka.cli.prepare import Say, load_checked
    from duoka.cli.worlds import find_part, run_same_command
    from duoka.cluster.launch import count_processes
    from duoka.cluster.run_lock import find_run_folder
    from duoka.data.prepare import prepare_data
    from duoka.hub.models import model_folder
    from duoka.plan.hardware import read_machine
    from duoka.process.allocator import allocator_environment

    part, machine = find_part(nproc), read_machine()
    place = part.place
    local = place.local_size if place else count_processes(nproc, len(machine.gpus))
    size = place.size if place else local * part.num_nodes
    loaded = load_checked(config, overrides, machine, size, local_size=local, say=part.speaks and not as_json)
    run = find_run_folder(loaded)
    folder = Path(out) if out else run.path.with_name(f"{run.path.name}-profile")
    if place is not None:
        return _work(config, overrides, steps, folder, as_json)
    with _made(folder):
        # Once, before there are ranks, which would wait for it.
        prepare_data(loaded.config, loaded.base, model_folder(loaded.config.model, loaded.base, Say()), say=Say())
        shared = [f"--steps={steps}", f"--out={folder.resolve()}", *(["--json"] if as_json else [])]
        # One process too is started anew where training's would have another heap: a fifth of a step may lie there.
        heap = {} if machine.gpus else allocator_environment(keeps=not loaded.config.parallel.offloads.uses_disk)
        if part.starts(local) or heap:
            return run_same_command(["profile", config, *overrides, *shared], local, part, heap)
        os.environ.setdefault("OMP_NUM_THREADS", str(machine.num_cores))
        return _work(config, overrides, steps, folder, as_json)


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """There before any rank is; gone again when nothing was written into it."""
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # it has what was measured
                folder.rmdir()


def _work(config: str, overrides: tuple[str, ...], steps: int, folder: Path, as_json: bool) -> int:
    """One rank. The first one prints."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs
    from duoka.train.profile import WARM_UP, profile_run

    # No rate is set from step to step: a warm-up made for a whole run, which may be longer than this, has no part.
    short = (f"train.max_steps={WARM_UP + 2 * steps}", "optim.warmup=0")
    loaded = load_config(config, (*overrides, *short, "checkpoint.resume=never"))
    run = RunFolder(folder / ".run")
    run.make()
    world = start_world(loaded.config.parallel)
    try:
        found = profile_run(read_inputs(loaded, run), world, steps, folder)
        world.barrier()
        if not world.is_main:
            return 0
        text = json.dumps(found.to_json(), indent=2)
        (folder / "profile.json").write_text(text + "\n", encoding="utf-8")
        click.echo(text if as_json else "\n".join(_lines(found, config)))
    finally:
        end_world(world)
        if world.is_main:
            shutil.rmtree(run.path, ignore_errors=True)
    return 0


def _lines(found: StepProfile, config: str) -> list[str]:
    whole = sum(found.phases.values()) or 1.0
    ranks = f"{found.num_ranks} ranks" if found.num_ranks > 1 else "1 rank"
    micros = "1 micro-batch" if found.num_micro_batches == 1 else f"{found.num_micro_batches:.3g} micro-batches"
    phases = "  ".join(f"{name} {seconds / whole:.0%}" for name, seconds in found.phases.items() if seconds)
    what = "GPU time" if found.device == "cuda" else "CPU time"
    steps = "1 step" if found.num_steps == 1 else f"{found.num_steps} steps"
    return [
        f"{config}: {steps} of {found.num_samples:,.0f} samples ({found.num_tokens:,.0f} tokens) in "
        f"{micros}, {ranks}, {found.layout}",
        f"  step        {found.step_s:.3g} s, {found.num_tokens / found.step_s:,.0f} tokens/s; "
        f"under the profiler {found.profiled_step_s:.3g} s",
        f"  phases      {phases}" + ("   (of rank 0)" if found.num_ranks > 1 else ""),
        *_exchange(found),
        *([] if found.busy_share is None else [f"  GPU busy    {found.busy_share:.0%} of a step"]),
        *_table(f"forward of modules, {what}", found.modules),
        *_table(f"operators, {what} without what they call", found.operators),
        f"  trace       {found.trace}   (one for each rank; open it in chrome://tracing or ui.perfetto.dev)",
        *(f"  change      {text}" for text in advice(found)),
    ]


def _exchange(found: StepProfile) -> list[str]:
    if found.hidden_share is None:
        return []
    return [f"  exchange    {found.exchanged_s:.3g} s a step, {found.hidden_share:.0%} of it while rank 0 computed"]


def _table(title: str, rows: tuple[Row, ...]) -> list[str]:
    if not rows:
        return []
    lines = [f"  {title:<44}{'ms a step':>10}{'share':>8}{'calls':>9}"]
    for row in rows[:_MOST_ROWS]:
        name = row.name if len(row.name) <= 42 else row.name[:39] + "..."
        lines.append(f"    {name:<42}{row.seconds * 1e3:>10.1f}{row.share:>8.0%}{row.calls:>9,.0f}")
    left = len(rows) - _MOST_ROWS
    return [*lines, *([f"    and {left} more in profile.json"] if left > 0 else [])]


def advice(found: StepProfile) -> list[str]:
    """What to change, the largest loss first."""
    phases: dict[str, Any] = found.phases
    whole = sum(phases.values()) or 1.0
    out = []
    if phases.get("wait", 0.0) > _WAITS * whole:
        out.append(
            f"ranks wait for each other in {phases['wait'] / whole:.0%} of a step: more tokens a step "
            "(train.global_batch), or a strategy that exchanges less (duoka plan ranks them)"
        )
    if phases.get("data", 0.0) > _FEEDS * whole:
        out.append(f"batches come late ({phases['data'] / whole:.0%}): is data.folder's disk slow?")
    if found.busy_share is not None and found.busy_share < _BUSY and phases.get("wait", 0.0) < _WAITS * whole:
        out.append(
            f"the GPU is idle for {1 - found.busy_share:.0%} of a step, while its host launches kernels one by one: "
            "more tokens at once (train.micro_batch), or train.compile: reduce-overhead"
        )
    tokens = found.num_tokens / max(1.0, found.num_micro_batches * found.num_ranks)
    if found.device == "cuda" and tokens < _FEW_TOKENS:
        out.append(
            f"{tokens:,.0f} tokens a micro-batch leave a GPU waiting: a larger train.micro_batch or global_batch"
        )
    return out or ["nothing stands out: most of the time is arithmetic"]
