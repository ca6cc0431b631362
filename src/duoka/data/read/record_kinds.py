"""Records of every kind: conversations, plain text, prompts, preference pairs, labeled answers.

`read_record` is what registry and tokenize call for any data set. A format (alpaca, messages, ...) says how the
conversation is written; the kind says what stands beside it. Raises BadRecord, like the formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from duoka.data.read.alpaca import read_question
from duoka.data.read.detect import detect_format
from duoka.data.read.example import (
    AnyExample,
    BadRecord,
    Kind,
    Labeled,
    Message,
    Preference,
    Prompt,
    SetFormat,
    Text,
    check_text_alone,
    check_whole,
    kind_of,
    no_column,
    read_text,
)
from duoka.data.read.formats import FORMATS, check_all_whole, check_order, read_example
from duoka.data.read.messages import (
    check_template_arguments,
    listed,
    listed_answer,
    read_messages,
    read_tools,
    read_turn,
    with_system,
)


def read_record(record: Any, form: SetFormat, *, source: str = "", line: int = 0) -> AnyExample:
    """The example in a record, checked. Raises BadRecord, with the format that would read it when there is one."""
    try:
        if form.kind == "conversation" or not isinstance(record, dict):
            return read_example(record, form, source=source, line=line)
        return _READERS[form.kind](record, form, source, line)
    except BadRecord as error:
        better = _better_format(record, form) if error.misread else None
        raise BadRecord(error.rule, _way_out(form, better) if better else error.fix) from None


def _way_out(form: SetFormat, better: SetFormat) -> str:
    if (better.name, better.kind) == (form.name, form.kind):
        return better.fix_text()
    # The words of dataset_info.json are for all records: of a file with some of each, others would be refused then.
    return (
        f"where other records are read as {form.name}, put those like this one into a file of their own: a file has "
        f"one format; else {better.fix_text()}"
    )


def _better_format(record: dict[str, Any], form: SetFormat) -> SetFormat | None:
    """The format that reads a record which `form` cannot, or None."""
    found = detect_format(record)
    if found is None or found == form:
        return None
    try:
        if found.kind == "conversation":
            FORMATS.get(found.name).read(record, found)
        else:
            _READERS[found.kind](record, found, "", 0)
    except BadRecord:
        return None
    return found


def _read_plain(record: dict[str, Any], form: SetFormat, source: str, line: int) -> Text:
    name = form.columns.get("text", "text")
    if name not in record:
        raise BadRecord(no_column(name, record), misread=True)
    text = read_text(record, name)
    if not text.strip():
        raise BadRecord(f"{name!r} is empty", "leave the record out")
    check_whole(text, repr(name))
    return Text(text, source, line)


def _read_prompt(record: dict[str, Any], form: SetFormat, source: str, line: int) -> Prompt:
    messages, tools = _question(record, form)
    _check(messages, "question")
    check_text_alone(record, messages)
    return Prompt(tuple(messages), read_tools(tools), source, line)


def _read_labeled(record: dict[str, Any], form: SetFormat, source: str, line: int) -> Labeled:
    name = form.columns["kto_tag"]
    if name not in record:
        raise BadRecord(no_column(name, record), misread=True)
    label = record[name]
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):
        label = label.strip().lower() == "true"  # cells of a table are text
    if not isinstance(label, bool):
        raise BadRecord(f"{name!r} is {kind_of(label)}, and must be true or false", "true for a desirable answer (KTO)")
    plain = SetFormat(form.name, form.columns, form.tags)
    example = read_example(record, plain)
    column = form.columns.get("completion", "")
    count = len(listed(record[column], column)) if column else 1
    if count > 1:  # TRL's loss is of all of them
        what = f"{column!r} is {count} messages, and a label judges one answer"
        raise BadRecord(what, "put the messages before the last answer into the prompt, or leave the record out")
    return Labeled(example.messages, label, example.tools, source, line)


def _read_preference(record: dict[str, Any], form: SetFormat, source: str, line: int) -> Preference:
    check_template_arguments(record)
    before: list[list[Message]] = []
    answers: list[Message] = []
    for role in ("chosen", "rejected"):
        name = form.columns.get(role, role)
        if name not in record:
            raise BadRecord(no_column(name, record), misread=True)
        turns = _answer_turns(record[name], name, form)
        before.append(turns[:-1])
        answers.append(turns[-1])
    column = form.columns.get("messages" if form.name != "alpaca" else "prompt")
    if column and record.get(column) is not None:
        messages, tools = _question(record, form)
        messages = _whole_question(messages, before, column, form)
    else:
        messages, tools = with_system(before[0], record, form), record.get(form.columns.get("tools", ""))
        if before[1] != before[0]:
            raise BadRecord("chosen and rejected answer different conversations", "give both the same prompt")
    for answer in answers:
        _check([*messages, answer], "assistant")
    _check(messages, "question")
    check_text_alone(record, [*messages, *answers])
    if answers[0] == answers[1]:
        raise BadRecord("chosen and rejected are the same answer", "there is nothing to prefer: leave the record out")
    margin = _read_margin(record, form.columns.get("margin"))
    return Preference(tuple(messages), answers[0], answers[1], read_tools(tools), source, line, margin)


def _whole_question(asked: list[Message], before: list[list[Message]], column: str, form: SetFormat) -> list[Message]:
    """What both answer, where the record asks in a column of its own and answers may be whole conversations, too."""
    wrong = next((part for part in before if part and part != asked), None)
    if wrong is None:
        return asked
    if wrong[0].role == "assistant":
        what = f"an answer is {len(wrong) + 1} messages behind {column!r}, and pairs compare one message each"
        raise BadRecord(what, "put the messages that both have in common into the prompt, or leave the record out")
    if before[0] != before[1]:
        raise BadRecord("chosen and rejected answer different conversations", "give both the same prompt")
    # Data sets that name a talk by its question alone: the conversations say all of it.
    if form.name == "alpaca" and all(message in wrong for message in asked):
        return wrong
    what = f"{column!r} is another conversation than the one that chosen and rejected answer"
    raise BadRecord(what, f"leave {column!r} out: both hold the whole conversation")


def _read_margin(record: dict[str, Any], name: str | None) -> float:
    value = record.get(name) if name else None
    if value is None:
        return 0.0
    try:
        found = math.nan if isinstance(value, (bool, list, dict)) else float(value)  # cells of a table are text
    except (ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise BadRecord(f"{name!r} is {kind_of(value)}, and must be a number", "by how much chosen is to score higher")
    return found


def _answer_turns(value: Any, name: str, form: SetFormat) -> list[Message]:
    """An answer as text, as one message, or as the whole conversation up to it."""
    tags = form.tags or FORMATS.get("messages").tags
    value = value if form.name == "alpaca" else listed_answer(value, name, tags["role_tag"])
    if isinstance(value, str):
        return [Message("assistant", value)]
    turns = value if isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise BadRecord(f"{name!r} is {kind_of(value)}, and must be an answer: text, a message or messages")
    return [read_turn(turn, place, tags) for place, turn in enumerate(turns, start=1)]


def _question(record: dict[str, Any], form: SetFormat) -> tuple[list[Message], Any]:
    return read_question(record, form) if form.name == "alpaca" else read_messages(record, form)


def _check(messages: list[Message], ends: str) -> None:
    check_order(messages, ends=ends)
    check_all_whole(messages)


_READERS: dict[Kind, Callable[[dict[str, Any], SetFormat, str, int], AnyExample]] = {
    "text": _read_plain,
    "prompt": _read_prompt,
    "labeled": _read_labeled,
    "preference": _read_preference,
}


def kind_of_columns(form: SetFormat, *, ranking: bool) -> SetFormat:
    """The format with its kind, as dataset_info.json says it: by `ranking`, a kto_tag, or which columns are named."""
    columns = form.columns
    if form.name == "text":
        return replace(form, kind="text")
    if ranking:
        return replace(form, kind="preference")
    if columns.get("kto_tag"):
        return replace(form, kind="labeled")
    if form.name == "alpaca" and "prompt" in columns and "response" not in columns:
        return replace(form, kind="prompt")
    return form


def as_text(form: SetFormat) -> SetFormat:
    """For pretraining: sets with nothing but a prompt column are how LLaMA-Factory's users register plain text."""
    if form.kind == "prompt" and form.name == "alpaca" and set(form.columns) == {"prompt"}:
        return SetFormat("text", {"text": form.columns["prompt"]}, kind="text")
    return form
