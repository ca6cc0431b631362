"""Small stories drawn from a seed: text to read for a model that knows no word yet, and no question.

Few words and plain sentences, so that a model of a few million parameters writes such stories after minutes on a CPU.
What happens hangs together (who wished for what, who helped), and there are more stories than are ever drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from duoka.tasks.drawn import Drawn
from duoka.tasks.task import Item, Split

_NAMES = {"he": ("Tom", "Ben", "Leo", "Max", "Sam", "Tim"), "she": ("Mia", "Anna", "Lily", "Lin", "Rosa", "Eva")}
_HIS = {"he": ("his", "him"), "she": ("her", "her")}
_WHO = ("dog", "cat", "bird", "fox", "rabbit", "frog", "bear", "duck", "mouse", "owl")
_HOW = ("a small", "a brave", "a kind", "a clever", "a quiet", "an old", "a young", "a funny")
_WHERE = ("by the river", "in the forest", "on a hill", "near the sea", "in a little town", "behind the garden")
_THINGS = ("a red ball", "a blue kite", "a warm coat", "a shiny stone", "a sweet apple", "a long rope", "a green hat")
_LOST = (
    "the wind took it away", "it fell into the water", "it was high up in a tree", "it was too heavy to carry",
    "it was hidden under the leaves",
)  # fmt: skip
_FELT = ("sad", "tired", "worried", "cold", "alone")
_PLANS = ("climb up", "swim across", "wait for the sun", "ask for help", "try again and again", "build a small bridge")
_ENDS = ("They ate bread and honey", "They sang a song", "They laughed for a long time", "They slept under the stars")
_TIMES = ("One morning", "One day", "In the evening", "After the rain")


class Stories(Drawn):
    """Every item is a text of some fifty words."""

    name = "stories"
    kind = "text"
    sizes: ClassVar[dict[Split, int]] = {"train": 4000, "test": 100}

    def draw(self, dice: random.Random) -> tuple[str, str]:
        pick = dice.choice
        (first, helper), (who, friend) = dice.sample(("he", "she"), 2), dice.sample(_WHO, 2)
        name, other = pick(_NAMES[first]), pick(_NAMES[helper])
        his, him = _HIS[first]
        how, thing, felt = pick(_HOW), pick(_THINGS), pick(_FELT)
        short = thing.partition(" ")[2]
        said = [
            f"Once there was {how} {who} called {name}, who lived {pick(_WHERE)}.",
            f"{name} wished for {thing} more than for anything else.",
            f"{pick(_TIMES)} {first} saw {thing}, but {pick(_LOST)}.",
            pick((f"{name} was very {felt}.", f"{first.title()} sat down and felt {felt}.")),
            f"Then {other} the {friend} came and asked: What is wrong?",
            f"I want the {short}, said {name}.",
            f"{pick((f'Do not be {felt}', 'I know what to do', 'Come with me'))}, said {other}. Let us {pick(_PLANS)}.",
            pick((f"So they did, and soon {name} had the {short}.", f"So {other} helped {him}, and {name} had the "
                  f"{short} in {his} hands.")),
            f"{pick(_ENDS)}, and {name} and {other} were friends from that day on.",
        ]  # fmt: skip
        return " ".join(said), ""

    def item(self, name: str, question: str, answer: str) -> Item:
        return Item(name, facts={"text": question})

    def texts(self, split: Split) -> Sequence[str]:
        return [item.facts["text"] for item in self.items(split)]
