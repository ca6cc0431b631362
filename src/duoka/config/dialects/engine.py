"""From a file in another tool's words to a tree in ours, row by row, with a notice for whatever is not plainly said.

`overlays.py` calls `translate` with the parsed file. Every value keeps the line that it came from. Faults and notices
are collected, never raised: a user learns all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duoka.config.catalog import known_keys
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    Start,
    asks_for_nothing,
    is_none,
    nearest_row,
    read_switch,
)
from duoka.config.yaml_lines import SourcePlace, Tree
from duoka.config.yaml_text import yaml_text
from duoka.errors import Fault
from duoka.registry import nearest

COMMAND_LINE = "command line"
_DEFAULT = "'s default"  # behind a tool's name: the origin of what its silence means
# Reads a file that a config points to: its path, where that was written, the config's folder, faults to add to.
ReadFile = Callable[[str, SourcePlace, Path, list[Fault]], "Tree | None"]


@dataclass(frozen=True)
class Given:
    """One of our keys with its value, and who gave it."""

    key: str
    value: Any
    place: SourcePlace
    name: str  # the other tool's
    source: Tree | None = None  # what was written, when it was taken over as it was

    @property
    def where(self) -> str:
        return where_of(self.place)


def is_default(tree: Tree) -> bool:
    """True for what nobody wrote: a tool's default."""
    return not tree.place.line and tree.place.file.endswith(_DEFAULT)


def where_of(place: SourcePlace) -> str:
    return f"{Path(place.file).name}:{place.line}" if place.line else place.file


@dataclass
class Translated:
    """What became of a file: our keys by name, notices, faults."""

    given: dict[str, Given] = field(default_factory=dict)
    said: list[tuple[str, SourcePlace, str]] = field(
        default_factory=list
    )  # key, where it stands, what is said about it
    faults: list[Fault] = field(default_factory=list)
    task: str = ""  # what the other tool would do with the file

    @property
    def notes(self) -> list[str]:
        """What is said, each reason once with all the keys of a file that it is about."""
        about: dict[tuple[str, str], list[tuple[str, SourcePlace]]] = {}
        for shown, place, text in self.said:
            about.setdefault((place.file, text), []).append((shown, place))
        return [f"{_keys(found)}: {text}" for (_, text), found in about.items()]

    def add(self, new: Given) -> None:
        """One value more; another value for the same key is refused, with both places."""
        old = self.given.get(new.key)
        if old is None or (new.place.file == COMMAND_LINE and old.place.file != COMMAND_LINE):
            self.given[new.key] = new
            return
        if old.value == new.value or (old.place.file == COMMAND_LINE and new.place.file != COMMAND_LINE):
            return
        what = (
            f"{old.name} and {new.name} contradict each other: {yaml_text(old.value)} ({old.where}) and "
            f"{yaml_text(new.value)} ({new.where}) for {new.key}"
        )
        if old.name == new.name:
            what = (
                f"{new.name} is given twice: {yaml_text(old.value)} ({old.where}) and "
                f"{yaml_text(new.value)} ({new.where}) for {new.key}"
            )
        self.faults.append(new.place.fault(what, key=new.key, fix="keep one of them"))

    def tree(self, place: SourcePlace) -> Tree:
        """Our keys as a nested tree; every leaf keeps its place and the name that it was written under."""
        root: dict[str, Any] = {}
        for given in self.given.values():
            block = root
            *parents, last = given.key.split(".")
            for part in parents:
                block = block.setdefault(part, {})
            if given.source is not None:
                block[last] = replace(given.source, spelled=given.name)
            else:
                block[last] = grow(given.value, given.place, given.name)
        return _closed(root, place)


def _keys(found: list[tuple[str, SourcePlace]]) -> str:
    """`x.yaml:2 a, b, line 5 c`: keys of one file, with their lines where these change."""
    out, before = "", 0
    for shown, place in found:
        if not out:
            out = f"{Path(place.file).name}:{place.line} {shown}" if place.line else shown
        else:
            out += f", line {place.line} {shown}" if place.line not in (0, before) else f", {shown}"
        before = place.line
    return out


def _closed(block: dict[str, Any], place: SourcePlace) -> Tree:
    trees = {key: value if isinstance(value, Tree) else _closed(value, place) for key, value in block.items()}
    first = next(iter(trees.values()), None)
    return Tree(trees, first.place if first is not None and first.place.line else place)


def grow(value: Any, place: SourcePlace, spelled: str) -> Tree:
    """A plain value as a tree, all of it at one place."""
    if isinstance(value, dict):
        return Tree({key: grow(item, place, spelled) for key, item in value.items()}, place, spelled=spelled)
    if isinstance(value, list):
        return Tree([grow(item, place, spelled) for item in value], place, spelled=spelled)
    return Tree(value, place, spelled=spelled)


@dataclass(frozen=True)
class Leaf:
    """One key of the file: as written, and as its row is named."""

    shown: str
    name: str
    tree: Tree

    @property
    def value(self) -> Any:
        return self.tree.plain_value()


def leaves_of(dialect: Dialect, tree: Tree, prefix: str = "") -> Iterator[Leaf]:
    """The keys of a file. A block is opened where rows lie inside it, or where the dialect calls it a mere heading."""
    for word, value in tree.value.items():
        shown = f"{prefix}{word}"
        is_heading = not prefix and word in dialect.blocks
        has_rows = shown in dialect.openers
        if isinstance(value.value, dict) and (is_heading or (has_rows and shown not in dialect.rows)):
            yield from leaves_of(dialect, value, f"{shown}.")
            continue
        yield Leaf(shown, row_name(dialect, shown), value)


def row_name(dialect: Dialect, shown: str) -> str:
    """The name of the row for a key as a file writes it."""
    if shown in dialect.rename:
        return dialect.rename[shown]
    block, _, last = shown.partition(".")
    return last if last and block in dialect.blocks and shown not in dialect.rows else shown


def translate(
    dialect: Dialect, tree: Tree, start: Start, others: Mapping[str, Dialect], folder: Path, read_file: ReadFile
) -> Translated:
    """A file in `dialect` as our keys. `read_file` reads what the file points to, for rows that open another file."""
    out = Translated()
    _translate_into(out, dialect, tree, Asked({}, start, folder), others, read_file)
    return out


def _translate_into(
    out: Translated, dialect: Dialect, tree: Tree, outer: Asked, others: Mapping[str, Dialect], read_file: ReadFile
) -> None:
    leaves = agreeing_leaves(dialect, tree, out.faults)
    own = {leaf.name: leaf.value for leaf in leaves if not (leaf.value == "auto" and leaf.name in outer.values)}
    asked = Asked({**outer.values, **own}, outer.start, outer.folder, dialect.id)
    by_name = {leaf.name: leaf for leaf in leaves}
    out.task = out.task or dialect.task(asked.values)  # the file itself comes before those that it points to
    said: set[str] = set()
    for leaf in leaves:
        row = dialect.rows.get(leaf.name)
        if row is None:
            out.faults.append(unknown_key(dialect, leaf))
        elif row.opens and is_none(leaf.value):
            continue
        elif row.opens and isinstance(leaf.tree.value, str):
            folder = Path(leaf.tree.place.file).parent if leaf.tree.place.line else asked.folder
            inner = read_file(leaf.tree.value, leaf.tree.place, folder, out.faults)
            if inner is not None:
                _note(out, leaf, f"read as {others[row.opens].title}, what it says is laid beside this file", said)
                _translate_into(out, others[row.opens], inner, asked, others, read_file)
        elif row.opens and isinstance(leaf.tree.value, dict):
            _translate_into(out, others[row.opens], leaf.tree, asked, others, read_file)
        elif row.opens:
            what = f"{leaf.shown} must be the path of a {others[row.opens].title} file, got {yaml_text(leaf.value)}"
            out.faults.append(leaf.tree.place.fault(what, key=row.key, fix=f"write a path, or delete {leaf.shown}"))
        else:
            _apply_row(out, row, leaf, asked, said, by_name)
    default = SourcePlace(f"{dialect.title}{_DEFAULT}", 0, "")
    for key, value in dialect.defaults(asked).items():
        if key not in out.given and all(fault.key != key for fault in out.faults):
            out.given[key] = Given(key, value, default, "")


def _is_empty_block(dialect: Dialect, leaf: Leaf) -> bool:
    """`fsdp_config: {}`: a block with nothing in it asks for nothing."""
    is_block = leaf.shown in dialect.openers or leaf.shown in dialect.blocks
    return is_block and leaf.shown not in dialect.rows and is_none(leaf.value)


def agreeing_leaves(dialect: Dialect, tree: Tree, faults: list[Fault]) -> list[Leaf]:
    """The keys of a file, each once: what the command line says wins, two values in one file are a fault.

    Switches are read here, so that nobody sees a word that is neither on nor off.
    """
    leaves = [leaf for leaf in leaves_of(dialect, tree) if not _is_empty_block(dialect, leaf)]
    typed = {leaf.name for leaf in leaves if leaf.tree.place.file == COMMAND_LINE}
    first: dict[str, Leaf] = {}
    out = []
    for leaf in leaves:
        row = dialect.rows.get(leaf.name)
        if leaf.name in typed and leaf.tree.place.file != COMMAND_LINE:
            continue
        read = leaf if row is None else _read_leaf(row, leaf, faults)
        if read is None:
            continue
        before = first.setdefault(leaf.name, read)
        if before is not read:
            if before.value != read.value:
                faults.append(_given_twice(before, read, row))
            continue
        out.append(read)
    return out


def _given_twice(first: Leaf, second: Leaf, row: Row | None) -> Fault:
    places = [f"{yaml_text(leaf.value)} ({where_of(leaf.tree.place)})" for leaf in (first, second)]
    names = first.shown if first.shown == second.shown else f"{first.shown}, as {second.shown},"
    what = f"{names} is given twice: {' and '.join(places)}"
    return second.tree.place.fault(what, key=(row.key if row else "") or second.shown, fix="keep one of them")


def _read_leaf(row: Row, leaf: Leaf, faults: list[Fault]) -> Leaf | None:
    """The leaf with its switch read, and the keys of its block looked at; None for a switch that says nothing."""
    value = leaf.tree.value
    if row.is_switch and value != "auto":
        if is_none(leaf.value):
            return None
        try:
            return replace(leaf, tree=replace(leaf.tree, value=read_switch(leaf.value, leaf.shown)))
        except Refusal as error:
            faults.append(leaf.tree.place.fault(error.what, key=row.key or leaf.shown, fix=error.fix))
            return None
    if not row.parts or not isinstance(value, dict):
        return leaf
    for word, part in value.items():
        if word not in row.parts:
            guess = nearest(word, row.parts)
            hint = f"; did you mean {guess}?" if guess else ""
            fix = f"write:   {guess}: {yaml_text(part.plain_value())}" if guess else f"known: {', '.join(row.parts)}"
            what = f"unknown key {leaf.shown}.{word}{hint}"
            faults.append(part.place.fault(what, key=f"{leaf.shown}.{word}", fix=fix))
    return leaf


def _apply_row(
    out: Translated, row: Row, leaf: Leaf, asked: Asked, said: set[str], by_name: Mapping[str, Leaf]
) -> None:
    value = leaf.value
    if row.state == "refused":
        fault = refusal_of(row, leaf)
        out.faults += [fault] if fault else []
        return
    if row.state == "reported":
        if not is_none(value):
            _note(out, leaf, row.note, said)
        return
    try:
        answer = value if row.convert is None else row.convert(value, asked)
    except Refusal as error:
        # What a conversion reads of another key is wrong there, and said once.
        about = by_name.get(error.name, leaf)
        fault = about.tree.place.fault(error.what, key=row.key or leaf.shown, fix=error.fix)
        out.faults += [] if any(known.what == fault.what for known in out.faults) else [fault]
        return
    if not isinstance(answer, Answer):
        answer = Answer({row.key: answer})
    for key, ours in answer.values.items():
        missing = _not_yet(key, ours)
        if missing:
            what = f"{leaf.shown}: {yaml_text(value)} means {missing}, which duoka does not have yet"
            out.faults.append(leaf.tree.place.fault(what, key=key, fix=_present(key)))
        else:
            out.add(Given(key, ours, leaf.tree.place, leaf.shown, leaf.tree if ours is value else None))
    if answer.note:
        _note(out, leaf, answer.note, said)


def refusal_of(row: Row, leaf: Leaf) -> Fault | None:
    """The fault of a refused key, unless its value asks for nothing."""
    if asks_for_nothing(leaf.value, row.off):
        return None
    shown = yaml_text(leaf.value)
    what = f"{leaf.shown} {shown if len(shown) < 40 else ''}".rstrip() + f" is refused: {row.note}"
    return leaf.tree.place.fault(what, key=leaf.shown, fix=f"delete {leaf.shown}, if that is acceptable")


def _not_yet(key: str, value: Any) -> str:
    """What today's schema lacks of `key: value`, or "". Rows need no change when it comes."""
    known = known_keys().get(key)
    if known is None:
        return key
    if known.choices and isinstance(value, str) and "list" not in known.words and value not in known.choices:
        return f"{key} {value}"
    return ""


def _present(key: str) -> str:
    known = known_keys().get(key)
    return f"{key} can be {', '.join(known.choices)} today" if known and known.choices else ""


def _note(out: Translated, leaf: Leaf, note: str, said: set[str]) -> None:
    if note in said and leaf.name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        return
    said.add(note)
    out.said.append((leaf.shown, leaf.tree.place, note))


def unknown_key(dialect: Dialect, leaf: Leaf) -> Fault:
    if leaf.shown in dialect.openers:
        inside = next(name for name in dialect.rows if name.startswith(f"{leaf.shown}."))[len(leaf.shown) + 1 :]
        what = f"{leaf.shown} must be a block of keys, got {yaml_text(leaf.value)}"
        return leaf.tree.place.fault(what, key=leaf.shown, fix=f"write under it for example   {inside}: ...")
    block, _, last = leaf.shown.rpartition(".")
    inside = f"{block}." if block and block not in dialect.blocks else ""
    rows = {name: row.state for name, row in dialect.rows.items() if name.startswith(inside)}
    rows |= {} if inside else dict.fromkeys(dialect.rename, "implemented")
    meant = "" if inside else dialect.meant.get(last.lower(), "")
    guess = meant or nearest_row(last, rows)
    hint = f"; did you mean {guess}?" if guess else ""
    own = [key for key in known_keys() if key == leaf.shown or key.startswith(f"{leaf.shown}.")]
    fix = f"write:   {guess if ': ' in guess else f'{guess}: {yaml_text(leaf.value)}'}" if guess else "delete it"
    if own and not guess:
        fix = f"{leaf.shown} is duoka's own; one file keeps to one dialect:   duoka config convert FILE -o ours.yaml"
    what = f"unknown key {leaf.shown}: {dialect.title} has none of that name{hint}"
    return leaf.tree.place.fault(what, key=leaf.shown, fix=fix)


def with_overrides(dialect: Dialect, tree: Tree, overrides: list[Tree]) -> tuple[Tree, list[Tree]]:
    """The file with those overrides laid on it that are in its own words, and the others."""
    left = []
    for override in overrides:
        path: list[str] = []
        here = override
        while isinstance(here.value, dict) and len(here.value) == 1:
            ((word, here),) = here.value.items()
            path.append(word)
        if _is_ours(dialect, path):
            left.append(override)
        else:
            tree = _replaced(tree, path, here)
    return tree, left


def _is_ours(dialect: Dialect, path: list[str]) -> bool:
    """True for `optim.lr=1e-4` beside a file in another tool's words: both may stand on a command line."""
    name = ".".join(path)
    if row_name(dialect, name) in dialect.rows:
        return False
    return name in known_keys() or (len(path) > 1 and path[0] in known_keys() and path[0] not in dialect.blocks)


def _replaced(tree: Tree, path: list[str], value: Tree) -> Tree:
    if not path:
        return value
    inner = tree.value.get(path[0]) if isinstance(tree.value, dict) else None
    below = inner if inner is not None and isinstance(inner.value, dict) else Tree({}, value.place)
    return replace(tree, value={**tree.value, path[0]: _replaced(below, path[1:], value)})
