"""The table of data formats, and a record's way through it: read by its format, checked, or refused with a fix.

A new format is a reader in a file of its own and a row in `FORMATS`. Readers raise `BadRecord`; no file and no
tokenizer is known here. record_kinds.py reads what is no plain conversation, detect.py recognizes formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.data.read.alpaca import read_alpaca
from duoka.data.read.example import BadRecord, Example, Message, SetFormat, check_text_alone, check_whole, kind_of
from duoka.data.read.messages import read_messages, read_tools
from duoka.registry import Registry

__all__ = ["FORMATS", "BadRecord", "Example", "Format", "Message", "SetFormat", "read_example"]


@dataclass(frozen=True)
class Format:
    """One row of the table. `columns` and `tags` are the defaults of dataset_info.json."""

    read: Callable[[dict[str, Any], SetFormat], tuple[list[Message], Any]]
    columns: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=dict)


def read_example(record: Any, form: SetFormat, *, source: str = "", line: int = 0) -> Example:
    """The conversation in a record, checked. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(
            f"a record must be a JSON object, this is {kind_of(record)}",
            'write {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}',
        )
    messages, tools = FORMATS.get(form.name).read(record, form)
    check_order(messages)
    check_text_alone(record, messages)
    check_all_whole(messages)
    return Example(tuple(messages), read_tools(tools), source, line)


def check_order(messages: list[Message], *, ends: str = "assistant") -> None:
    """System first if at all, then user and assistant in turn (tool results beside users), an answer at the end."""
    expected: tuple[str, ...] = ("system", "user")
    for place, message in enumerate(messages, start=1):
        role = message.role
        if role not in expected:
            before = f"after {messages[place - 2].role}" if place > 1 else "as the first"
            wanted = " or ".join(expected)
            raise BadRecord(
                f"roles out of order: message {place} is {role}, {before}; {wanted} is expected",
                "user and assistant take turns, system stands first, tool results follow the assistant",
            )
        if role == "assistant" and not message.content.strip() and message.tool_calls is None:
            raise BadRecord(f"message {place}, the assistant's, is empty", "there is nothing to learn: leave it out")
        if role == "system":
            expected = ("user",)
        elif role == "assistant":
            expected = ("user", "tool")  # a call may be written as plain text, as in LLaMA-Factory's own sets
        else:
            expected = ("assistant", "tool") if role == "tool" else ("assistant",)
    last = messages[-1].role if messages else "nothing"
    if ends == "assistant" and last != "assistant":
        what = f"the conversation ends with {last}; the last message must be the assistant's"
        raise BadRecord(what, "add the answer, or leave the last message out")
    if ends == "question" and last not in ("user", "tool"):
        what = f"the prompt ends with {last}; the last message must be a question"
        raise BadRecord(what, "leave the answer out, or name its column")


def check_all_whole(messages: Sequence[Message]) -> None:
    for place, message in enumerate(messages, start=1):
        check_whole(message.content + message.reasoning + message.name + message.call_id, f"message {place}")
        check_whole(message.tool_calls or "", f"the tool call of message {place}")


def _read_nothing(record: dict[str, Any], form: SetFormat) -> tuple[list[Message], Any]:
    raise BadRecord("plain text holds no conversation")


_SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
_MESSAGES_COLUMNS = {"messages": "messages", "system": "system", "tools": "tools"}

FORMATS: Registry[Format] = Registry("data format")
FORMATS.add("messages", Format(read_messages, _MESSAGES_COLUMNS, _OPENAI_TAGS))
FORMATS.add("openai", Format(read_messages, _MESSAGES_COLUMNS, _OPENAI_TAGS))
FORMATS.add("sharegpt", Format(read_messages, _MESSAGES_COLUMNS | {"messages": "conversations"}, _SHAREGPT_TAGS))
FORMATS.add(
    "alpaca",
    Format(
        read_alpaca,
        {
            "prompt": "instruction",
            "query": "input",
            "response": "output",
            "history": "history",
            "system": "system",
            "tools": "tools",
        },
    ),
)
FORMATS.add("text", Format(_read_nothing, {"text": "text"}))
