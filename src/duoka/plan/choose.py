"""What every `auto` becomes on this machine, each choice with its reason in one line; and what is refused.

Deterministic: the same config, model, machine and world give the same layout.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from typing import cast

from duoka.config.deepspeed_json import STAGES, is_quantized
from duoka.config.rules_deepspeed import (
    GET_AIO,
    GET_DEEPSPEED,
    NO_AIO,
    NO_DEEPSPEED,
    NO_QUANTIZER,
    WITHOUT_QUANTIZER,
)
from duoka.config.rules_model import GET_PACKER, NO_PACKER
from duoka.config.rules_optim import GET_BITSANDBYTES, NO_BITSANDBYTES
from duoka.config.schema import GRAPHS, RunConfig, TrainConfig
from duoka.config.trackers import TRACKERS
from duoka.errors import Fault
from duoka.plan.axes import axes_of, check_axes, data_ranks, stages_per_rank, why_exchange
from duoka.plan.catalog import Cluster, cluster_of, match_gpu
from duoka.plan.compiler import INSTALL, has_aio
from duoka.plan.fill_in import fill_in
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout, Precision
from duoka.plan.offload import offload_of
from duoka.plan.sizes import ModelShape
from duoka.plan.strategy import choose_strategy
from duoka.plan.task import Task
from duoka.plan.unread_rates import unread_rates
from duoka.units import Amount

FP8_CAPABILITY = 8.9  # as in model/fp8.py; a test holds the two together


@dataclass(frozen=True)
class Choice:
    layout: Layout
    reasons: dict[str, str] = field(default_factory=dict)  # key of the YAML -> why, for every auto
    warnings: tuple[str, ...] = ()


def check_machine(
    config: RunConfig, machine: Machine, world_size: int, local_size: int | None = None, shape: ModelShape | None = None
) -> list[Fault]:
    """Settings that this machine, or a world with `local_size` (all) of its ranks on it, cannot do.

    `shape`: of the model, where it is known; then no layout is advised that it does not allow.
    """
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
    faults += _check_fp8(config, machine)
    if config.parallel.backend == "nccl" and machine.device == "cpu":
        what = "parallel.backend is nccl, and this machine has no GPU"
        faults.append(Fault(what, key="parallel.backend", fix="write for example:   backend: auto"))
    if config.parallel.offloads.activations == "host" and machine.device == "cpu":
        what = "parallel.offload has activations: host, and on a CPU they lie in host memory already"
        faults.append(Fault(what, key="parallel.offload.activations", fix="write:   activations: disk   or delete it"))
    faults += _check_compile(config, machine)
    if config.parallel.engine == "deepspeed" and is_quantized(config.parallel) and not has_quantizer(machine):
        what = f"parallel.compress is {config.parallel.compress}, {NO_QUANTIZER}"
        faults.append(Fault(what, key="parallel.compress", fix=WITHOUT_QUANTIZER))
    faults += _check_weights_on_disk(config, world_size)
    if axes := check_axes(config.parallel, world_size, shape):
        return [*faults, *axes]
    data = data_ranks(config.parallel, world_size)
    if config.data.stream and data > (config.data.streams or data):
        what = f"{data} processes are asked for, and {config.data.streams} streams feed them"
        faults.append(Fault(what, key="data.streams", fix=f"set data.streams: {data}, or leave it out"))
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


def _check_compile(config: RunConfig, machine: Machine) -> list[Fault]:
    if not config.train.compile or machine.device != "cpu":
        return []
    if config.train.compile == GRAPHS:
        what = f"train.compile is {GRAPHS}, which records CUDA graphs, and this machine has no GPU"
        return [Fault(what, key="train.compile", fix="write:   compile: true   or   compile: false")]
    if not machine.no_layers:
        return []
    fix = f"{INSTALL}, or name another in CXX, or write:   compile: false"
    return [Fault(f"train.compile is true: {machine.no_layers}", key="train.compile", fix=fix)]


def has_quantizer(machine: Machine) -> bool:
    """Whether DeepSpeed's can be compiled: CUDA code. Tests without a GPU put one in its place."""
    return machine.device != "cpu"


def _check_fp8(config: RunConfig, machine: Machine) -> list[Fault]:
    if config.train.precision != "fp8" or not machine.gpus:
        return []
    slowest = min(machine.gpus, key=lambda gpu: gpu.capability)
    row = match_gpu(slowest)
    if row is not None and row.generation.startswith("cdna"):
        what = f"{slowest.name} is AMD's, whose 8-bit floats this version does not use"
    elif slowest.capability < FP8_CAPABILITY:
        what = (
            f"{slowest.name} (compute capability {slowest.capability:g}) does not multiply 8-bit floats: NVIDIA's do "
            "from Ada (8.9) and Hopper (9.0) on"
        )
    else:
        return []
    fix = f"write for example:   precision: {'bf16' if machine.has_native_bf16 else 'fp16'}   (or auto)"
    return [Fault(f"train.precision is fp8, and {what}", key="train.precision", fix=fix)]


def _check_weights_on_disk(config: RunConfig, world_size: int) -> list[Fault]:
    """One DeepSpeed process computes in the buffers through which weights pass, where a pass that comes again finds
    other weights; several gather copies."""
    own = config.parallel
    if own.engine == "native" or own.offloads.params != "disk" or world_size > 1 or config.train.recompute == "none":
        return []
    what = (
        f"parallel.offload has params: disk, train.recompute is {config.train.recompute}, and parallel.engine is "
        "deepspeed, which on one process gives layers that are computed again the weights of others"
    )
    return [Fault(what, key="train.recompute", fix="write:   recompute: none   or   engine: native")]


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
    elif config.parallel.engine == "deepspeed" and config.parallel.offloads.uses_disk and not has_aio():
        faults.append(Fault(NO_AIO, key="parallel.offload", fix=GET_AIO))
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
    cluster: Cluster | None = None,
) -> Choice:
    """The layout of this run: what the config says, and this machine's answer to every `auto`.

    `given` says how ranks are used, in place of the config; it may be a layout that is only planned.
    """
    reasons: dict[str, str] = {}
    warnings: list[str] = [*machine.notes, *unread_rates(config, task.work.shape)]
    data = data_ranks(config.parallel, world_size)
    layout = Layout(
        dp=data,
        strategy="single" if data * config.parallel.sequence == 1 else "ddp",
        precision=_choose_precision(config.train, machine, reasons, warnings),
        micro=Amount(config.sample_tokens, "tokens"),
        packing=config.data.packs,
        **offload_of(config.parallel.offloads),  # type: ignore[arg-type]
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
    local = local_size or world_size
    cluster = cluster or cluster_of(machine, max(1, world_size // local), local)
    if given is None:
        layout, why = choose_strategy(config, task, layout, cluster, available_bytes)
        reasons |= {"parallel.strategy": why} if why else {}
        layout = replace(layout, ep=config.parallel.expert)
    if config.parallel.engine == "deepspeed":
        reasons["parallel.engine"] = f"DeepSpeed, ZeRO stage {STAGES[layout.strategy]}"
    if layout.sp > 1:
        reasons["parallel.sequence"] = f"{layout.sp}, {why_exchange(task.work.shape.num_heads // layout.tp, layout.sp)}"
    filled = fill_in(config.train, task, layout, cluster, available_bytes)
    return Choice(filled.layout, reasons | filled.reasons, tuple(warnings))


def _why_not_dp(machine: Machine) -> str:
    if len(machine.gpus) < 2:
        return f"parallel.strategy dp is for several GPUs; here are {len(machine.gpus)}, and the model runs as it is"
    return (
        f"parallel.strategy dp copies the weights to {len(machine.gpus)} GPUs at every micro-batch, under one Python: "
        f"ddp (--nproc {len(machine.gpus)}) gives the same numbers faster"
    )


def _choose_precision(train: TrainConfig, machine: Machine, reasons: dict[str, str], warnings: list[str]) -> Precision:
    asked = train.precision
    if asked == "auto" and train.weights == "bf16":
        reasons["train.precision"] = "bf16: train.weights are"
        return "bf16"
    if asked == "auto":
        chosen = "bf16" if machine.has_native_bf16 else "fp32"
        reasons["train.precision"] = f"{chosen}: {machine.bf16_reason}"
        if chosen == "fp32" and machine.has_fast_fp16:
            reasons["train.precision"] += "; fp16 is several times as fast, where a model stays in its range"
        return cast(Precision, chosen)
    if asked == "fp8" and not machine.gpus:
        warnings.append(
            "train.precision is fp8, which a CPU emulates: the same numbers, slower than bf16 and for trials only"
        )
    if asked == "bf16" and not machine.has_native_bf16:
        warnings.append(f"train.precision is bf16, but {machine.bf16_reason}: expect it to be slower than fp32")
    return asked
