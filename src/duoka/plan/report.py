"""The plan of one run: layout, reasons, memory and speed with their ranges, batch arithmetic, verdict; as JSON.

`make_plan` is pure: config, shape, machine and world go in, the same plan comes out. `duoka plan` prints it
(picture.py), `duoka train` writes it to plan.json, and the end report holds it beside what was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, DoesNotFit, Faults
from duoka.plan.advice import advice
from duoka.plan.batch import BatchArithmetic, Steps, count_steps, spread_batch
from duoka.plan.catalogue import Cluster, cluster_of
from duoka.plan.changes import Change, single_changes, smaller_changes
from duoka.plan.choose import Choice, check_machine, choose_layout
from duoka.plan.costs import Costs, estimate_costs
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.memory import FITS, TIGHT, Memory, estimate_memory
from duoka.plan.recipe import StaticMemory, Work, static_table
from duoka.plan.search import Ranking, Task, load_of, search, why_not
from duoka.plan.shape import ASSUMED, ModelShape
from duoka.plan.speed import Speed, estimate_speed
from duoka.units import format_bytes, parse_amount

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Plan:
    """What will happen, and why, before anything is paid for."""

    layout: Layout
    reasons: dict[str, str]
    warnings: tuple[str, ...]
    work: Work
    machine: Machine
    available_bytes: int  # per rank
    memory: Memory
    table: tuple[StaticMemory, ...]
    batch: BatchArithmetic
    epochs: float
    steps: Steps | None
    verdict: Verdict
    cluster: Cluster
    task: Task
    speed: Speed
    costs: Costs
    smaller: tuple[str, ...] = ()  # changes that would make it fit, the smallest first
    notes: tuple[str, ...] = ()  # what guides get wrong, where it shows
    ranking: Ranking | None = None  # of all layouts; only when asked for
    changes: tuple[Change, ...] = ()

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
                "num_embedding": shape.num_embedding,
                "num_head": shape.num_head,
                "num_per_layer": shape.num_per_layer,
                "num_layers": shape.num_layers,
                "num_trainable": work.num_trainable,
                "is_exact": shape.exact,
            },
            "batch": self.batch.to_json(),
            "steps": asdict(self.steps) if self.steps else None,
            "memory": {
                "peak_bytes": memory.peak_bytes,
                "low_bytes": memory.low_bytes,
                "high_bytes": memory.high_bytes,
                "available_bytes": self.available_bytes,
                "peak_moment": memory.peak_moment,
                "parts": dict(memory.parts),
                "moments": dict(memory.moments),
                "activation_formula": memory.formula,
                "formulas": dict(memory.formulas),
            },
            "static": [asdict(row) | {"total_bytes": row.total_bytes} for row in self.table],
            "machine": self.machine.to_json(),
            "smaller": list(self.smaller),
            "speed": _speed_json(self.speed),
            "costs": self.costs.to_json(),
            "cluster": {"name": self.cluster.name, "device_source": self.cluster.device.source},
            "notes": list(self.notes),
            "ranking": _ranking_json(self.ranking),
            "changes": [asdict(change) for change in self.changes],
        }

    def memory_sentence(self) -> str:
        """One line for a banner: `1.35 GiB per rank (1.2 to 1.7), fits in 11.4 GiB`."""
        memory = self.memory
        spread = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
        have = format_bytes(self.available_bytes)
        relation = {"fits": "fits in", "tight": "tight in", "does not fit": "does not fit in"}[self.verdict]
        return f"{format_bytes(memory.peak_bytes)} per rank ({spread}), {relation} {have}"

    def refusal(self) -> ConfigError | DoesNotFit | None:
        """The error to end with when it does not fit, or is planned only; None when it may be tried."""
        if self.work.shape.experts is not None:
            return ConfigError(
                f"{self.work.shape.model_type} is a mixture of experts: duoka plans these, and doesn't train them yet",
                fix="use a dense model",
            )
        if self.verdict != "does not fit":
            return None
        need, have = format_bytes(self.memory.peak_bytes), format_bytes(self.available_bytes)
        biggest = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.largest_parts())
        return DoesNotFit(
            f"this run needs about {need} per rank, and {have} is there",
            where=f"largest: {biggest}",
            fix=f"what would fit: {'; or '.join(self.smaller)}" if self.smaller else "use a smaller model",
        )


def make_plan(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    world_size: int,
    *,
    num_samples: int | None = None,
    mean_length: float | None = None,
    local_size: int | None = None,
    is_data_measured: bool = True,
    cluster: Cluster | None = None,
    layout: Layout | None = None,
    price: float | None = None,
    is_ranked: bool = False,
) -> Plan:
    """Plan a run of `world_size` ranks, `local_size` of them on this machine (all, when left out).

    `num_samples` and `mean_length` are those of the tokenised training data, or guesses (`is_data_measured=False`).
    `cluster` are the machines with their speeds; `layout` takes the place of the config's. Raises Faults for settings
    that the machine cannot do. A run that does not fit is a plan too: ask `refusal()`.
    """
    faults = check_machine(config, machine, world_size, local_size)
    if faults:
        raise Faults(faults)
    local = local_size or world_size
    cluster = cluster or cluster_of(machine, max(1, world_size // local), local)
    available = machine.available_per_rank(local)
    work = _work(config, shape, machine)
    choice = choose_layout(config, work, machine, world_size, available, local_size, layout)
    layout = choice.layout
    steps = _steps(config, num_samples, mean_length, is_data_measured)
    batch = spread_batch(config.train, layout.micro, layout.dp, config.data.max_length, mean_length)
    memory = _memory(work, layout, batch)
    verdict = judge(memory, available)
    task = _task(config, work, mean_length)
    speed = estimate_speed(work, layout, cluster, load_of(task, layout), reshard=config.parallel.reshard)
    return Plan(
        layout=layout,
        reasons=choice.reasons,
        warnings=_all_warnings(choice, shape, why_not(layout, task, cluster)),
        work=work,
        machine=machine,
        available_bytes=available,
        memory=memory,
        table=static_table(work, layout),
        batch=batch,
        epochs=config.train.epochs,
        steps=steps,
        verdict=verdict,
        cluster=cluster,
        task=task,
        speed=speed,
        costs=estimate_costs(work, cluster, speed.step_s, steps.total if steps else None, price),
        smaller=smaller_changes(config, work, layout, available) if verdict == "does not fit" else (),
        notes=advice(work, layout, cluster, memory, speed.exchanges, batch.accumulation),
        ranking=search(task, cluster, layout, available) if is_ranked else None,
        changes=tuple(single_changes(config, task, layout, cluster, available)) if is_ranked else (),
    )


def _work(config: RunConfig, shape: ModelShape, machine: Machine) -> Work:
    view, optimizer = config.parallel.bucket_view, config.optim.name
    return Work(
        shape, config.lora, machine.device, view, optimizer, train_only=config.train_only,
        saves_beside=config.checkpoint.is_async, thin_gradients=config.parallel.compress == "powersgd",
    )  # fmt: skip


def _steps(
    config: RunConfig, num_samples: int | None, mean_length: float | None, is_data_measured: bool
) -> Steps | None:
    steps = count_steps(config.train, num_samples, mean_length)
    return steps if steps is None or is_data_measured else replace(steps, is_exact=False)


def _memory(work: Work, layout: Layout, batch: BatchArithmetic) -> Memory:
    tokens, accumulation = batch.tokens_per_micro_batch, batch.accumulation
    return estimate_memory(work, layout, tokens, accumulates=accumulation > 1, accumulation=accumulation)


def _task(config: RunConfig, work: Work, mean_length: float | None) -> Task:
    """Samples are as long as the data's mean, or, before it is known, as the longest that is allowed."""
    step, longest = parse_amount(config.train.global_batch), config.data.max_length
    length = mean_length or float(longest)
    tokens = float(step.count) if step.unit == "tokens" else step.count * length
    return Task(work, tokens, longest, length)


def _speed_json(speed: Speed) -> dict[str, Any]:
    return {
        "step_s": speed.step_s,
        "low_s": speed.low_s,
        "high_s": speed.high_s,
        "tokens_per_step": speed.tokens_per_step,
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu,
        "mfu_formula": speed.formula,
        "limit": speed.limit,
        "parts": dict(speed.parts),
        "exchange_s": speed.exchange_s,
        "exposed_s": speed.exposed_s,
        "matmul_share": speed.efficiency,
        "is_measured": speed.is_measured,
        "exchanges": [
            {
                "what": one.what,
                "kind": one.kind,
                "payload_bytes": one.payload_bytes,
                "times": one.times,
                "ranks": one.group.size,
                "sent_bytes": one.sent_bytes,
            }
            for one in speed.exchanges
        ],
    }


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


def _all_warnings(choice: Choice, shape: ModelShape, senseless: str | None) -> tuple[str, ...]:
    found = choice.warnings
    if senseless:
        found += (f"{choice.layout.name} makes little sense here: {senseless}",)
    if shape.exact or shape.model_type == ASSUMED:
        return found
    return (*found, f"model type {shape.model_type} is not in the plan's table: its counts are estimates")
