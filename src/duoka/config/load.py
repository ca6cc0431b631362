"""Load a run's config: one YAML, what it extends, and overrides become a `Loaded`, or every fault at once.

The command line and the worker call `load_config`. It opens only config files; rooms that know data and models
pass in `checks`. Also offered from here: `resolved_yaml`, `config_hash`, `result_differences`, `result_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duoka.config.adapters import take_over
from duoka.config.catalog import leaves
from duoka.config.derive import derive
from duoka.config.dialects.rows import Start
from duoka.config.handover import take_over_rates
from duoka.config.loaded import Loaded
from duoka.config.overlays import (
    COMMAND_LINE,
    KeyPath,
    Layers,
    expand_env,
    merge,
    read_layers,
    read_overrides,
    shown_path,
)
from duoka.config.paths import given_path
from duoka.config.rules import Rule, check_rules
from duoka.config.schema import NAMED_BLOCKS, RunConfig
from duoka.config.unknown import take_known_keys
from duoka.config.values import build_config, in_their_words
from duoka.config.write import Difference, config_hash, resolved_yaml, result_differences, result_values
from duoka.config.yaml_lines import SourcePlace, Tree, printable
from duoka.config.yaml_text import yaml_text
from duoka.errors import Fault, Faults, typed

__all__ = [
    "Check",
    "Difference",
    "Loaded",
    "Start",
    "config_hash",
    "load_config",
    "resolved_yaml",
    "result_differences",
    "result_values",
]

Check = Callable[[RunConfig, Path], "list[Fault]"]
_MIN_SECRET_LENGTH = 4  # shorter values would blot out ordinary words of a message


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, checks: Iterable[Check] = (), start: Start | None = None
) -> Loaded:
    """Read and check a config. Raises `Faults` with all faults of the files, the schema, the rules and the checks.

    `start` is how many ranks there will be: other tools' batches are per device.
    """
    path = Path(path)
    layers = Layers(start=start or Start())
    layers.overrides = read_overrides(overrides, layers)
    read_layers(path, layers)
    _refuse_side_files(layers, path)
    _refuse_other_tasks(layers, path)
    was_read = layers.tree is not None
    _refuse_stages(layers, path)
    tree = layers.tree if layers.tree is not None else Tree({}, SourcePlace(shown_path(path), 0, ""))
    for override in layers.overrides:
        tree = merge(tree, override)
    # A merged tree stands where the top layer stood; what is missing is missing in the file.
    tree = replace(tree, place=SourcePlace(shown_path(path), 0, ""))
    tree = expand_env(take_known_keys(tree, layers.faults, layers.broken), layers)
    if not was_read:
        raise Faults(_finish(layers, path))
    config, bad = build_config(tree, layers.broken, layers.faults)
    base = given_path(layers.base) if layers.base else path.parent
    notes = layers.notes
    derived: dict[str, str] = {}
    if config is not None:
        written = _written_keys(tree)
        config, derived = derive(_with_output(config, path), written)
        config, taken, said = take_over(config, base, written)
        config, inherited = take_over_rates(config, base, written)
        derived |= taken | inherited
        notes = notes + said + _apply_rules(config, bad, tree, layers)
        for check in checks:
            layers.faults.extend(_placed(fault, tree) for fault in check(config, base) if not _is_about(fault, bad))
    if layers.faults or config is None:
        raise Faults(_finish(layers, path))
    return Loaded(
        config=config,
        path=path,
        origins=_origins(config, tree) | derived,
        notes=tuple(notes),
        base=base,
        task=layers.task,
        secrets=dict(_secret_texts(tree, "")),
    )


def _refuse_side_files(layers: Layers, path: Path) -> None:
    """An Accelerate or DeepSpeed file says how to share the work, and names no model and no data."""
    if layers.dialect is None or layers.dialect.is_whole:
        return
    what = f"{shown_path(path)} is a file of {layers.dialect.title}: it names no model and no data"
    fix = f"see what it says:   duoka config show {typed(shown_path(path))}"
    raise Faults([Fault(what, file=shown_path(path), fix=fix), *layers.faults])


_COMMANDS = {
    "predict": ("predicts", "duoka eval"),
    "export": ("merges or exports a model", "duoka export"),
    "chat": ("names a model to talk to, and no data", "duoka chat"),
}


def _refuse_other_tasks(layers: Layers, path: Path) -> None:
    if layers.task in _COMMANDS:
        what, command = _COMMANDS[layers.task]
        name = shown_path(path)
        fix = f"write:   {command} {name}" + (
            "   (to train, name data: dataset: NAME)" if layers.task == "chat" else ""
        )
        raise Faults([Fault(f"{name} does not train: it {what}", file=name, fix=fix)])


@dataclass(frozen=True)
class SideFile:
    """What an Accelerate or DeepSpeed file says, as the part of a config that it is."""

    text: str
    notes: tuple[str, ...]


def read_side_file(path: str | Path, start: Start) -> SideFile | None:
    """A file beside the config, as our YAML; None for a file that names model and data. Raises Faults."""
    path = Path(path)
    layers = Layers(start=start)
    read_layers(path, layers)
    if layers.dialect is None or layers.dialect.is_whole or layers.tree is None:
        return None
    if layers.faults:
        raise Faults(_finish(layers, path))
    lines = [f"# The part of a config that {shown_path(path)} means ({layers.dialect.title})."]
    for block, tree in layers.tree.value.items():
        lines.append(f"{block}:")
        lines += [f"  {key}: {yaml_text(leaf.plain_value())}  # {_origin(leaf)}" for key, leaf in tree.value.items()]
    return SideFile("\n".join(lines) + "\n", tuple(layers.notes))


def _with_output(config: RunConfig, path: Path) -> RunConfig:
    """A left out `output` is runs/ and the YAML's name; filled in here, so that a resolved config keeps it."""
    return config if config.output else config.model_copy(update={"output": f"runs/{path.stem}"})


def _written_keys(tree: Tree) -> set[str]:
    """Dotted names of all keys that have a value in the files or on the command line."""
    keys: set[str] = set()
    for name, sub in tree.value.items():
        inner = sub.value.items() if isinstance(sub.value, dict) else ()
        keys |= {f"{name}.{key}" for key, value in inner if not value.is_bare}
        keys |= set() if sub.is_bare else {name}
    return keys


def _apply_rules(config: RunConfig, bad: set[KeyPath], tree: Tree, layers: Layers) -> list[str]:
    skipped = {".".join(map(str, path[:length])) for path in bad for length in range(1, len(path) + 1)}
    skipped |= {key for path in bad if len(path) == 1 for key in leaves(config) if key.startswith(f"{path[0]}.")}
    notes = []
    for rule in check_rules(config, skipped):
        what, fix = rule.message.format(c=config), rule.fix
        if rule.is_note:
            notes.append(f"{what}; {fix}")
        else:
            layers.faults.append(_rule_fault(rule, what, fix, tree))
    return notes


def _rule_fault(rule: Rule, what: str, fix: str, tree: Tree) -> Fault:
    """The fault at the first key that was written; the lines of the others are named in the message."""
    places = [(key, found) for key in rule.keys if (found := tree.at(tuple(key.split(".")))) is not None]
    if not places:
        return Fault(what, key=rule.keys[0], file=tree.place.file, fix=fix)
    (key, first), *others = places
    for name, found in places:
        if found.spelled:
            both = f"{found.spelled} ({name})"  # a rule speaks of our value
            what, fix = what.replace(name, both, 1), in_their_words(fix, name, found.spelled, found.place.file)
    also = [
        f"{other} is in line {found.place.line} of {found.place.file}" if found.place.line else f"{other} is given here"
        for other, found in others
        if found.place != first.place and found.place.line
    ]
    return first.place.fault(what + (f" ({', '.join(also)})" if also else ""), key=key, fix=fix)


def _path_of(key: str) -> KeyPath:
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts if part)


def _is_about(fault: Fault, bad: set[KeyPath]) -> bool:
    """True when a check complains about a value that was refused, and replaced, before it looked."""
    path = _path_of(fault.key)
    return any(path[: len(known)] == known or known[: len(path)] == path for known in bad if path)


def _placed(fault: Fault, tree: Tree) -> Fault:
    """A check's fault with file, line and source filled in from its key."""
    if fault.file or not fault.key:
        return fault
    place = tree.nearest_place(_path_of(fault.key)) or tree.place
    return replace(fault, file=place.file, line=place.line, source=place.source)


def _refuse_stages(layers: Layers, path: Path) -> None:
    """Alone: what else a file of stages lacks as a run is not missing."""
    if layers.tree is None or not isinstance(layers.tree.value, dict) or "pipeline" not in layers.tree.value:
        return
    place, fix = (
        layers.tree.value["pipeline"].place,
        f"duoka run {typed(shown_path(path))}   (--dry-run checks them all)",
    )
    what = "this file has several stages, and this command takes one run"
    raise Faults([place.fault(what, key="pipeline", fix=fix)])


def _finish(layers: Layers, path: Path) -> list[Fault]:
    """The faults sorted by file and line, each once, without any secret."""
    top = shown_path(path)
    files = list(dict.fromkeys([top, *(fault.file for fault in layers.faults)]))
    if COMMAND_LINE in files:
        files.append(files.pop(files.index(COMMAND_LINE)))
    unique = dict.fromkeys(layers.faults)
    faults = sorted(unique, key=lambda fault: (files.index(fault.file), fault.line))
    return [_harmless(_without_secrets(fault, layers.secrets)) for fault in faults]


def _harmless(fault: Fault) -> Fault:
    """The fault without the control characters that a quoted value or key may hold."""
    what, fix = ("\n".join(map(printable, text.split("\n"))) for text in (fault.what, fault.fix))
    return replace(fault, what=what, fix=fix, source=printable(fault.source))


def _without_secrets(fault: Fault, secrets: dict[str, str]) -> Fault:
    for value, written in secrets.items():
        if len(value) >= _MIN_SECRET_LENGTH:
            fault = replace(
                fault,
                what=fault.what.replace(value, written),
                source=fault.source.replace(value, written),
                fix=fault.fix.replace(value, written),
            )
    return fault


def _origins(config: RunConfig, tree: Tree) -> dict[str, str]:
    origins = {}
    for name in leaves(config):
        path: KeyPath = tuple(name.split("."))
        found = tree.at(path)
        if found is None and path[0] in NAMED_BLOCKS and path[1:] == ("name",):
            block = tree.at(path[:1])
            found = block if block is not None and not isinstance(block.value, dict) else None  # `model: demo`
        origins[name] = _origin(found)
    return origins


def _origin(tree: Tree | None) -> str:
    if tree is None:
        return "default"
    place = tree.place
    origin = f"{Path(place.file).name}:{place.line}" if place.line else place.file
    return origin + (f", {tree.spelled}" if tree.spelled else "") + "".join(f", env {name}" for name in tree.env)


def _secret_texts(tree: Tree, name: str) -> Iterable[tuple[str, str]]:
    if tree.written:
        yield (f"{name}.name" if name in NAMED_BLOCKS else name), tree.written
    children: Iterable[tuple[Any, Tree]] = ()
    if isinstance(tree.value, dict):
        children = tree.value.items()
    elif isinstance(tree.value, list):
        children = enumerate(tree.value)
    for part, sub in children:
        yield from _secret_texts(sub, f"{name}.{part}".lstrip("."))
