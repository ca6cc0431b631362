"""How other trainers spell duoka's keys, so that an unknown key gets the right advice instead of a guess.

`unknown.py` looks names up here. This is advice for files in duoka's own words, where every one of these is refused;
files that are wholly another tool's are translated by dialects/, whose tables this advice comes from too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from duoka.config.catalog import known_keys
from duoka.config.dialects.all import dialects
from duoka.config.dialects.rows import Row
from duoka.config.dialects.trl import trl_words
from duoka.config.foreign_axes import FLAGS


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
_SOME_LAYERS = Foreign(("train.recompute",), "a share of the layers: 1/2 is every second one", write="1/2")
_ADAPTERS = Foreign(("lora",), "with a lora block adapters are trained, without one all weights", "{rank: 8}")
_RANKS = Foreign((), "the number of processes is no part of the config: duoka train CONFIG --nproc N")
_SHARDED = Foreign(("parallel.strategy",), "duoka chooses its own strategies", write="auto")
_QUANTISED = Foreign(("model.quantization",), "the frozen base under adapters can be packed into 4 bits", write="nf4")
_NEEDLESS = Foreign((), "duoka needs no such key")
_ALWAYS_SAFE = Foreign((), "a run folder is never overwritten: it is resumed, or another output is given")

# Names that no dialect's table has, and those whose advice needs a value that is not the user's own.
_SPECIAL: dict[str, Foreign] = {
    **_same("model.name", "model_name", "model_path", "base_model", "model_id", "pretrained_model"),
    **_same("model.name", "model.path", "model.id", "model.folder", "model.repo"),  # these words in this block only
    **_same("data.train", "data.path", "data.file", "data.files", "data.dataset"),
    **_same("data.train.name", "data.train.path", "data.train.file", "data.train.data_files", "data.train.dataset"),
    "data.train.format": Foreign((), "duoka sees a record's format by its fields"),
    **_same("data.eval.name", "data.eval.path", "data.eval.file", "data.eval.data_files", "data.eval.dataset"),
    "data.eval.format": Foreign((), "duoka sees a record's format by its fields"),
    **{flag.name: Foreign((flag.key,) if flag.key else (), flag.note, flag.write) for flag in FLAGS},
    **_same("parallel.layout", "layout"),
    **_same("parallel.tensor", "tensor_parallel_size", "tp_degree", "tp"),
    **_same("parallel.pipeline", "pipeline_parallel_size", "pp_degree", "pp"),
    **_same("parallel.sequence", "sequence_parallel_size", "cp_size", "cp_degree", "sp"),
    **_same("model.tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    **_same("model.template", "chat_template"),
    **_same("stage.name", "task", "method", "training_type"),
    **_same("stage.desirable_weight", "kto_chosen_weight"),
    **_same("stage.undesirable_weight", "kto_rejected_weight"),
    **_same("stage.beta", "pref_beta", "kto_beta", "dpo_beta"),
    **_same("data.train", "datasets", "train_dataset", "train_file", "train_data", "train_split"),
    **_same("data.eval", "val_set_size", "eval_file", "eval_split", "validation_split"),
    **_same("data.eval", "eval_size", "test_size", "valid", "validation", "val"),
    **_same("data.folder", "data_dir", "data_path"),
    **_same("data.max_length", "max_seq_length", "sequence_len", "model_max_length"),
    **_same("data.max_length", "seq_len", "seq_length", "sequence_length", "block_size", "context_length"),
    **_same("data.packing", "sample_packing", "padding_free"),
    **_same("data.workers", "num_workers", "dataset_num_proc", "num_proc"),
    "train_on_prompt": Foreign(("data.targets",), write="all"),
    "train_on_inputs": Foreign(("data.targets",), write="all"),
    "mask_history": Foreign(("data.targets",), write="last"),
    **_same("lora.rank", "lora_r", "lora_dim", "r"),
    **_same("lora.targets", "lora_target_modules", "target_modules", "lora_targets"),
    "finetuning_type": _ADAPTERS,
    "adapter": _ADAPTERS,
    "adapter_name_or_path": Foreign(("lora.adapter",)),
    **_same("lora.merge", "adapters", "base_adapters"),
    "peft": Foreign(("lora",), write="{rank: 8}"),
    **_same("optim.lr", "max_lr", "peak_lr"),
    **_same("optim.name", "optimizer", "optimizer_type", "optimizer"),
    **_same("optim.schedule", "lr_scheduler", "scheduler", "lr_schedule"),
    **_same("optim.warmup", "num_warmup_steps", "lr_warmup_steps"),
    **_same("optim.min_lr", "min_lr_ratio", "min_lr_rate", "cosine_min_lr_ratio"),
    **_same("optim.clip", "grad_clip", "gradient_clip_val", "clip_grad_norm"),
    **_same("optim.weight_decay", "wd", "decay"),
    "adam_beta1": Foreign(("optim.betas",), write="[0.9, 0.999]"),
    "adam_beta2": Foreign(("optim.betas",), write="[0.9, 0.999]"),
    **_same("optim.eps", "epsilon"),
    **_same("train.epochs", "num_epochs", "n_epochs"),
    **_same("train.max_steps", "total_steps", "num_steps", "max_train_steps", "train_steps", "max_iters"),
    **_same("train.global_batch", "global_batch_size", "batch_size", "total_batch_size", "batch"),
    **_same("train.micro_batch", "micro_batch_size", "device_batch_size"),
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
    "fp8": Foreign(("train.precision",), write="fp8", write_if_false="auto"),
    **_same("train.precision", "mixed_precision", "dtype", "torch_dtype", "compute_dtype", "amp"),
    "gradient_checkpointing": Foreign(("train.recompute",), write="full", write_if_false="none"),
    "activation_checkpointing": Foreign(("train.recompute",), write="full", write_if_false="none"),
    "disable_gradient_checkpointing": Foreign(("train.recompute",), write="none", write_if_false="auto"),
    **dict.fromkeys(("selective_ac_option", "selective_checkpointing", "every_n_layers", "ac_freq"), _SOME_LAYERS),
    **_same("train.seed", "random_seed", "data_seed"),
    **_same("train.eval_every", "evaluation_interval", "eval_interval", "val_check_interval"),
    "eval_strategy": Foreign(("train.eval_every",), write="1 epoch"),
    "evaluation_strategy": Foreign(("train.eval_every",), write="1 epoch"),
    **_same("checkpoint.every", "save_interval", "checkpoint_interval", "save_every"),
    "save_strategy": Foreign(("checkpoint.every",), write="1 epoch"),
    **_same("checkpoint.keep", "max_checkpoints", "keep_last"),
    **_same("checkpoint.resume", "resume_from", "resume_path"),
    **_same("log.every", "log_interval", "log_every", "print_every"),
    **_same("log.to", "logger", "loggers", "tracker"),
    **_same("output", "out_dir", "save_dir", "run_name", "run_dir", "output_path"),
    "logging_dir": Foreign((), "logs and TensorBoard files lie in the run folder"),
    "overwrite_output_dir": _ALWAYS_SAFE,
    "overwrite": _ALWAYS_SAFE,
    **_same("parallel.timeout", "nccl_timeout"),
    **_same("parallel.backend", "dist_backend"),
    **_same("parallel.strategy", "ddp_strategy"),
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    **dict.fromkeys(("nproc", "nproc_per_node", "num_processes", "num_gpus", "gpus", "world_size", "devices"), _RANKS),
    **dict.fromkeys(("quantization_bit", "load_in_4bit", "load_in_8bit", "quantization"), _QUANTISED),
    **dict.fromkeys(("do_train", "do_eval", "remove_unused_columns", "dataloader_num_workers"), _NEEDLESS),
}


@cache
def foreign_names() -> dict[str, Foreign]:
    """Every name from elsewhere: the dialects' rows, and what they lack."""
    ours = {key.rpartition(".")[2] for key in known_keys()}
    out: dict[str, Foreign] = {}
    for dialect in dialects().values():
        for row in dialect.rows.values():
            if "." not in row.name and row.name not in ours and row.name not in out:
                out[row.name] = _advice_of(row)
        for shown, name in dialect.rename.items():
            last = shown.rpartition(".")[2]
            if last not in ours and last not in out:
                out[last] = _advice_of(dialect.rows[name])
    for word, (key, note) in trl_words().items():
        if word not in ours and word not in out and word not in known_keys():
            out[word] = Foreign((key,) if key else (), note)
    return {**out, **_SPECIAL}


def _advice_of(row: Row) -> Foreign:
    if row.state == "implemented" and row.key in known_keys():
        return Foreign((row.key,))
    return Foreign((), row.note or "duoka needs no such key")


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
