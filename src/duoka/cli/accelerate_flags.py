"""The flags of `accelerate launch`: which there are, what they say in the form of its config file, and the variables
in which it hands that to a script. lines.py reads launch lines with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duoka.config.paths import given_path, is_file

# Flags that stand alone, and those with a value; both spelled with _.
SWITCHES = (
    "multi_gpu", "cpu", "use_fsdp", "use_deepspeed", "quiet", "debug", "m", "module", "no_python", "q", "tpu",
    "use_xpu", "use_megatron_lm", "same_network", "enable_cpu_affinity", "use_parallelism_config",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "downcast_bf16", "tpu_cluster",
    "no_tpu_cluster", "tpu_use_sudo", "fp8_use_autocast_during_eval",
)  # fmt: skip
_STARTING = (
    "config_file", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "main_port",
    "mixed_precision", "gpu_ids", "num_cpu_threads_per_process", "dynamo_backend", "dynamo_mode", "rdzv_backend",
    "rdzv_conf", "max_restarts", "monitor_interval", "role", "tee", "t", "log_dir", "main_training_function",
    "mpirun_hostfile", "vm", "env",
)  # fmt: skip
_OF_DEEPSPEED = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_config_file",
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_OF_FSDP = (
    "fsdp_sharding_strategy", "fsdp_offload_params", "fsdp_auto_wrap_policy", "fsdp_version", "fsdp_state_dict_type",
    "fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "fsdp_backward_prefetch", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states", "fsdp_forward_prefetch",
)  # fmt: skip
_OF_MEGATRON = (
    "tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations",
    "use_distributed_optimizer", "gradient_clipping", "use_custom_fsdp", "no_load_optim", "no_save_optim",
    "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload", "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "attention_backend", "expert_model_parallel_size", "context_parallel_size", "attention_dropout", "hidden_dropout",
    "attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss",
    "use_rotary_position_embeddings",
)  # fmt: skip
_OF_FP8 = (
    "backend", "margin", "interval", "format", "amax_history_len", "amax_compute_algo", "override_linear_precision",
    "opt_level", "enable_fsdp_float8_all_gather", "pad_inner_dim",
)  # fmt: skip
_OF_AXES = (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size",
    "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip
_AXES, _MEGATRON, _FP8 = "parallelism_config", "megatron_lm", "fp8"
VALUES = (
    *_STARTING, *_OF_DEEPSPEED, *_OF_FSDP, *(f"{_MEGATRON}_{name}" for name in _OF_MEGATRON),
    *(f"{_FP8}_{name}" for name in _OF_FP8), *(f"{_AXES}_{name}" for name in _OF_AXES),
)  # fmt: skip
_DEFAULT_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")
_KINDS = {
    "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU", "use_megatron_lm": "MEGATRON_LM",
    "tpu": "TPU", "use_xpu": "MULTI_XPU",
}  # fmt: skip
_PLAIN = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision",
          "gpu_ids")  # fmt: skip


def asked_for(flags: Mapping[str, str]) -> dict[str, Any]:
    """The config file's content with the flags laid on it, in the file's own form."""
    asked = _config_file(flags.get("config_file") or default_config())
    for name, text in flags.items():
        value: Any = {"true": True, "false": False}.get(text.lower(), text)
        if name in _KINDS:
            asked["distributed_type"] = _KINDS[name]
        elif name in ("cpu", "use_cpu"):
            asked["use_cpu"] = True
        elif name == "main_port":
            asked["main_process_port"] = text
        elif name.startswith("dynamo_"):
            _block(asked, "dynamo_config")[name] = text if name == "dynamo_backend" else value
        elif name.startswith("fsdp_"):
            _block(asked, "fsdp_config")[name] = value
        elif name in _OF_DEEPSPEED:
            _block(asked, "deepspeed_config")[name] = value
        elif name.startswith(f"{_AXES}_"):
            _block(asked, _AXES)[name] = value
        elif name.startswith(f"{_MEGATRON}_"):
            _block(asked, "megatron_lm_config")[name] = value
        elif name.startswith(f"{_FP8}_"):
            _block(asked, "fp8_config")[name] = value
        elif name in _PLAIN:
            asked[name] = text
    return asked


def _block(asked: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(asked.get(name), dict):
        asked[name] = {}
    block: dict[str, Any] = asked[name]
    return block


def _config_file(given: str) -> dict[str, Any]:
    if not given:
        return {}
    from duoka.config.overlays import read_text
    from duoka.config.yaml_lines import parse_yaml
    from duoka.errors import Fault, Faults

    faults: list[Fault] = []
    text = read_text(Path(given), faults, None)
    tree = parse_yaml(text, given, faults) if text else None
    if faults or tree is None or not isinstance(tree.value, dict):
        raise Faults(faults or [Fault(f"{given} holds no Accelerate config")])
    content: dict[str, Any] = tree.plain_value()
    return content


def default_config() -> str:
    """What `accelerate config` has written on this machine, which its launcher reads where no file is named; or ""."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = given_path(os.environ.get("HF_HOME") or f"{cache}/huggingface") / "accelerate"
    return next((str(home / name) for name in _DEFAULT_NAMES if is_file(home / name)), "")


def starting_environment(asked: Mapping[str, Any], flags: Mapping[str, str]) -> dict[str, str]:
    """What processes of any program start with: devices and threads."""
    env: dict[str, str] = {}
    ids, threads = asked.get("gpu_ids"), flags.get("num_cpu_threads_per_process")
    if ids is not None and str(ids).lower() not in ("all", ""):
        env["CUDA_VISIBLE_DEVICES"] = str(ids).replace(" ", "")
    if asked.get("use_cpu") is True:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if threads is not None:
        env["OMP_NUM_THREADS"] = threads
    return env


def environment_of(asked: Mapping[str, Any]) -> dict[str, str]:
    """The variables in which accelerate launch tells a script the same; an Accelerator reads them, theirs too."""
    env: dict[str, str] = {}
    if asked.get("mixed_precision"):
        env["ACCELERATE_MIXED_PRECISION"] = str(asked["mixed_precision"])
    kind = str(asked.get("distributed_type", "")).upper()
    if kind == "FSDP":
        env["ACCELERATE_USE_FSDP"] = "true"
        names = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        told = {name.upper(): value for name, value in (asked.get("fsdp_config") or {}).items() if value is not None}
        env |= {names.get(name, name): _word(value) for name, value in told.items()}
    if kind == "DEEPSPEED":
        env["ACCELERATE_USE_DEEPSPEED"] = "true"
        of = asked.get("deepspeed_config") or {}
        plain = ("gradient_accumulation_steps", "gradient_clipping")
        others = ("zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
                  "offload_param_nvme_path", "zero3_save_16bit_model")  # fmt: skip
        env |= {f"ACCELERATE_{name.upper()}": _word(of[name]) for name in plain if of.get(name) is not None}
        env |= {f"ACCELERATE_DEEPSPEED_{name.upper()}": _word(of[name]) for name in others if of.get(name) is not None}
        if of.get("zero3_init_flag") is not None:
            env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = _word(of["zero3_init_flag"])
        if of.get("deepspeed_config_file"):
            env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(of["deepspeed_config_file"])
    if axes := asked.get(_AXES):
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        names = {name: name if name.startswith(_AXES) else f"{_AXES}_{name}" for name in axes}
        env |= {names[name].upper(): _word(value) for name, value in axes.items() if value is not None}
    backend = (asked.get("dynamo_config") or {}).get("dynamo_backend")
    return env | ({"ACCELERATE_DYNAMO_BACKEND": str(backend)} if backend else {})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
