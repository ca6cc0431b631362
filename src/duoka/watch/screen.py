"""What `duoka top` shows, as lines of styled text for a given size; knows no terminal and writes nothing.

Each view is a function from a Standing to lines. Every mark has an ASCII form for terminals that know no other.
"""

from __future__ import annotations

import itertools
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.units import format_bytes, format_count, format_seconds
from duoka.watch.columns import StepColumns
from duoka.watch.hints import Hint
from duoka.watch.page import percent
from duoka.watch.ranks import RankTail
from duoka.watch.scale import points_of, thin
from duoka.watch.standing import Standing

LEAST_COLUMNS = 80
_BLOCKS = ("▁▂▃▄▅▆▇█", "_.-:=+*#")
_BARS = ("█", "#")
_EMPTY = ("─", "-")
_DOT = ("·", "-")
_PART_STYLES = {
    "rollouts": "bright_magenta", "data": "cyan", "forward": "blue", "backward": "magenta", "wait": "yellow",
    "optimizer": "green", "checkpoint": "red", "other": "dim",
}  # fmt: skip
_STATE_STYLES = {"running": "green", "done": "green", "starting": "cyan", "stopped": "yellow", "stalled": "red",
                 "silent": "yellow", "failed": "red", "dead": "red"}  # fmt: skip
_NOTE_STYLES = {"warning": "yellow", "resume": "cyan", "end": "green"}
_KEYS = "q quit   o overview   r ranks   n nodes   l logs"
_WORST = 5

Line = list[tuple[str, str]]  # pieces of text with the names of their styles


@dataclass(frozen=True)
class Frame:
    """What may be drawn on. `plain`: only what every encoding has."""

    width: int = LEAST_COLUMNS
    height: int = 24
    plain: bool = False

    def mark(self, marks: Sequence[str]) -> str:
        return marks[1 if self.plain else 0]


def overview(now: Standing, steps: StepColumns, frame: Frame) -> list[Line]:
    """Alive, falling, fast, in its memory, in balance; what happened and what to do."""
    lines = [_head(now, frame), _progress(now, frame), *_cause(now), []]
    lines += [_loss(now, steps, frame), _gradient(now, steps, frame), _speed(now, frame), *_times(now, frame)]
    lines += _memory(now)
    lines += _rank_lines(now, frame)
    hints = [line for hint in now.hints for line in _hint(hint, frame)]
    lines += [[], *hints] if hints else []
    room = max(3, frame.height - len(lines) - 3)
    notes = [_note(note.kind, note.step, note.t, note.text) for note in now.notes[-room:]]
    return [*lines, [], *notes] if notes else lines


def ranks_view(now: Standing, frame: Frame) -> list[Line]:
    """One line a rank, the one that waits least first."""
    head = f"{'rank':>6} {'step':>9} {'step s':>9} {'own s':>9} {'wait s':>9} {'wait':>5} {'CPU':>6}  {'memory':>10}"
    lines: list[Line] = [_head(now, frame), [], [(head, "dim")]]
    for tail in sorted(now.ranks, key=lambda one: one.wait_s)[: max(1, frame.height - 6)]:
        is_slow = now.slowest is not None and tail.rank == now.slowest.rank
        lines.append([(_rank_row(tail), "red" if is_slow else "")])
    more = len(now.ranks) - (len(lines) - 3)
    lines += [[(f"and {more:,} more, which wait longer", "dim")]] if more else []
    return [*lines, *([[(now.slowest.sentence(), "bold")]] if now.slowest else [])] if now.ranks else _no_ranks(lines)


def _rank_row(tail: RankTail) -> str:
    step_s = tail.step_s / tail.num_steps
    memory = format_bytes(tail.memory_bytes) if tail.memory_bytes else "-"
    share = percent(tail.wait_s, step_s)
    cpu = "-" if tail.cpu_share is None else f"{tail.cpu_share:.0%}"
    times = f"{step_s:>9.4f} {tail.own_s:>9.4f} {tail.wait_s:>9.4f} {share:>5}"
    return f"{tail.rank:>6} {tail.step:>9,} {times} {cpu:>6}  {memory:>10}"


def nodes_view(now: Standing, frame: Frame) -> list[Line]:
    """One line a node: its ranks' own time, least wait, and memory."""
    head = f"{'node':>6}  {'ranks':>11} {'own s':>9} {'least wait s':>13}  {'most memory':>11}"
    lines: list[Line] = [_head(now, frame), [], [(head, "dim")]]
    for node, tails in sorted(group_by_node(now).items(), key=lambda pair: min(one.wait_s for one in pair[1])):
        if len(lines) > frame.height - 4:
            break
        first, last = min(one.rank for one in tails), max(one.rank for one in tails)
        own = sum(one.own_s for one in tails) / len(tails)
        memory = max(one.memory_bytes or 0.0 for one in tails)
        wait = min(one.wait_s for one in tails)
        span = f"{first}-{last}" if last > first else str(first)
        is_slow = now.slowest is not None and first <= now.slowest.rank <= last
        row = f"{node:>6}  {span:>11} {own:>9.4f} {wait:>13.4f}  {format_bytes(memory) if memory else '-':>11}"
        lines.append([(row, "red" if is_slow else "")])
    return lines if now.ranks else _no_ranks(lines)


def _no_ranks(lines: list[Line]) -> list[Line]:
    return [*lines, [("no rank has written a step yet", "dim")]]


def group_by_node(now: Standing) -> dict[int, list[RankTail]]:
    nodes: dict[int, list[RankTail]] = {}
    for tail in now.ranks:
        nodes.setdefault(tail.rank // max(1, now.ranks_per_node), []).append(tail)
    return nodes


def logs_view(now: Standing, frame: Frame, path: Path | None, lines: Sequence[str]) -> list[Line]:
    if path is None:
        return [_head(now, frame), [], [("there are no log files yet", "dim")]]
    head: Line = [(str(path), "bold"), ("   left and right: other ranks", "dim")]
    return [_head(now, frame), head, [], *[[(line, "")] for line in lines[-max(1, frame.height - 5) :]]]


def foot(says: str = "") -> Line:
    return [(says, "bold")] if says else [(_KEYS, "dim")]


def _head(now: Standing, frame: Frame) -> Line:
    where = f" on {now.host}" if now.host else ""
    last = f"last sign of life {format_seconds(now.age_s)} ago" if now.age_s >= 0.1 else "alive now"
    line: Line = [(now.name, "bold"), ("  ", ""), (now.state, f"bold {_STATE_STYLES.get(now.state, '')}")]
    processes = f"{now.world_size} {'process' if now.world_size == 1 else 'processes'}"
    line.append((f"  {processes}{where}", "dim"))
    return line if now.is_over else [*line, (f"  {last}", "red" if now.state == "stalled" else "")]


def _progress(now: Standing, frame: Frame) -> Line:
    words = f" step {now.step:,}"
    if now.total_steps:
        words += f" of {now.total_steps:,} ({now.step / now.total_steps:.0%})"
    if now.eta_s is not None and now.total_steps:
        words += f", {format_seconds(now.eta_s)} left"
    elif now.seconds:
        words += f", {format_seconds(now.seconds)} of training"
    for number, what in ((now.num_restarts, "restart"), (now.num_rollbacks, "rollback")):
        words += f", {number} {what}{'' if number == 1 else 's'}" if number else ""
    width = max(10, frame.width - cells(words) - 1)
    full = round(width * min(1.0, now.step / now.total_steps)) if now.total_steps else 0
    return [(frame.mark(_BARS) * full, "green"), (frame.mark(_EMPTY) * (width - full), "dim"), (words, "")]


def _cause(now: Standing) -> list[Line]:
    return [[(line, "red")] for line in now.cause[:6]]


def _row(name: str, text: str) -> Line:
    return [(f"{name:<10}", "dim"), (text, "")]


def _loss(now: Standing, steps: StepColumns, frame: Frame) -> Line:
    text = "-" if now.loss is None else f"{now.loss:.4f}"
    if now.loss_recent is not None and now.first_loss is not None:
        text += f"  (mean {now.loss_recent:.4f}, first {now.first_loss:.4f}"
        text += f", eval {now.eval_loss:.4f})" if now.eval_loss is not None else ")"
    return _with_spark(_row("loss", text), steps, "loss", frame)


def _gradient(now: Standing, steps: StepColumns, frame: Frame) -> Line:
    text = "-" if now.grad_norm is None else f"{now.grad_norm:.4g}"
    text += f"   learning rate {now.lr:.3g}" if now.lr is not None else ""
    return _with_spark(_row("gradient", text), steps, "grad_norm", frame)


def _with_spark(line: Line, steps: StepColumns, name: str, frame: Frame) -> Line:
    """The rest of the line shows the whole run."""
    used = max(52, sum(cells(text) for text, _ in line) + 2)
    drawn = sparkline(steps.column(name), max(0, frame.width - used), frame)
    return [*line, (" " * (used - sum(cells(text) for text, _ in line)), ""), (drawn, "blue")]


def sparkline(values: Sequence[float], width: int, frame: Frame) -> str:
    """Low to high in eight heights; what is no number leaves no trace."""
    points = points_of(range(len(values)), values)
    bins = thin(points, width) if width > 0 else []
    if not bins:
        return ""
    low, high = min(one.mean for one in bins), max(one.mean for one in bins)
    blocks = frame.mark(_BLOCKS)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((one.mean - low) * scale)] for one in bins)


def _speed(now: Standing, frame: Frame) -> Line:
    dot = f" {frame.mark(_DOT)} "
    parts = [f"{now.tokens_per_s:,.0f} tokens/s" if now.tokens_per_s else "-"]
    if now.predicted_tokens_per_s:
        parts[0] += f" (plan {now.predicted_tokens_per_s:,.0f})"
    parts += [f"MFU {now.mfu:.1%}"] if now.mfu is not None else []
    parts += [f"{format_count(now.num_tokens)} tokens"] if now.num_tokens else []
    parts += [f"cost {now.cost:,.2f}"] if now.cost is not None else []
    return _row("speed", dot.join(parts))


def _times(now: Standing, frame: Frame) -> list[Line]:
    """Where the time of the recent steps went, as a bar and in words."""
    total = sum(now.times.values())
    if total <= 0:
        return []
    width = frame.width - 10
    bar: Line = [(f"{'time':<10}", "dim")]
    edges = [round(width * share / total) for share in itertools.accumulate(now.times.values())]
    for (name, start), end in zip(zip(now.times, [0, *edges], strict=False), edges, strict=True):
        # On a terminal without colors and blocks the parts are told apart by their first letters.
        letter = name[0] if frame.plain else frame.mark(_BARS)
        bar.append((letter * (end - start), _PART_STYLES[name]))
    words: list[Line] = [[(" " * 10, "")]]
    for name, seconds in now.times.items():
        word = f"{name} {percent(seconds, total)}  "
        if sum(len(text) for text, _ in words[-1]) + len(word.rstrip()) > frame.width:
            words.append([(" " * 10, "")])
        words[-1].append((word, _PART_STYLES[name]))
    return [bar, *words]


def _memory(now: Standing) -> list[Line]:
    """The fullest rank's, and beside it what was planned."""
    memory = now.memory
    if not memory.get("max"):
        return []
    text = format_bytes(memory["max"])
    if len(now.ranks) > 1 and "min" in memory:
        fullest = max(now.ranks, key=lambda tail: tail.memory_bytes or 0.0)
        text += f" at most (rank {fullest.rank}), {format_bytes(memory['min'])} at least"
    lines = [_row("memory", text)]
    if "peak" in memory:
        spread = f"{format_bytes(memory['low'])} to {format_bytes(memory['high'])}"
        lines.append(_row("", f"plan {format_bytes(memory['peak'])} ({spread})"))
    return lines


def _rank_lines(now: Standing, frame: Frame) -> list[Line]:
    """A cell a rank, or a node where they are too many: how high, how much of a step it does not wait."""
    if len(now.ranks) < 2:
        return []
    room = frame.width - 10
    shares = [(tail.own_s * tail.num_steps / tail.step_s if tail.step_s > 0 else 0.0) for tail in now.ranks]
    group = -(-len(shares) // (2 * room))  # two lines of cells at most
    # The busiest of a cell's ranks stands for it: a mean would hide the slow one.
    heights = [max(shares[start : start + group]) for start in range(0, len(shares), group)]
    blocks = frame.mark(_BLOCKS)
    cells_of = "".join(blocks[min(len(blocks) - 1, int(share * len(blocks)))] for share in heights)
    lines = [cells_of[start : start + room] for start in range(0, len(cells_of), room)]
    out = [[(f"{'ranks' if i == 0 else '':<10}", "dim"), (line, "cyan")] for i, line in enumerate(lines)]
    each = f", {group} ranks a cell" if group > 1 else ""
    out.append([(" " * 10, ""), (f"how much of a step each works and does not wait{each}", "dim")])
    if now.slowest is not None and len(now.ranks) > _WORST:
        worst = sorted(now.ranks, key=lambda tail: tail.wait_s)[:_WORST]
        named = ", ".join(f"{tail.rank} ({tail.wait_s:.3g})" for tail in worst)
        out.append([(" " * 10, ""), (f"least wait, seconds: ranks {named}", "")])
    return out


def _hint(hint: Hint, frame: Frame) -> list[Line]:
    """What is seen, and under it what to do."""
    seen, do = (textwrap.wrap(text, max(20, frame.width - 2)) for text in (hint.seen, hint.do))
    first: list[Line] = [[("! " if i == 0 else "  ", "yellow"), (line, "bold")] for i, line in enumerate(seen)]
    return [*first, *[[("  ", ""), (line, "dim")] for line in do]]


def _note(kind: str, step: int, t: float | None, text: str) -> Line:
    clock = time.strftime("%H:%M:%S", time.localtime(t)) if t is not None else " " * 8
    return [(f"{clock}  step {step:>7,}  ", "dim"), (f"{kind:<11}", _NOTE_STYLES.get(kind, "")), (text, "")]


def plain_line(now: Standing) -> str:
    """All of it in one line, for logs and pipes."""
    parts = [now.state, f"step {now.step:,}{f'/{now.total_steps:,}' if now.total_steps else ''}"]
    parts += [f"loss {now.loss:.4f}"] if now.loss is not None else []
    parts += [f"grad {now.grad_norm:.3g}"] if now.grad_norm is not None else []
    parts += [f"{now.tokens_per_s:,.0f} tokens/s"] if now.tokens_per_s else []
    parts += [f"{format_seconds(now.eta_s)} left"] if now.eta_s else []
    parts += [f"slowest rank {now.slowest.rank}"] if now.slowest else []
    return f"{now.name}: " + "  ".join(parts)


# --- text on a screen ---


def cells(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese takes two each."""
    return len(text) if text.isascii() else sum(_cell(letter) for letter in text)


def _cell(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def clip(line: Iterable[tuple[str, str]], width: int) -> Line:
    """As much as fits; control characters of a log would move the cursor."""
    out: Line = []
    for text, style in line:
        text = printable(text)
        taken = 0
        for place, letter in enumerate(text):
            taken += _cell(letter)
            if taken > width:
                text = text[:place]
                break
        width -= min(taken, width) if cells(text) == taken else width
        out.append((text, style))
        if width <= 0:
            break
    return out
