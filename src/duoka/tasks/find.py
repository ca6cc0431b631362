"""Names to tasks: `arithmetic`, or `gsm8k:FOLDER` for those whose items stand in files; and a task as a data set.

The registry of data sets asks for `task:NAME`, `duoka eval --tasks` for NAME.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from duoka.config.paths import given_path, is_there
from duoka.errors import ConfigError, DataError
from duoka.registry import nearest
from duoka.runs.cache import cache_folder, make_folder
from duoka.runs.folder import write_text_atomic
from duoka.tasks.core import read_core
from duoka.tasks.drawn import Arithmetic, Drawn, Reverse, Sort, Spaced, Spelling
from duoka.tasks.gym import GYM, find_gym
from duoka.tasks.published import Arc, Gsm8k, HumanEval, Mmlu, Published
from duoka.tasks.stories import Stories
from duoka.tasks.task import Item, Split, Task

PREFIX = "task:"
DRAWN: dict[str, Callable[[], Drawn]] = {
    "spelling": Spelling, "arithmetic": Arithmetic, "reverse": Reverse, "sort": Sort, "spaced": Spaced,
    "stories": Stories,
}  # fmt: skip
PUBLISHED: dict[str, Callable[[Path], Published]] = {
    "gsm8k": Gsm8k, "mmlu": Mmlu, "arc": Arc, "humaneval": HumanEval,
}  # fmt: skip
CORE = "core"


def find_tasks(name: str, base: Path = Path()) -> list[Task]:
    """The task of that name; of a bundle, all of its tasks. Paths are looked up from here, then from `base`."""
    word, colon, path = name.removeprefix(PREFIX).partition(":")
    if word in DRAWN:
        if colon:
            raise ConfigError(f"task {word} is drawn from a seed and takes no path, got {path!r}", fix=f"write {word}")
        return [DRAWN[word]()]
    if word == GYM and path:
        return [find_gym(path)]
    if word not in PUBLISHED and word != CORE:
        known = (*DRAWN, *(f"{one}:PATH" for one in (*PUBLISHED, CORE)), f"{GYM}:NAME")
        guess = nearest(word, (*DRAWN, *PUBLISHED, CORE))
        hint = f"did you mean {guess!r}? " if guess else ""
        raise ConfigError(f"there is no task named {word!r}", fix=f"{hint}known: {', '.join(known)}")
    if not path:
        raise ConfigError(
            f"task {word} reads its items from files, and no path is named", fix=f"write {word}:FOLDER (or a file)"
        )
    given = given_path(path)
    place = next((one.resolve() for one in (given, base / given) if is_there(one)), None)
    if place is None:
        raise ConfigError(f"task {word}: there is no file or folder {path!r}", fix=f"write {word}:FOLDER")
    return read_core(place) if word == CORE else [PUBLISHED[word](place)]


def find_scored(name: str, base: Path = Path()) -> list[Task]:
    """The same, for a score; text to read has none."""
    tasks = find_tasks(name, base)
    if any(task.kind == "text" for task in tasks):
        raise ConfigError(
            f"task {name} is text to read, and has no questions that could be scored",
            fix=f"learn it (stage pretrain):   data: {{train: [{PREFIX}{name.removeprefix(PREFIX)}]}}",
        )
    return tasks


def is_task(name: str) -> bool:
    return name.startswith(PREFIX)


def task_data(name: str, base: Path, split: Split) -> Path:
    """A task's items as conversations, or its texts, one a line, in a file of the cache that its content names."""
    tasks = find_tasks(name, base)
    records: list[dict[str, object]] = [{"text": text} for task in tasks for text in task.texts(split)]
    records += [
        {"messages": messages} for task in tasks for item in task.items(split) if (messages := task.example(item))
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if not lines:
        raise DataError(f"{name} has no {split} items that are conversations", fix="it can be measured: duoka eval RUN")
    text = "\n".join(lines) + "\n"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = make_folder(cache_folder() / "tasks") / f"{tasks[0].name.replace('/', '-')}-{split}-{digest}.jsonl"
    if not path.is_file():
        write_text_atomic(path, text)
    return path


def in_order(task: Task, limit: int | None) -> list[Item]:
    """The test items in an order that has nothing to do with their file's, and of them the first `limit`."""
    items: Sequence[Item] = task.items("test")
    ordered = sorted(items, key=lambda item: hashlib.blake2b(item.id.encode(), digest_size=8).digest())
    return ordered if limit is None else ordered[:limit]
