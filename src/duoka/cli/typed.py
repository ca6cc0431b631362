"""Typos of text pasted from web pages: an en-dash for --, full-width = and quotes. Corrected with a note.

`cli.run` calls `mend` with the words of a command line before anything reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Hyphens and dashes that editors and web pages make of -- : hyphen, figure, en and em dash, bar, minus, full-width.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"
_OPTION = re.compile(rf"^[-{_DASHES}]*[{_DASHES}][-{_DASHES}]*(?=[A-Za-z])")
_KEY = re.compile(r"^(?P<key>-{0,2}[A-Za-z][\w.-]*)\s*[＝﹦]\s*(?P<value>.*)$", re.DOTALL)
_QUOTES = {"“": "”", "„": "“", "‘": "’", "＂": "＂", "「": "」"}
_FREE_TEXT = ("--prompt", "--system")  # what follows these is the user's own prose


def mend(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words as they were meant, and a note for each that was mended."""
    out: list[str] = []
    notes: list[str] = []
    for place, word in enumerate(words):
        is_prose = place > 0 and words[place - 1] in _FREE_TEXT
        is_script = bool(out) and out[0] == "launch" and any(earlier.endswith(".py") for earlier in out)
        better = word if is_prose or is_script else _mended(word)
        if better != word:
            notes.append(f"{word} is read as {better} ({_reason(word)})")
        out.append(better)
    return out, notes


def without_local_rank(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words without the --local-rank=N that python -m torch.distributed.launch writes; LOCAL_RANK says the same."""
    rank = env.get("LOCAL_RANK")
    own = {f"--{name}={rank}" for name in ("local-rank", "local_rank")} if rank is not None else set()
    return [word for word in words if word not in own]


def _mended(word: str) -> str:
    found = _OPTION.match(word)
    if found:
        rest = word[found.end() :]
        word = ("-" if len(rest) == 1 else "--") + rest
    pair = _KEY.match(word)
    if pair:
        word = f"{pair['key']}={pair['value']}"
    head, equals, value = word.partition("=")
    value = _unquoted(value) if equals else value
    return f"{head}={value}" if equals else _unquoted(word)


def _unquoted(text: str) -> str:
    closing = _QUOTES.get(text[:1])
    return text[1:-1] if closing and len(text) > 2 and text.endswith(closing) else text


def _reason(word: str) -> str:
    if _OPTION.match(word):
        return "a pasted dash is not the -- of a terminal"
    return "full-width = and curly quotes mean nothing to a terminal"
