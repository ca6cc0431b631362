"""Calls of tools in what a model wrote: in Hermes' and Qwen's marks, or as bare JSON (Llama 3)."""

from __future__ import annotations

import json
import re
import secrets
import string
from typing import Any

_LETTERS = string.ascii_letters + string.digits
_MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def split_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """What was said beside the calls (None: nothing), and the calls as OpenAI's API has them."""
    calls = [_call(found.group(1)) for found in _MARKED.finditer(text)]
    if calls and all(calls):
        said = _MARKED.sub("", text).strip()
        return said or None, [call for call in calls if call]
    if (whole := _call(text.strip())) is not None:
        return None, [whole]
    return text, []


def _call(text: str) -> dict[str, Any] | None:
    try:
        raw = json.loads(text)
    except ValueError:
        return None
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
