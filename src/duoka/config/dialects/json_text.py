"""JSON as people write it for DeepSpeed, with comments and tabs, as text that YAML's reader takes."""

from __future__ import annotations

import re

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|(?<=[\s,{\[])#[^\n]*', re.DOTALL)


def without_comments(text: str) -> str:
    """JSON as people write it for DeepSpeed: comments become spaces, tabs too, and every line keeps its number."""

    def blank(found: re.Match[str]) -> str:
        word = found.group()
        return word if word.startswith('"') else re.sub(r"[^\n]", " ", word)

    return _COMMENT.sub(blank, text).replace("\t", " ")
