"""Calls of tools in what a model wrote: in Hermes' and Qwen's marks, as bare JSON (Llama 3), or as Mistral's models.

These write a list behind a mark, or since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each call, some with `[CALL_ID]` and
nine letters between. Their marks are tokens of their own, which text is often without.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable
from typing import Any

_LETTERS = string.ascii_letters + string.digits
LISTED = "[TOOL_CALLS]"
_MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_WITH_MARKS = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_ID = "(?:[A-Za-z0-9]{9})?"  # of a call, whose mark is not in the text


def split_calls(text: str, names: Iterable[str] = ()) -> tuple[str | None, list[dict[str, Any]]]:
    """What was said beside the calls (None: nothing), and the calls as OpenAI's API has them.

    `names` of the tools: without marks, `name{...}` is a call only where it is one of these and ends the text.
    """
    marked = [_calls(found.group(1)) for found in _MARKED.finditer(text)]
    if marked and all(marked):
        return _MARKED.sub("", text).strip() or None, [call for calls in marked for call in calls]
    said, mark, rest = text.partition(LISTED)
    if calls := _calls((rest if mark else text).strip()):
        return (said.strip() or None) if mark else None, calls
    if mark and (calls := _named_calls(rest, _WITH_MARKS)):
        return said.strip() or None, calls
    if known := "|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))):
        head = re.compile(rf"\s*({known}){_ID}\s*(?=\{{)")
        for found in head.finditer(text):
            if calls := _named_calls(text[found.start() :], head):
                return text[: found.start()].strip() or None, calls
    return text, []


def may_call(text: str, names: Iterable[str]) -> int:
    """Where a call without marks begins, or may have begun, in text that goes on; the text's length where none does."""
    return min((_may_begin(text, name) for name in names), default=len(text))


def _may_begin(text: str, name: str) -> int:
    word = re.escape(name)
    if found := re.search(rf"{word}{_ID}\s*\{{|{word}[A-Za-z0-9]{{0,9}}\s*$", text):
        return found.start()
    lengths = range(min(len(name) - 1, len(text)), 0, -1)
    return len(text) - next((length for length in lengths if name.startswith(text[-length:])), 0)


def _named_calls(text: str, head: re.Pattern[str]) -> list[dict[str, Any]]:
    """Calls by name up to the end of the text, and nothing else."""
    found: list[dict[str, Any]] = []
    place = 0
    while text[place:].strip():
        named = head.match(text, place)
        if named is None:
            return []
        try:
            arguments, place = json.JSONDecoder().raw_decode(text, named.end())
        except ValueError:
            return []
        call = _as_call({"name": named.group(1), "arguments": arguments})
        found += [call] if call else []
    return found


def _calls(text: str) -> list[dict[str, Any]]:
    """A call, or a list of nothing else."""
    try:
        raw = json.loads(text)
    except ValueError:
        return []
    found = [_as_call(one) for one in (raw if isinstance(raw, list) else [raw])]
    return [call for call in found if call] if all(found) else []


def _as_call(raw: Any) -> dict[str, Any] | None:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return None
    arguments = raw.get("arguments", raw.get("parameters"))
    if arguments is None:
        return None
    said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": "".join(secrets.choice(_LETTERS) for _ in range(9)),  # Mistral's templates take nothing else
        "type": "function",
        "function": {"name": raw["name"], "arguments": said},
    }
