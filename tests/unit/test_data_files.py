"""Every kind of file gives the same records, in pieces of any size, read in any order, by any process."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_kit import config_for, simple_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duoka.data.prepare import prepare_data
from duoka.data.read.records import FilePiece, Record, check_file, find_pieces, read_piece
from duoka.data.read.registry import check_sets
from duoka.errors import Fault

NAMES = ("a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.tsv", "a.csv.gz", "a.parquet")


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Records of text cells, as the file's name says."""
    kind, _, packed = path.name.split(".", 1)[1].partition(".")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
        return path
    if kind in ("csv", "tsv"):
        plain = path.with_name("draft")
        with plain.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()} for record in records
            )
        data = plain.read_bytes()
        plain.unlink()
    elif kind == "json":
        data = json.dumps(records, ensure_ascii=False, indent=1).encode()
    else:
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    if packed == "gz":
        data = gzip.compress(data)
    elif packed == "zst":
        data = bytes(pa.Codec("zstd").compress(data, asbytes=True))
    path.write_bytes(data)
    return path


def read_all(path: Path, piece_bytes: int) -> list[Any]:
    pieces = list(find_pieces(path, piece_bytes))
    return [
        record.value if isinstance(record, Record) else record
        for piece in pieces
        for record in (read_piece(piece) if isinstance(piece, FilePiece) else [piece])
    ]


TRICKY = [
    {"instruction": f'q{n} "quoted", 多卡', "output": "a\nb\r\n,;" + "😀𠀀" * (n % 4) + "x" * (n * 13 % 50)}
    for n in range(23)
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece_bytes", [1, 90, 10**6])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str, piece_bytes: int) -> None:
    path = write_records(tmp_path / name, TRICKY)
    assert check_file(path) is None
    assert read_all(path, piece_bytes) == TRICKY


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.parquet", "a.json.gz"])
def test_pieces_can_be_read_in_any_order(tmp_path: Path, name: str) -> None:
    """Each process reads some of them; what it read before must not matter."""
    path = write_records(tmp_path / name, TRICKY)
    pieces = [piece for piece in find_pieces(path, 100) if isinstance(piece, FilePiece)]
    assert len(pieces) > 2
    forward = [[record.value for record in read_piece(piece) if isinstance(record, Record)] for piece in pieces]
    for order in (list(range(len(pieces)))[::-1], list(range(0, len(pieces), 2)), [1, 0, 1]):
        for number in order:
            again = [record.value for record in read_piece(pieces[number]) if isinstance(record, Record)]
            assert again == forward[number], f"piece {number} after {order}"
    assert [value for values in forward for value in values] == TRICKY


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_is_tokenized_to_the_same(
    tmp_path: Path, name: str, tiny_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    plain = write_records(tmp_path / "plain.jsonl", TRICKY)
    other = write_records(tmp_path / name, TRICKY)
    stores = [prepare_data(config_for(path), tmp_path, tiny_tokenizer_folder).train for path in (plain, other)]
    assert len(stores[0]) == len(TRICKY)
    assert stores[0].fingerprint == stores[1].fingerprint


def test_conversations_in_parquet_and_in_csv_cells_are_conversations(tmp_path: Path) -> None:
    records = simple_records(9)
    for name in ("talk.parquet", "talk.csv"):
        path = write_records(tmp_path / name, records)
        assert not check_sets(config_for(path), tmp_path)


def test_lines_of_a_text_file_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\n多卡 two\nthree".encode())
    assert read_all(tmp_path / "a.txt", 5) == [{"text": "one"}, {"text": "多卡 two"}, {"text": "three"}]


WRONG = [
    ("a.csv", b"instruction,output\nq,a\nq,a,b\n", "3 cells, and the first line names 2 columns", 3),
    ("a.csv", "instruction,output\nq,a\nq,你好\n".encode("gb18030"), "not UTF-8", 3),
    ("a.jsonl.gz", gzip.compress(b'{"instruction": "q", "output": "a"}\n{"instr\n'), "no whole JSON value", 2),
    ("a.json.gz", gzip.compress(b'[{"instruction": "q", "output": "a"},\n{"instr\n'), "broken JSON", 2),
    ("a.jsonl", b'{"messages": ' + b"[" * 99_999 + b"]" * 99_999 + b"}\n", "nested too deeply", 1),
    ("a.json", b'[{"messages": ' + b"[" * 99_999 + b"]" * 99_999 + b"}]\n", "nested too deeply", 1),
    ("a.jsonl", b'{"instruction": "q", "output": "a", "n": ' + b"9" * 9_999 + b"}\n", "a number in it is too long", 1),
]


@pytest.mark.parametrize(("name", "content", "said", "line"), WRONG, ids=[said for _, _, said, _ in WRONG])
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, said: str, line: int
) -> None:
    (tmp_path / name).write_bytes(content)
    (fault,) = check_sets(config_for(tmp_path / name), tmp_path)
    assert said in fault.what
    assert (fault.file, fault.line) == (str(tmp_path / name), line)


def test_a_packed_file_that_was_cut_is_named(tmp_path: Path) -> None:
    whole = write_records(tmp_path / "a.jsonl.gz", TRICKY * 30).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    faults = [one for one in read_all(tmp_path / "a.jsonl.gz", 10**6) if isinstance(one, Fault)]
    assert "cannot be unpacked" in faults[-1].what


def test_a_row_of_a_table_is_named_by_its_number(tmp_path: Path) -> None:
    records = [*TRICKY[:10], {"instruction": "q", "output": ""}]
    write_records(tmp_path / "a.parquet", records)
    (fault,) = check_sets(config_for(tmp_path / "a.parquet"), tmp_path)
    assert fault.file == f"{tmp_path / 'a.parquet'}, row 11"
    assert "empty" in fault.what


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(values, min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 200), st.sampled_from([None, 1]))
def test_an_array_is_read_whatever_falls_on_a_blocks_border(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], block: int, piece_bytes: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(items, ensure_ascii=bool(block % 2), indent=indent), encoding="utf-8", newline="\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duoka.data.read.json_files.BLOCK_BYTES", block)
        assert read_all(path, piece_bytes) == items


def test_a_large_array_is_cut_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    record = json.dumps({"instruction": "q" * 500, "output": "a" * 500})
    with path.open("w") as file:
        file.write("[" + ",\n".join([record] * 24_000) + "]")
    tracemalloc.start()
    num_pieces = sum(1 for _ in find_pieces(path, 1 << 20))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_pieces > 10
    assert most_bytes < path.stat().st_size / 3, f"{most_bytes:,} bytes for a file of {path.stat().st_size:,}"


def test_a_hub_data_set_is_fetched_once_and_read_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library played by a stand-in: what is asked of it, and what is done with the answer."""
    import sys
    import types

    asked: list[Any] = []

    class Rows:
        def to_parquet(self, path: str) -> None:
            pq.write_table(pa.Table.from_pylist(TRICKY), path)

    def load_dataset(name: str, subset: str | None, *, split: str) -> Rows:
        asked.append((name, subset, split))
        if name == "some/gone":
            raise ConnectionError("no network here")
        return Rows()

    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert not check_sets(config_for("some/set"), tmp_path)
    assert not check_sets(config_for("some/set"), tmp_path)
    assert asked == [("some/set", None, "train")]
    (tmp_path / "dataset_info.json").write_text('{"mine": {"hf_hub_url": "some/set", "subset": "en", "split": "test"}}')
    assert not check_sets(config_for("mine"), tmp_path)
    assert asked[1:] == [("some/set", "en", "test")]
    (fault,) = check_sets(config_for("some/gone"), tmp_path)
    assert "no network here" in fault.what and fault.key == "data.train.0.name"
