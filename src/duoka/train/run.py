"""One run: every part of it, and the order in which parts are made. `build_run` is that order; read it first.

main.py builds a Run and starts it, loop.py drives it. The launcher, the command line and tests begin here too: nothing
of a run is made anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from duoka.comm.world import World, check_same_everywhere
from duoka.config.load import config_hash, resolved_yaml, result_values
from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.data.build_feed import Feed, build_feed, data_order
from duoka.data.dataset_lengths import lengths_of
from duoka.data.feed.loader import GlobalBatch, Loader
from duoka.data.prepare import PreparedData, read_tokenizer
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.hub.adapter_files import note_other_bases
from duoka.hub.base import BaseIdentity, model_fingerprint
from duoka.hub.models import resolve_tokenizer
from duoka.model.adapters import Earlier
from duoka.model.answer import end_of_turn
from duoka.model.build import find_core, load_model, named_part, named_weights
from duoka.model.dtypes import BY_PRECISION
from duoka.model.kept_bytes import read_measured_shape
from duoka.model.kernels import agree_on_kernels, look, settle_sharing
from duoka.model.layers import find_layers
from duoka.model.quantize import Quantization
from duoka.model.request import ModelRequest
from duoka.model.row_choice import RowChoice, check_stages, choose_rows, find_passes
from duoka.model.shards import build_without_memory
from duoka.optim.build import build_optimizer
from duoka.optim.roles import Role, assign_roles
from duoka.parallel.apply import parallelize
from duoka.parallel.engine import Engine
from duoka.parallel.measure import Measured
from duoka.parallel.mesh import Mesh, build_mesh
from duoka.parallel.objective import Objective
from duoka.plan.catalog import local_cluster
from duoka.plan.hardware import read_machine
from duoka.plan.kernels import Chosen, choose_kernels
from duoka.plan.offload import offload_folder, with_disk
from duoka.plan.prefixes import why_no_sharing
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import read_shape
from duoka.process.rank import is_restarted
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import list_checkpoints
from duoka.runs.versions import library_versions
from duoka.store.checkpoint import CheckpointStore, Facts
from duoka.store.contents import Contents
from duoka.store.final_folder import ResultSources, write_final
from duoka.store.loading import read_progress
from duoka.store.resume import check_changes, choose_checkpoint
from duoka.store.retention import clean_drafts
from duoka.store.saving import Saver
from duoka.store.state import TrainState, seed_everything
from duoka.store.takeover import take_over_state
from duoka.train.balance import build_objective
from duoka.train.evaluation import build_evaluation
from duoka.train.garbage import GarbageCollection
from duoka.train.gpus import as_torch_sees
from duoka.train.hooks import Timer
from duoka.train.memory import MemoryWatch
from duoka.train.moments import Moments
from duoka.train.nonfinite import NonFinite
from duoka.train.record import Recorder
from duoka.train.reference import ReferencePass, add_references
from duoka.train.rehearse import is_asked, rehearse_largest
from duoka.train.replicas import ReplicaCheck, check_start
from duoka.train.samples import Sampler, read_prompts
from duoka.train.setup import RunSettings, build_settings, keep_choices
from duoka.train.shortage import MemoryGuard, read_shortage
from duoka.train.stages.stage import Around, Stage, build_stage
from duoka.train.task_scores import TaskScorer, read_tasks


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
        return read_tokenizer(self.config.model, self.loaded.base, self.folder)

    def result_sources(self, beside: Mapping[str, Mapping[str, torch.Tensor]]) -> ResultSources:
        """What the final folder takes from elsewhere: the tokenizer and the template that training used."""
        tokenizer = self.tokenizer()
        template = tokenizer.template if tokenizer.template_name != "model" else None
        folder = resolve_tokenizer(self.config.model, self.loaded.base, self.folder)
        kind = self.config.stage.kind
        stop_id = None if kind.reads_text or kind.scores else end_of_turn(tokenizer)
        return ResultSources(self.folder, folder, template, beside, stop_id)


@dataclass
class Run:
    """All parts of one run on this rank. From `evaluate` on they are made by `start`, for the length of the loop."""

    inputs: Inputs
    found: Path | None  # the checkpoint that it goes on from
    notes: list[str]  # what a user should know, before the first step
    plan: Plan
    mesh: Mesh
    stage: Stage
    objective_of: Callable[[GlobalBatch], Objective]  # what a step minimizes: the stage, with what experts add
    contents: Contents
    feed: Feed
    store: CheckpointStore
    settings: RunSettings
    reference: str  # what the loss compares with, and where that is from; "" where it does not
    kernels: tuple[Chosen, ...]  # what computes which part of a step, and why no faster one

    # It is told how to ask whether the run should stop, and returns None when a rank said yes.
    evaluate: Callable[[Callable[[], bool]], Measured | None] | None = field(init=False)
    record: Recorder = field(init=False)
    saver: Saver = field(init=False)
    guard: MemoryGuard = field(init=False)
    nonfinite: NonFinite = field(init=False)
    moments: Moments = field(init=False)  # what it sees to beside learning

    @property
    def world(self) -> World:
        return self.mesh.everyone

    @property
    def is_evaluated(self) -> bool:
        return self.evaluate is not None or bool(self.inputs.config.train.eval_tasks)

    def open_record(self) -> Recorder:
        """Open the log; the caller closes it, whatever happens."""
        settings, state = self.settings, self.contents.state
        loaded, yardstick = self.inputs.loaded, self.plan.yardstick
        self.record = Recorder(self.inputs.run, self.world, loaded, settings.total_steps, state.step, yardstick)
        return self.record

    def start(self) -> None:
        """Say that the run begins, and make what works beside the loop; on all ranks together."""
        inputs, plan, contents, record = self.inputs, self.plan, self.contents, self.record
        config, engine = inputs.config, contents.engine
        record.start(contents.state, world_size=self.world.size, layout=plan.layout.to_json())
        for note in self.notes:
            record.event("warning", step=contents.state.step, text=note)
        self.evaluate = build_evaluation(inputs.prepared, config, plan.layout, engine, self.stage)
        timer = Timer(self.settings.save_every, self.settings.steps_per_epoch)
        self.saver = Saver(self.store, contents, self.settings.config.checkpoint, timer, record, self.world)
        self.guard = MemoryGuard(config, plan, record, self.feed)
        self.nonfinite = NonFinite(config.faults.nonfinite, self.saver, record)
        prompts = read_prompts(inputs.prepared, config, inputs.tokenizer)
        tasks = read_tasks(config, inputs.loaded.base, engine, inputs.tokenizer)
        self.moments = Moments((
            MemoryWatch(engine, contents.optimizer, plan.layout, record),
            ReplicaCheck(contents, self.world, self.settings.check_every),
            Sampler(engine, plan.layout, record, prompts),
            TaskScorer(engine, plan.layout, record, self.saver, tasks),
            *self.stage.concerns(record),
            GarbageCollection(),
        ))  # fmt: skip
        if is_asked(config.train, self.world):
            rehearse_largest(engine, contents.optimizer, self.stage, self.guard)


def build_run(inputs: Inputs, world: World, *, at_least: int = 0) -> Run:
    """Every part of a run that can train at once; all ranks call it together. `at_least`: so many steps are made, also
    where the run has fewer."""
    config, notes = inputs.config, list[str]()
    found = _find_start(inputs, world, notes)  # refuses ranks whose code, config, model or data differ
    rows = choose_rows(config, inputs.folder)  # packed, or padded where that changed the architecture's numbers
    plan = _agree_on_plan(inputs, world, found, rows, notes)  # rank 0's on every rank
    agree_on_kernels(plan.layout, plan.work.shape, world.device, world.gather)  # what all ranks can use
    mesh = build_mesh(plan.layout, world)  # who reads the same data, holds the same bits, adds the same loss
    world.heart.stand_at(mesh.describe_place())
    stage = build_stage(config)  # what an optimizer step minimizes
    stage.take_data(inputs.prepared)
    engine, roles = build_engine(inputs, plan, mesh, stage)  # the model under its layout; ranks read own shards
    check_start(engine)  # ranks read their own files: all must have found the same
    objective_of = build_objective(config, engine, stage)
    settle_sharing(engine.bare, plan.layout, world.device)
    kernels = choose_kernels(look(engine.bare, config, plan.layout, world.device))
    contents = build_contents(config, plan, engine, roles, inputs.run.path)  # with the optimizer, at step 0
    # While the engine has the weights that the run began with.
    reference = _find_reference(inputs, plan, engine, found, at_least)
    stage.take_start(engine)
    # The same initial values everywhere; what people's own code draws differs from data rank to data rank.
    torch.manual_seed(config.train.seed + mesh.data.rank)
    on_gpu = world.device.type == "cuda"
    feed = build_feed(config, inputs.prepared, plan.layout, mesh.data.rank, mesh.data.sum, pin_memory=on_gpu)
    store = _open_store(inputs, plan, world)
    around = Around(
        inputs.loaded.base,
        inputs.folder,
        inputs.run,
        model_fingerprint(inputs.folder),
        inputs.prepared.pad_id,
        inputs.tokenizer,
        engine,
        plan.layout,
        lambda folder: write_final(named_part(engine.bare), mesh, partial(inputs.result_sources, {}), folder),
        store.release,
    )
    try:
        feed = stage.feed(feed, around)
        _go_on(inputs, found, store, contents, notes)  # or begin with an earlier stage's averages
        mean_length = inputs.prepared.mean_length
        settings = build_settings(config, feed, contents.state, mean_length, plan.horizon)
    except BaseException:  # a Ctrl-C too must leave no thread and no group of the store behind; it goes on upwards
        store.close()
        raise
    parts = (stage, objective_of, contents, feed, store, settings, reference, kernels)
    return Run(inputs, found, notes, plan, mesh, *parts)


def _find_start(inputs: Inputs, world: World, notes: list[str]) -> Path | None:
    """The checkpoint to go on from."""
    config, run = inputs.config, inputs.run
    alike = {**result_values(inputs.loaded), "training data": data_order(inputs.prepared)}
    check_same_everywhere(world, alike | {"model": model_fingerprint(inputs.folder)} | library_versions())
    # A world that takes the place of one that failed goes on from what that one saved, wherever the run began.
    # Rank 0 looks: on a disk that machines share, another one may not see yet what was saved a moment ago.
    has_saved = is_restarted() and world.agree(bool(list_checkpoints(run.checkpoints)) if world.is_main else None)
    resume = "auto" if has_saved else config.checkpoint.resume
    return choose_checkpoint(run, resume, inputs.loaded.base, world, notes.append)


def _agree_on_plan(inputs: Inputs, world: World, found: Path | None, rows: RowChoice, notes: list[str]) -> Plan:
    """Rank 0's plan on every rank: free memory, and with it `auto`, may differ between machines."""
    machine = with_disk(as_torch_sees(read_machine(), world), inputs.config.parallel.offloads, inputs.run.path)
    notes += rows.notes
    planned = rows.applied_to(inputs.config)
    plan: Plan = world.agree(
        make_plan(
            planned,
            rows.seen_in(read_measured_shape(inputs.folder, planned) if world.is_main else read_shape(inputs.folder)),
            machine,
            world.size,
            local_size=world.local_size,
            cluster=local_cluster(machine, world.size, world.local_size),
            lengths=lengths_of(inputs.prepared, planned),
        )
    )
    if plan.layout.pp > 1:
        check_stages(inputs.config.model, inputs.folder)
    refusal = plan.refusal()
    if refusal:
        raise refusal
    plan = keep_choices(plan, inputs.config, found, world.agree(read_shortage(inputs.run)))
    notes += plan.warnings
    notes += note_other_bases(inputs.config.lora, inputs.loaded.base, inputs.folder)
    if found is not None:
        data = data_order(inputs.prepared)
        notes += check_changes(found, inputs.loaded, data, inputs.folder, plan.layout, world).notes()
    if world.is_main:
        drafts = clean_drafts(inputs.run.checkpoints)
        notes += [f"removed {name}, which a killed process left half-written" for name in drafts]
    return plan


def build_engine(inputs: Inputs, plan: Plan, mesh: Mesh, stage: Stage) -> tuple[Engine, dict[str, Role]]:
    """The model under its layout, and which part each of its parameters plays for the optimizer."""
    config = inputs.config
    seed_everything(config.train.seed)
    passes = find_passes(config.model, inputs.folder, plan.layout.packing)
    request = ModelRequest(
        inputs.folder,
        dtype=BY_PRECISION[config.weights_type(plan.layout.precision)],
        lora=config.lora,
        train_only=config.train_only,
        seed=config.train.seed,
        attention=passes.attention,
        trains=True,
        trust_remote_code=config.model.trust_remote_code,
        packing=Quantization.of(config.model),
        earlier=Earlier.of(config.lora, inputs.loaded.base),
        scores=config.stage.kind.scores,
    )
    source = None
    # A GPU's weights come straight from the files: eight ranks that each hold the model in host memory first, as wide
    # as it is trained, are more than most machines have.
    is_cut = plan.layout.is_sharded or plan.layout.tp > 1 or plan.layout.pp > 1
    from_files = is_cut or mesh.everyone.device.type == "cuda"
    if from_files and (built := build_without_memory(request)):
        lm, source = built
    else:
        lm = load_model(request)
    core = find_core(lm)
    roles = assign_roles(lm, core, find_layers(core))
    whole = {name for name, p in lm.named_parameters() if p.requires_grad and roles[name] == "matrix"}
    matrices = whole if config.optim.name == "muon" else ()
    model = stage.wrap(lm, own_logits=passes.own_logits)
    drops = "dropout is drawn for each sample" if model.drops is not None else ""
    model.no_sharing = why_no_sharing(config, plan.layout) or passes.no_sharing or drops
    beside: dict[str, Role] = {name: "vector" for name in named_weights(model) if name not in roles}
    folder = offload_folder(config.parallel.offloads, inputs.run.path)
    rows = config.row_tokens
    return parallelize(model, plan.layout, config.parallel, mesh, source, matrices, folder, rows), roles | beside


def _find_reference(inputs: Inputs, plan: Plan, engine: Engine, found: Path | None, at_least: int) -> str:
    config, prepared, mesh = inputs.config, inputs.prepared, engine.mesh
    if not config.stage.has_reference:
        return ""
    make = ReferencePass(config, inputs.loaded.base, inputs.folder, prepared.pad_id, plan.layout, engine)
    feed = build_feed(config, prepared, plan.layout, mesh.data.rank, mesh.data.sum)
    assert isinstance(feed, Loader)
    state = TrainState() if found is None else read_progress(found)
    settings = build_settings(config, feed, state, prepared.mean_length, plan.horizon)
    # From the run's beginning, so that a start that goes on asks for no others than the first one did.
    done = state.epoch * feed.steps_per_epoch + state.index
    to_do = max(settings.total_steps - state.step, at_least)
    return add_references(make, prepared, feed.plan.ids_before(done + to_do))


def build_contents(
    config: RunConfig, plan: Plan, engine: Engine, roles: dict[str, Role], run_folder: Path = Path()
) -> Contents:
    layout, folder = plan.layout, offload_folder(config.parallel.offloads, run_folder)
    is_ours = not engine.offloads_itself
    on_host, on_disk = is_ours and layout.offload == "optimizer", is_ours and layout.disk != "none"
    optimizer = engine.build_optimizer(
        partial(
            build_optimizer, optim=config.optim, roles=roles,
            on_host=on_host, on_disk=folder if on_disk else None, share=layout.offload_share,
            b_lr_ratio=config.lora.b_lr_ratio if config.lora else 1.0, sharing=engine.share_matrices,
        )
    )  # fmt: skip
    return Contents(engine, optimizer, TrainState())


def _open_store(inputs: Inputs, plan: Plan, world: World) -> CheckpointStore:
    config, data = inputs.config, data_order(inputs.prepared)
    base = asdict(BaseIdentity.of(inputs.folder))
    facts = Facts(config_hash(config), resolved_yaml(inputs.loaded), data, library_versions(), base)
    return CheckpointStore(
        inputs.run.checkpoints, world, plan.layout, facts, asynchronous=config.checkpoint.is_async
    )  # fmt: skip


def _go_on(inputs: Inputs, found: Path | None, store: CheckpointStore, contents: Contents, notes: list[str]) -> None:
    if found is not None:
        store.load(found, contents)
        contents.engine.resumed()
    elif inputs.config.optim.state is not None:
        take_over_state(inputs.config.optim, inputs.run, inputs.loaded.base, store.world, contents, notes.append)
