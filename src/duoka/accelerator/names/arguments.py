"""Arguments of Accelerate's class as our own: what asks for nothing is taken, what we do otherwise is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from duoka.accelerator.names.plugins import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    KwargsHandler,
    ParallelismConfig,
    ProjectConfiguration,
    Settings,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from duoka.errors import ConfigError

# Values that ask for nothing, and what to write instead of others.
NOTHING: dict[str, tuple[tuple[Any, ...], str]] = {
    "cpu": ((None, False), "to leave GPUs alone, set CUDA_VISIBLE_DEVICES="),
    "device_placement": ((None, True), "what was prepared is on the right device"),
    "even_batches": ((None, True, False), ""),
    "use_seedable_sampler": ((None, True, False), ""),
    "rng_types": ((None,), "the order of data is a function of seed and epoch"),
    "megatron_lm_plugin": (
        (None,),
        'duoka does not split layers yet; shard the model:   Accelerator(strategy="zero3")',
    ),
    "dynamo_backend": ((None, "no", "NO"), "write before prepare:   model.compile()"),
    "slice_fn_for_dispatch": ((None,), "ranks get their items before they are put together"),
    "downcast_bf16": ((None, False, "no"), "duoka computes on CPUs and GPUs"),
}
PLUGINS: dict[str, type[Settings]] = {
    "dataloader_config": DataLoaderConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
    "deepspeed_plugins": DeepSpeedPlugin,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "parallelism_config": ParallelismConfig,
    "project_config": ProjectConfiguration,
    "dynamo_plugin": TorchDynamoPlugin,
}


def read_arguments(others: Mapping[str, Any]) -> dict[str, Any]:
    """What Accelerate's arguments say, as our own; `project` is the ProjectConfiguration, where there is one."""
    said: dict[str, Any] = {"parallel": {}}
    for name, value in others.items():
        if name in NOTHING:
            check_asks_nothing(name, value)
        elif name == "kwargs_handlers":
            for handler in value or ():
                _add(said, handler, KwargsHandler, name)
        elif name not in PLUGINS:
            raise ConfigError(f"Accelerator has no argument {name}", fix="docs/accelerator.md names its arguments")
        elif value is not None:
            _add(said, value, PLUGINS[name], name)
            if name == "project_config":
                said["project"] = value
            elif isinstance(value, (FullyShardedDataParallelPlugin, DeepSpeedPlugin, ParallelismConfig)):
                said.setdefault("plugins", {})[name.removesuffix("s")] = value
    return said


def add_launchers(said: dict[str, Any], strategy: str | None = None, env: Mapping[str, str] = os.environ) -> list[str]:
    """What `accelerate launch` was told, where the script names no strategy: as its plugins would say. Gives notes.

    It sets a variable for each of its options, left out ones too.
    """

    def is_on(name: str) -> bool:
        return env.get(f"ACCELERATE_USE_{name}", "").lower() == "true"

    if strategy is not None or "strategy" in said:
        return []
    if is_on("MEGATRON_LM"):
        raise ConfigError("accelerate launch was told to use Megatron", fix=NOTHING["megatron_lm_plugin"][1])
    notes = []
    if env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("no", "none"):
        fix = NOTHING["dynamo_backend"][1]
        notes.append(f"dynamo_backend of accelerate launch: models are not compiled by prepare; {fix}")
    if is_on("PARALLELISM_CONFIG"):
        sizes = {name: env.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") for name in ParallelismConfig.takes}
        whole = {name: int(size) for name, size in sizes.items() if size.isdecimal()}
        _add(said, ParallelismConfig(**whole), ParallelismConfig, "parallelism_config")
    if is_on("FSDP"):
        _add_fsdp(said, env, notes)
    elif is_on("DEEPSPEED"):
        plugin = _deepspeed_of(env)
        _add(said, plugin, DeepSpeedPlugin, "deepspeed_plugin")
        said.setdefault("plugins", {})["deepspeed_plugin"] = plugin
    return notes


def _add_fsdp(said: dict[str, Any], env: Mapping[str, str], notes: list[str]) -> None:
    """Its second version has a switch, its first the name of a strategy, under either of two names."""
    switch, name = env.get("FSDP_RESHARD_AFTER_FORWARD", "true"), env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    is_second, is_switch = env.get("FSDP_VERSION") == "2", switch.lower() in ("true", "false")
    is_default = name in ("FULL_SHARD", "1")
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy=switch if is_second or (is_default and not is_switch) else name,
        cpu_offload=env.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true",
    )
    if "strategy" in said:  # what sizes of axes say already
        said["parallel"].update(plugin.arguments()["parallel"])
    else:
        _add(said, plugin, FullyShardedDataParallelPlugin, "fsdp_plugin")
    said.setdefault("plugins", {})["fsdp_plugin"] = plugin
    if env.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        fix = FullyShardedDataParallelPlugin.refused["activation_checkpointing"]
        notes.append(f"fsdp_activation_checkpointing of accelerate launch has no counterpart here: {fix}")


def _deepspeed_of(env: Mapping[str, str]) -> DeepSpeedPlugin:
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() != "none":
        return DeepSpeedPlugin(hf_ds_config=file)
    stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    keys = ("offload_optimizer_device", "offload_param_device")
    given: dict[str, Any] = {key: env.get(f"ACCELERATE_DEEPSPEED_{key.upper()}", "none") for key in keys}
    given["gradient_clipping"] = env.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    return DeepSpeedPlugin(zero_stage=int(stage) if stage.isdecimal() else stage, **given)


def agreed(said: Mapping[str, Any], name: str, given: Any) -> Any:
    """An argument, or what a plugin says in its place; both may not say two things."""
    if given is None or said.get(name, given) == given:
        return said.get(name, given)
    raise ConfigError(f"{name} is {given!r}, and a plugin says {said[name]!r}", fix="keep one of them")


def check_asks_nothing(name: str, value: Any) -> None:
    nothing, fix = NOTHING[name]
    value = getattr(value, "value", value)
    if value in nothing or (name == "cpu" and not torch.cuda.is_available()):
        return
    raise ConfigError(f"Accelerator({name}={value!r}) has no counterpart here", fix=fix)


def _add(said: dict[str, Any], settings: Any, kind: type[Settings], name: str) -> None:
    if not isinstance(settings, kind):
        raise ConfigError(
            f"{name} holds a {type(settings).__name__} of another library",
            fix=f"import it from duoka:   from duoka.accelerator.utils import {kind.__name__}",
        )
    for key, value in settings.arguments().items():
        if key == "parallel":
            said["parallel"].update(value)
        elif key in said and said[key] != value:
            raise ConfigError(f"two plugins say {key}: {said[key]!r} and {value!r}", fix="keep one of them")
        else:
            said[key] = value


def read_project(project_dir: Any, given: ProjectConfiguration | None) -> ProjectConfiguration:
    """Where things are written: as the configuration says, or the one folder."""
    project = given or ProjectConfiguration()
    if project_dir is not None:
        project.project_dir = str(project_dir)
    project.project_dir = None if project.project_dir is None else str(project.project_dir)
    project.logging_dir = project.project_dir if project.logging_dir is None else str(project.logging_dir)
    return project
