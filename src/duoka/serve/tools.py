"""Tools that `duoka chat --tools` gives a model: what it is told of each, and what a call of one answers.

A tool never raises: what went wrong is its answer, for the model to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError
from duoka.tasks.calculate import Refused, calculate
from duoka.tasks.run_code import output_of

MOST_CALLS = 8  # rounds of calls in one answer
_MARK = "<tool_call>"


@dataclass(frozen=True)
class Tool:
    """`argument`: the name of its only one, a text."""

    name: str
    description: str
    argument: str
    meaning: str
    run: Callable[[str], str]

    @property
    def schema(self) -> dict[str, Any]:
        properties = {self.argument: {"type": "string", "description": self.meaning}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _calculate(expression: str) -> str:
    try:
        return calculate(expression)
    except Refused as reason:
        return f"error: {reason}"


TOOLS = {
    one.name: one
    for one in (
        Tool(
            "calculator",
            "Computes an arithmetic expression exactly.",
            "expression",
            "such as (3 + 4) * 2**8",
            _calculate,
        ),
        Tool("python", "Runs a Python program and returns what it prints.", "code", "the whole program", output_of),
    )
}


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


def knows_tools(tokenizer: ChatTokenizer, tools: list[dict[str, Any]]) -> bool:
    """Whether the template writes tools into a prompt."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.render(asked, tools, prompt=True) != tokenizer.render(asked, None, prompt=True)
    except TemplateError:
        return False


def end_of_speech(text: str) -> int:
    """How much of an answer can be shown: all before a call, and before what may become one."""
    if text.lstrip()[:1] in ("", "{"):
        return 0
    if (place := text.find(_MARK)) >= 0:
        return place
    for length in range(min(len(_MARK) - 1, len(text)), 0, -1):
        if _MARK.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def as_asked(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as templates write it: its arguments as an object."""
    return {"name": call["function"]["name"], "arguments": _arguments(call)}


def _arguments(call: Mapping[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]


def call_tool(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> str:
    tool, arguments = tools.get(call["function"]["name"]), _arguments(call)
    if tool is None:
        return f"error: there is no tool {call['function']['name']}; there is {', '.join(tools)}"
    given = arguments.get(tool.argument) if isinstance(arguments, dict) else arguments
    if not isinstance(given, (str, int, float)):
        return f"error: {tool.name} needs {tool.argument} as text"
    return tool.run(str(given))
