"""What is learned is not measured, what is mixed says its tokens, and a file that goes away is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import config_for, messages_record, simple_records, write_jsonl, write_ten_thousand

from duoka.config.schema import RunConfig
from duoka.data import prepare
from duoka.data.mixture import split_set
from duoka.data.prepare import PreparedData, prepare_data
from duoka.data.tokens.token_store import TokenStore
from duoka.errors import DataError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", simple_records(40))


@pytest.fixture
def prepared(tiny_tokenizer_folder: Path, tmp_path: Path) -> Any:
    def run(*names: Any, **options: Any) -> PreparedData:
        return prepare_data(config_for(*names, **options), tmp_path, tiny_tokenizer_folder)

    return run


def ids_of(store: TokenStore) -> list[list[int]]:
    return [store.sample(index).input_ids.tolist() for index in range(len(store))]


def test_copies_stay_on_one_side_of_the_split() -> None:
    content = np.repeat(np.arange(50, dtype=np.uint64), 4)
    train, held_out = split_set(content, 0.2, seed=3)
    assert len(held_out) == 40
    assert not set(content[train].tolist()) & set(content[held_out].tolist())
    train, held_out = split_set(content, 0.19, seed=3)
    assert len(held_out) in (36, 40) and not set(content[train].tolist()) & set(content[held_out].tolist())


def test_parts_of_one_conversation_stay_on_one_side_of_the_split(prepared: Any, tmp_path: Path) -> None:
    """What was learned was measured: a tenth part of each conversation lay in data.eval."""
    talks = [
        messages_record([("user", f"{number} {word}"), ("assistant", f"{number} " + " ".join([word] * 150))])
        for number, word in enumerate(["one", "two", "six", "ten", "map", "sun", "red", "sky"])
    ]
    path = write_jsonl(tmp_path / "long.jsonl", talks)
    whole = prepared(path, max_length=4096, eval=0)
    found = prepared(path, max_length=64, on_long="split", eval=0.25)
    assert len(found.train) + len(found.eval) > 4 * len(talks), "each is many parts"
    texts = ["/".join(map(str, ids)) + "/" for ids in ids_of(whole.train)]

    def talks_in(store: TokenStore) -> set[int]:
        parts = ["/".join(map(str, ids)) + "/" for ids in ids_of(store)]
        return {next(at for at, text in enumerate(texts) if part in text) for part in parts}

    learned, measured = talks_in(found.train), talks_in(found.eval)
    assert not learned & measured and learned | measured == set(range(8))
    with pytest.raises(DataError, match="are of one record, which stays whole"):
        prepared(write_jsonl(tmp_path / "one.jsonl", talks[:1]), max_length=64, on_long="split", eval=0.25)


def test_a_file_that_is_gone_is_named_and_no_room_is_asked_for(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "gone.jsonl", simple_records(4))
    tokenize = prepare.tokenize_pieces

    def lose(*arguments: Any, **options: Any) -> None:
        path.unlink()
        tokenize(*arguments, **options)

    monkeypatch.setattr(prepare, "tokenize_pieces", lose)
    with pytest.raises(DataError, match="cannot be read: it is there no more") as refused:
        prepared(path)
    assert refused.value.where == str(path) and "put it back" in (refused.value.fix or "")


def test_a_large_file_that_is_gone_is_named_too(prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then processes of their own read it."""
    path = write_ten_thousand(tmp_path / "gone.jsonl")
    tokenize = prepare.tokenize_pieces

    def lose(*arguments: Any, **options: Any) -> None:
        path.unlink()
        tokenize(*arguments, **options)

    monkeypatch.setattr(prepare, "tokenize_pieces", lose)
    monkeypatch.setattr("duoka.data.tokens.tokenize.SMALL_BYTES", 1)
    with pytest.raises(DataError, match="it is there no more"):
        prepared(path, workers=2)


def test_a_mixture_says_what_its_shares_come_to_in_tokens(prepared: Any, data: Path, tmp_path: Path) -> None:
    """Shares count samples: of texts as long as books and as lines they are another mixture than by tokens."""
    long = [messages_record([("user", "q"), ("assistant", "word " * 300)]) for _ in range(4)]
    other = write_jsonl(tmp_path / "long.jsonl", long)
    result = prepared({"name": str(data), "weight": 0.5}, {"name": str(other), "weight": 0.5}, eval=0)
    (name, samples, tokens), (_, _, others) = result.report.mixture
    own = {tuple(ids) for ids in ids_of(prepared(other, eval=0).train)}
    lengths = [len(ids) for ids in ids_of(result.train)]
    longer = sum(len(ids) for ids in ids_of(result.train) if tuple(ids) in own)
    assert (name, samples) == (str(data), 0.5)
    assert others == pytest.approx(longer / sum(lengths)) and tokens + others == pytest.approx(1)
    assert any("which weight and share mean, and of tokens" in line for line in result.report.lines())
    assert not prepared(data, other, eval=0).report.mixture, "nothing was asked for"


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_a_pair_that_is_cut_to_the_same_answer_twice_is_dropped(
    tiny_tokenizer_folder: Path, tmp_path: Path, stage: str
) -> None:
    same = "word " * 60
    records = [{"prompt": "q", "chosen": f"{same}{number}", "rejected": f"{same}x"} for number in range(3)]
    path = write_jsonl(tmp_path / "pairs.jsonl", [*records, {"prompt": "q", "chosen": "a", "rejected": "b"}])
    raw = {"model": "demo", "stage": stage, "data": {"train": [str(path)], "max_length": 100}}
    found = prepare_data(RunConfig.model_validate(raw), tmp_path, tiny_tokenizer_folder)
    (report,) = found.report.sets
    assert (report.counts.num_kept, report.counts.num_dropped_masked) == (1, 3)
    whole = RunConfig.model_validate({**raw, "data": {**raw["data"], "max_length": 1000}})
    assert len(prepare_data(whole, tmp_path, tiny_tokenizer_folder).train) == 4
