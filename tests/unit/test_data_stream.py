"""Streams: every document once per epoch, no token lost, one order at any world size, exact resume."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.data.feed.row_packer import (
    Packing,
    StreamPlan,
    StreamRows,
    Unit,
    VirtualStream,
    find_units,
    merge_states,
)
from duoka.data.tokens.template import Sample
from duoka.errors import ConfigError, DataError

BEGIN = 1
Rows = list[list[list[int]]]


def write_files(folder: Path, groups: list[list[int]]) -> list[Path]:
    """A file per list: a row group of that many documents per number. Documents are words that are all different."""
    names = itertools.count(10)
    paths = []
    for number, sizes in enumerate(groups):
        path = folder / f"part-{number}.parquet"
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            for size in sizes:
                texts = [" ".join(str(next(names)) for _ in range(1 + (d * 7) % 11)) for d in range(size)]
                writer.write_table(pa.table({"text": texts}, schema=schema))
        paths.append(path)
    return paths


def tokenize(texts: list[str]) -> list[list[int]]:
    return [[int(word) for word in text.split()] for text in texts]


def all_tokens(units: list[Unit]) -> list[int]:
    tables = [pq.ParquetFile(u.file).read_row_group(u.group).slice(u.start, u.end - u.start) for u in units]
    return sorted(t for table in tables for ids in tokenize(table.column("text").to_pylist()) for t in ids)


def ranks_of(
    files: list[Path], num_streams: int, num_ranks: int, row_tokens: int = 8, begin: int | None = BEGIN
) -> list[StreamRows]:
    plan = StreamPlan(find_units(files), num_streams=num_streams, seed=3)
    packing = Packing(row_tokens, tokenize, begin)
    return [StreamRows(plan, packing, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def ids_of(row: list[Sample]) -> list[list[int]]:
    return [segment.input_ids.tolist() for segment in row]


def one_step(ranks: list[StreamRows]) -> Rows:
    """All ranks' rows of a step, in the order of streams."""
    parts = [rank.step() for rank in ranks]
    assert len({len(part) for part in parts}) == 1, "a rank with fewer rows would miss a collective"
    rows = {n: ids_of(row) for rank, part in zip(ranks, parts, strict=True)
            for n, row in zip(rank.streams, part, strict=False)}  # fmt: skip
    return [rows[number] for number in sorted(rows)]


GROUPS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(GROUPS, st.integers(1, 8), st.integers(1, 5), st.integers(3, 20))
def test_an_epoch_reads_every_token_once_over_all_ranks(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], num_streams: int, num_ranks: int, row: int
) -> None:
    files = write_files(tmp_path_factory.mktemp("files"), groups)
    num_streams = min(num_streams, len(find_units(files)))
    ranks = ranks_of(files, num_streams, num_ranks, row)
    seen: list[int] = []
    walks = [rank.rest_of_epoch(lambda mine: True) for rank in ranks]
    while True:
        rows = [ids_of(one) for walk in walks for one in next(walk)]
        if not any(rows):
            break
        assert all(sum(map(len, one)) <= row for one in rows)
        assert all(segment[0] == BEGIN for one in rows for segment in one)
        seen += [token for one in rows for segment in one for token in segment[1:]]
    assert sorted(seen) == all_tokens(find_units(files))
    assert sum(rank.usage().num_tokens for rank in ranks) == len(seen)
    assert all(rank.usage().num_discarded == 0 for rank in ranks)


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(3, 15))
def test_the_order_and_going_on_are_the_same_at_any_world_size(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[int]], num_streams: int, before: int, after: int, stop: int, row: int,
) -> None:  # fmt: skip
    files = write_files(tmp_path_factory.mktemp("files"), groups)
    num_streams = min(num_streams, len(find_units(files)))
    alone = ranks_of(files, num_streams, 1, row)
    whole = [one_step(alone) for _ in range(20)]
    first = ranks_of(files, num_streams, before, row)
    seen = [one_step(first) for _ in range(stop)]
    state = merge_states([rank.state_dict() for rank in first])
    second = ranks_of(files, num_streams, after, row)
    for rank in second:
        rank.load_state_dict(state)
    assert seen + [one_step(second) for _ in range(20 - stop)] == whole
    assert all(sum(map(len, one)) == row for step in whole for one in step), "rows are full, epochs flow on"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [[[3] * 7], [[5], [2], [9]], [[12]]], ids=["7 groups", "1 each", "one in all"])
def test_uneven_row_groups_starve_no_rank(tmp_path: Path, groups: list[list[int]], num_ranks: int) -> None:
    ranks = ranks_of(write_files(tmp_path, groups), 4, num_ranks)
    for _ in range(30):
        parts = [rank.step() for rank in ranks]
        assert len({len(part) for part in parts}) == 1
        assert all(any(part) for part in parts)


def test_any_number_of_row_groups_is_shared_exactly_by_any_number_of_ranks(tmp_path: Path) -> None:
    files = write_files(tmp_path, [[1] * 17])
    for num_groups in range(1, 18):
        units = [unit for unit in find_units(files) if unit.group < num_groups]
        for num_ranks in range(1, 9):
            if num_ranks > num_groups:
                with pytest.raises(DataError, match=f"{num_groups} documents cannot feed {num_ranks} streams"):
                    StreamPlan(units, num_streams=num_ranks, seed=1)
                continue
            plan = StreamPlan(units, num_streams=num_ranks, seed=1)
            for epoch in (0, 1):
                shares = [plan.units_of(rank, epoch) for rank in range(num_ranks)]
                assert sorted(unit.group for share in shares for unit in share) == list(range(num_groups))
                assert {len(share) for share in shares} <= {num_groups // num_ranks, -(-num_groups // num_ranks)}


def test_each_row_group_goes_to_one_stream_and_epochs_differ(tmp_path: Path) -> None:
    plan = StreamPlan(find_units(write_files(tmp_path, [[2] * 9, [2] * 8])), num_streams=4, seed=0)
    epochs = [[plan.units_of(stream, epoch) for stream in range(4)] for epoch in (0, 1)]
    for streams in epochs:
        assert sorted(u for units in streams for u in map(str, units)) == sorted(map(str, plan.units))
    assert epochs[0] != epochs[1]


@settings(max_examples=50, deadline=None)
@given(GROUPS, st.integers(1, 6), st.integers(2, 20))
def test_without_a_begin_token_every_token_with_one_before_it_is_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], num_streams: int, row: int
) -> None:
    files = write_files(tmp_path_factory.mktemp("files"), groups)
    (rank,) = ranks_of(files, min(num_streams, len(find_units(files))), 1, row, begin=None)
    pairs: list[tuple[int, int]] = []
    for rows in rank.rest_of_epoch():
        assert all(sum(map(len, ids_of(one))) <= row for one in rows)
        pairs += [pair for one in rows for ids in ids_of(one) for pair in itertools.pairwise(ids)]
    texts = [t for u in find_units(files) for t in pq.ParquetFile(u.file).read_row_group(u.group)["text"].to_pylist()]
    assert sorted(pairs) == sorted(pair for ids in tokenize(texts) for pair in itertools.pairwise(ids))


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.integers(0, 15), st.integers(2, 12))
def test_going_on_without_a_begin_token(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], stop: int, row: int
) -> None:
    files = write_files(tmp_path_factory.mktemp("files"), groups)
    (whole,) = ranks_of(files, 1, 1, row, begin=None)
    for _ in range(stop):
        whole.step()
    (fresh,) = ranks_of(files, 1, 1, row, begin=None)
    fresh.load_state_dict(whole.state_dict())
    assert [one_step([fresh]) for _ in range(10)] == [one_step([whole]) for _ in range(10)]


def test_no_more_than_one_row_group_is_read_again_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_files(tmp_path, [[4] * 20])
    (rank,) = ranks_of(files, 1, 1)
    for _ in range(40):
        rank.step()
    state = rank.state_dict()
    assert state["cursors"]["0"]["unit"] > 5
    reads = []
    real = VirtualStream.read_unit
    monkeypatch.setattr(
        VirtualStream, "read_unit", lambda self, unit, skip: reads.append(unit) or real(self, unit, skip)
    )
    (fresh,) = ranks_of(files, 1, 1)
    fresh.load_state_dict(state)
    assert ids_of(fresh.step()[0]) == ids_of(rank.step()[0])
    assert len(reads) <= 4, "two rows of two streams, a row group each"


def test_other_streams_places_and_too_many_streams_are_refused(tmp_path: Path) -> None:
    files = write_files(tmp_path, [[2, 2]])
    state = ranks_of(files, 2, 1)[0].state_dict()
    with pytest.raises(ConfigError, match="num_streams is 2, here it is 1"):
        ranks_of(files, 1, 1)[0].load_state_dict(state)
    with pytest.raises(DataError, match="4 documents cannot feed 5 streams"):
        ranks_of(files, 5, 1)
    with pytest.raises(DataError, match="no column 'words'"):
        find_units(files, "words")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match="holds int64, and must hold text"):
        find_units([tmp_path / "numbers.parquet"])


def test_what_became_of_the_tokens_is_said(tmp_path: Path) -> None:
    (rank,) = ranks_of(write_files(tmp_path, [[9, 9]]), 1, 1, 32)
    for _ in range(10):
        rank.step()
    usage = rank.usage()
    assert usage.num_tokens + usage.num_begins == 320
    assert "0 discarded" in usage.line() and usage.num_cut > 0


@pytest.mark.parametrize("sizes", [[1, 1, 6], [1, 9], [3, 1, 1, 1]])
def test_uneven_row_groups_feed_as_many_streams_as_there_are_documents(tmp_path: Path, sizes: list[int]) -> None:
    units = find_units(write_files(tmp_path, [sizes]))
    for num_streams in range(1, sum(sizes) + 1):
        plan = StreamPlan(units, num_streams=num_streams, seed=3)
        read = [unit for stream in range(num_streams) for unit in plan.units_of(stream, 0)]
        assert sorted(read, key=lambda unit: (unit.group, unit.start)) == plan.units and len(set(read)) == len(read)
        assert all_tokens(plan.units) == all_tokens(units)


def test_files_without_any_text_are_refused_and_not_read_for_ever(tmp_path: Path) -> None:
    for name, texts in (("bare", ["", " ", None]), ("one", ["", "7 8 9", None])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), tmp_path / name / "0.parquet")
    streams = {
        name: VirtualStream(
            StreamPlan(find_units([tmp_path / name / "0.parquet"]), num_streams=3, seed=3),
            1,
            Packing(4, tokenize, BEGIN),
        )
        for name in ("bare", "one")
    }
    with pytest.raises(DataError, match="found no text in"):
        streams["bare"].row()
    assert [part.input_ids.tolist() for _ in range(2) for part in streams["one"].row()] == [[BEGIN, 7, 8, 9]] * 2


def test_texts_that_pandas_keeps_as_categories_are_texts(tmp_path: Path) -> None:
    """Without streaming they were read, and streaming refused them."""
    pq.write_table(pa.table({"text": pa.array(["10 11", "12", "10 11"]).dictionary_encode()}), tmp_path / "a.parquet")
    (rank,) = ranks_of([tmp_path / "a.parquet"], 1, 1)
    (row,) = rank.step()
    assert sorted(token for ids in ids_of(row) for token in ids[1:]) == [10, 10, 11, 11, 12]
