"""LLaMA-Factory's files that merge, talk and predict: read as they are, done, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tiny import write_conversations

from duoka.cli import cli
from duoka.cli.chat import ChatOptions, choose_sampling
from duoka.config.foreign_task import read_asked
from duoka.errors import ConfigError, Faults
from duoka.serve.predict import Prediction, bleu, rouge_l, rouge_n, score


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**keys: Any) -> str:
    Path("x.yaml").write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")
    return "x.yaml"


def duoka(*words: str) -> str:
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_a_merging_file_of_a_full_model_writes_a_folder_that_talks(tiny_model: Path) -> None:
    keys = {"model_name_or_path": str(tiny_model), "template": "qwen3_nothink", "trust_remote_code": True,
            "export_dir": "merged", "export_size": 5, "export_device": "cpu",
            "export_legacy_format": False}  # fmt: skip
    assert "written" in duoka("export", write(**keys), "infer_dtype=bfloat16")
    assert json.loads(Path("merged/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        duoka("export", "x.yaml")
    for flags in (("--to", "ollama"), ("--adapter",)):
        with pytest.raises(ConfigError, match="export_size is 5, which cuts"):
            duoka("export", "x.yaml", "-o", "other", *flags)
    write(model_name_or_path="merged", template="qwen3_nothink", infer_backend="huggingface", max_new_tokens=3)
    said = duoka("chat", "x.yaml", "--prompt", "hi", "--json").splitlines()  # what was cut is said behind it, on stderr
    answer = json.loads(next(line for line in said if line.startswith("{")))
    assert answer["prompt"] == "hi" and len(answer["answer"]) <= 3


def test_a_predicting_file_measures_and_answers(tiny_model: Path) -> None:
    write_conversations(Path("c.jsonl"), 6)
    keys = {"model_name_or_path": str(tiny_model), "do_predict": True, "eval_dataset": "c.jsonl", "template": "llama3",
            "cutoff_len": 256, "max_samples": 4, "output_dir": "out", "predict_with_generate": True,
            "max_new_tokens": 3, "per_device_eval_batch_size": 1, "stage": "sft"}  # fmt: skip
    said = json.loads(duoka("llamafactory-cli", "train", write(**keys), "--json").splitlines()[-1])
    assert said["num_samples"] == 4 == said["num_answers"] and said["loss"] > 0
    lines = [json.loads(line) for line in Path("out/generated_predictions.jsonl").read_text("utf-8").splitlines()]
    first = json.loads(Path("c.jsonl").read_text("utf-8").splitlines()[0])["messages"]
    assert len(lines) == 4 and lines[0]["label"] == first[-1]["content"]
    assert lines[0]["prompt"].endswith("<|im_start|>assistant\n") and first[-2]["content"] in lines[0]["prompt"]
    assert set(json.loads(Path("out/predict_results.json").read_text())) >= {"bleu-4", "rouge-l", "loss"}
    alone = json.loads(duoka("eval", "x.yaml", "predict_with_generate=false", "--json").splitlines()[-1])
    assert alone["loss"] == said["loss"]


@pytest.mark.parametrize(
    ("purpose", "keys", "words"),
    [
        ("chat", {"repetition_penalty": 1.2}, "tokens are drawn as the model has learned them"),
        ("chat", {"infer_backend": "vllm"}, "transformers' own model code"),
        ("chat", {"temperatur": 1}, "did you mean temperature"),
        ("chat", {"quantization_bit": 4}, "quantization_bit 4 is refused"),
        ("export", {"export_legacy_format": True}, "pickles"),
        ("export", {"export_quantization_bit": 4}, "export_quantization_bit 4 is refused"),
        ("eval", {"num_beams": 4}, "one answer is written"),
    ],
)
def test_what_would_change_the_answer_is_refused(purpose: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(Faults, match=words):
        read_asked(write(model_name_or_path="m", template="qwen3", cutoff_len=8, **keys), purpose)


def test_flags_come_before_the_file_and_the_file_before_what_is_usual() -> None:
    asked = read_asked(write(model_name_or_path="m", temperature=0.3, top_p=0.5, seed=4), "chat")
    assert asked is not None
    chosen = choose_sampling(ChatOptions(temperature=0.9), asked, temperature=0.0, max_new_tokens=7)
    assert (chosen.temperature, chosen.top_p, chosen.max_new_tokens, chosen.seed) == (0.9, 0.5, 7, 4)
    still = read_asked(write(model_name_or_path="m", temperature=0.3, do_sample=False), "chat")
    assert choose_sampling(ChatOptions(), still, temperature=0.7, max_new_tokens=7).temperature == 0
    wrong = read_asked(write(model_name_or_path="m", top_p=2), "chat")
    with pytest.raises(ConfigError, match="draw nothing"):
        choose_sampling(ChatOptions(), wrong, temperature=0.7, max_new_tokens=7)


def test_scores_are_those_computed_by_hand() -> None:
    assert bleu("abcd", "abcd") == 1.0 and bleu("", "a") == 0.0 and bleu("xyz", "abc") == 0.0
    # 3 of 4 characters, 2 of 3 pairs, 1 of 2 triples, no quadruple: half of one counts.
    assert bleu("abcx", "abcd") == pytest.approx((3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)
    assert bleu("ab", "abcd") == pytest.approx(2.718281828459045 ** (1 - 4 / 2) * (1 * 1 * 1 / 2 * 1 / 4) ** 0.25)
    said, wanted = ["the", "cat", "sat"], ["the", "cat", "is", "there"]
    assert rouge_n(said, wanted, 1) == pytest.approx(2 * 2 / 7) and rouge_n(said, wanted, 2) == pytest.approx(2 / 5)
    assert rouge_l(["a", "x", "b", "c"], ["a", "b", "y", "c"]) == pytest.approx(2 * 3 / 8)
    found = score([Prediction("", "你好 world", "你好 World"), Prediction("", "no", "yes")])
    assert found["exact"] == 0 and found["rouge-1"] == 50 and found["rouge-l"] == 50
