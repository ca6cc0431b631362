"""Every format reads the same conversation, and a wrong record is named with its rule and its fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from data_kit import TURNS, alpaca_record, form_of, messages_record, sharegpt_record

from duoka.data.read.detect import detect_format
from duoka.data.read.formats import BadRecord, Message
from duoka.data.read.record_kinds import read_record as read_example

EXPECTED = tuple(Message(role, text) for role, text in TURNS)
RENAMED_TAGS = {"role_tag": "who", "content_tag": "said", "user_tag": "q", "assistant_tag": "a", "system_tag": "s"}
RENAMED = form_of("sharegpt", columns={"messages": "talk"}, tags=RENAMED_TAGS)
RENAMED_RECORD = {
    "talk": [{"who": {"user": "q", "assistant": "a", "system": "s"}[role], "said": text} for role, text in TURNS]
}
PARTS_RECORD = {"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TURNS]}
SYSTEM_COLUMN = {**messages_record(TURNS[1:]), "system": TURNS[0][1]}


@pytest.mark.parametrize(
    ("record", "form"),
    [
        (messages_record(), form_of("messages")),
        (messages_record(), form_of("openai")),
        (PARTS_RECORD, form_of("openai")),
        (SYSTEM_COLUMN, form_of("messages")),
        (sharegpt_record(), form_of("sharegpt")),
        (RENAMED_RECORD, RENAMED),
        (alpaca_record(), form_of("alpaca")),
    ],
    ids=["messages", "openai", "openai-parts", "system-column", "sharegpt", "renamed", "alpaca"],
)
def test_the_same_content_in_each_format_is_the_same_example(record: dict[str, Any], form: Any) -> None:
    assert read_example(record, form).messages == EXPECTED


@pytest.mark.parametrize("record", [messages_record(), sharegpt_record(), alpaca_record()])
def test_a_detected_format_reads_the_record_it_was_detected_from(record: dict[str, Any]) -> None:
    form = detect_format(record)
    assert form is not None
    assert read_example(record, form).messages == EXPECTED


def test_a_record_of_another_format_among_others_is_told_that_a_file_has_one() -> None:
    """It was told to write alpaca into dataset_info.json, with which the others would have been refused."""
    for record, form, other in (
        (alpaca_record(), form_of("messages"), "alpaca"),
        (messages_record(), form_of("alpaca"), "messages"),
    ):
        with pytest.raises(BadRecord) as caught:
            read_example(record, form, line=7)
        assert f"where other records are read as {form.name}, put those like this one into a file of their own" in (
            caught.value.fix
        )
        assert f'write "formatting": "{other}"' in caught.value.fix
    with pytest.raises(BadRecord) as caught:  # the same format in other words
        read_example(RENAMED_RECORD | {"messages": RENAMED_RECORD["talk"]}, form_of("messages"))
    assert "file of their own" not in (caught.value.fix or "")


@pytest.mark.parametrize("record", [messages_record(), sharegpt_record()])
def test_messages_that_a_table_holds_as_json_text_are_read(record: dict[str, Any]) -> None:
    ((column, turns),) = record.items()
    as_text = {"id": "1", "note": "[1] seen", column: json.dumps(turns, ensure_ascii=False)}
    form = detect_format(as_text)
    assert form is not None and form.columns["messages"] == column
    assert read_example(as_text, form).messages == EXPECTED
    broken = {**as_text, column: str(turns)}
    form = detect_format(broken)
    assert form is not None
    with pytest.raises(BadRecord, match=f"'{column}' is text that begins as a list, and is no JSON") as caught:
        read_example(broken, form)
    assert "json.dumps" in caught.value.fix


def test_pairs_and_prompts_as_json_text_are_read_too() -> None:
    question, good, bad = ({"role": role, "content": role} for role in ("user", "assistant", "assistant"))
    bad["content"] = "no"
    pair = {"chosen": [question, good], "rejected": [question, bad]}
    as_text = {name: json.dumps(turns) for name, turns in pair.items()}
    form = detect_format(as_text)
    assert form is not None and form == detect_format(pair)
    assert read_example(as_text, form) == read_example(pair, form)
    answers = {"prompt": "Two roles, as JSON?", "chosen": json.dumps([question, good]), "rejected": "[]"}
    form = detect_format(answers)
    assert form is not None and read_example(answers, form).chosen.content == answers["chosen"]
    document = {"text": json.dumps([question, good])}
    form = detect_format(document)
    assert form is not None and form.kind == "text"


def test_tool_calls_are_kept_in_either_spelling() -> None:
    openai = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "tools": [{"name": "w"}],
    }
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "w", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "Sunny."},
        ],
        "tools": '[{"name": "w"}]',
    }
    first = read_example(openai, form_of("openai"))
    assert first == read_example(sharegpt, form_of("sharegpt"))
    assert first.messages[1].tool_calls == '[{"name": "w", "arguments": {"a": 1}}]'
    assert first.tools == '[{"name": "w"}]'


def test_a_call_of_what_takes_nothing_may_have_no_arguments() -> None:
    """`"arguments": ""` is what OpenAI's streams add up to for a function without parameters."""
    call = {"type": "function", "function": {"name": "now", "arguments": ""}}
    told = [{"role": "user", "content": "time?"}, {"role": "assistant", "tool_calls": [call]}]
    found = read_example({"messages": told}, form_of("openai"))
    assert found.messages[1].tool_calls == '[{"name": "now", "arguments": {}}]'


def test_openais_first_form_of_calls_loses_none() -> None:
    """`function_call` beside the words, answers of the role `function`, and `functions`: files from before tools."""
    call = {"name": "w", "arguments": '{"a": 1}'}
    record: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I look.", "function_call": call},
            {"role": "function", "name": "w", "content": "sunny"},
            {"role": "assistant", "content": "Sunny.", "function_call": None},
        ],
        "functions": [{"name": "w"}],
    }
    form = detect_format(record)
    assert form is not None
    found = read_example(record, form)
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].content == "I look."
    assert found.messages[1].tool_calls == '[{"name": "w", "arguments": {"a": 1}}]'
    assert found.messages[3].tool_calls is None
    assert found.tools == '[{"name": "w"}]'
    record["messages"][1]["content"] = None
    assert read_example(record, form).messages[1].content == ""


def test_a_tool_answers_a_call_that_is_written_as_text() -> None:
    """As in LLaMA-Factory's own glaive sets: human, gpt, observation, gpt."""
    turns = [("human", "Weather?"), ("gpt", "I look it up."), ("observation", "sunny"), ("gpt", "Sunny.")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    roles = [message.role for message in read_example(record, form_of("sharegpt")).messages]
    assert roles == ["user", "assistant", "tool", "assistant"]


def talk(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def beside(**more: Any) -> dict[str, Any]:
    """A conversation whose answer has something beside it."""
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **more}]}


BAD = [
    # record, format, what is said, what is in the fix
    ("text", "messages", "must be a JSON object", '"messages"'),
    ({}, "messages", "there is no 'messages'; the record has no keys", ""),
    ({"mesages": []}, "messages", "is it 'mesages'", ""),
    ({"messages": []}, "messages", "must be a list of messages, this is an empty list", ""),
    ({"messages": "hi"}, "messages", "this is text", ""),
    ({"messages": "[{'role': 'user'}]"}, "messages", "begins as a list, and is no JSON", "json.dumps"),
    ({"messages": ["hi"]}, "messages", "message 1 must be an object with 'role' and 'content'", ""),
    (talk(("user", None), ("assistant", "a")), "messages", "'content' of message 1 is null", "string"),
    (talk(("user", 3), ("assistant", "a")), "messages", "'content' of message 1 is a number", "string"),
    (talk(("user", "q"), ("assistant", "  ")), "messages", "message 2, the assistant's, is empty", "leave it out"),
    (talk(("usr", "q"), ("assistant", "a")), "messages", "unknown role 'usr'; known: 'user', 'assistant'", "'user'"),
    (talk(("assistant", "a")), "messages", "message 1 is assistant, as the first", "take turns"),
    (talk(("user", "q"), ("user", "q"), ("assistant", "a")), "messages", "message 2 is user, after user", "turns"),
    (talk(("user", "q"), ("assistant", "a"), ("system", "s")), "messages", "message 3 is system", "stands first"),
    (talk(("user", "q"), ("assistant", "a"), ("user", "q")), "messages", "ends with user", "add the answer"),
    (talk(("user", "\ud83d"), ("assistant", "a")), "messages", "half a character (\\ud83d)", "emoji"),
    (talk(("user", [{"type": "image"}]), ("assistant", "a")), "messages", "part of type 'image'", ""),
    (talk(("user", [{"type": "text", "value": "q"}]), ("assistant", "a")), "messages",
     "no text under 'text'; it has 'type', 'value'", '"text": "..."'),
    ({**talk(("user", "<image>who?"), ("assistant", "a")), "images": ["1.jpg"]}, "messages", "its images (<image>)",
     "set of text"),
    (beside(weight=0.5), "messages", "message 2 has the weight 0.5", "write 0 (not learned) or 1"),
    (sharegpt_record(), "messages", "there is no 'messages'", '"role_tag": "from"'),
    (messages_record(), "sharegpt", "there is no 'conversations'", '"messages": "messages"'),
    ({"conversations": messages_record()["messages"]}, "sharegpt", "has no 'from'", '"role_tag": "role"'),
    ({"conversations": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sharegpt", "'user'",
     '"user_tag": "user"'),
    (messages_record(), "alpaca", "there is no 'instruction'", '"formatting": "messages"'),
    ({"instruction": "q", "response": "a"}, "alpaca", "there is no 'output'", '"response": "response"'),
    ({"instruction": "q", "output": None}, "alpaca", "'output' is null", "string"),
    ({"instruction": "q", "output": ""}, "alpaca", "the assistant's, is empty", ""),
    ({"instruction": "", "input": "", "output": "a"}, "alpaca", "'instruction' is empty", ""),
    ({"instruction": "q", "output": "a", "history": ["x"]}, "alpaca", "'history' must be a list of", "Hello"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "form", "said", "fix"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_wrong_record_is_named_with_its_rule_and_fix(record: Any, form: str, said: str, fix: str) -> None:
    with pytest.raises(BadRecord) as caught:
        read_example(record, form_of(form))
    assert said in caught.value.rule, caught.value.rule
    assert fix in caught.value.fix, caught.value.fix


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[note] read on", '[{"name": "sum", "value": 3}]', "[{'name': 'sum'}]", "[]"]
)
def test_an_answer_that_begins_as_a_list_is_text(text):
    """Beside a question in messages too, where an answer may be messages as well."""
    asked = {"prompt": [{"role": "user", "content": "Which numbers?"}], "chosen": text, "rejected": "none"}
    read = read_example(asked, detect_format(asked))
    assert (read.chosen.role, read.chosen.content) == ("assistant", text)
    turns = [{"role": "assistant", "content": text}]
    held = read_example(asked | {"chosen": json.dumps(turns)}, detect_format(asked))
    assert held.chosen == read.chosen
    with pytest.raises(BadRecord, match="no JSON"):
        read_example(asked | {"chosen": str(turns)}, detect_format(asked))
    assert detect_format({"messages": f"{text[:1]}note] of nobody", "text": "a document"}).name == "text"
