"""LLaMA-Factory's values: for each key that means something here, what a value of it means.

The rows of llamafactory.py call these as `to.NAME`. A conversion answers with our value, or with our keys and a note,
or refuses with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duoka.config.dialects.llamafactory_rest import TEMPLATES
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Convert,
    Refusal,
    asks_for_nothing,
    comma_list,
    is_none,
    is_true,
    number,
    whole,
    words,
)
from duoka.config.trackers import TRACKERS, installed_trackers
from duoka.registry import nearest


def is_freeze(asked: Asked) -> bool:
    return str(asked.get("finetuning_type", "")).lower() == "freeze"


def kind(value: Any, asked: Asked) -> Any:
    kind = words("finetuning_type", {"lora": "lora", "full": "full", "freeze": "freeze", "oft": "oft"})(value, asked)
    if kind == "oft":
        raise Refusal("finetuning_type oft is not there yet", "write:   finetuning_type: lora, freeze or full")
    return Answer()  # what lora and freeze mean is in the defaults; full has no such block


def of_freeze(convert: Any) -> Any:
    """Keys that have a meaning under `finetuning_type: freeze` only."""

    def run(value: Any, asked: Asked) -> Any:
        if is_none(value):
            return Answer()
        if not is_freeze(asked):
            return Answer(note="of no use here: finetuning_type is not freeze")
        return convert(value, asked)

    return run


def layers(value: Any, asked: Asked) -> Any:
    layers = number(value, "freeze_trainable_layers")
    if layers != int(layers) or layers == 0:
        what = f"freeze_trainable_layers must be a whole number other than 0, got {value}"
        raise Refusal(what, "write:   freeze_trainable_layers: 2")
    return int(layers)


def spread(value: Any, asked: Asked) -> Any:
    if not value:
        return Answer()
    if not is_freeze(asked):
        raise Refusal("use_llama_pro trains whole layers", "write:   finetuning_type: freeze")
    return Answer({"train_only.spread": True})


def modules(name: str) -> Convert:
    return lambda value, asked: "all" if value in ("all", ["all"]) else comma_list(value, name)


def template(value: Any, asked: Asked) -> Any:
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


def data_sets(name: str) -> Convert:
    def convert(value: Any, asked: Asked) -> Any:
        names = comma_list(value, name)
        most = asked.get("max_samples")
        limit = {} if is_none(most) else {"max_samples": whole(most, "max_samples")}
        return [{"name": name, **limit} for name in names]

    return convert


def eval_sets(value: Any, asked: Asked) -> Any:
    return Answer() if is_none(value) else Answer({"data.eval": data_sets("eval_dataset")(value, asked)})


def limit(value: Any, asked: Asked) -> Any:
    """max_samples has no key of its own here: `dataset` and `eval_dataset` take it along into every data set."""
    if not is_none(value):
        whole(value, "max_samples")
    return Answer()


def share(value: Any, asked: Asked) -> Any:
    if is_none(value) or number(value, "val_size") == 0:
        return Answer()
    if number(value, "val_size") >= 1:
        raise Refusal(f"val_size {value} counts samples, and duoka splits off a share", "write:   val_size: 0.1")
    return float(value)


def folder(value: Any, asked: Asked) -> Any:
    if str(value).startswith(("REMOTE:", "ONLINE")):
        raise Refusal(f"dataset_dir {value} lies on a hub, and duoka reads local files", "download it first")
    # LLaMA-Factory's default; written out it must not forbid the folder beside the YAML.
    return Answer() if str(value).rstrip("/") in ("data", "./data") else value


def targets(value: Any, asked: Asked) -> Any:
    if asked.is_on("train_on_prompt") and asked.is_on("mask_history"):
        raise Refusal("train_on_prompt and mask_history exclude each other", "keep one of them")
    if asked.is_on("train_on_prompt"):
        return Answer({"data.targets": "all"})
    return Answer({"data.targets": "last"} if asked.is_on("mask_history") else {})


def packing(value: Any, asked: Asked) -> Any:
    if not value:
        return Answer({} if asked.is_on("neat_packing") else {"data.packing": False})
    note = "" if asked.is_on("neat_packing") else "packed samples never see each other here (as with neat_packing)"
    return Answer({"data.packing": True}, note)


def _best(name: str, asked: Asked) -> Any:
    metric = str(asked.get("metric_for_best_model", "loss"))
    if name != "save_strategy" or metric not in ("loss", "eval_loss"):
        raise Refusal(f"{name} best by {metric} is not there yet", f"write:   {name}: steps")
    if is_none(asked.get("eval_dataset")) and not number(asked.get("val_size", 0), "val_size"):
        raise Refusal("save_strategy best needs evaluation data", "write for example:   val_size: 0.1")
    return Answer({"checkpoint.keep_best": True}, "the newest checkpoints stay too, so that the run can go on")


_WHEN = {name: name for name in ("steps", "epoch", "no", "best")} | {"false": "no"}


def often(name: str, key: str) -> Any:
    strategy_names = ("save_strategy",) if key == "checkpoint.every" else ("eval_strategy", "evaluation_strategy")

    def convert(value: Any, asked: Asked) -> Any:
        given = {name: asked.get(name) for name in strategy_names if not is_none(asked.get(name))}
        meant = [words(name, _WHEN)(word, asked) for name, word in given.items()]
        if len(set(meant)) > 1:
            raise Refusal(f"{' and '.join(given)} contradict each other", "keep one of them", strategy_names[-1])
        strategy_name, strategy = next(iter(given), strategy_names[0]), meant[0] if meant else "steps"
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
            return _best(strategy_name, asked)
        steps = asked.get(name)
        if is_none(steps):
            return Answer()
        if 0 < number(steps, name) < 1:
            what = f"{name} {steps} is a share of all steps, and duoka counts steps"
            raise Refusal(what, f"write:   {name}: 100", name)
        return Answer({key: whole(steps, name)})

    return convert


def log_every(value: Any, asked: Asked) -> Any:
    if 0 < number(value, "logging_steps") < 1:
        return Answer(note=f"{value} is a share of all steps; a line is printed every 10, and all are recorded")
    return whole(value, "logging_steps")


def trackers(value: Any, asked: Asked) -> Any:
    names = [] if value is False else [name.lower() for name in comma_list(value or "none", "report_to")]
    others = [name for name in names if name not in ("none", "all", *TRACKERS)]
    ours = installed_trackers() if "all" in names else [name for name in TRACKERS if name in names]
    note = f"{', '.join(others)} not there yet; the event log and the report have all numbers" if others else ""
    return Answer({"log.to": ours}, note)


def resume(value: Any, asked: Asked) -> Any:
    if is_none(value) or is_true(value):
        return Answer({"checkpoint.resume": "auto"})
    return Answer({"checkpoint.resume": "never" if asks_for_nothing(value, ()) else str(value)})


def revision(value: Any, asked: Asked) -> Any:
    return Answer() if is_none(value) or value == "main" else value


def do_train(value: Any, asked: Asked) -> Any:
    if value:
        return Answer()
    raise Refusal("do_train is false, and duoka train trains", "delete do_train, or use duoka eval, chat or export")


_SHARDING = {
    "full_shard": {"parallel.strategy": "fsdp"}, "true": {"parallel.strategy": "fsdp"},
    "shard_grad_op": {"parallel.strategy": "zero2"}, "no_shard": {"parallel.strategy": "ddp"},
    "hybrid_shard": {"parallel.strategy": "hsdp"},
    "hybrid_shard_zero2": {"parallel.strategy": "hsdp", "parallel.reshard": False},
    "offload": {"parallel.offload": "params"}, "auto_wrap": {},
}  # fmt: skip


def fsdp(value: Any, asked: Asked) -> Any:
    """transformers' list of words, such as `full_shard auto_wrap offload`."""
    if asks_for_nothing(value, ()):
        return Answer()
    given = value if isinstance(value, list) else str(value).replace(",", " ").split()
    answer: dict[str, Any] = {}
    for word in given:
        answer |= words("fsdp", _SHARDING)(word, asked)
    return Answer(answer)


# Templates under which a model thinks before it answers; for others the switch means nothing.
_THINKING = ("qwen3", "deepseekr1", "glm4_moe", "hunyuan", "mimo", "seed_oss", "granite", "ernie", "gpt_oss", "exaone")


def _thinks(asked: Asked) -> bool:
    name = str(asked.get("template", ""))
    return name.startswith(_THINKING) and not name.endswith("_nothink")


def old_thoughts(value: Any, asked: Asked) -> Any:
    if value and _thinks(asked):
        raise Refusal(
            "preserve_thinking true would keep the thoughts of earlier turns, which the model's own template drops",
            "delete preserve_thinking",
        )
    return Answer()


def thinking(value: Any, asked: Asked) -> Any:
    name = asked.get("template", "")
    if value or not _thinks(asked):
        return Answer(note="thinking is written as the model's own template writes it")
    raise Refusal(
        f"enable_thinking {str(value).lower()} would put an empty thought before every answer of {name}, and duoka "
        "writes what the model's own template writes",
        f"delete it, or write the empty thought into the data, or take a template such as {name}_nothink",
    )


_OF_TRAINING = ("stage", "output_dir", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "deepspeed")


def task_of(values: Mapping[str, Any]) -> str:
    """What LLaMA-Factory does with a file: train, predict, prepare (tokenize and stop), export or chat."""
    if is_true(values.get("do_train")):
        return "train"
    has_data = not is_none(values.get("dataset"))
    if is_true(values.get("do_predict")) or (is_true(values.get("do_eval")) and not has_data):
        return "predict"
    if not is_none(values.get("export_dir")):
        return "export"
    if not has_data and all(is_none(values.get(name)) for name in _OF_TRAINING):
        return "chat"
    return "prepare" if has_data and not is_none(values.get("tokenized_path")) else "train"
