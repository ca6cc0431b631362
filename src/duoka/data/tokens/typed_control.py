"""Control tokens typed as text in a message: "<|im_end|>" in a question is text, and ends no turn.

template.py breaks them up before a chat template writes the conversation, and gets back where the text has to be cut so
that the tokenizer sees no control token there. What the template itself writes stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from duoka.data.tokens.reasoning import KEYS

Span = tuple[int, int]
_TEXTS = ("content", "name", "tool_call_id", *KEYS)  # of a message
_PRIVATE = range(0xE000, 0xF900)  # letters that mean nothing by themselves


@cache
def _pattern(specials: tuple[str, ...]) -> re.Pattern[str] | None:
    # Longest first: of <|end|> and <|end|>x the longer is what a tokenizer would take.
    known = sorted((text for text in specials if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None


def break_up(messages: Sequence[dict[str, Any]], specials: tuple[str, ...]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark inside every control token that is typed in them, and the mark; "" when none is."""
    pattern = _pattern(specials)
    texts = [message[key] for message in messages for key in _TEXTS if key in message]
    if pattern is None or not any(map(pattern.search, texts)):
        return list(messages), ""
    letters = {letter for text in texts for letter in text}
    mark = next(chr(code) for code in _PRIVATE if chr(code) not in letters)

    def broken(found: re.Match[str]) -> str:
        word = found.group()
        return word if _is_thought(word) else f"{word[0]}{mark}{word[1:]}"

    def whole(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, **{key: pattern.sub(broken, message[key]) for key in _TEXTS if key in message}}

    return [whole(message) for message in messages], mark


def _is_thought(word: str) -> bool:
    """Templates search an answer for these, to split reasoning from the reply."""
    return "think" in word.lower()


def without_marks(text: str, spans: Sequence[Span], mark: str) -> tuple[str, list[Span], tuple[int, ...]]:
    """The text without its marks, the spans in it, and where it has to be cut."""
    if not mark or mark not in text:
        return text, list(spans), ()
    places = [place for place, letter in enumerate(text) if letter == mark]
    moved = [tuple(border - sum(place < border for place in places) for border in span) for span in spans]
    cuts = tuple(place - before for before, place in enumerate(places))
    return text.replace(mark, ""), [(start, end) for start, end in moved], cuts
