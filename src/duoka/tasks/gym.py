"""Tasks of the package reasoning-gym: `gym:chain_sum` and a hundred others, drawn from a seed and checked by it.

As of our own drawn tasks, a question's hash says whether it is for training or for testing.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from duoka.errors import ConfigError
from duoka.registry import nearest
from duoka.runs.cache import cache_folder, hold_lock, make_folder
from duoka.runs.folder import write_text_atomic
from duoka.tasks.drawn import SEED, is_for_test
from duoka.tasks.task import Item, Split, Task, ask

GYM = "gym"
Rows = dict[Split, list[tuple[int, str, str]]]  # place among the draws, question, answer
SIZES: Mapping[Split, int] = {"train": 2000, "test": 200}
_MOST_DRAWS = 5 * (SIZES["train"] + SIZES["test"])  # some have few questions, and draw them again and again
SLOW_S = 3.0  # after so long a word is said
_OF_OTHERS = ("composite",)  # made of others, which would have to be named
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# What its checks raise on answers that no program wrote.
_UNREADABLE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError, ArithmeticError, RecursionError,
)  # fmt: skip


class Gym(Task):
    max_new_tokens: ClassVar[int] = 256

    def __init__(self, dataset: str) -> None:
        self.dataset, self.name = dataset, f"{GYM}-{dataset}"

    def items(self, split: Split) -> Sequence[Item]:
        return drawn_items(self.dataset)[split]

    def example(self, item: Item) -> list[dict[str, str]]:
        """Questions that more than one answer solves have none to learn from."""
        return super().example(item) if item.answer else []

    def check(self, item: Item, answer: str) -> float:
        """By the package's own check; of an answer with <answer> tags, what stands between the last of them."""
        tagged = _TAGGED.findall(answer)
        entries, entry = entries_of(self.dataset), entry_of(self.dataset, item.facts["place"])
        try:
            score = float(entries.score_answer((tagged[-1] if tagged else answer).strip(), entry))
        except _UNREADABLE:
            return 0.0
        return min(1.0, max(0.0, score))


def find_gym(dataset: str) -> Gym:
    """Raises ConfigError where the package is not installed, or has no such data set."""
    known = [name for name in _package().factory.DATASETS if name not in _OF_OTHERS]
    if dataset not in known:
        guess = nearest(dataset, known)
        hint = f"did you mean {GYM}:{guess}? " if guess else ""
        raise ConfigError(
            f"reasoning-gym has no data set named {dataset!r}", fix=f"{hint}it has {len(known)}, such as gym:chain_sum"
        )
    return Gym(dataset)


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        what = f"task {GYM} needs the package reasoning-gym, which cannot be imported: {error}"
        raise ConfigError(what, fix="pip install 'duoka[gym]'") from None
    return reasoning_gym


@cache
def entries_of(dataset: str) -> Any:
    return _package().create_dataset(dataset, size=_MOST_DRAWS, seed=SEED)


@lru_cache(maxsize=2 * sum(SIZES.values()))
def entry_of(dataset: str, place: int) -> Any:
    """Some take the package a fifth of a second."""
    return entries_of(dataset)[place]


@cache
def drawn_items(dataset: str) -> Mapping[Split, tuple[Item, ...]]:
    """Drawn by one process of a machine, and kept for the others and for the next time."""
    folder = make_folder(cache_folder() / GYM)
    path = folder / f"{dataset}-{_version()}-{SEED}-{sum(SIZES.values())}.json"
    rows = _read(path)
    if rows is None:
        with hold_lock(path.with_suffix(".lock"), on_wait=lambda: _say(dataset)):
            if (rows := _read(path)) is None:
                rows = _draw(dataset)
                write_text_atomic(path, json.dumps(rows))
    return {
        split: tuple(
            Item(f"{split}-{number}", ask(question), answer, facts={"place": place})
            for number, (place, question, answer) in enumerate(found)
        )
        for split, found in rows.items()
    }


def _read(path: Path) -> Rows | None:
    """None: not there, or damaged."""
    try:
        rows: Rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return rows


def _say(dataset: str) -> None:
    what = f"{GYM}:{dataset}: {sum(SIZES.values())} questions are being drawn, which are kept for the next time"
    print(what, file=sys.stderr, flush=True)


def _draw(dataset: str) -> Rows:
    found: Rows = {"train": [], "test": []}
    seen, begun, is_said = set[str](), time.monotonic(), False
    for place in range(_MOST_DRAWS):
        if not is_said and time.monotonic() - begun > SLOW_S:
            _say(dataset)
            is_said = True
        entry = entry_of(dataset, place)
        question, answer = entry["question"], entry["answer"]
        split: Split = "test" if is_for_test(question) else "train"
        if question in seen or len(found[split]) == SIZES[split]:
            continue
        seen.add(question)
        found[split].append((place, question, answer or ""))
        if all(len(found[one]) == size for one, size in SIZES.items()):
            break
    return found


def _version() -> str:
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
