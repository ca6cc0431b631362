"""The figures of sft.json as the tables of sft.md: every row, and duoka beside the best peer. Called by sft.py.

python benchmarks/sft_page.py benchmarks/sft.json benchmarks/sft.md    makes the page's block again
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from watching import fill_page

Row = dict[str, Any]
OLD_MACHINE = "2 cores, AVX2"  # of rows from before machines were told apart
ORDER = ("machine", "threads", "processes", "precision", "method", "layout")
PLACES = {"full": 0, "lora": 1, "padded": 0, "packed": 1, "fp32": 0, "bf16": 1}
# What is aimed at: in words, duoka's tool and layout, the peers' layout, the row's key, the aim, which may be one for
# each method and precision. A peer is the one of most tokens per CPU-second; the last lines compare two that compute
# their activations again, and two whose trained weights are bf16 alone.
DEFAULTS = {("full", "bf16"): 2.5, ("lora", "bf16"): 3.0, ("full", "fp32"): 2.0, ("lora", "fp32"): 2.0}
TUNED = {("full", "bf16"): 1.8, ("lora", "bf16"): 2.0, ("full", "fp32"): 1.5, ("lora", "fp32"): 1.5}
AIMS = (
    ("tokens per CPU-s, its defaults", ("duoka", "packed"), "padded", "tokens_per_cpu_s", DEFAULTS),
    ("tokens per CPU-s, tuned", ("duoka", "packed"), "packed", "tokens_per_cpu_s", TUNED),
    ("tokens per s, its defaults", ("duoka", "packed"), "padded", "tokens_per_wall_s", DEFAULTS),
    ("tokens per s, tuned", ("duoka", "packed"), "packed", "tokens_per_wall_s", TUNED),
    ("peak memory, its defaults", ("duoka", "packed"), "padded", "peak_bytes", 0.6),
    ("peak memory, tuned", ("duoka", "packed"), "packed", "peak_bytes", 0.6),
    ("CPU-s to the first step, its defaults", ("duoka", "packed"), "padded", "first_step_cpu_s", 0.5),
    ("CPU-s to the first step, tuned", ("duoka", "packed"), "packed", "first_step_cpu_s", 0.5),
    ("peak memory, both recompute", ("duoka-recompute", "packed"), "padded trl", "peak_bytes", 0.7),
    ("tokens per CPU-s, both bf16 weights", ("duoka-narrow", "packed"), "padded unsloth", "tokens_per_cpu_s", DEFAULTS),
    ("peak memory, both bf16 weights", ("duoka-narrow", "packed"), "padded unsloth", "peak_bytes", 0.6),
)


def page_text(found: dict[str, Any]) -> str:
    results: list[Row] = [{"machine": OLD_MACHINE, "threads": 1, **row} for row in found["results"]]
    rows = sorted(results, key=lambda row: [PLACES.get(row[key], row[key]) for key in ORDER])
    lines = [*table(rows), "", "duoka as it is by default (packed) beside the peer of most tokens per CPU-second:", ""]
    lines += verdicts(rows)
    machine = found["machine"]
    cores = f"{machine['processor']}, {machine['cores']} cores; a x b: processes, and threads of each"
    packages = "; ".join(
        f"{who}: {', '.join(f'{name} {number}' for name, number in names.items())}"
        for who, names in found["versions"].items()
    )
    return "\n".join([*lines, "", f"{cores}. {packages}."])


def table(rows: list[Row]) -> Iterable[str]:
    names = ("work, processes x threads", "tool", "tokens per CPU-s", "per s", "peak GiB", "CPU-s to step 1")
    yield f"| machine | {' | '.join(names)} | measured (UTC), code |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        work = f"{row['machine']} | {row['method']}, {row['precision']}, {row['layout']}, {started(row)}"
        when = f"{row['measured']}, {row['code']}"
        if "error" in row:
            yield f"| {work} | {row['tool']} | {row['error'].replace('|', '/')} | | | | {when} |"
            continue
        numbers = (row["tokens_per_cpu_s"], row["tokens_per_wall_s"], row["peak_bytes"] / 2**30)
        cells = " | ".join(f"{number:.4g}" for number in (*numbers, row["first_step_cpu_s"]))
        yield f"| {work} | {row['tool']} | {cells} | {when} |"


def started(row: Row) -> str:
    """As in "2 x 1": processes, and threads of each."""
    return f"{row['processes']} x {row['threads']}"


def has_narrow_weights(row: Row) -> bool:
    """Unsloth keeps no fp32 weights where it trains all of them: less memory, and other numbers."""
    return row["tool"] == "unsloth" and row["method"] == "full" and row["precision"] == "bf16"


def verdicts(rows: list[Row]) -> Iterable[str]:
    """One line per aim that has both sides measured; a ratio is duoka's number over the peer's."""
    yield "| machine | work, processes x threads | what | duoka | best peer | ratio | aim | reached |"
    yield "|---|---|---|---|---|---|---|---|"
    good = [row for row in rows if "error" not in row]
    work: Callable[[Row], tuple[Any, ...]] = lambda row: tuple(row[key] for key in ORDER[:5])  # noqa: E731
    for (kind, *_, precision, method), members in itertools.groupby(good, key=work):
        group = list(members)
        for what, (tool, packing), peers_layout, key, aims in AIMS:
            if key == "tokens_per_wall_s" and group[0]["threads"] == 1:
                continue  # by the CPU-second already
            aim = aims[method, precision] if isinstance(aims, dict) else aims
            own = [row for row in group if row["tool"].startswith(tool) and row["layout"] == packing]
            own = [row for row in own if row["tool"] in (tool, f"{tool}-saving")]
            ours = min(own, key=lambda row: len(row["tool"]), default=None)  # else the one that saved at every step
            layout, _, only = peers_layout.partition(" ")
            peers = [row for row in group if not row["tool"].startswith("duoka") and row["layout"] == layout]
            peers = [row for row in peers if (row["tool"] == only if only else not has_narrow_weights(row))]
            if ours is None or not peers:
                continue
            best = max(peers, key=lambda row: row["tokens_per_cpu_s"])
            ratio, unit = ours[key] / best[key], 2**30 if key == "peak_bytes" else 1
            reached = ratio >= aim if aim > 1 else ratio <= aim
            sign, place = (">=" if aim > 1 else "<="), f"{kind} | {method}, {precision}, {started(ours)}"
            yield (
                f"| {place} | {what} | {ours[key] / unit:.4g} | {best[key] / unit:.4g} ({best['tool']}) "
                f"| {ratio:.2f} | {sign} {aim} | {'yes' if reached else 'no'} |"
            )


if __name__ == "__main__":
    fill_page(Path(sys.argv[2]), page_text(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), "figures")
