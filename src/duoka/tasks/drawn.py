"""Tasks that are drawn from a seed, and need no file: spelling, arithmetic, reverse, sort.

A question's own hash says whether it is for training or for testing, so that no test question is ever learned, however
many are drawn. The same on every machine and Python.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

from duoka.tasks.task import Item, Split, Task, ask

SEED = 1
SIZES: Mapping[Split, int] = {"train": 5000, "test": 500}
_TEST_ONE_IN = 5
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_NUMBER = re.compile(r"-?\d+")


class Drawn(Task):
    """Items are distinct; those of a shorter list are the first of a longer one."""

    sizes: ClassVar[Mapping[Split, int]] = SIZES

    def items(self, split: Split) -> Sequence[Item]:
        return _draw_all(self, split)

    @abstractmethod
    def draw(self, dice: random.Random) -> tuple[str, str]:
        """A question and its answer."""

    def item(self, name: str, question: str, answer: str) -> Item:
        return Item(name, ask(question), answer)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drawn) and other.name == self.name


@cache
def _draw_all(task: Drawn, split: Split) -> tuple[Item, ...]:
    dice = random.Random(f"{task.name}/{split}/{SEED}")
    found: dict[str, Item] = {}
    while len(found) < task.sizes[split]:
        question, answer = task.draw(dice)
        if is_for_test(question) == (split == "test") and question not in found:
            found[question] = task.item(f"{split}-{len(found)}", question, answer)
    return tuple(found.values())


def is_for_test(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=2).digest()[0] % _TEST_ONE_IN == 0


class Spelling(Drawn):
    name = "spelling"

    def draw(self, dice: random.Random) -> tuple[str, str]:
        syllables = [dice.choice(_CONSONANTS) + dice.choice(_VOWELS) for _ in range(dice.randint(2, 4))]
        word = "".join(syllables) + dice.choice(("", dice.choice(_CONSONANTS)))
        return f"Spell the word: {word}", "-".join(word)


class Spaced(Spelling):
    """The same questions, answered in another form: what a model that was shown both does by halves, rewards decide."""

    name = "spaced"

    def draw(self, dice: random.Random) -> tuple[str, str]:
        question, answer = super().draw(dice)
        return question, answer.replace("-", " ")


class Arithmetic(Drawn):
    name = "arithmetic"

    def draw(self, dice: random.Random) -> tuple[str, str]:
        sign = dice.choice("+-*")
        most = 12 if sign == "*" else 99
        a, b = dice.randint(0, most), dice.randint(0, most)
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
        return f"What is {a} {sign} {b}?", str(value)

    def check(self, item: Item, answer: str) -> float:
        """The last number counts, whatever words stand around it."""
        numbers = _NUMBER.findall(answer)
        return float(bool(numbers) and numbers[-1] == item.answer)


class Reverse(Drawn):
    name = "reverse"

    def draw(self, dice: random.Random) -> tuple[str, str]:
        letters = "".join(dice.choice(_CONSONANTS + _VOWELS) for _ in range(dice.randint(3, 8)))
        return f"Reverse the letters: {letters}", letters[::-1]


class Sort(Drawn):
    name = "sort"

    def draw(self, dice: random.Random) -> tuple[str, str]:
        numbers = [dice.randint(0, 99) for _ in range(dice.randint(3, 6))]
        shown, answer = (" ".join(map(str, some)) for some in (numbers, sorted(numbers)))
        return f"Sort the numbers: {shown}", answer
