"""dataset_info.json: names, files, columns and tags of data sets, as LLaMA-Factory defines them.

registry.py looks names up in it. A file that is wrong, and each entry that is, become Faults with a line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from duoka.config.paths import given_path, is_file, is_folder, is_there
from duoka.config.schema import DataSource
from duoka.data.read.example import MEDIA, SetFormat
from duoka.data.read.formats import FORMATS
from duoka.data.read.hub import fetch_set
from duoka.data.read.record_kinds import kind_of_columns
from duoka.data.read.records import KINDS, Record, check_file, find_pieces, is_data_file, read_piece
from duoka.errors import Fault
from duoka.registry import nearest

INFO_FILE = "dataset_info.json"
_NO_DATA = (INFO_FILE, "dataset_infos.json")  # what the Hub's older sets say of themselves
_PEEK_BYTES = 1 << 20
_OPTIONS = ("file_name", "hf_hub_url", "formatting", "columns", "tags", "num_samples", "split", "subset", "ranking")
_COLUMNS = (
    "prompt", "query", "response", "history", "messages", "system", "tools", "chosen", "rejected", "margin", "kto_tag",
    "text",
)  # fmt: skip
_HELD_BACK = re.compile(r"(?:^|[-_.])(?:test|dev|val|valid|validation|eval)[-_.]", re.IGNORECASE)
_REMOTE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


@dataclass(frozen=True)
class ResolvedSet:
    """One data set of the config: its files in order, its format, and how much of it is wanted."""

    name: str
    files: tuple[Path, ...]
    form: SetFormat
    split: Literal["train", "eval"] = "train"
    weight: float | None = None
    share: float | None = None
    epochs: float | None = None
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


def files_of(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    # A link that leads nowhere is named later, and not passed over with what it was to hold.
    inside = sorted(file for file in path.iterdir() if is_data_file(file) and (file.is_file() or file.is_symlink()))
    return tuple(file for file in inside if file.name not in _NO_DATA)


def folder_notes(path: Path) -> list[str]:
    """What is to be said of a folder whose files are read, as far as some could take it for another: none of a file."""
    names = [file.name for file in files_of(path)] if path.is_dir() else []
    others = [name for name in names if _HELD_BACK.search(name)]
    learned = f"{', '.join(others)} of it is read like the others: name single files to keep others out"
    unread = unread_folders(path) if names else ""
    return [learned] * (0 < len(others) < len(names)) + [unread] * bool(unread)


def unread_folders(path: Path) -> str:
    """What is to be said of data in the folders of a folder; "" where there is none."""
    with_data = [folder.name for folder in _folders_with_data(path)]
    return f"files in its folders {', '.join(with_data)} are not read: name these too" if with_data else ""


def _folders_with_data(path: Path) -> list[Path]:
    found = []
    for folder in sorted(path.iterdir()):
        with contextlib.suppress(OSError):  # one that is not ours to look into
            if folder.is_dir() and not folder.name.startswith(".") and any(map(is_data_file, folder.iterdir())):
                found.append(folder)
    return found


def why_no_files(path: Path) -> tuple[str, str]:
    """(what, fix) of a folder without a file to read, or with the files of `datasets.save_to_disk`."""
    saved = "write it as Parquet:   datasets.load_from_disk(FOLDER)['train'].to_parquet('train.parquet')"
    if (path / "dataset_dict.json").is_file():
        return f"the folder {str(path)!r} was written by datasets.save_to_disk, which duoka does not read", saved
    if (path / "state.json").is_file() and any(path.glob("*.arrow")):
        what = f"the folder {str(path)!r} was written by datasets.save_to_disk, which duoka does not read"
        return what, saved.replace("['train']", "")
    if files_of(path):
        return "", ""
    inside = "   or   ".join(str(folder) for folder in _folders_with_data(path)[:3])
    what = f"the folder {str(path)!r} holds no {' or '.join(KINDS)} file"
    return what, f"name the folder in it that does:   {inside}" if inside else ""


def first_record(path: Path) -> tuple[Record | None, Fault | None]:
    """The first record that can be read, and the first fault before it."""
    first_fault: Fault | None = None
    for piece in itertools.islice(find_pieces(path, _PEEK_BYTES), 1):
        for record in [piece] if isinstance(piece, Fault) else read_piece(piece):
            if isinstance(record, Record):
                return record, first_fault
            first_fault = first_fault or record
    return None, first_fault


def read_infos(folder: str | None, base: Path) -> tuple[list[Info], list[Fault]]:
    """The registry files that count, nearest first."""
    if folder is not None:
        given = given_path(folder)
        place = next((place for place in (given, base / given) if is_folder(place)), None)
        if place is None:
            return [], [Fault(f"data.folder is {folder!r}, and there is no such folder", key="data.folder")]
        places = [place]
    else:
        places = [Path("data"), base, base / "data"]
    infos: dict[Path, Info] = {}
    faults: list[Fault] = []
    for place in places:
        path = (place / INFO_FILE).resolve()
        if is_file(path) and path not in infos:
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
        # `"name": {...}` blocks pasted from web pages into an empty file: the meaning is clear.
        text = "{" + text.strip().removesuffix(",") + "}"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = max(1, min(getattr(error, "lineno", 1), len(text.splitlines())))
        shown = next(iter(text.splitlines()[line - 1 : line]), "")
        fix = "look for a missing or superfluous comma, quote or bracket there or just before"
        return Fault(f"{INFO_FILE} is no valid JSON: {error}", file=str(path), line=line, source=shown, fix=fix)
    if not isinstance(entries, dict):
        return Fault(f"{INFO_FILE} must be an object of names", file=str(path), fix='{"name": {"file_name": ...}}')
    return Info(path, entries)


def set_from_info(source: DataSource, info: Info, key: str) -> ResolvedSet | list[Fault]:
    entry = info.entries[source.name]
    line = info.line_of(source.name)

    def fault(what: str, fix: str = "") -> Fault:
        return Fault(f"data set {source.name!r}: {what}", key=key, file=str(info.path), line=line, fix=fix)

    if not isinstance(entry, dict):
        return [fault("its entry must be an object", '{"file_name": "my_data.json"}')]
    faults = [fault(*words) for words in _entry_faults(entry)]
    if faults:
        return faults
    files: tuple[Path, ...] = ()
    if isinstance(entry.get("file_name"), str):
        path = info.path.parent / entry["file_name"]
        if not is_there(path):
            return [fault(f"there is no file {str(path)!r}", "file_name counts from the folder of " + INFO_FILE)]
    else:
        fetched = fetch_set(entry["hf_hub_url"], entry.get("subset"), entry.get("split") or "train")
        if isinstance(fetched, Fault):
            return [fault(fetched.what, fetched.fix)]
        path = fetched
    files = files_of(path)
    if path.is_dir() and (why := why_no_files(path))[0]:
        return [fault(*why)]
    faults = [replace(found, key=key) for file in files if (found := check_file(file)) is not None]
    if faults:
        return faults
    form, notes = _form_of(entry, source.name, files[0])
    limits = [limit for limit in (entry.get("num_samples"), source.max_samples) if limit is not None]
    if entry.get("num_samples") is not None:
        most = f"{source.name}: num_samples {entry['num_samples']} takes the first of its records, each once"
        notes = (*notes, f"{most}; LLaMA-Factory draws them at random, and repeats some where there are fewer")
    return ResolvedSet(source.name, files, form, max_samples=min(limits, default=None), notes=notes)


def _entry_faults(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, fix) for each thing in an entry that is wrong, or that this version cannot do."""
    remote = [option for option in _REMOTE if option in entry]
    is_local = isinstance(entry.get("file_name"), str)
    if not is_local and not isinstance(entry.get("hf_hub_url"), str):
        if remote:
            what = f"{remote[0]} names a data set that duoka does not fetch"
            yield what, "download it and set file_name, or name a Hub data set with hf_hub_url"
        else:
            yield "it names no file", '"file_name": "my_data.json"'
    for option in entry:
        if option not in _OPTIONS and option not in _REMOTE:
            guess = nearest(option, _OPTIONS)
            yield f"unknown option {option!r}", f"did you mean {guess!r}?" if guess else f"known: {', '.join(_OPTIONS)}"
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATS:
        yield f"unknown formatting {formatting!r}", f"known: {', '.join(sorted(FORMATS))}"
    columns = entry.get("columns")
    if entry.get("ranking") and isinstance(columns, dict) and not {"chosen", "rejected"} <= set(columns):
        yield "ranking needs the columns chosen and rejected", '"columns": {"chosen": "...", "rejected": "...", ...}'
    for option in ("split", "subset"):
        if is_local and entry.get(option) not in (None, "train"):
            yield f"{option} {entry[option]!r} means a part of a hub's data set; a file has none", f"remove {option}"
    if not (entry.get("num_samples") is None or (isinstance(entry["num_samples"], int) and entry["num_samples"] > 0)):
        yield f"num_samples is {entry['num_samples']!r}", "write a whole number of at least 1"
    tags = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "observation_tag", "function_tag")
    columns_known = _COLUMNS if formatting == "alpaca" else (*_COLUMNS, "completion")
    for option, known in (("columns", columns_known), ("tags", tags)):
        given = entry.get(option, {})
        if not isinstance(given, dict) or not all(isinstance(word, str) for word in given.values()):
            yield f"{option} must be an object of names", f'"{option}": {{"{known[0]}": "..."}}'
            continue
        if option == "columns" and (media := [name for name in given if name in MEDIA]):
            what = f"it has {' and '.join(media)}, and duoka reads text: pictures, films and sounds are not learned"
            yield what, "take a set of text alone; without what it shows, its text would be learned wrongly"
        for name in given:
            if name not in known and not (option == "columns" and name in MEDIA):
                guess = nearest(name, known)
                yield f"unknown name {name!r} in {option}", f"did you mean {guess!r}?" if guess else f"known: {known}"


def _form_of(entry: dict[str, Any], name: str, first_file: Path) -> tuple[SetFormat, tuple[str, ...]]:
    """Columns as LLaMA-Factory reads them: once `columns` is there, what it does not name is not read."""
    formatting = entry.get("formatting", "alpaca")
    row = FORMATS.get(formatting)
    columns = entry.get("columns")
    if columns is None:
        columns = dict(row.columns)
        if entry.get("ranking"):
            columns = {role: key for role, key in columns.items() if role != "response"}
            columns |= {"chosen": "chosen", "rejected": "rejected"}
    form = SetFormat(formatting, columns, {**row.tags, **entry.get("tags", {})})
    form = kind_of_columns(form, ranking=bool(entry.get("ranking")))
    if "columns" not in entry:
        return form, ()
    record, _ = first_record(first_file)
    keys = record.value if record and isinstance(record.value, dict) else {}
    unread = [key for role, key in row.columns.items() if role not in entry["columns"] and keys.get(key)]
    unread = [key for key in unread if key not in entry["columns"].values()]
    if not unread:
        return form, ()
    note = f"{name}: {', '.join(map(repr, unread))} of its records is not named in columns, so it is not read"
    return form, (note,)
