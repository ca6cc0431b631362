"""One worker's run, from a loaded config to the final folder. Called by the command line in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from duoka.config.load import Loaded, config_hash
from duoka.config.schema import RunConfig
from duoka.data.loader import Loader, eval_batches
from duoka.data.prepare import PreparedData, prepare_data
from duoka.model.build import LossModel, load_model
from duoka.model.result import write_result
from duoka.model.lora import count_parameters
from duoka.model.source import model_folder
from duoka.optim.build import build_optimizer
from duoka.parallel.apply import Parallelized, parallelize
from duoka.parallel.environ import read_rank_environment
from duoka.parallel.world import World, check_same_everywhere, end_world, start_world
from duoka.plan.hardware import read_machine
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import read_shape
from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.status import update_status
from duoka.train.checkpoint import CheckpointStore, Contents, choose_checkpoint
from duoka.train.loop import Outcome, train
from duoka.train.measure import Measured, measure_loss
from duoka.train.record import Recorder
from duoka.train.setup import RunSettings, banner, build_settings, library_versions
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
    place = read_rank_environment()
    say = print if place is None or place.rank == 0 else _silence
    # Before the process group: a collective that waits for a tokeniser looks like a hang.
    base = loaded.path.parent
    folder = model_folder(loaded.config.model, base, say)
    prepared = prepare_data(loaded.config, base, folder, say=say)
    world = start_world(loaded.config.parallel)
    try:
        return _run_in_world(Inputs(loaded, run, folder, prepared), world)
    finally:
        end_world(world)


def _silence(text: str) -> None:
    """What rank 0 says is enough."""


def _run_in_world(inputs: Inputs, world: World) -> int:
    config, run = inputs.config, inputs.run
    check_same_everywhere(
        world,
        {
            "config": config_hash(config),
            "training data": inputs.prepared.train.fingerprint,
            **library_versions(),
        },
    )
    plan = world.agree(_plan(inputs, world))
    seed_everything(config.train.seed)
    parallel = _build_model(inputs, plan, world)
    numerics = build_numerics(plan.layout.precision, world.device)
    optimizer = build_optimizer(parallel.named_trainable(), config.optim)
    contents = Contents(parallel, optimizer, numerics.scaler, TrainState())
    # The same initial values everywhere, but each rank draws its own dropout.
    torch.manual_seed(config.train.seed + world.rank)
    loader = _build_loader(inputs, plan, world)
    settings = build_settings(config, loader)

    store = CheckpointStore(
        run.checkpoints,
        world,
        layout=plan.layout.name,
        config_hash=config_hash(config),
        versions=library_versions(),
    )
    notes = [f"removed {name}, which a killed process left half-written" for name in store.clean_drafts()]
    found = choose_checkpoint(store, config.checkpoint.resume, notes.append)
    if found is not None:
        store.load(found, contents)
    state = contents.state
    if world.is_main:
        _announce(inputs, settings, plan, parallel, state, found, notes)
    record = Recorder(
        run,
        world,
        total_steps=settings.total_steps,
        log_every=config.log.every,
        trackers=config.log.to,
        state=state,
    )
    try:
        record.start(state, world_size=world.size, layout=plan.layout.name, precision=plan.layout.precision)
        for note in notes:
            record.event("warning", step=state.step, text=note)
        evaluate = _build_evaluation(inputs, plan, parallel, world)
        outcome = train(settings, contents, numerics, loader, store, record, world, evaluate)
        return _finish(inputs, outcome, parallel, record, state, world)
    finally:
        record.close()


def _plan(inputs: Inputs, world: World) -> Plan:
    store = inputs.prepared.train
    return make_plan(
        inputs.config, read_shape(inputs.folder), read_machine(), world.size,
        num_samples=len(store), mean_length=float(store.lengths.mean()),
    )  # fmt: skip


def _build_model(inputs: Inputs, plan: Plan, world: World) -> Parallelized:
    config = inputs.config
    # Trained weights are fp32 masters; a frozen base is only read, so it lies in the type that computes.
    frozen_type = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.layout.precision]
    dtype = frozen_type if config.lora else torch.float32
    lm = load_model(inputs.folder, dtype=dtype, lora=config.lora, trust_remote_code=config.model.trust_remote_code)
    return parallelize(LossModel(lm).to(world.device), plan.layout, config.parallel, world)


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
        return measure_loss(parallel.bare, batches, world, plan.layout.precision)

    return evaluate


def _announce(
    inputs: Inputs, settings: RunSettings, plan: Plan, parallel: Parallelized, state: TrainState,
    found: Path | None, notes: list[str],
) -> None:  # fmt: skip
    write_json_atomic(inputs.run.plan, plan.to_json())
    left = settings.total_steps - state.step
    resumed = f"  going on from {found.name}, {left:,} steps left" if found else ""
    lines = banner(settings, plan, inputs.prepared, inputs.run, count_parameters(parallel.bare.lm), resumed)
    print("\n".join([*lines, *(f"  note: {note}" for note in notes), ""]), flush=True)


def _finish(
    inputs: Inputs,
    outcome: Outcome,
    parallel: Parallelized,
    record: Recorder,
    state: TrainState,
    world: World,
) -> int:
    if outcome.stopped_by:
        record.event("end", step=state.step, reason=outcome.stopped_by)
        record.say(f"stopped by {outcome.stopped_by} after step {state.step}; saved. The same command goes on.")
        if world.is_main:
            update_status(inputs.run, state="stopped", step=state.step, exit_code=75, cause=outcome.stopped_by)
        return 75
    if world.is_main:
        write_result(parallel.bare.lm, inputs.folder, inputs.run.final)
    world.barrier()
    record.event("end", step=state.step, reason="done")
    if world.is_main:
        update_status(inputs.run, state="done", step=state.step, exit_code=0)
    return 0
