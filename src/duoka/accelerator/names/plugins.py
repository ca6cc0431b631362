"""Settings in objects: what loops say by plugins and handlers, as arguments of our own.

Each class names what it takes with its defaults. What asks for nothing is taken; what we do otherwise is refused when
the object is made, with what to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from duoka.accelerator.names.enums import DDPCommunicationHookType
from duoka.errors import ConfigError

_ANY = "any"  # in `same`: every value, because it is so here anyway


class Settings:
    """`takes`: names and defaults. `same`: those whose every value comes to the same here. `refused`: those of which
    only the default is known, and what to write instead."""

    takes: ClassVar[Mapping[str, Any]] = {}
    same: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *values: Any, **given: Any) -> None:
        kind = type(self).__name__
        given = {**dict(zip(self.takes, values, strict=False)), **given}
        for name, value in given.items():
            if name not in self.takes and name not in self.same and name not in self.refused:
                raise ConfigError(f"{kind} has no argument {name}", fix=f"it takes {', '.join(self.takes)}")
            if name in self.refused and value not in (None, False, self.takes.get(name)):
                raise ConfigError(f"{kind}({name}={value!r}) has no counterpart here", fix=self.refused[name])
        self.__dict__.update({**dict.fromkeys((*self.same, *self.refused)), **self.takes, **given})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def to_kwargs(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {name: value for name, value in vars(self).items() if value != self.takes.get(name)}

    def arguments(self) -> dict[str, Any]:
        """What it says, as arguments of the Accelerator."""
        return {}


class KwargsHandler(Settings):
    """Settings that `kwargs_handlers` takes."""


class DataLoaderConfiguration(Settings):
    """How loaders are spread."""

    takes = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "data_seed": None}  # noqa: RUF012
    same = ("use_seedable_sampler", "non_blocking", "use_stateful_dataloader")
    refused = {  # noqa: RUF012
        "custom_classes": "give `prepare` the plain DataLoader",
    }

    def arguments(self) -> dict[str, Any]:
        said = {"split_batches": bool(self.split_batches), "dispatch_batches": bool(self.dispatch_batches)}
        return said if self.data_seed is None else {**said, "seed": int(self.data_seed)}


class GradientAccumulationPlugin(Settings):
    """How long windows are."""

    takes = {"num_steps": 1, "sync_with_dataloader": True}  # noqa: RUF012
    same = ("adjust_scheduler",)
    refused = {"sync_each_batch": 'to hold less of the gradients write:   strategy="zero2"'}  # noqa: RUF012

    def __init__(self, *values: Any, **given: Any) -> None:
        super().__init__(*values, **given)
        if not self.sync_with_dataloader:
            raise ConfigError(
                "GradientAccumulationPlugin(sync_with_dataloader=False): a window ends with its loader here",
                fix="delete it; a short last window has its true weight",
            )

    def arguments(self) -> dict[str, Any]:
        return {"gradient_accumulation_steps": self.num_steps}


class ProjectConfiguration(Settings):
    """Where things are written, and how many states are kept."""

    takes = {  # noqa: RUF012
        "project_dir": None,
        "logging_dir": None,
        "automatic_checkpoint_naming": False,
        "total_limit": None,
        "iteration": 0,
    }
    refused = {"save_on_each_node": "states are written once, to a folder that all machines see"}  # noqa: RUF012

    def set_directories(self, project_dir: Any = None) -> None:
        self.project_dir = project_dir
        self.logging_dir = getattr(self, "logging_dir", None) or project_dir


class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel."""

    takes = {  # noqa: RUF012
        "find_unused_parameters": False,
        "static_graph": False,
        "bucket_cap_mb": 25,
        "gradient_as_bucket_view": False,
        "broadcast_buffers": True,
        "comm_hook": DDPCommunicationHookType.NO,
        "comm_wrapper": DDPCommunicationHookType.NO,
    }
    same = ("dim",)
    refused = {  # noqa: RUF012
        "check_reduction": "delete it: torch gave it up",
        "comm_state_option": "delete it: PowerSGD has one rank here, and keeps what it leaves out",
    }

    def arguments(self) -> dict[str, Any]:
        if not self.broadcast_buffers:
            raise ConfigError(
                "DistributedDataParallelKwargs(broadcast_buffers=False) has no counterpart here",
                fix="delete it: only statistics of batch norms are sent",
            )
        hook, wrapper = str(self.comm_hook), str(self.comm_wrapper)
        if wrapper != "no" and hook != "no":
            fix = f"delete comm_wrapper: what {hook} sends is small already"
            raise ConfigError(f"comm_wrapper {wrapper} around comm_hook {hook}: one of them is possible here", fix=fix)
        names = {"no": None, "fp16": "fp16", "bf16": "bf16", "power_sgd": "powersgd", "batched_power_sgd": "powersgd"}
        compress = names[wrapper if hook == "no" else hook]
        said = {"find_unused_parameters": self.find_unused_parameters, "static_graph": self.static_graph}
        said = {name: True for name, value in said.items() if value}
        if self.bucket_cap_mb != 25:
            said["bucket_mb"] = self.bucket_cap_mb
        if compress:
            said["compress"] = compress
        return {"ddp": said}


class GradScalerKwargs(KwargsHandler):
    """The loss scaler of fp16."""

    takes = {  # noqa: RUF012
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    }

    def arguments(self) -> dict[str, Any]:
        if not self.enabled:
            raise ConfigError("GradScalerKwargs(enabled=False): fp16 needs a scaler", fix="write bf16")
        return {"scaler": self.to_kwargs()}


class InitProcessGroupKwargs(KwargsHandler):
    """How processes meet: `backend` as duoka chooses it, and how long a rank waits for the others."""

    takes = {"backend": None, "timeout": None}  # noqa: RUF012
    refused = {"init_method": "start with duoka launch or torchrun, which say where ranks meet"}  # noqa: RUF012

    def arguments(self) -> dict[str, Any]:
        if self.timeout is None:
            return {}
        return {"parallel": {"timeout": f"{int(self.timeout.total_seconds())}s"}}


class AutocastKwargs(KwargsHandler):
    """Precision of a block of code."""

    takes = {"enabled": True}  # noqa: RUF012
    same = ("cache_enabled",)


class ProfileKwargs(KwargsHandler):
    """Options of torch's profiler."""

    takes = {  # noqa: RUF012
        "activities": None,
        "schedule_option": None,
        "on_trace_ready": None,
        "record_shapes": False,
        "profile_memory": False,
        "with_stack": False,
        "with_flops": False,
        "with_modules": False,
        "output_trace_dir": None,
    }

    def arguments(self) -> dict[str, Any]:
        return {"profile": self}


class FullyShardedDataParallelPlugin(Settings):
    """Sharded training: what is sharded, and where it lies. How layers are found and weights are gathered, saved and
    loaded is as it is here."""

    takes = {  # noqa: RUF012
        "fsdp_version": 2,
        "sharding_strategy": None,
        "reshard_after_forward": None,
        "cpu_offload": None,
    }
    same = (
        "auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params", "state_dict_type", "state_dict_config",
        "optim_state_dict_config", "use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch",
        "limit_all_gathers", "cpu_ram_efficient_loading",
    )  # fmt: skip
    refused = {  # noqa: RUF012
        "activation_checkpointing": "call model.gradient_checkpointing_enable() before prepare",
        "mixed_precision_policy": 'write:   Accelerator(mixed_precision="bf16")',
        "ignored_modules": "all of a model is sharded",
        "param_init_fn": "give `prepare` a model with its weights",
    }

    def arguments(self) -> dict[str, Any]:
        said = self.sharding_strategy if self.sharding_strategy is not None else self.reshard_after_forward
        word = str(getattr(said, "name", said)).upper()
        kinds = {"NONE": "fsdp", "TRUE": "fsdp", "FALSE": "zero2", "FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2",
                 "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "1": "fsdp", "2": "zero2", "3": "ddp",
                 "4": "hsdp"}  # fmt: skip
        if word not in kinds:
            raise ConfigError(f"sharding_strategy {said!r} has no counterpart here", fix='write:   strategy="hsdp"')
        offloads = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        return {"strategy": kinds[word], "parallel": {"offload": "params"} if offloads else {}}


def _read_json(path: Path) -> dict[str, Any]:
    fix = "name DeepSpeed's JSON file, or give its keys as a dict"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the DeepSpeed config {path} cannot be read: {error}", fix=fix) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the DeepSpeed config {path} holds no keys", fix=fix)
    return tree


class DeepSpeedPlugin(Settings):
    """ZeRO stages, done by duoka's own strategies."""

    takes = {  # noqa: RUF012
        "zero_stage": 2,
        "hf_ds_config": None,
        "gradient_accumulation_steps": None,
        "offload_param_device": "none",
    }
    same = ("zero3_save_16bit_model", "zero3_init_flag", "enable_msamp", "train_micro_batch_size_per_gpu")
    read = (
        "zero_optimization", "optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "bf16",
        "fp16",
    )  # fmt: skip
    # Sizes that the loader has, what is printed, and a leave that duoka's own ZeRO does not need.
    of_no_effect = (
        "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "wall_clock_breakdown", "dump_state",
        "zero_allow_untested_optimizer",
    )  # fmt: skip
    refused = {  # noqa: RUF012
        "gradient_clipping": "write in the loop:   accelerator.clip_grad_norm_(model.parameters(), VALUE)",
        "offload_optimizer_device": "make the optimizer with duoka.optim.host.HostAdamW",
        "offload_optimizer_nvme_path": "make the optimizer with duoka.optim.host.HostAdamW",
        "offload_param_nvme_path": 'write:   parallel={"offload": "params"}',
        "transformer_moe_cls_names": "delete it: layers are found",
    }

    def __init__(self, *values: Any, **given: Any) -> None:
        given = {name: value for name, value in given.items() if not (name in self.refused and value == "none")}
        super().__init__(*values, **given)
        self.deepspeed_config: dict[str, Any] = {}  # scripts look into it for an optimizer and a scheduler
        if self.hf_ds_config is not None:
            self._read(self.hf_ds_config)

    def _read(self, config: Any) -> None:
        tree = config if isinstance(config, Mapping) else _read_json(Path(config))
        self.deepspeed_config = dict(tree)
        zero = tree.get("zero_optimization", {})
        self.zero_stage = zero.get("stage", 0)
        self.offload_param_device = zero.get("offload_param", {}).get("device", "none")
        if zero.get("offload_optimizer", {}).get("device", "none") != "none":
            fix = self.refused["offload_optimizer_device"]
            raise ConfigError("the DeepSpeed config offloads the optimizer", fix=fix)
        for key in ("optimizer", "scheduler"):
            if key in tree:
                raise ConfigError(f"the DeepSpeed config makes the {key}", fix=f"make the {key} in the loop")
        if tree.get("gradient_clipping", "auto") not in ("auto", 0, 0.0):
            raise ConfigError("the DeepSpeed config clips gradients", fix=self.refused["gradient_clipping"])
        if (steps := tree.get("gradient_accumulation_steps", "auto")) != "auto":
            self.gradient_accumulation_steps = steps
        for precision in ("bf16", "fp16"):
            if tree.get(precision, {}).get("enabled", "auto") not in ("auto", False):
                fix = f'write "auto" there, and in the script:   Accelerator(mixed_precision="{precision}")'
                raise ConfigError(f"the DeepSpeed config computes in {precision}", fix=fix)
        if others := sorted(set(tree) - set(self.read) - set(self.of_no_effect)):
            fix = "delete what is not needed; what is, write in the script"
            raise ConfigError(f"the DeepSpeed config says {', '.join(others)}, which duoka does not read here", fix=fix)

    def arguments(self) -> dict[str, Any]:
        stages = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
        if self.zero_stage not in stages:
            raise ConfigError(f"zero_stage is {self.zero_stage!r}", fix="choose from 0, 1, 2, 3")
        offloads = self.offload_param_device not in (None, "none")
        if offloads and self.offload_param_device != "cpu":
            raise ConfigError(
                f"offload_param_device is {self.offload_param_device!r}, and a loop of your own moves weights to host "
                "memory alone",
                fix='write "cpu", or train with a YAML (`duoka train`):   parallel: {offload: {params: disk}}',
            )
        said: dict[str, Any] = {"strategy": stages[self.zero_stage]}
        said["parallel"] = {"offload": "params"} if offloads else {}
        if self.gradient_accumulation_steps:
            said["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        return said


class ParallelismConfig(Settings):
    """How processes are laid out."""

    takes = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1}  # noqa: RUF012
    same = ("sp_backend", "tp_handler", "cp_handler", "sp_handler")

    def arguments(self) -> dict[str, Any]:
        for name in ("tp_size", "cp_size", "sp_size"):
            if (getattr(self, name) or 1) > 1:
                raise ConfigError(
                    f"ParallelismConfig({name}={getattr(self, name)}): own loops split data and shard models, no more",
                    fix='layers and sequences are not split yet; shard the model:   Accelerator(strategy="zero3")',
                )
        replicas, shards = self.dp_replicate_size or 1, self.dp_shard_size or 1
        if shards == 1:
            return {"strategy": "ddp"} if replicas > 1 else {}
        if replicas == 1:
            return {"strategy": "fsdp"}
        return {"strategy": "hsdp", "parallel": {"shard_ranks": shards}}


class TorchTensorParallelPlugin(Settings):
    """Layers that are split over ranks: of one rank here."""

    takes = {"tp_size": 1}  # noqa: RUF012
    same = ("torch_device_mesh",)

    def arguments(self) -> dict[str, Any]:
        return ParallelismConfig(tp_size=self.tp_size).arguments()


class TorchDynamoPlugin(Settings):
    """Compilation: not by plugin."""

    takes = {"backend": "no", "mode": None}  # noqa: RUF012
    same = ("fullgraph", "dynamic", "options", "disable", "use_regional_compilation")

    def arguments(self) -> dict[str, Any]:
        if str(getattr(self.backend, "value", self.backend)).lower() not in ("no", "none"):
            raise ConfigError(
                f"TorchDynamoPlugin(backend={self.backend!r}): models are not compiled by `prepare`",
                fix="write before prepare:   model.compile()",
            )
        return {}
