"""Tools that a model may call while it answers: what it is told of each, and what a call of one answers.

A tool never raises: what went wrong is its answer, for the model to read.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from duoka.config.rl import CALCULATOR as NAME
from duoka.tasks.calculate import Refused, calculate
from duoka.tasks.run_code import output_of

ERROR = "error: "  # what an answer begins with where a call failed
MOST_SAID = 4000  # letters of an answer
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$", re.MULTILINE)


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
        return _schema(self.name, self.description, properties, [self.argument])

    def answer(self, arguments: Any) -> str:
        given = arguments.get(self.argument) if isinstance(arguments, dict) else arguments
        if not isinstance(given, (str, int, float)):
            return f"{ERROR}{self.name} needs {self.argument} as text"
        return self.run(str(given))


def _schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """As chat templates take it."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _calculate(expression: str) -> str:
    try:
        return calculate(expression)
    except Refused as reason:
        return f"{ERROR}{reason}"


CALCULATOR = Tool(
    NAME, "Computes an arithmetic expression exactly.", "expression", "such as (3 + 4) * 2**8", _calculate
)
TOOLS = {
    one.name: one
    for one in (
        CALCULATOR,
        Tool("python", "Runs a Python program and returns what it prints.", "code", "the whole program", output_of),
    )
}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """A call's arguments as an object where they are JSON."""
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]


def call_tool(tools: Mapping[str, Tool], call: Mapping[str, Any]) -> str:
    name = call["function"]["name"]
    return tools[name].answer(arguments_of(call)) if name in tools else no_tool(name, tools)


def no_tool(name: str, known: Iterable[str]) -> str:
    return f"{ERROR}there is no tool {name}; there is {', '.join(known)}"


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool: types by its annotations, words by its docstring (its `Args:` tell of each argument)."""
    said = inspect.getdoc(function) or ""
    opening, _, rest = said.partition("Args:")
    meanings = dict(_ARGUMENT.findall(rest))
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise LookupError(
                f"{function.__name__} takes *args, **kwargs or unnamed arguments, and a tool's have names"
            )
        kind = _TYPES.get(parameter.annotation)
        properties[name] = ({"type": kind} if kind else {}) | (
            {"description": meanings[name]} if name in meanings else {}
        )
        required += [name] if parameter.default is parameter.empty else []
    return _schema(function.__name__, " ".join(opening.split()), properties, required)
