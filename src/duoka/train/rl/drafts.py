"""Answers that are being drawn: one turn after another, where the model calls tools and goes on with what they answer.

What a tool answers stands in the answer as the chat template writes it, and is nothing that the model drew: it is read
and not learned. No token that was drawn is encoded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.data.tokens.template import tool_turn
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.tasks.tool_calls import split_calls
from duoka.tasks.tool_pool import ToolPool
from duoka.tasks.tools import arguments_of
from duoka.train.rl.rollouts import Rollout


@dataclass
class Draft:
    """An answer so far. `own`: which of its ids the model drew."""

    prompt: int
    sample: int
    asked: tuple[int, ...]  # the prompt
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0  # of calls
    text: str = ""  # of its last turn
    said: str = ""  # the same with its control tokens
    ended: bool = False
    version: str | None = None  # of an engine's weights

    @property
    def read(self) -> tuple[int, ...]:
        """What the model reads before it goes on."""
        return (*self.asked, *self.ids)

    def add(self, ids: Sequence[int], stop: int | None, logps: Sequence[float], tokenizer: ChatTokenizer) -> None:
        """A turn that was drawn; `stop` ended it, and is not among `ids`."""
        whole = [*ids, *(() if stop is None else (stop,))]
        self.ids += whole
        self.own += [True] * len(whole)
        self.drawn += logps
        self.text = tokenizer.backend.decode(list(ids), skip_special_tokens=True)
        self.said = tokenizer.decode(list(ids))
        self.ended = stop is not None

    def rollout(self, question: str, *, has_tools: bool) -> Rollout:
        more: dict[str, Any] = {"own": tuple(self.own), "calls": tuple(self.calls)} if has_tools else {}
        return Rollout(
            self.prompt, self.sample, question, self.asked, tuple(self.ids), self.ended, self.text,
            tuple(self.drawn), version=self.version, **more,
        )  # fmt: skip


@dataclass
class ToolTurns:
    """`rounds`: how often an answer may call."""

    pool: ToolPool
    rounds: int
    tokenizer: ChatTokenizer

    def answer(self, drafts: Sequence[Draft], room: Callable[[Draft], int], alive: Callable[[], None]) -> list[Draft]:
        """Those of the drafts that called tools and go on with what these answered."""
        asked = [(one, split_calls(one.said)[1]) for one in drafts if one.ended and one.rounds < self.rounds]
        answers = iter(self.pool.answer([call for _, calls in asked for call in calls], alive))
        going = []
        for one, calls in asked:
            said = [next(answers) for _ in calls]
            for call, text in zip(calls, said, strict=True):
                one.calls.append({"name": call["function"]["name"], "arguments": arguments_of(call), "answer": text})
            if not calls:
                continue
            names = [call["function"]["name"] for call in calls]
            ids = tool_turn(said, self.pool.schemas, self.tokenizer, names)
            if len(ids) >= room(one):  # nothing could be said after it: the answer is cut here
                one.ended = False
                continue
            one.ids += ids
            one.own += [False] * len(ids)
            one.rounds, one.ended = one.rounds + 1, False
            going.append(one)
        return going
