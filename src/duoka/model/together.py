"""Answers to prompts of any lengths at once: each row looks at keys and values of its own (slots.py).

A prompt is read once, by itself, for all its answers. Passes that write have a fixed number of rows, used or not, as
torch's products depend in their last bits on how many rows they have, and on nothing else of the other rows: what a row
computes is the same whatever stands beside it.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError

from duoka.model.answer import Answered, alone, answer_rows, window_of, with_cache
from duoka.model.build import LossModel
from duoka.model.experts import find_experts
from duoka.model.own_lengths import find_turn
from duoka.model.slots import Rows, SequenceCache, register_slot_attention
from duoka.model.tiny_copy import SPECIAL, VOCABULARY, build_tiny, tiny_config

WIDTH = 16  # rows of a pass where no step says how many there are
TOLERANCE = 1e-3  # of logits' spread; a right model is off by 1e-6, what is wrong by about as much as they differ
_KNOWN: dict[str, float | None] = {}  # by an architecture's config
_BREAKS = (  # what making a tiny copy of any architecture at all may raise
    RuntimeError, TypeError, AttributeError, LookupError, ValueError, OSError, ImportError, AssertionError,
    ArithmeticError, StrictDataclassError,
)  # fmt: skip
_LENGTH, _READ = 24, 17  # of the trial's text: so much is read at once, the rest token by token


class ChooseRows(Protocol):
    """Chooses a token for each of `rows`, places of those asked: (tokens, their log-probabilities or None)."""

    def __call__(
        self, logits: torch.Tensor, position: int, rows: Sequence[int], /
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def likeliest_of_rows(logits: torch.Tensor, position: int, rows: Sequence[int]) -> tuple[torch.Tensor, None]:
    return logits.float().argmax(-1), None


@torch.no_grad()
def answer_together(
    model: LossModel,
    asked: Sequence[tuple[Sequence[int], int]],
    stop_ids: frozenset[int],
    width: int,
    choose: ChooseRows,
    is_any_going: Callable[[bool], bool] = alone,
) -> list[Answered]:
    """An answer to each (prompt, most tokens), `width` rows a pass; within `with_slots`.

    `is_any_going` as in answer_rows: a rank that has nothing more to say makes empty passes until all are done.
    """
    going = _Going(model, asked, stop_ids, width, choose)
    while is_any_going(going.has_more):
        going.advance()
    return going.found


def answers_by_rows(model: LossModel) -> bool:
    """Whether answers of this model are computed so: on a GPU, torch's attention over all rows at once is faster."""
    return next(model.parameters()).device.type == "cpu" and computes_by_rows(model.core)


def likeliest_answers(
    model: LossModel, asked: Sequence[tuple[Sequence[int], int]], stop_ids: frozenset[int], batch: int
) -> list[Answered]:
    """The likeliest tokens behind each (prompt, most tokens), `batch` rows at once; where rows hang on each other, of
    one length. In order."""
    found: dict[int, Answered] = {}
    by_rows = answers_by_rows(model)
    alike: dict[tuple[int, int], list[int]] = {}
    for place in sorted(range(len(asked)), key=lambda place: (-len(asked[place][0]), place)):
        prompt, room = asked[place]
        alike.setdefault((0, 0) if by_rows else (len(prompt), room), []).append(place)
    for (_, room), places in alike.items():
        for at in range(0, len(places), batch):
            some = places[at : at + batch]
            if by_rows:
                with with_slots(model.core):
                    answers = answer_together(model, [asked[one] for one in some], stop_ids, WIDTH, likeliest_of_rows)
            else:
                with with_cache(model.core):
                    answers = answer_rows(model, [asked[one][0] for one in some], stop_ids, room)
            found |= dict(zip(some, answers, strict=True))
    return [found[place] for place in range(len(asked))]


@contextlib.contextmanager
def with_slots(lm: torch.nn.Module) -> Iterator[None]:
    """Attention over slots in place of the model's own meanwhile."""
    core: Any = lm
    before = core.config._attn_implementation
    core.set_attn_implementation(register_slot_attention())
    try:
        yield
    finally:
        core.set_attn_implementation(before)


def computes_by_rows(lm: torch.nn.Module) -> bool:
    """Whether an architecture's rows do not depend on each other, and mean in pieces what they mean at once: tried on a
    tiny copy, once. Mixtures are left out: how many rows an expert has is up to all of them. And models whose keys are
    turned anew at some length, since the longest row decides how all of a pass are."""
    config: Any = lm.config
    if any(True for _ in find_experts(lm)) or find_turn(config) is not None:
        return False
    off = distance_by_rows(config)
    return off is not None and off < TOLERANCE


def distance_by_rows(config: Any) -> float | None:
    """How far an architecture by rows and in pieces is from what transformers computes at once, of its logits' spread:
    of a tiny copy. None where that cannot be computed."""
    key = config.to_json_string(use_diff=False)
    if key not in _KNOWN:
        _KNOWN[key] = _measure(config)
    return _KNOWN[key]


def _measure(config: Any) -> float | None:
    text = [SPECIAL + (7 * n + 3) % (VOCABULARY - SPECIAL) for n in range(_LENGTH)]
    try:
        tiny: Any = build_tiny(tiny_config(config), register_slot_attention())
        whole, pieces = SequenceCache(_LENGTH), SequenceCache(_LENGTH)
        with torch.no_grad():
            logits = _logits(tiny, text, 0, whole)
            _logits(tiny, text[:_READ], 0, pieces)
            later = torch.cat([_logits(tiny, text[at : at + 1], at, pieces) for at in range(_READ, _LENGTH)])
            tiny.set_attn_implementation(tiny.get_correct_attn_implementation(None))
            wanted = tiny(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    except _BREAKS:
        return None
    spread = float((wanted - wanted.mean(dim=-1, keepdim=True)).norm())
    off = max(float((logits - wanted).norm()), float((later - wanted[_READ:]).norm()))
    return off / max(spread, 1e-6) if math.isfinite(off) else math.inf


def _logits(tiny: Any, tokens: Sequence[int], start: int, cache: SequenceCache) -> torch.Tensor:
    ids, places = torch.tensor([list(tokens)]), torch.arange(start, start + len(tokens))[None]
    out: torch.Tensor = tiny(input_ids=ids, position_ids=places, use_cache=False, slots=Rows((cache,), (start,))).logits
    return out[0]


class _Going:
    """Answers on their way."""

    def __init__(
        self, model: LossModel, asked: Sequence[tuple[Sequence[int], int]], stop_ids: frozenset[int], width: int,
        choose: ChooseRows,
    ) -> None:  # fmt: skip
        window = window_of(model.core)
        self.model, self.stop_ids, self.width, self.choose = model, stop_ids, width, choose
        self.prompts = [tuple(prompt) for prompt, _ in asked]
        self.rooms = [room if window is None else min(room, window - len(prompt)) for prompt, room in asked]
        self.found = [Answered([], False) for _ in asked]
        self._newest = [0] * len(asked)
        self._caches: list[SequenceCache | None] = [None] * len(asked)
        self._position = 0
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            if self.rooms[row] > 0:
                by_prompt.setdefault(prompt, []).append(row)
        self._unread = deque(by_prompt.values())
        self._turn: deque[list[int]] = deque()  # rows that have a token less than others so far

    @property
    def has_more(self) -> bool:
        return bool(self._unread or self._turn or self._active())

    def _active(self) -> list[int]:
        """Rows that go on: all have as many tokens as the furthest."""
        position = self._position
        return [
            row for row, one in enumerate(self.found)
            if self._caches[row] is not None and not one.ended and position + 1 < self.rooms[row]
        ]  # fmt: skip

    def advance(self) -> None:
        """One pass of the model."""
        if self._unread:
            self._read(self._unread.popleft())
            return
        if not self._turn:
            active = self._active()
            self._turn.extend(active[at : at + self.width] for at in range(0, len(active), self.width))
            self._position += bool(active)
        self._write(self._turn.popleft() if self._turn else [])

    def _read(self, rows: Sequence[int]) -> None:
        """A prompt, for the rows that answer it."""
        prompt, first = self.prompts[rows[0]], None
        for row in rows:
            self._caches[row] = own = SequenceCache(len(prompt) + self.rooms[row])
            if first is None:
                first = own
                logits = self._pass([list(prompt)], Rows((own,), (0,)))
            else:
                own.take_over(first, len(prompt))
        self._note(rows, *self.choose(logits.expand(len(rows), -1), 0, rows))

    def _write(self, rows: Sequence[int]) -> None:
        """The next token of some rows; of none, where a rank only keeps others company."""
        starts = [len(self.prompts[row]) + self._position - 1 for row in rows]
        empty = self.width - len(rows)
        slots = Rows((*(self._caches[row] for row in rows), *[None] * empty), (*starts, *[0] * empty))
        logits = self._pass([[self._newest[row]] for row in rows] + [[0]] * empty, slots)
        if rows:
            self._note(rows, *self.choose(logits[: len(rows)], self._position, rows))

    def _pass(self, ids: list[list[int]], slots: Rows) -> torch.Tensor:
        tokens = torch.tensor(ids)
        places = torch.tensor(slots.starts)[:, None] + torch.arange(tokens.shape[1])
        return self.model.look_at_slots(tokens, places, slots)

    def _note(self, rows: Sequence[int], chosen: torch.Tensor, logps: torch.Tensor | None) -> None:
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            one = self.found[row]
            if logps is not None:
                one.logps.append(float(logps[place]))
            self._newest[row] = token
            if token in self.stop_ids:
                self.found[row], self._caches[row] = replace(one, ended=True, stop=token), None
            else:
                one.ids.append(token)
