"""CORE, from its published bundle's folder: core.yaml, eval_data/*.jsonl, and eval_meta_data.csv with chance scores.

Plain text without a chat template, a few solved items in front of each question, chosen for each item by itself, so
that no split of the items changes a prompt. The score of a task is centered: 0 is guessing, 1 is all right.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from duoka.errors import DataError
from duoka.tasks.files import read_records, wrong_record
from duoka.tasks.task import Item, Measure, Option, Split, Task

_MEASURES: dict[str, Measure] = {"multiple_choice": "mean", "schema": "mean", "language_modeling": "greedy"}
_ORDER_SEED, _SHOWN_SEED = 1337, 1234


@dataclass(frozen=True)
class _Facts:
    """A task as core.yaml describes it."""

    label: str
    file: Path
    form: str
    num_shown: int
    delimiter: str
    chance: float


class CoreTask(Task):
    """One of the bundle's tasks."""

    kind = "choice"

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        self.name = f"core/{facts.label}"
        self.measure = _MEASURES[facts.form]
        self.chance = facts.chance

    def items(self, split: Split) -> Sequence[Item]:
        return () if split == "train" else _read_items(self.facts)


def read_core(folder: Path) -> list[Task]:
    """All tasks of a bundle."""
    try:
        listed = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with (folder / "eval_meta_data.csv").open(encoding="utf-8", newline="") as file:
            chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
        return [CoreTask(_facts_of(one, folder, chances)) for one in listed]
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{folder} is no CORE bundle: {type(error).__name__} {error}",
            fix="name the unpacked folder with core.yaml, eval_meta_data.csv and eval_data",
        ) from None


def _facts_of(one: Mapping[str, Any], folder: Path, chances: Mapping[str, float]) -> _Facts:
    form = one["icl_task_type"]
    if form not in _MEASURES:
        raise ValueError(f"{one['label']} is of type {form}, and {', '.join(_MEASURES)} are known")
    shown = one["num_fewshot"]
    num_shown = shown[0] if isinstance(shown, list) else shown
    delimiter = one.get("continuation_delimiter", " ")
    return _Facts(
        one["label"],
        folder / "eval_data" / one["dataset_uri"],
        form,
        num_shown,
        delimiter,
        chances.get(one["label"], 0.0),
    )


@cache
def _read_items(facts: _Facts) -> tuple[Item, ...]:
    try:
        records = list(read_records(facts.file))
    except OSError as error:
        raise DataError(f"{facts.file} cannot be read: {error.strerror or error}") from None
    random.Random(_ORDER_SEED).shuffle(records)
    try:
        return tuple(_item(facts, records, place) for place in range(len(records)))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise wrong_record(f"core/{facts.label}", facts.file, error) from None


def _item(facts: _Facts, records: list[dict[str, Any]], place: int) -> Item:
    others = [number for number in range(len(records)) if number != place]
    chosen = random.Random(_SHOWN_SEED + place).sample(others, facts.num_shown) if facts.num_shown else []
    shown = "".join("".join(_parts(facts, records[number])) + "\n\n" for number in chosen)
    record, delimiter = records[place], facts.delimiter
    if facts.form == "language_modeling":
        before = (shown + record["context"].strip() + delimiter).strip()
        whole = shown + "".join(_parts(facts, record))
        return Item(str(place), answer="0", options=(Option("0", whole[len(before) :], before),))
    if facts.form == "schema":
        texts = [(shown + context + delimiter, record["continuation"]) for context in record["context_options"]]
    else:
        texts = [(shown + record["query"] + delimiter, choice) for choice in record["choices"]]
    options = tuple(Option(str(number), text, before) for number, (before, text) in enumerate(texts))
    return Item(str(place), answer=str(record["gold"]), options=options)


def _parts(facts: _Facts, record: Mapping[str, Any]) -> tuple[str, str, str]:
    """A solved item: what is asked, the delimiter, and the right answer."""
    if facts.form == "language_modeling":
        return record["context"].strip(), facts.delimiter, record["continuation"]
    if facts.form == "schema":
        return record["context_options"][record["gold"]], facts.delimiter, record["continuation"]
    return record["query"], facts.delimiter, record["choices"][record["gold"]]
