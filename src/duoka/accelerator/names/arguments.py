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


def add_launchers_deepspeed(
    said: dict[str, Any], strategy: str | None = None, env: Mapping[str, str] = os.environ
) -> None:
    """What `accelerate launch` was told of DeepSpeed, where the script names no strategy: as its plugin would say."""

    def is_on(name: str) -> bool:
        return env.get(f"ACCELERATE_USE_{name}", "").lower() == "true"

    if strategy is not None or "strategy" in said or is_on("FSDP") or not is_on("DEEPSPEED"):
        return
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() == "none":
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        keys = ("offload_optimizer_device", "offload_param_device")
        given: dict[str, Any] = {key: env.get(f"ACCELERATE_DEEPSPEED_{key.upper()}", "none") for key in keys}
        given["gradient_clipping"] = env.get("ACCELERATE_GRADIENT_CLIPPING", "none")
        plugin = DeepSpeedPlugin(zero_stage=int(stage) if stage.isdecimal() else stage, **given)
    else:
        plugin = DeepSpeedPlugin(hf_ds_config=file)
    _add(said, plugin, DeepSpeedPlugin, "deepspeed_plugin")
    said.setdefault("plugins", {})["deepspeed_plugin"] = plugin


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
