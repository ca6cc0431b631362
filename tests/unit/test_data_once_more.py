"""The same bytes under another name, files that change while they are read, cells that are JSON, ends of documents."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_kit import config_for, simple_records, write_jsonl
from tiny import write_pairs

from duoka.config.schema import RunConfig
from duoka.data import prepare
from duoka.data.dataset_lengths import find_lengths, lengths_of, remember_lengths
from duoka.data.feed.stream_source import build_source
from duoka.data.prepare import PreparedData, prepare_data
from duoka.data.read.registry import check_data, find_sets
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts_of(prepared: PreparedData, folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    texts = [tokenizer.decode(part.input_ids.tolist()) for i in range(prepared.num_shown) for part in prepared.shown(i)]
    return [text.removeprefix("<|im_start|>").removesuffix("<|im_end|>") for text in texts]


NAMED = [
    ('{"text": "one"}\n{"text": "two"}\n', "a.txt", "a.jsonl", ["one", "two"]),
    ("text\none\ntwo\n", "a.txt", "a.csv", ["one", "two"]),
    ("text\none\ntwo\n", "a.csv", "a.txt", ["text", "one", "two"]),
]


@pytest.mark.parametrize(("content", "first", "then", "wanted"), NAMED)
def test_the_same_bytes_under_a_name_that_reads_them_otherwise_are_other_data(
    tmp_path: Path, tiny_tokenizer_folder: Path, content: str, first: str, then: str, wanted: list[str]
) -> None:
    (tmp_path / first).write_text(content, encoding="utf-8")
    prepare_data(config_for(tmp_path / first), tmp_path, tiny_tokenizer_folder)
    (tmp_path / first).rename(tmp_path / then)
    found = prepare_data(config_for(tmp_path / then), tmp_path, tiny_tokenizer_folder)
    assert texts_of(found, tiny_tokenizer_folder) == wanted


def test_a_file_that_changes_while_it_is_read_is_refused_and_its_tokens_are_not_kept(
    tmp_path: Path, tiny_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", simple_records(20))
    before, real = data.read_bytes(), prepare.tokenize_pieces

    def changed_meanwhile(*args: Any, **more: Any) -> None:
        data.write_bytes(before.replace(b"answer", b"remark"))
        real(*args, **more)

    monkeypatch.setattr(prepare, "tokenize_pieces", changed_meanwhile)
    with pytest.raises(DataError, match="changed while they were read"):
        prepare_data(config_for(data), tmp_path, tiny_tokenizer_folder)
    monkeypatch.setattr(prepare, "tokenize_pieces", real)
    data.write_bytes(before)
    found = prepare_data(config_for(data), tmp_path, tiny_tokenizer_folder)
    assert not found.report.sets[0].reused
    assert all("answer" in text and "remark" not in text for text in texts_of(found, tiny_tokenizer_folder))


def test_json_in_a_cell_is_an_answer_and_turns_in_one_are_turns(tmp_path: Path, tiny_tokenizer_folder: Path) -> None:
    answers = ['[{"name": "tom"}]', "[[1, 2], [3, 4]]", '[["a", "b", "c"]]', "[1, 2]"]
    with (tmp_path / "answers.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerows([["instruction", "output", "history"], *(["list", one, '[["q", "a"]]'] for one in answers)])
    found = prepare_data(config_for(tmp_path / "answers.csv"), tmp_path, tiny_tokenizer_folder)
    texts = texts_of(found, tiny_tokenizer_folder)
    head = "user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nlist<|im_end|>\n"
    assert texts == [f"{head}<|im_start|>assistant\n{one}<|im_end|>\n" for one in answers]


@pytest.fixture
def one_token(tiny_tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A tokenizer whose documents begin and end in the same token, as those of GPT-2 and SmolLM2's base."""
    folder = tmp_path / "one token"
    folder.mkdir()
    for file in tiny_tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    names = folder / "tokenizer_config.json"
    facts = json.loads(names.read_text("utf-8"))
    mark = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    names.write_text(json.dumps({**facts, **mark}), "utf-8")
    return folder


def pretrain(path: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "demo", "stage": "pretrain", "data": {"train": [str(path)], **data}})


DOCUMENTS = ["one", "two<|endoftext|>", "<|endoftext|>three"]
FRAMED = ["<|endoftext|>one<|endoftext|>", "<|endoftext|>two<|endoftext|>", "<|endoftext|>three<|endoftext|>"]


def test_a_document_ends_in_the_token_that_begins_it_where_a_tokenizer_has_one_for_both(
    tmp_path: Path, one_token: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in DOCUMENTS])
    rows = prepare_data(pretrain(data, max_length=64), tmp_path, one_token).train
    tokenizer = load_tokenizer(one_token)
    assert [tokenizer.decode(part.input_ids.tolist()) for part in rows.segments(0)] == FRAMED
    assert [int(part.input_ids[part.is_target][-1]) for part in rows.segments(0)] == [tokenizer.eos_id] * 3


def test_a_streams_documents_end_so_too_and_are_another_order(tmp_path: Path, one_token: Path) -> None:
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "data.parquet")
    config = pretrain(tmp_path / "data.parquet", max_length=64, stream=True)
    tokenizer = load_tokenizer(one_token)
    source = build_source(find_sets(config, tmp_path), config, tokenizer)
    shown = [part for number in range(source.plan.num_streams) for part in source.first_row(number)]
    assert set(FRAMED) <= {tokenizer.decode(part.input_ids.tolist()) for part in shown}
    other = ChatTokenizer.load(_saved(tokenizer, tmp_path))
    assert source.tokenizer_fingerprint != other.fingerprint, "checkpoints of documents without an end are refused"


def _saved(tokenizer: ChatTokenizer, folder: Path) -> Path:
    tokenizer.save(folder / "saved.json")
    return folder / "saved.json"


@pytest.mark.parametrize(
    ("train", "measured"), [(["all"], ["all/b.jsonl"]), (["all/a.jsonl"], ["link.jsonl"]), (["all/a.jsonl"], ["all"])]
)
def test_a_file_that_is_learned_cannot_be_measured_by_another_name(
    tmp_path: Path, train: list[str], measured: list[str]
) -> None:
    (tmp_path / "all").mkdir()
    for name in ("a", "b"):
        write_jsonl(tmp_path / "all" / f"{name}.jsonl", simple_records(4))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "all" / "a.jsonl")
    (fault,) = check_data(config_for(*train, eval=measured), tmp_path)
    assert "which data.train learns" in fault.what and fault.key == "data.eval"
    assert not check_data(config_for("all/a.jsonl", eval=["all/b.jsonl"]), tmp_path)


def test_a_file_that_two_sets_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name in ("a", "b"):
        write_jsonl(tmp_path / "all" / f"{name}.jsonl", simple_records(4))
    said = [found.notes for found in find_sets(config_for("all", "all/b.jsonl"), tmp_path)]
    assert "all/b.jsonl: b.jsonl is in 'all' too, and is learned twice in every epoch" in said[1]
    assert not any("twice" in note for found in find_sets(config_for("all"), tmp_path) for note in found.notes)


def test_a_padded_plan_does_not_take_the_lengths_of_packed_pairs(tmp_path: Path, tiny_tokenizer_folder: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    packed = RunConfig.model_validate({"model": "demo", "stage": "dpo", "data": {"train": [str(pairs)]}})
    padded = packed.model_copy(update={"data": packed.data.model_copy(update={"packing": False})})
    remember_lengths(lengths_of(prepare_data(packed, tmp_path, tiny_tokenizer_folder), packed), packed, tmp_path)
    assert find_lengths(packed, tmp_path).basis == "tokenized"
    assert find_lengths(padded, tmp_path).basis == "sampled"
