"""What a run reached: the closing lines in the terminal, and report.html with loss.svg in the run folder.

Both come from the event log and plan.json alone, so they can be made at any time, also of a run that was killed.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder, read_json, write_text_atomic
from duoka.units import format_bytes, format_count, format_seconds
from duoka.watch.answers import accuracy_note, answer_charts, answer_rows, eval_sentence
from duoka.watch.chart import Chart, draw_chart
from duoka.watch.columns import number, whole
from duoka.watch.costs import costs_to_json, efficiency_rows, exchange_rows, memory_rows
from duoka.watch.curve import can_draw, draw_curve
from duoka.watch.differences import shown_config
from duoka.watch.facts import run_facts
from duoka.watch.history import History, read_history
from duoka.watch.next_steps import next_commands
from duoka.watch.page import card, facts_table, figure, grid_table, page, percent, time_bar, track
from duoka.watch.scale import Point, points_of
from duoka.watch.stop_cause import cause_lines, has_died

_COUNTED = {"num_kept", "num_records", "num_truncated", "num_dropped_long", "num_bad"}  # of a data set, in data.json


def write_report(run: RunFolder) -> Path:
    """Write report.html and loss.svg into the run folder; returns the page's path."""
    history = read_history(run)
    loss = draw_chart(loss_chart(history))
    # Alone, the picture has no page under it: a ground of its own keeps it readable in any viewer.
    ground = "--ground:#fff", "--ground:#1a1e26"
    alone = loss.replace("--ground:none", ground[0]).replace("dark){.dk{", f"dark){{.dk{{{ground[1]};")
    write_text_atomic(run.path / "loss.svg", alone + "\n")
    path = run.path / "report.html"
    write_text_atomic(path, report_page(history, loss))
    return path


def report_page(history: History, loss: str | None = None) -> str:
    """The run on one page, in one file that fetches nothing; `loss`: its chart, where it is drawn already."""
    return page(f"{history.run.name} · duoka", _page_body(history, loss or draw_chart(loss_chart(history))))


def loss_chart(history: History) -> Chart:
    """The loss of every step, its smoothed form, and the evaluations."""
    steps, values = history.values("loss")
    pairs = [(number(event.get("step")), number(event.get("loss"))) for event in history.evals]
    evals = [Point(step, loss) for step, loss in pairs if step is not None and loss is not None]
    marks = [(float(step), "resumed") for step in sorted(set(history.resumes))]
    return Chart("Loss per target token", steps, values, extra=evals, extra_name="evaluation", marks=marks)


def _page_body(history: History, loss: str) -> list[str]:
    run = history.run
    state = _state(history)
    head = f'<h1>{escape(run.name)}<span class="badge {escape(state)}">{escape(state)}</span></h1>'
    out = [head, f'<p class="under">{escape(_summary(history))}</p>', '<div class="grid">', *_figures(history)]
    out.append(f'<section class="card wide chart">{loss}</section>')
    for chart in _small_charts(history):
        out.append(f'<section class="card half chart">{draw_chart(chart)}</section>')
    split = history.time_split()
    if split:
        out.append(card("Where the time went", time_bar(split)))
    out += [text for text in (_memory_card(history), _run_card(history), _eval_card(history)) if text]
    out += [text for text in (_rank_card(history), _checkpoint_card(history), _warning_card(history)) if text]
    out += [_config_card(history), "</div>"]
    out.append("<footer>Numbers are global, over all ranks. Written by duoka from the run's event log.</footer>")
    return [text for text in out if text]


def _state(history: History) -> str:
    if history.status is not None:
        return "dead" if has_died(history.status) else history.status.state
    return history.end_reason or ("running" if history.steps else "empty")


def _summary(history: History) -> str:
    """One sentence under the title."""
    if not history.steps:
        return "No step has been recorded yet."
    steps, last = len(history.steps), history.steps[-1]
    parts = [f"{last.step:,} optimizer {'step' if steps == 1 else 'steps'}"]
    total = whole(history.facts.get("total_steps"))
    if total and total > last.step:
        parts[0] = f"{last.step:,} of {total:,} optimizer steps"
    if last.epoch is not None:
        parts.append(f"epoch {last.epoch:.3g}")
    parts.append(f"{format_seconds(history.total_s())} of training")
    return " · ".join(parts)


def _figures(history: History) -> list[str]:
    steps, losses = history.values("loss")
    points = points_of(steps, losses)
    out: list[str] = []
    if points:
        last_ones = points[-max(1, len(points) // 20) :]
        settled = sum(point.y for point in last_ones) / len(last_ones)
        note = f"mean of the last {len(last_ones):,} steps; " if len(last_ones) > 1 else ""
        out.append(figure("Training loss", f"{settled:.4f}", f"{note}{points[0].y:.4f} at step {points[0].x:,.0f}"))
    if history.evals:
        last = history.evals[-1]
        loss = number(last.get("loss"))
        out.append(figure("Evaluation loss", "not finite" if loss is None else f"{loss:.4f}", accuracy_note(last)))
    speed = history.tokens_per_s()
    if speed:
        tokens = sum(step.num_tokens or 0.0 for step in history.steps)
        expected = history.speed_predicted()
        note = f"predicted {expected['step']:,.0f}; " if expected else ""
        out.append(figure("Tokens per second", f"{speed:,.0f}", f"{note}{format_count(tokens)} tokens in all"))
    measured = history.memory_measured()
    if measured:
        predicted = history.memory_predicted()
        note = f"predicted {format_bytes(predicted['peak'])}" if predicted else ""
        out.append(figure("Peak memory per rank", format_bytes(measured), note))
    return out


def _small_charts(history: History) -> list[Chart]:
    """Learning rate, gradient norm and speed, where the log has them."""
    small = {"width": 480, "height": 210}
    steps = [float(step.step) for step in history.steps]
    rates: list[float | None] = [
        step.num_tokens / step.step_s if step.num_tokens and step.step_s else None for step in history.steps
    ]
    charts = [
        Chart("Gradient norm, before clipping", *history.values("grad_norm"), **small),  # type: ignore[arg-type]
        Chart("Learning rate", *history.values("lr"), is_smoothed=False, from_zero=True, **small),  # type: ignore[arg-type]
        Chart("Tokens per second", steps, rates, from_zero=True, **small),  # type: ignore[arg-type]
    ]
    seen = [chart for chart in charts if points_of(chart.steps, chart.values)]
    return [*answer_charts(history), *(seen[:2] if len(seen) == 3 else seen)]


def _memory_card(history: History) -> str:
    """Prediction beside measurement."""
    predicted, measured = history.memory_predicted(), history.memory_measured()
    if predicted is None:
        return ""
    scale = 1.05 * max(predicted["high"], measured or 0.0)
    spread = f"{format_bytes(predicted['low'])} to {format_bytes(predicted['high'])}"
    rows = [("predicted", f"{format_bytes(predicted['peak'])} ({spread})", track(predicted["peak"] / scale, soft=True))]
    if measured:
        off = (predicted["peak"] / measured - 1) * 100
        rows.append(("measured", f"{format_bytes(measured)} (prediction {round(off):+d}%)", track(measured / scale)))
    cells = "".join(
        f'<tr><td>{name}</td><td>{escape(text)}</td><td style="width:50%">{bar}</td></tr>' for name, text, bar in rows
    )
    return card("Peak memory per rank, predicted beside measured", f"<table>{cells}</table>")


def _run_card(history: History) -> str:
    rows = run_facts(history)
    return card("What was run", facts_table(rows), "half" if history.evals else "wide") if rows else ""


def _eval_card(history: History) -> str:
    if not history.evals:
        return ""
    rows = []
    for event in history.evals[-12:]:
        loss, perplexity, accuracy = (number(event.get(key)) for key in ("loss", "perplexity", "accuracy"))
        count = whole(event.get("num_samples"))
        rows.append(
            (
                f"{whole(event.get('step')) or 0:,}",
                "not finite" if loss is None else f"{loss:.4f}",
                "" if perplexity is None else f"{perplexity:.4g}",
                "" if accuracy is None else f"{accuracy:.1%}",
                "" if count is None else f"{count:,}",
            )
        )
    return card("Evaluations", grid_table(("step", "loss", "perplexity", "accuracy", "samples"), rows), "half")


def _rank_card(history: History) -> str:
    """Ranks side by side: the one that waits least is the straggler."""
    if len(history.ranks) < 2:
        return ""
    rows = []
    for tail in history.ranks[:16]:
        shares = [percent(tail.times.get(name, 0.0), tail.step_s) for name in ("forward", "backward", "wait")]
        rows.append((f"rank {tail.rank}", *shares, format_bytes(tail.memory_bytes) if tail.memory_bytes else ""))
    table = grid_table(("last steps", "forward", "backward", "wait", "peak memory"), rows)
    return card("Ranks", table, "half" if history.checkpoints else "wide")


def _checkpoint_card(history: History) -> str:
    if not history.checkpoints:
        return ""
    rows = []
    for event in history.checkpoints[-8:]:
        size, blocked, write = (number(event.get(key)) for key in ("size_bytes", "blocked_s", "write_s"))
        rows.append(
            (
                Path(str(event.get("path") or f"step {whole(event.get('step'))}")).name,
                "" if size is None else format_bytes(size),
                "" if blocked is None else f"{blocked:.2f} s",
                "" if write is None else f"{write:.2f} s",
            )
        )
    table = grid_table(("checkpoint", "size", "training stood still", "until on the disk"), rows)
    return card("Checkpoints", table, "half" if len(history.ranks) > 1 else "wide")


def _warning_card(history: History) -> str:
    found = [*history.warnings[-20:], *_nonfinite_lines(history)]
    if not found:
        return ""
    return card("Warnings", '<ul class="warn">' + "".join(f"<li>{escape(text)}</li>" for text in found) + "</ul>")


def _nonfinite_lines(history: History) -> list[str]:
    steps = history.nonfinite
    if not steps:
        return []
    times = f"{len(steps)} steps" if len(steps) > 1 else "1 step"
    return [f"loss or gradient of {times} not finite, first at step {steps[0]:,}"]


def _config_card(history: History) -> str:
    if not (text := shown_config(history.run)):
        return ""
    return (
        '<section class="card wide"><details><summary>Resolved config</summary>'
        f"<pre>{escape(text)}</pre></details></section>"
    )


def end_lines(run: RunFolder, *, encoding: str | None = None) -> list[str]:
    """The closing report for a terminal of 80 columns, without colors."""
    history = read_history(run)
    cause = cause_lines(history.status)
    if not history.steps:
        head = f"{run.name}: {_state(history)}, no step was recorded"
        return [head, *_apart(cause), "", *_where_and_next(history)]
    arrow = "→" if can_draw("→", encoding) else "->"
    dot = "·" if can_draw("·", encoding) else "-"
    out = [f"{run.name}: {_state(history)} {dot} {_summary(history).replace(' · ', f' {dot} ')}"]
    out += [*_apart(cause), ""]
    out += [f"  {line}" for line in draw_curve(*history.values("loss"), width=74, encoding=encoding, title="loss")]
    rows = [*_result_rows(history, arrow), *_data_rows(run)]
    out += ["", *(f"  {name:<12}{text}" for name, text in rows), ""]
    out += _where_and_next(history)
    return [line.rstrip() for line in out]


def _apart(cause: list[str]) -> list[str]:
    return ["", *(f"  {line}" for line in cause)] if cause else []


def summary_to_json(run: RunFolder) -> dict[str, Any]:
    """The closing report for programs; what is not known is null."""
    history = read_history(run)
    first, last = (history.steps[0], history.steps[-1]) if history.steps else (None, None)
    return {
        "name": run.name,
        "state": _state(history),
        "cause": "\n".join(cause_lines(history.status)) or None,
        "step": last.step if last else 0,
        "first_loss": first.loss if first else None,
        "loss": last.loss if last else None,
        "evaluation": history.evals[-1] if history.evals else None,
        "tokens_per_s": history.tokens_per_s(),
        "predicted_tokens_per_s": (history.speed_predicted() or {}).get("step"),
        "seconds": history.time_split(),
        "world_size": history.facts.get("world_size"),
        **costs_to_json(history),
    }


def _result_rows(history: History, arrow: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    points = points_of(*history.values("loss"))
    if points:
        first, last = points[0], points[-1]
        start = f"{first.y:.4f} at step {first.x:,.0f} {arrow} " if len(points) > 1 else ""
        rows.append(("loss", f"{start}{last.y:.4f} at step {last.x:,.0f}"))
    rows += [*answer_rows(history, arrow), *(("warning", text) for text in _nonfinite_lines(history))]
    if history.evals:
        rows.append(("evaluation", eval_sentence(history.evals[-1])))
    speed = history.tokens_per_s()
    if speed:
        tokens = sum(step.num_tokens or 0.0 for step in history.steps)
        expected = history.speed_predicted()
        beside = f", predicted {expected['step']:,.0f} ({_beside(expected['step'] / speed)})" if expected else ""
        rows.append(("speed", f"{speed:,.0f} tokens/s over {format_count(tokens)} tokens{beside}"))
        rows += _compute_rows(history)
    split = history.time_split()
    if split:
        total = sum(split.values())
        named = [f"{name} {percent(seconds, total)}" for name, seconds in split.items()]
        # Two lines, so that 80 columns are enough.
        rows += [("time" if i == 0 else "", ", ".join(named[i : i + 4])) for i in range(0, len(named), 4)]
    rows += [*exchange_rows(history), *efficiency_rows(history), *memory_rows(history)]
    if history.warnings:
        rows.append(("warnings", f"{len(history.warnings)}, listed in report.html"))
    return rows


def _beside(ratio: float) -> str:
    """How a figure lies to what was measured: "+12%", or "3.3 times that" where percent would be read wrongly."""
    return (
        f"{ratio - 1:+.0%}" if ratio < 2 else f"{ratio:,.1f} times that" if ratio < 100 else f"{ratio:,.0f} times that"
    )


def _data_rows(run: RunFolder) -> list[tuple[str, str]]:
    """What was kept of each data set, from the run's data.json."""
    rows = []
    known = [one for one in (read_json(run.path / "data.json") or {}).get("sets", []) if _has_counts(one)]
    for place, one in enumerate(known):
        counts = one["counts"]
        losses = [
            f"{counts[key]:,} {words}"
            for key, words in (("num_truncated", "cut"), ("num_dropped_long", "too long"), ("num_bad", "wrong"))
            if counts[key]
        ]
        kept = f"{counts['num_kept']:,} samples of {counts['num_records']:,} records"
        name, told = Path(one["name"]).name, ", ".join([kept, *losses])
        # A long name has a line of its own: cut, it would name another file.
        head = "" if place else "data"
        rows += [(head, f"{name}: {told}")] if len(name) <= 24 else [(head, name), ("", told)]
    return rows


def _has_counts(found: Any) -> bool:
    """Else another version wrote it, or a disk has damaged it: a report has no less for it."""
    counts = found.get("counts") if isinstance(found, dict) else None
    return isinstance(counts, dict) and counts.keys() >= _COUNTED and "name" in found


def _compute_rows(history: History) -> list[tuple[str, str]]:
    mfu, compute = history.mfu(), history.plan.get("compute")
    if mfu is None or not isinstance(compute, dict):
        return []
    flops = format_count(number(compute.get("flops_per_token")) or 0.0)
    return [("MFU", f"{mfu:.1%}, at {flops} FLOPs a token by"), ("", str(compute.get("formula")))]


def _where_and_next(history: History) -> list[str]:
    run = history.run
    out = []
    if run.final.is_dir():
        out.append(f"  {'result':<12}{run.final}")
    if history.checkpoints:
        out.append(f"  {'checkpoints':<12}{run.checkpoints}")
    if (run.path / "report.html").is_file():
        out.append(f"  {'report':<12}{run.path / 'report.html'}")
    if not run.final.is_dir():
        again = "goes on from the newest checkpoint" if history.checkpoints else "starts again: nothing was saved yet"
        return [*out, f"  {'log files':<12}{run.logs}", "", "next", f"  the same command {again}"]
    return [*out, "", "next", *(f"  {command}" for command in next_commands(run))]
