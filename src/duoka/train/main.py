"""One worker's run, from a loaded config to the final folder. Called by the command line in every process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from duoka.comm.world import World, end_world, start_world
from duoka.config.loaded import Loaded
from duoka.data.prepare import prepare_data
from duoka.errors import StoppedEarly
from duoka.hub.models import model_folder
from duoka.model.build import find_core, named_part
from duoka.model.fp8 import describe_fp8
from duoka.optim.build import describe_optimizer
from duoka.plan.kernels import kernel_sentences, kernels_json
from duoka.process.environ import read_rank_environment
from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.heart import Heart, watch_itself
from duoka.runs.stop_request import read_stop_request
from duoka.store.final_folder import write_final
from duoka.store.saving import check_room
from duoka.store.state import read_random_state, set_random_state
from duoka.train.loop import train
from duoka.train.run import Inputs, Run, build_run
from duoka.train.setup import banner, describe_rest


def run_worker(loaded: Loaded, run: RunFolder, on_hang: Callable[[str], None] | None = None) -> int:
    """Train as this process's rank; returns the exit code (0 done, 75 stopped early: start again to go on).

    `on_hang` is for a rank that nobody supervises: it is called from a thread when the rank stands still.
    """
    # Before the process group: a collective that waits for a tokenizer looks like a hang. Whoever started this
    # process has prepared everything and said so; what is found here is reused silently.
    place = read_rank_environment()
    heart = Heart(run, place.rank if place else 0)
    if on_hang is not None:
        watch_itself(heart, run, loaded.config.faults.patience_s, on_hang)
    inputs = read_inputs(loaded, run)
    world = start_world(loaded.config.parallel, heart)
    has_failed = True
    try:
        code = run_in_world(inputs, world)
        has_failed = False
        return code
    finally:
        end_world(world, has_failed=has_failed)
        heart.close()


def read_inputs(loaded: Loaded, run: RunFolder) -> Inputs:
    """The model's folder and the tokenized data; made once, reused by every other rank and run."""
    folder = model_folder(loaded.config.model, loaded.base)
    return Inputs(loaded, run, folder, prepare_data(loaded.config, loaded.base, folder))


def run_in_world(inputs: Inputs, world: World) -> int:
    """Train in a world that stands already; returns the exit code."""
    run = build_run(inputs, world)
    try:
        run.notes += run.settings.notes() + check_room(
            run.store, run.contents, run.settings.config.checkpoint, run.settings.total_steps
        )
        if world.is_main:
            _announce(run)
        run.store.get_ready(run.contents)
        return _train(run)
    finally:
        run.stage.end()
        run.store.close()


def _train(run: Run) -> int:
    """The loop with its record, which is closed whatever happens."""
    random_state = read_random_state(run.world.device)
    record = run.open_record()
    try:
        run.start()
        # Some packages draw when they are imported (the progress line's does, on rank 0): no part of the run.
        set_random_state(random_state, run.world.device)
        with run.moments.until_end():
            stopped_by = train(run)
        stopped_by = stopped_by and (read_stop_request(run.inputs.run) or stopped_by)
        if run.feed.summary():
            record.say(f"data since this start: {run.feed.summary()}")
        if record.prefixes():
            record.say(record.prefixes())
        return _finish(run, stopped_by)
    finally:
        record.close()


def _announce(run: Run) -> None:
    inputs, settings, plan, contents = run.inputs, run.settings, run.plan, run.contents
    # The plan's guess of what computes what gives way to what was tried here.
    write_json_atomic(inputs.run.plan, plan.to_json() | {"kernels": kernels_json(run.kernels)})
    resumed = f"  {describe_rest(run.found, settings, run.feed, contents.state)}" if run.found else ""
    parameters = contents.engine.count_parameters()
    learns = describe_optimizer(contents.optimizer, settings.config.optim, settings.batch_factor)
    lines = banner(settings, plan, inputs.prepared, inputs.run, parameters, learns, resumed)
    first, *reasons = kernel_sentences(run.kernels)
    lines += [f"  kernels     {first}", *(f"              {reason}" for reason in reasons)]
    core = find_core(contents.engine.bare)
    lines += [f"  products    {said}"] if (said := describe_fp8(core, run.world.device)) else []
    lines += [f"  loss        {said}"] if (said := run.stage.describe()) else []
    lines += [f"  reference   {run.reference}"] if run.reference else []
    print("\n".join([*lines, *(f"  note: {note}" for note in run.notes), ""]), flush=True)


def _finish(run: Run, stopped_by: str) -> int:
    inputs, contents, record, world = run.inputs, run.contents, run.record, run.world
    step = contents.state.step
    if stopped_by:
        record.stopped(step, stopped_by, StoppedEarly.exit_code)
        return StoppedEarly.exit_code
    world.heart.tell("end", step)
    beside = run.stage.beside(contents.engine)
    write_final(
        named_part(contents.engine.bare), run.mesh, partial(inputs.result_sources, beside), inputs.run.final
    )  # fmt: skip
    record.done(step)
    return 0
