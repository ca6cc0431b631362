"""What an Accelerator is made with: strategy, precision and steps from its arguments, or from the launcher's words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from duoka.comm.world import World
from duoka.config.rules_parallel import PARALLEL_RULES
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError
from duoka.plan.axes import KEYS, axes_of
from duoka.plan.layout import SHARDED, Layout, Precision, Strategy
from duoka.plan.offload import offload_of

PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")


def read_parallel(
    strategy: str | None, given: Mapping[str, Any] | None, env: Mapping[str, str] = os.environ
) -> ParallelConfig:
    """The `parallel` block of a YAML, by the same names; without a strategy, what `accelerate launch` was told."""
    asked = strategy or (given or {}).get("strategy") or _strategy_of_launcher(env)
    if asked not in (*STRATEGIES, "auto"):
        raise ConfigError(f"strategy is {asked!r}", fix=f"choose from {', '.join(STRATEGIES)}")
    try:
        parallel = ParallelConfig(**{**(given or {}), "strategy": asked})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"parallel: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for axis, size in axes_of(parallel).items():
        if size > 1:
            raise ConfigError(
                f"{KEYS[axis]} is {size}, and a loop of your own is not cut along that axis",
                fix="train with a YAML (`duoka train`), or delete it: strategy fsdp shares the weights of any model",
            )
    if parallel.offloads.uses_disk:
        raise ConfigError(
            f"parallel.offload is {parallel.offload}, and a disk takes part where duoka makes the optimizer too",
            fix="train with a YAML (`duoka train`), or write:   offload: params",
        )
    if parallel.offloads.activations != "none":
        raise ConfigError(
            f"parallel.offload is {parallel.offload}, and activations are moved where duoka knows the model's layers",
            fix="train with a YAML (`duoka train`), or delete activations",
        )
    if parallel.offloads.optimizer != "none":
        raise ConfigError(
            f"parallel.offload is {parallel.offload}, and the optimizer is yours",
            fix="make it with duoka.optim.host.HostAdamW, whose state lies in host memory",
        )
    return parallel


def add_ddp_options(parallel: ParallelConfig, options: Mapping[str, Any]) -> tuple[ParallelConfig, str]:
    """(with a handler's options of DDP, a note for people). Scripts bring them whatever the launcher was told."""
    if not options:
        return parallel, ""
    if parallel.strategy in (*SHARDED, "zero3"):
        note = f"DistributedDataParallelKwargs({', '.join(options)}): nothing of it counts under {parallel.strategy}"
        return parallel, note
    return read_parallel(parallel.strategy, {**options, **parallel.model_dump(exclude_unset=True)}), ""


def check_parallel(parallel: ParallelConfig, precision: Precision) -> None:
    """The contradictions that `duoka train` refuses: what only one strategy knows, under another one."""
    if parallel.engine != "native":
        raise ConfigError(
            f"parallel engine is {parallel.engine}, which needs the optimizer and the model together, as duoka train "
            "has them",
            fix="leave it out: ZeRO stages are there natively in a loop of your own",
        )
    strategy = "ddp" if parallel.strategy == "auto" else parallel.strategy
    # Rules about what a loop has of its own see nothing of it: `prepare` looks at the model.
    seen: Any = SimpleNamespace(
        parallel=parallel.model_copy(update={"strategy": strategy}), train=SimpleNamespace(precision=precision),
        optim=SimpleNamespace(name=""), lora=None, train_only=None,
    )  # fmt: skip
    for rule in PARALLEL_RULES:
        if not rule.is_note and rule.is_broken(seen):
            raise ConfigError(rule.message.format(c=seen), fix=rule.fix)


def _strategy_of_launcher(env: Mapping[str, str]) -> str:
    if env.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp"
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return {"0": "ddp", "1": "zero1", "3": "zero3"}.get(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"), "zero2")
    return "auto"


def read_precision(given: str | None, is_cpu: bool, env: Mapping[str, str] = os.environ) -> tuple[Precision, str]:
    """(precision, a note for people). CPUs have no fp16 training; a guide's script should start on a laptop too."""
    asked = given or env.get("ACCELERATE_MIXED_PRECISION") or "no"
    if asked == "fp8":
        raise ConfigError(
            f"mixed_precision is {asked!r}, and in a loop of your own duoka does not know which modules are a model's "
            "layers",
            fix="train with a YAML (`duoka train`), which has   precision: fp8   or choose from no, bf16, fp16",
        )
    if asked not in PRECISIONS:
        raise ConfigError(f"mixed_precision is {asked!r}", fix="choose from no, bf16, fp16")
    if asked == "fp16" and is_cpu:
        from duoka.plan.hardware import read_machine

        native: Precision = "bf16" if read_machine().has_native_bf16 else "fp32"
        return native, f"mixed_precision is fp16, which CPUs do not train in: computing in {native} here"
    return PRECISIONS[asked], ""


def read_steps(given: int | None, env: Mapping[str, str] = os.environ) -> int:
    steps = given if given is not None else int(env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or 1)
    if steps < 1:
        raise ConfigError(f"gradient_accumulation_steps is {steps}; at least 1 is needed")
    return steps


def choose_layout(parallel: ParallelConfig, precision: Precision, world: World) -> Layout:
    """One process needs no exchange; several are replicas unless a strategy says otherwise."""
    strategy: Strategy = "fsdp" if parallel.strategy == "zero3" else parallel.strategy  # type: ignore[assignment]
    if strategy not in SHARDED:
        strategy = "ddp" if world.size > 1 else "single"
    shard = world.size if strategy in SHARDED else 1
    if strategy == "hsdp":
        shard = min(parallel.shard_ranks or world.local_size, world.size)
        if world.size % shard:
            raise ConfigError(f"{world.size} processes cannot be cut into groups of {shard} (parallel.shard_ranks)")
    return Layout(dp=world.size, strategy=strategy, precision=precision, shard=shard, **offload_of(parallel.offloads))  # type: ignore[arg-type]
