"""Plain text, prompts, pairs and labeled answers: read, checked, tokenized; long ones split without loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import config_for, messages_record, simple_records, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.config.schema import StageConfig
from duoka.data.prepare import PreparedData, prepare_data, read_tokenizer
from duoka.data.read.detect import detect_format
from duoka.data.read.example import BadRecord, Labeled, Message, Preference, Prompt, SetFormat, Text
from duoka.data.read.record_kinds import read_record
from duoka.data.read.registry import check_data, check_sets, find_sets
from duoka.data.tokens.encode import split_sample
from duoka.data.tokens.template import Sample

ASK = {"role": "user", "content": "q"}
GOOD, WORSE = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "worse"}
SAY = (Message("user", "q"),)
RULE = {"role": "system", "content": "short"}
PAIR = Preference(SAY, Message("assistant", "good"), Message("assistant", "worse"))
LIKED = Labeled((*SAY, Message("assistant", "good")), True)
GPT = [{"from": "gpt", "value": text} for text in ("good", "worse")]
DETECTED: list[tuple[dict[str, Any], Any]] = [
    ({"text": "whole"}, Text("whole")),
    ({"prompt": "q"}, Prompt(SAY)),
    ({"prompt": [ASK]}, Prompt(SAY)),
    ({"prompt": "q", "chosen": "good", "rejected": "worse"}, PAIR),
    ({"instruction": "q", "input": "", "chosen": "good", "rejected": "worse"}, PAIR),
    ({"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, WORSE]}, PAIR),
    ({"prompt": [ASK], "chosen": [GOOD], "rejected": [WORSE]}, PAIR),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, WORSE]}, PAIR),
    ({"conversations": [{"from": "human", "value": "q"}], "chosen": GPT[0], "rejected": GPT[1]}, PAIR),
    ({"prompt": "q", "chosen": "good", "rejected": "worse", "margin": 2}, replace(PAIR, margin=2.0)),
    ({"prompt": "q", "chosen": "good", "rejected": "worse", "margin": None}, PAIR),
    ({"prompt": "q", "chosen": "good", "rejected": "worse", "margin": "wide"}, PAIR),  # a column of something else
    ({"prompt": "q", "completion": "good", "label": True}, LIKED),
    ({"messages": [ASK, GOOD], "label": True}, LIKED),
    ({"instruction": "q", "output": "good", "kto_tag": True}, LIKED),
    # HuggingFaceH4/ultrafeedback_binarized, and a talk that is named by its question
    ({"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, WORSE], "messages": [ASK, GOOD], "score": 8.0}, PAIR),
    (
        {"prompt": "q", "chosen": [RULE, ASK, GOOD], "rejected": [RULE, ASK, WORSE]},
        replace(PAIR, messages=(Message("system", "short"), *SAY)),
    ),
]


@pytest.mark.parametrize(("record", "expected"), DETECTED, ids=[str(list(record)) for record, _ in DETECTED])
def test_each_kind_is_recognized_and_read(record: dict[str, Any], expected: Any) -> None:
    form = detect_format(record)
    assert form is not None
    assert read_record(record, form) == expected


def pair_form(**more: str) -> SetFormat:
    form = detect_format({"chosen": [ASK, GOOD], "rejected": [ASK, WORSE]})
    assert form is not None
    return form


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, DETECTED[7][0], "the same answer"),
    ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "x"}, WORSE]}, DETECTED[7][0], "different conversations"),
    ({"prompt": "other", "chosen": [ASK, GOOD], "rejected": [ASK, WORSE]}, DETECTED[5][0], "'prompt' is another conv"),
    ({"prompt": "q", "chosen": [ASK, GOOD], "rejected": [RULE, ASK, WORSE]}, DETECTED[5][0], "different conversations"),
    (
        {"prompt": [ASK], "chosen": [GOOD, ASK, GOOD], "rejected": [WORSE]},
        DETECTED[6][0],
        "is 3 messages behind 'prompt'",
    ),
    ({"chosen": [ASK, GOOD]}, DETECTED[7][0], "there is no 'rejected'"),
    ({"prompt": "q", "chosen": 3, "rejected": "b"}, DETECTED[3][0], "'chosen' is a number"),
    ({"prompt": "q", "completion": "a", "label": 2}, DETECTED[12][0], "must be true or false"),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "wide"},
        DETECTED[9][0],
        "'margin' is text, and must be a",
    ),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 10**400},
        DETECTED[9][0],
        "'margin' is a number, and must",
    ),
    ({"text": "  "}, DETECTED[0][0], "'text' is empty"),
    ({"text": None}, DETECTED[0][0], "'text' is null"),
    ({"prompt": [ASK, GOOD]}, DETECTED[2][0], "the prompt ends with assistant"),
]


@pytest.mark.parametrize(("record", "like", "said"), BAD, ids=[said for *_, said in BAD])
def test_a_wrong_record_of_each_kind_is_refused(record: dict[str, Any], like: dict[str, Any], said: str) -> None:
    form = detect_format(like)
    assert form is not None
    with pytest.raises(BadRecord, match=said):
        read_record(record, form)


def test_dataset_info_says_the_kind(tmp_path: Path) -> None:
    entries = {
        "pairs": {"file_name": "p.jsonl", "ranking": True, "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}},
        "liked": {"file_name": "l.jsonl", "columns": {"prompt": "q", "response": "a", "kto_tag": "ok"}},
        "asked": {"file_name": "l.jsonl", "columns": {"prompt": "q"}},
        "plain": {"file_name": "t.jsonl", "formatting": "text", "columns": {"text": "words"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    write_jsonl(tmp_path / "p.jsonl", [{"q": "q", "a": "x", "b": "y"}])
    write_jsonl(tmp_path / "l.jsonl", [{"q": "q", "a": "x", "ok": False}])
    write_jsonl(tmp_path / "t.jsonl", [{"words": "x"}])
    config = config_for(*entries)
    assert [found.form.kind for found in find_sets(config, tmp_path)] == [
        "preference", "labeled", "prompt", "text",
    ]  # fmt: skip
    assert not check_sets(config, tmp_path)
    faults = check_data(config, tmp_path)
    assert len(faults) == 4, "stage sft learns from none of them"
    assert "preference pairs (ranking), and stage sft learns the answers of conversations" in faults[0].what


@pytest.mark.parametrize("label", ["yes", 1, None])
def test_labels_of_another_kind_are_named(tmp_path: Path, label: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a", "label": label}] * 2)
    config = config_for(path).model_copy(update={"stage": StageConfig(name="kto")})
    (fault,) = check_data(config, tmp_path)
    assert fault.fix.startswith(f"its column label holds {json.dumps(label)}: write true")


def test_a_file_without_a_record_and_one_of_another_encoding_say_so(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text("\n \n", encoding="utf-8")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    blank, latin = check_sets(config_for(tmp_path / "blank.jsonl", tmp_path / "latin.jsonl"), tmp_path)
    assert blank.what == "blank.jsonl has no record, only blank lines"
    assert "not UTF-8" in latin.what and latin.fix == "write the file as UTF-8"


@pytest.fixture
def prepared(tiny_tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))

    def run(records: list[Any], **options: Any) -> PreparedData:
        path = write_jsonl(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", records)
        run.config = config_for(path, **options)  # type: ignore[attr-defined]
        return prepare_data(run.config, tmp_path, tiny_tokenizer_folder)  # type: ignore[attr-defined]

    return run


def test_a_pair_is_one_sample_with_both_answers_as_targets(
    prepared: Any, tiny_tokenizer_folder: Path, tmp_path: Path
) -> None:
    pairs = prepared([{"prompt": "q", "chosen": "good", "rejected": "worse"}]).train
    tokenizer = read_tokenizer(prepared.config.model, tmp_path, tiny_tokenizer_folder)
    learned = [tokenizer.decode(part.input_ids[part.is_target].tolist()) for part in pairs.segments(0)]
    assert learned == ["good<|im_end|>", "worse<|im_end|>"]


@pytest.mark.parametrize(("stage", "on_long", "kept", "is_said"), [
    ("reward", "truncate", 3, True), ("reward", "drop", 1, False), ("dpo", "truncate", 3, False),
])  # fmt: skip
def test_answers_that_are_scored_where_they_were_cut_are_told_of(
    tiny_tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Any, on_long: str, kept: int,
    is_said: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    answers = [("good", "worse"), ("good " * 30, "worse"), ("good", "worse " * 30)]
    pairs = [{"prompt": "q", "chosen": good, "rejected": worse} for good, worse in answers]
    config = config_for(write_jsonl(tmp_path / "pairs.jsonl", pairs), max_length=64, on_long=on_long)
    found = prepare_data(config.model_copy(update={"stage": StageConfig(name=stage)}), tmp_path, tiny_tokenizer_folder)
    assert len(found.train) == kept
    assert any("of 2 pairs data.max_length (64) cut an answer" in note for note in found.report.notes) is is_said


def test_a_label_is_kept_beside_its_sample(prepared: Any) -> None:
    records = [{"messages": [ASK, GOOD], "label": True}, {"messages": [ASK, GOOD], "label": False}]
    store = prepared(records).train
    assert store.marks.tolist() == [1, 0]
    assert len(set(store.parts[0].arrays.content.tolist())) == 2, "another label is another sample"


def test_a_prompt_ends_where_the_assistant_begins(prepared: Any, tiny_tokenizer_folder: Path, tmp_path: Path) -> None:
    store = prepared([{"prompt": "q"}]).train
    tokenizer = read_tokenizer(prepared.config.model, tmp_path, tiny_tokenizer_folder)
    assert tokenizer.decode(store.sample(0).input_ids.tolist()).endswith("<|im_start|>assistant\n")
    assert store.sample(0).num_targets == 0


def test_a_document_is_kept_whole_and_learned_whole(prepared: Any) -> None:
    rows = prepared([{"text": "long " * 200}], max_length=16).train
    (length,) = rows.store.lengths.tolist()
    assert length > 200 and rows.store.sample(0).num_targets == length - 1
    assert int(rows.num_targets.sum()) == length - 1 and set(rows.lengths.tolist()[:-1]) == {16}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 90), st.integers(2, 20), st.integers(0, 2**30))
def test_a_split_sample_has_every_target_once_with_its_token(length: int, most: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random(length) < 0.5
    parts = split_sample(Sample(np.arange(length, dtype=np.int32), mask), most)
    assert all(len(part.input_ids) <= most for part in parts)
    assert not any(part.is_target[0] for part in parts[1:]), "context is shown as what is learned"
    learned = [int(token) for part in parts for token in part.input_ids[1:][part.is_target[1:]]]
    assert learned == np.arange(1, length)[mask[1:]].tolist()


def test_split_keeps_every_target_and_counts(prepared: Any) -> None:
    records = simple_records(20)
    whole, split = prepared(records), prepared(records, max_length=24, on_long="split")
    counts = split.report.sets[0].counts
    assert counts.num_targets == whole.report.sets[0].counts.num_targets
    assert counts.num_split > 0 and counts.num_parts > counts.num_split and counts.num_truncated == 0
    assert int(split.train.lengths.max()) <= 24
    line = split.report.sets[0].line()
    assert "20 of 20 kept" in line and f"{counts.num_split} split into {counts.num_parts}" in line


def test_text_that_was_damaged_before_us_is_counted_and_said(prepared: Any) -> None:
    report = prepared([*simple_records(3), messages_record([("user", "q\ufffd"), ("assistant", "a")])]).report
    assert report.sets[0].counts.num_damaged == 1
    assert "1 with U+FFFD" in report.sets[0].line()


def test_characters_that_the_tokenizer_lacks_are_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "hello", "you"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    folder = tmp_path / "model"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    facts = {"unk_token": "<unk>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    path = write_jsonl(tmp_path / "a.jsonl", [messages_record([("user", "hello 多卡"), ("assistant", "<unk> you x")])])
    report = prepare_data(config_for(path), tmp_path, folder).report
    assert report.sets[0].counts.num_unknown == 2, "the one that the text spells out is none"
    assert "2 tokens stand for characters that the tokenizer does not have" in report.sets[0].line()
