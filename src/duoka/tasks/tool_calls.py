"""Calls of tools in what a model wrote: in Hermes' and Qwen's marks, as bare JSON (Llama 3), or listed (Mistral)."""

from __future__ import annotations

import json
import re
import secrets
import string
from typing import Any

_LETTERS = string.ascii_letters + string.digits
LISTED = "[TOOL_CALLS]"  # Mistral's mark of a list of calls; a token of its own, which text is often without
_MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def split_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """What was said beside the calls (None: nothing), and the calls as OpenAI's API has them."""
    marked = [_calls(found.group(1)) for found in _MARKED.finditer(text)]
    if marked and all(marked):
        return _MARKED.sub("", text).strip() or None, [call for calls in marked for call in calls]
    said, mark, rest = text.partition(LISTED)
    if calls := _calls((rest if mark else text).strip()):
        return (said.strip() or None) if mark else None, calls
    return text, []


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
