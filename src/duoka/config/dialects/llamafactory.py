"""LLaMA-Factory's flat YAML: what becomes of every key of its own and of the transformers arguments beside them.

Rows with a meaning here stand in this file; llamafactory_rest.py has those that are only reported or refused. The
page docs/llamafactory.md is made from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects.llamafactory_rest import TEMPLATES, rest_rows
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    asks_for_nothing,
    batch_answer,
    comma_list,
    implemented,
    is_none,
    is_true,
    number,
    only_if_on,
    reported,
    table,
    timeout_answer,
    unless_none,
    whole,
    words,
)
from duoka.registry import nearest

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SIGNS = ("model_name_or_path", "finetuning_type", "per_device_train_batch_size", "cutoff_len", "lora_target")
_OUR_BLOCKS = ("data", "lora", "optim", "train", "parallel", "checkpoint", "log")


def is_lora(asked: Asked) -> bool:
    """Whether adapters are trained: LLaMA-Factory's default; in the nested form only when something says so."""
    kind = asked.get("finetuning_type")
    if kind is not None:
        return str(kind).lower() == "lora"
    if asked.flavour == "nested":
        return any(name.startswith("lora_") or name == "adapter" for name in asked.values)
    return True


def _kind(value: Any, asked: Asked) -> Any:
    kind = words("finetuning_type", {"lora": "lora", "full": "full", "freeze": "freeze", "oft": "oft"})(value, asked)
    if kind in ("freeze", "oft"):
        raise Refusal(f"finetuning_type {kind} is not there yet", "write:   finetuning_type: lora   or full")
    return Answer()  # what lora means is in the defaults; full has no such block


def _of_lora(convert: Any = None) -> Any:
    def run(value: Any, asked: Asked) -> Any:
        if not is_lora(asked):
            return Answer(note="of no use here: finetuning_type is full")
        if is_none(value):
            return Answer()
        return convert(value, asked) if convert else value

    return run


def _modules(value: Any, asked: Asked) -> Any:
    return "all" if value in ("all", ["all"]) else comma_list(value, asked)


def _template(value: Any, asked: Asked) -> Any:
    name = str(value).strip()
    if is_none(value):
        return Answer()
    if name not in TEMPLATES:
        guess = nearest(name, TEMPLATES)
        raise Refusal(
            f"there is no template {name}", f"did you mean {guess}?" if guess else "write:   template: default"
        )
    if name == "chatml":
        return name
    return Answer({"model.template": "auto"}, f"{name}: the chat template that the model ships is used")


def _data_sets(value: Any, asked: Asked) -> Any:
    names = comma_list(value, asked)
    most = asked.get("max_samples")
    limit = {} if is_none(most) else {"max_samples": whole(most, "max_samples")}
    return [{"name": name, **limit} for name in names]


def _eval_sets(value: Any, asked: Asked) -> Any:
    return Answer() if is_none(value) else Answer({"data.eval": _data_sets(value, asked)})


def _limit(value: Any, asked: Asked) -> Any:
    """max_samples has no key of its own here: `dataset` and `eval_dataset` take it along into every data set."""
    if not is_none(value):
        whole(value, "max_samples")
    return Answer()


def _share(value: Any, asked: Asked) -> Any:
    if is_none(value) or number(value, "val_size") == 0:
        return Answer()
    if number(value, "val_size") >= 1:
        raise Refusal(f"val_size {value} counts samples, and duoka splits off a share", "write:   val_size: 0.1")
    return float(value)


def _folder(value: Any, asked: Asked) -> Any:
    if str(value).startswith(("REMOTE:", "ONLINE")):
        raise Refusal(f"dataset_dir {value} lies on a hub, and duoka reads local files", "download it first")
    # LLaMA-Factory's default; written out it must not forbid the folder beside the YAML.
    return Answer() if str(value).rstrip("/") in ("data", "./data") else value


def _targets(value: Any, asked: Asked) -> Any:
    if asked.is_on("train_on_prompt") and asked.is_on("mask_history"):
        raise Refusal("train_on_prompt and mask_history exclude each other", "keep one of them")
    if asked.is_on("train_on_prompt"):
        return Answer({"data.targets": "all"})
    return Answer({"data.targets": "last"} if asked.is_on("mask_history") else {})


def _packing(value: Any, asked: Asked) -> Any:
    if is_none(value):
        return Answer()
    if not is_true(value):
        return Answer({} if asked.is_on("neat_packing") else {"data.packing": False})
    note = "" if asked.is_on("neat_packing") else "packed samples never see each other here (as with neat_packing)"
    return Answer({"data.packing": True}, note)


def _precision(value: Any, asked: Asked) -> Any:
    on = [name for name in ("bf16", "fp16", "pure_bf16") if asked.is_on(name)]
    if "fp16" in on and len(on) > 1:
        raise Refusal(f"{' and '.join(on)} are both on", "keep one of them")
    if not on:
        return Answer()
    if "pure_bf16" in on:
        return Answer({"train.precision": "bf16"}, "computed in bf16; the trained weights themselves stay in fp32")
    if on == ["fp16"] and not asked.start.has_gpu:
        return Answer({"train.precision": "auto"}, "no GPU here, and fp16 training needs one: train.precision is auto")
    return Answer({"train.precision": on[0]})


def _warmup(value: Any, asked: Asked) -> Any:
    if is_none(value) or str(asked.get("lr_scheduler_type")) == "constant":
        return Answer(note="" if is_none(value) else "lr_scheduler_type constant has no warm-up")
    steps = number(asked.get("warmup_steps", 0), "warmup_steps")
    return Answer({"optim.warmup": steps if steps > 0 else number(asked.get("warmup_ratio", 0), "warmup_ratio")})


def _schedule(value: Any, asked: Asked) -> Any:
    word = words(
        "lr_scheduler_type",
        {
            "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine",
        },
    )(value, asked)  # fmt: skip
    if value != "cosine_with_min_lr":
        return Answer({"optim.schedule": word, **({"optim.warmup": 0.0} if value == "constant" else {})})
    more = asked.get("lr_scheduler_kwargs", {})
    rate, least = more.get("min_lr_rate"), more.get("min_lr")
    if least is not None:
        rate = number(least, "min_lr") / number(asked.get("learning_rate", 5e-5), "learning_rate")
    if rate is None:
        raise Refusal("cosine_with_min_lr needs its end", "write:   lr_scheduler_kwargs: {min_lr_rate: 0.1}")
    return Answer({"optim.schedule": word, "optim.min_lr": number(rate, "min_lr_rate")})


def _schedule_extra(value: Any, asked: Asked) -> Any:
    if is_none(value) or asked.get("lr_scheduler_type") == "cosine_with_min_lr":
        return Answer()
    raise Refusal(
        "lr_scheduler_kwargs would change the schedule", "only cosine_with_min_lr takes min_lr_rate or min_lr"
    )


def _betas(value: Any, asked: Asked) -> Any:
    first, second = asked.get("adam_beta1", 0.9), asked.get("adam_beta2", 0.999)
    return Answer({"optim.betas": [number(first, "adam_beta1"), number(second, "adam_beta2")]})


def _optimizer(value: Any, asked: Asked) -> Any:
    plain = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
    if str(value) in plain:
        return "adamw"
    raise Refusal(f"optim {value} is not there yet", f"write:   optim: adamw_torch   (known: {', '.join(plain)})")


def _epochs(value: Any, asked: Asked) -> Any:
    return Answer(note="max_steps says how long") if _max_steps(asked) else value


def _max_steps(asked: Asked) -> int:
    steps = asked.get("max_steps", -1)
    return whole(steps, "max_steps") if number(steps, "max_steps") > 0 else 0


def _steps(value: Any, asked: Asked) -> Any:
    steps = _max_steps(asked)
    # There max_steps goes on past num_train_epochs, so an epoch must never end the run here.
    return Answer({"train.max_steps": steps, "train.epochs": float(steps)} if steps else {})


def _batch(value: Any, asked: Asked) -> Any:
    return batch_answer(asked.get(_BATCH[0], 8), asked.get(_BATCH[1], 1), asked, _BATCH)


def _often(name: str, key: str) -> Any:
    strategy_name = "save_strategy" if key == "checkpoint.every" else "eval_strategy"

    def convert(value: Any, asked: Asked) -> Any:
        strategy = str(asked.get(strategy_name, asked.get("evaluation_strategy", "steps"))).lower()
        if (
            key == "train.eval_every"
            and is_none(asked.get("eval_dataset"))
            and not number(asked.get("val_size", 0), "val_size")
        ):
            return Answer(note="there is no evaluation data")
        if strategy == "epoch":
            return Answer({key: "1 epoch"})
        if strategy == "no":
            kept = "the end is always saved" if key == "checkpoint.every" else "data that is held back is measured"
            return Answer(note=f"no: {kept}, and {key} keeps its default")
        if strategy == "best":
            raise Refusal(f"{strategy_name} best is not there yet", f"write:   {strategy_name}: steps")
        steps = asked.get(name)
        if is_none(steps):
            return Answer()
        if 0 < number(steps, name) < 1:
            raise Refusal(f"{name} {steps} is a share of all steps, and duoka counts steps", f"write:   {name}: 100")
        return Answer({key: whole(steps, name)})

    return convert


def _log_every(value: Any, asked: Asked) -> Any:
    if 0 < number(value, "logging_steps") < 1:
        return Answer(note=f"{value} is a share of all steps; a line is printed every 10, and all are recorded")
    return whole(value, "logging_steps")


def _trackers(value: Any, asked: Asked) -> Any:
    names = [name.lower() for name in comma_list(value, asked)]
    others = [name for name in names if name not in ("none", "all", "tensorboard")]
    ours = ["tensorboard"] if "tensorboard" in names or "all" in names else []
    note = f"{', '.join(others)} not there yet; the event log and the report have all numbers" if others else ""
    return Answer({"log.to": ours}, note)


def _resume(value: Any, asked: Asked) -> Any:
    if is_none(value) or is_true(value):
        return Answer({"checkpoint.resume": "auto"})
    return Answer({"checkpoint.resume": "never" if asks_for_nothing(value, ()) else str(value)})


def _revision(value: Any, asked: Asked) -> Any:
    return Answer() if is_none(value) or value == "main" else value


def _do_train(value: Any, asked: Asked) -> Any:
    if is_true(value) or is_none(value):
        return Answer(note="duoka train trains")
    raise Refusal("do_train is false, and duoka train trains", "delete do_train, or use duoka eval, chat or export")


def _recompute(value: Any, asked: Asked) -> Any:
    return Answer({"train.recompute": "full" if is_true(value) else "none"})


_STAGES = {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}


def _rows_of_model_and_data() -> list[Row]:
    return [
        *implemented("model_name_or_path", "model.name"),
        *implemented("model_revision", "model.revision", _revision),
        *implemented("trust_remote_code", "model.trust_remote_code"),
        *implemented("template", "model.template", _template, "chatml by name; others: what the model ships"),
        *implemented("stage", "stage", words("stage", _STAGES), "what has no stage here yet is refused"),
        *implemented("finetuning_type", "lora", _kind, "lora or full; freeze and oft are refused"),
        *implemented("lora_rank", "lora.rank", _of_lora()),
        *implemented("lora_alpha", "lora.alpha", _of_lora(), "left out: twice the rank, as there"),
        *implemented("lora_dropout", "lora.dropout", _of_lora()),
        *implemented("lora_target", "lora.targets", _of_lora(_modules)),
        *implemented("dataset", "data.train", _data_sets),
        *implemented("eval_dataset", "data.eval", _eval_sets),
        *implemented("val_size", "data.eval", _share, "a share; a number of samples is refused"),
        *implemented("max_samples", "data.train", _limit, "of every data set"),
        *implemented("dataset_dir", "data.folder", _folder),
        *implemented("cutoff_len", "data.max_length", note=""),
        *implemented("packing", "data.packing", _packing, "changes no result: samples never see each other"),
        *implemented("neat_packing", "data.packing", only_if_on("data.packing", True)),
        *implemented("train_on_prompt", "data.targets", _targets),
        *implemented("mask_history", "data.targets", _targets),
        *implemented("preprocessing_num_workers", "data.workers", unless_none),
    ]


def _rows_of_training() -> list[Row]:
    return [
        *implemented("learning_rate", "optim.lr"),
        *implemented("optim", "optim.name", _optimizer, "AdamW's names; others are refused"),
        *implemented("lr_scheduler_type", "optim.schedule", _schedule),
        *implemented("lr_scheduler_kwargs", "optim.min_lr", _schedule_extra, "with cosine_with_min_lr"),
        *implemented("warmup_ratio", "optim.warmup", _warmup),
        *implemented("warmup_steps", "optim.warmup", _warmup),
        *implemented("weight_decay", "optim.weight_decay"),
        *implemented("max_grad_norm", "optim.clip"),
        *implemented("adam_beta1", "optim.betas", _betas),
        *implemented("adam_beta2", "optim.betas", _betas),
        *implemented("adam_epsilon", "optim.eps"),
        *implemented("num_train_epochs", "train.epochs", _epochs),
        *implemented("max_steps", "train.max_steps", _steps),
        *implemented(_BATCH[0], "train.global_batch", _batch),
        *implemented(_BATCH[1], "train.global_batch", _batch),
        *implemented("bf16", "train.precision", _precision),
        *implemented("fp16", "train.precision", _precision, "auto where there is no GPU"),
        *implemented("pure_bf16", "train.precision", _precision),
        *implemented("disable_gradient_checkpointing", "train.recompute", only_if_on("train.recompute", "none")),
        *implemented("gradient_checkpointing", "train.recompute", _recompute),
        *implemented("activation_checkpointing", "train.recompute", _recompute),
        *implemented("seed", "train.seed"),
        *implemented("eval_steps", "train.eval_every", _often("eval_steps", "train.eval_every")),
        *implemented("eval_strategy", "train.eval_every", _often("eval_steps", "train.eval_every")),
        *implemented("evaluation_strategy", "train.eval_every", _often("eval_steps", "train.eval_every")),
        *implemented("save_steps", "checkpoint.every", _often("save_steps", "checkpoint.every")),
        *implemented("save_strategy", "checkpoint.every", _often("save_steps", "checkpoint.every")),
        *implemented("save_total_limit", "checkpoint.keep", unless_none),
        *implemented("resume_from_checkpoint", "checkpoint.resume", _resume),
        *implemented("logging_steps", "log.every", _log_every),
        *implemented("report_to", "log.to", _trackers),
        *implemented("output_dir", "output"),
        *implemented("ddp_timeout", "parallel.timeout", lambda v, a: timeout_answer(v, "ddp_timeout"), "at most a day"),
        *implemented("ddp_backend", "parallel.backend", words("ddp_backend", {"nccl": "nccl", "gloo": "gloo"})),
        *implemented("ddp_find_unused_parameters", "parallel.find_unused_parameters", unless_none),
        Row("deepspeed", "implemented", "parallel.strategy", "its own keys: see the page's end", opens="deepspeed"),
        *implemented("do_train", "", _do_train, "what duoka train does; false is refused"),
        *reported(
            "a run folder is never overwritten: the same command goes on with it, another config is refused",
            "overwrite_output_dir",
        ),
    ]  # fmt: skip


def _defaults(asked: Asked) -> Mapping[str, Any]:
    """What LLaMA-Factory does where a file is silent, as far as it changes the result."""
    out: dict[str, Any] = {
        "data.max_length": 2048, "optim.lr": 5e-5, "optim.schedule": "linear", "optim.warmup": 0.0,
        "train.epochs": 3.0, "train.global_batch": 8 * asked.start.num_ranks, "train.micro_batch": 8,
    }  # fmt: skip
    if not any(asked.is_on(name) for name in ("bf16", "fp16", "pure_bf16")):
        out["train.precision"] = "fp32"
    if is_lora(asked):
        rank = number(asked.get("lora_rank", 8), "lora_rank") if _is_number(asked.get("lora_rank", 8)) else 8
        out |= {"lora.rank": 8, "lora.alpha": 2.0 * rank, "lora.dropout": 0.0, "lora.targets": "all"}
    return out


def _is_number(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def _fits(top: Mapping[str, Any]) -> bool:
    if any(isinstance(top.get(block), dict) for block in ("model", *_OUR_BLOCKS)):
        return False
    return any(sign in top for sign in _SIGNS)


@cache
def llamafactory() -> Dialect:
    rows = table(_rows_of_model_and_data(), _rows_of_training(), rest_rows())
    return Dialect("llamafactory", "LLaMA-Factory", rows, _fits, _defaults)
