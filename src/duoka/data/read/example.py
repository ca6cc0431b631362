"""Types shared by all formats: Message, the kinds of examples, BadRecord, and how a set is written (SetFormat).

Every reader of a format (messages.py, alpaca.py, ...) builds on these few; nothing here knows a file or a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.config.stages import RecordKind
from duoka.registry import nearest


@dataclass(frozen=True)
class Message:
    """One turn. `tool_calls` is a JSON list of {"name", "arguments"}, and "id" where data have one, in an assistant's
    turn only.

    `is_learned` False: an assistant's turn that stands there as context alone (OpenAI's `weight: 0`). `reasoning`: what
    stands beside an answer (`reasoning_content`); one that is written into the answer is `content`. `name`: who speaks,
    or which tool. `call_id`: the call that a tool answers.
    """

    role: str
    content: str
    tool_calls: str | None = None
    is_learned: bool = True
    reasoning: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Example:
    """One record as a conversation; `tools` is a JSON list of function schemas."""

    messages: tuple[Message, ...]
    tools: str | None = None
    source: str = ""
    line: int = 0


@dataclass(frozen=True)
class Text:
    """A document, every token of which is a target."""

    text: str
    source: str = ""
    line: int = 0


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the assistant is to answer."""

    messages: tuple[Message, ...]
    tools: str | None = None
    source: str = ""
    line: int = 0


@dataclass(frozen=True)
class Preference:
    """A prompt with a better and a worse answer."""

    messages: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: str | None = None
    source: str = ""
    line: int = 0
    margin: float = 0.0  # by how much the better answer is to score higher (stage reward)


@dataclass(frozen=True)
class Labeled:
    """A conversation whose last answer is labeled desirable or undesirable (KTO)."""

    messages: tuple[Message, ...]
    is_good: bool
    tools: str | None = None
    source: str = ""
    line: int = 0


AnyExample = Example | Text | Prompt | Preference | Labeled
Kind = RecordKind
KIND_WORDS: dict[Kind, str] = {
    "conversation": "conversations",
    "text": "plain text",
    "prompt": "prompts without answers",
    "preference": "preference pairs (ranking)",
    "labeled": "answers labeled good or bad (kto_tag)",
}


class BadRecord(ValueError):
    """A record that breaks a rule of its format; `misread` when another format or other tags might read it."""

    def __init__(self, rule: str, fix: str = "", *, misread: bool = False) -> None:
        super().__init__(rule)
        self.rule = rule
        self.fix = fix
        self.misread = misread


@dataclass(frozen=True)
class SetFormat:
    """How one data set is written: the format's name, where its columns are, what its roles are called, what it is."""

    name: str
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = "conversation"

    def to_json(self) -> dict[str, Any]:
        """As dataset_info.json writes it; columns and `ranking` say what kind it is."""
        ranking = {"ranking": True} if self.kind == "preference" else {}
        return {"formatting": self.name, **ranking, "columns": dict(self.columns), "tags": dict(self.tags)}

    def fix_text(self) -> str:
        """What to write in dataset_info.json to get this format."""
        return f"in dataset_info.json, write {json.dumps(self.to_json(), ensure_ascii=False)[1:-1]}"


def read_text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise BadRecord(f"{name!r} is {kind_of(value)}, and must be text", 'write a string, for example "..."')
    return value


def read_optional_text(record: dict[str, Any], name: str | None) -> str:
    return "" if not name or record.get(name) is None else read_text(record, name)


# Columns of LLaMA-Factory's sets whose texts only point to what is learned, and where they do.
MEDIA = {"images": "<image>", "videos": "<video>", "audios": "<audio>"}


_MARKS = {**MEDIA, "image": "<image>", "video": "<video>", "audio": "<audio>"}  # LLaVA's and TRL's too


def check_text_alone(record: dict[str, Any], messages: Sequence[Message]) -> None:
    """Refuse a conversation about something that is not read: its words alone would teach answers out of thin air."""
    for column, mark in _MARKS.items():
        if not record.get(column) or not isinstance(record[column], (str, list, dict, bytes)):
            continue
        if any(mark in message.content for message in messages):
            rule = f"the conversation is about its {column} ({mark}), and duoka reads text alone"
            raise BadRecord(rule, "take a set of text, or leave the record out")
        # TRL and processors put the picture in by themselves, where no word of the text points to it.
        rule = f"the record has something in {column!r} beside its text, and duoka reads text alone"
        raise BadRecord(rule, f"take a set of text; where the text stands alone, leave {column!r} out of the record")


def check_whole(text: str, what: str) -> None:
    """Refuse text that no UTF-8 file can hold; tokenizers end in an error of their own."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = text[error.start].encode("unicode_escape").decode()
            raise BadRecord(
                f"{what} holds half a character ({half})",
                "the text was cut inside an emoji: write it again with a JSON library",
            ) from None


def no_column(name: str, record: dict[str, Any]) -> str:
    if name in record:
        return f"{name!r} is {kind_of(record[name])}"
    guess = nearest(name, record)
    return f"there is no {name!r}; the record has {names_of(record)}" + (f"; is it {guess!r}?" if guess else "")


def names_of(things: Mapping[str, Any]) -> str:
    shown = ", ".join(repr(name) for name in list(things)[:8])
    return shown or "no keys"


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    kinds = {dict: "an object", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)
