"""A value of another tool's file is taken as it is meant, or refused at its line: never passed over, never guessed.

What would be worse than a refusal is a run under another value than the one that was written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from duoka.config.dialects.all import dialects
from duoka.config.dialects.nested import BLOCKS
from duoka.config.foreign_task import read_asked
from duoka.config.load import Loaded, Start, load_config, read_side_file
from duoka.errors import Faults

BASE: dict[str, Any] = {"model_name_or_path": "some/model", "dataset": "identity"}
# Two values of each key that differ; 1 and 2 where a key is not named.
PAIRS: dict[str, tuple[Any, Any]] = {
    "adam_beta1": (0.8, 0.9), "adam_beta2": (0.9, 0.95), "ddp_backend": ("gloo", "nccl"), "fsdp": ("", "full_shard"),
    "deepspeed": ({"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 2}}),
    "finetuning_type": ("full", "lora"), "lr_scheduler_type": ("linear", "cosine"), "val_size": (0.1, 0.2),
    "lr_scheduler_kwargs": ({"min_lr_rate": 0.1}, {"min_lr_rate": 0.2}), "optim": ("adamw_torch", "adamw_8bit"),
    "quantization_bit": (4, 8), "quantization_method": ("bnb", "hqq"), "quantization_type": ("nf4", "fp4"),
    "save_strategy": ("steps", "epoch"), "eval_strategy": ("steps", "epoch"), "stage": ("sft", "pt"),
    "evaluation_strategy": ("steps", "epoch"), "strategy": ("ddp", "fsdp"), "template": ("qwen", "chatml"),
    "warmup_ratio": (0.1, 0.2), "pref_loss": ("sigmoid", "hinge"),
}  # fmt: skip
SWITCHES = [name for name, row in dialects()["nested"].rows.items() if row.is_switch]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(keys: dict[str, Any] | str, *overrides: str, ranks: int = 1) -> Loaded:
    Path("x.yaml").write_text(keys if isinstance(keys, str) else yaml.safe_dump(keys, sort_keys=False), "utf-8")
    return load_config("x.yaml", overrides, start=Start(ranks, True))


def refusal(keys: dict[str, Any] | str, *overrides: str) -> str:
    with pytest.raises(Faults) as caught:
        load(keys, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def side_refusal(keys: dict[str, Any], name: str = "side.json") -> str:
    Path(name).write_text(json.dumps(keys, indent=1), "utf-8")
    with pytest.raises(Faults) as caught:
        read_side_file(name, Start(2))
    return str(caught.value)


def written_as(name: str) -> str:
    """How the nested form writes a row's name in its block trainer."""
    return next((shown for shown, row in dialects()["nested"].rename.items() if row == name), f"trainer.{name}")


@pytest.mark.parametrize(
    "name", [name for name, row in dialects()["nested"].rows.items() if row.state == "implemented" and name not in BASE]
)
def test_a_key_in_two_blocks_with_two_values_is_refused_with_both_places(name: str) -> None:
    first, second = PAIRS.get(name, (True, False) if name in SWITCHES else (1, 2))
    block, _, word = written_as(name).partition(".")
    blocks: dict[str, dict[str, Any]] = {"model": {"model_name_or_path": "m"}, "data": {"dataset": "identity"}}
    blocks.setdefault(block, {})[word] = first
    other = next(other for other in BLOCKS if other != block)
    blocks.setdefault(other, {})[name] = second
    message = refusal(blocks)
    assert "is given twice" in message and message.count("x.yaml:") >= 2, message
    blocks[other][name] = first
    try:
        load(blocks)
    except Faults as error:  # what is no value of this key is refused, and not for standing there twice
        assert "twice" not in str(error), error


def test_the_command_lines_value_wins_over_a_files_in_every_block() -> None:
    text = (
        "trainer: {type: ddp, max_steps: 5}\nmodel: {model_name_or_path: m, bf16: false}\ndata: {dataset: identity}\n"
    )
    config = load(text, "max_steps=7", "bf16=true", "warmup_steps=3").config
    assert (config.train.max_steps, config.train.epochs, config.train.precision) == (7, 7.0, "bf16")
    assert config.optim.warmup == 3


@pytest.mark.parametrize("value", ["ture", "flase", "2", [True], {"on": True}, 0.5])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_cannot_be_read_is_refused_at_its_line(name: str, value: Any) -> None:
    flat = name in dialects()["llamafactory"].rows
    keys = {**BASE, "finetuning_type": "lora", name: value} if flat else {"trainer": {name: value}, "model": BASE}
    message = refusal(keys)
    line = 4 if flat else 2
    assert f"{name} must be true or false" in message and f"x.yaml, line {line}" in message, message


@pytest.mark.parametrize("value", ["true", "True", "yes", "on", 1, "1", "false", "no", "off", 0, "0"])
def test_a_switch_has_the_words_of_yaml_and_of_python(value: Any) -> None:
    wanted = "bf16" if str(value).lower() in ("true", "yes", "on", "1") else "fp32"
    assert load({**BASE, "bf16": value}).config.train.precision == wanted


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"bf16": {"enabled": "ture"}, "zero_optimization": {"stage": 2}}, "bf16.enabled"),
        ({"fp16": {"enabled": "Ture"}}, "fp16.enabled"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": "ture"}}, "cpu_offload"),
        ({"zero_optimization": {"stage": 3, "cpu_offload_params": "ture"}}, "cpu_offload_params"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "ture"}}, "reshard_after_forward"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": "ture"}}, "fsdp_offload_params"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": "ture"}}, "checkpointing"),
    ],
)
def test_switches_of_deepspeed_and_accelerate_are_refused_too(keys: dict[str, Any], name: str) -> None:
    message = side_refusal(keys)
    assert name in message and "ture" in message.lower() and "true or false" in message, message


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_a_misspelled_key_of_an_offload_block_is_refused(block: str) -> None:
    zero = {"stage": 3, block: {"dejice": "cpu", "pin_memory": True}}
    message = side_refusal({"zero_optimization": zero})
    assert f"unknown key zero_optimization.{block}.dejice" in message and "did you mean device" in message, message
    Path("side.json").write_text(json.dumps({"zero_optimization": {"stage": 3, block: {"device": "cpu", "ratio": 1}}}))
    side = read_side_file("side.json", Start(2))
    assert side is not None and "offload: " in side.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_steps": -5}, ("max_steps", "-5", "-1")),
        ({"max_steps": 2.5}, ("max_steps must be a whole number",)),
        ({"warmup_steps": -5}, ("warmup_steps", "-5")),
        ({"warmup_steps": 10, "warmup_ratio": "often"}, ('warmup_ratio must be a number, got "often"', "line 4")),
        ({"warmup_ratio": 0.1, "warmup_steps": -5}, ("warmup_steps must be 0 or more, got -5",)),
        ({"adam_beta1": 4}, ("adam_beta1 must be at least 0 and below 1, got 4",)),
        ({"adam_beta2": 0.5}, ("AdamW diverges", "adam_beta2: 0.999")),
        ({"learning_rate": 5}, ("learning_rate (optim.lr) is 5", "learning_rate: 2.0e-5")),
        ({"output_dir": "/"}, ("output_dir (output) is /", "output_dir: runs/identity")),
        ({"deepspeed": -5}, ("deepspeed must be the path of a DeepSpeed file, got -5",)),
        ({"warmup_ratio": 5}, ("warmup_ratio 5 is no share", "warmup_steps: 5")),
        ({"warmup_ratio": -0.1}, ("warmup_ratio -0.1 is no share",)),
        ({"save_strategy": "epcoh"}, ("save_strategy epcoh", "did you mean epoch")),
        ({"eval_strategy": "setps", "val_size": 0.1}, ("eval_strategy setps", "did you mean steps")),
        ({"eval_strategy": "steps", "evaluation_strategy": "epoch", "val_size": 0.1}, ("evaluation_strategy",)),
        ({"max_steps": 5, "num_train_epochs": "many"}, ("num_train_epochs must be a number",)),
        ({"dataset": {"identity": 5}}, ("dataset must be a name, or a list of names",)),
        ({"dataset": ["identity", None]}, ("dataset must be a name, or a list of names",)),
        ({"adapter_name_or_path": {"a": "b" * 300}}, ("adapter_name_or_path must be a name",)),
        ({"lora_target": [["q_proj"]]}, ("lora_target must be a name",)),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rte": 0.1}}, ("min_lr_rte",)),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": [0.1]}, ("lr_scheduler_kwargs must be",)),
        ({"adam_beta1": 0.9, "adam_beta2": "high"}, ('adam_beta2 must be a number, got "high"', "line 4")),
        ({"lora_rank": "eight", "lora_alpha": 16}, ('got "eight"', "line 3", "lora_rank: 8")),
        ({"lora_alpha": 16, "use_rslora": True, "lora_rank": "eight"}, ("lora_rank", "line 5", "lora_rank: 8")),
        ({"learning_rate": "fast"}, ('got "fast"', "learning_rate: ")),
        ({"deepspeed": {"zero_optimization": {"stage": 1.7}}}, ("stage is 1.7",)),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "mics_shard_size": -5}}}, ("mics_shard_size", "-5")),
        ({"deepspeed": {"scheduler": {"params": {"warmup_num_steps": 0.5}}}}, ("warmup_num_steps must be a whole",)),
        ({"deepspeed": {"bf16": {"enabled": True}, "fp16": {"enabled": "ture"}}}, ("fp16.enabled must be true",)),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused_by_its_own_name(more: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(BASE | more)
    for word in words:
        assert word in message, message


NUMBERS = [
    name
    for name, row in dialects()["llamafactory"].rows.items()
    if row.state == "implemented" and not row.is_switch and row.key.startswith(("optim.", "train.", "lora.", "data."))
    if name != "optim"  # a block of that name makes a file duoka's own
]


@pytest.mark.parametrize("bad", ["eight", -5, 0, 5, float("inf"), {"a": 1}], ids=repr)
def test_what_a_refusal_advises_is_taken_by_the_same_file(bad: Any) -> None:
    """Advice in duoka's own words would be refused there, and a 1 where a share belongs as well."""
    refused = []
    for name in (*NUMBERS, "output_dir", "quantization_bit", "ddp_timeout", "deepspeed"):
        keys = {**BASE, "finetuning_type": "lora", name: "/" if name == "output_dir" else bad}
        try:
            load(keys)
            continue
        except Faults as error:
            advice = [re.search(r"write(?: for example)?: {3}(\S.*?)(?: {3}|$)", fault.fix) for fault in error.faults]
        for found in filter(None, advice):
            better = {key: value for key, value in keys.items() if key != name} | yaml.safe_load(found[1])
            try:
                load(better)
            except Faults as error:
                refused.append(f"{name}: {found[1]}, then {error}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"bf16": True, "train_micro_batch_size_per_gpu": 1}, "bf16"), ({"zero_optimization": 2}, "zero_optimization")],
)
def test_a_block_that_is_none_is_named_as_one(keys: dict[str, Any], word: str) -> None:
    assert f"{word} must be a block of keys" in side_refusal(keys)


def test_a_part_of_offloading_is_a_part_here() -> None:
    block = {"device": "cpu", "ratio": 0.4}
    Path("side.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": block}}))
    side = read_side_file("side.json", Start(2))
    assert side is not None and "share: 0.4" in side.text


def test_what_other_tools_write_for_unset_still_means_unset() -> None:
    config = load({**BASE, "max_steps": -1, "warmup_steps": 0, "warmup_ratio": 0.25, "num_train_epochs": 2}).config
    assert (config.train.max_steps, config.train.epochs, config.optim.warmup) == (None, 2.0, 0.25)


def test_evaluation_says_nothing_about_how_often_a_run_is_saved() -> None:
    keys = {**BASE, "val_size": 0.1, "evaluation_strategy": "epoch", "save_steps": 7}
    config = load(keys).config
    assert (config.train.eval_every, config.checkpoint.every) == ("1 epoch", 7)


def test_names_in_capitals_mean_the_same_schedule() -> None:
    config = load({**BASE, "lr_scheduler_type": "Constant", "warmup_ratio": 0.1}).config
    assert (config.optim.schedule, config.optim.warmup) == ("constant", 0.0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_processes": 2.5}, ("num_processes must be a whole number",)),
        ({"deepspeed_config": {"zero_stage": 1.5}, "distributed_type": "DEEPSPEED"}, ("zero_stage",)),
        ({"deepspeed_config": {"zero_stage": 7}, "distributed_type": "DEEPSPEED"}, ("zero_stage is 7",)),
    ],
)
def test_numbers_of_an_accelerate_file_are_whole(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    message = side_refusal({"compute_environment": "LOCAL_MACHINE", **keys})
    for word in words:
        assert word in message, message


def test_files_that_talk_and_merge_are_read_as_strictly() -> None:
    Path("chat.yaml").write_text("model_name_or_path: m\nlora_target: all\ndo_sample: ture\n", "utf-8")
    with pytest.raises(Faults, match="do_sample must be true or false"):
        read_asked("chat.yaml", "chat")
    nested = "model: {model_name_or_path: m, temperature: 0.5}\noutput: {temperature: 0.9}\n"
    Path("chat.yaml").write_text(nested, "utf-8")
    with pytest.raises(Faults, match=r"temperature, as output.temperature, is given twice"):
        read_asked("chat.yaml", "chat")


def test_a_file_that_extends_another_in_the_same_words_is_one_file_with_it() -> None:
    """Defaults of the upper file must not overrule what the lower one says."""
    Path("base.yaml").write_text(
        yaml.safe_dump({**BASE, "learning_rate": 1e-4, "bf16": True, "finetuning_type": "lora", "lora_rank": 16})
    )
    config = load("extends: base.yaml\nmodel_name_or_path: other\nnum_train_epochs: 1\n").config
    assert (config.model.name, config.optim.lr, config.train.precision) == ("other", 1e-4, "bf16")
    assert config.lora is not None and (config.lora.rank, config.lora.alpha, config.train.epochs) == (16, 32, 1.0)
    few = load("extends: base.yaml\nfinetuning_type: full\nmax_steps: 9\n")  # no key that tells this form by itself
    assert few.config.lora is None and (few.config.train.max_steps, few.config.optim.lr) == (9, 1e-4)
    assert few.origins["optim.lr"].startswith("base.yaml:") and few.origins["train.max_steps"].startswith("x.yaml:")
    assert load("extends: base.yaml\noptim: {lr: 3.0e-4}\n").config.optim.lr == 3e-4  # in duoka's own words


def test_another_tools_defaults_stand_below_a_base_in_duokas_words() -> None:
    Path("base.yaml").write_text("model: demo\ndata: {train: [identity]}\noptim: {lr: 1.0e-4}\n")
    config = load(
        "extends: base.yaml\nmodel_name_or_path: m\nfinetuning_type: full\ndo_train: true\nmax_steps: 5\n"
    ).config
    assert (config.model.name, config.optim.lr, config.train.max_steps, config.data.max_length) == ("m", 1e-4, 5, 2048)


def test_an_empty_deepspeed_asks_for_nothing() -> None:
    assert load({**BASE, "deepspeed": None}).config.parallel.strategy == "auto"


def test_the_second_form_of_llamafactory_is_named() -> None:
    keys = {"model": "Qwen/Qwen3-0.6B", "model_class": "llm", "template": "qwen3_nothink", "kernel_config": None,
            "dist_config": {"name": "fsdp2"}, "train_dataset": "data/v1_sft_demo.yaml", "output_dir": "outputs/x",
            "micro_batch_size": 1, "cutoff_len": 2048, "learning_rate": 1e-4, "max_steps": 10}  # fmt: skip
    message = refusal(keys)
    assert "LLaMA-Factory's v1 form" in message and "line 2" in message and message.count("config error") == 1, message
    with pytest.raises(Faults, match="v1 form"):
        read_asked("x.yaml", "chat")
