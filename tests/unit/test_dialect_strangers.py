"""Files of LLaMA-Factory and TRL whose words are near to others: each means what it means there, or is said by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from duoka.config.catalog import known_keys
from duoka.config.convert import converted_yaml
from duoka.config.dialects.trl import ABSENT, NEEDLESS, trl_words
from duoka.config.foreign_task import read_asked
from duoka.config.load import Start, load_config
from duoka.config.loaded import Loaded
from duoka.data.read.registry import find_sets
from duoka.errors import Faults

BASE = {"model_name_or_path": "some/model", "dataset": "identity", "finetuning_type": "lora"}
PACKED = {**BASE, "packing": True, "cutoff_len": 1000, "per_device_train_batch_size": 2}
TRL: dict[str, Any] = {
    "model_name_or_path": "some/model", "dataset_name": "trl-lib/Capybara", "learning_rate": 2e-5, "use_peft": True,
    "per_device_train_batch_size": 2, "lora_r": 32, "max_length": 1024, "eos_token": "<|im_end|>",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(keys: dict[str, Any], ranks: int = 1, name: str = "x.yaml") -> Loaded:
    Path(name).write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")
    return load_config(name, start=Start(ranks, True))


def refusal(keys: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(Faults) as caught:
        load(keys)
    return [(fault.what, fault.fix) for fault in caught.value.faults]


def test_a_batch_of_packed_rows_counts_their_tokens() -> None:
    """There a sample is a row of cutoff_len tokens; as many conversations would be a fraction of the batch."""
    loaded = load({**PACKED, "gradient_accumulation_steps": 4}, ranks=3)
    train = loaded.config.train
    assert (train.global_batch, train.micro_batch) == ("24000 tokens", "2000 tokens")
    assert any("each a packed row of 1000 tokens = train.global_batch 24000 tokens" in note for note in loaded.notes)
    Path("ours.yaml").write_text(converted_yaml(loaded, Path(".")), "utf-8")
    assert load_config("ours.yaml").config.train == train


def test_a_converted_file_has_no_blocks_that_nobody_asked_for() -> None:
    text = converted_yaml(load(BASE), Path("."))
    assert not [name for name in ("rl:", "parallel:", "log:", "alert") if name in text], text


def test_neat_packing_and_the_default_batch_count_tokens_too() -> None:
    loaded = load({**BASE, "neat_packing": True}, ranks=2)
    assert loaded.config.train.global_batch == f"{2 * 8 * 2048} tokens"


@pytest.mark.parametrize("more", [{"packing": False}, {"stage": "dpo"}, {"stage": "pt"}])
def test_without_packed_conversations_a_batch_counts_samples(more: dict[str, Any]) -> None:
    assert load({**PACKED, **more}).config.train.global_batch == 2


def test_deepspeeds_equal_numbers_do_not_contradict_packed_rows() -> None:
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}', "utf-8")
    assert load({**PACKED, "deepspeed": "ds.json"}).config.train.global_batch == "2000 tokens"


def test_words_for_an_order_or_a_shared_batch_are_refused() -> None:
    ((what, _),) = refusal({**BASE, "train_sampling_strategy": "sequential"})
    assert "train_sampling_strategy sequential is refused: every epoch is shuffled" in what
    assert load({**BASE, "train_sampling_strategy": "group_by_length"})
    ((what, _),) = refusal({**BASE, "accelerator_config": {"split_batches": True}})
    assert "split_batches shares one batch" in what
    assert load({**BASE, "accelerator_config": {"split_batches": False, "even_batches": True}})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("max_seq_length", 100, "write:   cutoff_len: 100"),
        ("lora_r", 8, "write:   lora_rank: 8"),
        ("use_peft", True, "write:   finetuning_type: lora"),
        ("eos_token", "x", "delete it"),
        ("neftune_noise_alfa", 5, "write:   neftune_noise_alpha: 5"),
    ],
)
def test_other_trainers_words_lead_to_the_key_that_means_the_same(name: str, value: Any, fix: str) -> None:
    """By its letters alone max_seq_length was nearest to max_length, which is of answers and cuts nothing."""
    assert [found for _, found in refusal({**BASE, name: value})] == [fix]


def test_a_file_of_trls_command_line_is_named_as_one() -> None:
    ((what, fix),) = refusal(TRL)
    assert "a file of TRL's command line (dataset_name, use_peft, lora_r), which duoka does not read" in what
    assert "trl.md" in fix and "lora_r is lora.rank" in fix and "max_length is data.max_length" in fix
    assert "learning_rate is optim.lr" in fix
    grpo = {"model_name_or_path": "some/model", "num_generations": 8, "max_completion_length": 256}
    ((what, fix),) = refusal(grpo)
    assert "TRL's command line" in what and "num_generations is rl.samples" in fix


DPO_OF_TRL: dict[str, Any] = {
    "model_name_or_path": "some/model", "dataset_name": "trl-lib/x", "beta": 0.2, "loss_type": ["sigmoid", "sft"],
    "loss_weights": [1.0, 0.5], "sync_ref_model": True, "use_weighting": False, "precompute_ref_log_probs": True,
    "truncation_mode": "keep_end", "use_dora": True, "gradient_checkpointing": True, "bogus_key": 3, "use_cpu": True,
}  # fmt: skip


def test_every_key_of_trls_file_is_told() -> None:
    ((_, fix),) = refusal(DPO_OF_TRL)
    assert "trl sft is stage: sft" in fix and "beta is stage.beta" in fix and "loss_weights is stage.sft_weight" in fix
    assert "not there: sync_ref_model (the reference is the model that the run begins with" in fix
    assert "not there: truncation_mode (a long answer is cut at its end)" in fix and "use_dora (of LoRA's" in fix
    assert "needless here: use_weighting, precompute_ref_log_probs, use_cpu" in fix
    assert "not known, of TRL neither: bogus_key" in fix
    assert not [key for key in DPO_OF_TRL if key not in fix] and "loss_type sigmoid" not in fix


@pytest.mark.parametrize(
    ("written", "told"),
    [("exo_pair", "exo_pair"), (["sigmoid", "bco_pair", "sft"], "bco_pair"), (["ipo", "hinge"], "ipo + hinge at once")],
)
def test_losses_of_trl_that_are_not_there_are_named(written: Any, told: str) -> None:
    ((_, fix),) = refusal({**DPO_OF_TRL, "loss_type": written})
    assert f"not there: loss_type {told} (docs/preferences.md has those that there are)" in fix


def test_words_of_trls_grpo_are_of_stage_rl() -> None:
    """beta and loss_type are of another block there."""
    keys = {"model_name_or_path": "m", "num_generations": 8, "beta": 0.04, "loss_type": "dapo", "epsilon_high": 0.28,
            "scale_rewards": "batch", "top_entropy_quantile": 0.2, "delta": None}  # fmt: skip
    ((_, fix),) = refusal(keys)
    assert "beta is rl.kl" in fix and "loss_type is rl.algorithm" in fix and "epsilon_high is rl.clip" in fix
    assert "scale_rewards is rl.advantage" in fix and "not there: top_entropy_quantile (of these variants" in fix
    assert "needless here: delta" in fix


def test_words_of_trl_are_known_in_a_file_of_ours() -> None:
    rl = {"num_generations": 4, "beta": 0.1}
    ours = {"model": "m", "stage": "rl", "data": {"train": ["task:sort"]}, "output": "x", "rl": rl}
    told = dict(refusal(ours))
    assert [fix for what, fix in told.items() if "num_generations" in what] == ["write:   samples: 4"]
    assert [fix for what, fix in told.items() if "beta" in what] == ["write:   kl: 0.1"]


def test_the_words_of_trl_have_one_meaning_each() -> None:
    words = trl_words()
    assert all(key in known_keys() for key, _ in words.values() if key)
    assert sum(map(len, [*NEEDLESS.values(), *ABSENT.values()])) == sum(not key for key, _ in words.values())


def test_a_file_of_the_benchmark_is_named_as_one() -> None:
    """Half of its keys are LLaMA-Factory's, though of no training: none is called unknown."""
    keys = {"model_name_or_path": "some/model", "task": "mmlu_test", "template": "fewshot", "lang": "en", "n_shot": 5}
    ((what, fix),) = refusal(keys)
    assert "LLaMA-Factory's benchmark (mmlu_test)" in what and "duoka eval RUN --tasks mmlu:FOLDER" in fix
    with pytest.raises(Faults, match="LLaMA-Factory's benchmark"):
        read_asked("x.yaml", "eval")


def test_toml_is_named(tmp_path: Path) -> None:
    Path("x.toml").write_text('[model]\nname = "llama3"\n')
    with pytest.raises(Faults, match="this is a TOML file"):
        load_config("x.toml")


def test_num_samples_says_which_records_it_takes() -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"mine": {"file_name": "a.json", "num_samples": 2}}')
    Path("data/a.json").write_text(json.dumps([{"instruction": str(n), "output": "a"} for n in range(3)]))
    (found,) = find_sets(load({**BASE, "dataset": "mine"}).config, Path("."))
    assert found.max_samples == 2
    assert any("num_samples 2 takes the first of its records" in note for note in found.notes)
