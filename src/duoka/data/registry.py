"""Names in `data.train` and `data.eval` to files and formats: dataset_info.json, built-in sets, files by path.

Config checks call `check_data` before anything starts; `prepare` calls `find_sets`. Reads a little of each file,
never tokenises, knows no torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from duoka.config.schema import DataConfig, DataSource, RunConfig
from duoka.data.formats import FORMATS, BadRecord, SetFormat, detect_format, read_example
from duoka.data.records import KINDS, MAX_RECORD_BYTES, Record, check_file, find_pieces, read_piece
from duoka.errors import Fault, Faults
from duoka.registry import nearest

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
INFO_FILE = "dataset_info.json"
MOST_FAULTS = 10
_PEEK_BYTES = 1 << 20
_CHECK_S = 0.6
_OPTIONS = ("file_name", "formatting", "columns", "tags", "num_samples", "split", "subset", "ranking")
_COLUMNS = ("prompt", "query", "response", "history", "messages", "system", "tools")
_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


@dataclass(frozen=True)
class ResolvedSet:
    """One data set of the config: its files in order, its format, and how much of it is wanted."""

    name: str
    files: tuple[Path, ...]
    form: SetFormat
    split: Literal["train", "eval"] = "train"
    weight: float | None = None
    max_samples: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Info:
    """One dataset_info.json."""

    path: Path
    entries: Mapping[str, Any]

    def line_of(self, name: str) -> int:
        text = self.path.read_text(encoding="utf-8-sig")
        at = text.find(json.dumps(name, ensure_ascii=False))
        return 1 + text.count("\n", 0, at) if at >= 0 else 0


def find_sets(data: DataConfig, base: Path) -> list[ResolvedSet]:
    """Every set that the config names, train first. Raises Faults with all that is wrong."""
    sets, faults = _find(data, base)
    if faults:
        raise Faults(faults, title="data error")
    return sets


def check_data(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of data sets and their records, as far as reading for half a second goes; the first ten records."""
    sets, faults = _find(config.data, base)
    faults += _check_weights(config.data)
    if config.data.on_bad == "error":
        ends = time.monotonic() + _CHECK_S
        records = (fault for found in sets for fault in check_records(found, config.data.max_length, ends))
        for fault in records:
            faults.append(fault)
            if len(faults) >= MOST_FAULTS:
                break
    return faults


def max_record_bytes(max_length: int) -> int:
    """Far more text than `max_length` tokens: whatever is longer is a broken file, not a conversation."""
    return max(MAX_RECORD_BYTES, 16 * max_length)


def check_records(found: ResolvedSet, max_length: int, ends: float) -> Iterator[Fault]:
    """Wrong records of a set, until the monotonic clock says `ends`."""
    for path in found.files:
        for piece in find_pieces(path, _PEEK_BYTES):
            for record in [piece] if isinstance(piece, Fault) else read_piece(piece, max_record_bytes(max_length)):
                fault = record if isinstance(record, Fault) else check_record(record, found.form, path)
                if fault is not None:
                    yield fault
                if time.monotonic() > ends:
                    return


def check_record(record: Record, form: SetFormat, path: Path | str) -> Fault | None:
    try:
        read_example(record.value, form)
    except BadRecord as error:
        return Fault(error.rule, file=str(path), line=record.line, source=record.text, fix=error.fix)
    return None


def registered_sets(data: DataConfig | None, base: Path) -> dict[str, str]:
    """Every name that may stand in `data.train` -> where it comes from."""
    names = {path.stem: "built in" for path in sorted(BUILTIN_FOLDER.glob("*.jsonl"))}
    for info in _read_infos(data.folder if data else None, base)[0]:
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


def _find(data: DataConfig, base: Path) -> tuple[list[ResolvedSet], list[Fault]]:
    infos, faults = _read_infos(data.folder, base)
    sets = []
    groups = [("train", data.train), ("eval", data.eval if isinstance(data.eval, tuple) else ())]
    for split, sources in groups:
        for place, source in enumerate(sources):
            found = _find_one(source, infos, base, f"data.{split}.{place}.name")
            if isinstance(found, ResolvedSet):
                sets.append(replace(found, split=split, weight=source.weight))  # type: ignore[arg-type]
            else:
                faults += found
    return sets, faults


def _find_one(source: DataSource, infos: list[Info], base: Path, key: str) -> ResolvedSet | list[Fault]:
    for info in infos:
        if source.name in info.entries:
            return _from_info(source, info, key)
    builtin = BUILTIN_FOLDER / f"{source.name}.jsonl"
    if re.fullmatch(r"[\w-]+", source.name) and builtin.is_file():
        form = SetFormat("messages", FORMATS.get("messages").columns, FORMATS.get("messages").tags)
        return ResolvedSet(source.name, (builtin,), form, max_samples=source.max_samples)
    given = Path(source.name).expanduser()
    places = [given, base / given, *(info.path.parent / given for info in infos)]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return [_unknown(source.name, infos, key)]
    return _from_path(source, path.resolve(), key)


def _unknown(name: str, infos: list[Info], key: str) -> Fault:
    known = {builtin.stem for builtin in BUILTIN_FOLDER.glob("*.jsonl")}
    known |= {entry for info in infos for entry in info.entries}
    guess = nearest(name, known)
    looks_like_file = "/" in name or Path(name).suffix.lower() in (*KINDS, ".parquet", ".csv", ".txt")
    what = f"there is no file {name!r}" if looks_like_file else f"there is no data set named {name!r}"
    where = ", ".join(str(info.path) for info in infos) or f"no {INFO_FILE} found in ./data or beside the YAML"
    hint = f"did you mean {guess!r}? " if guess else ""
    return Fault(what, key=key, fix=f"{hint}registered: {', '.join(sorted(known))} ({where}); or name a file")


def _from_path(source: DataSource, path: Path, key: str) -> ResolvedSet | list[Fault]:
    files = _files_of(path)
    if not files:
        return [Fault(f"the folder {str(path)!r} holds no {' or '.join(KINDS)} file", key=key)]
    faults = [replace(fault, key=key) for file in files if (fault := check_file(file)) is not None]
    if faults:
        return faults
    record, seen = _first_record(files[0])
    form = detect_format(record.value) if record else None
    if form is None:
        fix = (
            'write {"messages": [{"role": "user", "content": ...}, ...]} records, or alpaca\'s instruction and output, '
            f"or register the file with its columns in {INFO_FILE}"
        )
        line, text = (record.line, record.text) if record else (seen.line, seen.source) if seen else (0, "")
        what = seen.what if seen and not record else f"the format of {path.name!r} is none that duoka knows"
        return [Fault(what, key=key, file=str(files[0]), line=line, source=text, fix=fix)]
    # A user's own words: a mixture of formats in one folder shows as records that break this one's rules.
    note = f"{source.name}: read as {form.name} ({_describe(form)})"
    return ResolvedSet(source.name, files, form, max_samples=source.max_samples, notes=(note,))


def _describe(form: SetFormat) -> str:
    if form.name == "alpaca":
        return ", ".join((form.columns["prompt"], form.columns["query"], form.columns["response"]))
    tags = form.tags
    return f"{form.columns['messages']}: {tags['role_tag']} {tags['user_tag']}/{tags['assistant_tag']}"


def _files_of(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    inside = sorted(file for file in path.iterdir() if file.suffix.lower() in KINDS and file.is_file())
    return tuple(file for file in inside if file.name != INFO_FILE)


def _first_record(path: Path) -> tuple[Record | None, Fault | None]:
    """The first record that can be read, and the first fault before it."""
    first_fault: Fault | None = None
    for piece in find_pieces(path, _PEEK_BYTES):
        for record in [piece] if isinstance(piece, Fault) else read_piece(piece):
            if isinstance(record, Record):
                return record, first_fault
            first_fault = first_fault or record
        break
    return None, first_fault


# ----------------------------------------------------------------------------------- dataset_info.json


def _read_infos(folder: str | None, base: Path) -> tuple[list[Info], list[Fault]]:
    """The registry files that count, nearest first."""
    if folder is not None:
        given = Path(folder).expanduser()
        place = next((place for place in (given, base / given) if place.is_dir()), None)
        if place is None:
            return [], [Fault(f"data.folder is {folder!r}, and there is no such folder", key="data.folder")]
        places = [place]
    else:
        places = [Path("data"), base, base / "data"]
    infos: dict[Path, Info] = {}
    faults: list[Fault] = []
    for place in places:
        path = (place / INFO_FILE).resolve()
        if path.is_file() and path not in infos:
            read = _read_info(path)
            if isinstance(read, Fault):
                faults.append(read)
            else:
                infos[path] = read
    return list(infos.values()), faults


def _read_info(path: Path) -> Info | Fault:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return Fault(f"{INFO_FILE} cannot be read: {error}", file=str(path))
    if text.lstrip().startswith('"'):
        # People paste `"name": {...}` blocks from pages into an empty file: what is meant is clear.
        text = "{" + text.strip().removesuffix(",") + "}"
    try:
        entries = json.loads(text)
    except ValueError as error:
        line = max(1, min(getattr(error, "lineno", 1), len(text.splitlines())))
        shown = next(iter(text.splitlines()[line - 1 : line]), "")
        fix = "look for a missing or superfluous comma, quote or bracket there or just before"
        return Fault(f"{INFO_FILE} is no valid JSON: {error}", file=str(path), line=line, source=shown, fix=fix)
    if not isinstance(entries, dict):
        return Fault(f"{INFO_FILE} must be an object of names", file=str(path), fix='{"name": {"file_name": ...}}')
    return Info(path, entries)


def _from_info(source: DataSource, info: Info, key: str) -> ResolvedSet | list[Fault]:
    entry = info.entries[source.name]
    line = info.line_of(source.name)

    def fault(what: str, fix: str = "") -> Fault:
        return Fault(f"data set {source.name!r}: {what}", key=key, file=str(info.path), line=line, fix=fix)

    if not isinstance(entry, dict):
        return [fault("its entry must be an object", '{"file_name": "my_data.json"}')]
    faults = [fault(*words) for words in _entry_faults(entry)]
    files: tuple[Path, ...] = ()
    if isinstance(entry.get("file_name"), str):
        path = info.path.parent / entry["file_name"]
        files = _files_of(path)
        if not path.exists():
            faults.append(fault(f"there is no file {str(path)!r}", "file_name counts from the folder of " + INFO_FILE))
        elif not files:
            faults.append(fault(f"the folder {str(path)!r} holds no {' or '.join(KINDS)} file"))
        else:
            faults += [replace(found, key=key) for file in files if (found := check_file(file)) is not None]
    if faults:
        return faults
    form, notes = _form_of(entry, source.name, files[0])
    limits = [limit for limit in (entry.get("num_samples"), source.max_samples) if limit is not None]
    return ResolvedSet(source.name, files, form, max_samples=min(limits, default=None), notes=notes)


def _entry_faults(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, fix) for each thing in an entry that is wrong, or that this version cannot do."""
    remote = [option for option in _REMOTE if option in entry]
    if not isinstance(entry.get("file_name"), str):
        if remote:
            yield f"{remote[0]} names a data set on a hub, and duoka reads local files", "download it, set file_name"
        else:
            yield "it names no file", '"file_name": "my_data.json"'
    for option in entry:
        if option not in _OPTIONS and option not in _REMOTE:
            guess = nearest(option, _OPTIONS)
            yield f"unknown option {option!r}", f"did you mean {guess!r}?" if guess else f"known: {', '.join(_OPTIONS)}"
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATS:
        yield f"unknown formatting {formatting!r}", f"known: {', '.join(sorted(FORMATS))}"
    if entry.get("ranking"):
        yield "it holds preference pairs (ranking), and stage sft learns from answers", "name another set"
    for option in ("split", "subset"):
        if entry.get(option) not in (None, "train"):
            yield f"{option} {entry[option]!r} means a part of a hub's data set; a file has none", f"remove {option}"
    if not (entry.get("num_samples") is None or (isinstance(entry["num_samples"], int) and entry["num_samples"] > 0)):
        yield f"num_samples is {entry['num_samples']!r}", "write a whole number of at least 1"
    tags = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "observation_tag", "function_tag")
    for option, known in (("columns", _COLUMNS), ("tags", tags)):
        given = entry.get(option, {})
        if not isinstance(given, dict) or not all(isinstance(word, str) for word in given.values()):
            yield f"{option} must be an object of names", f'"{option}": {{"{known[0]}": "..."}}'
            continue
        for name in given:
            if name not in known:
                guess = nearest(name, known)
                yield f"unknown name {name!r} in {option}", f"did you mean {guess!r}?" if guess else f"known: {known}"


def _form_of(entry: dict[str, Any], name: str, first_file: Path) -> tuple[SetFormat, tuple[str, ...]]:
    """Columns as LLaMA-Factory reads them: once `columns` is there, what it does not name is not read."""
    formatting = entry.get("formatting", "alpaca")
    row = FORMATS.get(formatting)
    form = SetFormat(formatting, entry.get("columns", row.columns), {**row.tags, **entry.get("tags", {})})
    if "columns" not in entry:
        return form, ()
    record, _ = _first_record(first_file)
    keys = record.value if record and isinstance(record.value, dict) else {}
    unread = [key for role, key in row.columns.items() if role not in entry["columns"] and keys.get(key)]
    unread = [key for key in unread if key not in entry["columns"].values()]
    if not unread:
        return form, ()
    note = f"{name}: {', '.join(map(repr, unread))} of its records is not named in columns, so it is not read"
    return form, (note,)
