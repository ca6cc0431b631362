"""Tokens and positions that a model has no row for: refused where a text has one, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data_kit import config_for, messages_record, write_jsonl
from families import write_family
from tiny import build_tiny_tokenizer, write_tiny_model

from duoka.cli import run as duoka
from duoka.config.schema import StageConfig
from duoka.data.prepare import prepare_data
from duoka.errors import DataError


def asked(answer: str) -> dict[str, object]:
    return messages_record([("user", "?"), ("assistant", answer)])


def test_a_token_that_the_model_has_no_row_for_is_named_where_a_text_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "model")
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = build_tiny_tokenizer()
    room = rows - len(tokenizer)
    tokenizer.add_tokens([f"<t{number}>" for number in range(room + 2)])
    tokenizer.save_pretrained(folder)
    last = room - 1  # the last one with a row
    inside = write_jsonl(tmp_path / "inside.jsonl", [asked(f"{place} <t{last}>") for place in range(4)])
    assert len(prepare_data(config_for(inside), tmp_path, folder).train) == 4
    beyond = write_jsonl(tmp_path / "beyond.jsonl", [asked(f"{place} <t{last + 1}>") for place in range(4)])
    for _ in range(2):  # tokens that were kept are looked at again
        with pytest.raises(DataError) as caught:
            prepare_data(config_for(inside, beyond), tmp_path, folder)
        assert f"has the token '<t{last + 1}>', number {rows:,}" in caught.value.what
        assert f"rows for {rows:,} tokens" in caught.value.what and "beyond" in caught.value.what
        assert "resize_token_embeddings" in (caught.value.fix or "")
    texts = tmp_path / "texts.txt"
    texts.write_text(f"a\n<t{last}> <t{last + 1}>\n", encoding="utf-8")
    assert duoka(["embed", str(folder), str(texts), "--nproc", "1"]) == 2
    assert f"the texts have the token '<t{last + 1}>', number {rows:,}" in capsys.readouterr().err
    assert not texts.with_name(".texts.txt.npy.draft").exists()


@pytest.fixture
def ends_at_64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-2 with a table of 64 positions."""
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    return write_family(tmp_path / "gpt2", "gpt2", tokenizer=build_tiny_tokenizer(), n_positions=64)


def test_a_text_beyond_a_table_of_positions_is_named(ends_at_64: Path, tmp_path: Path) -> None:
    talks = write_jsonl(tmp_path / "talks.jsonl", [asked("short"), asked("long " * 12)])
    with pytest.raises(DataError, match=r"talks.jsonl has a sample of 82 tokens, .* 64 positions") as caught:
        prepare_data(config_for(talks, max_length=128), tmp_path, ends_at_64)
    assert "data.max_length: 64" in (caught.value.fix or "")
    assert len(prepare_data(config_for(talks, max_length=64), tmp_path, ends_at_64).train) == 2
    # Positions of a Llama are computed, however many there are.
    folder = write_tiny_model(tmp_path / "llama")
    facts = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(facts))
    assert len(prepare_data(config_for(talks, max_length=128), tmp_path, folder).train) == 2


def test_what_is_measured_and_embedded_ends_where_the_positions_do(
    ends_at_64: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    talks = write_jsonl(tmp_path / "talks.jsonl", [asked("short"), asked("long " * 12)])
    assert duoka(["eval", str(ends_at_64), "--data", str(talks), "--precision", "fp32", "--nproc", "1"]) == 0
    assert "1 truncated" in capsys.readouterr().err
    texts = tmp_path / "texts.txt"
    texts.write_text("x" * 200 + "\n" + "x" * 64 + "\n")
    assert duoka(["embed", str(ends_at_64), str(texts), "--precision", "fp32", "--nproc", "1"]) == 0
    assert "2 texts (1 were cut), " in capsys.readouterr().out
    cut, whole = torch.tensor(np.load(f"{texts}.npy"))
    assert torch.allclose(cut, whole, atol=1e-5)


def test_a_prompt_to_be_answered_leaves_room_in_the_table(ends_at_64: Path, tmp_path: Path) -> None:
    talks = write_jsonl(tmp_path / "talks.jsonl", [messages_record([("user", "long " * 12), ("assistant", "!")])])
    config = config_for(talks, max_length=128).model_copy(update={"stage": StageConfig(name="rl")})
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"max_new_tokens": 8})})
    with pytest.raises(DataError, match=r"a prompt has 1?[0-9]{2} tokens, .* 64 positions"):
        prepare_data(config, tmp_path, ends_at_64)
