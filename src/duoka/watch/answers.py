"""What a run that compares answers logs beside its loss: rewards, margins, how often the better answer is ahead.

report.py shows these where a log has them; a stage that learns tokens has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duoka.watch.chart import Chart
from duoka.watch.columns import number
from duoka.watch.history import History
from duoka.watch.scale import points_of

_SMALL = {"width": 480, "height": 210}


def compares_answers(event: Mapping[str, Any]) -> bool:
    """Whether an evaluation's accuracy is that of answers, not of tokens."""
    return number(event.get("margin")) is not None


def labels_answers(event: Mapping[str, Any]) -> bool:
    """Whether they are good or bad each by itself: stage kto, whose measure is z0."""
    return number(event.get("kl")) is not None and "reward_chosen" in event


def answer_charts(history: History) -> list[Chart]:
    """Of stages that compare answers, and of stage rl, whose loss says nothing of how well it goes."""
    ahead = "Pairs in which the better answer is ahead" if _has_pairs(history) else "Answers on their side of z0"
    rewards = () if _has_pairs(history) else (("good", "reward_chosen"), ("bad", "reward_rejected"))
    charts = [
        Chart("Margin of rewards, better less worse answer", *history.values("margin"), **_SMALL),  # type: ignore[arg-type]
        *(Chart(f"Reward of {side} answers", *history.values(name), **_SMALL) for side, name in rewards),  # type: ignore[arg-type]
        Chart(ahead, *history.values("accuracy"), from_zero=True, **_SMALL),  # type: ignore[arg-type]
        Chart("Mean reward of a step's answers", *history.values("reward"), **_SMALL),  # type: ignore[arg-type]
        Chart("Tokens of an answer", *history.values("answer_tokens"), from_zero=True, **_SMALL),  # type: ignore[arg-type]
    ]
    return [chart for chart in charts if points_of(chart.steps, chart.values)]


def _has_pairs(history: History) -> bool:
    return bool(points_of(*history.values("margin")))


def answer_rows(history: History, arrow: str) -> list[tuple[str, str]]:
    """For the terminal: how both answers have fared."""
    rows, is_paired = [], _has_pairs(history)
    better, worse = ("better ", "worse ") if is_paired else ("good ", "bad ")
    shown = (("margin", ("margin",)), ("rewards", ("reward_chosen", "reward_rejected")), ("reward", ("reward",)))
    for label, names in shown:
        parts = []
        for name in names:
            points = points_of(*history.values(name))
            if points:
                words = {"reward_chosen": better, "reward_rejected": worse}.get(name, "")
                parts.append(f"{words}{points[0].y:.4g} {arrow} {points[-1].y:.4g}")
        rows += [(label, ", ".join(parts))] if parts else []
    ahead = points_of(*history.values("accuracy"))
    if is_paired and ahead:
        rows[0] = ("margin", f"{rows[0][1]}, the better answer ahead in {ahead[-1].y:.1%} of the last step")
    return rows


def eval_sentence(event: Mapping[str, Any]) -> str:
    """One evaluation in a line."""
    loss, accuracy, count = (number(event.get(key)) for key in ("loss", "accuracy", "num_samples"))
    parts = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
    bits = number(event.get("bits_per_byte"))
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    is_of_answers = compares_answers(event)
    if is_of_answers:
        parts.append(f"margin {number(event.get('margin')):.4g}")
    if labels_answers(event):
        parts += [f"z0 {number(event.get('kl')):.4g}"]
        parts += [] if accuracy is None else [f"on their side of it {accuracy:.1%}"]
        return ", ".join([*parts, *([] if count is None else [f"{count:,.0f} answers"])])
    if accuracy is not None:
        parts.append(f"better answer ahead in {accuracy:.1%}" if is_of_answers else f"token accuracy {accuracy:.1%}")
    if count is not None:
        parts.append(f"{count:,.0f} {'pairs' if is_of_answers else 'samples'}")
    return ", ".join(parts)


def accuracy_note(event: Mapping[str, Any]) -> str:
    accuracy = number(event.get("accuracy"))
    if accuracy is None:
        return ""
    what = "pairs" if compares_answers(event) else "answers" if labels_answers(event) else "target tokens"
    return f"{accuracy:.1%} of {what} right"
