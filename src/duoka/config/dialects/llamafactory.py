"""LLaMA-Factory's flat YAML: what becomes of every key of its own and of the transformers arguments beside them.

Rows with a meaning here stand in this file; llamafactory_rest.py has those that are only reported or refused. The
page docs/llamafactory.md is made from both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects import llamafactory_convert as to
from duoka.config.dialects import llamafactory_learning as learn
from duoka.config.dialects import llamafactory_lora as lora
from duoka.config.dialects.llamafactory_ppo import ppo_rows
from duoka.config.dialects.llamafactory_rest import rest_rows
from duoka.config.dialects.llamafactory_stages import pref_rows
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    batch_answer,
    implemented,
    names_of,
    only_if_on,
    reported,
    switch,
    table,
    timeout_answer,
    unless_none,
    whole,
    words,
)

_SIGNS = ("model_name_or_path", "finetuning_type", "per_device_train_batch_size", "cutoff_len", "lora_target")
_OUR_BLOCKS = ("data", "lora", "optim", "train", "parallel", "checkpoint", "log")
# What other trainers call its keys; by their letters alone some are nearest to a key of quite another meaning.
_MEANT = {
    **dict.fromkeys(("max_seq_length", "max_seq_len", "model_max_length", "sequence_len", "seq_length", "seq_len",
                     "block_size"), "cutoff_len"),
    **dict.fromkeys(("dataset_name", "datasets", "train_file", "dataset_path"), "dataset"),
    **dict.fromkeys(("lora_r", "r"), "lora_rank"),
    **dict.fromkeys(("lora_target_modules", "target_modules"), "lora_target"),
    **dict.fromkeys(("num_epochs", "epochs"), "num_train_epochs"),
    **dict.fromkeys(("val_set_size", "test_size"), "val_size"),
    **dict.fromkeys(("batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    "base_model": "model_name_or_path", "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "sample_packing": "packing", "train_on_inputs": "train_on_prompt", "beta": "pref_beta", "loss_type": "pref_loss",
    "attn_implementation": "flash_attn", "use_peft": "finetuning_type: lora", "load_in_4bit": "quantization_bit: 4",
}  # fmt: skip
_WARMUP = "step s of n has s/n of the rate; transformers' (s-1)/n lets the first step learn nothing"


def _rows_of_model_and_data() -> list[Row]:
    return [
        *implemented("model_name_or_path", "model.name"),
        *implemented("model_revision", "model.revision", to.revision),
        *switch("trust_remote_code", "model.trust_remote_code"),
        *switch("train_from_scratch", "model.from_scratch"),
        *implemented("template", "model.template", to.template, "chatml by name; others: what the model ships"),
        *ppo_rows(),
        *implemented("finetuning_type", "lora", to.kind, "lora, full or freeze; oft is refused"),
        *implemented("freeze_trainable_layers", "train_only.layers", to.of_freeze(to.layers)),
        *implemented(
            "freeze_trainable_modules", "train_only.modules", to.of_freeze(to.modules("freeze_trainable_modules"))
        ),
        *implemented("freeze_extra_modules", "train_only.extra", to.of_freeze(names_of("freeze_extra_modules"))),
        *switch("use_llama_pro", "train_only.spread", to.spread, "the layers lie evenly over the model"),
        *implemented(
            "adapter_name_or_path", "lora.adapter", lora.earlier, "the last goes on, those before it are lora.merge"
        ),
        *switch("create_new_adapter", "lora.merge", lora.new_adapter, "all that are named are merged first"),
        *implemented("lora_rank", "lora.rank", lora.of_new_lora()),
        *implemented("lora_alpha", "lora.alpha", lora.of_new_lora(lora.alpha), "left out: twice the rank, as there"),
        *switch("use_rslora", "lora.alpha", lora.of_new_lora(lora.rslora), "alpha x sqrt(rank) in the plain form"),
        *implemented("loraplus_lr_ratio", "lora.b_lr_ratio", lora.of_lora(), "LoRA+"),
        *switch("pissa_init", "lora.init", lora.of_lora(only_if_on("lora.init", "pissa"))),
        *implemented(
            "pissa_iter", "lora.pissa_iterations", lora.of_lora(lora.pissa_rounds), "-1: the whole decomposition"
        ),
        *implemented(
            "quantization_bit", "model.quantization", lora.bits, "4 with bnb, under adapters; others are refused"
        ),
        *implemented("quantization_type", "model.quantization", lora.of_bits(lora.packed_kind)),
        *implemented("quantization_method", "", lora.of_bits(lora.packer), "bnb; other packers are refused"),
        *switch("double_quantization", "model.double_quantization", lora.of_bits(None)),
        *implemented("lora_dropout", "lora.dropout", lora.of_new_lora(lora.dropout), "off in preference stages"),
        *implemented("lora_target", "lora.targets", lora.of_new_lora(to.modules("lora_target"))),
        *implemented("dataset", "data.train", to.data_sets("dataset")),
        *implemented("eval_dataset", "data.eval", to.eval_sets),
        *implemented("val_size", "data.eval", to.share, "a share; a number of samples is refused"),
        *implemented("max_samples", "data.train", to.limit, "of every data set"),
        *implemented("dataset_dir", "data.folder", to.folder),
        *switch(
            "packing",
            "data.packing",
            to.packing,
            "samples never see each other; a batch counts packed rows",
        ),
        *switch("neat_packing", "data.packing", only_if_on("data.packing", True)),
        *switch("train_on_prompt", "data.targets", to.targets),
        *switch("mask_history", "data.targets", to.targets),
        *implemented("preprocessing_num_workers", "data.workers", unless_none),
    ]


def _rows_of_training() -> list[Row]:
    return [
        *implemented("learning_rate", "optim.lr"),
        *implemented("optim", "optim.name", learn.optimizer, "AdamW's names; others are refused"),
        *switch("use_muon", "optim.name", learn.muon, "their scale of a step: optim.muon_scale adamw"),
        *switch("use_dft_loss", "train.loss", only_if_on("train.loss", "dft")),
        *implemented("lr_scheduler_type", "optim.schedule", learn.schedule),
        Row("lr_scheduler_kwargs", "implemented", "optim.min_lr", "with cosine_with_min_lr", learn.schedule_extra,
            parts=("min_lr_rate", "min_lr")),
        *implemented("warmup_ratio", "optim.warmup", learn.warmup, _WARMUP),
        *implemented("warmup_steps", "optim.warmup", learn.warmup, _WARMUP),
        *implemented("weight_decay", "optim.weight_decay"),
        *implemented("max_grad_norm", "optim.clip"),
        *implemented("label_smoothing_factor", "train.label_smoothing"),
        *implemented("moe_aux_loss_coef", "train.router_aux_loss"),
        *implemented("adam_beta1", "optim.betas", learn.betas),
        *implemented("adam_beta2", "optim.betas", learn.betas),
        *implemented("adam_epsilon", "optim.eps"),
        *implemented("num_train_epochs", "train.epochs", learn.epochs),
        *implemented("max_steps", "train.max_steps", learn.steps),
        *implemented(learn.BATCH[0], "train.global_batch", learn.batch),
        *implemented(learn.BATCH[1], "train.global_batch", learn.batch),
        *implemented("accelerator_config", "", learn.loader, "split_batches is refused: a batch is said per device"),
        *switch("bf16", "train.precision", learn.precision),
        *switch("fp16", "train.precision", learn.precision, "auto where there is no GPU"),
        *switch("pure_bf16", "train.precision", _pure_bf16, "with full fine-tuning by AdamW train.weights too"),
        *switch("fp8", "train.precision", learn.precision, "products of the layers; all else as bf16"),
        *switch("disable_gradient_checkpointing", "train.recompute", only_if_on("train.recompute", "none")),
        *switch("gradient_checkpointing", "train.recompute", learn.recompute),
        *switch("activation_checkpointing", "train.recompute", learn.recompute),
        *implemented("seed", "train.seed"),
        *implemented("data_seed", "train.seed", learn.data_seed, "another one than seed is refused"),
        *switch("enable_thinking", "model.template", to.thinking, "off is refused where a model would think"),
        *switch("preserve_thinking", "model.template", to.old_thoughts, "on is refused where a model would think"),
        *switch("torch_compile", "train.compile", only_if_on("train.compile", True)),
        *implemented("fsdp", "parallel.strategy", to.fsdp, "its words; offload is parallel.offload params"),
        *implemented("eval_steps", "train.eval_every", to.often("eval_steps", "train.eval_every")),
        *implemented("eval_strategy", "train.eval_every", to.often("eval_steps", "train.eval_every")),
        *implemented("evaluation_strategy", "train.eval_every", to.often("eval_steps", "train.eval_every")),
        *implemented("save_steps", "checkpoint.every", to.often("save_steps", "checkpoint.every")),
        *implemented("save_strategy", "checkpoint.every", to.often("save_steps", "checkpoint.every")),
        *implemented("save_total_limit", "checkpoint.keep", unless_none),
        *implemented("resume_from_checkpoint", "checkpoint.resume", to.resume),
        *implemented("logging_steps", "log.every", to.log_every),
        *implemented("report_to", "log.to", to.trackers),
        *implemented("output_dir", "output"),
        *implemented("ddp_timeout", "parallel.timeout", lambda v, a: timeout_answer(v, "ddp_timeout"), "at most a day"),
        *implemented("ddp_backend", "parallel.backend", words("ddp_backend", {"nccl": "nccl", "gloo": "gloo"})),
        *switch("ddp_find_unused_parameters", "parallel.find_unused_parameters", unless_none),
        *implemented("ddp_bucket_cap_mb", "parallel.bucket_mb", unless_none),
        *switch("ddp_static_graph", "parallel.static_graph", unless_none),
        Row("deepspeed", "implemented", "parallel.strategy", "its own keys: see the page's end", opens="deepspeed"),
        *switch("do_train", "", to.do_train, "what duoka train does; false is refused"),
        *reported(
            "a run folder is never overwritten: the same command goes on with it, another config is refused",
            "overwrite_output_dir",
        ),
    ]  # fmt: skip


def _defaults(asked: Asked) -> Mapping[str, Any]:
    """What LLaMA-Factory does where a file is silent, as far as it changes the result."""
    out: dict[str, Any] = {
        "data.max_length": 2048, "optim.lr": 5e-5, "optim.schedule": "linear", "optim.warmup": 0.0, "train.epochs": 3.0,
    }  # fmt: skip
    with contextlib.suppress(Refusal):  # of cutoff_len, which its own row says
        out |= batch_answer(8, 1, asked, learn.BATCH).values
    if not any(asked.is_on(name) for name in learn.PRECISIONS):
        out["train.precision"] = "fp32"
    if lora.is_lora(asked) and not lora.goes_on(asked):  # which has its own
        rank = _rank(asked)
        out |= {"lora.rank": 8, "lora.alpha": 2.0 * rank, "lora.dropout": 0.0, "lora.targets": "all"}
    if to.is_freeze(asked):
        out |= {"train_only.layers": 2, "train_only.modules": "all"}
    return out


def _pure_bf16(value: Any, asked: Asked) -> Any:
    """Its weights have no fp32 masters; ours then round their steps at random, which AdamW alone does."""
    answer = learn.precision(value, asked)
    own_optimizer = str(asked.get("optim", "adamw_torch")) in learn.PLAIN_ADAMW and not asked.is_on("use_muon")
    elsewhere = bool(asked.get("deepspeed")) or "offload" in str(asked.get("fsdp", ""))
    if not asked.is_on("pure_bf16") or lora.is_lora(asked) or not own_optimizer or elsewhere:
        return answer
    note = "weights, gradients and AdamW's moments are bf16, and steps are rounded at random"
    return Answer({"train.precision": "bf16", "train.weights": "bf16"}, note)


def _rank(asked: Asked) -> int:
    try:
        return whole(asked.get("lora_rank", 8), "lora_rank")
    except Refusal:  # which the key's own row says
        return 8


def _fits(top: Mapping[str, Any]) -> bool:
    if any(isinstance(top.get(block), dict) for block in ("model", *_OUR_BLOCKS)):
        return False
    return any(sign in top for sign in _SIGNS)


@cache
def llamafactory() -> Dialect:
    rows = table(_rows_of_model_and_data(), _rows_of_training(), pref_rows(), rest_rows())
    return Dialect("llamafactory", "LLaMA-Factory", rows, _fits, _defaults, task=to.task_of, meant=_MEANT)
