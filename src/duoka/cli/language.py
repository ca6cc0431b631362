"""In which language the command line speaks: DUOKA_LANG, or else that of the terminal. The words are in words_zh.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from duoka.cli.words_zh import KINDS

_VARIABLES = ("DUOKA_LANG", "LC_ALL", "LC_MESSAGES", "LANG")


def language(env: Mapping[str, str] = os.environ) -> Literal["en", "zh"]:
    """zh when the first of the variables that is set begins so."""
    named = next((env[name] for name in _VARIABLES if env.get(name)), "")
    return "zh" if named.lower().startswith("zh") else "en"


def framed(lines: Sequence[str], exit_code: int = 0) -> list[str]:
    """A refusal with its kind in the language of now, and in Chinese with the place where the code is explained."""
    if language() == "en":
        return list(lines)
    out = []
    for line in lines:
        kind, colon, rest = line.partition(": ")
        out.append(f"{KINDS[kind]}：{rest}" if kind in KINDS and colon else KINDS.get(line, line))
    return [*out, f"  中文说明：   duoka explain {exit_code}"] if exit_code and out else out
