"""The hand-made types of the YAML's values: what a key accepts, and how that is said to a user.

The sections of the schema are made of them. A type keeps the user's spelling; `units.py` gives it its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from duoka.config.layout_name import read_layout_name
from duoka.units import (
    parse_amount,
    parse_budget,
    parse_every,
    parse_seconds,
    parse_share_of_layers,
    parse_warmup,
)


@dataclass(frozen=True)
class Means:
    """What a hand-made type accepts, in a user's words: stands behind "must be" in a message."""

    words: str


def number_of(value: Any) -> Any:
    """YAML 1.1 reads 2e-5 as a string; people mean the number. true is none, though Python would take it as 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def step_as_text(value: Any) -> Any:
    """`resume: 120` names a step."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_by(parse: Any, *, words: tuple[str, ...] = ()) -> BeforeValidator:
    """Keep the user's spelling, once `parse` accepts it; `words` (such as auto) pass as they are."""

    def check(value: Any) -> Any:
        if not (isinstance(value, str) and value in words):
            parse(value)
        if isinstance(value, str) and value.strip().isdecimal():
            return int(value)  # "16" and 16 are the same setting, and must compare as the same
        return value

    return BeforeValidator(check)


Number = Annotated[float, BeforeValidator(number_of), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(number_of)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
BatchSize = Annotated[
    int | str,
    _checked_by(parse_amount),
    Means('a number of samples, or of tokens such as "8k tokens"'),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["8k tokens"]}]}),
]
MicroBatch = Annotated[
    int | str,
    _checked_by(parse_amount, words=("auto",)),
    Means('auto, a number of samples, or of tokens such as "2048 tokens"'),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["auto", "2048 tokens"]}]}
    ),
]
TokenBudget = Annotated[
    int | str,
    _checked_by(parse_budget),
    Means('a number of tokens such as "2B tokens", or of tokens per parameter such as "20x"'),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["20x", "2B tokens"]}]}
    ),
]
LayerShare = Annotated[
    str,
    _checked_by(parse_share_of_layers),
    Means("a share of the layers such as 1/2"),
    WithJsonSchema({"type": "string", "pattern": r"^\s*[0-9]{1,4}\s*/\s*[0-9]{1,4}\s*$", "examples": ["1/2"]}),
]
LayerChoice = Annotated[
    Whole | tuple[Annotated[Whole, Field(ge=0)], ...],
    Means("a number of layers, or a list of layer numbers such as [0, 5]"),
]


def _warmup_of(value: Any) -> Any:
    """A number however YAML reads it; an amount of tokens as it is written."""
    number = parse_warmup(value)
    return number if isinstance(number, float) else value


Warmup = Annotated[
    float | str,
    BeforeValidator(_warmup_of),
    Means('a share below 1, a number of steps, or of tokens such as "2M tokens"'),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": ["2M tokens"]}]}),
]
SampleChoice = Annotated[
    Annotated[Whole, Field(ge=0)] | tuple[str, ...],
    Means("a number of beginnings, or a list of them such as [Once upon a time]"),
]
Often = Annotated[
    int | str,
    _checked_by(parse_every),
    Means('a number of steps, a time such as "10min", or "1 epoch"'),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["10min", "1 epoch"]}]}
    ),
]
Seconds = Annotated[
    float | str,
    _checked_by(parse_seconds),
    Means('a time such as "10min", or a number of seconds'),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["10min"]}]}),
]
Patience = Annotated[
    float | str,
    _checked_by(parse_seconds, words=("auto", "never")),
    Means('auto, never, a time such as "5min", or a number of seconds'),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["auto", "5min"]}]}
    ),
]
LayoutText = Annotated[
    str,
    _checked_by(read_layout_name),
    Means("a layout such as fsdp2.tp2.pp2, or tp2.sp2"),
    WithJsonSchema({"type": "string", "examples": ["fsdp2.tp2.pp2", "tp2"]}),
]


class Section(BaseModel):
    """A block of the YAML: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, protected_namespaces=())
