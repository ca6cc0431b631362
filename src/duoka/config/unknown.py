"""Keys that do not exist, and what their writer most likely meant.

`load.py` gives the merged tree here first: what comes back has only known keys left. No value is judged here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from duoka.config.catalog import Key, known_keys
from duoka.config.foreign import FOREIGN_SECTIONS, Foreign, foreign_names
from duoka.config.overlays import COMMAND_LINE, KeyPath, is_secret
from duoka.config.schema import NAMED_BLOCKS, RunConfig, Section
from duoka.config.yaml_lines import Tree
from duoka.config.yaml_text import EnvText, yaml_text
from duoka.errors import Fault
from duoka.registry import nearest

_SHORT = 4  # letters; shorter foreign names are like too many words to be guessed from a misspelling


@dataclass
class _Found:
    faults: list[Fault]
    meant: set[KeyPath]  # keys that misspelled words stand for


def take_known_keys(tree: Tree, faults: list[Fault], broken: set[KeyPath]) -> Tree:
    """The tree without its unknown keys; each of them is a fault with the advice that fits.

    A required key that is there under a wrong name becomes `broken`: it is not missing as well.
    """
    found = _Found(faults, set())
    kept = _known_part(tree, RunConfig, "", "", found)
    for path in (meant[:depth] for meant in found.meant for depth in range(1, len(meant) + 1)):
        key = known_keys().get(".".join(part for part in path if isinstance(part, str)))
        is_needed = key is not None and (key.is_required or key.name == "model.name")  # for which model.depth may stand
        if is_needed and kept.at(path) is None:
            broken.add(path)
    return kept


def _known_part(tree: Tree, section: type[Section], name: str, shown: str, found: _Found, where: KeyPath = ()) -> Tree:
    """`name` is the block's dotted name in the schema, `shown` the one that the user wrote, `where` its place."""
    kept: dict[str, Tree] = {}
    for word, value in tree.value.items():
        key = known_keys().get(f"{name}{word}") if word in section.model_fields else None
        if key is None:
            found.faults.append(_unknown(word, value, name, shown))
            found.meant |= {_path(meant, name, where) for meant in _meant(word, value, name)}
            _check_renamed_block(word, value, name, shown, found)
            continue
        kept[word] = value
        if key.section is not None and isinstance(value.value, dict):
            kept[word] = _known_part(value, key.section, f"{key.name}.", f"{shown}{word}.", found, (*where, word))
        elif key.items is not None and isinstance(value.value, list):
            items = [
                _known_part(item, key.items, f"{key.name}.", f"{shown}{word}[{index}].", found, (*where, word, index))
                if isinstance(item.value, dict)
                else item
                for index, item in enumerate(value.value)
            ]
            kept[word] = replace(value, value=items)
    return replace(tree, value=kept)


def _path(key: str, name: str, where: KeyPath) -> KeyPath:
    """Of a key that a word in the block `name` stands for: of that block, or of another."""
    return (*where, *key.removeprefix(name).split(".")) if key.startswith(name) else tuple(key.split("."))


def _meant(word: str, value: Tree, name: str) -> set[str]:
    """The keys that an unknown word most likely stands for."""
    low = word.lower().replace("-", "_")
    if isinstance(value.value, dict) and not name and (section := _section_meant(word)):
        return {section}
    if known := _foreign(name, low):
        return set(known.keys)
    guess = nearest(low, [_last(key.name) for key in known_keys().values() if _parent(key.name) == name])
    return {f"{name}{guess}"} if guess else set()


def _check_renamed_block(word: str, value: Tree, name: str, shown: str, found: _Found) -> None:
    """Report the unknown keys inside a misnamed block too, or they would be the next fault after it is renamed."""
    if name or not isinstance(value.value, dict):
        return
    section = _section_meant(word)
    key = known_keys().get(section) if section else None
    if key is not None and key.section is not None:
        _known_part(value, key.section, f"{key.name}.", f"{shown}{word}.", found, tuple(key.name.split(".")))


def _foreign(name: str, low: str) -> Foreign | None:
    """What a name from elsewhere means: in this block, else anywhere."""
    return foreign_names().get(f"{name}{low}") or foreign_names().get(low)


def _section_meant(word: str) -> str | None:
    sections = [key.name for key in known_keys().values() if key.section is not None]
    return FOREIGN_SECTIONS.get(word.lower()) or nearest(word, sections)


def _unknown(word: str, value: Tree, name: str, shown: str) -> Fault:
    place = value.place
    if is_secret(word):
        # A password in a config is refused like any key, but it must not reach a log on the way.
        place = replace(place, source=f"{word}=..." if place.file == COMMAND_LINE else f"{word}: ...")
        value = replace(value, value=None, written="")  # nor with the advice
    what, fix = _advice(word, value, name, shown)
    return Fault(
        f"unknown key {shown}{word}{what}",
        key=f"{shown}{word}",
        file=place.file,
        line=place.line,
        source=place.source,
        fix=fix,
    )


def _advice(word: str, value: Tree, name: str, shown: str) -> tuple[str, str]:
    """What to add to the sentence, and the fix."""
    keys = known_keys()
    low = word.lower().replace("-", "_")
    known = _foreign(name, low)
    if known is not None and not known.keys:
        return _foreign_advice(known, value, name)
    if isinstance(value.value, dict) and not name:
        meant = _section_meant(word)
        if meant is not None:
            return f"; duoka's block is {meant}", f"write:   {meant}:   in its place"
    if known is not None:
        return _foreign_advice(known, value, name)
    if low in keys and "." in low:
        return "; dots do not open blocks in a file", _fix(keys[low], value, name)
    here = [key for key in keys.values() if _parent(key.name) == name]
    if low != word and any(key.name == f"{name}{low}" for key in here):
        return f"; did you mean {low}?", _fix(keys[f"{name}{low}"], value, name)
    is_block = isinstance(value.value, dict)
    same = [key for key in keys.values() if _last(key.name) == low and key.name.count(".") <= 1]
    elsewhere = [key for key in same if is_block or key.section is None or key.name in NAMED_BLOCKS]
    if len(elsewhere) == 1 or (elsewhere and not name):
        homes = " or ".join(_parent(key.name).rstrip(".") or "the top of the file" for key in elsewhere)
        return f"; it belongs to {homes}", _fix(elsewhere[0], value, name)
    words = [_last(key.name) for key in here]
    guess = nearest(low, words) or next((word for word in words if sorted(word) == sorted(low)), None)
    if guess:
        return f"; did you mean {guess}?", _fix(keys[f"{name}{guess}"], value, name)
    # Foreign names are many, and most are like some word: only a clear misspelling counts.
    long = [word for word in foreign_names() if len(word) > _SHORT]
    for guess in difflib.get_close_matches(low, long, n=1, cutoff=0.85):
        return _foreign_advice(foreign_names()[guess], value, name)
    every = {_last(key.name): key for key in reversed(keys.values()) if key.name.count(".") <= 1}
    is_set = name in ("data.train.", "data.eval.")  # no other block's key is meant in one of a list
    guess = None if is_secret(word) or is_set else nearest(low, every)
    if guess:
        return f"; did you mean {every[guess].name}?", _fix(every[guess], value, name)
    names = ", ".join(_last(key.name) for key in here)
    return "", f"known {'in ' + shown.rstrip('.') if shown else 'at the top'}: {names}"


def _foreign_advice(foreign: Foreign, value: Tree, name: str) -> tuple[str, str]:
    if not foreign.keys:
        return f"; {foreign.note}", "delete it"
    key = known_keys()[foreign.keys[0]]
    what = f"; duoka calls it {' and '.join(foreign.keys)}"
    is_false = value.value is False or str(value.value).lower() in ("false", "no", "off")
    written = foreign.write_if_false if is_false and foreign.write_if_false else foreign.write
    fix = _fix(key, value, name, written=written)
    return what, f"{fix}   ({foreign.note})" if foreign.note else fix


def _fix(key: Key, value: Tree, name: str, written: str = "") -> str:
    """The line to write instead, with the user's own value where it can stand."""
    text = written or _own_text(key, value) or key.example
    if value.place.file == COMMAND_LINE:
        return f"write:   {key.name}={text}"
    parent = _parent(key.name)
    under = "" if parent == name else f" under {parent.rstrip('.')}" if parent else " at the top"
    return f"write{under}:   {_last(key.name)}: {text}"


def _own_text(key: Key, tree: Tree) -> str:
    """The user's value, when it is a scalar or a list that the key could take."""
    value = _as_written(tree.plain_value())
    if isinstance(value, list) and value and "a list" in key.words:
        return yaml_text(value)
    if value is None or isinstance(value, (dict, list)):
        return ""
    if key.choices and "list" not in key.words and str(value) not in key.choices:
        return ""
    if key.section is not None and key.name not in NAMED_BLOCKS:
        return ""
    text = yaml_text(value)
    return f"[{text}]" if key.words.startswith("a list") else text


def _as_written(value: Any) -> Any:
    """As it stands in the file: ${env:NAME} is filled in later, in known keys only, and is no text that looks so."""
    if isinstance(value, dict):
        return {word: _as_written(item) for word, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return EnvText(value) if isinstance(value, str) and "${env:" in value else value


def _parent(name: str) -> str:
    return name[: len(name) - len(_last(name))]


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
