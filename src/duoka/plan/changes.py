"""What single changes to a run would give: less memory, more speed, or nothing worth having."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from duoka.config.schema import LoraConfig
from duoka.plan.catalog import Cluster
from duoka.plan.layout import Layout
from duoka.plan.memory import FITS, TIGHT, Memory
from duoka.plan.recompute import RUNGS
from duoka.plan.speed import estimate_speed
from duoka.plan.task import Task, load_of, memory_of
from duoka.units import Amount, format_bytes

PACKED = "model.quantization: nf4"
NARROW = "train.weights: bf16"


@dataclass(frozen=True)
class Change:
    """One setting, as it is written in the YAML, and what the plan says of the run with it."""

    words: str
    peak_bytes: int
    tokens_per_s: float
    fits: bool

    def sentence(self, peak_bytes: int, tokens_per_s: float) -> str:
        return (
            f"{self.words:<38}{format_bytes(self.peak_bytes):>10} ({self.peak_bytes / peak_bytes - 1:+.0%})"
            f"{self.tokens_per_s:>12,.0f} tokens/s ({self.tokens_per_s / tokens_per_s - 1:+.0%})"
        )


def single_changes(task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> list[Change]:
    """Every change that makes a difference of 2% or more, alone."""
    now = _measure("", task, layout, cluster, available_bytes)
    found = []
    for words, changed, how in _tries(task, layout):
        one = _measure(words, changed, how, cluster, available_bytes)
        differs = abs(one.peak_bytes / now.peak_bytes - 1) > 0.02 or abs(one.tokens_per_s / now.tokens_per_s - 1) > 0.02
        if differs:
            found.append(one)
    return found


def _may_be_packed(task: Task, layout: Layout) -> bool:
    """Whether the base under adapters could be packed into 4 bits: QLoRA, of a base that is not cut."""
    work = task.work
    return (
        work.lora is not None and work.device == "cuda" and not layout.axes and not layout.is_sharded and layout.ep == 1
    )


def _may_be_narrow(task: Task, layout: Layout) -> bool:
    """Whether trained weights could be bf16: what the rules of train.weights ask for."""
    work = task.work
    is_plain = work.lora is None and work.optimizer == "adamw" and work.deepspeed is None and work.program is None
    moves = layout.offload != "none" or layout.disk != "none" or work.weight_bits or work.gradient_bits
    cut = layout.tp > 1 or layout.ep > 1
    return is_plain and layout.precision == "bf16" and not (work.narrow_weights or moves or cut or work.thin_gradients)


def _under_adapters(layout: Layout) -> tuple[str, Layout]:
    """What to write for adapters, and the layout then: they have no 8-bit products."""
    if layout.precision == "fp8":
        return "lora: {rank: 8} and train.precision: bf16", replace(layout, precision="bf16")
    return "lora: {rank: 8}", layout


def _shorter(task: Task, length: int) -> Task:
    return replace(task, max_length=length, lengths=task.lengths.cut(length) if task.lengths else None)


def _tries(task: Task, layout: Layout) -> Iterator[tuple[str, Task, Layout]]:
    work, length = task.work, task.max_length
    for recompute in ("none", "1/2", "selective", "full"):
        if recompute != layout.recompute:
            yield f"train.recompute: {recompute}", task, replace(layout, recompute=recompute)
    if layout.micro.unit == "tokens":
        for tokens in (layout.micro.count // 2, layout.micro.count * 2):
            if tokens >= length:
                micro = Amount(tokens, "tokens")
                yield f'train.micro_batch: "{tokens} tokens"', task, replace(layout, micro=micro)
    if not layout.compile and work.device == "cuda" and layout.ep == 1:
        yield "train.compile: true", task, replace(layout, compile=True)
    if layout.dp > 1 and not layout.axes:
        for strategy in ("ddp", "zero1", "zero2", "fsdp"):
            if strategy != layout.strategy and (layout.ep == 1 or strategy != "ddp"):
                shard = 1 if strategy == "ddp" else layout.dp
                how = replace(layout, strategy=strategy, shard=shard, offload="none", disk="none")
                yield f"parallel.strategy: {strategy}", task, how
    if layout.offload == "none" and work.device == "cuda" and layout.ep == 1:
        yield "parallel.offload: optimizer", task, replace(layout, offload="optimizer")
    if work.may_have_adapters:
        words, how = _under_adapters(layout)
        yield words, replace(task, work=replace(work, lora=LoraConfig())), how
    if _may_be_narrow(task, layout):
        yield NARROW, replace(task, work=replace(work, narrow_weights=True)), layout
    if _may_be_packed(task, layout):
        yield PACKED, replace(task, work=replace(work, frozen_bits=4)), layout
    half = length // 2
    fewer = Amount(max(half, layout.micro.count // 2), "tokens") if layout.micro.unit == "tokens" else layout.micro
    yield f"data.max_length: {half // task.sequences}", _shorter(task, half), replace(layout, micro=fewer)


def _measure(words: str, task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> Change:
    load = load_of(task, layout)
    memory = memory_of(task, layout)
    speed = estimate_speed(task.work, layout, cluster, load)
    return Change(words, memory.peak_bytes, speed.tokens_per_s, fits(memory, cluster, available_bytes))


def fits(memory: Memory, cluster: Cluster, available_bytes: int, share: float = FITS) -> bool:
    """On the device, and what is offloaded in the memory of its node."""
    on_host = memory.host_bytes * cluster.per_node <= share * cluster.host_room_bytes
    return memory.peak_bytes <= share * available_bytes and on_host


def smaller_changes(task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> tuple[str, ...]:
    """Changes that would make it fit, in the order in which they cost the user something."""
    length = task.max_length
    smallest = replace(layout, micro=Amount(length, "tokens"))
    adapters = replace(task, work=replace(task.work, lora=LoraConfig()))
    shared = replace(smallest, recompute="full")
    enough = (how for how in RUNGS if fits(memory_of(task, replace(layout, recompute=how)), cluster, available_bytes))
    least = next(enough, "full")
    tries: list[tuple[str, Task, Layout]] = [
        (f'train.micro_batch: "{length} tokens"', task, smallest),
        (f"train.recompute: {least}", task, replace(layout, recompute=least)),
        (f'recompute: full and micro_batch: "{length} tokens"', task, shared),
    ]
    if layout.dp * layout.sp > 1 and layout.strategy != "fsdp" and set(layout.axes) <= {"sp"}:
        fsdp = replace(layout, strategy="fsdp", shard=layout.dp)
        tries.insert(0, ("parallel.strategy: fsdp", task, fsdp))
        tries.append(
            ("strategy: fsdp and recompute: full", task, replace(fsdp, micro=smallest.micro, recompute="full"))
        )
    if layout.offload == "none" and task.work.device == "cuda" and not layout.axes and layout.ep == 1:
        tries.append(("parallel.offload: optimizer", task, replace(layout, offload="optimizer")))
        if layout.is_sharded:
            tries.append(("parallel.offload: params", task, replace(layout, offload="params")))
    if _may_be_narrow(task, layout):
        narrow = replace(task, work=replace(task.work, narrow_weights=True))
        tries += [(NARROW, narrow, layout), ("weights: bf16 and recompute: full", narrow, shared)]
    half = replace(shared, micro=Amount(length // 2, "tokens"))
    tries.append((f"data.max_length: {length // 2 // task.sequences}", _shorter(task, length // 2), half))
    if task.work.may_have_adapters:
        words, how = _under_adapters(shared)
        tries.append((words, adapters, how))
    if _may_be_packed(task, layout):
        tries.append((PACKED, replace(task, work=replace(task.work, frozen_bits=4)), shared))
    found: list[str] = []
    for words, changed, how in tries:
        if changed == task and how == layout:
            continue
        if fits(memory_of(changed, how), cluster, available_bytes, TIGHT):
            found.append(words)
    return tuple(found[:3])
