"""What a run cost, from its event log: bytes exchanged in a step, bytes held by each rank, peak beside prediction.

Rows of (name, text) for the closing report, and the same as plain values for `duoka runs show --json`.
"""

from __future__ import annotations

from typing import Any

from duoka.units import format_bytes
from duoka.watch.columns import number, whole
from duoka.watch.history import History
from duoka.watch.ranks import find_slowest

PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
LOW = 0.85  # an efficiency below it gets a reason
_WIDTH = 66  # of a row's text, so that 80 columns are enough


def exchange_rows(history: History) -> list[tuple[str, str]]:
    """What a rank sends in a step, and the collectives that do it."""
    sent, kinds = history.sent_per_step(), history.traffic.get("kinds")
    if sent is None:
        return []
    named = []
    for kind, one in kinds.items() if isinstance(kinds, dict) else ():
        calls, size = whole(one.get("num_calls")), number(one.get("sent_bytes"))
        if calls and size:
            named.append(f"{calls} {kind} {format_bytes(size)}")
    lines = [f"{format_bytes(sent)} sent per rank and step", *_in_lines(named)]
    hidden = history.exchange_hidden()
    if hidden is not None:
        lines.append(f"{hidden[0]:.3g} s a step, {hidden[1]:.0%} of it while rank 0 computed")
    return [("" if place else "exchange", text) for place, text in enumerate(lines)]


def efficiency_rows(history: History) -> list[tuple[str, str]]:
    """How much of its ranks' time was their own work, and what they waited for where it is little. On CPUs: a GPU's
    passes hold their waiting."""
    machine = history.plan.get("machine")
    device = machine.get("device") if isinstance(machine, dict) else None
    whole_s = sum(rank.step_s for rank in history.ranks)
    if len(history.ranks) < 2 or device != "cpu" or whole_s <= 0:
        return []
    share = 1 - sum(rank.times.get("wait", 0.0) for rank in history.ranks) / whole_s
    words = f"{share:.0%} of {len(history.ranks)} ranks' time was their own work;"
    if share >= LOW:
        words += " `duoka bench run` measures it beside one process"
    else:
        slowest = find_slowest(history.ranks)
        words += f" {slowest.sentence()}" if slowest else " all wait alike: the exchange takes the rest"
    return [("efficiency" if i == 0 else "", text) for i, text in enumerate(_in_lines(words.split(), " "))]


def memory_rows(history: History) -> list[tuple[str, str]]:
    """The peak beside the plan's, and what is held."""
    measured, predicted = history.memory_measured(), history.memory_predicted()
    said = ""
    if predicted:
        spread = f"{format_bytes(predicted['low'])} to {format_bytes(predicted['high'])}"
        said = f"{format_bytes(predicted['peak'])} predicted ({spread})"
    seen = f"{format_bytes(measured)} measured" if measured else ""
    parts = [part for part in (seen, said) if part]
    lines = _in_lines([*parts, "peak per rank"]) if parts else []
    return [*(("" if place else "memory", text) for place, text in enumerate(lines)), *held_rows(history)]


def held_rows(history: History) -> list[tuple[str, str]]:
    """The fullest rank's parts; and which rank holds more than its share, and why."""
    if not history.held:
        return []
    fullest = max(history.held, key=lambda one: sum(one[part] for part in PARTS))
    named = [f"{part} {format_bytes(fullest[part])}" for part in PARTS if fullest[part]]
    if fullest["host"]:
        named.append(f"{format_bytes(fullest['host'])} of it in host memory")
    rows = [("holds" if i == 0 else "", text) for i, text in enumerate(_in_lines(named))]
    sentence = _in_lines(history.imbalance.split(), " ")
    return rows + [("uneven" if i == 0 else "", text) for i, text in enumerate(sentence)]


def costs_to_json(history: History) -> dict[str, Any]:
    """The same for programs; what is not known is null."""
    return {
        "sent_bytes_per_step": history.sent_per_step(),
        "traffic": history.traffic.get("kinds"),
        "num_micro_batches": history.traffic.get("num_micro_batches"),
        "peak_bytes": history.memory_measured(),
        "predicted": history.memory_predicted(),
        "ranks": [{f"{part}_bytes": size for part, size in one.items()} for one in history.held],
        "imbalance": history.imbalance or None,
    }


def _in_lines(words: list[str], between: str = ", ") -> list[str]:
    """Joined, in as many lines as the width asks for."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(between) + len(word) <= _WIDTH:
            lines[-1] += between + word
        else:
            lines.append(word)
    return lines
