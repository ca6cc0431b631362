"""Files of other tools: what a corpus of them becomes, key by key, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from dialect_effects import ACCELERATE, DEEPSPEED, EFFECTS, SHOWN_BY
from guides import NESTED as GUIDE

from duoka.cli import config as config_cli
from duoka.cli.lines import meaning_of_accelerate
from duoka.config.catalog import known_keys
from duoka.config.dialects.all import dialects
from duoka.config.dialects.page import dialects_markdown
from duoka.config.foreign_task import Purpose, describe_task, read_asked
from duoka.config.load import Start, load_config, read_side_file
from duoka.config.loaded import Loaded
from duoka.config.schema_running import OffloadConfig
from duoka.config.write import leaves
from duoka.errors import Faults

ROOT = Path(__file__).parents[2]
CORPUS: dict[str, Any] = json.loads(Path(__file__).with_name("llamafactory_corpus.json").read_text())
BASE = {"model_name_or_path": "some/model", "dataset": "identity", "template": "qwen3", "do_train": True}
LOADS_TODAY = {
    "train_lora/qwen3_lora_sft", "extras/loraplus/llama3_lora_sft", "train_lora/qwen3_preprocess",
    "train_lora/qwen3_lora_pretrain", "extras/fp8/llama3_fp8_fsdp_sft", "extras/fp8/llama3_fp8_deepspeed_sft",
    "extras/llama_pro/llama3_freeze_sft", "extras/dft/qwen2_full_sft", "extras/muon/qwen2_full_sft",
    "extras/pissa/llama3_lora_sft", "extras/fsdp_qlora/llama3_lora_sft", "train_qlora/qwen3_lora_sft_otfq",
    "train_qlora/qwen3_lora_sft_bnb_npu",
    "ascend/qwen3_full_sft_fsdp2", "ascend/qwen3_5_full_sft_fsdp2",
    "ascend/qwen3moe_full_sft_fsdp", "ascend/qwen3_5moe_lora_sft_fsdp2", "megatron_bridge/llama3_sft",
    # Plain files; that their models are quantized is the model room's to refuse.
    "train_qlora/llama3_lora_sft_aqlm", "train_qlora/llama3_lora_sft_awq", "train_qlora/llama3_lora_sft_gptq",
}  # fmt: skip
OTHER_TASKS: dict[str, Purpose] = {
    "inference/qwen3": "chat", "inference/qwen3_full_sft": "chat", "inference/qwen3_lora_sft": "chat",
    "merge_lora/qwen3_full_sft": "export", "merge_lora/qwen3_lora_sft": "export",
    "extras/nlg_eval/llama3_lora_predict": "eval",
}  # fmt: skip
NESTED = GUIDE.format(model="/path/to/model")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(keys: dict[str, Any] | str, *overrides: str, ranks: int = 1, has_gpu: bool = True) -> Loaded:
    Path("x.yaml").write_text(keys if isinstance(keys, str) else yaml.safe_dump(keys, sort_keys=False), "utf-8")
    return load_config("x.yaml", overrides, start=Start(ranks, has_gpu))


def refusal(keys: dict[str, Any] | str, *overrides: str, **start: Any) -> str:
    with pytest.raises(Faults) as caught:
        load(keys, *overrides, **start)
    assert caught.value.exit_code == 2
    return str(caught.value)


def write_deepspeed_files() -> None:
    for name, content in CORPUS["side"].items():
        path = Path("examples", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content), "utf-8")


@pytest.mark.parametrize("name", CORPUS["train"])
def test_every_file_of_the_corpus_loads_or_says_what_it_lacks(name: str) -> None:
    write_deepspeed_files()
    keys = CORPUS["train"][name]["keys"]
    if name in OTHER_TASKS:
        Path("x.yaml").write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")
        command = OTHER_TASKS[name]
        asked = read_asked("x.yaml", command)
        assert asked is not None and asked.model == keys["model_name_or_path"]
        assert asked.adapters == [keys[name] for name in ("adapter_name_or_path",) if name in keys]
        assert f"duoka {command} x.yaml" in (describe_task("x.yaml") or "")
        assert f"duoka {command} x.yaml" in refusal(keys)
        return
    if name in LOADS_TODAY:
        assert load(keys).notes
        return
    may_come = "deepspeed" in keys or keys.get("stage", "sft") != "sft"  # once the schema has the strategy, the stage
    try:
        load(keys)
    except Faults as error:
        message = str(error)
    else:
        assert may_come, "it loads: say so in LOADS_TODAY"
        return
    assert "unknown key" not in message and "there is no file" not in message, message
    words = (
        "refused",
        "does not train",
        "not there yet",
        "does not have yet",
        "lies on a hub",
        "data is missing",
        "data.train",
    )
    assert any(word in message for word in words), message


@pytest.mark.parametrize("name", CORPUS["side"])
def test_every_side_file_is_read_or_says_what_it_lacks(name: str) -> None:
    write_deepspeed_files()
    known = known_keys()["parallel.strategy"].choices
    try:
        side = read_side_file(Path("examples", name), Start(2))
    except Faults as error:
        assert "unknown key" not in str(error), error
        assert "not have yet" in str(error) or "not there yet" in str(error), error
        assert name != "deepspeed/ds_z0_config.json", error
        return
    assert side is not None and (name == "deepspeed/ds_z0_config.json" or len(known) > 3)


def test_the_commonest_file_becomes_what_it_means() -> None:
    loaded = load(CORPUS["train"]["train_lora/qwen3_lora_sft"]["keys"], ranks=2)
    config = loaded.config
    assert config.model.name == "Qwen/Qwen3-4B-Instruct-2507" and config.model.trust_remote_code
    assert [(item.name, item.max_samples) for item in config.data.train] == [
        ("identity", 1000),
        ("alpaca_en_demo", 1000),
    ]
    assert (config.data.max_length, config.optim.lr, config.optim.warmup) == (2048, 1e-4, 0.1)
    assert config.lora is not None and (config.lora.alpha, config.lora.dropout) == (16, 0.0)
    assert (config.train.global_batch, config.train.micro_batch, config.train.precision) == (16, 1, "bf16")
    assert config.parallel.timeout == "10min" and config.log.to == ()
    text = "\n".join(loaded.notes)
    for word in ("read as LLaMA-Factory", "1 per device x 8 accumulated x 2 processes = train.global_batch 16",
                 "5.7 years", "never overwritten", "plot_loss"):  # fmt: skip
        assert word in text, text
    assert all("\n" not in note for note in loaded.notes)
    assert loaded.origins["optim.lr"].startswith("x.yaml:") and loaded.origins["optim.lr"].endswith("learning_rate")


def test_the_nested_form_as_it_stands_equals_its_flat_twin() -> None:
    nested = load(NESTED, ranks=2)
    assert "no GPU" not in "".join(nested.notes) and nested.config.train.precision == "fp16"
    flat: dict[str, Any] = {}
    for block in yaml.safe_load(NESTED).values():
        flat |= block
    for name in ("type", "train_split", "eval_split", "adapter_name_or_path", "find_unused_parameters", "timeout",
                 "gradient_as_bucket_view"):  # fmt: skip
        del flat[name]
    flat["num_train_epochs"], flat["cutoff_len"] = flat.pop("max_epochs"), flat.pop("max_seq_len")
    twin = load(flat, "parallel.strategy=ddp", ranks=2)
    assert nested.config == twin.config
    assert load(NESTED, has_gpu=False).config.train.precision == "auto"


@pytest.mark.parametrize(("name", "value", "beside", "key", "wanted"), EFFECTS, ids=[f"{e[0]}-{e[3]}" for e in EFFECTS])
def test_an_implemented_key_has_its_effect(
    name: str, value: Any, beside: dict[str, Any], key: str, wanted: Any
) -> None:
    config = load(BASE | beside | {name: value}, ranks=2).config
    got: Any = config
    for part in key.split("."):
        got = getattr(got, part)
    if isinstance(wanted, tuple) and wanted and isinstance(wanted[0], tuple):
        got = tuple((item.name, item.max_samples) for item in got)
    assert got == wanted
    without = {k: v for k, v in (BASE | beside).items() if k != name}
    if name not in BASE and name != "lr_scheduler_kwargs":  # without it that schedule is refused
        assert leaves(load(without, ranks=2).config) != leaves(config) or name == "optim"


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = name.split(".")
        block = tree
        for part in above:
            block = block.setdefault(part, {})
        block[last] = value
    return tree


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("name", "value", "beside", "key", "wanted"), DEEPSPEED)
def test_a_deepspeed_key_has_its_effect(name: str, value: Any, beside: dict[str, Any], key: str, wanted: Any) -> None:
    def resolved(keys: dict[str, Any]) -> Any:
        Path("ds.json").write_text(json.dumps(nested(keys)), "utf-8")
        return load(BASE | {"finetuning_type": "full", "deepspeed": "ds.json"}, ranks=4).config

    config = resolved(beside | {name: value})
    assert value_of(config, key) == wanted
    assert name == "optimizer.type" or value_of(resolved(beside), key) != wanted, "without it nothing is different"
    # The YAML beside it says something else: both values are named.
    ours = {"optim.clip": ("max_grad_norm", 9.0), "optim.lr": ("learning_rate", 9e-4),
            "optim.eps": ("adam_epsilon", 9e-9), "optim.weight_decay": ("weight_decay", 0.9),
            "optim.schedule": ("lr_scheduler_type", "linear"), "optim.warmup": ("warmup_steps", 9),
            "train.global_batch": ("per_device_train_batch_size", 9)}  # fmt: skip
    if key in ours:
        other, theirs = ours[key]
        Path("ds.json").write_text(json.dumps(nested(beside | {name: value})), "utf-8")
        message = refusal(BASE | {"deepspeed": "ds.json", other: theirs}, ranks=4)
        assert "contradict" in message and "ds.json:1" in message and "x.yaml" in message, message


@pytest.mark.parametrize(("name", "value", "beside", "key", "wanted"), ACCELERATE)
def test_an_accelerate_key_has_its_effect(name: str, value: Any, beside: dict[str, Any], key: str, wanted: Any) -> None:
    def resolved(keys: dict[str, Any]) -> Any:
        Path("a.yaml").write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE"} | nested(keys)), "utf-8")
        line = ["launch", "--config_file", "a.yaml", "--num_processes", "4", "train.py", "x.yaml"]
        Path("x.yaml").write_text(yaml.safe_dump(BASE | {"finetuning_type": "full"}), "utf-8")
        words = meaning_of_accelerate(line).words
        return load_config("x.yaml", [word for word in words[2:] if "=" in word], start=Start(4, True)).config

    Path("ds.json").write_text('{"zero_optimization": {"stage": 1}}', "utf-8")
    assert value_of(resolved(beside | {name: value}), key) == wanted
    assert value_of(resolved(beside), key) != wanted, "without it nothing is different"


def test_the_tables_cover_both_dialects_and_name_a_test_of_each_keys_doing() -> None:
    for dialect, effects, said in (("deepspeed", DEEPSPEED, set()), ("accelerate", ACCELERATE, {"num_processes"})):
        rows = dialects()[dialect].rows.values()
        assert {row.name for row in rows if row.state == "implemented"} - said == {effect[0] for effect in effects}
        for effect in effects:
            file, _, word = SHOWN_BY[effect[3]].partition("::")
            assert word in (ROOT / "tests" / file).read_text("utf-8"), effect[3]


def test_the_sample_covers_the_implemented_keys() -> None:
    rows = dialects()["llamafactory"].rows.values()
    wanted = {row.name for row in rows if row.state == "implemented"}
    sampled = {effect[0] for effect in EFFECTS}
    left = {"stage", "deepspeed", "do_train", "eval_strategy", "evaluation_strategy", "quantization_method"}
    left |= {"pref_bco_weight", "ref_model", "ref_model_adapters", "ref_model_quantization_bit"}
    left |= {"reward_model", "ppo_buffer_size", "ppo_score_norm", "ppo_whiten_rewards", "reward_model_type"}
    left |= {"data_seed", "enable_thinking", "preserve_thinking", "accelerator_config"}  # these only check
    assert wanted - sampled == left and len(sampled) >= 40


def test_rows_point_to_keys_that_are_there_or_are_refused_when_asked() -> None:
    for dialect in dialects().values():
        for row in dialect.rows.values():
            assert not row.key or row.key in known_keys(), f"{dialect.id}: {row.name}"
            assert row.state == "implemented" or row.note, f"{dialect.id}: {row.name} gives no reason"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"learnin_rate": 1}, ("unknown key learnin_rate", "did you mean learning_rate")),
        ({"template": "qwen9"}, ("no template qwen9", "did you mean qwen")),
        ({"stage": "ppo"}, ("needs a reward model", "reward_model: FOLDER")),
        ({"stage": "dpo", "pref_loss": "kto_pair"}, ("kto_pair is not there", "pref_loss: sigmoid")),
        ({"stage": "dpo", "ref_model": "other/model"}, ("another reference", "delete ref_model")),
        ({"stage": "dpo", "pref_bco_weight": 0.5}, ("BCO", "delete pref_bco_weight")),
        ({"stage": "stf"}, ("did you mean sft",)),
        ({"optim": "paged_adamw_8bit"}, ("moves its state to the host", "optim: adamw_8bit")),
        ({"use_adam_mini": True}, ("use_adam_mini true is refused",)),
        ({"use_dft_loss": True, "label_smoothing_factor": 0.1}, ("use_dft_loss (train.loss) is dft",)),
        ({"pissa_init": True, "pissa_iter": -2}, ("pissa_iter must be a whole number",)),
        ({"quantization_bit": 8}, ("quantization_bit 8 is not there",)),
        ({"quantization_bit": 4, "finetuning_type": "full"}, ("finetuning_type: lora",)),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, ("another packer",)),
        ({"finetuning_type": "oft"}, ("oft is not there yet",)),
        ({"expert_model_parallel_size": 2}, ("duoka's own YAML", "parallel.expert")),
        ({"streaming": True}, ("data.stream, in duoka's own YAML",)),
        ({"freeze_trainable_layers": 0, "finetuning_type": "freeze"}, ("other than 0",)),
        ({"use_llama_pro": True}, ("finetuning_type: freeze",)),
        ({"save_strategy": "best"}, ("needs evaluation data",)),
        ({"data_seed": 7}, ("one seed is for everything", "seed: 7")),
        ({"enable_thinking": False}, ("an empty thought before every answer of qwen3", "qwen3_nothink")),
        ({"preserve_thinking": True}, ("thoughts of earlier turns",)),
        ({"fsdp": "ful_shard"}, ("did you mean full_shard",)),
        ({"bf16": True, "fp16": True}, ("both on",)),
        ({"dataset_dir": "REMOTE:x/y"}, ("lies on a hub",)),
        ({"do_train": False}, ("do_train is false",)),
        ({"per_device_train_batch_size": 1.5}, ("must be a whole number",)),
        ({"val_size": 100}, ("counts samples",)),
        ({"deepspeed": "no/such.json"}, ("there is no file no/such.json",)),
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(more: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(BASE | more)
    for word in words:
        assert word in message, message


def test_switches_that_are_off_are_no_matter() -> None:
    Path("ds.json").write_text('{"amp": {"enabled": false}, "zero_optimization": {"stage": 0}}', "utf-8")
    assert load(BASE | {"deepspeed": "ds.json"})
    assert load(BASE | {"use_muon": False, "quantization_bit": None, "neftune_noise_alpha": 0, "fsdp": ""})


def test_a_key_given_twice_is_fine_when_equal_and_refused_with_both_places_when_not() -> None:
    assert load(NESTED).config.log.every == 10
    message = refusal(NESTED.replace("output:\n", "output:\n  learning_rate: 1e-5\n"))
    assert "x.yaml:6" in message and "x.yaml:26" in message and "2.0e-05" in message, message
    flat = yaml.safe_dump(BASE)
    assert any("both say the same" in note for note in load(flat + "seed: 1\nseed: 1\n").notes)
    assert "given twice" in refusal(flat + "seed: 1\nseed: 2\n")
    canonical = "model: demo\ndata: {train: [identity]}\nstage: sft\nstage: sft\n"
    assert "given twice" in refusal(canonical)


def test_overrides_may_be_in_either_dialect() -> None:
    assert load(BASE, "learning_rate=1e-3", "train.seed=3").config.optim.lr == 1e-3
    loaded = load(NESTED, "trainer.logging_steps=5", "optim.lr=1e-3")
    assert (loaded.config.log.every, loaded.config.optim.lr) == (5, 1e-3)
    assert "did you mean learning_rate" in refusal(BASE, "learning_rat=1")


def test_deepspeed_has_comments_and_auto_and_conflicts_are_refused_with_both_values() -> None:
    text = '{\n// batch\n"train_micro_batch_size_per_gpu": "auto", # same\n"zero_optimization": {"stage": 0},\n'
    Path("ds.json").write_text(text + '/* x */ "gradient_clipping": 0.5}', "utf-8")
    loaded = load(BASE | {"deepspeed": "ds.json", "per_device_train_batch_size": 2}, ranks=2)
    assert (loaded.config.optim.clip, loaded.config.parallel.strategy) == (0.5, "ddp")
    assert loaded.config.train.global_batch == 4 and loaded.origins["optim.clip"].startswith("ds.json:5")
    message = refusal(BASE | {"deepspeed": "ds.json", "max_grad_norm": 1.0})
    assert "contradict" in message and "0.5 (ds.json:5)" in message and "1.0" in message, message
    Path("ds.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 0}}', "utf-8")
    assert "32 (ds.json:1)" in refusal(BASE | {"deepspeed": "ds.json", "per_device_train_batch_size": 2})


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, ("zero2", "optimizer", None)),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
         ("zero3", "params", None)),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
         ("zero3", OffloadConfig(optimizer="host", share=0.3), None)),
        ({"stage": 1, "cpu_offload": True}, ("zero1", "optimizer", None)),
        ({"stage": 3, "offload_param": {"device": "none"}, "cpu_offload": False}, ("zero3", "none", None)),
        ({"stage": 3, "mics_shard_size": 2}, ("hsdp", "none", 2)),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "stage is 2"),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}},
         ("zero3", OffloadConfig(params="disk", folder="/fast"), None)),
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}},
         ("zero2", OffloadConfig(optimizer="disk", folder="/fast"), None)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
         ("zero3", OffloadConfig(params="disk"), None)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
         ("zero3", OffloadConfig(optimizer="disk", params="host"), None)),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}, "goes first"),
        ({"stage": 3, "offload_param": {"device": "tape"}}, "tape is not known"),
    ],
)  # fmt: skip
def test_what_deepspeed_offloads_lies_in_host_memory_or_on_a_disk(zero: dict[str, Any], wanted: Any) -> None:
    Path("ds.json").write_text(json.dumps({"zero_optimization": zero}), "utf-8")
    if isinstance(wanted, str):
        assert wanted in refusal(BASE | {"deepspeed": "ds.json"}, ranks=4)
        return
    parallel = load(BASE | {"deepspeed": "ds.json"}, ranks=4).config.parallel
    assert (parallel.strategy, parallel.offload, parallel.shard_ranks) == wanted


@pytest.mark.parametrize(
    ("fsdp", "lines"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}, ("strategy: fsdp", "offload: params")),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, ("strategy: zero2",)),
        ({"fsdp_sharding_strategy": 5}, ("strategy: hsdp", "reshard: false")),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, ("strategy: fsdp", "reshard: false")),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "HYBRID_SHARD"}, ("strategy: hsdp",)),
    ],
)
def test_what_accelerate_shards_is_sharded_that_way(fsdp: dict[str, Any], lines: tuple[str, ...]) -> None:
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": fsdp}
    Path("a.yaml").write_text(yaml.safe_dump(content), "utf-8")
    side = read_side_file("a.yaml", Start(2))
    assert side is not None and all(f"  {line}  #" in side.text for line in lines), side and side.text


def test_what_the_environment_fills_in_is_filled_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "x-${env:INNER}")
    for text, wanted in (("${env:OUTER}", "x-${env:INNER}"), ("$${env:OUTER}", "${env:OUTER}")):
        config = load(BASE | {"output_dir": text}).config
        ours = load({"model": "demo", "data": {"train": ["identity"]}, "output": text}).config
        assert config.output == ours.output == wanted


def test_a_side_file_alone_is_shown_and_not_trained() -> None:
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}
    Path("a.yaml").write_text(yaml.safe_dump(content | {"num_processes": 2}), "utf-8")
    shown = CliRunner().invoke(config_cli.command, ["show", "a.yaml", "--nproc", "1"])
    assert "strategy: ddp  # a.yaml:2, distributed_type" in shown.output and "--nproc 2" in shown.output
    with pytest.raises(Faults, match="names no model"):
        load_config("a.yaml")


def test_the_page_of_dialects_says_what_the_rows_say() -> None:
    assert (ROOT / "docs" / "llamafactory.md").read_text("utf-8") == dialects_markdown(), "duoka config dialects"
