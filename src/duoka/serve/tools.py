"""Tools that `duoka chat --tools` gives a model (tasks/tools.py), and what a listener hears of their calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from duoka.data.tokens.template import knows_tools
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError
from duoka.tasks.tool_calls import LISTED, may_call
from duoka.tasks.tools import TOOLS, Tool, arguments_of

MOST_CALLS = 8  # rounds of calls in one answer
_MARKS = ("<tool_call>", LISTED)


def find_tools(names: Sequence[str], tokenizer: ChatTokenizer) -> dict[str, Tool]:
    """Those of `--tools`; refused where the model would never hear of them."""
    if unknown := [name for name in names if name not in TOOLS]:
        raise ConfigError(f"--tools names {unknown[0]!r}", fix=f"known: {', '.join(TOOLS)}")
    found = {name: TOOLS[name] for name in names}
    if found and not knows_tools(tokenizer, [tool.schema for tool in found.values()]):
        raise ConfigError(
            f"the chat template ({tokenizer.template_name}) knows no tools, so the model would not hear of them",
            fix="take a model whose template does (Qwen2.5, Qwen3, Llama 3.1 and later), or leave --tools out",
        )
    return found


def end_of_speech(text: str, names: Iterable[str] = ()) -> int:
    """How much of an answer can be shown: all before a call, and before what may become one."""
    if text.lstrip()[:1] in ("", "{", "["):
        return 0
    return min(may_call(text, names), *(_beginning(text, mark) for mark in _MARKS))


def _beginning(text: str, mark: str) -> int:
    """Where `mark` stands or may come to stand; the text's length where neither is."""
    if (place := text.find(mark)) >= 0:
        return place
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def as_asked(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as templates write it: its arguments as an object."""
    return {"name": call["function"]["name"], "arguments": arguments_of(call)}
