"""Conversations as lists of messages: OpenAI's role/content, ShareGPT's from/value, or any renamed tags.

`read_messages` is the reader of three rows in formats.py. It knows no other format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from duoka.data.read.example import (
    BadRecord,
    Message,
    SetFormat,
    check_whole,
    kind_of,
    names_of,
    no_column,
    read_optional_text,
)
from duoka.registry import nearest

_LIST = re.compile(r"\s*\[\s*\{")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # what servers and data sets call it
_LEARNED = ("train", "loss")  # Axolotl's and ms-swift's switch of a turn


def read_messages(record: dict[str, Any], form: SetFormat) -> tuple[list[Message], Any]:
    column = form.columns.get("messages", "messages")
    turns = record.get(column)
    if turns is None:
        raise BadRecord(no_column(column, record), misread=True)
    turns = listed(turns, column)
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{column!r} must be a list of messages, this is {kind_of(turns)}", misread=True)
    check_template_arguments(record)
    messages = [read_turn(turn, place, form.tags) for place, turn in enumerate(turns, start=1)]
    if form.columns.get("completion"):
        messages = _with_completion(messages, record, form)
    return with_system(messages, record, form), _tools_of(record, form)


def check_template_arguments(record: dict[str, Any]) -> None:
    """TRL gives them to the template, which then writes another text."""
    if record.get("chat_template_kwargs"):
        raise BadRecord(
            "the record has 'chat_template_kwargs', and the chat template is given none here",
            "leave them out, and write into the messages what they are to change",
        )


def _tools_of(record: dict[str, Any], form: SetFormat) -> Any:
    """What the record's tools are; `functions` is OpenAI's first name of them."""
    column = form.columns.get("tools", "")
    tools = record.get(column)
    return record.get("functions") if tools is None and column == "tools" else tools


def listed(value: Any, column: str) -> Any:
    """The list of messages that a cell of a table holds as JSON text; anything else as it is."""
    if not begins_as_list(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRecord(
            f"{column!r} is text that begins as a list, and is no JSON ({error})",
            "write it with json.dumps(messages); str(messages) writes quotes that JSON does not know",
        ) from None


def begins_as_list(value: Any) -> bool:
    """Whether a text begins as a list of objects does."""
    return isinstance(value, str) and _LIST.match(value) is not None


def listed_answer(value: Any, column: str, role_tag: str) -> Any:
    """As `listed`, of what may be an answer's own text, which may be a list of other things, or begin as one."""
    if not begins_as_list(value) or not any(f"{quote}{role_tag}{quote}" in value for quote in "\"'"):
        return value
    turns = listed(value, column)
    return turns if all(isinstance(turn, dict) and role_tag in turn for turn in turns) else value


def _with_completion(prompt: list[Message], record: dict[str, Any], form: SetFormat) -> list[Message]:
    """TRL's prompt with a completion: of the whole talk the completion alone is learned."""
    column = form.columns["completion"]
    turns = listed(record.get(column), column)
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{column!r} must be a list of messages, this is {kind_of(turns)}", misread=True)
    given = [replace(message, is_learned=message.role != "assistant") for message in prompt]
    return given + [read_turn(turn, place, form.tags) for place, turn in enumerate(turns, start=len(prompt) + 1)]


def with_system(messages: list[Message], record: dict[str, Any], form: SetFormat) -> list[Message]:
    """The talk behind the system prompt that a column of its own holds."""
    system = read_optional_text(record, form.columns.get("system"))
    if not system:
        return messages
    if messages and messages[0].role == "system":
        if messages[0].content == system:
            return messages
        raise BadRecord(f"both {form.columns['system']!r} and the first message hold a system prompt")
    return [Message("system", system), *messages]


def read_turn(turn: Any, place: int, tags: Mapping[str, str]) -> Message:
    role_tag, content_tag = tags["role_tag"], tags["content_tag"]
    if not isinstance(turn, dict):
        raise BadRecord(f"message {place} must be an object with {role_tag!r} and {content_tag!r}")
    if role_tag not in turn or (content_tag not in turn and "tool_calls" not in turn and "function_call" not in turn):
        missing = role_tag if role_tag not in turn else content_tag
        raise BadRecord(f"message {place} has no {missing!r}; it has {names_of(turn)}", misread=True)
    given = turn[role_tag]
    roles = _roles(tags)
    if not isinstance(given, str) or given not in roles:
        guess = nearest(given, roles) if isinstance(given, str) else None
        fix = f"did you mean {guess!r}?" if guess else ""
        raise BadRecord(f"message {place} has the unknown role {given!r}; known: {names_of(roles)}", fix, misread=True)
    role = roles[given]
    content, calls = turn.get(content_tag), turn.get("tool_calls")
    if calls is None and role_tag == "role":
        calls = turn.get("function_call")  # OpenAI's first form: one call beside the words
    if role == "function":
        return Message("assistant", "", _read_calls(content, place), _is_learned(turn, place), _read_reasoning(turn))
    # Words of OpenAI's messages, which templates know; in another's they may be columns of its own.
    beside = read_names(turn, role) if role_tag == "role" else {}
    if role != "assistant":
        return Message(role, _read_content(content, place, content_tag), **beside)
    beside |= {"is_learned": _is_learned(turn, place), "reasoning": _read_reasoning(turn)}
    if calls is not None and calls != []:
        return Message(role, _read_content(content or "", place, content_tag), _read_calls(calls, place), **beside)
    return Message(role, _read_content(content, place, content_tag), **beside)


def read_names(turn: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Who speaks, and of a tool which call it answers, as `Message` has them; tables have a null for neither."""
    keys = {"name": "name", "tool_call_id": "call_id"} if role == "tool" else {"name": "name"}
    return {ours: turn[key] for key, ours in keys.items() if isinstance(turn.get(key), str)}


def _read_reasoning(turn: dict[str, Any]) -> str:
    """What stands beside the words. A chat template may know it: tokens/reasoning.py hands it over or refuses it."""
    return next((turn[name] for name in _REASONING if isinstance(turn.get(name), str) and turn[name].strip()), "")


def _is_learned(turn: dict[str, Any], place: int) -> bool:
    """By OpenAI's weight of 0 or 1, or a false of others' switches."""
    if any(turn.get(name) is False for name in _LEARNED):
        return False
    weight = turn.get("weight")
    if weight is None or weight in (0, 1):
        return weight is None or bool(weight)
    raise BadRecord(f"message {place} has the weight {weight!r}", "write 0 (not learned) or 1, or leave it out")


def _roles(tags: Mapping[str, str]) -> dict[str, str]:
    """What a role is called in the data -> what it is."""
    names = {
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
        "observation_tag": "tool",
        "function_tag": "function",
    }
    roles = {tags[tag]: role for tag, role in names.items() if tags.get(tag)}
    if tags.get("system_tag") == "system":
        roles.setdefault("developer", "system")  # OpenAI's later name of the same role
        if tags["role_tag"] == "role":
            roles.setdefault("function", "tool")  # and its first name of this one
    return roles


def _read_content(content: Any, place: int, name: str) -> str:
    if isinstance(content, list):  # OpenAI's parts
        texts = []
        for part in content:
            if not isinstance(part, dict):
                what = f"{name!r} of message {place} is a list with {kind_of(part)} in it, and parts are objects"
                raise BadRecord(what, 'write {"type": "text", "text": "..."}, or one string')
            kind = part.get("type")
            if kind == "text" and not isinstance(part.get("text"), str):
                what = f"a part of message {place} is of type 'text' and has no text under 'text'; it has"
                raise BadRecord(f"{what} {names_of(part)}", 'write {"type": "text", "text": "..."}, or one string')
            if kind != "text":
                raise BadRecord(f"message {place} holds a part of type {kind!r}; only text can be learned here")
            texts.append(part["text"])
        return "".join(texts)
    if not isinstance(content, str):
        raise BadRecord(
            f"{name!r} of message {place} is {kind_of(content)}, and must be text", 'write a string, for example "..."'
        )
    return content


def _read_calls(calls: Any, place: int) -> str:
    """Tool calls in any spelling (OpenAI's list, ShareGPT's JSON text) -> a JSON list of name, arguments, and id."""
    rule = f"the tool call of message {place} is no object with 'name' and 'arguments'"
    fix = 'write {"name": "search", "arguments": {"query": "..."}}'
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
    except (ValueError, RecursionError):
        raise BadRecord(rule, fix) from None
    out = []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRecord(rule, fix)
        arguments = inner.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise BadRecord(f"the tool call of message {place} has arguments that are no JSON", fix) from None
        number = call.get("id")
        out.append(
            {"name": inner["name"], "arguments": arguments}
            | ({"id": number} if number and isinstance(number, str) else {})
        )
    if not out:
        raise BadRecord(rule, fix)
    return json.dumps(out, ensure_ascii=False)


def read_tools(tools: Any) -> str | None:
    if tools in (None, "", []):
        return None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("the tools are no JSON list of objects", 'write [{"name": ..., "parameters": {...}}]')
    # Tables write a null for what another row's tool has: it is no word of this one.
    told = [{name: part for name, part in tool.items() if part is not None} for tool in tools]
    text = json.dumps(told, ensure_ascii=False)
    check_whole(text, "the description of a tool")
    return text
