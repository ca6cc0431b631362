"""Axolotl's YAML is not read: it is named, and each of its keys with it, by duoka's word, or by why there is none.

Keys that have the same name in duoka's own file, or in transformers' TrainingArguments, mean what their rows say.
"""

from __future__ import annotations

from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.rows import asks_for_nothing, is_none
from duoka.config.yaml_lines import Tree
from duoka.errors import Fault

_FIRST = "base_model"
_SIGNS = ("datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "sample_packing", "val_set_size")
OURS = {
    "base_model": "model.name", "revision_of_model": "model.revision", "tokenizer_config": "model.tokenizer",
    "chat_template": "model.template", "trust_remote_code": "model.trust_remote_code",
    "load_in_4bit": "model.quantization: nf4", "datasets": "data.train", "pretraining_dataset": "data.train",
    "test_datasets": "data.eval", "val_set_size": "data.eval", "sequence_len": "data.max_length",
    "sample_packing": "data.packing", "train_on_inputs": "data.targets: all", "excess_length_strategy": "data.on_long",
    "streaming": "data.stream", "adapter": "lora", "lora_model_dir": "lora.adapter", "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout", "lora_target_modules": "lora.targets",
    "lora_target_linear": "lora.targets: all", "loraplus_lr_ratio": "lora.b_lr_ratio",
    "peft_use_rslora": "lora.alpha (times the root of the rank)", "unfrozen_parameters": "train_only",
    "learning_rate": "optim.lr", "embedding_lr": "optim.embedding_lr", "optimizer": "optim.name",
    "lr_scheduler": "optim.schedule", "cosine_min_lr_ratio": "optim.min_lr", "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup", "adam_beta1": "optim.betas", "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps", "weight_decay": "optim.weight_decay", "max_grad_norm": "optim.clip",
    "num_epochs": "train.epochs", "max_steps": "train.max_steps", "seed": "train.seed", "bf16": "train.precision",
    "fp16": "train.precision", "fp8": "train.precision", "gradient_checkpointing": "train.recompute",
    "torch_compile": "train.compile", "evals_per_epoch": "train.eval_every", "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every", "activation_offloading": "parallel.offload", "deepspeed": "parallel.strategy",
    "fsdp": "parallel.strategy", "fsdp_config": "parallel.strategy", "fsdp_version": "parallel.strategy",
    "dp_shard_size": "parallel.strategy", "dp_replicate_size": "parallel.strategy",
    "tensor_parallel_size": "parallel.tensor", "context_parallel_size": "parallel.sequence",
    "sequence_parallel_degree": "parallel.sequence", "expert_parallel_size": "parallel.expert",
    "ddp_find_unused_parameters": "parallel.find_unused_parameters", "ddp_timeout": "parallel.timeout",
    "saves_per_epoch": "checkpoint.every", "save_steps": "checkpoint.every", "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "resume_from_checkpoint": "checkpoint.resume",
    "auto_resume_from_checkpoints": "checkpoint.resume", "logging_steps": "log.every", "output_dir": "output",
    "rl": "stage", "rl_beta": "stage.beta", "dpo_label_smoothing": "stage.label_smoothing", "trl": "rl",
    "reward_model": "stage: reward", "micro_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.global_batch",
    **dict.fromkeys(("wandb_project", "use_wandb", "use_tensorboard", "use_mlflow", "mlflow_tracking_uri",
                     "use_swanlab", "swanlab_project", "trackio_project_name", "use_trackio"), "log.to"),
}  # fmt: skip
# By why. Beginnings of names that end in _.
_NEEDLESS: dict[str, tuple[str, ...]] = {
    "the fastest exact way that is there is used": (
        "attn_implementation", "flash_attention", "sdp_attention", "xformers_attention", "flash_attn_", "flex_", "tf32",
        "liger_", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_kernels", "experts_implementation",
        "use_scattermoe", "use_sonicmoe", "cut_cross_entropy", "gradient_checkpointing_kwargs", "torch_compile_",
        "fused_attn_kernel",
    ),
    "padding and grouping change no result": (
        "pad_to_sequence_len", "eval_sample_packing", "group_by_length", "eval_batch_size", "sample_packing_",
    ),
    "data are read, tokenized and kept by their content": (
        "dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataloader_", "remove_unused_columns",
        "skip_prepare_dataset", "dataset_exact_deduplication", "shuffle_merged_datasets", "streaming_",
    ),
    "the model's folder says it": ("model_type", "tokenizer_type", "processor_type", "tokenizer_use_", "is_"),
    "of the tracker: its variables (WANDB_NAME, ...) mean what they mean": (
        "wandb_", "mlflow_", "swanlab_", "trackio_", "comet_", "use_comet",
    ),
    "of the program there": (
        "strict", "plugins", "debug", "save_only_model", "save_safetensors", "experimental_", "torchdistx_path",
        "max_packed_sequence_len", "push_dataset_to_hub", "lora_fan_in_fan_out",
    ),
}  # fmt: skip
_ABSENT: dict[str, tuple[str, ...]] = {
    "the base under adapters is packed into 4 bits, or not": (
        "load_in_8bit", "gptq", "gptq_", "bnb_config_kwargs", "model_quantization_", "quantize_moe_experts", "qat",
    ),
    "of LoRA's variants duoka has the plain one, LoRA+, rank-stabilised and PiSSA": (
        "lora_modules_to_save", "lora_target_parameters", "peft_use_dora", "peft_layers_to_transform", "lora_on_cpu",
        "relora", "relora_",
    ),
    "a tokenizer is used as it came": (
        "special_tokens", "tokens", "added_tokens_overrides", "eot_tokens", "resize_token_embeddings_",
    ),
    "it would change the result, and duoka has nothing like it": (
        "neftune_noise_alpha", "noisy_embedding_alpha", "early_stopping_patience", "curriculum_sampling", "ebft",
        "loss_watchdog_", "cosine_constant_lr_ratio", "lr_groups", "lr_quadratic_warmup", "model_config",
        "overrides_of_", "kd_", "diffusion", "num_labels", "mixed_", "process_reward_model",
    ),
}  # fmt: skip
_WRITE = (
    "adapter: qlora is   lora: {rank: 16}   with   model: {name: ..., quantization: nf4}\n"
    "train.global_batch is micro_batch_size x gradient_accumulation_steps x processes; train.micro_batch changes no "
    "result"
)


def refuse_axolotl(tree: Tree) -> Fault | None:
    signs = [key for key in tree.value if key in _SIGNS]
    if _FIRST not in tree.value or not signs or "model_name_or_path" in tree.value:
        return None
    what = f"this is a file of Axolotl ({_FIRST}, {', '.join(signs[:2])}), which duoka does not read"
    fix = "\n".join(["write it in duoka's own words (duoka init x.yaml begins one):", *_told(tree), _WRITE])
    first: Tree = tree.value[_FIRST]
    return first.place.fault(what, key=_FIRST, fix=fix)


def _told(tree: Tree) -> list[str]:
    """Every key of the file that says something, once."""
    ours: dict[str, str] = {}
    absent: dict[str, list[str]] = {}
    needless, unknown = [], []
    rows = llamafactory().rows
    for key, value in tree.value.items():
        row, is_off = rows.get(key), value.plain_value() is False
        if is_none(value.plain_value()):
            continue
        if key in OURS and is_off and ": " in OURS[key]:
            needless.append(key)
        elif key in OURS:
            ours[key] = OURS[key]
        elif (why := _why(key, _ABSENT)) is not None:
            needless.append(key) if is_off else absent.setdefault(why, []).append(key)
        elif _why(key, _NEEDLESS) is not None:
            needless.append(key)
        elif row is not None and row.state == "refused" and not asks_for_nothing(value.plain_value(), row.off):
            absent.setdefault(row.note, []).append(key)
        elif row is not None and row.state != "implemented":
            needless.append(key)
        else:
            unknown.append(key)
    pairs = [f"{key} is {name}" for key, name in ours.items()]
    lines = [", ".join(pairs[at : at + 4]) for at in range(0, len(pairs), 4)]
    lines += [f"not there: {', '.join(keys)} ({why})" for why, keys in absent.items()]
    lines += [f"needless here: {', '.join(needless)}"] if needless else []
    lines += [f"not known here: {', '.join(unknown)}"] if unknown else []
    return lines


def _why(key: str, table: dict[str, tuple[str, ...]]) -> str | None:
    for why, names in table.items():
        if any(key == name or (name.endswith("_") and key.startswith(name)) for name in names):
            return why
    return None
