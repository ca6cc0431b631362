"""One worker's run, from a loaded config to the final folder. Called by the command line in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duoka.config.load import Loaded, config_hash
from duoka.config.schema import RunConfig
from duoka.data.loader import Loader, eval_batches
from duoka.data.prepare import PreparedData, prepare_data
from duoka.errors import StoppedEarly
from duoka.model.build import LossModel, load_model
from duoka.model.lora import count_parameters
from duoka.model.result import write_result
from duoka.model.shards import build_without_memory
from duoka.model.source import model_folder
from duoka.optim.build import build_optimizer
from duoka.parallel.apply import Parallelized, parallelize
from duoka.parallel.environ import read_rank_environment
from duoka.parallel.gather import gather_state
from duoka.parallel.rank import is_restarted
from duoka.parallel.world import World, check_same_everywhere, end_world, start_world
from duoka.plan.hardware import read_machine
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import read_shape
from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.heart import Heart
from duoka.runs.status import update_status
from duoka.train.checkpoint import CheckpointStore, Contents, choose_checkpoint
from duoka.train.loop import Job, train
from duoka.train.manifest import list_checkpoints
from duoka.train.measure import Measured, measure_loss
from duoka.train.record import Recorder
from duoka.train.setup import RunSettings, banner, build_settings, keep_choices, library_versions
from duoka.train.state import TrainState, seed_everything
from duoka.train.step import build_numerics
from duoka.units import parse_amount


@dataclass(frozen=True)
class Inputs:
    """What a run reads: resolved before any process group exists."""

    loaded: Loaded
    run: RunFolder
    folder: Path
    prepared: PreparedData

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


def run_worker(loaded: Loaded, run: RunFolder) -> int:
    """Train as this process's rank; returns the exit code (0 done, 75 stopped early: start again to go on)."""
    # Before the process group: a collective that waits for a tokeniser looks like a hang. Whoever started this
    # process has prepared everything and said so; what is found here is reused silently.
    place = read_rank_environment()
    heart = Heart(run, place.rank if place else 0)
    inputs = read_inputs(loaded, run)
    world = start_world(loaded.config.parallel, heart)
    try:
        return run_in_world(inputs, world)
    finally:
        end_world(world)
        heart.close()


def read_inputs(loaded: Loaded, run: RunFolder) -> Inputs:
    """The model's folder and the tokenised data; made once, reused by every other rank and run."""
    folder = model_folder(loaded.config.model, loaded.base)
    return Inputs(loaded, run, folder, prepare_data(loaded.config, loaded.base, folder))


def run_in_world(inputs: Inputs, world: World) -> int:
    """Train in a world that stands already; returns the exit code."""
    config, run = inputs.config, inputs.run
    identity = {"config": config_hash(config), "training data": inputs.prepared.train.fingerprint}
    check_same_everywhere(world, identity | library_versions())
    notes: list[str] = []
    # A world that takes the place of one that failed goes on from what that one saved, wherever the run began.
    resume = "auto" if is_restarted() and list_checkpoints(run.checkpoints) else config.checkpoint.resume
    found = choose_checkpoint(run.checkpoints, resume, world, notes.append)
    plan = _agree_on_plan(inputs, world, found)
    notes += plan.warnings
    contents = _build_contents(inputs, plan, world)
    loader = _build_loader(inputs, plan, world)
    settings = build_settings(config, loader)
    store = CheckpointStore(run.checkpoints, world, plan.layout, identity["config"], library_versions())
    notes += [f"removed {name}, which a killed process left half-written" for name in store.clean_drafts()]
    if found is not None:
        store.load(found, contents)
    state = contents.state
    if world.is_main:
        _announce(inputs, settings, plan, contents, found, notes)
    record = Recorder(run, world, settings.total_steps, config.log, state.step)
    try:
        record.start(state, world_size=world.size, layout=plan.layout.to_json())
        for note in notes:
            record.event("warning", step=state.step, text=note)
        evaluate = _build_evaluation(inputs, plan, contents.parallel, world)
        stopped_by = train(Job(settings, contents, loader, store, record, world, evaluate))
        return _finish(inputs, stopped_by, contents, record, world)
    finally:
        record.close()


def _agree_on_plan(inputs: Inputs, world: World, found: Path | None) -> Plan:
    """Rank 0's plan on every rank: free memory, and with it `auto`, may differ between machines."""
    store = inputs.prepared.train
    plan: Plan = world.agree(
        make_plan(
            inputs.config,
            read_shape(inputs.folder),
            read_machine(),
            world.size,
            local_size=world.local_size,
            num_samples=len(store),
            mean_length=float(store.lengths.mean()),
        )
    )
    refusal = plan.refusal()
    if refusal:
        raise refusal
    return keep_choices(plan, inputs.config, found)


def _build_contents(inputs: Inputs, plan: Plan, world: World) -> Contents:
    config = inputs.config
    seed_everything(config.train.seed)
    parallel = _build_model(inputs, plan, world)
    optimizer = build_optimizer(parallel.named_trainable(), config.optim, on_host=plan.layout.offload == "optimizer")
    # The same initial values everywhere, but each rank draws its own dropout.
    torch.manual_seed(config.train.seed + world.rank)
    return Contents(parallel, optimizer, build_numerics(plan.layout.precision, world.device), TrainState())


def _build_model(inputs: Inputs, plan: Plan, world: World) -> Parallelized:
    config = inputs.config
    # Trained weights are fp32 masters; a frozen base is only read, so it lies in the type that computes.
    frozen_type = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.layout.precision]
    options: dict[str, Any] = {
        "dtype": frozen_type if config.lora else torch.float32,
        "lora": config.lora,
        "train_only": config.train_only,
        "seed": config.train.seed,
        "trust_remote_code": config.model.trust_remote_code,
    }
    source = None
    if plan.layout.is_sharded and (built := build_without_memory(inputs.folder, **options)):
        lm, source = built
    else:
        lm = load_model(inputs.folder, **options)
    return parallelize(LossModel(lm, config.train.label_smoothing), plan.layout, config.parallel, world, source)


def _build_loader(inputs: Inputs, plan: Plan, world: World) -> Loader:
    from duoka.data.epoch_plan import EpochPlan

    config, store = inputs.config, inputs.prepared.train
    epochs = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=config.train.seed,
        global_batch=parse_amount(config.train.global_batch),
    )  # fmt: skip
    return Loader(
        store, epochs, rank=world.rank, num_ranks=world.size, micro=plan.layout.micro, packing=plan.layout.packing,
        max_length=config.data.max_length, pad_id=inputs.prepared.pad_id,
    )  # fmt: skip


def _build_evaluation(
    inputs: Inputs, plan: Plan, parallel: Parallelized, world: World
) -> Callable[[], Measured] | None:
    store = inputs.prepared.eval
    if store is None:
        return None

    def evaluate() -> Measured:
        batches = eval_batches(
            store, rank=world.rank, num_ranks=world.size, micro=plan.layout.micro, packing=plan.layout.packing,
            max_length=inputs.config.data.max_length, pad_id=inputs.prepared.pad_id,
        )  # fmt: skip
        measured = measure_loss(parallel.bare, batches, world, plan.layout.precision)
        parallel.settle()
        return measured

    return evaluate


def _announce(
    inputs: Inputs, settings: RunSettings, plan: Plan, contents: Contents, found: Path | None, notes: list[str]
) -> None:
    write_json_atomic(inputs.run.plan, plan.to_json())
    left = settings.total_steps - contents.state.step
    resumed = f"  going on from {found.name}, {left:,} steps left" if found else ""
    lines = banner(settings, plan, inputs.prepared, inputs.run, count_parameters(contents.parallel.bare.lm), resumed)
    print("\n".join([*lines, *(f"  note: {note}" for note in notes), ""]), flush=True)


def _finish(inputs: Inputs, stopped_by: str, contents: Contents, record: Recorder, world: World) -> int:
    step = contents.state.step
    if stopped_by:
        record.event("end", step=step, reason=stopped_by)
        record.say(f"stopped by {stopped_by} after step {step}; saved. The same command goes on.")
        if world.is_main:
            update_status(inputs.run, state="stopped", step=step, exit_code=75, cause=stopped_by)
        return StoppedEarly.exit_code
    world.heart.tell("end", step)
    lm = contents.parallel.bare.lm
    whole = gather_state(lm, keep=world.is_main)
    if world.is_main:
        write_result(lm, inputs.folder, inputs.run.final, whole)
    world.barrier()
    record.event("end", step=step, reason="done")
    if world.is_main:
        update_status(inputs.run, state="done", step=step, exit_code=0)
    return 0
