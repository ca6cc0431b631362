"""The plan of one run: layout, reasons, memory with its range, batch arithmetic, verdict; as lines and as JSON.

`make_plan` is pure: config, shape, machine and world go in, the same plan comes out. `duoka plan` prints it,
`duoka train` writes it to plan.json, and the end report holds it beside what was measured.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from duoka.config.schema import LoraConfig, RunConfig
from duoka.errors import ConfigError, DoesNotFit, Faults
from duoka.plan.batch import BatchArithmetic, Steps, count_steps, spread_batch
from duoka.plan.choose import Choice, check_machine, choose_layout, largest_tokens
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.memory import FITS, TIGHT, Memory, estimate_memory
from duoka.plan.recipe import StaticMemory, Work, static_table
from duoka.plan.shape import ModelShape
from duoka.units import Amount, format_bytes, format_count

_WIDTH = 100
_TABLE_NAMES = {"fsdp": "zero3=fsdp"}

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
    smaller: tuple[str, ...] = ()  # changes that would make it fit, the smallest first

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
            },
            "static": [asdict(row) | {"total_bytes": row.total_bytes} for row in self.table],
            "machine": self.machine.to_json(),
            "smaller": list(self.smaller),
        }

    def lines(self) -> list[str]:
        """The plan as `duoka plan` prints it, at most 100 columns wide."""
        out = [*self._model_lines(), "", *self._layout_lines(), "", *self._static_lines(), "", *self._peak_lines()]
        out += [f"warning  {text}" for text in self.warnings]
        return [part for line in out for part in _wrap(line)]

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

    def _model_lines(self) -> list[str]:
        shape, work = self.work.shape, self.work
        approximate = "" if shape.exact else " (counted like a Llama: this type is not in the table)"
        head = "tied to the embedding" if shape.tied else f"{format_count(shape.num_head)} in the head"
        kind = "full fine-tuning"
        if work.lora is not None:
            kind = f"LoRA rank {work.lora.rank}, {work.num_trainable / shape.num_parameters:.2%} beside the model"
        if work.train_only is not None:
            kind = f"some layers only, {work.num_trainable / shape.num_parameters:.2%} of the model"
        return [
            f"model    {shape.num_parameters:,} parameters{approximate}: {format_count(shape.num_embedding)} in the "
            f"embedding, {head},",
            f"         {shape.num_layers} layers x {format_count(shape.num_per_layer)} ({shape.model_type})",
            f"trained  {work.num_trainable:,} parameters ({kind})",
        ]

    def _layout_lines(self) -> list[str]:
        layout = self.layout
        rows = [
            ("parallel.strategy", layout.name),
            ("train.precision", layout.precision),
            ("train.recompute", layout.recompute),
            ("train.micro_batch", str(layout.micro)),
        ]
        out = [f"layout   {layout.name}, {layout.precision}, recompute {layout.recompute}, micro-batch {layout.micro}"]
        out += [f"         auto: {key} -> {self.reasons[key]}" for key, _ in rows if key in self.reasons]
        out.append(f"batch    {self.batch.sentence()}")
        if self.steps is not None:
            out.append(f"steps    {self.steps.sentence(self.epochs)}")
        return out

    def _static_lines(self) -> list[str]:
        out = [
            f"memory per rank before activations, {self.layout.precision}, "
            f"N = {self.layout.dp} (P all, Pt trained parameters)",
            f"  {'strategy':<10}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'total':>10}  formula",
        ]
        for row in self.table:
            cells = (row.weights_bytes, row.gradients_bytes, row.optimizer_bytes, row.total_bytes)
            sizes = [format_bytes(cell) for cell in cells]
            mark = "  <- this run" if row.strategy == self.layout.strategy else ""
            name = _TABLE_NAMES.get(row.strategy, row.strategy)
            line = f"  {name:<10}{sizes[0]:>10}{sizes[1]:>11}{sizes[2]:>11}{sizes[3]:>10}  {row.formula}"
            out.append(line + mark)
        return out

    def _peak_lines(self) -> list[str]:
        memory = self.memory
        out = [
            f"peak     {self.memory_sentence()}",
            f"         at the {memory.peak_moment}, with {memory.tokens:,} tokens at once:",
        ]
        for name, size in memory.largest_parts(len(memory.parts)):
            bar = "█" * round(24 * size / max(memory.peak_bytes, 1))
            out.append(f"           {name:<12}{format_bytes(size):>10}  {bar}".rstrip())
        out.append(f"         activations: {memory.formula}")
        out += [f"         it would fit with {change}" for change in self.smaller]
        return out


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
) -> Plan:
    """Plan a run of `world_size` ranks, `local_size` of them on this machine (all, when left out).

    `num_samples` and `mean_length` are those of the tokenised training data, or guesses (`is_data_measured=False`).
    Raises Faults for settings that the machine cannot do. A run that does not fit is a plan too: ask `refusal()`.
    """
    faults = check_machine(config, machine, world_size, local_size)
    if faults:
        raise Faults(faults)
    available = machine.available_per_rank(local_size or world_size)
    work = Work(
        shape, config.lora, machine.device, config.parallel.bucket_view, train_only=config.train_only,
        saves_beside=config.checkpoint.is_async,
    )  # fmt: skip
    choice = choose_layout(config, work, machine, world_size, available, local_size)
    layout = choice.layout
    steps = count_steps(config.train, num_samples, mean_length)
    if steps is not None and not is_data_measured:
        steps = replace(steps, is_exact=False)
    batch = spread_batch(config.train, layout.micro, world_size, config.data.max_length, mean_length)
    memory = estimate_memory(work, layout, batch.tokens_per_micro_batch, accumulates=batch.accumulation > 1)
    verdict = judge(memory, available)
    return Plan(
        layout=layout,
        reasons=choice.reasons,
        warnings=_all_warnings(choice, shape),
        work=work,
        machine=machine,
        available_bytes=available,
        memory=memory,
        table=static_table(work, layout),
        batch=batch,
        epochs=config.train.epochs,
        steps=steps,
        verdict=verdict,
        smaller=_smaller_changes(config, work, layout, available) if verdict == "does not fit" else (),
    )


def judge(memory: Memory, available_bytes: int) -> Verdict:
    """fits below 90% of what is there, tight up to 97% or when only the upper end of the range is too much."""
    if memory.peak_bytes > TIGHT * available_bytes:
        return "does not fit"
    if memory.peak_bytes > FITS * available_bytes or memory.high_bytes > available_bytes:
        return "tight"
    return "fits"


def _wrap(line: str) -> list[str]:
    """A line of at most _WIDTH columns, or several; what follows stands under the text of the first."""
    indent = " " * (13 if line.startswith(" ") else 9)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True) or [""]


def _all_warnings(choice: Choice, shape: ModelShape) -> tuple[str, ...]:
    if shape.exact:
        return choice.warnings
    return (*choice.warnings, f"model type {shape.model_type} is not in the plan's table: its counts are estimates")


def _smaller_changes(config: RunConfig, work: Work, layout: Layout, available_bytes: int) -> tuple[str, ...]:
    """Single changes that would make it fit, in the order in which they cost the user something."""
    length = config.data.max_length
    smallest = replace(layout, micro=Amount(length, "tokens"))
    adapters = replace(work, lora=LoraConfig())
    tries: Sequence[tuple[str, Work, Layout, int]] = (
        (f'train.micro_batch: "{length} tokens"', work, smallest, length),
        ("train.recompute: full", work, replace(layout, recompute="full"), largest_tokens(config, layout)),
        (f'recompute: full and micro_batch: "{length} tokens"', work, replace(smallest, recompute="full"), length),
        (f"data.max_length: {length // 2}", work, replace(smallest, recompute="full"), length // 2),
        ("lora: {rank: 8}", adapters, replace(smallest, recompute="full"), length),
    )
    found: list[str] = []
    for words, changed, how, tokens in tries:
        if changed == work and how == layout and tokens == largest_tokens(config, layout):
            continue
        if changed != work and work.lora is not None:
            continue
        if judge(estimate_memory(changed, how, tokens), available_bytes) != "does not fit":
            found.append(words)
    return tuple(found[:3])
