"""Accelerate's YAML, as `accelerate config` writes it: how ranks start and share the work, not what they learn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects.deepspeed import read_stage, to_disk
from duoka.config.dialects.rows import (
    WHOLE_AT_THE_END,
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    implemented,
    is_none,
    only_if_on,
    read_switch,
    refused,
    reported,
    switch,
    table,
    whole,
    words,
)

_TYPES = {
    "no": "auto", "multi_gpu": "ddp", "multi_cpu": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed",
    "multi_npu": "multi_npu", "multi_xpu": "multi_xpu", "megatron_lm": "megatron_lm", "xla": "xla", "tpu": "tpu",
}  # fmt: skip


_SHARDING = {
    "full_shard": "fsdp", "1": "fsdp", "shard_grad_op": "zero2", "2": "zero2", "no_shard": "ddp", "3": "ddp",
    "hybrid_shard": "hsdp", "4": "hsdp", "hybrid_shard_zero2": "hsdp", "5": "hsdp",
}  # fmt: skip
_FSDP, _DEEP = "fsdp_config.", "deepspeed_config."


def _type(value: Any, asked: Asked) -> Any:
    kind = words("distributed_type", _TYPES)(value, asked)
    if kind == "deepspeed":
        return Answer(note="what its deepspeed_config says")
    older = str(asked.get(f"{_FSDP}fsdp_reshard_after_forward")).lower() in _SHARDING
    if kind == "fsdp" and (older or not is_none(asked.get(f"{_FSDP}fsdp_sharding_strategy"))):
        return Answer()  # that key's row says which
    if kind not in ("auto", "ddp", "fsdp"):
        raise Refusal(f"distributed_type {value} is not there yet", "write:   distributed_type: MULTI_GPU")
    return kind


def _sharding(value: Any, asked: Asked) -> Any:
    if str(asked.get("distributed_type")).lower() != "fsdp":
        return Answer(note="of FSDP, which is not on")
    word = str(value).strip().lower()
    answer = {"parallel.strategy": words("fsdp_sharding_strategy", _SHARDING)(value, asked)}
    if word in ("hybrid_shard_zero2", "5"):
        answer["parallel.reshard"] = False
    return Answer(answer)


def _reshard(value: Any, asked: Asked) -> Any:
    """FSDP2's switch; FSDP1 files write the sharding strategy's name here too, which has a row of its own."""
    if isinstance(value, str) and value.lower() in _SHARDING:
        return _sharding(value, asked) if is_none(asked.get(f"{_FSDP}fsdp_sharding_strategy")) else Answer()
    return Answer({} if read_switch(value, f"{_FSDP}fsdp_reshard_after_forward") else {"parallel.reshard": False})


def _precision(value: Any, asked: Asked) -> Any:
    word = words("mixed_precision", {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"})(value, asked)
    if word == "fp16" and not asked.start.has_gpu:
        return Answer({"train.precision": "auto"}, "no GPU here, and fp16 training needs one: train.precision is auto")
    return word


def _ranks(value: Any, asked: Asked) -> Any:
    asked_for = whole(value, "num_processes")
    if asked_for == asked.start.num_ranks:
        return Answer(note=f"{asked_for} processes, as started")
    return Answer(
        note=f"{asked_for} processes here, {asked.start.num_ranks} at this start: a file cannot start them, "
        f"write:   duoka train CONFIG --nproc {asked_for}"
    )


def _zero(value: Any, asked: Asked) -> Any:
    stage = read_stage(value, f"{_DEEP}zero_stage")
    return "ddp" if stage == 0 else f"zero{stage}"


def _place(asked: Asked, what: str) -> dict[str, Any]:
    """As DeepSpeed's own JSON says it."""
    path = asked.get(f"{_DEEP}offload_{what}_nvme_path")
    device = str(asked.get(f"{_DEEP}offload_{what}_device", "none")).lower()
    return {"device": device, "nvme_path": None if is_none(path) else path}


def _offload(what: str) -> Any:
    def convert(value: Any, asked: Asked) -> Any:
        where = str(value).lower()
        if where in ("none", "false", "no"):
            return Answer()
        if where not in ("cpu", "nvme"):
            raise Refusal(f"offloading to {value} is not known", "host memory is:   cpu   and a disk:   nvme")
        other = "param" if what == "optimizer" else "optimizer"
        if "nvme" in (where, str(asked.get(f"{_DEEP}offload_{other}_device")).lower()):
            return to_disk(f"{_DEEP}offload_{what}_device", _place(asked, "optimizer"), _place(asked, "param"))
        if what == "optimizer" and str(asked.get(f"{_DEEP}offload_param_device")).lower() == "cpu":
            return Answer()  # weights in host memory take the optimizer's state along
        return Answer({"parallel.offload": what})

    return convert


def _compile(value: Any, asked: Asked) -> Any:
    if is_none(value) or str(value).lower() == "no":
        return Answer()
    return Answer({"train.compile": True}, "" if str(value).lower() == "inductor" else f"{value}: inductor is used")


def _rows() -> list[Row]:
    fsdp, deep = _FSDP, _DEEP
    return [
        *implemented("distributed_type", "parallel.strategy", _type, ""),
        *implemented("mixed_precision", "train.precision", _precision),
        *implemented("num_processes", "", _ranks, "said; --nproc starts them"),
        *switch(f"{fsdp}fsdp_activation_checkpointing", "train.recompute",
                lambda value, asked: "full" if value else "none"),
        *implemented(f"{fsdp}fsdp_sharding_strategy", "parallel.strategy", _sharding),
        *implemented(f"{fsdp}fsdp_reshard_after_forward", "parallel.reshard", _reshard),
        *switch(f"{fsdp}fsdp_offload_params", "parallel.offload", only_if_on("parallel.offload", "params")),
        *implemented(f"{deep}zero_stage", "parallel.strategy", _zero),
        *implemented(f"{deep}gradient_clipping", "optim.clip", lambda v, a: Answer() if v == "auto" else v),
        *implemented(f"{deep}offload_optimizer_device", "parallel.offload", _offload("optimizer"), "cpu, nvme or none"),
        *implemented(f"{deep}offload_param_device", "parallel.offload", _offload("params"), "cpu, nvme or none"),
        *implemented("dynamo_config.dynamo_backend", "train.compile", _compile),
        *reported("how layers are compiled is torch's default", "dynamo_config.dynamo_mode",
                  "dynamo_config.dynamo_use_dynamic", "dynamo_config.dynamo_use_fullgraph",
                  "dynamo_config.dynamo_use_regional_compilation"),
        Row(f"{deep}deepspeed_config_file", "implemented", "parallel.strategy", "read too", opens="deepspeed"),
        *reported("duoka accumulates as train.global_batch asks for", f"{deep}gradient_accumulation_steps",
                  "gradient_accumulation_steps"),
        *reported("layers are wrapped, weights gathered and saved as duoka does it; it changes no result",
                  *(f"{fsdp}{name}" for name in (
                      "fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy",
                      "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch", "fsdp_min_num_params",
                      "fsdp_state_dict_type",
                      "fsdp_sync_module_states", "fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params",
                      "fsdp_version", "fsdp_activation_checkpointing_offload")),
                  f"{deep}zero3_init_flag", f"{deep}deepspeed_moe_layer_cls_names"),
        *reported("a switch of DeepSpeed's own", f"{deep}seq_parallel_communication_data_type"),
        *reported("with nvme: parallel.offload.folder",
                  f"{deep}offload_optimizer_nvme_path", f"{deep}offload_param_nvme_path"),
        *reported(WHOLE_AT_THE_END, f"{deep}zero3_save_16bit_model"),
        *reported("of the start: duoka train --nproc N --port P on each node", "machine_rank", "num_machines",
                  "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function",
                  "gpu_ids", "enable_cpu_affinity", "compute_environment", "debug", f"{deep}deepspeed_hostfile",
                  f"{deep}deepspeed_multinode_launcher", f"{deep}deepspeed_exclusion_filter",
                  f"{deep}deepspeed_inclusion_filter", "mpirun_config", "command_file", "commands"),
        *reported("a device is used when it is there; CUDA_VISIBLE_DEVICES= in front keeps to the CPU", "use_cpu"),
        *reported("of TPUs, which duoka does not use", "downcast_bf16", "tpu_env", "tpu_name", "tpu_zone",
                  "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"),
        *reported("scales are per tensor and found anew at each product (train.precision: fp8)", "fp8_config"),
        *refused("axes of a model are written in duoka's own YAML: duoka explain parallel.tensor, parallel.sequence, "
                 "parallel.strategy", "parallelism_config"),
        *refused("Megatron is another trainer", "megatron_lm_config"),
        *refused("KTransformers is another engine", "kt_config"),
    ]  # fmt: skip


def _fits(top: Mapping[str, Any]) -> bool:
    return "compute_environment" in top or ("distributed_type" in top and "model_name_or_path" not in top)


@cache
def accelerate() -> Dialect:
    return Dialect("accelerate", "Accelerate", table(_rows()), _fits, is_whole=False)
