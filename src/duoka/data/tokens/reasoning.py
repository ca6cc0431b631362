"""Reasoning that data hold beside an answer: handed to chat templates that know a key for it, and refused for others.

template.py asks here; which key a template knows is seen by what it writes, never by a model's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from duoka.data.read.example import BadRecord, Message

KEYS = ("reasoning_content", "thinking", "reasoning")  # what templates, servers and data sets call it
_MARK = re.compile(r"</?think(ing)?>")
_PROBE = "a-thought-that-no-template-has"


def find_key(render: Callable[[list[dict[str, Any]]], str]) -> str | None:
    """The key by which a template writes the reasoning of the last answer; None: it knows none."""
    from jinja2 import TemplateError

    answer = {"role": "assistant", "content": "!"}
    for key in KEYS:
        try:
            text = render([{"role": "user", "content": "?"}, {**answer, key: _PROBE}])
        except (TemplateError, TypeError, ValueError, KeyError):
            continue
        if _PROBE in text and "!" in text[text.index(_PROBE) :]:
            return key
    return None


def as_key(message: Message, place: int, key: str | None) -> dict[str, str]:
    """What is laid beside a message's content for the template. Raises BadRecord where its reasoning would be lost."""
    if not message.reasoning:
        return {}
    if key is None:
        raise BadRecord(
            f"message {place} has its reasoning beside the answer, and the chat template knows no key for it: it would "
            "not be learned",
            'write it into the answer, as the model is to say it: "<think>\\n...\\n</think>\\n\\n..."',
        )
    if _MARK.search(message.content) or _MARK.search(message.reasoning):
        raise BadRecord(
            f"message {place} has its reasoning beside the answer, and marks of reasoning (<think>) in its text too",
            "write it in one way: beside the answer without marks, or all of it in the answer",
        )
    return {key: message.reasoning}


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Of a message as templates take it."""
    return next((str(message[key]) for key in KEYS if message.get(key)), "")
