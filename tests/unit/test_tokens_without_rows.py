"""A tokenizer that was given tokens beside a model that was not: refused where a text has one, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_kit import config_for, messages_record, write_jsonl
from tiny import build_tiny_tokenizer, write_tiny_model

from duoka.data.prepare import prepare_data
from duoka.errors import DataError


def asked(answer: str) -> dict[str, object]:
    return messages_record([("user", "?"), ("assistant", answer)])


def test_a_token_that_the_model_has_no_row_for_is_named_where_a_text_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
