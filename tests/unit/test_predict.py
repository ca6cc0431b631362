"""`duoka eval FILE` with predict_with_generate: what can be asked is answered, the rest counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CHATML, write_tiny_model
from transformers import AutoModelForCausalLM

import duoka.serve.generate
from duoka.comm.world import World
from duoka.config.schema import DataConfig, DataSource, ModelConfig, RunConfig
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.model.sampling import Sampling
from duoka.serve.predict import predict

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML


def test_what_a_template_refuses_is_left_out_and_what_fills_the_window_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duoka.serve.generate, "stream_answer", lambda lm, tokenizer, ids, sampling: [str(len(ids))])
    folder = write_tiny_model(tmp_path / "model", tied=False)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = replace(load_tokenizer(folder), template=NO_SYSTEM, tool_template=NO_SYSTEM)
    talks = [[("user", "Hi"), ("assistant", "a")], [("system", "s"), ("user", "Hi"), ("assistant", "b")],
             [("user", "long " * 400), ("assistant", "c")]]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) for talk in talks]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = RunConfig(model=ModelConfig(name=str(folder)), data=DataConfig(train=(DataSource(name=str(file)),)))
    notes: list[str] = []
    found = predict(lm, tokenizer, config, Path(), Sampling(max_new_tokens=6), World(), notes.append)
    assert [one.label for one in found] == ["a", "c"]
    assert found[1].predict == str(1024 - 6), "there is no room for an answer"
    for part in ("1 conversations have no answer", "of 1 prompts the beginning was cut"):
        assert any(part in note for note in notes), notes


def test_a_wrong_record_counts_among_the_first_ones_as_where_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duoka.serve.generate, "stream_answer", lambda lm, tokenizer, ids, sampling: ["said"])
    folder = write_tiny_model(tmp_path / "model", tied=False)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    file = tmp_path / "talks.jsonl"
    lines = ["no JSON", *(json.dumps({"instruction": "Hi", "output": str(n)}) for n in range(3))]
    file.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n", encoding="utf-8")
    data = DataConfig(train=(DataSource(name=str(file), max_samples=3),), on_bad="skip")
    config = RunConfig(model=ModelConfig(name=str(folder)), data=data)
    found = predict(lm, load_tokenizer(folder), config, Path(), Sampling(max_new_tokens=6), World())
    assert [one.label for one in found] == ["0", "1"]
