"""Tasks of the package reasoning-gym: `gym:chain_sum` and a hundred others, drawn from a seed and checked by it.

As of our own drawn tasks, a question's hash says whether it is for training or for testing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from duoka.errors import ConfigError
from duoka.registry import nearest
from duoka.tasks.drawn import SEED, is_for_test
from duoka.tasks.task import Item, Split, Task, ask

GYM = "gym"
SIZES: Mapping[Split, int] = {"train": 2000, "test": 200}
_MOST_DRAWS = 5 * (SIZES["train"] + SIZES["test"])  # some have few questions, and draw them again and again
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
        entries = entries_of(self.dataset)
        try:
            score = float(
                entries.score_answer((tagged[-1] if tagged else answer).strip(), entries[item.facts["place"]])
            )
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


@cache
def drawn_items(dataset: str) -> Mapping[Split, tuple[Item, ...]]:
    entries, seen = entries_of(dataset), set[str]()
    found: dict[Split, list[Item]] = {"train": [], "test": []}
    for place in range(_MOST_DRAWS):
        entry = entries[place]
        question, answer = entry["question"], entry["answer"]
        split: Split = "test" if is_for_test(question) else "train"
        if question in seen or len(found[split]) == SIZES[split]:
            continue
        seen.add(question)
        named = f"{split}-{len(found[split])}"
        found[split].append(Item(named, ask(question), answer or "", facts={"place": place}))
        if all(len(found[one]) == size for one, size in SIZES.items()):
            break
    return {split: tuple(items) for split, items in found.items()}
