"""From a path to one merged tree: file, `extends` chain, command-line overrides, ${env:NAME}.

`load.py` calls `read_layers`, then `read_overrides`, `merge` and `expand_env`. Nothing here knows which keys exist
beyond the two words of the file format itself, `extends` and `base`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from duoka.config.dialects.all import dialects, recognize, refuse_unread_form, speaks
from duoka.config.dialects.engine import is_default, translate, with_overrides
from duoka.config.dialects.json_text import without_comments
from duoka.config.dialects.rows import Dialect, Start
from duoka.config.paths import given_path, is_file, is_folder
from duoka.config.schema import NAMED_BLOCKS
from duoka.config.yaml_lines import SourcePlace, Tree, parse_yaml, printable, scalar_value
from duoka.errors import Fault
from duoka.registry import nearest

MAX_FILE_BYTES = 1_000_000
COMMAND_LINE = "command line"
_ENV = re.compile(r"\$?\$\{env:([^},]*)(?:,([^}]*))?\}")
_SECRET = re.compile(r"(^|[_.-])(token|key|apikey|secret|passwd|password|credentials?)($|[_.-])", re.IGNORECASE)
KeyPath = tuple[str | int, ...]


@dataclass
class Layers:
    """What was read: the merged tree, the faults so far, and the values that must never be shown."""

    tree: Tree | None = None
    base: str | None = None
    faults: list[Fault] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)  # value -> how it was written
    broken: set[KeyPath] = field(default_factory=set)  # values that could not be filled in
    start: Start = field(default_factory=Start)
    overrides: list[Tree] = field(default_factory=list)  # of the command line; a dialect's own words are taken out
    dialect: Dialect | None = None  # of the top file, when it is another tool's
    task: str = "train"  # what that tool would do with it
    notes: list[str] = field(default_factory=list)


def is_secret(name: str) -> bool:
    """True for names of keys and environment variables that hold a password or a token."""
    return bool(_SECRET.search(name))


def shown_path(path: Path) -> str:
    """A path as a message shows it: relative when it lies under the current folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


@dataclass
class _File:
    """One file of a chain, as it was written."""

    path: Path
    tree: Tree
    twice: list[Fault]  # keys that stand in it twice, with equal values


def read_layers(path: Path, layers: Layers) -> None:
    """Read a file and everything it extends into `layers.tree`, the extending file on top."""
    files = _read_chain(path, layers, (), None)
    while files:
        below = files.pop()
        dialect, group = recognize(below.tree), [below]
        while files and dialect is not None and speaks(files[-1].tree, dialect):
            group.append(files.pop())
        tree = _in_our_words(group, dialect, layers, is_top=not files)
        layers.tree = tree if layers.tree is None else merge(layers.tree, _above(layers.tree, tree))


def _above(below: Tree, top: Tree) -> Tree:
    """`top` without what another tool's silence means where `below` says something."""
    if not isinstance(top.value, dict) or not isinstance(below.value, dict):
        return top
    kept = {}
    for key, sub in top.value.items():
        if key not in below.value or isinstance(sub.value, dict) or not is_default(sub):
            kept[key] = _above(below.value[key], sub) if key in below.value else sub
    return replace(top, value=kept)


def _read_chain(path: Path, layers: Layers, above: tuple[Path, ...], asked_at: SourcePlace | None) -> list[_File]:
    """A file and those below it, the first on top; less where one cannot be read."""
    text = read_text(path, layers.faults, asked_at)
    if text is None:
        return []
    name = shown_path(path)
    num_faults = len(layers.faults)
    twice: list[Fault] = []
    if path.suffix.lower() == ".json":
        text = without_comments(text)
    tree = parse_yaml(text, name, layers.faults, equal_twice=twice)
    is_broken = len(layers.faults) > num_faults
    wide = _full_width(text, name) if is_broken or tree is None or not isinstance(tree.value, dict) else []
    if wide:
        layers.faults[num_faults:] = wide
        return []
    if not is_broken and (tree is None or tree.value is None):
        layers.faults.append(
            Fault("the file is empty", file=name, fix="write one with comments:   duoka init new.yaml")
        )
        return []
    if tree is None:
        return []
    if not isinstance(tree.value, dict):
        what = "a list" if isinstance(tree.value, list) else f'the text "{str(tree.value)[:40]}"'
        fix = "write:   key: value   lines, such as   model: demo"
        layers.faults.append(tree.place.fault(f"the file holds {what}, not keys", fix=fix))
        return []
    unread = refuse_unread_form(tree)
    if unread is not None:
        layers.faults.append(unread)
        return []
    entries = dict(tree.value)
    extends, base = entries.pop("extends", None), entries.pop("base", None)
    if base is not None and not above:
        layers.base = _text_of("base", base, layers)
    files = [_File(path, replace(tree, value=entries), twice)]
    return files if extends is None else files + _read_base(path, extends, layers, (*above, path))


_MOST_LETTERS = 1000
_WIDE = re.compile(r"^\s*(?:- )?[A-Za-z_][\w.-]*\s*(：)|[\[{][^#\"']*?([：，])")


def _full_width(text: str, name: str) -> list[Fault]:
    """Where a Chinese keyboard's colon or comma stands for YAML's: of a file that is no YAML otherwise."""
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        # The search grows with the square of a line's length, and few lines are worth it.
        found = _WIDE.search(line) if len(line) <= _MOST_LETTERS and ("：" in line or "，" in line) else None
        if found:
            wide = found.group(1) or found.group(2)
            meant = {"：": ": ", "，": ", "}
            better = "".join(meant.get(letter, letter) for letter in line.strip())
            what = f"{wide} is full-width, and means nothing to YAML"
            faults.append(Fault(what, file=name, line=number, source=line, fix=f"write:   {better}"))
    return faults


def _in_our_words(files: list[_File], dialect: Dialect | None, layers: Layers, *, is_top: bool) -> Tree:
    """Files of another tool, the lowest first, as ours, with a notice for what they say otherwise; ours as they are."""
    tree, top = files[0].tree, files[-1]
    if dialect is None:
        layers.faults += top.twice
        return tree
    for file in files[1:]:
        tree = merge(tree, file.tree)
    name = shown_path(top.path)
    if is_top:
        layers.dialect = dialect
        tree, layers.overrides = with_overrides(dialect, tree, layers.overrides)
    layers.notes.append(
        f"{name} is read as {dialect.title}; in duoka's own words:   duoka config convert {name} -o ours.yaml"
    )
    layers.notes += [f"{one.file}:{one.line} {one.what}: both say the same" for file in files for one in file.twice]
    done = translate(dialect, expand_env(tree, layers), layers.start, dialects(), top.path.parent, read_pointed)
    layers.task = done.task if is_top else layers.task
    layers.notes += done.notes
    layers.faults += done.faults
    layers.broken |= {tuple(fault.key.split(".")) for fault in done.faults if fault.key}
    return _protected(done.tree(SourcePlace(name, 0, "")))


def _protected(tree: Tree) -> Tree:
    """A translated file has had its ${env:NAME} filled in: what still looks so is text when all is filled in later."""
    if isinstance(tree.value, dict):
        return replace(tree, value={key: _protected(sub) for key, sub in tree.value.items()})
    if isinstance(tree.value, list):
        return replace(tree, value=[_protected(sub) for sub in tree.value])
    if isinstance(tree.value, str) and "${env:" in tree.value:
        return replace(tree, value=tree.value.replace("${env:", "$${env:"))
    return tree


def read_pointed(path: str, asked_at: SourcePlace, folder: Path, faults: list[Fault]) -> Tree | None:
    """The file that a key of another tool points to: from the current folder, then from the config's."""
    places = (given_path(path), folder / path)
    found = next((place for place in places if is_file(place)), None)
    if found is None:
        what, fix = f"there is no file {path}", _yaml_files(places[0].parent, places[0].name)
        faults.append(asked_at.fault(what, fix=fix if is_folder(places[0].parent) else "write the path of the file"))
        return None
    text = read_text(found, faults, asked_at)
    tree = None if text is None else parse_yaml(without_comments(text), shown_path(found), faults)
    if tree is not None and not isinstance(tree.value, dict):
        faults.append(asked_at.fault(f"{path} holds no object of keys", fix="give a DeepSpeed JSON file"))
        return None
    return tree


def _read_base(path: Path, extends: Tree, layers: Layers, above: tuple[Path, ...]) -> list[_File]:
    text = _text_of("extends", extends, layers)
    if text is None:
        return []
    target = path.parent / given_path(text)
    chain = [seen.resolve() for seen in above]
    if target.resolve() in chain:
        circle = " -> ".join(seen.name for seen in [*above[chain.index(target.resolve()) :], target])
        layers.faults.append(
            extends.place.fault(f"extends goes round in a circle: {circle}", key="extends", fix="delete one extends")
        )
        return []
    return _read_chain(target, layers, above, extends.place)


def _text_of(key: str, tree: Tree, layers: Layers) -> str | None:
    value = expand_env(tree, layers).value
    if isinstance(value, str) and value:
        return value
    fix = f"write for example:   {key}: base.yaml"
    layers.faults.append(tree.place.fault(f"{key} must be the path of one file or folder", key=key, fix=fix))
    return None


def read_text(path: Path, faults: list[Fault], asked_at: SourcePlace | None) -> str | None:
    """The text of a config file; BOM and CRLF are fine."""
    name = shown_path(path)

    def refuse(what: str, fix: str) -> None:
        faults.append(Fault(what, fix=fix) if asked_at is None else asked_at.fault(what, key="extends", fix=fix))

    try:
        if path.is_dir():
            inside = path / "config.yaml"
            hint = f"give its file:   {shown_path(inside)}" if inside.is_file() else _yaml_files(path, path.name)
            refuse(f"{name} is a folder, not a YAML file", hint)
            return None
        if path.stat().st_size > MAX_FILE_BYTES:
            refuse(f"{name} has {path.stat().st_size:,} bytes; a config has a few thousand", "give the YAML file")
            return None
        raw = path.read_bytes()
    except FileNotFoundError:
        refuse(f"there is no file {name}", _yaml_files(path.parent, path.name))
        return None
    except (OSError, ValueError) as error:
        refuse(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}", "give a file that you may read")
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8 text"
        faults.append(Fault(what, file=name, line=line, fix="save the file as UTF-8 in your editor"))
        return None


def _yaml_files(folder: Path, wanted: str) -> str:
    try:
        files = sorted(item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml"))
    except (OSError, ValueError):  # ValueError: a NUL in its name
        files = []
    guess = nearest(wanted, files)
    if guess:
        return f"did you mean {shown_path(folder / guess)}?"
    if files:
        return f"YAML files there: {', '.join(files[:8])}"
    return "write one with comments:   duoka init new.yaml"


def merge(below: Tree, top: Tree) -> Tree:
    """Blocks are merged key by key; everything else, lists too, is replaced by what lies on top."""
    if not isinstance(below.value, dict) or not isinstance(top.value, dict):
        return top
    merged = dict(below.value)
    for key, tree in top.value.items():
        if key in merged:
            merged[key] = merge(_long_form(key, merged[key], tree), tree)
        else:
            merged[key] = tree
    return replace(top, value=merged)


def _long_form(key: str, below: Tree, top: Tree) -> Tree:
    """`model: demo` below `model: {revision: x}` is `model: {name: demo}`, or the name would be lost."""
    if key in NAMED_BLOCKS and isinstance(below.value, str) and isinstance(top.value, dict):
        return replace(below, value={"name": below})
    return below


def read_overrides(overrides: Iterable[str], layers: Layers) -> list[Tree]:
    """`key.sub=value` words as trees; values are read as YAML. A later word wins over an earlier one."""
    trees = []
    for word in overrides:
        place = SourcePlace(COMMAND_LINE, 0, printable(word))
        key, equals, text = word.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            layers.faults.append(
                place.fault(f'"{place.source}" is not of the form key=value', fix="write for example:   optim.lr=1e-4")
            )
            continue
        if parts[0] in ("extends", "base"):
            layers.faults.append(place.fault(f"{parts[0]} works inside a file only", key=parts[0], fix="leave it out"))
            continue
        num_faults = len(layers.faults)
        tree = parse_yaml(text, COMMAND_LINE, layers.faults, place=place)
        if len(layers.faults) > num_faults:
            continue
        tree = tree or Tree(None, place, is_plain=True, is_bare=True)
        for part in reversed(parts):
            tree = Tree({part: tree}, place)
        trees.append(tree)
    return trees


def expand_env(tree: Tree, layers: Layers, path: KeyPath = ()) -> Tree:
    """The tree with every ${env:NAME} and ${env:NAME,default} filled in; $${env:...} stays as it is, less one $."""
    if isinstance(tree.value, dict):
        return replace(tree, value={key: expand_env(sub, layers, (*path, key)) for key, sub in tree.value.items()})
    if isinstance(tree.value, list):
        items = [expand_env(sub, layers, (*path, index)) for index, sub in enumerate(tree.value)]
        return replace(tree, value=items)
    if not isinstance(tree.value, str) or "${env:" not in tree.value:
        return tree
    names: list[str] = []
    written = ""

    def fill(found: re.Match[str]) -> str:
        nonlocal written
        if found.group().startswith("$$"):
            return found.group()[1:]
        name, default = found.group(1).strip(), found.group(2)
        value = os.environ.get(name) or default
        if value is None:
            what = f"the environment variable {name} is not set" if name else "${env:} names no variable"
            fix = f"set it:   export {name or 'NAME'}=...   or give a default:   ${{env:{name or 'NAME'},default}}"
            layers.faults.append(tree.place.fault(what, key=".".join(map(str, path)), fix=fix))
            layers.broken.add(path)
            return ""
        names.append(name)
        if is_secret(name) and os.environ.get(name):
            layers.secrets[value] = found.group()
            written = str(tree.value)
        return value

    text = _ENV.sub(fill, tree.value)
    value = scalar_value(text) if tree.is_plain else text
    return replace(tree, value=value, env=(*tree.env, *names), written=written or tree.written)
