"""From a symptom in a user's own words to the topic that speaks of it: the one that holds most of the question.

find.py asks here last, when a question is neither a name nor a line of a log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

# Less of a question than this, and any topic would be a guess.
ENOUGH = 0.45
_LATIN = re.compile(r"[a-z0-9%]+(?:[._-][a-z0-9%]+)*")
_CHINESE = re.compile("[\u4e00-\u9fff]+")
_LITTLE = frozenset(
    ("a", "an", "and", "are", "as", "at", "by", "do", "for", "from", "has", "have", "how", "in", "is", "it", "my", "no",
     "not", "of", "on", "or", "the", "to", "what", "when", "why", "with", "怎样", "怎么", "么办", "为什", "什么")
)  # fmt: skip


def split_words(text: str) -> set[str]:
    """Words and numbers in small letters, compound ones in their parts too; of Chinese, every two neighbors."""
    text = text.lower()
    found = {part for word in _LATIN.findall(text) for part in (word, *re.split(r"[._-]", word))}
    pairs = {run[i : i + 2] for run in _CHINESE.findall(text) for i in range(max(1, len(run) - 1))}
    words = {word for word in found if len(word) > 1 or word.isdigit()}
    # "hangs" is "hang".
    return {
        word[:-1] if word.endswith("s") and len(word) > 3 else word for word in words | pairs if word not in _LITTLE
    }


def best_topic(question: str, topics: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The id of the topic that holds most of the question, or None when none holds enough of it."""
    asked = split_words(question)
    bags = _bags(tuple((name, _all_words(topic)) for name, topic in topics.items()))
    if not asked:
        return None
    called_so = [(len(word), name) for name in topics for word in map(str, topics[name].get("names", ()))
                 if len(word) > 2 and _CHINESE.fullmatch(word) and word in question]  # fmt: skip
    if called_so:  # Chinese has no spaces to find a name between
        return max(called_so)[1]
    num_with = {word: sum(word in bag for bag in bags.values()) for word in asked}
    weights = {word: math.log(1 + len(bags) / (0.5 + count)) for word, count in num_with.items()}
    for word in asked:
        if not num_with[word] and _CHINESE.fullmatch(word):
            weights[word] /= 4  # most neighbors that stand nowhere are the end of one word and the start of another

    def share(name: str) -> float:
        # What a topic is called says more than what it mentions.
        called = split_words(" ".join([name, *map(str, topics[name].get("names", ()))]))
        return sum(weight * (1.2 if word in called else 1.0) for word, weight in weights.items() if word in bags[name])

    best = max(bags, key=share)
    return best if share(best) >= ENOUGH * sum(weights.values()) else None


def _all_words(topic: Mapping[str, Any]) -> str:
    texts = [topic[language][part] for language in ("en", "zh") for part in ("title", "text", "wrong")]
    return " ".join([*texts, *map(str, topic.get("names", ()))])


@cache
def _bags(texts: tuple[tuple[str, str], ...]) -> dict[str, set[str]]:
    return {name: split_words(text) for name, text in texts}
