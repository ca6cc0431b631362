"""Alpaca records: instruction, input and output, with system and history where there are any.

`read_alpaca` is a row's reader in formats.py; `read_question` is the same up to the answer, for the other kinds of
data that are written this way.
"""

from __future__ import annotations

from typing import Any

from duoka.data.read.example import BadRecord, Message, SetFormat, no_column, read_optional_text, read_text


def read_alpaca(record: dict[str, Any], form: SetFormat) -> tuple[list[Message], Any]:
    messages, tools = read_question(record, form)
    name = form.columns.get("response")
    if not name or name not in record:
        raise BadRecord(no_column(name or "response", record), misread=True)
    messages.append(Message("assistant", read_text(record, name)))
    return messages, tools


def read_question(record: dict[str, Any], form: SetFormat) -> tuple[list[Message], Any]:
    """The conversation up to the last question, and the tools."""
    columns = form.columns
    name = columns.get("prompt")
    if not name or name not in record:
        raise BadRecord(no_column(name or "prompt", record), misread=True)
    messages: list[Message] = []
    system = read_optional_text(record, columns.get("system"))
    if system:
        messages.append(Message("system", system))
    messages += _read_history(record, columns.get("history"))
    prompt = read_text(record, name)
    more = read_optional_text(record, columns.get("query"))
    question = "\n".join(part for part in (prompt, more) if part)
    if not question.strip():
        raise BadRecord(f"{name!r} is empty", "leave the record out")
    messages.append(Message("user", question))
    return messages, record.get(columns.get("tools", ""))


def _read_history(record: dict[str, Any], name: str | None) -> list[Message]:
    pairs = record.get(name) if name else None
    if pairs in (None, "", "[]"):  # as an empty cell of a table
        return []
    messages = []
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRecord(f"{name!r} must be a list of [question, answer] pairs", 'write [["Hi", "Hello!"]]')
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return messages
