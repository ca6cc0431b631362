"""YAML text to a tree of nodes, each of which knows its file, line and source line.

`overlays.py` calls it for files and for command-line values. PyYAML composes; types are read here, because YAML 1.1
takes 2e-5 for text, `no` for false and 12:30 for a number. It never raises for a user's fault: it collects them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner, ScannerError

from duoka.errors import Fault

MAX_DEPTH = 50  # blocks in blocks; a config has five
MAX_NODES = 5_000  # a config has a hundred; aliases of aliases can grow to billions
_MOST_SHOWN = 240  # letters of a line
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # what YAML counts as the end of a line
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_MOST_DIGITS = 40  # more are no number that a run has: Python refuses to read, or to write, some thousand of them
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}
_CORE_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}


@dataclass(frozen=True)
class SourcePlace:
    """Where a value was written. `line` is 1-based, and 0 on the command line."""

    file: str
    line: int
    source: str

    def fault(self, what: str, *, key: str = "", fix: str = "") -> Fault:
        return Fault(what, key=key, file=self.file, line=self.line, source=self.source, fix=fix)


@dataclass(frozen=True)
class Tree:
    """A value with its place. `value` is a scalar, a dict of trees, or a list of trees.

    `is_plain` tells an unquoted scalar; `is_bare` one that is not there at all, as in `lora:` and nothing after it.
    """

    value: Any
    place: SourcePlace
    is_plain: bool = False
    is_bare: bool = False
    env: tuple[str, ...] = ()  # the environment variables that it came from
    written: str = ""  # its text before ${env:...} was filled in, when that filled in a secret
    spelled: str = ""  # the key that it was written under, when that is another tool's

    def plain_value(self) -> Any:
        """The value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: tree.plain_value() for key, tree in self.value.items()}
        if isinstance(self.value, list):
            return [tree.plain_value() for tree in self.value]
        return self.value

    def at(self, path: tuple[str | int, ...]) -> Tree | None:
        """The tree at a path, or None."""
        here: Tree | None = self
        for part in path:
            if here is None:
                return None
            if isinstance(here.value, dict):
                here = here.value.get(part)
            elif isinstance(here.value, list) and isinstance(part, int) and part < len(here.value):
                here = here.value[part]
            else:
                return None
        return here

    def nearest_place(self, path: tuple[str | int, ...]) -> SourcePlace | None:
        """The place of the longest part of the path that was written: `model: demo` for model.name."""
        for length in range(len(path), 0, -1):
            found = self.at(path[:length])
            if found is not None:
                return found.place
        return None


def scalar_value(text: str) -> Any:
    """What unquoted text means: null, true, false, a number, or itself. yes and no stay text for the schema."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _MOST_DIGITS and _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML down to its node tree, without its implicit types and without constructing anything."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def add_indent(self, column: int) -> bool:
        self._check_depth()
        return super().add_indent(column)

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._check_depth()
        super().fetch_flow_collection_start(TokenClass)

    def _check_depth(self) -> None:
        """PyYAML's time grows with the square of the depth (a minute at 3,000), and Python's stack ends before that."""
        if self.flow_level + len(self.indents) > MAX_DEPTH:
            raise ScannerError(None, None, "nested too deeply", self.get_mark())


def parse_yaml(
    text: str,
    file: str,
    faults: list[Fault],
    *,
    place: SourcePlace | None = None,
    equal_twice: list[Fault] | None = None,
) -> Tree | None:
    """The tree of one document, or None when it is empty or no YAML. `place` overrides every line's own place.

    Keys that are given twice with equal values go to `equal_twice`, where the caller may forgive them.
    """
    lines = _LINE_BREAK.split(text)
    try:
        root = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        faults.extend(_syntax_faults(error, lines, file, place))
        return None
    if root is None:
        return None
    return _Builder(lines, file, faults, place, faults if equal_twice is None else equal_twice).build(root, None)


class _Builder:
    """Turns PyYAML's nodes into trees, and reports what YAML allows but a config must not have."""

    def __init__(
        self, lines: list[str], file: str, faults: list[Fault], place: SourcePlace | None, equal_twice: list[Fault]
    ) -> None:
        self._lines, self._file, self._faults, self._place = lines, file, faults, place
        self._equal_twice = equal_twice
        self._num_nodes = 0
        self._shown: dict[int, str] = {}
        self._open: set[int] = set()

    def build(self, node: Node, place: SourcePlace | None) -> Tree:
        place = place or self._place_of(node)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or id(node) in self._open:
            reason = "an alias stands inside its own anchor" if id(node) in self._open else "aliases grow without end"
            if not any(fault.what == reason for fault in self._faults):
                self._faults.append(place.fault(reason, fix="write the values out"))
            return Tree(None, place)
        if node.tag not in _CORE_TAGS and node.tag != "!":
            self._faults.append(place.fault(f"tags such as {node.tag} are not used here", fix="write the plain value"))
        if isinstance(node, ScalarNode):
            is_plain = node.style is None
            if any("\ud800" <= char <= "\udfff" for char in node.value):
                self._faults.append(place.fault("a surrogate escape alone is half a character", fix="delete it"))
                return Tree("", place)
            value = scalar_value(node.value) if is_plain else node.value
            return Tree(value, place, is_plain=is_plain, is_bare=is_plain and node.value == "")
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return Tree([self.build(item, None) for item in node.value], place)
            assert isinstance(node, MappingNode)
            return Tree(self._mapping(node), place)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: MappingNode) -> dict[str, Tree]:
        out: dict[str, Tree] = {}
        merged: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            place = self._place_of(key_node)
            if not isinstance(key_node, ScalarNode):
                self._faults.append(place.fault("a key must be a word, not a list or block", fix="write:   key: value"))
                continue
            key = key_node.value
            value = self.build(value_node, place)
            if key == "<<" and key_node.style is None:
                for name, tree in self._merged(value):
                    merged.setdefault(name, tree)
                continue
            if key in out:
                first = out[key].place.line
                is_equal = out[key].plain_value() == value.plain_value()
                (self._equal_twice if is_equal else self._faults).append(
                    place.fault(
                        f"the key {key} is given twice in the same block"
                        + (f", first in line {first}" if first else ""),
                        fix="keep one of them",
                    )
                )
            out[key] = value
        return {**merged, **out}

    def _merged(self, value: Tree) -> Iterator[tuple[str, Tree]]:
        for part in value.value if isinstance(value.value, list) else [value]:
            if isinstance(part.value, dict):
                yield from part.value.items()
            else:
                self._faults.append(part.place.fault("<<: takes an alias of a block", fix="write:   <<: *name"))

    def _place_of(self, node: Node) -> SourcePlace:
        if self._place is not None:
            return self._place
        line = node.start_mark.line
        if line not in self._shown:  # made once: thousands of values may stand in one line
            self._shown[line] = printable(self._lines[line]) if line < len(self._lines) else ""
        return SourcePlace(self._file, line + 1, self._shown[line])


def printable(line: str) -> str:
    """A source line for a message: tabs seen, control characters harmless to the terminal, and not too long."""
    line = line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."
    return (
        line
        if line.isprintable()
        else "".join(char if char.isprintable() else "→" if char == "\t" else "�" for char in line)
    )


# What PyYAML says -> what is wrong in a user's words, what to do, and whether the fault began at the context's mark.
_SYNTAX: tuple[tuple[str, str, str, bool], ...] = (
    (
        "mapping values are not allowed",
        'there is a ": " where none can be',
        'put a text that contains ": " in quotes, and indent this line like its neighbors',
        False,
    ),
    ("nested too deeply", "the file is nested too deeply to be a config", "close the brackets and blocks", False),
    (
        "could not find expected ':'",
        'this line is not "key: value"',
        "write:   key: value   with a space after :",
        True,
    ),
    (
        "expected <block end>",
        "this line's indentation fits no line above",
        "indent keys of one block by the same number of spaces",
        False,
    ),
    ("expected ',' or '}'", "a { is not closed, or a comma is missing", "write:   {key: value, key: value}", True),
    ("expected ',' or ']'", "a [ is not closed, or a comma is missing", "write:   [one, two]", True),
    ("unexpected end of stream", "a quote is opened and not closed", "close it, or leave both quotes out", True),
    ("unexpected document separator", "a quote is opened and not closed", "close it, or leave both quotes out", True),
    ("undefined alias", "an alias (*name) comes before its anchor (&name)", "define it above, or write it out", False),
    (
        "unknown escape character",
        'a backslash inside "double quotes" starts an escape',
        "write the text in 'single quotes', a path with /",
        False,
    ),
    (
        "escape sequence",
        'a backslash inside "double quotes" starts an escape',
        "write the text in 'single quotes', a path with /",
        False,
    ),
    ("but found another document", "there are two documents, separated by ---", "one file holds one run", False),
    ("cannot start any token", "a value cannot start with this character", "put the value in quotes", False),
    ("special characters are not allowed", "there is a control character", "delete it", False),
    ("expected the node content", "a value is missing or cut off", "write:   key: value", False),
)


def _syntax_faults(error: yaml.YAMLError, lines: list[str], file: str, place: SourcePlace | None) -> list[Fault]:
    """The one thing that PyYAML stopped at, or every line that is indented with a tab."""
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    what, fix, at_context = f"this is not YAML: {problem}", "", False
    for wanted, words, advice, is_context in _SYNTAX:
        if wanted in problem:
            what, fix, at_context = words, advice, is_context
            break
    mark = getattr(error, "problem_mark", None)
    if at_context:
        mark = getattr(error, "context_mark", None) or mark
    number = mark.line + 1 if mark is not None else _line_of_position(error, lines)
    if mark is not None and number > len(lines):
        number = len(lines)
    if place is not None:
        return [place.fault(what, fix=fix)]
    if file.lower().endswith(".toml"):
        what, fix = "this is a TOML file, and duoka reads YAML", "write:   key: value   lines, or:   duoka init x.yaml"
        return [Fault(what, file=file, fix=fix)]
    is_tab = "'\\t'" in problem
    tabbed = [index for index, line in enumerate(lines, 1) if "\t" in line[: len(line) - len(line.lstrip())]]
    if is_tab or number in tabbed:
        what, fix = "a tab is no indentation or space in YAML", "use spaces, two for each level"
        numbers = tabbed if tabbed and (number in tabbed) else [number]
    else:
        numbers = [number]
    if at_context and number and "${env:" in lines[number - 1]:
        what, fix = "${env:NAME} inside { } or [ ] needs quotes", 'write:   {key: "${env:NAME}"}'
    return [
        Fault(what, file=file, line=line, source=printable(lines[line - 1]) if line else "", fix=fix)
        for line in numbers
    ]


def _line_of_position(error: yaml.YAMLError, lines: list[str]) -> int:
    """The line of a fault for which PyYAML gives only a character's position."""
    position = getattr(error, "position", None)
    if not isinstance(position, int):
        return 0
    for number, line in enumerate(lines, 1):
        position -= len(line) + 1
        if position < 0:
            return number
    return len(lines)
