"""How other trainers spell duoka's keys, so that an unknown key gets the right advice instead of a guess.

`unknown.py` looks names up here. This is advice only: nothing is translated, every one of these is still refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """One name from elsewhere. `keys` are duoka's, the first one is shown with a value."""

    keys: tuple[str, ...]
    note: str = ""
    write: str = ""  # the value to write for true (or for anything); "" keeps the user's
    write_if_false: str = ""  # the value to write for false; "" means: leave the key out


def _same(key: str, *names: str) -> dict[str, Foreign]:
    return dict.fromkeys(names, Foreign((key,)))


_PER_DEVICE = Foreign(
    ("train.global_batch", "train.micro_batch"),
    "global_batch is what all ranks learn from in one step; micro_batch is what one rank computes at once",
)
_ACCUMULATION = Foreign(
    ("train.global_batch",),
    "accumulation follows from global_batch, micro_batch and the number of ranks; write the product",
    write="16",
)
_ADAPTERS = Foreign(("lora",), "with a lora block adapters are trained, without one all weights", "{rank: 8}")
_RANKS = Foreign((), "the number of processes is no part of the config: duoka train CONFIG --nproc N")
_SHARDED = Foreign(("parallel.strategy",), "duoka chooses its own strategies", write="auto")
_QUANTISED = Foreign((), "duoka does not train quantised models")
_NEEDLESS = Foreign((), "duoka needs no such key")
_ALWAYS_SAFE = Foreign((), "a run folder is never overwritten: it is resumed, or another output is given")

FOREIGN: dict[str, Foreign] = {
    **_same(
        "model.name", "model_name_or_path", "model_name", "model_path", "base_model", "model_id", "pretrained_model"
    ),
    **_same("model.tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    **_same("model.template", "chat_template"),
    **_same("model.revision", "model_revision"),
    **_same("stage", "task", "method", "training_type"),
    **_same("data.train", "dataset", "datasets", "train_dataset", "train_file", "train_data", "train_split"),
    **_same("data.eval", "val_size", "val_set_size", "eval_dataset", "eval_file", "eval_split", "validation_split"),
    **_same("data.eval", "eval_size", "test_size", "valid", "validation", "val"),
    **_same("data.folder", "dataset_dir", "data_dir", "data_path"),
    **_same("data.max_length", "cutoff_len", "max_seq_len", "max_seq_length", "sequence_len", "model_max_length"),
    **_same("data.max_length", "seq_len", "seq_length", "sequence_length", "block_size", "context_length"),
    **_same("data.packing", "neat_packing", "sample_packing", "padding_free"),
    **_same("data.workers", "preprocessing_num_workers", "num_workers", "dataset_num_proc", "num_proc"),
    "train_on_prompt": Foreign(("data.targets",), write="all"),
    "train_on_inputs": Foreign(("data.targets",), write="all"),
    "mask_history": Foreign(("data.targets",), write="last"),
    **_same("lora.rank", "lora_rank", "lora_r", "lora_dim", "r"),
    **_same("lora.alpha", "lora_alpha"),
    **_same("lora.dropout", "lora_dropout"),
    **_same("lora.targets", "lora_target", "lora_target_modules", "target_modules", "lora_targets"),
    "finetuning_type": _ADAPTERS,
    "adapter": _ADAPTERS,
    "adapter_name_or_path": _ADAPTERS,
    "peft": Foreign(("lora",), write="{rank: 8}"),
    **_same("optim.lr", "learning_rate", "max_lr", "peak_lr"),
    **_same("optim.name", "optimizer", "optimizer_type", "optimiser"),
    **_same("optim.schedule", "lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule"),
    **_same("optim.warmup", "warmup_ratio", "warmup_steps", "num_warmup_steps", "lr_warmup_steps"),
    **_same("optim.min_lr", "min_lr_ratio", "min_lr_rate", "cosine_min_lr_ratio"),
    **_same("optim.clip", "max_grad_norm", "grad_clip", "gradient_clipping", "gradient_clip_val", "clip_grad_norm"),
    **_same("optim.weight_decay", "wd", "decay"),
    "adam_beta1": Foreign(("optim.betas",), write="[0.9, 0.999]"),
    "adam_beta2": Foreign(("optim.betas",), write="[0.9, 0.999]"),
    **_same("optim.eps", "adam_epsilon", "epsilon"),
    **_same("train.epochs", "num_train_epochs", "num_epochs", "max_epochs", "n_epochs"),
    **_same("train.max_steps", "total_steps", "num_steps", "max_train_steps", "train_steps", "max_iters"),
    **_same("train.global_batch", "global_batch_size", "train_batch_size", "batch_size", "total_batch_size", "batch"),
    **_same("train.micro_batch", "micro_batch_size", "device_batch_size", "train_micro_batch_size_per_gpu"),
    "per_device_train_batch_size": _PER_DEVICE,
    "per_gpu_train_batch_size": _PER_DEVICE,
    "per_device_eval_batch_size": Foreign(("train.micro_batch",), "evaluation uses the same"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "fp16": Foreign(("train.precision",), write="fp16", write_if_false="auto"),
    "bf16": Foreign(("train.precision",), write="bf16", write_if_false="auto"),
    "pure_bf16": Foreign(("train.precision",), write="bf16", write_if_false="auto"),
    "fp32": Foreign(("train.precision",), write="fp32", write_if_false="auto"),
    **_same("train.precision", "mixed_precision", "dtype", "torch_dtype", "compute_dtype", "amp"),
    "gradient_checkpointing": Foreign(("train.recompute",), write="full", write_if_false="none"),
    "activation_checkpointing": Foreign(("train.recompute",), write="full", write_if_false="none"),
    "disable_gradient_checkpointing": Foreign(("train.recompute",), write="none", write_if_false="auto"),
    **_same("train.seed", "random_seed", "data_seed"),
    **_same("train.eval_every", "eval_steps", "evaluation_interval", "eval_interval", "val_check_interval"),
    "eval_strategy": Foreign(("train.eval_every",), write="1 epoch"),
    "evaluation_strategy": Foreign(("train.eval_every",), write="1 epoch"),
    **_same("checkpoint.every", "save_steps", "save_interval", "checkpoint_interval", "save_every"),
    "save_strategy": Foreign(("checkpoint.every",), write="1 epoch"),
    **_same("checkpoint.keep", "save_total_limit", "max_checkpoints", "keep_last"),
    **_same("checkpoint.resume", "resume_from_checkpoint", "resume_from", "resume_path"),
    **_same("log.every", "logging_steps", "log_interval", "log_every", "print_every"),
    **_same("log.to", "report_to", "logger", "loggers", "tracker"),
    **_same("output", "output_dir", "out_dir", "save_dir", "run_name", "run_dir", "output_path"),
    "logging_dir": Foreign((), "logs and TensorBoard files lie in the run folder"),
    "overwrite_output_dir": _ALWAYS_SAFE,
    "overwrite": _ALWAYS_SAFE,
    **_same("parallel.timeout", "ddp_timeout", "nccl_timeout"),
    **_same("parallel.find_unused_parameters", "ddp_find_unused_parameters"),
    **_same("parallel.bucket_view", "gradient_as_bucket_view"),
    **_same("parallel.backend", "ddp_backend", "dist_backend"),
    **_same("parallel.strategy", "type", "distributed_type", "ddp_strategy"),
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    **dict.fromkeys(("nproc", "nproc_per_node", "num_processes", "num_gpus", "gpus", "world_size", "devices"), _RANKS),
    **dict.fromkeys(("quantization_bit", "load_in_4bit", "load_in_8bit", "quantization"), _QUANTISED),
    **dict.fromkeys(("do_train", "do_eval", "remove_unused_columns", "dataloader_num_workers"), _NEEDLESS),
}

# Blocks that other trainers name otherwise: what stands in them is judged as if it stood in ours.
FOREIGN_SECTIONS: dict[str, str] = {
    "trainer": "train",
    "training": "train",
    "training_args": "train",
    "dataset": "data",
    "ddp": "parallel",
    "distributed": "parallel",
    "dist": "parallel",
    "optimizer": "optim",
    "optimiser": "optim",
    "peft": "lora",
    "logging": "log",
    "logger": "log",
    "checkpoints": "checkpoint",
    "checkpointing": "checkpoint",
    "saving": "checkpoint",
}
