"""Values that the schema refuses, in users' words: what the key must be, what it got, what to write.

`load.py` calls `build_config` with a tree of known keys. pydantic finds the faults; its sentences are never shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from duoka.config.catalog import Key, known_keys
from duoka.config.overlays import COMMAND_LINE, KeyPath
from duoka.config.schema import NAMED_BLOCKS, RunConfig, expand_short_forms
from duoka.config.yaml_lines import Tree
from duoka.config.yaml_text import yaml_text
from duoka.errors import Fault
from duoka.registry import nearest

_REFILL: dict[str, Any] = {"model": {"name": "demo"}, "data": {"train": [{"name": "identity"}]}}
_MAX_SHOWN = 60
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False, "none": None}

_LIKE_DUALPIPE = "schedule: zbv   (stages at the same places; what travels inside of layers is not hidden)"
# Advice for values that people of other tools write; (key, what was written) -> what to write here.
_INSTEAD: dict[tuple[str, Any], str] = {
    ("lora", True): "lora: {rank: 8}",
    ("lora", False): "lora: null   or leave lora out, for full fine-tuning",
    ("data.eval", True): "eval: 0.1   (a tenth of train)",
    ("data.eval", False): "eval: 0",
    ("data.eval", None): "eval: 0",
    ("checkpoint.resume", True): "resume: auto",
    ("checkpoint.resume", False): "resume: never",
    ("log.to", False): "to: []",
    ("log.to", None): "to: []",
    ("train.precision", 16): "precision: bf16   or fp16",
    ("train.precision", 32): "precision: fp32",
    ("train.precision", 8): "precision: fp8",
    ("train.precision", "float8"): "precision: fp8",
    ("train.precision", False): "precision: fp32",
    ("train.precision", "float32"): "precision: fp32",
    ("train.precision", "float16"): "precision: fp16",
    ("train.precision", "bfloat16"): "precision: bf16",
    ("lora.targets", "all-linear"): "targets: all",
    ("train.recompute", True): "recompute: full",
    ("train.recompute", False): "recompute: none",
    ("train.recompute", 2): "recompute: 1/2   (every second layer)",
    ("train.recompute", 3): "recompute: 1/3   (every third layer)",
    ("train.recompute", 4): "recompute: 1/4   (every fourth layer)",
    ("train.recompute", 0.5): "recompute: 1/2   (every second layer)",
    ("train.recompute", "op"): "recompute: selective   (products and attention are kept, operator by operator)",
    **{("train.recompute", f"{n}/{n}"): "recompute: full   (every layer)" for n in range(1, 10)},
    **{("train.recompute", f"0/{n}"): "recompute: none   (no layer)" for n in range(1, 10)},
    ("optim.clip", False): "clip: 0",
    ("optim.clip", None): "clip: 0",
    ("parallel.check_replicas", False): "check_replicas: 0",
    ("parallel.schedule", "zb-h1"): "schedule: zero-bubble",
    ("parallel.schedule", "zerobubble"): "schedule: zero-bubble",
    ("parallel.schedule", "zbvzerobubble"): "schedule: zbv",
    ("parallel.schedule", "interleavedzerobubble"): "schedule: zbv",
    ("parallel.schedule", "dualpipe"): _LIKE_DUALPIPE,
    ("parallel.schedule", "dualpipev"): _LIKE_DUALPIPE,
}


def build_config(tree: Tree, broken: set[KeyPath], faults: list[Fault]) -> tuple[RunConfig | None, set[KeyPath]]:
    """The config, and the paths whose values were refused. Those have their default in it, for further checks only."""
    raw = tree.plain_value()
    eval_tree = tree.at(("data", "eval"))
    if eval_tree is not None and eval_tree.is_plain and str(eval_tree.value).lower() in _SWITCHES:
        # `eval: no` means no evaluation, and no data set of that name.
        raw["data"]["eval"] = _SWITCHES[str(eval_tree.value).lower()]
    raw = expand_short_forms(raw)
    bad = set(broken)
    for path in broken:
        _drop(raw, path)
    bad |= _note_bare_values(tree, raw, faults)
    try:
        return RunConfig.model_validate(raw), bad
    except ValidationError as error:
        found = _fault_paths(error, raw)
    for path, is_missing in found.items():
        if not any(path[: len(known)] == known or known[: len(path)] == path for known in bad):
            faults.append(_fault(path, is_missing, raw, tree))
    bad |= set(found)
    return _with_defaults(raw, bad), bad


def _with_defaults(raw: dict[str, Any], bad: set[KeyPath]) -> RunConfig | None:
    """A config without the refused values: first those alone are dropped, then the keys around them."""
    for depth in (9, 2, 1):
        # Later items of a list first, so that earlier ones keep their index.
        for path in sorted(bad, key=lambda path: [str(part).zfill(9) for part in path], reverse=True):
            _drop(raw, path[:depth])
        for key, value in _REFILL.items():
            if not isinstance(raw.get(key), dict):
                raw[key] = dict(value)
            for inner, content in value.items():
                if not raw[key].get(inner) and not raw[key].get("depth"):  # a new model has no name
                    raw[key][inner] = content
        try:
            return RunConfig.model_validate(raw)
        except ValidationError as error:
            bad = bad | set(_fault_paths(error, raw))
    return None


def _has(raw: Any, part: int | str) -> bool:
    if isinstance(raw, list):
        return isinstance(part, int) and part < len(raw)
    return isinstance(raw, dict) and part in raw


def _drop(raw: Any, path: KeyPath) -> None:
    for part in path[:-1]:
        if not _has(raw, part):
            return
        raw = raw[part]
    if _has(raw, path[-1]):
        del raw[path[-1]]


def _note_bare_values(tree: Tree, raw: dict[str, Any], faults: list[Fault]) -> set[KeyPath]:
    """`key:` with nothing after it: an empty block means its defaults; anything else is a fault."""
    bad: set[KeyPath] = set()
    for name, sub in tree.value.items():
        key = known_keys()[name]
        if sub.is_bare and key.section is not None and not key.is_nullable and not key.is_required:
            raw[name] = {}
        elif sub.is_bare:
            faults.append(_bare(key, sub))
            bad.add((name,))
        elif isinstance(sub.value, dict):
            for inner, value in sub.value.items():
                if value.is_bare and not known_keys()[f"{name}.{inner}"].is_nullable:
                    faults.append(_bare(known_keys()[f"{name}.{inner}"], value))
                    bad.add((name, inner))
    for path in bad:
        _drop(raw, path)
    return bad


def _bare(key: Key, tree: Tree) -> Fault:
    last = key.name.rsplit(".", 1)[-1]
    fix = _example(key, tree.place.file)
    if key.name == "lora":
        fix = "write:   lora: {rank: 8}   for adapters, or   lora: null   for full fine-tuning"
    elif not key.is_required:
        fix += f"   or delete {last}"
    return tree.place.fault(f"{key.name} has no value", key=key.name, fix=fix)


def _fault_paths(error: ValidationError, raw: Any) -> dict[KeyPath, bool]:
    """Where pydantic found faults, less its marks for members of a union; True for a key that is missing."""
    found: dict[KeyPath, bool] = {}
    for entry in error.errors(include_url=False, include_context=False, include_input=False):
        path = _real_path(entry["loc"], raw)
        is_missing = entry["type"] == "missing" and not isinstance(entry["loc"][-1], int)
        if is_missing:
            path = (*path, entry["loc"][-1])
        found.setdefault(path, is_missing)
    # A list refused as "no number" beside a fault inside the list: only the inner one is meant.
    return {
        path: missing
        for path, missing in found.items()
        if not any(other != path and other[: len(path)] == path for other in found)
    }


def _real_path(loc: tuple[int | str, ...], raw: Any) -> KeyPath:
    path: list[str | int] = []
    for part in loc:
        if _has(raw, part):
            raw = raw[part]
            path.append(part)
    return tuple(path)


def dotted(path: KeyPath) -> str:
    """("data", "train", 1, "name") -> "data.train[1].name"."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _fault(path: KeyPath, is_missing: bool, raw: Any, tree: Tree) -> Fault:
    name = ".".join(part for part in path if isinstance(part, str))
    key = known_keys()[name]
    place = tree.nearest_place(path)
    shown = dotted(path)
    block = tree.at(path[:1])
    if path[0] in NAMED_BLOCKS and path[1:] == ("name",) and block is not None and isinstance(block.value, str):
        key, shown = replace(key, name=str(path[0])), str(path[0])  # `stage: dpo`, as it was written
    source, file, line = (place.source, place.file, place.line) if place else ("", tree.place.file, 0)
    if is_missing:
        what, fix = f"{shown} is missing", _missing_fix(key, file)
    else:
        value = raw
        for part in path:
            value = value[part]
        found = tree.at(path)
        what, fix = _refusal(key, shown, path, value, file)
        if found is not None and found.spelled:
            what, fix = what.replace(shown, found.spelled, 1), in_their_words(fix, key.name, found.spelled, file)
    return Fault(what, key=".".join(map(str, path)), file=file, line=line, source=source, fix=fix)


def in_their_words(fix: str, name: str, spelled: str, file: str) -> str:
    """Advice by the name that was written: duoka's own would be refused in that file."""
    ours = f"{name}=" if file == COMMAND_LINE else f"{name.rpartition('.')[2]}: "
    theirs = f"{spelled}=" if file == COMMAND_LINE else f"{spelled.rpartition('.')[2]}: "
    return fix.replace(f"   {ours}", f"   {theirs}", 1)


def _missing_fix(key: Key, file: str) -> str:
    parent, _, last = key.name.rpartition(".")
    if file == COMMAND_LINE:
        return f"add for example   {key.name}={key.example}"
    return f"add for example{f' under {parent}:' if parent else ''}   {last}: {key.example}"


def _refusal(key: Key, shown: str, path: KeyPath, value: Any, file: str) -> tuple[str, str]:
    got = "nothing" if value is None else _short(value)
    words = key.words
    if isinstance(path[-1], int):
        words = "a data set's name, or a block of keys" if key.items else _item_words(key)
    what = f"{shown} must be {words}, got {got}"
    switch = _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(switch, (int, float, str, type(None))) and (key.name, switch) in _INSTEAD:
        wanted = _INSTEAD[key.name, switch]
        if file == COMMAND_LINE:
            wanted = f"{key.name}={wanted.partition(': ')[2]}"
        return what, f"write:   {wanted}"
    if isinstance(value, str) and value not in key.choices:
        guess = nearest(value.strip(), key.choices)
        if guess:
            return what, f"did you mean {guess}?"
    if isinstance(value, str) and "a list" in key.words and not isinstance(path[-1], int):
        items = [part.strip() for part in value.split(",") if part.strip()]
        return what, _write(key, yaml_text(items), file)
    if key.words == "text" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return what, "put it in quotes"
    if isinstance(value, list) and not value:
        return f"{shown} is an empty list", _example(key, file)
    return what, _example(key, file)


def _item_words(key: Key) -> str:
    words = key.words.split(", or ")[-1].replace("a list of ", "")
    return {"names": "a name"}.get(words, words)


def _short(value: Any) -> str:
    if isinstance(value, str):
        text = value if len(value) <= _MAX_SHOWN else value[: _MAX_SHOWN - 3] + "..."
        return f'"{text}"'
    text = yaml_text(value)
    if len(text) > _MAX_SHOWN:
        return "a block of keys" if isinstance(value, dict) else "a list"
    return text


def _example(key: Key, file: str) -> str:
    return _write(key, key.example, file, for_example=True)


def _write(key: Key, text: str, file: str, *, for_example: bool = False) -> str:
    name = f"{key.name}=" if file == COMMAND_LINE else f"{key.name.rsplit('.', 1)[-1]}: "
    return f"write{' for example' if for_example else ''}:   {name}{text}"
