"""Published tasks from files on this machine, in the formats that they are published in: GSM8K, MMLU, ARC, HumanEval.

Nothing is fetched. Questions are put as nanochat puts them: the letter of a choice comes after its text, as the
first thing to say.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from duoka.errors import DataError
from duoka.tasks.files import find_files, read_records, words_of, wrong_record
from duoka.tasks.run_code import passes
from duoka.tasks.task import Item, Option, Split, Task, ask

_LETTERS = "ABCDEFGHIJ"
_MARKED = re.compile(r"####\s*(-?[\d,.]*\d)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATOR = re.compile(r"<<[^>]*>>")
_FENCE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


class Published(Task):
    """A task whose items stand in files; `splits` names the words by which each split's files are known."""

    splits: ClassVar[Mapping[Split, tuple[str, ...]]] = {"train": ("train",), "test": ("test",)}

    def __init__(self, place: Path) -> None:
        self.place = place

    def items(self, split: Split) -> Sequence[Item]:
        return _read_items(type(self), self.place, split)

    @classmethod
    @abstractmethod
    def read(cls, record: Mapping[str, Any], number: int, source: str) -> Item:
        """An item of a record; KeyError, TypeError, ValueError or IndexError when it is none."""


@cache
def _read_items(kind: type[Published], place: Path, split: Split) -> tuple[Item, ...]:
    found: list[Item] = []
    words = kind.splits.get(split, ())
    for path in _files_of(kind, place, split):
        try:
            found += (kind.read(record, len(found), path.stem) for record in read_records(path))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise wrong_record(kind.name, path, error) from None
    if words and not found and split == "test":
        wanted = " or ".join(words)
        raise DataError(
            f"task {kind.name} finds no file of its test items in {place}",
            fix=f"name a file, or a folder with one whose name has {wanted} (.jsonl, .parquet, .csv)",
        )
    ids = [item.id for item in found]
    return tuple(found if len(set(ids)) == len(ids) else _numbered(found))


def _files_of(kind: type[Published], place: Path, split: Split) -> Sequence[Path]:
    """A file that is named itself is for training when its name says so, and else for testing: never for both."""
    if place.is_file():
        is_train = bool(set(kind.splits.get("train", ())) & set(words_of(Path(place.name))))
        return [place] if is_train == (split == "train") else []
    return find_files(place, kind.splits.get(split, ()))


def _numbered(items: Sequence[Item]) -> Iterator[Item]:
    return (replace(item, id=f"{item.id}#{place}") for place, item in enumerate(items))


class Gsm8k(Published):
    """`{"question", "answer"}`, the answer ending in `#### 42`."""

    name = "gsm8k"
    max_new_tokens = 512

    @classmethod
    def read(cls, record: Mapping[str, Any], number: int, source: str) -> Item:
        answer = _CALCULATOR.sub("", record["answer"])
        value = last_number(answer)
        if value is None or "####" not in answer:
            raise ValueError(f"record {number + 1} has no answer behind ####")
        return Item(f"{source}-{number}", ask(record["question"]), answer, facts={"value": value})

    def check(self, item: Item, answer: str) -> float:
        """The number behind the last ####, where there is one, else the last number of all."""
        return float(last_number(answer) == item.facts["value"])


def last_number(text: str) -> str | None:
    marked = _MARKED.findall(text)
    found = marked or _NUMBER.findall(text)
    if not found:
        return None
    whole, _, part = found[-1].replace(",", "").rstrip(".").partition(".")
    return whole if not part.strip("0") else f"{whole}.{part.rstrip('0')}"


class Choice(Published):
    """A question with lettered answers."""

    kind = "choice"

    @staticmethod
    def item(id: str, question: str, choices: Sequence[str], right: int, letters: Sequence[str] = _LETTERS) -> Item:
        shown = "".join(f"- {choice}={letter}\n" for choice, letter in zip(choices, letters, strict=False))
        text = f"Multiple Choice question: {question}\n{shown}\nRespond only with the letter of the correct answer."
        own = letters[: len(choices)]
        return Item(id, ask(text), own[right], tuple(Option(letter, letter) for letter in own))


class Mmlu(Choice):
    """`{"question", "subject", "choices", "answer": 0}`; or the first release's CSV: question, four answers, letter."""

    name = "mmlu"
    chance = 0.25
    splits: ClassVar = {"train": ("train", "auxiliary"), "test": ("test",)}

    @classmethod
    def read(cls, record: Mapping[str, Any], number: int, source: str) -> Item:
        if "row" in record:
            question, *choices, letter = record["row"]
            return cls.item(f"{source}-{number}", question, choices, _LETTERS.index(letter.strip()))
        record = record.get("train", record)  # how one Parquet release nests its auxiliary part
        subject = record.get("subject") or source
        return cls.item(f"{subject}-{number}", record["question"], record["choices"], int(record["answer"]))


class Arc(Choice):
    """`{"id", "question", "choices": {"text", "label"}, "answerKey"}`, or the first release's nested question."""

    name = "arc"
    chance = 0.25

    @classmethod
    def read(cls, record: Mapping[str, Any], number: int, source: str) -> Item:
        question, choices = record["question"], record.get("choices") or ()
        if isinstance(question, Mapping):
            question, choices = question["stem"], question["choices"]
        if isinstance(choices, Mapping):
            texts, labels = list(choices["text"]), list(choices["label"])
        else:
            texts, labels = [one["text"] for one in choices], [one["label"] for one in choices]
        return cls.item(str(record.get("id", number)), question, texts, labels.index(record["answerKey"]), labels)


class HumanEval(Published):
    """`{"task_id", "prompt", "canonical_solution", "test", "entry_point"}`; checked by running the program."""

    name = "humaneval"
    max_new_tokens = 512
    runs_code = True
    splits: ClassVar = {"test": ("humaneval", "test")}

    @classmethod
    def read(cls, record: Mapping[str, Any], number: int, source: str) -> Item:
        facts = {name: record[name] for name in ("prompt", "test", "entry_point")}
        answer = record["prompt"] + record["canonical_solution"]
        return Item(record["task_id"], ask(record["prompt"]), answer, facts=facts)

    def check(self, item: Item, answer: str) -> float:
        """Whether the program, with the imports of the question above it, passes the published tests in time."""
        fenced = _FENCE.search(answer)
        code = fenced.group(1) if fenced else answer
        prompt = item.facts["prompt"]
        imports = "\n".join(line for line in prompt.splitlines() if line.startswith(("import ", "from ")))
        if f"def {item.facts['entry_point']}" not in code:
            code = prompt + code  # only the body was written
        return float(passes(f"{imports}\n\n{code}\n\n{item.facts['test']}\n\ncheck({item.facts['entry_point']})\n"))
