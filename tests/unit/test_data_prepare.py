"""Tokenized once per content, whoever asks; every record accounted for; the split stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from data_kit import config_for, messages_record, sharegpt_record, simple_records, write_jsonl

from duoka.data import prepare, set_key
from duoka.data.mixture import mixture_counts
from duoka.data.prepare import PreparedData, prepare_data
from duoka.data.tokens import tokenize
from duoka.data.tokens.token_store import TokenStore
from duoka.errors import DataError, Faults, StorageError, WorkerFailed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "缓存 cache"
    monkeypatch.setenv("DUOKA_CACHE", str(cache))
    return cache


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", simple_records(40))


@pytest.fixture
def prepared(tiny_tokenizer_folder: Path, tmp_path: Path) -> Any:
    def run(*names: Any, say: Any = lambda text: None, **options: Any) -> PreparedData:
        return prepare_data(config_for(*names, **options), tmp_path, tiny_tokenizer_folder, say=say)

    return run


def ids_of(store: TokenStore) -> list[list[int]]:
    return [store.sample(index).input_ids.tolist() for index in range(len(store))]


# -------------------------------------------------------------------------------------------- caching


def test_an_unchanged_set_is_reused_and_says_so(prepared: Any, data: Path) -> None:
    said: list[str] = []
    first = prepared(data)
    second = prepared(data, say=said.append)
    assert (first.report.sets[0].reused, second.report.sets[0].reused) == (False, True)
    assert "reused" in said[-1]
    assert ids_of(first.train) == ids_of(second.train)
    assert first.train.fingerprint == second.train.fingerprint


IRRELEVANT = [
    {"packing": False},
    {"workers": 1},
    {"eval": 0.25},
    {"on_bad": "skip"},
    {"train": {"seed": 7}},
    {"train": {"micro_batch": 3}},
]
RELEVANT = [{"max_length": 64}, {"on_long": "drop"}, {"targets": "last"}]


@pytest.mark.parametrize("options", IRRELEVANT, ids=str)
def test_an_option_that_changes_no_token_keeps_the_work(prepared: Any, data: Path, options: dict[str, Any]) -> None:
    prepared(data)
    assert prepared(data, **options).report.sets[0].reused


@pytest.mark.parametrize("options", RELEVANT, ids=str)
def test_an_option_that_changes_tokens_does_the_work_again(prepared: Any, data: Path, options: dict[str, Any]) -> None:
    prepared(data)
    assert not prepared(data, **options).report.sets[0].reused


def test_content_decides_not_the_name(prepared: Any, data: Path, tmp_path: Path) -> None:
    first = prepared(data)
    copy = write_jsonl(tmp_path / "another name.jsonl", simple_records(40))
    assert prepared(copy).report.sets[0].reused
    write_jsonl(data, simple_records(41))
    changed = prepared(data)
    assert not changed.report.sets[0].reused
    assert len(changed.train) == 41
    assert changed.train.fingerprint != first.train.fingerprint


def test_a_file_changed_within_the_same_tick_is_noticed(prepared: Any, data: Path) -> None:
    """Same name, same size, same time of change: only the content tells."""
    facts = data.stat()
    assert "answer 1" in data.read_text(encoding="utf-8")
    before = ids_of(prepared(data).train)
    data.write_text(data.read_text(encoding="utf-8").replace("answer", "remark"), encoding="utf-8")
    os.utime(data, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert data.stat().st_size == facts.st_size
    assert ids_of(prepared(data).train) != before


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files had been written a minute ago: what is found in them is remembered."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 60 * 10**9)


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_changed_file_with_the_old_size_and_time_is_read_again(
    prepared: Any, data: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As rsync, tar and editors that keep times leave it: a remembered file, of an old date."""
    os.utime(data, ns=(10**18, 10**18))
    settle(monkeypatch)
    before = ids_of(prepared(data).train)
    text = data.read_text(encoding="utf-8").replace("answer", "remark")
    written = data if how == "in place" else data.with_suffix(".new")
    written.write_text(text, encoding="utf-8")
    os.utime(written, ns=(10**18, 10**18))
    written.replace(data)
    assert ids_of(prepared(data).train) != before


@pytest.mark.parametrize("mtime_ns", [10**18, 4 * 10**18])  # one of the future too, as archives and cameras give
def test_an_unchanged_file_is_not_read_for_its_hash_again(
    prepared: Any, data: Path, monkeypatch: Any, mtime_ns: int
) -> None:
    os.utime(data, ns=(mtime_ns, mtime_ns))
    settle(monkeypatch)
    prepared(data)
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **kw: (opened.append(path.name), real(path, *args, **kw))[1])
    digest = set_key.file_digest(data, Path(os.environ["DUOKA_CACHE"]) / "tokens")
    assert digest and data.name not in opened


def test_another_tokenizer_does_the_work_again(
    prepared: Any, data: Path, tiny_tokenizer_folder: Path, tmp_path: Path
) -> None:
    prepared(data)
    config = config_for(data)
    named = config.model_copy(update={"model": config.model.model_copy(update={"template": "plain"})})
    result = prepare_data(named, tmp_path, tiny_tokenizer_folder)
    assert not result.report.sets[0].reused
    assert result.report.template == "plain"


def test_a_damaged_cache_is_made_again(prepared: Any, data: Path, own_cache: Path) -> None:
    expected = ids_of(prepared(data).train)
    (ids_file,) = own_cache.glob("tokens/*/ids.npy")
    ids_file.write_bytes(ids_file.read_bytes()[:200])
    again = prepared(data)
    assert not again.report.sets[0].reused
    assert ids_of(again.train) == expected


def test_an_interrupted_work_goes_on_where_it_stopped(
    prepared: Any, data: Path, monkeypatch: Any, own_cache: Path
) -> None:
    monkeypatch.setattr(prepare, "PIECE_BYTES", (500, 500))
    real, done = tokenize.tokenize_piece, []

    def dying(piece: Any, *args: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(piece.start)
        return real(piece, *args)

    monkeypatch.setattr(tokenize, "tokenize_piece", dying)
    with pytest.raises(KeyboardInterrupt):
        prepared(data)
    again: list[int] = []
    monkeypatch.setattr(tokenize, "tokenize_piece", lambda piece, *a: (again.append(piece.start), real(piece, *a))[1])
    result = prepared(data)
    assert len(result.train) == 40
    assert again and not set(again) & set(done), "finished pieces were done twice"
    assert not list(own_cache.glob("tokens/*.draft")), "drafts must go when the set is whole"


def test_processes_give_the_same_as_one(prepared: Any, tmp_path: Path, monkeypatch: Any, own_cache: Path) -> None:
    path = write_jsonl(tmp_path / "many.jsonl", [*simple_records(200), {"messages": []}, *simple_records(50)])
    expected = prepared(path, on_bad="skip", workers=1)
    monkeypatch.setenv("DUOKA_CACHE", str(own_cache / "second"))
    monkeypatch.setattr(tokenize, "SMALL_BYTES", 0)
    monkeypatch.setattr(prepare, "PIECE_BYTES", (2000, 2000))
    found = prepared(path, on_bad="skip", workers=2)
    assert not found.report.sets[0].reused
    assert ids_of(found.train) == ids_of(expected.train)
    assert found.report.sets[0].counts == expected.report.sets[0].counts
    assert found.report.sets[0].skipped == expected.report.sets[0].skipped
    assert found.report.sets[0].skipped[0].line == 201


def test_a_process_that_dies_is_told_with_its_place(prepared: Any, data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenize, "SMALL_BYTES", 0)
    monkeypatch.setattr(prepare, "PIECE_BYTES", (500, 500))
    monkeypatch.setattr(tokenize.sys, "executable", "/bin/false")
    with pytest.raises(WorkerFailed, match=r"tokenizing process died .*\n.*data.jsonl, from line"):
        prepared(data, workers=2)


def _prepare_in_a_process(args: tuple[Path, Path, str]) -> tuple[str, bool]:
    data, tokenizer_folder, cache = args
    os.environ["DUOKA_CACHE"] = cache
    result = prepare_data(config_for(data), data.parent, tokenizer_folder)
    return result.train.fingerprint, result.report.sets[0].reused


def test_two_at_once_do_the_work_once(tmp_path: Path, tiny_tokenizer_folder: Path, own_cache: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", simple_records(3000))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_prepare_in_a_process, [(path, tiny_tokenizer_folder, str(own_cache))] * 2, chunksize=1)
    assert results[0][0] == results[1][0]
    assert sorted(reused for _, reused in results) == [False, True]
    assert len(list(own_cache.glob("tokens/*/meta.json"))) == 1


def test_a_cache_that_cannot_be_written_is_a_storage_error(
    prepared: Any, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="set DUOKA_CACHE") as caught:
        prepared(data)
    assert caught.value.exit_code == 6


# -------------------------------------------------------------------------------------------- records


def test_wrong_records_are_refused_together_up_to_ten(prepared: Any, tmp_path: Path, own_cache: Path) -> None:
    records = [*simple_records(3), *[sharegpt_record()] * 15]
    path = write_jsonl(tmp_path / "mixed.jsonl", records)
    with pytest.raises(Faults) as caught:
        prepared(path)
    faults = caught.value.faults
    assert [fault.line for fault in faults[:10]] == list(range(4, 14))
    assert faults[0].file == str(path) and '"role_tag": "from"' in faults[0].fix
    assert faults[0].source.startswith('{"conversations"')
    assert "5 more" in faults[-1].what and "on_bad: skip" in faults[-1].fix
    assert caught.value.exit_code == 2
    assert not list(own_cache.glob("tokens/*.draft"))


def test_wrong_records_are_skipped_counted_and_listed(prepared: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mixed.jsonl", [*simple_records(3), "{cut", sharegpt_record(), messages_record()])
    result = prepared(path, on_bad="skip")
    (report,) = result.report.sets
    assert (report.counts.num_records, report.counts.num_kept, report.counts.num_bad) == (6, 4, 2)
    listed = [json.loads(line) for line in Path(report.skipped_list).read_text(encoding="utf-8").splitlines()]
    assert [fault["line"] for fault in listed] == [4, 5]
    with pytest.raises(Faults, match="no whole JSON"):
        prepared(path)  # the same content: what was skipped is remembered, and refused now


def test_the_rest_of_a_cut_list_is_one_wrong_record(prepared: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    text = json.dumps(simple_records(5), indent=1)
    path.write_text(text[: text.rindex('"answer') + 4], encoding="utf-8")
    result = prepared(path, on_bad="skip")
    assert len(result.train) == 4
    assert result.report.sets[0].counts.num_bad == 1
    with pytest.raises(Faults, match="broken JSON"):
        prepared(path)


@pytest.mark.parametrize(("on_long", "kept", "truncated", "dropped"), [("truncate", 2, 1, 0), ("drop", 1, 0, 1)])
def test_long_conversations_are_counted(
    prepared: Any, tmp_path: Path, on_long: str, kept: int, truncated: int, dropped: int
) -> None:
    long = messages_record([("user", "q"), ("assistant", "word " * 100)])
    path = write_jsonl(tmp_path / "a.jsonl", [*simple_records(1), long])
    result = prepared(path, on_long=on_long, max_length=100)
    counts = result.report.sets[0].counts
    assert (counts.num_kept, counts.num_truncated, counts.num_dropped_long) == (kept, truncated, dropped)
    assert int(result.train.lengths.max()) <= 100


def test_long_conversations_can_be_refused(prepared: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [messages_record([("user", "q"), ("assistant", "word " * 100)])])
    with pytest.raises(Faults, match=r"tokens, and data.max_length is 100\n.*line 1") as caught:
        prepared(path, on_long="error", on_bad="skip", max_length=100)
    assert "raise data.max_length" in caught.value.faults[0].fix


def test_a_sample_without_a_target_is_dropped_and_counted(prepared: Any, tmp_path: Path) -> None:
    hidden = messages_record([("user", "word " * 100), ("assistant", "a")])
    path = write_jsonl(tmp_path / "a.jsonl", [*simple_records(2), hidden])
    counts = prepared(path, max_length=100).report.sets[0].counts
    assert (counts.num_kept, counts.num_dropped_masked, counts.num_truncated) == (2, 1, 0)


def test_nothing_left_is_refused(prepared: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [messages_record([("user", "word " * 100), ("assistant", "a")])])
    with pytest.raises(DataError, match="no sample is left to learn from"):
        prepared(path, max_length=100)


def test_the_counts_are_those_of_the_samples(prepared: Any, data: Path) -> None:
    result = prepared(data)
    counts = result.report.sets[0].counts
    masks = [result.train.sample(index).is_target for index in range(len(result.train))]
    assert counts.num_tokens == sum(map(len, masks)) == result.report.train_tokens
    assert counts.num_targets == sum(int(mask[1:].sum()) for mask in masks) == result.report.train_targets


def test_max_samples_takes_the_first(prepared: Any, data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(prepare, "PIECE_BYTES", (500, 500))
    whole = ids_of(prepared(data).train)
    assert ids_of(prepared({"name": str(data), "max_samples": 17}).train) == whole[:17]


# ------------------------------------------------------------------------------------ split and mixture


def test_the_split_is_seeded_exact_and_stays(prepared: Any, data: Path, own_cache: Path) -> None:
    first, again, other = (prepared(data, eval=0.2, train={"seed": seed}) for seed in (1, 1, 2))
    assert (len(first.train), len(first.eval)) == (32, 8)
    assert ids_of(first.eval) == ids_of(again.eval) != ids_of(other.eval)
    everything = sorted(ids_of(first.train) + ids_of(first.eval))
    assert everything == sorted(ids_of(prepared(data).train))
    assert list(own_cache.glob("splits/*.npz"))


def test_the_split_stays_when_records_move(prepared: Any, data: Path, tmp_path: Path) -> None:
    """It looks at content: shuffled lines give the same evaluation."""
    turned = write_jsonl(tmp_path / "turned.jsonl", simple_records(40)[::-1])
    assert sorted(ids_of(prepared(data, eval=0.2).eval)) == sorted(ids_of(prepared(turned, eval=0.2).eval))


def test_data_of_its_own_can_be_evaluated(prepared: Any, data: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", simple_records(50)[40:])
    result = prepared(data, eval=[str(other)])
    assert (len(result.train), len(result.eval)) == (40, 10)
    assert [report.split for report in result.report.sets] == ["train", "eval"]


def test_one_sample_cannot_be_split(prepared: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", simple_records(1))
    with pytest.raises(DataError, match="too few to split"):
        prepared(path, eval=0.5)


def test_a_mixture_holds_its_shares(prepared: Any, data: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", simple_records(60)[50:])
    result = prepared({"name": str(data), "weight": 0.2}, {"name": str(other), "weight": 0.8})
    ids = [tuple(sample) for sample in ids_of(result.train)]
    own = {tuple(sample) for sample in ids_of(prepared(data).train)}
    assert len(ids) == 50
    assert sum(sample in own for sample in ids) == 10
    repeats = [ids.count(sample) for sample in set(ids) - own]
    assert repeats == [4] * 10, "a repeated set repeats evenly"


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ([10, 30], [None, None], [10, 30]),
        ([10, 30], [0.5, 0.5], [20, 20]),
        ([10, 30], [3.0, 1.0], [30, 10]),
        ([10, 20, 10], [0.5, None, None], [20, 13, 7]),
        ([0, 10], [0.5, 0.5], [0, 10]),
    ],
)
def test_shares_become_counts(sizes: list[int], weights: list[float | None], counts: list[int]) -> None:
    assert mixture_counts(sizes, weights) == counts
