"""One worker's run, from a loaded config to the final folder. Called by the command line in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duoka.comm.world import World, check_same_everywhere, end_world, start_world
from duoka.config.load import config_hash, resolved_yaml, result_values
from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.data.build_feed import Feed, build_feed, data_order
from duoka.data.dataset_lengths import lengths_of
from duoka.data.feed.loader import eval_batches
from duoka.data.prepare import PreparedData, find_tokenizer, prepare_data, read_tokenizer
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import StoppedEarly
from duoka.hub.models import model_fingerprint, model_folder
from duoka.model.adapters import Earlier
from duoka.model.build import LossModel, find_core, load_model
from duoka.model.lora import count_parameters
from duoka.model.loss import Goal
from duoka.model.quantize import Packing
from duoka.model.result import write_result
from duoka.model.shards import build_without_memory
from duoka.optim.build import build_optimizer, describe_optimizer
from duoka.optim.roles import Role, assign_roles
from duoka.parallel.apply import parallelize
from duoka.parallel.engine import Engine
from duoka.parallel.gather import gather_state
from duoka.parallel.measure import Measured, measure_loss
from duoka.parallel.sharded import find_layers
from duoka.parallel.token_loss import TokenLoss
from duoka.plan.catalogue import local_cluster
from duoka.plan.hardware import read_machine
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import read_shape
from duoka.process.environ import read_rank_environment
from duoka.process.lifeline import launcher_speaks
from duoka.process.rank import is_restarted
from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.heart import Heart, watch_itself
from duoka.runs.manifest import list_checkpoints
from duoka.runs.status import update_status
from duoka.runs.stop_request import read_stop_request
from duoka.runs.versions import library_versions
from duoka.store.checkpoint import CheckpointStore, Facts
from duoka.store.contents import Contents
from duoka.store.resume import check_changes, choose_checkpoint
from duoka.store.retention import clean_drafts
from duoka.store.state import TrainState, read_random_state, seed_everything, set_random_state
from duoka.store.takeover import take_over_state
from duoka.train.job import Job
from duoka.train.loop import train
from duoka.train.memory import MemoryWatch
from duoka.train.nonfinite import NonFinite
from duoka.train.record import Recorder
from duoka.train.rehearse import is_asked, rehearse_largest
from duoka.train.samples import build_sampler
from duoka.train.saving import Saver, check_room
from duoka.train.setup import RunSettings, banner, build_settings, describe_rest, keep_choices
from duoka.train.shortage import MemoryGuard, read_shortage


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

    def tokenizer(self) -> ChatTokenizer:
        return read_tokenizer(self.config, self.loaded.base, self.folder)


def run_worker(loaded: Loaded, run: RunFolder, on_hang: Callable[[str], None] | None = None) -> int:
    """Train as this process's rank; returns the exit code (0 done, 75 stopped early: start again to go on).

    `on_hang` is for a rank that nobody supervises: it is called from a thread when the rank stands still.
    """
    # Before the process group: a collective that waits for a tokeniser looks like a hang. Whoever started this
    # process has prepared everything and said so; what is found here is reused silently.
    place = read_rank_environment()
    heart = Heart(run, place.rank if place else 0)
    if on_hang is not None:
        watch_itself(heart, run, loaded.config.faults.patience_s, on_hang)
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
    identity = {"config": config_hash(config), "training data": data_order(inputs.prepared)}
    alike = {**result_values(inputs.loaded), "training data": identity["training data"]}
    check_same_everywhere(world, alike | {"model": model_fingerprint(inputs.folder)} | library_versions())
    notes: list[str] = []
    # A world that takes the place of one that failed goes on from what that one saved, wherever the run began.
    resume = "auto" if is_restarted() and list_checkpoints(run.checkpoints) else config.checkpoint.resume
    found = choose_checkpoint(run, resume, inputs.loaded.base, world, notes.append)
    plan = _agree_on_plan(inputs, world, found)
    notes += plan.warnings
    if found is not None:
        notes += check_changes(found, inputs.loaded, identity["training data"], plan.layout, world).notes()
    if world.is_main:
        notes += [f"removed {name}, which a killed process left half-written" for name in clean_drafts(run.checkpoints)]
    contents = _build_contents(inputs, plan, world)
    feed = build_feed(config, inputs.prepared, plan.layout, world.rank, world.sum)
    facts = Facts(identity["config"], resolved_yaml(inputs.loaded), identity["training data"], library_versions())
    store = CheckpointStore(run.checkpoints, world, plan.layout, facts, asynchronous=config.checkpoint.is_async)
    try:
        if found is not None:
            store.load(found, contents)
            contents.engine.resumed()
        elif config.optim.state is not None:
            take_over_state(config, run, inputs.loaded.base, world, contents, notes.append)
        settings = build_settings(config, feed, contents.state, inputs.prepared.mean_length, plan.horizon)
        notes += settings.notes() + check_room(store, contents, settings)
        if world.is_main:
            _announce(inputs, settings, plan, contents, feed, found, notes)
        store.get_ready(contents)
        return _run(inputs, plan, contents, feed, store, settings, notes, world)
    finally:
        store.close()


def _run(
    inputs: Inputs,
    plan: Plan,
    contents: Contents,
    feed: Feed,
    store: CheckpointStore,
    settings: RunSettings,
    notes: list[str],
    world: World,
) -> int:
    """The loop with its record, which is closed whatever happens."""
    state = contents.state
    random_state = read_random_state(world.device)
    record = Recorder(inputs.run, world, settings.total_steps, inputs.config.log, state.step, plan.yardstick)
    try:
        record.start(state, world_size=world.size, layout=plan.layout.to_json())
        for note in notes:
            record.event("warning", step=state.step, text=note)
        evaluate = _build_evaluation(inputs, plan, contents.engine, world)
        saver = Saver(store, contents, settings, record, world)
        guard = MemoryGuard(inputs.config, plan, record, feed)
        nonfinite = NonFinite(inputs.config.faults.nonfinite, saver, record)
        objective = TokenLoss()
        watch = MemoryWatch(contents.engine, contents.optimizer, plan.layout, world.device)
        if is_asked(inputs.config, world):
            rehearse_largest(contents.engine, contents.optimizer, objective, guard)
        sample = build_sampler(inputs.prepared, inputs.config, inputs.tokenizer, contents.engine, plan.layout, world)
        job = Job(settings, contents, objective, feed, saver, record, world, evaluate, watch, guard, nonfinite, sample)
        # Some packages draw when they are imported (the progress line's does, on rank 0): no part of the run.
        set_random_state(random_state, world.device)
        stopped_by = train(job)
        stopped_by = stopped_by and (read_stop_request(inputs.run) or stopped_by)
        if feed.summary():
            record.say(f"data since this start: {feed.summary()}")
        return _finish(inputs, stopped_by, contents, record, world)
    finally:
        record.close()


def _agree_on_plan(inputs: Inputs, world: World, found: Path | None) -> Plan:
    """Rank 0's plan on every rank: free memory, and with it `auto`, may differ between machines."""
    machine = read_machine()
    plan: Plan = world.agree(
        make_plan(
            inputs.config,
            read_shape(inputs.folder),
            machine,
            world.size,
            local_size=world.local_size,
            cluster=local_cluster(machine, world.size, world.local_size),
            lengths=lengths_of(inputs.prepared, inputs.config),
        )
    )
    refusal = plan.refusal()
    if refusal:
        raise refusal
    return keep_choices(plan, inputs.config, found, world.agree(read_shortage(inputs.run)))


def _build_contents(inputs: Inputs, plan: Plan, world: World) -> Contents:
    config = inputs.config
    seed_everything(config.train.seed)
    engine, roles = _build_model(inputs, plan, world)
    optimizer = build_optimizer(
        engine.named_trainable(), config.optim, on_host=plan.layout.offload == "optimizer", roles=roles,
        b_lr_ratio=config.lora.b_lr_ratio if config.lora else 1.0, sharing=engine.share_matrices,
    )  # fmt: skip
    # The same initial values everywhere, but each rank draws its own dropout.
    torch.manual_seed(config.train.seed + world.rank)
    return Contents(engine, optimizer, TrainState())


def _build_model(inputs: Inputs, plan: Plan, world: World) -> tuple[Engine, dict[str, Role]]:
    config = inputs.config
    # Trained weights are fp32 masters; a frozen base is only read, so it lies in the type that computes.
    frozen_type = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.layout.precision]
    options: dict[str, Any] = {
        "dtype": frozen_type if config.lora else torch.float32,
        "lora": config.lora,
        "train_only": config.train_only,
        "seed": config.train.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "earlier": Earlier.of(config.lora, inputs.loaded.base),
    }
    source = None
    if plan.layout.is_sharded and (built := build_without_memory(inputs.folder, **options)):
        lm, source = built
    else:
        lm = load_model(inputs.folder, packing=Packing.of(config.model), **options)
    core = find_core(lm)
    roles = assign_roles(lm, core, find_layers(core))
    whole = {name for name, p in lm.named_parameters() if p.requires_grad and roles[name] == "matrix"}
    matrices = whole if config.optim.name == "muon" else ()
    goal = Goal(config.train.label_smoothing, by_probability=config.train.loss == "dft")
    model = LossModel(lm, goal)
    return parallelize(model, plan.layout, config.parallel, world, source, matrices), roles


def _build_evaluation(
    inputs: Inputs, plan: Plan, engine: Engine, world: World
) -> Callable[[Callable[[], bool]], Measured | None] | None:
    store, text_bytes = inputs.prepared.eval, inputs.prepared.text_bytes
    if store is None:
        return None
    sizes = None if text_bytes is None else torch.from_numpy(text_bytes)

    def evaluate(is_stopped: Callable[[], bool]) -> Measured | None:
        batches = eval_batches(
            store, rank=world.rank, num_ranks=world.size, micro=plan.layout.micro, packing=plan.layout.packing,
            max_length=inputs.config.data.max_length, pad_id=inputs.prepared.pad_id,
        )  # fmt: skip

        def all_are_stopped() -> bool:
            return world.sum([float(is_stopped())])[0] > 0

        # Sharded ranks gather layers together: none may leave a pass before the others.
        ask = all_are_stopped if plan.layout.is_sharded else is_stopped
        with engine.evaluate() as model:
            return measure_loss(model, batches, world, plan.layout.precision, ask, sizes)

    return evaluate


def _announce(
    inputs: Inputs,
    settings: RunSettings,
    plan: Plan,
    contents: Contents,
    feed: Feed,
    found: Path | None,
    notes: list[str],
) -> None:
    write_json_atomic(inputs.run.plan, plan.to_json())
    resumed = f"  {describe_rest(found, settings, feed, contents.state)}" if found else ""
    parameters = count_parameters(contents.engine.bare.lm)
    learns = describe_optimizer(contents.optimizer, settings.config.optim, settings.batch_factor)
    lines = banner(settings, plan, inputs.prepared, inputs.run, parameters, learns, resumed)
    print("\n".join([*lines, *(f"  note: {note}" for note in notes), ""]), flush=True)


def _finish(inputs: Inputs, stopped_by: str, contents: Contents, record: Recorder, world: World) -> int:
    step = contents.state.step
    if stopped_by:
        record.event("end", step=step, reason=stopped_by)
        # In an elastic world it may be only the world that ends, not the run: its launcher says which.
        goes_on = "" if launcher_speaks() else ". The same command goes on."
        record.say(f"stopped by {stopped_by} after step {step}; saved{goes_on}")
        if world.is_main and launcher_speaks():
            update_status(inputs.run, step=step)
        elif world.is_main:
            update_status(inputs.run, state="stopped", step=step, exit_code=75, cause=f"stopped by {stopped_by}")
        return StoppedEarly.exit_code
    world.heart.tell("end", step)
    lm = contents.engine.bare.lm
    whole = gather_state(lm, keep=world.is_main)
    if world.is_main:
        _write_result(inputs, lm, whole)
    world.barrier()
    record.event("end", step=step, reason="done")
    if world.is_main:
        update_status(inputs.run, state="done", step=step, exit_code=0)
    return 0


def _write_result(inputs: Inputs, lm: torch.nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """The final folder, with the tokenizer and the template that training used."""
    base = inputs.loaded.base
    tokenizer = inputs.tokenizer()
    template = tokenizer.template if tokenizer.template_name != "model" else None
    folder = find_tokenizer(inputs.config, base, inputs.folder)
    source = folder if isinstance(folder, Path) else inputs.folder
    write_result(lm, inputs.folder, inputs.run.final, whole, tokenizer_folder=source, chat_template=template)
