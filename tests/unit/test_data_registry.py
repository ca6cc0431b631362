"""Names to files: dataset_info.json as it is used in the field, files by path, and faults that say what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import guides
import pytest
from data_kit import alpaca_record, config_for, messages_record, sharegpt_record, simple_records, write_jsonl

from duoka.data.read.detect import detect_format
from duoka.data.read.example import BadRecord
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import FilePiece, Record, find_pieces, read_piece
from duoka.data.read.registry import ResolvedSet, check_data, find_sets, registered_sets
from duoka.errors import Fault, Faults

# As a widely read tutorial prints it, without the braces around it, and with a blank at a line's end.
TUTORIAL_BLOCK = guides.ENTRY.replace('"user",\n', '"user", \n')


def read_all(found: ResolvedSet) -> list[Any]:
    pieces = [piece for path in found.files for piece in find_pieces(path, 100)]
    records = [record for piece in pieces if isinstance(piece, FilePiece) for record in read_piece(piece)]
    return [read_record(record.value, found.form) for record in records if isinstance(record, Record)]


def find_one(name: Any, base: Path, **data: Any) -> ResolvedSet:
    return find_sets(config_for(name, **data), base)[0]


def faults_of(name: Any, base: Path, **data: Any) -> list[Fault]:
    return check_data(config_for(name, **data), base)


def write_info(folder: Path, entries: dict[str, Any] | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = entries if isinstance(entries, str) else json.dumps(entries, ensure_ascii=False, indent=2)
    (folder / "dataset_info.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("block", [TUTORIAL_BLOCK, "{" + TUTORIAL_BLOCK + "}"], ids=["as printed", "in braces"])
def test_the_tutorials_block_works_as_it_stands(tmp_path: Path, block: str) -> None:
    folder = write_info(tmp_path / "data", block)
    (folder / "my_data.json").write_text(json.dumps([messages_record()] * 3, ensure_ascii=False), encoding="utf-8")
    found = find_one("my_custom_dataset", tmp_path)
    assert len(read_all(found)) == 3
    assert not faults_of("my_custom_dataset", tmp_path)


def test_the_identity_set_is_built_in_and_right(tmp_path: Path) -> None:
    found = find_one("identity", tmp_path)
    talks = read_all(found)
    assert len(talks) >= 120
    answers = [message.content for talk in talks for message in talk.messages if message.role == "assistant"]
    assert sum("duoka" in answer for answer in answers) > 0.9 * len(answers)
    assert all(len(answer.split()) <= 40 for answer in answers)
    assert registered_sets(None, tmp_path)["identity"] == "built in"


def test_an_unknown_name_lists_the_registered_and_the_nearest(tmp_path: Path) -> None:
    write_info(tmp_path / "data", {"my_set": {"file_name": "x.json"}})
    (fault,) = faults_of("my_sett", tmp_path)
    assert fault.key == "data.train.0.name"
    assert "there is no data set named 'my_sett'" in fault.what
    assert "did you mean 'my_set'" in fault.fix
    assert "identity, my_set" in fault.fix


def test_no_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "talk.jsonl", [messages_record()])
    (fault,) = faults_of("", tmp_path)
    assert "there is no data set named ''" in fault.what


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.json"])
@pytest.mark.parametrize("record", [messages_record(), sharegpt_record(), alpaca_record()])
def test_a_file_named_directly_is_detected_and_said(tmp_path: Path, name: str, record: dict[str, Any]) -> None:
    path = tmp_path / name
    records = [record] * 4
    if name.endswith("l"):
        write_jsonl(path, records)
    else:
        path.write_text(json.dumps(records, indent=1), encoding="utf-8")
    found = find_one(name, tmp_path)  # from the YAML's folder
    assert len(read_all(found)) == 4
    assert "read as" in found.notes[0]


def test_a_folder_means_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "数据 folder"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", simple_records(2))
    write_jsonl(folder / "a.jsonl", simple_records(3))
    found = find_one(folder, tmp_path)
    assert [path.name for path in found.files] == ["a.jsonl", "b.jsonl"]
    assert len(read_all(found)) == 5


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_bom_and_crlf_are_fine_and_lines_are_counted(tmp_path: Path, ending: str, bom: str, suffix: str) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in (messages_record(), sharegpt_record())]
    text = f"[{ending}" + f",{ending}".join(lines) + f"{ending}]" if suffix == ".json" else ending.join(lines)
    path = tmp_path / f"talk{suffix}"
    path.write_bytes((bom + text).encode())
    (fault,) = faults_of(path, tmp_path)
    assert "there is no 'messages'" in fault.what
    assert fault.line == (3 if suffix == ".json" else 2)


@pytest.mark.parametrize("piece_bytes", [1, 60, 500, 10**6])
def test_pieces_hold_every_record_once_with_its_line(tmp_path: Path, piece_bytes: int) -> None:
    records = [{"n": n, "text": "多卡\n😀" * (n % 5)} for n in range(37)]
    write_jsonl(tmp_path / "a.jsonl", [*records[:5], "", *records[5:]])
    (tmp_path / "a.json").write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        lines = path.read_text(encoding="utf-8").splitlines()
        pieces = find_pieces(path, piece_bytes)
        read = [record for piece in pieces if isinstance(piece, FilePiece) for record in read_piece(piece)]
        assert [record.value for record in read if isinstance(record, Record)] == records
        assert all(lines[record.line - 1].strip().startswith("{") for record in read)


def test_columns_that_are_left_out_are_not_read_and_said(tmp_path: Path) -> None:
    folder = write_info(
        tmp_path / "data", {"a": {"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}}}
    )
    (folder / "a.json").write_text(json.dumps([alpaca_record()]), encoding="utf-8")
    found = find_one("a", tmp_path)
    assert len(read_all(found)[0].messages) == 2
    assert "'input'" in found.notes[0] and "'system'" in found.notes[0]


def test_max_samples_and_num_samples_meet_in_the_smaller(tmp_path: Path) -> None:
    folder = write_info(tmp_path / "data", {"a": {"file_name": "a.jsonl", "formatting": "messages", "num_samples": 5}})
    write_jsonl(folder / "a.jsonl", simple_records(9))
    assert find_one({"name": "a", "max_samples": 7}, tmp_path).max_samples == 5
    assert find_one({"name": "a", "max_samples": 3}, tmp_path).max_samples == 3


ENTRIES = [
    ({"file_name": "gone.json"}, "there is no file"),
    ({"ms_hub_url": "x/y"}, "names a data set that duoka does not fetch"),
    ({"hf_hub_url": "x/y"}, "needs the extra `hub`"),
    ({}, "it names no file"),
    ({"file_name": "a.jsonl", "formating": "alpaca"}, "unknown option 'formating'"),
    ({"file_name": "a.jsonl", "formatting": "sharegp"}, "unknown formatting 'sharegp'"),
    ({"file_name": "a.jsonl", "ranking": True, "columns": {"prompt": "x"}}, "ranking needs the columns chosen"),
    ({"file_name": "a.jsonl", "split": "test"}, "split 'test'"),
    ({"file_name": "a.jsonl", "num_samples": 0}, "num_samples is 0"),
    ({"file_name": "a.jsonl", "columns": {"message": "m"}}, "unknown name 'message' in columns"),
    ({"file_name": "a.jsonl", "columns": {"messages": "m", "images": "i"}}, "it has images, and duoka reads text"),
    ({"file_name": "a.jsonl", "tags": ["role"]}, "tags must be an object"),
    ("a.jsonl", "must be an object"),
]


@pytest.mark.parametrize(("entry", "said"), ENTRIES, ids=[said for _, said in ENTRIES])
def test_a_wrong_entry_is_named_with_its_line(tmp_path: Path, entry: Any, said: str) -> None:
    folder = write_info(tmp_path / "data", {"other": {}, "a": entry})
    write_jsonl(folder / "a.jsonl", simple_records(1))
    faults = faults_of("a", tmp_path)
    assert any(said in fault.what for fault in faults), faults
    assert all(fault.line == 3 and fault.file.endswith("dataset_info.json") for fault in faults)


def test_broken_json_in_the_registry_is_named_with_its_line(tmp_path: Path) -> None:
    write_info(tmp_path / "data", '{\n "a": {"file_name": "a.json"\n}\n')
    faults = faults_of("a", tmp_path)
    assert "no valid JSON" in faults[0].what
    assert faults[0].line >= 3


FILES = [
    ("a.parquet", b"PAR1", "no whole Parquet file"),
    ("a.jsonl.gz", b"no gzip", "cannot be unpacked"),
    ("a.yaml", b"a: b", "of no kind that duoka reads"),
    ("a.json", b"", "is empty"),
    ("a.json", "[{}]".encode("utf-16"), "is UTF-16"),
    ("a.json", b'[{"x": 1}]', "format of 'a.json' is none"),
    ("a.jsonl", b'{"x": 1}\n', "format of 'a.jsonl' is none"),
    ("a.jsonl", b'{"messages": [\n', "no whole JSON value"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=[said for *_, said in FILES])
def test_a_file_that_holds_no_records_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    (fault,) = faults_of(tmp_path / name, tmp_path)
    assert said in fault.what


GOOD = json.dumps(messages_record(), ensure_ascii=False)
BROKEN = [
    # name, content after a good first record, what is said, line
    ("a.jsonl", f'{GOOD}\n{{"messages": [\n'.encode(), "no whole JSON value", 2),
    ("a.jsonl", f"{GOOD}\n".encode() + '{"messages": "你好"}\n'.encode("gb18030"), "not UTF-8", 2),
    ("a.json", f"[{GOOD},\n".encode() + '{"messages": "你好"}]\n'.encode("gb18030"), "not UTF-8", 2),
    ("a.json", f"[{GOOD},\n{GOOD}\n".encode(), "no closing ]", 2),
    ("a.json", f'[{GOOD},\n{{"messages": [\n'.encode(), "broken JSON", 2),
    ("a.json", f"[{GOOD}]\n{GOOD}".encode(), "more text after the end", 2),
    ("a.jsonl", f'{GOOD}\n{{"messages": "{"x" * (2 << 20)}"}}\n'.encode(), "characters, and 1,048,576 is the most", 2),
    ("a.json", f'[{GOOD},\n{{"messages": "{"x" * (2 << 20)}"}}]'.encode(), "characters, and 1,048,576 is the most", 2),
]


@pytest.mark.parametrize(("name", "content", "said", "line"), BROKEN, ids=[f"{b[0]} {b[2]}" for b in BROKEN])
def test_a_broken_record_is_named_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, said: str, line: int
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    faults = faults_of(path, tmp_path)
    assert len(faults) == 1
    assert said in faults[0].what
    assert (faults[0].file, faults[0].line) == (str(path), line)


@pytest.mark.parametrize("record", ['{"text": null}', '{"messages": null}', '{"conversations": []}'])
def test_a_first_record_without_content_is_a_wrong_record_and_no_unknown_format(tmp_path: Path, record: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{record}\n", encoding="utf-8")
    form = detect_format(json.loads(record))
    assert form is not None
    with pytest.raises(BadRecord) as wrong:
        read_record(json.loads(record), form, source=str(path), line=1)
    assert next(iter(json.loads(record))) in wrong.value.rule


def test_gb18030_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(f"{GOOD}\n".encode() + '{"messages": "你好世界"}\n'.encode("gb18030"))
    (fault,) = faults_of(tmp_path / "a.jsonl", tmp_path)
    assert "iconv -f GB18030" in fault.fix


def test_the_first_ten_wrong_records_come_together(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [messages_record(), *([{"messages": []}] * 30)])
    assert len(faults_of(path, tmp_path)) == 10


def test_skipped_records_are_no_faults(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [messages_record(), {"messages": []}])
    assert not faults_of(path, tmp_path, on_bad="skip")


def test_all_wrong_sets_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(Faults) as caught:
        find_sets(config_for("one", "two", eval=["three"]), tmp_path)
    assert [fault.key for fault in caught.value.faults] == [
        "data.train.0.name",
        "data.train.1.name",
        "data.eval.0.name",
    ]
    assert caught.value.exit_code == 2


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (fault,) = faults_of("identity", tmp_path, folder="nowhere")
    assert fault.key == "data.folder"


def test_weights_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    config = config_for({"name": "identity", "weight": 1.0}, "identity")
    assert any("add up to 1" in fault.what for fault in check_data(config, tmp_path))
