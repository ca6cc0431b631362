"""What every `auto` becomes on this machine, each choice with its reason in one line; and what is refused.

Deterministic: the same config, model, machine and world give the same layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from duoka.config.deepspeed_json import STAGES
from duoka.config.rules_deepspeed import GET_DEEPSPEED, NO_DEEPSPEED
from duoka.config.rules_model import GET_PACKER, NO_PACKER
from duoka.config.rules_optim import GET_BITSANDBYTES, NO_BITSANDBYTES, WHOLE_WEIGHT_OPTIMIZERS
from duoka.config.rules_parallel import ddp_settings
from duoka.config.schema import RunConfig, TrainConfig
from duoka.config.trackers import TRACKERS
from duoka.errors import Fault
from duoka.plan.axes import axes_of, check_axes, data_ranks, stages_per_rank, why_exchange
from duoka.plan.hardware import Machine
from duoka.plan.layout import SHARDED, Layout, Precision, Recompute, Strategy
from duoka.plan.memory import FITS
from duoka.plan.task import Task, memory_of
from duoka.units import Amount, format_bytes, parse_amount

# More tokens at once make no CPU faster, they only hold more activations. Measured with 8 layers of SmolLM2-135M, full
# fine-tuning, tokens per CPU second at 256, 512, 1,024, 2,048 and 4,096 tokens: 206, 212, 239, 255, 253.
CPU_TOKENS = 2048
# A GPU is kept busy by this many tokens even with small models; beyond it only memory grows.
GPU_TOKENS = 16384
# The rest is a margin for what an estimate misses: kernels' workspaces, fragmentation, other programs.
MEMORY_SHARE = 0.6
FEED = 5  # micro-batches for each stage of a pipeline


@dataclass(frozen=True)
class Choice:
    layout: Layout
    reasons: dict[str, str] = field(default_factory=dict)  # key of the YAML -> why, for every auto
    warnings: tuple[str, ...] = ()


def check_machine(config: RunConfig, machine: Machine, world_size: int, local_size: int | None = None) -> list[Fault]:
    """Settings that this machine, or a world with `local_size` (all) of its ranks on it, cannot do."""
    faults: list[Fault] = []
    if config.train.precision == "fp16" and machine.device == "cpu":
        native = "bf16" if machine.has_native_bf16 else "fp32"
        faults.append(
            Fault(
                "train.precision is fp16, and CPUs have no fp16 training: its gradients would fall to zero",
                key="train.precision",
                fix=f"write for example:   precision: {native}   (or auto)",
            )
        )
    if config.parallel.backend == "nccl" and machine.device == "cpu":
        what = "parallel.backend is nccl, and this machine has no GPU"
        faults.append(Fault(what, key="parallel.backend", fix="write for example:   backend: auto"))
    if axes := check_axes(config.parallel, world_size):
        return [*faults, *axes]
    data = data_ranks(config.parallel, world_size)
    if config.parallel.strategy in ("single", "dp") and data * config.parallel.sequence > 1:
        asked = config.parallel.strategy
        what = f"parallel.strategy is {asked}, which is one process, but {world_size} processes are asked for"
        fix = "write for example:   strategy: auto   (or start one process: --nproc 1)"
        faults.append(Fault(what, key="parallel.strategy", fix=fix))
    here = local_size or world_size
    faults += _check_sharding(config, data, data_ranks(config.parallel, here) or 1)
    if machine.gpus and here > len(machine.gpus):
        what = f"{here} processes are asked for on this machine, and it has {len(machine.gpus)} GPUs"
        faults.append(Fault(what, fix=f"start one process per GPU: --nproc {len(machine.gpus)}"))
    return faults


def check_packages(config: RunConfig) -> list[Fault]:
    """Packages beside duoka's own that the config needs, and that are not installed here."""
    faults = []
    for name in dict.fromkeys(config.log.to):
        tracker = TRACKERS[name]
        if not tracker.is_installed:
            what = f"log.to names {name}, and the package {tracker.package} is not installed here"
            faults.append(Fault(what, key="log.to", fix=f"type:   {tracker.install}"))
    if config.parallel.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        faults.append(Fault(NO_DEEPSPEED, key="parallel.engine", fix=GET_DEEPSPEED))
    if importlib.util.find_spec("bitsandbytes") is not None:
        return faults
    if config.optim.name == "adamw8bit":
        faults.append(Fault(NO_BITSANDBYTES, key="optim.name", fix=GET_BITSANDBYTES))
    if config.model.quantization != "none":
        faults.append(Fault(NO_PACKER, key="model.quantization", fix=GET_PACKER))
    return faults


def _check_sharding(config: RunConfig, world_size: int, local_size: int) -> list[Fault]:
    parallel = config.parallel
    if parallel.strategy != "hsdp" or world_size == 1:
        return []
    shard = parallel.shard_ranks or local_size
    if 1 < shard <= world_size and world_size % shard == 0:
        return []
    whose = "parallel.shard_ranks" if parallel.shard_ranks else "a node's number of processes"
    good = [n for n in range(2, world_size + 1) if world_size % n == 0]
    return [
        Fault(
            f"{whose} is {shard}, and {world_size} processes cannot be cut into groups of that size that share a model",
            key="parallel.shard_ranks" if parallel.shard_ranks else "parallel.strategy",
            fix=f"write for example:   shard_ranks: {good[0]}   (one of {', '.join(map(str, good))}), or strategy: ddp",
        )
    ]


def choose_layout(
    config: RunConfig,
    task: Task,
    machine: Machine,
    world_size: int,
    available_bytes: int,
    local_size: int | None = None,
    given: Layout | None = None,
) -> Choice:
    """The layout of this run: what the config says, and this machine's answer to every `auto`.

    `given` says how ranks are used, in place of the config; it may be a layout that is only planned.
    """
    reasons: dict[str, str] = {}
    warnings: list[str] = list(machine.notes)
    data = data_ranks(config.parallel, world_size)
    layout = Layout(
        dp=data,
        strategy="single" if data * config.parallel.sequence == 1 else "ddp",
        precision=_choose_precision(config.train, machine, reasons, warnings),
        micro=Amount(config.sample_tokens, "tokens"),
        packing=config.data.packs,
        offload=config.parallel.offload,
        compile=config.train.compile,
        **axes_of(config.parallel),  # type: ignore[arg-type]
        schedule=config.parallel.schedule,
        virtual=stages_per_rank(config.parallel),
    )
    if given is not None:
        axes = {"dp": given.dp, "shard": given.shard, "tp": given.tp, "pp": given.pp, "sp": given.sp, "ep": given.ep}
        layout = replace(layout, strategy=given.strategy, **axes)  # type: ignore[arg-type]
        if not given.is_trainable:
            warnings.append(f"{given.name} is planned only: this version of duoka does not train with it yet")
    elif config.parallel.strategy == "dp":
        warnings.append(_why_not_dp(machine))
    if given is None:
        local = data_ranks(config.parallel, local_size or world_size) or 1
        layout = _with_strategy(config, task, layout, available_bytes, local, reasons)
        layout = replace(layout, ep=config.parallel.expert)
    if config.parallel.engine == "deepspeed":
        reasons["parallel.engine"] = f"DeepSpeed, ZeRO stage {STAGES[layout.strategy]}"
    if layout.sp > 1:
        reasons["parallel.sequence"] = f"{layout.sp}, {why_exchange(task.work.shape.num_heads // layout.tp, layout.sp)}"
    smallest = layout if config.train.micro_batch == "auto" else _with_given_micro(layout, config.train)
    layout = replace(layout, recompute=_choose_recompute(config.train, task, smallest, available_bytes, reasons))
    if config.train.micro_batch != "auto":
        return Choice(_with_given_micro(layout, config.train), reasons, tuple(warnings))
    layout = _choose_micro(task, layout, machine, available_bytes, reasons)
    return Choice(layout, reasons, tuple(warnings))


def _why_not_dp(machine: Machine) -> str:
    if len(machine.gpus) < 2:
        return f"parallel.strategy dp is for several GPUs; here are {len(machine.gpus)}, and the model runs as it is"
    return (
        f"parallel.strategy dp copies the weights to {len(machine.gpus)} GPUs at every micro-batch, under one Python: "
        f"ddp (--nproc {len(machine.gpus)}) gives the same numbers faster"
    )


def _with_strategy(
    config: RunConfig,
    task: Task,
    layout: Layout,
    available_bytes: int,
    local_size: int,
    reasons: dict[str, str],
) -> Layout:
    """`layout` is single or ddp; sharding costs traffic, so `auto` takes it only when memory asks for it."""
    asked, size, adding = config.parallel.strategy, layout.dp, layout.dp * layout.sp
    if asked == "ddp" and adding == 1:  # as an elastic run may become: there is no other to exchange gradients with
        reasons["parallel.strategy"] = "single: one process, and ddp is for several"
        return layout
    if asked != "auto":
        strategy: Strategy = "fsdp" if asked == "zero3" else asked
        if strategy == "hsdp":
            return replace(layout, strategy=strategy, shard=min(config.parallel.shard_ranks or local_size, size))
        if strategy == "dp":  # rows go to the GPUs: there must be several
            return replace(layout, strategy=strategy, packing=False)
        return replace(layout, strategy=strategy, shard=size if strategy in SHARDED else 1)
    if adding == 1:
        model = layout.world_size
        reasons["parallel.strategy"] = (
            "single: one process" if model == 1 else f"single: one model over {model} processes"
        )
        return layout
    if config.parallel.expert > 1:
        reasons["parallel.strategy"] = f"fsdp: {adding} processes share all but the experts, which parallel.expert does"
        return replace(layout, strategy="fsdp", shard=size)
    smallest = layout if config.train.micro_batch == "auto" else _with_given_micro(layout, config.train)
    if layout.tp > 1:  # ddp adds up gradients of whole tensors, and takes none that is cut
        whole = replace(smallest, strategy="zero1", shard=size)
        if memory_of(task, whole).peak_bytes <= FITS * available_bytes:
            reasons["parallel.strategy"] = f"zero1: {size} models of {layout.tp} processes, which share optimizer state"
            return replace(layout, strategy="zero1", shard=size)
    need = memory_of(task, smallest).peak_bytes
    # Packed weights are not cut either.
    is_whole = config.optim.name in WHOLE_WEIGHT_OPTIMIZERS or config.model.quantization != "none"
    if layout.tp == 1 and (need <= FITS * available_bytes or is_whole):
        reasons["parallel.strategy"] = f"ddp: {adding} processes, each with a whole model"
        return layout
    if wishes := ddp_settings(config):
        reasons["parallel.strategy"] = f"ddp: {', '.join(wishes)} is for ddp only; without it the model would be shared"
        return layout
    if layout.virtual > 1:
        reasons["parallel.strategy"] = f"ddp: {adding} processes add the gradients of all their stages once a step"
        return layout
    if layout.pp > 1:
        reasons["parallel.strategy"] = f"zero1: {size} data ranks share the optimizer's state of each stage"
        return replace(layout, strategy="zero1", shard=size)
    why = f"unsharded, it would need {format_bytes(need)} in each, and {format_bytes(available_bytes)} is available"
    # DeepSpeed's stage 3 shares one model over all ranks.
    if 1 < local_size < size and size % local_size == 0 and config.parallel.engine == "native":
        inside = replace(smallest, strategy="hsdp", shard=local_size)
        if memory_of(task, inside).peak_bytes <= FITS * available_bytes:
            reasons["parallel.strategy"] = f"hsdp: the {local_size} processes of a node share one model; {why}"
            return replace(layout, strategy="hsdp", shard=local_size)
    reasons["parallel.strategy"] = f"fsdp: {adding} processes share one model; {why}"
    return replace(layout, strategy="fsdp", shard=size)


def _choose_precision(train: TrainConfig, machine: Machine, reasons: dict[str, str], warnings: list[str]) -> Precision:
    asked = train.precision
    if asked == "auto":
        chosen = "bf16" if machine.has_native_bf16 else "fp32"
        reasons["train.precision"] = f"{chosen}: {machine.bf16_reason}"
        return cast(Precision, chosen)
    if asked == "bf16" and not machine.has_native_bf16:
        warnings.append(f"train.precision is bf16, but {machine.bf16_reason}: expect it to be slower than fp32")
    return asked


def _with_given_micro(layout: Layout, train: TrainConfig) -> Layout:
    return replace(layout, micro=parse_amount(train.micro_batch))


def _choose_recompute(
    train: TrainConfig,
    task: Task,
    layout: Layout,
    available_bytes: int,
    reasons: dict[str, str],
) -> Recompute:
    """`layout` has the smallest micro-batch that may be chosen: recomputing is the costlier way to save memory."""
    asked = train.recompute
    if asked != "auto":
        return asked
    need = memory_of(task, layout).peak_bytes
    if need <= FITS * available_bytes:
        reasons["train.recompute"] = "none: activations fit"
        return "none"
    reasons["train.recompute"] = (
        f"full: without it a rank would need {format_bytes(need)}, and {format_bytes(available_bytes)} is available"
    )
    return "full"


def _choose_micro(
    task: Task,
    layout: Layout,
    machine: Machine,
    available_bytes: int,
    reasons: dict[str, str],
) -> Layout:
    cap = (GPU_TOKENS if machine.device == "cuda" else CPU_TOKENS) * layout.sp
    longest = task.max_length
    longest_words = f"one {'pair of twice' if task.sequences > 1 else 'sample of'} data.max_length"
    if layout.pp > 1:
        # A pipeline waits less the more micro-batches there are: its bubble is at most a fifth of what it computes.
        fed = task.tokens_per_step / layout.dp / (FEED * layout.pp / layout.virtual)
        cap = min(cap, max(longest, int(fed)))
    for tokens in _ladder(cap, longest):
        rung = replace(layout, micro=Amount(tokens, "tokens"))
        memory = memory_of(task, rung)
        fixed = sum(memory.parts.get(part, 0) for part in ("weights", "optimizer", "gradients", "framework"))
        room = max(0.0, MEMORY_SHARE * (available_bytes - fixed))
        if memory.peak_bytes - fixed <= room or tokens == longest:
            break
    if tokens == longest and longest >= cap:
        why = f"{longest_words}, which is at least the {cap:,} that keep the device busy"
    elif tokens == cap:
        why = f"more at once brings nothing on a {'GPU' if machine.device == 'cuda' else 'CPU'}"
    elif tokens == longest:
        why = f"the smallest, {longest_words}: " + ("a pipeline wants many" if cap == longest else "memory is short")
    else:
        why = f"what fits in {MEMORY_SHARE:.0%} of the free memory per rank"
    reasons["train.micro_batch"] = f"{tokens:,} tokens: {why}"
    return rung


def _ladder(cap: int, longest: int) -> Iterator[int]:
    """From the cap downwards by halves, to one sample of the greatest length.

    Few rungs on purpose: a little more or less free memory, as between a start and a resume, changes nothing.
    """
    tokens = cap
    while tokens > longest:
        yield tokens
        tokens //= 2
    yield longest
