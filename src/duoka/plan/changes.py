"""What single changes to a run would give: less memory, more speed, or nothing worth having."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from duoka.config.rules import check_rules
from duoka.config.schema import LoraConfig, RunConfig
from duoka.plan.batch import spread_batch
from duoka.plan.catalog import Cluster
from duoka.plan.fill_in import fill_in
from duoka.plan.layout import Layout, Precision
from duoka.plan.memory import FITS, TIGHT, Memory
from duoka.plan.recompute import RUNGS
from duoka.plan.speed import estimate_speed
from duoka.plan.task import Task, load_of, memory_of
from duoka.units import Amount, format_bytes

Settings = Mapping[str, Any]  # of keys as they are written in a config
PACKED: Settings = {"model.quantization": "nf4"}
NARROW: Settings = {"train.weights": "bf16"}


@dataclass(frozen=True)
class Change:
    """One setting, as it is written in the YAML, and what the plan says of the run with it."""

    words: str
    peak_bytes: int
    tokens_per_s: float
    fits: bool
    filled: str = ""  # what `auto` would take then, where it takes something else now
    is_tight: bool = False  # it does not fit with room to spare, and may be tried

    @property
    def mark(self) -> str:
        """What is to be known beside the figures."""
        room = "" if self.fits else "tight" if self.is_tight else "does not fit"
        return ", ".join(filter(None, (self.filled, room)))

    def sentence(self, peak_bytes: int, tokens_per_s: float) -> str:
        return (
            f"{self.words:<38}{format_bytes(self.peak_bytes):>10} ({self.peak_bytes / peak_bytes - 1:+.0%})"
            f"{self.tokens_per_s:>12,.0f} tokens/s ({self.tokens_per_s / tokens_per_s - 1:+.0%})"
        )


class Try(NamedTuple):
    """What would be written, and the run that it makes."""

    settings: Settings
    task: Task
    layout: Layout


def in_words(settings: Settings) -> str:
    """As it is written in the YAML."""
    return " and ".join(f"{key}: {_written(value)}" for key, value in settings.items())


def _written(value: Any) -> str:
    if isinstance(value, LoraConfig):
        return f"{{rank: {value.rank}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if " " in str(value) else str(value)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The config of someone who writes them."""
    for key, value in settings.items():
        block, _, name = key.partition(".")
        whole = getattr(config, block).model_copy(update={name: value}) if name else value
        config = config.model_copy(update={block: whole})
    return config


def _broken(config: RunConfig) -> set[str]:
    return {rule.id for rule in check_rules(config) if not rule.is_note}


def _in_turn(settings: Settings, now: Layout, then: Layout) -> str:
    """What changes with them that they do not name, in the words of the plan's table."""
    words = [str(then.micro)] if then.micro != now.micro and "train.micro_batch" not in settings else []
    if then.recompute != now.recompute and "train.recompute" not in settings:
        words.append(f"recompute {then.recompute}")
    return ", ".join(words)


def _starves(task: Task, layout: Layout) -> bool:
    """Whether a pipeline would get fewer micro-batches than it has stages."""
    batch = spread_batch(task.step, layout.micro, layout.dp, task.rows(layout), task.lengths)
    return batch.accumulation < layout.pp


def single_changes(
    config: RunConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int
) -> list[Change]:
    """Every change that makes a difference of 2% or more, alone, and that the config's other keys go with.

    What the config leaves to auto is chosen anew for each, as it would be for someone who writes it.
    """
    now, before = _measure("", task, layout, cluster, available_bytes), _broken(config)
    found = []
    narrow: Precision = "bf16" if task.work.has_flash else "fp16"  # both since Ampere
    for one in _tries(config, task, layout, narrow):
        changed = with_settings(config, one.settings)
        filled = fill_in(changed.train, one.task, one.layout, cluster, available_bytes).layout
        if _starves(one.task, filled) or _broken(changed) - before:
            continue
        change = _measure(in_words(one.settings), one.task, filled, cluster, available_bytes)
        change = replace(change, filled=_in_turn(one.settings, layout, filled))
        more, faster = change.peak_bytes / now.peak_bytes - 1, change.tokens_per_s / now.tokens_per_s - 1
        if max(abs(more), abs(faster)) > 0.02:
            found.append(change)
    return found


def _may_be_packed(task: Task, layout: Layout) -> bool:
    """Whether the base under adapters could be packed into 4 bits: QLoRA, of layers that are not cut."""
    work = task.work
    return work.lora is not None and work.device == "cuda" and not layout.axes and layout.ep == 1


def _may_be_narrow(task: Task, layout: Layout) -> bool:
    """Whether trained weights could be bf16: what the rules of train.weights ask for."""
    work = task.work
    is_plain = work.lora is None and work.optimizer == "adamw" and work.deepspeed is None and work.program is None
    moves = layout.offload != "none" or layout.disk != "none" or work.weight_bits or work.gradient_bits
    cut = layout.tp > 1 or layout.ep > 1
    return is_plain and layout.precision == "bf16" and not (work.narrow_weights or moves or cut or work.thin_gradients)


def _under_adapters(task: Task, layout: Layout) -> Try:
    """What to write for adapters, and the run then: they have no 8-bit products."""
    adapters, adapted = {"lora": LoraConfig()}, replace(task, work=replace(task.work, lora=LoraConfig()))
    if layout.precision == "fp8":
        return Try(adapters | {"train.precision": "bf16"}, adapted, replace(layout, precision="bf16"))
    return Try(adapters, adapted, layout)


def _shorter(task: Task, length: int) -> Task:
    return replace(task, max_length=length, lengths=task.lengths.cut(length) if task.lengths else None)


def _tries(config: RunConfig, task: Task, layout: Layout, narrow: Precision) -> Iterator[Try]:
    """`narrow`: the type of half precision that these devices compute."""
    work, length = task.work, task.max_length
    for recompute in ("none", "1/2", "selective", "full"):
        if recompute != layout.recompute:
            yield Try({"train.recompute": recompute}, task, replace(layout, recompute=recompute))
    if layout.micro.unit == "tokens":
        for tokens in (layout.micro.count // 2, layout.micro.count * 2):
            if tokens >= length:
                micro = Amount(tokens, "tokens")
                yield Try({"train.micro_batch": f"{tokens} tokens"}, task, replace(layout, micro=micro))
    if layout.precision == "fp32" and work.device == "cuda":
        yield Try({"train.precision": narrow}, task, replace(layout, precision=narrow))
    if not layout.compile and work.device == "cuda" and layout.ep == 1:
        yield Try({"train.compile": True}, task, replace(layout, compile=True))
    if layout.dp > 1 and not layout.axes and config.parallel.layout is None:
        for strategy in ("ddp", "zero1", "zero2", "fsdp"):
            if strategy != layout.strategy and (layout.ep == 1 or strategy != "ddp"):
                shard = 1 if strategy == "ddp" else layout.dp
                how = replace(layout, strategy=strategy, shard=shard, offload="none", disk="none")
                yield Try({"parallel.strategy": strategy}, task, how)
    if _may_offload(config, task, layout) and layout.ep == 1:
        yield Try({"parallel.offload": "optimizer"}, task, replace(layout, offload="optimizer"))
    if work.may_have_adapters:
        yield _under_adapters(task, layout)
    if _may_be_narrow(task, layout):
        yield Try(NARROW, replace(task, work=replace(work, narrow_weights=True)), layout)
    if _may_be_packed(task, layout):
        yield Try(PACKED, replace(task, work=replace(work, frozen_bits=4)), layout)
    half = length // 2
    yield Try({"data.max_length": half // task.sequences}, _shorter(task, half), layout)


def _may_offload(config: RunConfig, task: Task, layout: Layout) -> bool:
    """Whether nothing is offloaded yet, to a place that is not where the model computes."""
    return layout.offload == "none" and config.parallel.offload == "none" and task.work.device == "cuda"


def _measure(words: str, task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> Change:
    load = load_of(task, layout)
    memory = memory_of(task, layout)
    speed = estimate_speed(task.work, layout, cluster, load)
    has_room = fits(memory, cluster, available_bytes)
    is_tight = not has_room and fits(memory, cluster, available_bytes, TIGHT)
    return Change(words, memory.peak_bytes, speed.tokens_per_s, has_room, is_tight=is_tight)


def fits(memory: Memory, cluster: Cluster, available_bytes: int, share: float = FITS) -> bool:
    """On the device, and what is offloaded in the memory of its node."""
    on_host = memory.host_bytes * cluster.per_node <= share * cluster.host_room_bytes
    return memory.peak_bytes <= share * available_bytes and on_host


def smaller_changes(
    config: RunConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int
) -> tuple[str, ...]:
    """Up to three changes that would make it fit, in the order in which they cost the user something.

    What the config leaves to auto is chosen anew for each. Where a change alone is not enough, what the config says of
    recomputing and of micro-batches is changed with it.
    """
    found: list[str] = []
    before = _broken(config)
    for one in _smaller(config, task, layout, cluster, available_bytes):
        if any(words.split(":")[0] == next(iter(one.settings)) for words in found):
            continue  # a smaller step of the same key is enough
        for more in ({}, _least(config, one)):
            settings = {**one.settings, **more}
            if more and len(settings) == len(one.settings):
                continue
            changed = with_settings(config, settings)
            filled = fill_in(changed.train, one.task, one.layout, cluster, available_bytes).layout
            has_room = fits(memory_of(one.task, filled), cluster, available_bytes, TIGHT)
            if has_room and not _broken(changed) - before:
                found.append(in_words(settings))
                break
        if len(found) == 3:
            break
    return tuple(found)


def _least(config: RunConfig, one: Try) -> Settings:
    """What the config itself says of recomputing and micro-batches, as small as can be."""
    smallest: dict[str, Any] = {}
    if config.train.recompute not in ("auto", "full"):
        smallest["train.recompute"] = "full"
    if config.train.micro_batch != "auto":
        smallest["train.micro_batch"] = f"{one.task.max_length} tokens"
    return smallest


def _smaller(config: RunConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> Iterator[Try]:
    length, train = task.max_length, config.train
    if (
        layout.dp * layout.sp > 1
        and layout.strategy != "fsdp"
        and set(layout.axes) <= {"sp"}
        and not config.parallel.layout
    ):
        yield Try({"parallel.strategy": "fsdp"}, task, replace(layout, strategy="fsdp", shard=layout.dp))
    if train.micro_batch != "auto":
        yield Try({"train.micro_batch": f"{length} tokens"}, task, layout)
    if train.recompute != "auto":
        tries = {how: replace(layout, recompute=how) for how in RUNGS}
        enough = (how for how, one in tries.items() if fits(memory_of(task, one), cluster, available_bytes))
        yield Try({"train.recompute": next(enough, "full")}, task, layout)
    fewer = (replace(task, drawn_rows=task.drawn_rows // part) for part in (2, 4, 8, 16) if task.drawn_rows >= part)
    yield from (Try({"rl.rows": one.drawn_rows}, one, layout) for one in fewer)
    if _may_offload(config, task, layout) and not layout.axes and layout.ep == 1:
        yield Try({"parallel.offload": "optimizer"}, task, replace(layout, offload="optimizer"))
        if layout.is_sharded:
            yield Try({"parallel.offload": "params"}, task, replace(layout, offload="params"))
    if _may_be_narrow(task, layout):
        yield Try(NARROW, replace(task, work=replace(task.work, narrow_weights=True)), layout)
    yield Try({"data.max_length": length // 2 // task.sequences}, _shorter(task, length // 2), layout)
    if task.work.may_have_adapters:
        yield _under_adapters(task, layout)
    if _may_be_packed(task, layout):
        yield Try(PACKED, replace(task, work=replace(task.work, frozen_bits=4)), layout)
