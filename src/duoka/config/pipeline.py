"""`pipeline:` of a YAML: stages that begin from one another, as configs of their own; read, checked and put in order.

All that stands outside `pipeline` is the default of each stage: blocks are merged, lists and values replaced, a block
that is null is taken away. `duoka run` (cluster/pipeline/) runs what this file describes. Nothing here looks at a disk
beyond the YAML.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from duoka.config.overlays import COMMAND_LINE, read_text, shown_path
from duoka.config.paths import given_path
from duoka.config.schema import NAMED_BLOCKS
from duoka.config.stage_names import fork_names, score_parts
from duoka.config.yaml_lines import SourcePlace, Tree, parse_yaml
from duoka.config.yaml_text import EnvText, yaml_text
from duoka.errors import Fault, Faults, typed
from duoka.registry import nearest

Kind = Literal["train", "eval", "export", "tokenizer", "chat"]
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OWN_KEYS: dict[Kind, tuple[str, ...]] = {
    "eval": ("eval", "of", "limit", "when"),
    "export": ("export", "of", "when"),
    "tokenizer": ("tokenizer", "vocab_size"),
    "chat": ("chat", "of", "when"),
}
_GATE = re.compile(r"\s*(\S+)\s*(>=|<=|>|<)\s*(\S+)\s*")
# What a model is made of when it is new; a stage that begins from another has that one's.
_NEW_MODEL = ("name", "depth", "width", "head_dim", "kv_heads", "mlp_width", "context", "tokenizer", "revision")
EXPORTS = ("model",)
REFERENCES = (("optim", "state"), ("model", "tokenizer"), ("lora", "adapter"))


@dataclass(frozen=True)
class Gate:
    """`score.rl.sort > score.sft.sort`: of two scores, or of a score and a number."""

    text: str
    left: str
    sign: str
    right: str

    @property
    def scores(self) -> list[str]:
        return [side for side in (self.left, self.right) if not is_number(side)]


@dataclass(frozen=True)
class StageSpec:
    """One stage as it is written. `body` is its config, of a training stage, with the names of other stages in it."""

    name: str
    kind: Kind
    place: SourcePlace
    path: tuple[str, ...]  # in the YAML
    body: dict[str, Any] = field(default_factory=dict)
    source: str | None = None  # the stage that its model is of
    of: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # tasks, files, questions
    limit: int | None = None
    vocab_size: int = 32768
    when: Gate | None = None

    @property
    def parents(self) -> list[str]:
        gates = [] if self.when is None else [side.split(".")[0] for side in self.when.scores]
        found = [*([self.source] if self.source else []), *self.of, *gates, *self.references.values()]
        return list(dict.fromkeys(found))

    @property
    def references(self) -> dict[tuple[str, str], str]:
        """Keys of the body that name another stage; `read_pipeline` leaves only these among their like."""
        found = {key: (self.body.get(key[0]) or {}).get(key[1]) for key in REFERENCES}
        return {key: value.name for key, value in found.items() if isinstance(value, StageName)}


@dataclass(frozen=True)
class StageName:
    """In a body: where the folder of that stage is to be written."""

    name: str


@dataclass(frozen=True)
class Pipeline:
    """The stages in the order in which they run; relative paths count from here, then from `base`."""

    path: Path
    base: Path
    output: Path
    stages: tuple[StageSpec, ...]
    tree: Tree

    def stage(self, name: str) -> StageSpec:
        return next(one for one in self.stages if one.name == name)

    def after(self, names: Sequence[str]) -> set[str]:
        """These stages and all that depend on them."""
        found = set(names)
        for stage in self.stages:
            if found & set(stage.parents):
                found.add(stage.name)
        return found

    def place(self, fault: Fault, stage: StageSpec) -> Fault:
        """A fault of a stage's config at the line of this file that the value stands in."""
        parts = [part for part in fault.key.replace("[", ".").replace("]", "").split(".") if part]
        keys = tuple(int(part) if part.isdigit() else part for part in parts)
        own = self.tree.at(stage.path)
        found = (own.nearest_place(keys) if own and keys else None) or (self.tree.nearest_place(keys) if keys else None)
        place = found or stage.place
        what = f"stage {stage.name}: {fault.what}"
        return replace(fault, what=what, file=place.file, line=place.line, source=place.source)


def read_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Raises Faults with all that is wrong with the stages among themselves."""
    faults: list[Fault] = []
    name = shown_path(path)
    text = read_text(path, faults, None)
    tree = parse_yaml(text, name, faults) if text is not None else None
    if faults or tree is None:
        raise Faults(faults or [Fault("the file is empty", file=name)])
    stages = tree.at(("pipeline",))
    if stages is None or not isinstance(stages.value, dict) or not stages.value:
        what = f"{name} has no stages under pipeline:"
        raise Faults([Fault(what, file=name, fix=f"a single run is started by   duoka train {typed(name)}")])
    values = tree.plain_value()
    entries: dict[str, Any] = values.pop("pipeline")
    base = given_path(values.pop("base", None) or path.parent)
    _override(values, entries, overrides, faults)
    output = given_path(values.pop("output", None) or f"runs/{path.stem}")
    reader = _Reader(tree, values, faults)
    found = [spec for key, entry in entries.items() for spec in reader.read(key, entry, list(entries))]
    specs = _swept(found, faults)
    _check(specs, faults)
    if faults:
        raise Faults(faults)
    return Pipeline(path, base, output, tuple(_in_order(specs)), tree)


def _override(values: dict[str, Any], entries: dict[str, Any], overrides: Sequence[str], faults: list[Fault]) -> None:
    """key=value for all stages, stage.key=value for one."""
    for word in overrides:
        key, equals, text = word.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            what = f'"{word}" is no KEY=VALUE'
            faults.append(Fault(what, file=COMMAND_LINE, fix="write for example:   sft.optim.lr=1e-4"))
            continue
        parsed = parse_yaml(text, COMMAND_LINE, faults) if text else None
        target = values
        if parts[0] in entries and len(parts) > 1:
            target = entries[parts[0]] = dict(entries[parts[0]] or {})
            parts = parts[1:]
        for part in parts[:-1]:
            inner = target.get(part)
            inner = {"name": inner} if isinstance(inner, str) else dict(inner or {})
            target[part] = inner
            target = inner
        target[parts[-1]] = parsed.plain_value() if parsed is not None else ""


class _Reader:
    """Entries to stages; `defaults` are what stands outside the pipeline."""

    def __init__(self, tree: Tree, defaults: dict[str, Any], faults: list[Fault]) -> None:
        self.tree, self.defaults, self.faults = tree, _in_long(defaults), faults
        self.before: str | None = None  # the training stage before

    def read(self, name: str, entry: Any, names: list[str]) -> Iterator[StageSpec]:
        path = ("pipeline", str(name))
        place = (self.tree.at(path) or self.tree).place
        if not _NAME.fullmatch(str(name)):
            what = f"a stage is called {name!r}"
            self.faults.append(place.fault(what, fix="names are letters, digits, - and _ ; a folder is named so"))
        elif not isinstance(entry, dict) or not entry:
            fix = f"write for example:   {name}: {{stage: sft, data: {{train: [FILE]}}}}"
            self.faults.append(place.fault(f"stage {name} says nothing", key=f"pipeline.{name}", fix=fix))
        else:
            kind: Kind = next((word for word in _OWN_KEYS if word in entry), "train")
            made = self._train(name, entry, names, path, place) if kind == "train" else self._other(
                name, kind, entry, path, place
            )  # fmt: skip
            yield from [made] if made is not None else []

    def _other(
        self, name: str, kind: Kind, entry: dict[str, Any], path: tuple[str, ...], place: SourcePlace
    ) -> StageSpec | None:
        num_faults = len(self.faults)
        for key in entry:
            if key not in _OWN_KEYS[kind]:
                guess = nearest(str(key), _OWN_KEYS[kind])
                fix = f"did you mean {guess}?" if guess else f"it knows: {', '.join(_OWN_KEYS[kind])}"
                self._refuse(path, key, f"stage {name} ({kind}) has no key {key}", fix)
        words, of = _texts(entry[kind]), _texts(entry.get("of"))
        if not words:
            self._refuse(path, kind, f"stage {name}: {kind} names nothing", "write a list, or one name")
        if kind != "tokenizer" and not of:
            self._refuse(path, kind, f"stage {name} does not say of which stages", "write:   of: [sft]")
        if kind == "export" and (len(of) > 1 or words[:1] != list(EXPORTS)):
            what = f"stage {name}: export {' '.join(words)} of {', '.join(of)} is not there"
            self._refuse(path, kind, what, "write:   export: model   (a transformers folder), of one stage")
        limit, size = entry.get("limit"), entry.get("vocab_size", 32768)
        for key, number in (("limit", limit), ("vocab_size", size)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                self._refuse(path, key, f"stage {name}: {key} must be a whole number of at least 1", f"{key}: 100")
        gate = self._gate(entry.get("when"), name, path)
        if len(self.faults) > num_faults:
            return None
        return StageSpec(
            name, kind, place, path, of=tuple(of), words=tuple(words), limit=limit, vocab_size=size, when=gate
        )

    def _train(
        self, name: str, entry: dict[str, Any], names: list[str], path: tuple[str, ...], place: SourcePlace
    ) -> StageSpec:
        entry = _in_long(entry)
        gate = self._gate(entry.pop("when", None), name, path)
        names_model = bool({"name", "depth"} & set(entry.get("model") or {}))
        source = entry.pop("from", None if names_model else self.before)
        sweep = entry.pop("sweep", None)
        defaults = self.defaults
        if source is not None and "model" in defaults:
            kept = {key: value for key, value in defaults["model"].items() if key not in _NEW_MODEL}
            defaults = {**defaults, "model": kept}
        body = merge_blocks(defaults, entry)
        if source is not None:
            if names_model:
                what = f"stage {name} begins from {source} and names a model of its own"
                self._refuse(path, "model", what, "delete one of them; from: null begins from the model")
            # Another stage, or a folder or Hub id.
            start = StageName(source) if source in names or "@" in str(source) else source
            body["model"] = {**(body.get("model") or {}), "name": start}
        for block, key in REFERENCES:
            found = body.get(block)
            if isinstance(found, dict) and isinstance(found.get(key), str) and found[key] in names:
                body[block] = {**found, key: StageName(found[key])}
        if sweep is not None:
            body["sweep"] = sweep
        self.before = name
        own = source if isinstance(source, str) and (source in names or "@" in source) else None
        return StageSpec(name, "train", place, path, body, own, when=gate)

    def _gate(self, text: Any, name: str, path: tuple[str, ...]) -> Gate | None:
        if text is None:
            return None
        found = _GATE.fullmatch(str(text))
        sides = [] if found is None else [found[1], found[3]]
        is_wrong = [side for side in sides if not is_number(side) and side.count(".") < 2]
        if found is None or is_wrong or all(map(is_number, sides)):
            what = f"stage {name}: when is {str(text)!r}, which compares no score"
            self._refuse(path, "when", what, "write for example:   when: score.rl.sort > score.sft.sort   (or > 0.5)")
            return None
        return Gate(str(text), found[1], found[2], found[3])

    def _refuse(self, path: tuple[str, ...], key: str, what: str, fix: str) -> None:
        place = (self.tree.at((*path, key)) or self.tree.at(path) or self.tree).place
        self.faults.append(place.fault(what, key=".".join((*path, key)), fix=fix))


def _in_long(values: Mapping[str, Any]) -> dict[str, Any]:
    """`model: demo` and `stage: sft` in their long forms, so that blocks merge with them."""
    short = {key: {"name": values[key]} for key in NAMED_BLOCKS if isinstance(values.get(key), str)}
    return {**values, **short}


def is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d*\.?\d+", text))


def _texts(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [one for one in found if isinstance(one, str)]


def merge_blocks(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks key by key; lists and values are replaced; null takes a block away."""
    out = dict(below)
    for key, value in above.items():
        if isinstance(out.get(key), dict) and value is None:
            del out[key]
        elif isinstance(out.get(key), dict) and isinstance(value, dict):
            out[key] = merge_blocks(out[key], value)
        else:
            out[key] = value
    return out


def _swept(specs: Sequence[StageSpec], faults: list[Fault]) -> list[StageSpec]:
    """`sweep: {optim.lr: [1e-4, 3e-4]}` as a fork for each value; `of` a swept stage means all of its forks."""
    forks: dict[str, list[str]] = {}
    out: list[StageSpec] = []
    for spec in specs:
        sweep = spec.body.get("sweep")
        if sweep is None:
            out.append(spec)
            continue
        body = {key: value for key, value in spec.body.items() if key != "sweep"}
        if not isinstance(sweep, dict) or not all(isinstance(one, list) and one for one in sweep.values()):
            what = f"stage {spec.name}: sweep must name keys and lists of their values"
            faults.append(spec.place.fault(what, fix="write for example:   sweep: {optim.lr: [1e-4, 3e-4]}"))
            continue
        points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
        for name, point in fork_names(spec.name, points).items():
            own = body
            for key, value in point.items():
                inner: Any = value
                for part in reversed(str(key).split(".")):
                    inner = {part: inner}
                own = merge_blocks(own, inner)
            forks.setdefault(spec.name, []).append(name)
            out.append(replace(spec, name=name, body=own))
    for place, spec in enumerate(out):
        of = [one for name in spec.of for one in forks.get(name, [name])]
        spec = out[place] = replace(spec, of=tuple(of))
        swept = next((name for name in spec.parents if name in forks), None)
        if swept:
            what = f"stage {spec.name} begins from {swept}, which is swept: there are several of it"
            faults.append(spec.place.fault(what, fix=f"name one:   from: {forks[swept][0]}"))
    return out


def _check(specs: Sequence[StageSpec], faults: list[Fault]) -> None:
    """Names that are there, of stages that have what is asked of them."""
    kinds = {spec.name: spec.kind for spec in specs}
    for spec in specs:
        for name in spec.parents:
            if name not in kinds:
                guess = nearest(name, kinds)
                fix = f"did you mean {guess}?" if guess else f"stages: {', '.join(kinds)}"
                faults.append(spec.place.fault(f"stage {spec.name} names {name}, which is no stage", fix=fix))
        for name in (*([spec.source] if spec.source else []), *spec.of):
            allowed = ("train",) if spec.kind == "export" and name != spec.source else ("train", "export")
            if kinds.get(name, "train") not in allowed:
                what = f"stage {spec.name} needs a model, and {name} is a stage of kind {kinds[name]}"
                faults.append(spec.place.fault(what, fix="name a stage that trains"))
        for side in spec.when.scores if spec.when else ():
            asked = next((one for one in specs if one.name == side.partition(".")[0]), None)
            name, stage, task = score_parts(side, asked.of if asked is not None else ())
            if asked is not None and (asked.kind != "eval" or stage not in asked.of or task not in asked.words):
                what = f"stage {spec.name}: when asks for {side}, and {name} scores no {task} of {stage}"
                fix = "write EVAL.STAGE.TASK, as in   when: score.sft.sort > 0.5"
                faults.append(spec.place.fault(what, fix=fix))


def _in_order(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """Each after its parents, else as they stand in the file. Raises Faults for a circle."""
    left, out = list(specs), list[StageSpec]()
    while left:
        done = {spec.name for spec in out}
        following = next((spec for spec in left if set(spec.parents) <= done), None)
        if following is None:
            names = ", ".join(spec.name for spec in left)
            raise Faults([left[0].place.fault(f"stages wait for each other: {names}", fix="change a from: or of:")])
        out.append(following)
        left.remove(following)
    return out


def stage_yaml(body: Mapping[str, Any], title: str, base: Path, output: Path) -> str:
    """A stage's config as a file that `duoka train` runs alone; names of stages are folders by now."""
    lines = [f"# {title}", f"base: {yaml_text(str(base.resolve()))}"]
    lines += _yaml_lines({**body, "output": str(output)}, "")
    return "\n".join(lines) + "\n"


def _yaml_lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{yaml_text(str(key))}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{yaml_text(str(key))}: {yaml_text(_with_env(value))}"


def _with_env(value: Any) -> Any:
    """${env:NAME} is filled in when the stage's own file is read, as it would be in this one."""
    if isinstance(value, str) and "${env:" in value:
        return EnvText(value)
    if isinstance(value, list):
        return [_with_env(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_env(one) for key, one in value.items()}
    return value
