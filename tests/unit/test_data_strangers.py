"""Data as people bring it from other trainers: read as it was meant, or refused with file and line; nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_kit import config_for, messages_record, simple_records, write_jsonl

from duoka.data.read.detect import detect_format
from duoka.data.read.example import BadRecord, Example, Labeled, Preference
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import FilePiece, Record, find_pieces, read_piece
from duoka.data.read.registry import check_data, find_sets
from duoka.errors import Fault

TOOL = {"type": "function", "function": {"name": "w", "parameters": {"properties": {"city": {"type": "string"}}}}}
TALK = messages_record([("user", "q"), ("assistant", "a")])
QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read_all(path: Path) -> list[Any]:
    found = find_sets(config_for(str(path)), path.parent)[0]
    pieces = [piece for file in found.files for piece in find_pieces(file, 200)]
    return [
        read_record(record.value, found.form) if isinstance(record, Record) else record
        for piece in pieces
        for record in (read_piece(piece) if isinstance(piece, FilePiece) else [piece])
    ]


def faults_of(path: Path | str, base: Path) -> list[Fault]:
    return check_data(config_for(str(path)), base)


def read_one(record: dict[str, Any]) -> Any:
    form = detect_format(record)
    assert form is not None
    return read_record(record, form)


def test_tools_and_system_of_later_records_are_read_too(tmp_path: Path) -> None:
    """The first record says how all are written, not which of them has tools."""
    path = write_jsonl(tmp_path / "a.jsonl", [TALK, {**TALK, "tools": [TOOL], "system": "S"}])
    first, second = read_all(path)
    assert first.tools is None and json.loads(second.tools) == [TOOL]
    assert second.messages[0].content == "S"


def test_context_and_system_prompt_of_published_sets_are_read() -> None:
    """Dolly's and OpenOrca's names: what the question is about was left out without a word."""
    dolly = read_one({"instruction": "I", "context": "C", "response": "R", "category": "qa"})
    assert [message.content for message in dolly.messages] == ["I\nC", "R"]
    orca = read_one({"id": "1", "system_prompt": "S", "question": "Q", "response": "R"})
    assert (orca.messages[0].role, orca.messages[0].content) == ("system", "S")
    asked = read_one({"question": "Q", "context": {"title": ["t"]}, "answer": "A"})  # no text
    assert [message.content for message in asked.messages] == ["Q", "A"]
    pair = read_one({"question": "Q", "system_prompt": "S", "chosen": "a", "rejected": "b"})
    assert isinstance(pair, Preference) and pair.messages[0].content == "S"
    named = {**messages_record([("system", "S"), ("user", "q"), ("assistant", "a")]), "system_prompt": "S"}
    assert len(read_one(named).messages) == 3


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    """The choices of a question were left out without a word."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "question": "Q", "options": {"A": "x"}, "answer": "A"}])
    (found,) = find_sets(config_for(str(path)), tmp_path)
    assert found.notes[0].endswith("read as alpaca (question, input, answer); not read: options")
    (found,) = find_sets(config_for(str(write_jsonl(tmp_path / "b.jsonl", [{**TALK, "tools": [TOOL]}]))), tmp_path)
    assert "not read" not in found.notes[0]


def test_the_weight_of_a_record_is_said_to_be_not_read(tmp_path: Path) -> None:
    """All records count alike; a number beside them is passed over in silence else."""
    path = write_jsonl(tmp_path / "a.jsonl", [{**TALK, "weight": 0.5, "n": 3}])
    (found,) = find_sets(config_for(str(path)), tmp_path)
    assert found.notes[0].endswith("; not read: weight")


@pytest.mark.parametrize(("name", "way"), [("a.jsonl.bz2", "bunzip2 -k a.jsonl.bz2"), ("a.arrow", "to_parquet")])
def test_a_file_of_another_kind_is_refused_with_the_way_to_one_that_is_read(
    tmp_path: Path, name: str, way: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    (fault,) = faults_of(tmp_path / name, tmp_path)
    assert way in fault.fix


def test_a_null_in_place_of_messages_is_said_to_be_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [TALK, {"messages": None}])
    (fault,) = faults_of(path, tmp_path)
    assert fault.what == "'messages' is null"


def test_what_the_hub_says_of_a_set_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "dataset_infos.json").write_text('{"default": {"features": {}}}', "utf-8")
    write_jsonl(tmp_path / "train.jsonl", [TALK])
    assert not faults_of(tmp_path, tmp_path)


def test_margins_of_later_pairs_are_read_too(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = write_jsonl(tmp_path / "a.jsonl", [pair, {**pair, "margin": 2.0}])
    assert [found.margin for found in read_all(path)] == [0.0, 2.0]
    (found,) = find_sets(config_for(str(path)), tmp_path)
    assert "by margin" not in found.notes[0]


def test_an_implicit_prompts_tools_and_system_are_read() -> None:
    pair = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {**ANSWER, "content": "b"}]}
    found = read_one({**pair, "tools": [TOOL], "system": "S"})
    assert isinstance(found, Preference)
    assert json.loads(found.tools or "") == [TOOL]
    assert [message.content for message in found.messages] == ["S", "q"]


def test_a_prompt_with_a_completion_of_messages_learns_the_completion() -> None:
    """TRL's conversational form; its prompt may hold answers, which are context."""
    prompt = [QUESTION, {**ANSWER, "content": "context"}, QUESTION]
    found = read_one({"prompt": prompt, "completion": [ANSWER]})
    assert isinstance(found, Example)
    assert [(message.content, message.is_learned) for message in found.messages if message.role == "assistant"] == [
        ("context", False),
        ("a", True),
    ]
    labeled = read_one({"prompt": [QUESTION], "completion": [ANSWER], "label": False})
    assert isinstance(labeled, Labeled) and not labeled.is_good
    assert labeled.messages[-1].content == "a"


def test_a_completion_that_is_no_list_of_messages_is_named() -> None:
    form = detect_format({"prompt": [QUESTION], "completion": [ANSWER]})
    assert form is not None
    with pytest.raises(BadRecord, match="'completion' must be a list of messages, this is null"):
        read_record({"prompt": [QUESTION], "completion": None}, form)


@pytest.mark.parametrize("name", ["train", "loss"])
def test_a_turn_that_others_switched_off_is_not_learned(name: str) -> None:
    talk = [QUESTION, {**ANSWER, name: False}, QUESTION, {**ANSWER, name: True}]
    found = read_one({"messages": talk})
    assert [message.is_learned for message in found.messages] == [True, False, True, True]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "pretty.json"])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, name: str) -> None:
    import gzip

    good = json.dumps(TALK)
    twice = '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    text = f"{good}\n{twice}\n{good}\n"
    if name.endswith(".json"):
        text = f"[{good},\n{twice},\n{good}]" if name == "a.json" else f"[\n{good},{twice.replace('[', '[ ')},{good}]"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (fault,) = faults_of(path, tmp_path)
    assert "the key 'content' stands twice in one object" in fault.what
    assert fault.line == 2
    assert len(read_all(path)) == 3  # the others are read


def test_nulls_of_a_tables_schema_are_no_arguments(tmp_path: Path) -> None:
    """In Parquet every call has the arguments of all calls; those that are null there were never said."""
    other = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"n": {"type": "integer"}}}}}

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    rows = [
        {"messages": [QUESTION, call("w", city="P")], "tools": [TOOL]},
        {"messages": [QUESTION, call("g", n=3)], "tools": [other]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_all(tmp_path / "a.parquet")
    assert json.loads(first.messages[1].tool_calls) == [{"name": "w", "arguments": {"city": "P"}}]
    assert json.loads(second.messages[1].tool_calls) == [{"name": "g", "arguments": {"n": 3}}]
    assert json.loads(first.tools) == [TOOL] and json.loads(second.tools) == [other]


@pytest.mark.parametrize(
    "record",
    [
        {**TALK, "images": ["a.png"]},
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>\n?"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": ["a.png"]},
        {"prompt": [QUESTION], "image": {"bytes": "x", "path": None}},
    ],
    ids=["trl", "llava", "pair", "prompt"],
)
def test_a_record_about_a_picture_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match="duoka reads text alone"):
        read_one(record)


def test_words_for_the_template_are_refused() -> None:
    with pytest.raises(BadRecord, match="'chat_template_kwargs', and the chat template is given none"):
        read_one({**TALK, "chat_template_kwargs": {"enable_thinking": False}})
    assert isinstance(read_one({**TALK, "chat_template_kwargs": {}}), Example)
    for pair in ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, QUESTION]}, {"prompt": "q", "chosen": "a"}):
        with pytest.raises(BadRecord, match="'chat_template_kwargs', and the chat template is given none"):
            read_one({"rejected": "b", **pair, "chat_template_kwargs": {"enable_thinking": False}})


def test_pairs_of_whole_texts_are_told_where_their_prompt_goes(tmp_path: Path) -> None:
    """hh-rlhf's form: nothing says where the prompt ends, or who speaks."""
    talk = "\n\nHuman: q\n\nAssistant: "
    path = write_jsonl(tmp_path / "a.jsonl", [{"chosen": f"{talk}a", "rejected": f"{talk}b"}])
    (fault,) = faults_of(path, tmp_path)
    assert "none that duoka knows" in fault.what and "no prompt beside 'chosen' and 'rejected'" in (fault.fix or "")


def test_a_label_of_several_messages_is_refused() -> None:
    """One answer is judged; TRL's loss is of all messages of a completion."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": {}}}]}
    turns = [call, {"role": "tool", "content": "5"}, ANSWER]
    with pytest.raises(BadRecord, match="'completion' is 3 messages, and a label judges one answer"):
        read_one({"prompt": [QUESTION], "completion": turns, "label": True})
    found = read_one({"prompt": [QUESTION, *turns[:2]], "completion": [ANSWER], "label": True})
    assert isinstance(found, Labeled) and [message.role for message in found.messages][-2:] == ["tool", "assistant"]


def test_a_number_or_nothing_in_a_column_called_image_is_no_picture() -> None:
    for value in (None, [], "", 12):
        assert isinstance(read_one({**TALK, "image": value}), Example)


def test_a_quote_that_is_never_closed_takes_no_rows_along(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('instruction,output\nq1,a1\nq2,"a2\nq3,a3\nq4,a4\n')
    (fault,) = faults_of(path, tmp_path)
    assert fault.line == 3
    assert "cannot be read (unexpected end of data)" in fault.what and "twice" in fault.fix


def test_a_quote_inside_of_quotes_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ninstruction,output\nq1,"he said "hi" to me"\nq2,"a\nb"\nq3,a3\n')
    (fault,) = faults_of(path, tmp_path)
    assert fault.line == 3
    good = [found.messages[1].content for found in read_all(path) if isinstance(found, Example)]
    assert good == ["a\nb", "a3"]


def test_an_empty_cell_of_history_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('instruction,output,history\nq1,a1,\nq2,a2,[]\nq3,a3,"[[""x"",""y""]]"\n')
    assert not faults_of(path, tmp_path)
    assert [len(found.messages) for found in read_all(path)] == [2, 2, 4]


def test_a_folders_dead_links_and_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "all" / "more").mkdir(parents=True)
    write_jsonl(tmp_path / "all" / "a.jsonl", simple_records(2))
    write_jsonl(tmp_path / "all" / "more" / "b.jsonl", simple_records(2))
    found = find_sets(config_for(str(tmp_path / "all")), tmp_path)[0]
    assert any("files in its folders more are not read" in note for note in found.notes)
    (tmp_path / "all" / "c.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    (fault,) = faults_of(tmp_path / "all", tmp_path)
    assert "c.jsonl cannot be read: No such file" in fault.what
    (tmp_path / "outer").mkdir()
    (tmp_path / "all").rename(tmp_path / "outer" / "all")
    write_jsonl(tmp_path / "outer" / "all" / "z.jsonl", simple_records(1))
    (fault,) = faults_of(tmp_path / "outer", tmp_path)
    assert "holds no .json" in fault.what and fault.fix.endswith("/all")


def test_a_test_file_beside_the_training_files_is_said(tmp_path: Path) -> None:
    """Elsewhere a folder's files are split by their names; here all of them are read."""
    (tmp_path / "all").mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "validation.jsonl", "latest_contest.jsonl"):
        write_jsonl(tmp_path / "all" / name, simple_records(1))
    found = find_sets(config_for(str(tmp_path / "all")), tmp_path)[0]
    assert any(": validation.jsonl of it is read like the others" in note for note in found.notes)
    alone = find_sets(config_for(str(tmp_path / "all" / "validation.jsonl")), tmp_path)[0]
    assert len(alone.notes) == 1


@pytest.mark.parametrize("many", [True, False])
def test_what_save_to_disk_writes_is_known_by_name(tmp_path: Path, many: bool) -> None:
    folder = tmp_path / "saved"
    inner = folder / "train" if many else folder
    inner.mkdir(parents=True)
    (inner / "data-00000-of-00001.arrow").write_bytes(b"x")
    (inner / "state.json").write_text('{"_fingerprint": "x"}')
    (inner / "dataset_info.json").write_text('{"citation": ""}')
    if many:
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (fault,) = faults_of(folder, tmp_path)
    assert "was written by datasets.save_to_disk" in fault.what
    assert "to_parquet" in fault.fix and ("['train']" in fault.fix) == many


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", json.dumps({"data": [TALK]}), "the records stand in 'data' of one object"),
        ("a.csv", "instruction;output\nq;a\n", "separate cells by commas"),
        ("a.csv", "instruction,output\nq,a\n".encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("a.jsonl", json.dumps(TALK).encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("a.jsonl", json.dumps({"messages": [QUESTION, {**ANSWER, "content": ["b"]}]}), '{"type": "text", "text"'),
    ],
    ids=["wrapped", "semicolons", "utf-16-le", "utf-16-be", "parts"],
)
def test_what_to_do_is_said(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (fault,) = faults_of(tmp_path / name, tmp_path)
    assert said in fault.fix


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({**TALK, "tools": [{"name": "\ud83d"}]}, "the description of a tool holds half a character"),
        ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "\ud83d"}}]}]},
         "the tool call of message 2 holds half a character"),
        ({"text": "\ud83d"}, "'text' holds half a character"),
    ],
)  # fmt: skip
def test_half_a_character_is_named_where_it_stands(record: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecord, match=said):
        read_one(record)


def test_a_star_is_no_name(tmp_path: Path) -> None:
    (fault,) = faults_of(f"{tmp_path}/*.jsonl", tmp_path)
    assert "name the folder" in fault.fix
