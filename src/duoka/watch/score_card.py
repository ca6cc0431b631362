"""The report card of several runs: one table, a column for each, as Markdown, JSON and a page.

Rows are what the runs' own files say: evaluation losses and rewards of the event logs, scores of tasks with their
standard error; below them what the models answered to the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder, write_json_atomic, write_text_atomic
from duoka.units import format_count, format_seconds
from duoka.watch.history import read_history
from duoka.watch.page import page

Score = Mapping[str, Any]
_ENDS = 5  # steps at either end that a run's rewards are the mean of


def write_card(
    root: Path,
    folders: Mapping[str, Path],
    results: Sequence[Mapping[str, Mapping[str, Score]]],
    answers: Sequence[Mapping[str, Mapping[str, str]]] = (),
) -> list[str]:
    """Write the card as Markdown, JSON and a page; its lines.

    `results`: of each evaluation, by run and task; `answers`: of each chat, by run and question.
    """
    facts = {name: _facts_of(RunFolder(folder)) for name, folder in folders.items()}
    for result in results:
        for name, scores in result.items():
            facts.setdefault(name, {"tasks": {}})["tasks"].update(scores)
    for chat in answers:
        for name, replies in chat.items():
            facts.setdefault(name, {"tasks": {}}).setdefault("answers", {}).update(replies)
    facts = {name: one for name, one in facts.items() if one.get("steps") or one["tasks"] or one.get("answers")}
    if not facts:
        return []
    rows, said = _rows(facts), _answers(facts)
    lines = _markdown([["", *facts], *rows]) if rows else []
    if said:
        shown = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in said]
        lines += [*([""] if lines else []), *_markdown([["asked", *_answering(facts)], *shown])]
    write_json_atomic(root / "card.json", facts)
    write_text_atomic(root / "card.md", "\n".join(lines) + "\n")
    write_text_atomic(root / "card.html", page(f"{root.name} · duoka", _html(root.name, facts, rows, said)))
    return lines


def _facts_of(run: RunFolder) -> dict[str, Any]:
    if not run.exists():
        return {"tasks": {}}
    history = read_history(run)
    evals = [event for event in history.evals if isinstance(event.get("loss"), (int, float))]
    losses = [step.loss for step in history.steps if step.loss is not None]
    return {
        "steps": history.steps[-1].step if history.steps else 0,
        "tokens": sum(step.num_tokens or 0 for step in history.steps),
        "train_loss": losses[-1] if losses else None,
        "eval_loss": float(evals[-1]["loss"]) if evals else None,
        "seconds": round(history.total_s(), 1),
        "rewards": _rewards([value for value in history.steps.column("reward") if not math.isnan(value)]),
        "tasks": {},
    }


def _rewards(values: Sequence[float]) -> list[float] | None:
    """Of a run that learned from rewards: mean reward of the first answers, and of the last ones."""
    first, last = values[:_ENDS], values[-_ENDS:]
    return [round(sum(some) / len(some), 6) for some in (first, last)] if values else None


def _answering(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, one in facts.items() if one.get("answers")]


def _answers(facts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each question, what each model said beside it."""
    names = _answering(facts)
    questions = dict.fromkeys(question for name in names for question in facts[name]["answers"])
    return [[question, *(facts[name]["answers"].get(question, "") for name in names)] for question in questions]


def _rows(facts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    def shown(name: str, write: Any) -> list[str]:
        return [write(one[name]) if one.get(name) is not None else "" for one in facts.values()]

    rows = [
        ["steps", *shown("steps", lambda value: f"{value:,}")],
        ["tokens", *shown("tokens", format_count)],
        ["time in steps", *shown("seconds", format_seconds)],
        ["training loss", *shown("train_loss", lambda value: f"{value:.4f}")],
        ["evaluation loss", *shown("eval_loss", lambda value: f"{value:.4f}")],
        ["mean reward, first and last", *shown("rewards", lambda ends: f"{ends[0]:.3f} to {ends[1]:.3f}")],
    ]
    tasks = dict.fromkeys(task for one in facts.values() for task in one["tasks"])
    for task in tasks:
        scores = [one["tasks"].get(task) for one in facts.values()]
        rows.append([task, *(_score(one) if one else "" for one in scores)])
    return [row for row in rows if any(row[1:])]


def _score(one: Score) -> str:
    return f"{one['score']:.1%} ± {one['se']:.1%} (n {one['n']})"


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(3, *(len(row[column]) for row in table)) for column in range(len(table[0]))]
    padded = [[f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in table]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _html(
    title: str, facts: Mapping[str, Any], rows: Sequence[Sequence[str]], said: Sequence[Sequence[str]]
) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield _table(["", *facts], rows)
    if said:
        yield _table(["asked", *_answering(facts)], said)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<section class="card wide"><table><tr>{head}</tr>{body}</table></section>'
