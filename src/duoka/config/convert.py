"""A config of another tool, written as one of duoka's: what its lines became, and nothing else.

`duoka config convert` writes this. Read back, it is the same config; what a run keeps is write.py's, with every key.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.config.catalog import known_keys
from duoka.config.schema import Section
from duoka.config.write import compact, with_secrets
from duoka.config.yaml_text import yaml_text

if TYPE_CHECKING:
    from duoka.config.loaded import Loaded

_WIDTH, _COMMENT_COLUMN = 116, 40
READ_AS = "; in duoka's own words:"  # what follows in a note is advice to do what is done here


def converted_yaml(loaded: Loaded, folder: Path) -> str:
    """The YAML for a file in `folder`; what is to be said about single lines of the old file stands on top."""
    name = loaded.path.name
    lines = [f"# What {name} says, in duoka's words. All other keys have their defaults: docs/config.md"]
    if loaded.task == "prepare":
        lines.append("# That file made tokens and trained nothing; this one trains, and makes its tokens on the way.")
    notes = [_without_file(note, name) for note in loaded.notes if READ_AS not in note]
    lines += ["#", "# About its lines:"] if notes else []
    for note in notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False)
    lines.append("")
    if loaded.base.resolve() != folder.resolve():
        lines.append(_with_comment(f"base: {yaml_text(str(loaded.base.resolve()))}", "relative paths: also from there"))
    for key, value in loaded.config.model_dump(mode="json", by_alias=False).items():
        lines += _lines_of(key, value, loaded)
    return "\n".join(lines) + "\n"


def _without_file(note: str, name: str) -> str:
    """`x.yaml:17 plot_loss: text` as `line 17, plot_loss: text`."""
    place, _, text = note.partition(" ")
    file, _, line = place.rpartition(":")
    return f"line {line}, {text}" if line.isdigit() and Path(file).name == name else note


def _lines_of(key: str, value: Any, loaded: Loaded) -> Iterator[str]:
    """The lines of a top key; of a block, only what was written, or differs from the default."""
    if not isinstance(value, dict):
        if _is_own(key, value, loaded):
            yield from _leaf(key, value, "", loaded)
        return
    inner = [
        line
        for name, one in value.items()
        if _is_own(f"{key}.{name}", one, loaded)
        for line in _leaf(f"{key}.{name}", one, "  ", loaded)
    ]
    if inner:
        yield from (f"{key}:", *inner)
    elif known_keys()[key].is_nullable:
        yield f"{key}: {{}}"


def _is_own(key: str, value: Any, loaded: Loaded) -> bool:
    if loaded.origins.get(key, "default") != "default":
        return value is not None or known_keys()[key].default is not None
    default = known_keys()[key].default
    if isinstance(default, Section):
        default = default.model_dump(mode="json", by_alias=False)
    return bool(value != (list(default) if isinstance(default, tuple) else default))


def _leaf(key: str, value: Any, indent: str, loaded: Loaded) -> Iterator[str]:
    value = compact(with_secrets(value, key, loaded.secrets))
    word, comment = key.rpartition(".")[2], _origin(key, loaded)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield _with_comment(f"{indent}{word}:", comment)
        yield from (f"{indent}  - {yaml_text(item)}" for item in value)
    else:
        yield _with_comment(f"{indent}{word}: {yaml_text(value)}", comment)


def _origin(key: str, loaded: Loaded) -> str:
    """`cutoff_len, line 10`; of other files their names too."""
    origin = loaded.origins.get(key, "default")
    place, _, spelled = origin.partition(", ")
    file, _, line = place.rpartition(":")
    if not line.isdigit():
        return "" if origin == "default" else origin
    where = f"line {line}" if file == loaded.path.name else place
    return f"{spelled}, {where}" if spelled else where


def _with_comment(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}}  # {comment}" if comment else text
