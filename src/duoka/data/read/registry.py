"""Names in `data.train` and `data.eval` to files and formats: registered, built in, by path, or on the Hub.

Config checks call `check_data` before anything starts; `prepare` calls `find_sets`. Reads a little of each file,
never tokenizes, knows no torch. dataset_info.py reads the registry's files.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from duoka.config.paths import given_path, is_there
from duoka.config.rules_text import LAST_FILE
from duoka.config.schema import DataConfig, DataSource, RunConfig
from duoka.config.stages import stages_that_read
from duoka.data.read.dataset_info import (
    INFO_FILE,
    Info,
    ResolvedSet,
    files_of,
    first_record,
    folder_notes,
    read_infos,
    set_from_info,
    why_no_files,
)
from duoka.data.read.detect import LABELS, detect_format
from duoka.data.read.example import KIND_WORDS, BadRecord, SetFormat
from duoka.data.read.formats import FORMATS
from duoka.data.read.hub import fetch_set, is_hub_id
from duoka.data.read.record_kinds import as_text, read_record
from duoka.data.read.records import MAX_RECORD_BYTES, Record, check_file, find_pieces, is_data_file, read_piece
from duoka.errors import ConfigError, Fault, Faults
from duoka.registry import nearest
from duoka.tasks.find import DRAWN, PREFIX, is_task, task_data

__all__ = ["INFO_FILE", "ResolvedSet", "check_data", "check_sets", "find_sets", "registered_sets"]

BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
MOST_FAULTS = 10
_PEEK_BYTES = 1 << 20
_WEIGHTS = ("weight", "loss_weight", "sample_weight")  # of a record: all count alike here
_CHECK_S = 0.6


def find_sets(config: RunConfig, base: Path) -> list[ResolvedSet]:
    """Every set that the config names, train first. Raises Faults with all that is wrong."""
    sets, faults = _find(config, base)
    if faults:
        raise Faults(faults, title="data error")
    return sets


def check_data(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of data sets for training: those of `check_sets`, and kinds that the stage does not learn from."""
    sets, faults = _find(config, base)
    stage, known = config.stage, config.stage.kind.records
    for found in sets:
        if found.form.kind not in known:
            holds = KIND_WORDS[found.form.kind]
            what = f"data set {found.name!r} holds {holds}, and stage {stage.name} learns {stage.kind.learns}"
            better = "".join(f", or write   stage: {name}" for name in stages_that_read(found.form.kind)[:1])
            fix = f"name another set{better}"
            if "labeled" in known and (label := _other_label(found)):
                fix = f"{label}: write true for a good answer, false for a bad one"
            faults.append(Fault(what, key=f"data.{found.split}", file=str(found.files[0]), fix=fix))
    return faults + _check_content(config.data, [found for found in sets if found.form.kind in known])


def _other_label(found: ResolvedSet) -> str:
    """A column that seems to hold labels, which are no yes or no; "" where none does."""
    record, _ = first_record(found.files[0])
    value = record.value if record is not None and isinstance(record.value, dict) else {}
    name = next((name for name in LABELS if name in value), "")
    return f"its column {name} holds {json.dumps(value[name], default=str)[:40]}" if name else ""


def check_sets(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of data sets and their records, as far as reading for half a second goes; the first ten records."""
    sets, faults = _find(config, base)
    return faults + _check_content(config.data, sets)


def _check_content(data: DataConfig, sets: list[ResolvedSet]) -> list[Fault]:
    faults = _check_weights(data)
    if data.on_bad == "error":
        ends = time.monotonic() + _CHECK_S
        for fault in (fault for found in sets for fault in check_records(found, data.max_length, ends)):
            faults.append(fault)
            if len(faults) >= MOST_FAULTS:
                break
    return faults


def max_record_bytes(max_length: int) -> int:
    """Far more text than `max_length` tokens: a longer record is a broken file, not a conversation."""
    return max(MAX_RECORD_BYTES, 16 * max_length)


def check_records(found: ResolvedSet, max_length: int, ends: float) -> Iterator[Fault]:
    """Wrong records of a set, up to the deadline `ends` (monotonic)."""
    for path in found.files:
        for piece in find_pieces(path, _PEEK_BYTES):
            for record in [piece] if isinstance(piece, Fault) else read_piece(piece, max_record_bytes(max_length)):
                fault = record if isinstance(record, Fault) else check_record(record, found.form)
                if fault is not None:
                    yield fault
                if time.monotonic() > ends:
                    return


def check_record(record: Record, form: SetFormat) -> Fault | None:
    try:
        read_record(record.value, form)
    except BadRecord as error:
        return Fault(error.rule, file=record.file, line=record.line, source=record.text, fix=error.fix)
    return None


def registered_sets(data: DataConfig | None, base: Path) -> dict[str, str]:
    """Every name that may stand in `data.train` -> where it comes from."""
    names = {path.stem: "built in" for path in sorted(BUILTIN_FOLDER.glob("*.jsonl"))}
    names |= {f"{PREFIX}{name}": "a task, drawn from a seed" for name in DRAWN}
    for info in read_infos(data.folder if data else None, base)[0]:
        names |= {name: str(info.path) for name in info.entries if name not in names}
    return names


def _check_weights(data: DataConfig) -> list[Fault]:
    weights = [source.weight for source in data.train]
    given = [weight for weight in weights if weight is not None]
    if None in weights and sum(given) >= 1.0:
        what = f"the weights of data.train add up to {sum(given):g}, and nothing is left for the set without one"
        return [Fault(what, key="data.train", fix="give every set a weight, or make the given ones add up to less")]
    return []


# --------------------------------------------------------------------------------------------- finding


def _find(config: RunConfig, base: Path) -> tuple[list[ResolvedSet], list[Fault]]:
    data = config.data
    infos, faults = read_infos(data.folder, base)
    sets: list[ResolvedSet] = []
    groups = [("train", data.train), ("eval", data.eval if isinstance(data.eval, tuple) else ())]
    for split, sources in groups:
        for place, source in enumerate(sources):
            key = f"data.{split}.{place}.name"
            if data.stream and split == "eval" and source.name == LAST_FILE:
                found = _take_last_file(sets, source, key)
            else:
                found = _find_one(source, infos, base, key)
            if isinstance(found, ResolvedSet):
                form = as_text(found.form) if config.stage.kind.reads_text else found.form
                asked = {"weight": source.weight, "share": source.share, "epochs": source.epochs}
                sets.append(replace(found, form=form, split=split, **asked))  # type: ignore[arg-type]
            else:
                faults += found
    faults += _check_stream(sets) if data.stream else []
    return _say_doubled(sets), faults + list(_find_leaks(sets))


def _find_leaks(sets: list[ResolvedSet]) -> Iterator[Fault]:
    """Files that are learned and measured, by whatever names: rules.py sees equal names alone."""
    learned = {path.resolve(): found.name for found in sets if found.split == "train" for path in found.files}
    for found in sets:
        path = next((path for path in found.files if path.resolve() in learned), None)
        if found.split == "eval" and path is not None:
            what = f"data.eval reads {path.name}, which data.train learns with {learned[path.resolve()]!r}"
            fix = "name the files to learn one by one, or hold a share of them back:   eval: 0.1"
            yield Fault(f"{what}: its loss would say nothing about new data", key="data.eval", file=str(path), fix=fix)


def _say_doubled(sets: list[ResolvedSet]) -> list[ResolvedSet]:
    """The sets with a note where a file that another one reads in the same way would be learned twice an epoch."""
    first: dict[tuple[Path, str], str] = {}
    out = []
    for found in sets:
        form = json.dumps([found.form.to_json(), found.form.kind])
        keys = [(path.resolve(), form) for path in found.files if found.split == "train"]
        twice = next((key for key in keys if key in first), None)
        first = {**dict.fromkeys(keys, found.name), **first}
        if twice is not None:
            said = f"{found.name}: {twice[0].name} is in {first[twice]!r} too, and is learned twice in every epoch"
            found = replace(found, notes=(*found.notes, said))
        out.append(found)
    return out


def _take_last_file(sets: list[ResolvedSet], source: DataSource, key: str) -> ResolvedSet | list[Fault]:
    """The last file of the last training set, which no longer learns from it."""
    if not sets:
        return []  # why there is none is a fault already
    *others, last = sets
    if len(last.files) < 2:
        what = f"data.eval is {LAST_FILE}, and {last.name!r} has one file"
        return [Fault(what, key=key, fix="name a folder of several files, or give data.eval a file of its own")]
    sets[:] = [*others, replace(last, files=last.files[:-1])]
    return ResolvedSet(
        f"{last.name} ({last.files[-1].name})", last.files[-1:], last.form, "eval", max_samples=source.max_samples
    )


def _check_stream(sets: list[ResolvedSet]) -> list[Fault]:
    for found in sets:
        other = next((path for path in found.files if path.suffix.lower() != ".parquet"), None)
        if found.split == "train" and other is not None:
            what = f"data.stream reads the row groups of Parquet files, and {other.name} is none"
            fix = "delete stream: the text is then tokenized once, before training; or write it as Parquet"
            return [Fault(what, key="data.stream", fix=fix)]
    return []


def _find_one(source: DataSource, infos: list[Info], base: Path, key: str) -> ResolvedSet | list[Fault]:
    if is_task(source.name):
        return _from_task(source, base, key)
    for info in infos:
        if source.name in info.entries:
            return set_from_info(source, info, key)
    builtin = set_with_name(source.name, base)
    if builtin is not None:
        return ResolvedSet(source.name, (builtin,), _messages(), max_samples=source.max_samples)
    given = given_path(source.name)
    places = [given, base / given, *(info.path.parent / given for info in infos)]
    # No name at all, as of a variable that is empty, is no word for the current folder.
    path = next((place for place in places if source.name and is_there(place)), None)
    if path is not None:
        return _from_path(source, path.resolve(), key)
    if is_hub_id(source.name):
        fetched = fetch_set(source.name)
        return [replace(fetched, key=key)] if isinstance(fetched, Fault) else _from_path(source, fetched, key)
    return [_unknown(source.name, infos, key)]


def set_with_name(name: str, base: Path) -> Path | None:
    """The file of a set that duoka has or makes: a task's items for training, or a builtin one. Raises ConfigError."""
    if is_task(name):
        return task_data(name, base, "train")
    builtin = BUILTIN_FOLDER / f"{name}.jsonl"
    return builtin if re.fullmatch(r"[\w-]{1,64}", name) and builtin.is_file() else None


def _messages() -> SetFormat:
    return SetFormat("messages", FORMATS.get("messages").columns, FORMATS.get("messages").tags)


def _from_task(source: DataSource, base: Path, key: str) -> ResolvedSet | list[Fault]:
    """`task:NAME`: its items for training; as evaluation data, its test items, which are never among them."""
    try:
        file = task_data(source.name, base, "test" if key.startswith("data.eval") else "train")
    except ConfigError as error:
        return [Fault(error.what, key=key, fix=error.fix or "")]
    record, _ = first_record(file)
    form = detect_format(record.value) if record else None
    return ResolvedSet(source.name, (file,), form or _messages(), max_samples=source.max_samples)


def _unknown(name: str, infos: list[Info], key: str) -> Fault:
    known = {builtin.stem for builtin in BUILTIN_FOLDER.glob("*.jsonl")}
    known |= {entry for info in infos for entry in info.entries}
    guess = nearest(name, known)
    looks_like_file = "/" in name or is_data_file(Path(name))
    what = f"there is no file {name!r}" if looks_like_file else f"there is no data set named {name!r}"
    where = ", ".join(str(info.path) for info in infos) or f"no {INFO_FILE} found in ./data or beside the YAML"
    hint = f"did you mean {guess!r}? " if guess else ""
    if any(mark in name for mark in "*?["):
        hint = "a name stands for itself, * too: name the folder, all files of which are read, or each file. "
    return Fault(what, key=key, fix=f"{hint}registered: {', '.join(sorted(known))} ({where}); or name a file")


def _from_path(source: DataSource, path: Path, key: str) -> ResolvedSet | list[Fault]:
    files = files_of(path)
    if path.is_dir() and (why := why_no_files(path))[0]:
        return [Fault(why[0], key=key, fix=why[1])]
    faults = [replace(fault, key=key) for file in files if (fault := check_file(file)) is not None]
    if faults:
        return faults
    record, seen = first_record(files[0])
    form = detect_format(record.value) if record else None
    if record is None or form is None:
        fix = _other_shape(record.value if record else None) or (
            'write {"messages": [{"role": "user", "content": ...}, ...]} records, or alpaca\'s instruction and output, '
            f"or register the file with its columns in {INFO_FILE}"
        )
        line, text = (record.line, record.text) if record else (seen.line, seen.source) if seen else (0, "")
        what = f"the format of {path.name!r} is none that duoka knows"
        if record is None:
            what, fix = (seen.what, seen.fix or fix) if seen else (f"{path.name} has no record, only blank lines", fix)
        return [Fault(what, key=key, file=str(files[0]), line=line, source=text, fix=fix)]
    # Explicit settings win: a mixture of formats in one folder shows as records that break this one's rules.
    kind = "" if form.kind in ("conversation", "text") else f", {KIND_WORDS[form.kind]}"
    lines = "; a document a line" if files[0].name.lower().split(".")[-1] == "txt" else ""
    unread = _unread(form, record.value)
    notes = [f"{source.name}: read as {form.name}{kind} ({_describe(form, record.value)}{lines}){unread}"]
    notes += [f"{source.name}: {said}" for said in folder_notes(path)]
    return ResolvedSet(source.name, files, form, max_samples=source.max_samples, notes=tuple(notes))


def _other_shape(value: object) -> str:
    """What to do about a file whose records stand somewhere else than duoka looks; "" where it is not that."""
    if not isinstance(value, dict):
        return ""
    name = next(iter(value), "")
    if len(value) == 1 and any(mark in name for mark in ";\t|"):
        return "separate cells by commas in a .csv, by tabs in a .tsv: only one column was found"
    if isinstance(value.get("chosen"), str) and isinstance(value.get("rejected"), str):  # as in hh-rlhf
        return (
            "there is no prompt beside 'chosen' and 'rejected': write what both begin with once, "
            '{"prompt": ..., "chosen": ..., "rejected": ...}, and the answers alone behind it'
        )
    lists = [key for key, part in value.items() if isinstance(part, list) and part and isinstance(part[0], dict)]
    if len(lists) == 1 and detect_format(value[lists[0]][0]) is not None:
        return f"the records stand in {lists[0]!r} of one object: write that list alone, [ {{...}}, {{...}} ]"
    return ""


def _unread(form: SetFormat, first: dict[str, Any]) -> str:
    """Texts and lists beside what is read: a question's choices, say, would be missed."""
    known = {*form.columns.values(), "functions"}
    told = {name for name, value in first.items() if isinstance(value, (str, list, dict)) or name in _WEIGHTS}
    names = [name for name in first if name in told - known]
    names = [name for name in names if first[name]]
    return f"; not read: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else ""


def _describe(form: SetFormat, first: dict[str, Any]) -> str:
    columns, tags = form.columns, form.tags
    if form.name == "text":
        said = columns["text"]
    elif form.name == "alpaca":
        said = ", ".join(columns[role] for role in ("prompt", "query", "response") if role in columns)
    else:
        said = f"{columns.get('messages', 'chosen')}: {tags['role_tag']} {tags['user_tag']}/{tags['assistant_tag']}"
        said += f"; {columns['completion']} is learned" if "completion" in columns else ""
    if form.kind == "preference":
        by = f" by {columns['margin']}" if first.get(columns.get("margin", "")) is not None else ""
        return f"{said}; {columns['chosen']} before {columns['rejected']}{by}"
    return f"{said}; label {columns['kto_tag']}" if form.kind == "labeled" else said
