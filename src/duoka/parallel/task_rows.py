"""A task's items as rows of token ids, and the rows' results as items again: pure functions, the same on every rank.

A question to answer is a row; of a choice each option is one. task_score.py computes the rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from duoka.data.read.example import BadRecord, Message
from duoka.data.tokens.template import encode_prompt, render_prompt
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import DataError
from duoka.tasks.task import Item, Option, Task

_MOST_ALIKE = 4  # times `batch` rows: the keys of each are gathered, however much is computed once


@dataclass(frozen=True)
class Row:
    """`ids` up to `start` are given; what follows is scored, or, with nothing behind it, generated."""

    item: int
    option: int
    ids: tuple[int, ...]
    start: int
    is_cut: bool = False  # the beginning of it does not fit into the model's window

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ids[: self.start]

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.ids[self.start :]

    @property
    def read(self) -> tuple[int, ...]:
        """What a model reads to score it: nothing is asked behind the last token."""
        return self.ids[:-1]


@dataclass(frozen=True)
class Scored:
    """One item's line of the file. No number of it depends on how the work was shared."""

    id: str
    answer: str
    score: float
    is_cut: bool
    is_unfinished: bool = False  # max_new_tokens came before the answer's end

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class TaskScore:
    """The score of a task: `se` is the standard error of the mean, `centered` is 0 for guessing and 1 for all right."""

    task: str
    kind: str
    n: int
    score: float
    se: float
    chance: float
    centered: float
    num_cut: int
    num_unfinished: int

    def sentence(self) -> str:
        notes = [f"{self.num_cut} cut to the model's window"] if self.num_cut else []
        notes += [f"{self.num_unfinished} unfinished"] if self.num_unfinished else []
        said = f"; {', '.join(notes)}" if notes else ""
        return f"{self.task} {self.score:.1%} ± {self.se:.1%} (n {self.n}{said})"


@dataclass(frozen=True)
class Prompts:
    """A task made ready for one tokenizer: its items, and the rows that a model computes for them."""

    task: Task
    items: tuple[Item, ...]
    rows: tuple[Row, ...]
    max_new_tokens: int
    tokenizer: ChatTokenizer

    @property
    def digest(self) -> str:
        """Of all that the model is asked, before any template."""
        facts = [(item.id, item.question, item.answer, [asdict(one) for one in item.options]) for item in self.items]
        return hashlib.blake2b(json.dumps(facts, ensure_ascii=False).encode(), digest_size=8).hexdigest()

    @property
    def generates(self) -> bool:
        """Rows are answered, not scored; of a greedy measure as many tokens as are wanted."""
        return self.task.kind == "generate" or self.task.measure == "greedy"

    def num_new(self, row: Row) -> int:
        return len(row.wanted) or self.max_new_tokens

    def groups(self, batch: int, *, mixed: bool = False, shared: bool = False) -> list[list[int]]:
        """Places of rows that are computed at once, the longest first. Those that generate are of one length, unless
        they may be `mixed`; of `shared` ones what they begin with is computed once.

        Nothing but the rows and `batch` decides, so that any number of processes computes the same groups.
        """
        if mixed or not self.generates:
            return group_rows(self.rows, batch, shared=shared and not self.generates)
        alike: dict[tuple[int, int], list[int]] = {}
        for place in _longest_first(self.rows):
            row = self.rows[place]
            alike.setdefault((row.start, self.num_new(row)), []).append(place)
        return [some[at : at + batch] for some in alike.values() for at in range(0, len(some), batch)]


def _longest_first(rows: Sequence[Row]) -> list[int]:
    return sorted(range(len(rows)), key=lambda place: (-len(rows[place].ids), place))


def group_rows(rows: Sequence[Row], batch: int, *, shared: bool) -> list[list[int]]:
    """`batch` rows at once, the longest first; of `shared` ones, those that begin alike side by side, as many as
    compute no more tokens than `batch` of the longest alone."""
    if not shared:
        places = _longest_first(rows)
        return [places[at : at + batch] for at in range(0, len(places), batch)]
    order = sorted(range(len(rows)), key=lambda place: (rows[place].read, place))
    most = batch * max((len(row.read) for row in rows), default=0)
    groups: list[list[int]] = []
    sizes: list[int] = []
    for place, before in zip(order, [None, *order], strict=False):
        ids = rows[place].read
        own = len(ids) - (0 if before is None else _common((rows[before].read, ids)))
        if not groups or sizes[-1] + own > most or len(groups[-1]) == _MOST_ALIKE * batch:
            groups.append([])
            sizes.append(0)
            own = len(ids)
        groups[-1].append(place)
        sizes[-1] += own
    return [group for _, group in sorted(zip(sizes, groups, strict=True), key=lambda one: (-one[0], one[1]))]


def make_prompts(
    task: Task, items: Sequence[Item], tokenizer: ChatTokenizer, window: int | None, max_new_tokens: int | None = None
) -> Prompts:
    """Raises DataError when the chat template cannot put a question."""
    most_new = max_new_tokens or task.max_new_tokens
    if window is not None and task.kind == "generate" and most_new >= window:
        most_new = max(1, window // 2)
    rows: list[Row] = []
    for place, item in enumerate(items):
        if task.kind == "generate":
            ids = _question_ids(item, tokenizer)
            rows.append(fit_row(Row(place, 0, tuple(ids), len(ids)), window, most_new))
        else:
            rows += [fit_row(row, window, 0) for row in _option_rows(place, item, tokenizer)]
    return Prompts(task, tuple(items), tuple(rows), most_new, tokenizer)


def fit_row(row: Row, window: int | None, room: int) -> Row:
    """What fits into the model's window with `room` tokens behind it: the beginning of the prompt is cut."""
    excess = 0 if window is None else len(row.ids) + room - window
    if excess <= 0:
        return row
    start = max(1, row.start - excess)
    return Row(row.item, row.option, row.ids[row.start - start :], start, is_cut=True)


def _question_ids(item: Item, tokenizer: ChatTokenizer) -> list[int]:
    try:
        text, cuts = render_prompt(tuple(Message(role, said) for role, said in item.question), None, tokenizer)
        return encode_prompt(text, cuts, tokenizer)
    except BadRecord as error:
        raise DataError(f"item {item.id} cannot be asked: {error.rule}", fix=error.fix or None) from None


def _option_rows(place: int, item: Item, tokenizer: ChatTokenizer) -> list[Row]:
    if item.options[0].before is None:
        asked = _question_ids(item, tokenizer)
        said = [tokenizer.encode(option.text)[0] for option in item.options]
        return [Row(place, number, (*asked, *ids), len(asked)) for number, ids in enumerate(said)]
    whole = [_text_ids(f"{option.before}{option.text}", tokenizer) for option in item.options]
    starts = _starts(item.options, whole, tokenizer)
    return [Row(place, number, ids, start) for number, (ids, start) in enumerate(zip(whole, starts, strict=True))]


def _text_ids(text: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = tokenizer.encode(text)[0]
    return tuple(ids if ids[:1] == begin else [*begin, *ids])


def _starts(options: Sequence[Option], whole: Sequence[tuple[int, ...]], tokenizer: ChatTokenizer) -> list[int]:
    """Where each option's own tokens begin: after what all have in common, or, of one text behind several, before it.

    Text and continuation are tokenized together: apart, the border would give tokens that no text has.
    """
    if len({option.before for option in options}) > 1:
        shared = _common([ids[::-1] for ids in whole])
        return [max(1, len(ids) - shared) for ids in whole]
    others = [_text_ids(str(options[0].before), tokenizer)] if len(options) == 1 else []
    start = _common([*whole, *others])
    return [max(1, min(start, len(ids) - 1)) for ids in whole]


def _common(sequences: Sequence[Sequence[int]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False)))


def score_items(prompts: Prompts, results: Sequence[Any]) -> list[Scored]:
    """Every item with its answer and score; `results` are the rows' own (task_score.py)."""
    of_items: dict[int, list[tuple[Row, Any]]] = {}
    for row, result in zip(prompts.rows, results, strict=True):
        of_items.setdefault(row.item, []).append((row, result))
    return [_score_item(prompts, item, of_items[place]) for place, item in enumerate(prompts.items)]


def _score_item(prompts: Prompts, item: Item, rows: Sequence[tuple[Row, Any]]) -> Scored:
    task, is_cut = prompts.task, any(row.is_cut for row, _ in rows)
    if task.kind == "generate":
        ((_, result),) = rows
        answer = prompts.tokenizer.backend.decode(result["ids"], skip_special_tokens=True)
        return Scored(item.id, answer, task.check(item, answer), is_cut, not result["ended"])
    if task.measure == "greedy":
        ((row, result),) = rows
        answer = prompts.tokenizer.decode(result["ids"])
        return Scored(item.id, answer, float(tuple(result["ids"]) == row.wanted), is_cut)
    values = [result["logp"] / (len(row.wanted) if task.measure == "mean" else 1) for row, result in rows]
    label = item.options[values.index(max(values))].label
    return Scored(item.id, label, task.check(item, label), is_cut)


def summarize(task: Task, scored: Sequence[Scored]) -> TaskScore:
    count = len(scored)
    mean = math.fsum(one.score for one in scored) / max(1, count)
    spread = math.fsum((one.score - mean) ** 2 for one in scored)
    se = math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0
    return TaskScore(
        task.name, task.kind, count, round(mean, 6), round(se, 6), task.chance,
        round((mean - task.chance) / (1 - task.chance), 6), sum(one.is_cut for one in scored),
        sum(one.is_unfinished for one in scored),
    )  # fmt: skip
