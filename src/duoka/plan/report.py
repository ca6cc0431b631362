"""The plan of one run: layout, reasons, memory and speed with their ranges, batch arithmetic, verdict; as JSON.

`make_plan` is pure: config, shape, machine and world go in, the same plan comes out. `duoka plan` prints it
(picture.py), `duoka train` writes it to plan.json, and the end report holds it beside what was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from duoka.config.deepspeed_json import switches
from duoka.config.schema import RunConfig
from duoka.errors import DoesNotFit, Faults
from duoka.plan.advice import advice
from duoka.plan.axes import check_pipeline, check_shape
from duoka.plan.batch import BatchArithmetic, Steps, count_steps, spread_batch
from duoka.plan.catalog import Cluster, cluster_of
from duoka.plan.changes import Change, single_changes, smaller_changes
from duoka.plan.choose import Choice, check_machine, choose_layout
from duoka.plan.costs import Costs, estimate_costs
from duoka.plan.fewest import fewest_ranks
from duoka.plan.hardware import Machine
from duoka.plan.horizon import Horizon, find_horizon
from duoka.plan.in_files import count_notes
from duoka.plan.kernels import Chosen, choose_kernels, expected, kernels_json
from duoka.plan.layout import Layout, Strategy
from duoka.plan.lengths import Lengths
from duoka.plan.memory import FITS, TIGHT, Memory
from duoka.plan.offload import moved_bytes
from duoka.plan.recipe import StaticMemory, Work, static_table
from duoka.plan.rollouts import num_judges, rollout_notes, value_head_parameters
from duoka.plan.room import NO_ROOM, VERDICTS, Room, Verdict
from duoka.plan.search import Ranking, why_not
from duoka.plan.shape import ASSUMED, ModelShape
from duoka.plan.speed import Speed, activations_moved, estimate_speed
from duoka.plan.strategy import rank_layouts
from duoka.plan.task import Task, load_of, memory_of, task_of
from duoka.plan.yardstick import Yardstick, yardstick_of
from duoka.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class Plan:
    """The plan of a run, with the reason of each choice."""

    layout: Layout
    reasons: dict[str, str]
    warnings: tuple[str, ...]
    work: Work
    machine: Machine
    available_bytes: int  # per rank
    memory: Memory
    at_most_bytes: int  # the peak if all samples were as long as they may be
    table: tuple[StaticMemory, ...]
    batch: BatchArithmetic
    epochs: float | None
    steps: Steps | None
    verdict: Verdict
    cluster: Cluster
    task: Task
    speed: Speed
    costs: Costs
    smaller: tuple[str, ...] = ()  # changes that would make it fit, the smallest first
    notes: tuple[str, ...] = ()  # what guides get wrong, where it shows
    ranking: Ranking | None = None  # of all layouts; only when asked for
    host: Room = field(default_factory=Room)
    disk: Room = field(default_factory=Room)  # of what is offloaded there
    changes: tuple[Change, ...] = ()
    horizon: Horizon | None = None  # what train.tokens comes to
    kernels: tuple[Chosen, ...] = ()  # what will compute which part of a step, as far as can be told

    @property
    def yardstick(self) -> Yardstick:
        """The reference for the run's speed: FLOPs per token and the devices' peak."""
        return yardstick_of(self.task, self.layout, self.cluster)

    @property
    def fewest(self) -> dict[str, int | None]:
        """Of each strategy of the table, the fewest data ranks that hold this model."""
        rows = (row.strategy for row in self.table)
        return {name: fewest_ranks(self.task, self.layout, cast(Strategy, name), self.available_bytes) for name in rows}

    @property
    def disk_moved_bytes(self) -> float:
        """That a rank reads from the disk and writes there in a step."""
        load = load_of(self.task, self.layout)
        kept = activations_moved(self.work, self.layout, load) if self.layout.activations == "disk" else 0.0
        return kept + moved_bytes(self.work, self.layout, load.accumulation, self.cluster)

    @property
    def lengths(self) -> Lengths | None:
        """The sample lengths."""
        return self.task.lengths

    def to_json(self) -> dict[str, Any]:
        """Plain values only; what a run keeps as plan.json."""
        shape, work, memory = self.work.shape, self.work, self.memory
        return {
            "verdict": self.verdict,
            "layout": self.layout.to_json(),
            "reasons": dict(self.reasons),
            "warnings": list(self.warnings),
            "model": {
                "type": shape.model_type,
                "num_parameters": shape.num_parameters,
                "num_active": shape.num_active,
                "num_embedding": shape.num_embedding,
                "num_head": shape.num_head,
                "num_per_layer": shape.num_per_layer,
                "num_layers": shape.num_layers,
                "num_trainable": work.num_trainable,
                "is_exact": shape.exact,
                "num_beside": shape.num_beside,
            },
            "batch": self.batch.to_json(),
            "steps": asdict(self.steps) if self.steps else None,
            "horizon": asdict(self.horizon) if self.horizon else None,
            "memory": {
                "peak_bytes": memory.peak_bytes,
                "low_bytes": memory.low_bytes,
                "high_bytes": memory.high_bytes,
                "available_bytes": self.available_bytes,
                "host_needed_bytes": self.host.needed_bytes,
                "host_available_bytes": self.host.available_bytes,
                "disk_needed_bytes": self.disk.needed_bytes,
                "disk_available_bytes": self.disk.available_bytes,
                "at_most_bytes": self.at_most_bytes,
                "tokens_at_once": memory.tokens,
                "basis": self.lengths.basis if self.lengths else "max_length",
                "peak_moment": memory.peak_moment,
                "parts": dict(memory.parts),
                "moments": dict(memory.moments),
                "activation_formula": memory.formula,
                "formulas": dict(memory.formulas),
            },
            "static": [asdict(row) | {"total_bytes": row.total_bytes} for row in self.table],
            "fewest_ranks": self.fewest,
            "machine": self.machine.to_json(),
            "smaller": list(self.smaller),
            "speed": self.speed.to_json(),
            "compute": asdict(self.yardstick),
            "costs": self.costs.to_json(),
            "cluster": {"name": self.cluster.name, "device_source": self.cluster.device.source},
            "notes": list(self.notes),
            "kernels": kernels_json(self.kernels),
            "ranking": _ranking_json(self.ranking),
            "changes": [asdict(change) for change in self.changes],
        }

    def samples_sentence(self) -> str:
        """Whether the tokens at once are expected or a bound, and what that rests on."""
        batch, known = self.batch, self.lengths
        if known is None:
            each = "every pair had twice" if self.task.sequences > 1 else "every sample had"
            return f"at most: as if {each} data.max_length, {batch.max_length:,} tokens"
        if not known.batch:
            return f"for full rows of {batch.max_length:,} tokens"
        text = f"expected from {known.sentence(self.task.shared(self.layout)[0])}"
        if batch.tokens_at_most > batch.tokens_at_once:
            text += (
                f"; at most {format_bytes(self.at_most_bytes)}, with {batch.tokens_at_most:,} tokens at once, were all "
                f"samples {batch.max_length:,} long"
            )
        return text

    def memory_sentence(self) -> str:
        """One line for a banner: `1.35 GiB per rank (1.2 to 1.7), fits in 11.4 GiB`."""
        memory = self.memory
        spread = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
        have = format_bytes(self.available_bytes)
        relation = {"fits": "fits in", "tight": "tight in", "does not fit": "does not fit in"}[self.verdict]
        bound = "at most " if self.lengths is None else ""
        return f"{bound}{format_bytes(memory.peak_bytes)} per rank ({spread}), {relation} {have}"

    def refusal(self) -> DoesNotFit | None:
        """The error to end with when it does not fit; None when it may be tried."""
        if self.verdict != "does not fit":
            return None
        if self.host.verdict == "does not fit":
            return DoesNotFit(
                f"this run needs {self.host.sentence()}",
                where="what is offloaded, and the copy that checkpoints are written from, of all ranks of a node",
                fix="parallel.offload: none, checkpoint.async: false, or more nodes",
            )
        if self.disk.verdict == "does not fit":
            return DoesNotFit(
                f"this run needs {self.disk.sentence()}",
                where="what is offloaded there, of all ranks of a node",
                fix="free some space, write   folder:   of another disk, or more nodes",
            )
        need, have = format_bytes(self.memory.peak_bytes), format_bytes(self.available_bytes)
        biggest = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.largest_parts())
        return DoesNotFit(
            f"this run needs about {need} per rank, and {have} is available",
            where=f"largest: {biggest}",
            fix=f"what would fit: {'; or '.join(self.smaller)}" if self.smaller else "use a smaller model",
        )


def make_plan(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    world_size: int,
    *,
    lengths: Lengths | None = None,
    local_size: int | None = None,
    cluster: Cluster | None = None,
    layout: Layout | None = None,
    price: float | None = None,
    is_ranked: bool = False,
) -> Plan:
    """Plan a run of `world_size` ranks, `local_size` of them on this machine (all, when left out).

    `lengths`: of the training data; without them samples count as long as they may be. `cluster`: the machines with
    their speeds. `layout`: in place of the config's. Raises Faults for what the machine cannot do; see `refusal()`.
    """
    shape, local = _as_trained(config, shape), local_size or world_size
    _check(config, shape, machine, world_size, local_size, layout)
    cluster = cluster or cluster_of(machine, max(1, world_size // local), local)
    available, work = machine.available_per_rank(local), _work(config, shape, machine, local)
    task = task_of(config, work, lengths)
    choice = choose_layout(config, task, machine, world_size, available, local_size, layout, cluster)
    asked, layout = layout, choice.layout
    batch = _spread(config, task, layout, shape, lengths, None if asked else world_size)
    horizon, steps = _length_of_run(config, shape, lengths)
    memory, at_most = (memory_of(one, layout) for one in (task, replace(task, lengths=None)))
    host, disk = rooms(memory, machine, local)
    verdict = max(_judge_task(task, layout, memory, available), host.verdict, disk.verdict, key=VERDICTS.index)
    speed = estimate_speed(work, layout, cluster, load_of(task, layout))
    num_steps = _last(steps or horizon) or config.train.max_steps
    costs = estimate_costs(work, layout, cluster, speed, num_steps, config.checkpoint, price)
    return Plan(
        layout=layout,
        reasons=choice.reasons,
        warnings=_all_warnings(choice, shape, why_not(layout, task, cluster)),
        work=work,
        machine=machine,
        available_bytes=available,
        memory=memory,
        at_most_bytes=at_most.peak_bytes,
        table=static_table(work, layout),
        batch=batch,
        epochs=config.train.epochs,
        steps=steps,
        verdict=verdict,
        host=host,
        disk=disk,
        cluster=cluster,
        task=task,
        speed=speed,
        costs=costs,
        smaller=smaller_changes(config, task, layout, cluster, available) if verdict == NO_ROOM != disk.verdict else (),
        notes=_notes(config, lengths, speed, layout, cluster, batch.accumulation, work),
        ranking=rank_layouts(config, task, layout, cluster, available) if is_ranked else None,
        changes=tuple(single_changes(config, task, layout, cluster, available)) if is_ranked else (),
        horizon=horizon,
        kernels=choose_kernels(expected(config, work, layout, machine)),
    )


def _check(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    world_size: int,
    local_size: int | None,
    given: Layout | None,
) -> None:
    faults = check_machine(config, machine, world_size, local_size, shape)
    if faults or (given is None and (faults := check_shape(config.parallel, shape, world_size))):
        raise Faults(faults)


def rooms(memory: Memory, machine: Machine, local_size: int) -> tuple[Room, Room]:
    """(host memory, disk) of a node."""
    on_disk = "files on the disk of parallel.offload.folder"
    return (
        Room(memory.host_bytes * local_size, machine.available_bytes),
        Room(memory.disk_bytes * local_size, machine.disk_free_bytes, on_disk),
    )


def _as_trained(config: RunConfig, shape: ModelShape) -> ModelShape:
    """With scores the vocabulary's head gives way to a row; the loss counts as if it stood there: at most that."""
    return replace(shape, tied=True, num_head_bias=0) if config.stage.kind.scores else shape


def _spread(
    config: RunConfig, task: Task, layout: Layout, shape: ModelShape, lengths: Lengths | None, world_size: int | None
) -> BatchArithmetic:
    """How a step is spread over ranks; in a world of that size, stages that it cannot fill are refused."""
    batch = spread_batch(task.step, layout.micro, layout.dp, task.rows(layout), lengths)
    if world_size is None:
        return batch
    if faults := check_pipeline(config, layout, batch.accumulation, world_size):
        raise Faults(faults)
    return batch


def _length_of_run(
    config: RunConfig, shape: ModelShape, lengths: Lengths | None
) -> tuple[Horizon | None, Steps | None]:
    horizon = find_horizon(config, shape)
    return horizon, count_steps(config.train, lengths, horizon, updates=config.updates)


def _notes(
    config: RunConfig, lengths: Lengths | None, speed: Speed, layout: Layout, cluster: Cluster, accumulation: int,
    work: Work,
) -> tuple[str, ...]:  # fmt: skip
    task = task_of(config, work, lengths)
    beside = (*_reference_notes(config, lengths, speed), *rollout_notes(config, work.shape, task.cache_bytes(layout)))
    return (*beside, *advice(work, layout, cluster, speed.exchanges, accumulation))


def _reference_notes(config: RunConfig, lengths: Lengths | None, speed: Speed) -> tuple[str, ...]:
    """What a reference costs beside the steps: a forward pass, about a third of training on the same tokens."""
    if not config.stage.has_reference:
        return ()
    words = "the reference's log-probabilities are computed before the first step, in one pass without gradients"
    if lengths is not None and lengths.num_samples is not None:
        tokens = round(lengths.num_used(config.train) * lengths.mean) * (1 + config.stage.kind.looks)
        words += f" over {format_count(tokens)} tokens (about {format_seconds(tokens / (3 * speed.tokens_per_s))})"
    return (f"{words}, and kept in the cache; the memory is that of an evaluation, no second model is held",)


def _last(length: Steps | Horizon | None) -> int | None:
    return length.total if isinstance(length, Steps) else length.steps if length else None


def _work(config: RunConfig, shape: ModelShape, machine: Machine, local_size: int) -> Work:
    parallel, optimizer, packed = config.parallel, config.optim.name, config.parallel.compression
    return Work(
        shape, config.lora, machine.device, parallel.bucket_view,
        not parallel.may_be_unused, optimizer, train_only=config.train_only,
        frozen_bits=shape.packed_bits if config.model.quantization == "none" else 4,
        narrow_weights=config.train.weights == "bf16",
        saves_beside=config.checkpoint.is_async, is_new=config.model.is_new,
        thin_gradients=packed.gradients == "powersgd",
        has_kernels=not machine.no_triton if machine.device == "cuda" else machine.has_kernels,
        has_allocator=machine.has_allocator, has_flash=machine.has_flash,
        weight_bits=packed.weight_bits, gradient_bits=packed.gradient_bits,
        reshard=config.parallel.reshard, node_ranks=local_size if config.parallel.reshard == "node" else 0,
        deepspeed=switches(config.parallel) if config.parallel.engine == "deepspeed" else None,
        references=_num_references(config), looks=config.stage.kind.looks,
        value_head=value_head_parameters(config, shape),
        keeps_start=config.stage.kind.draws and config.rl.kl > 0,
    )  # fmt: skip


def _num_references(config: RunConfig) -> int:
    """Frozen models beside the trained one."""
    return (0 if config.lora else config.stage.kind.references) + num_judges(config)


def _ranking_json(ranking: Ranking | None) -> dict[str, Any] | None:
    if ranking is None:
        return None
    return {
        "candidates": [
            {
                "layout": one.layout.to_json(),
                "peak_bytes": one.memory.peak_bytes,
                "tokens_per_s": one.speed.tokens_per_s,
                "mfu": one.speed.mfu,
                "is_trainable": one.layout.is_trainable,
            }
            for one in ranking.candidates
        ],
        "rejected": [asdict(one) for one in ranking.rejected],
    }


def judge(memory: Memory, available_bytes: int) -> Verdict:
    """fits below 90% of what is there, tight up to 97% or when only the upper end of the range is too much."""
    if memory.peak_bytes > TIGHT * available_bytes:
        return "does not fit"
    if memory.peak_bytes > FITS * available_bytes or memory.high_bytes > available_bytes:
        return "tight"
    return "fits"


def _judge_task(task: Task, layout: Layout, memory: Memory, available_bytes: int) -> Verdict:
    """As `judge`; lengths estimated from files may be off by a factor of two, and then the verdict is not "fits"."""
    verdict, known = judge(memory, available_bytes), task.lengths
    if verdict == "fits" and known and known.basis == "sampled":
        longer = memory_of(replace(task, lengths=known.doubled(task.max_length)), layout)
        return "tight" if judge(longer, available_bytes) == "does not fit" else verdict
    return verdict


def _all_warnings(choice: Choice, shape: ModelShape, senseless: str | None) -> tuple[str, ...]:
    found = choice.warnings
    if senseless:
        found += (f"{choice.layout.name} makes little sense here: {senseless}",)
    return found if shape.model_type == ASSUMED else (*found, *count_notes(shape))
