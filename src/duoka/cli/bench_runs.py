"""`duoka bench run`: one config at several numbers of processes, strategies and batches, measured one after another.

Each case is a `duoka profile` of its own, so that no case lives in the memory of another; what is compared is the speed
of its plain steps, with what the plan said beside it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from duoka.errors import ConfigError, DataError, DoesNotFit, StorageError, WorkerFailed
from duoka.process.child import run_to_end
from duoka.units import format_bytes
from duoka.watch.costs import LOW

_WAITS = 0.1  # the share of a step that counts as one
_TOO_GOOD = 1.15  # an efficiency that sharing the work does not give
_TITLES = tuple(f"{kind.title}:" for kind in (ConfigError, DataError, DoesNotFit, StorageError, WorkerFailed))


@dataclass(frozen=True)
class Case:
    """One row. Without `step_s` it did not run, and `problem` says why."""

    num_ranks: int
    strategy: str
    batch: int = 0  # samples a step; 0: what the config says
    layout: str = ""
    step_s: float | None = None
    tokens_per_s: float = 0.0
    efficiency: float | None = None  # of the speed of as many processes as one alone would give
    peak_bytes: int = 0
    planned_bytes: int = 0
    sent_bytes: float = 0.0
    wait_share: float = 0.0  # of a step of rank 0: for what others send
    hidden_share: float | None = None  # of the exchange's time, while rank 0 computed
    planned_step_s: float | None = None
    problem: str = ""
    exit_code: int = 0


def measure(
    config: str,
    overrides: Sequence[str],
    sizes: Sequence[int],
    strategies: Sequence[str],
    steps: int,
    batches: Sequence[int] = (),
) -> list[Case]:
    """Every strategy at every number of processes and batch; one process has no strategy to choose but dp."""
    alone = ["auto", *(one for one in strategies if one == "dp")]
    asked = [
        Case(size, strategy, batch)
        for batch in batches or [0]
        for size in sizes
        for strategy in (strategies if size > 1 else alone)
        if size == 1 or strategy != "dp"
    ]
    if not asked:
        raise ConfigError("strategy dp is of one process, and --nproc has no 1", fix="write:   --nproc 1,2")
    if max(sizes) > 1 and "dp" in strategies:
        click.echo("dp is measured at one process only: it is of one", err=True)
    cases = []
    for case in asked:
        at = f", {case.batch} samples a step" if case.batch else ""
        click.echo(f"measuring {case.num_ranks} x {case.strategy}{at}", err=True)
        cases.append(_measure_one(config, overrides, case, steps))
    return with_efficiency(cases)


def with_efficiency(cases: Sequence[Case]) -> list[Case]:
    """Against one process at the same batch, where that was measured; nothing is computed from a plan."""
    alone = {case.batch: case.tokens_per_s for case in reversed(cases) if case.num_ranks == 1 and case.step_s}
    return [
        replace(case, efficiency=case.tokens_per_s / (alone[case.batch] * case.num_ranks))
        if case.batch in alone and case.step_s
        else case
        for case in cases
    ]


def _measure_one(config: str, overrides: Sequence[str], case: Case, steps: int) -> Case:
    from duoka.process.interpreter import python_module

    chosen = [f"parallel.strategy={case.strategy}"] if case.strategy != "auto" else []
    chosen += [f"train.global_batch={case.batch}"] if case.batch else []
    with tempfile.TemporaryDirectory(prefix="duoka-bench-") as folder:
        command = [
            *python_module("duoka", "profile", config, *overrides, *chosen),
            f"--nproc={case.num_ranks}", f"--steps={steps}", f"--out={folder}", "--json",
        ]  # fmt: skip
        done = run_to_end(command)
        page = Path(folder) / "profile.json"
        if done.returncode or not page.is_file():
            return replace(case, problem=find_problem(done.stderr, done.returncode), exit_code=done.returncode)
        return read_case(case, json.loads(page.read_text(encoding="utf-8")))


def find_problem(said: str, code: int) -> str:
    """The first line of the fault among what a command said; else its last line."""
    lines = [line for line in said.splitlines() if line.strip()]
    faults = (line for line in lines if line.startswith(_TITLES))
    return next(faults, lines[-1] if lines else f"exit code {code}")


def read_case(case: Case, facts: Mapping[str, Any]) -> Case:
    names = ("layout", "hidden_share", "step_s", "peak_bytes", "planned_bytes", "sent_bytes", "planned_step_s")
    phases = facts["phases"]
    return replace(
        case,
        tokens_per_s=facts["num_tokens"] / facts["step_s"],
        wait_share=phases.get("wait", 0.0) / (sum(phases.values()) or 1.0),
        **{name: facts[name] for name in names},
    )


def table(cases: Sequence[Case], num_cores: int, num_gpus: int) -> list[str]:
    """A line a case; then what to know of the machine, and why a row is far from as many times as fast."""
    has_batches = any(case.batch for case in cases)
    title = f"{'processes':>9}{'  batch' if has_batches else ''}  {'strategy':<10}{'layout':<10}{'s a step':>9}"
    title += f"{'tokens/s':>10}{'speed-up':>10}{'efficiency':>12}{'waits':>7}{'hidden':>8}"
    lines = [f"{title}{'peak a rank':>13}{'planned':>11}{'sent a step':>13}{'planned s':>11}"]
    for case in cases:
        batch = f"{case.batch or '-':>7}" if has_batches else ""
        head = f"{case.num_ranks:>9}{batch}  {case.strategy:<10}"
        if case.step_s is None:
            lines.append(f"{head}{case.problem}")
            continue
        efficiency = "-" if case.efficiency is None else f"{case.efficiency:.0%}"
        speed_up = "-" if case.efficiency is None else f"{case.efficiency * case.num_ranks:.2f}x"
        hidden = "-" if case.hidden_share is None else f"{case.hidden_share:.0%}"
        planned = "-" if case.planned_step_s is None else f"{case.planned_step_s:.3g}"
        lines.append(
            f"{head}{case.layout:<10}{case.step_s:>9.3g}{case.tokens_per_s:>10,.0f}{speed_up:>10}{efficiency:>12}"
            f"{case.wait_share:>7.0%}{hidden:>8}{format_bytes(case.peak_bytes):>13}{format_bytes(case.planned_bytes):>11}"
            f"{format_bytes(int(case.sent_bytes)):>13}{planned:>11}"
        )
    return [*lines, *notes(cases, num_cores, num_gpus)]


def notes(cases: Sequence[Case], num_cores: int, num_gpus: int) -> list[str]:
    lines = []
    most = max(case.num_ranks for case in cases)
    if not num_gpus and most > num_cores:
        lines.append(
            f"note: {most} processes share {num_cores} cores: their rows show what exchanging costs, and no speed-up"
        )
    if all(case.num_ranks > 1 for case in cases):
        lines.append("note: no efficiency without one process to compare with:   --nproc 1,2")
    for case in cases:
        if case.efficiency is not None and case.efficiency < LOW and (num_gpus or case.num_ranks <= num_cores):
            lines.append(f"note: {case.num_ranks} x {case.strategy} {_why_slow(case)}")
        if case.efficiency is not None and case.efficiency > _TOO_GOOD:
            at = f" at {case.batch} samples a step" if case.batch else ""
            lines.append(
                f"note: {case.num_ranks} x {case.strategy}{at} is {case.efficiency * case.num_ranks:.2f} times one "
                "process, more than sharing its work can give: that row was slowed, by another program or by its own "
                "threads; measure again on an idle machine"
            )
    return lines


def _why_slow(case: Case) -> str:
    at = f"at {case.batch} samples a step " if case.batch else ""
    reached = f"{at}reaches {case.efficiency:.0%} of {case.num_ranks} times one process"
    if case.wait_share > _WAITS:
        sent = format_bytes(int(case.sent_bytes))
        return (
            f"{reached}: {case.wait_share:.0%} of a step waits for what ranks exchange ({sent} each); a larger "
            "train.global_batch, or a strategy that sends less (duoka plan ranks them)"
        )
    if case.num_ranks == 1:
        return f"{reached}: it divides a batch and gathers on one device; ddp on several processes does not"
    return (
        f"{reached}, and waits in {case.wait_share:.0%} of a step only: each computes slower beside the others "
        "(shared cores, memory or power), or has too little to do:   duoka profile"
    )


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
        name = f"{case.num_ranks} x {escape(case.strategy)}" + (f", {case.batch}" if case.batch else "")
        share = "" if case.efficiency is None else f" ({case.efficiency:.0%})"
        out += [
            f'<text x="{left - 8}" y="{top + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{row - 6}" fill="#3b6ea8"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 15}">{case.tokens_per_s:,.0f}{share}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])
