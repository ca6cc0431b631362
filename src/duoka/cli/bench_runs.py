"""`duoka bench run`: one config at several numbers of processes and strategies, measured one after another.

Each case is a `duoka profile` of its own, so that no case lives in the memory of another; what is compared is the speed
of its plain steps, with what the plan said beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from duoka.errors import ConfigError, DataError, DoesNotFit, StorageError, WorkerFailed
from duoka.units import format_bytes

_TITLES = tuple(f"{kind.title}:" for kind in (ConfigError, DataError, DoesNotFit, StorageError, WorkerFailed))


@dataclass(frozen=True)
class Case:
    """One row. Without `step_s` it did not run, and `problem` says why."""

    num_ranks: int
    strategy: str
    layout: str = ""
    step_s: float | None = None
    tokens_per_s: float = 0.0
    efficiency: float | None = None  # of the speed of as many processes as one alone would give
    peak_bytes: int = 0
    planned_bytes: int = 0
    sent_bytes: float = 0.0
    planned_step_s: float | None = None
    problem: str = ""
    exit_code: int = 0


def measure(
    config: str, overrides: Sequence[str], sizes: Sequence[int], strategies: Sequence[str], steps: int
) -> list[Case]:
    """Every strategy at every number of processes; one process has no strategy to choose."""
    asked = [(size, strategy) for size in sizes for strategy in (strategies if size > 1 else ["auto"])]
    cases = []
    for size, strategy in asked:
        click.echo(f"measuring {size} x {strategy}", err=True)
        cases.append(_measure_one(config, overrides, size, strategy, steps))
    return with_efficiency(cases)


def with_efficiency(cases: Sequence[Case]) -> list[Case]:
    """Against one process of the same run, where that was measured; nothing is computed from a plan."""
    alone = next((case.tokens_per_s for case in cases if case.num_ranks == 1 and case.step_s), 0.0)
    return [
        Case(**{**asdict(case), "efficiency": case.tokens_per_s / (alone * case.num_ranks)})
        if alone and case.step_s
        else case
        for case in cases
    ]


def _measure_one(config: str, overrides: Sequence[str], size: int, strategy: str, steps: int) -> Case:
    from duoka.process.interpreter import python_module

    chosen = [f"parallel.strategy={strategy}"] if strategy != "auto" else []
    with tempfile.TemporaryDirectory(prefix="duoka-bench-") as folder:
        command = [
            *python_module("duoka", "profile", config, *overrides, *chosen),
            f"--nproc={size}", f"--steps={steps}", f"--out={folder}", "--json",
        ]  # fmt: skip
        done = subprocess.run(command, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        page = Path(folder) / "profile.json"
        if done.returncode or not page.is_file():
            return Case(size, strategy, problem=find_problem(done.stderr, done.returncode), exit_code=done.returncode)
        return read_case(size, strategy, json.loads(page.read_text(encoding="utf-8")))


def find_problem(said: str, code: int) -> str:
    """The first line of the fault among what a command said; else its last line."""
    lines = [line for line in said.splitlines() if line.strip()]
    faults = (line for line in lines if line.startswith(_TITLES))
    return next(faults, lines[-1] if lines else f"exit code {code}")


def read_case(size: int, strategy: str, facts: Mapping[str, float | str | None]) -> Case:
    names = ("layout", "step_s", "peak_bytes", "planned_bytes", "sent_bytes", "planned_step_s")
    known = {name: facts[name] for name in names}
    return Case(size, strategy, tokens_per_s=float(facts["num_tokens"]) / float(facts["step_s"]), **known)  # type: ignore[arg-type]


def table(cases: Sequence[Case], num_cores: int, num_gpus: int) -> list[str]:
    """A line a case; then what to know of the machine."""
    title = f"{'processes':>9}  {'strategy':<10}{'layout':<10}{'s a step':>9}{'tokens/s':>10}{'efficiency':>12}"
    lines = [f"{title}{'peak a rank':>13}{'planned':>11}{'sent a step':>13}{'planned s':>11}"]
    for case in cases:
        head = f"{case.num_ranks:>9}  {case.strategy:<10}"
        if case.step_s is None:
            lines.append(f"{head}{case.problem}")
            continue
        efficiency = "-" if case.efficiency is None else f"{case.efficiency:.0%}"
        planned = "-" if case.planned_step_s is None else f"{case.planned_step_s:.3g}"
        lines.append(
            f"{head}{case.layout:<10}{case.step_s:>9.3g}{case.tokens_per_s:>10,.0f}{efficiency:>12}"
            f"{format_bytes(case.peak_bytes):>13}{format_bytes(case.planned_bytes):>11}"
            f"{format_bytes(int(case.sent_bytes)):>13}{planned:>11}"
        )
    most = max(case.num_ranks for case in cases)
    if not num_gpus and most > num_cores:
        lines.append(
            f"note: {most} processes share {num_cores} cores: their rows show what exchanging costs, and no speed-up"
        )
    if all(case.num_ranks > 1 for case in cases):
        lines.append("note: no efficiency without one process to compare with:   --nproc 1,2")
    return lines


def chart(cases: Sequence[Case]) -> str:
    """Tokens per second as bars, in one SVG."""
    from html import escape

    ran = [case for case in cases if case.step_s]
    most = max((case.tokens_per_s for case in ran), default=1.0)
    row, left, wide = 26, 150, 420
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 110}" height="{row * len(ran) + 40}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="tokens per second">',
        '<text x="8" y="20" font-weight="bold">tokens/s</text>',
    ]
    for place, case in enumerate(ran):
        top, length = 32 + row * place, max(1.0, wide * case.tokens_per_s / most)
        share = "" if case.efficiency is None else f" ({case.efficiency:.0%})"
        out += [
            f'<text x="{left - 8}" y="{top + 15}" text-anchor="end">{case.num_ranks} x {escape(case.strategy)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{row - 6}" fill="#3b6ea8"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 15}">{case.tokens_per_s:,.0f}{share}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])
