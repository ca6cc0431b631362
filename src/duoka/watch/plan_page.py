"""A plan as one HTML page: bars of memory against the card, seconds of a step, layouts, changes. No script.

`duoka plan --html FILE` writes it; the frame is that of the report page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from duoka.plan.recompute import in_words
from duoka.plan.report import Plan
from duoka.units import format_bytes, format_count, format_seconds
from duoka.watch.page import card, facts_table, figure, grid_table, page

_COLOURS = {
    "weights": "#2f6bde", "gradients": "#1e40af", "optimizer": "#0d9488", "activations": "#d97706", "loss": "#dc2626",
    "casts": "#7c9fe8", "gathered": "#a855f7", "working": "#94a3b8", "framework": "#cbd5e1",
    "embedding": "#f59e0b",
    "matrix products": "#2f6bde", "attention": "#1e40af", "memory traffic": "#0d9488", "exchange": "#d97706",
    "pipeline bubble": "#a855f7", "per micro-batch": "#dc2626",
}  # fmt: skip
_BADGES = {"fits": "done", "tight": "", "does not fit": "failed"}


def plan_page(plan: Plan) -> str:
    shape = plan.work.shape
    title = f"{plan.layout.name} on {plan.cluster.name}"
    badge = f'<span class="badge {_BADGES[plan.verdict]}">{plan.verdict}</span>'
    under = f"{shape.model_type}, {format_count(shape.num_parameters)} parameters · {plan.batch.sentence()}"
    body = [f"<h1>{escape(title)}{badge}</h1>", f'<p class="under">{escape(under)}</p>', '<div class="grid">']
    body += _figures(plan)
    have = plan.available_bytes
    body.append(card(f"Memory of a rank at its peak, against {format_bytes(have)}", _memory(plan)))
    body.append(card("Where a step's time goes", _stack(plan.speed.parts, plan.speed.step_s, format_seconds)))
    body.append(card("What was planned", facts_table(_facts(plan))))
    body += [_layouts(plan), _changes(plan), _formulas(plan), _notes(plan), "</div>"]
    body.append("<footer>Estimates, with their ranges; no device was used. Written by duoka plan.</footer>")
    return page(f"plan: {title}", [text for text in body if text])


def _figures(plan: Plan) -> list[str]:
    speed, memory, costs = plan.speed, plan.memory, plan.costs
    spread = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
    out = [
        figure("Peak memory per rank", format_bytes(memory.peak_bytes), spread),
        figure(
            "Step", format_seconds(speed.step_s), f"{format_seconds(speed.low_s)} to {format_seconds(speed.high_s)}"
        ),
        figure("Tokens per second", f"{speed.tokens_per_s:,.0f}", f"MFU {speed.mfu:.1%}"),
    ]
    if costs.total_s is not None and costs.device_hours is not None:
        money = f"{costs.price:,.2f} at the price given" if costs.price is not None else ""
        note = f"{costs.device_hours:,.1f} device-hours {money}"
        out.append(figure("The whole run", format_seconds(costs.total_s), note))
    else:
        out.append(
            figure("Checkpoint", format_bytes(costs.checkpoint_bytes), f"{format_seconds(costs.checkpoint_s)} to write")
        )
    return out


def _memory(plan: Plan) -> str:
    memory, have = plan.memory, plan.available_bytes
    parts = dict(memory.largest_parts(len(memory.parts)))
    return _stack(parts, max(have, memory.peak_bytes), format_bytes)


def _stack(parts: Mapping[str, float], whole: float, words: Callable[[float], str]) -> str:
    """One bar of colored parts, with its key; what is left of `whole` stays empty."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    cells = "".join(
        f'<i style="width:{100 * size / whole:.2f}%;background:{_COLOURS.get(name, "#cbd5e1")}"></i>'
        for name, size in ordered
    )
    dots = {name: f'<i style="background:{_COLOURS.get(name, "#cbd5e1")}"></i>' for name, _ in ordered}
    key = "".join(f"<span>{dots[name]}{escape(name)} <b>{escape(words(size))}</b></span>" for name, size in ordered)
    return f'<div class="bar">{cells}</div><div class="key">{key}</div>'


def _facts(plan: Plan) -> list[tuple[str, str]]:
    layout, speed = plan.layout, plan.speed
    rows = [
        (
            "layout",
            f"{layout.name}, {layout.precision}, recompute {in_words(layout.recompute)}, micro-batch {layout.micro}",
        ),
        *((key, reason) for key, reason in plan.reasons.items()),
        ("samples", plan.samples_sentence()),
        *([("host memory", plan.host.sentence())] if plan.host.needed_bytes else []),
        *([("disk", plan.disk.sentence())] if plan.disk.needed_bytes else []),
        ("limited by", speed.limit),
        ("MFU", f"{speed.mfu:.1%} by {speed.formula}"),
        ("device", f"{plan.cluster.device.name}: {plan.cluster.device.source}"),
        *(("cost", line) for line in plan.costs.lines()),
    ]
    rows += [("sent per step", f"{format_bytes(one.sent_bytes)}: {one.kind} of {one.what}") for one in speed.exchanges]
    return rows + [("would fit with", change) for change in plan.smaller]


def _layouts(plan: Plan) -> str:
    if plan.ranking is None or plan.cluster.num_devices == 1:
        return ""
    rows = [
        (
            one.name,
            format_bytes(one.memory.peak_bytes),
            f"{one.speed.tokens_per_s:,.0f}",
            f"{one.speed.mfu:.1%}",
            "" if one.layout.is_trainable else "planned only",
        )
        for one in plan.ranking.candidates[:8]
    ]
    reasons = {one.reason: one.layout for one in reversed(plan.ranking.rejected)}
    out = "".join(f"<li>{escape(layout)}: {escape(reason)}</li>" for reason, layout in list(reasons.items())[:8])
    none = "<p>None is left; each has its reason below.</p>"
    table = grid_table(("layout", "memory", "tokens/s", "MFU", ""), rows) if rows else none
    return card("Layouts, from the fastest", f"{table}<details><summary>Left out</summary><ul>{out}</ul></details>")


def _changes(plan: Plan) -> str:
    if not plan.changes:
        return ""
    rows = [
        (
            one.words,
            f"{format_bytes(one.peak_bytes)} ({one.peak_bytes / plan.memory.peak_bytes - 1:+.0%})",
            f"{one.tokens_per_s:,.0f} ({one.tokens_per_s / plan.speed.tokens_per_s - 1:+.0%})",
            one.mark,
        )
        for one in plan.changes
    ]
    return card("What each change alone would give", grid_table(("change", "memory", "tokens/s", ""), rows))


def _formulas(plan: Plan) -> str:
    names = [name for name, _ in plan.memory.largest_parts(len(plan.memory.parts))]
    rows = [(name, plan.memory.formulas.get(name, "")) for name in names]
    return card(f"Formulas, at the {plan.memory.peak_moment}", facts_table(rows))


def _notes(plan: Plan) -> str:
    texts = (*plan.notes, *plan.warnings)
    return card("Notes", "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>") if texts else ""
