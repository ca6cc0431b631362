"""A named table of things, and the sentence for a name that is not in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from duoka.errors import ConfigError

T = TypeVar("T")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a misspelled word most likely meant, or None."""
    names = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.6)
    return names[found[0]] if found else None


class Registry(Generic[T]):
    """Names to things of one kind; an unknown name is refused with the nearest and all allowed names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        guess = nearest(name, self._items)
        hint = f"did you mean {guess!r}? " if guess else ""
        raise ConfigError(
            f"there is no {self.kind} named {name!r}", fix=f"{hint}known: {', '.join(sorted(self._items))}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items
