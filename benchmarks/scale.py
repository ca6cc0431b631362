"""What grows with ranks and samples: CPU-seconds and bytes at up to 1,024 ranks and 100 million samples, and how fast.

    python benchmarks/scale.py --out benchmarks/scale.json --page benchmarks/scale.md [--only WORD]

One process plays all ranks: it calls the functions that a run calls, with as many ranks as they are told of. Growth is
the exponent between the two largest sizes (1: linear, 2: quadratic). Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from watching import describe_machine, fill_page, stamp

from duoka.data.feed.epoch_plan import EpochPlan, share_batch, shuffled
from duoka.runs.events import EventWriter, global_log, read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.heart import Heart, beat_path, read_beats
from duoka.store.snapshot import divide, lay_out
from duoka.units import Amount

RANKS = (64, 256, 1024)
LENGTH = 2048


@dataclass(frozen=True)
class Row:
    what: str
    size: int
    unit: str
    cpu_s: float
    kept_bytes: int = 0
    bytes_of: str = ""  # what is counted


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    answer = work()
    return time.process_time() - started, answer


def orders(folder: Path) -> Iterator[Row]:
    """The order of one epoch: each rank makes it when it starts, and at each new epoch."""
    for count in (1_000_000, 10_000_000, 100_000_000):
        seconds, order = timed(lambda count=count: shuffled(count, "name/0"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        yield Row("order of an epoch", count, "samples", seconds, peak, "peak of the process")
        del order


def batches_by_tokens(folder: Path) -> Iterator[Row]:
    """The same with batches of equal token counts, and the first of them."""
    for count in (1_000_000, 10_000_000):
        lengths = np.random.default_rng(0).integers(16, LENGTH, count).astype(np.int32)
        plan = EpochPlan(lengths, lengths, fingerprint="f", seed=0, global_batch=Amount(1 << 22, "tokens"))
        seconds, first = timed(lambda plan=plan: plan.batch(0, 0))
        yield Row("epoch plan, batches of 4M tokens", count, "samples", seconds, first.nbytes, "ids of a batch")


def shares(folder: Path) -> Iterator[Row]:
    """One global batch laid out: each rank does it for all ranks, at each step."""
    for ranks in RANKS:
        lengths = np.random.default_rng(0).integers(16, LENGTH, 16 * ranks)
        ids, micro = np.arange(16 * ranks), Amount(4096, "tokens")
        seconds, plans = timed(
            lambda ids=ids, lengths=lengths, ranks=ranks, micro=micro: share_batch(
                ids, lengths, ranks, micro, packing=True, max_length=LENGTH
            )
        )
        yield Row(
            "a global batch of 16 samples a rank, laid out", ranks, "ranks", seconds, len(pickle.dumps(plans)), "of it"
        )


def beats(folder: Path) -> Iterator[Row]:
    """What the launcher's hang watch and `duoka top` read, each time that they look."""
    for ranks in RANKS:
        run = RunFolder(folder / f"beats{ranks}")
        run.logs.mkdir(parents=True)
        heart = Heart(run)
        text = beat_path(run, 0).read_text()
        heart.close()
        for rank in range(ranks):
            beat_path(run, rank).write_text(json.dumps({**json.loads(text), "rank": rank}))
        seconds, found = timed(lambda run=run: read_beats(run))
        assert len(found) == ranks
        yield Row("beats of all ranks, read once", ranks, "ranks", seconds, len(text) * ranks, "of files")


def logs(folder: Path) -> Iterator[Row]:
    """Rank 0's log of steps: what `duoka top` and reports read when they start."""
    for steps in (1_000, 10_000, 100_000):
        run = RunFolder(folder / f"log{steps}")
        writer = EventWriter(global_log(run))
        for step in range(steps):
            writer.write("step", step=step + 1, loss=2.5, grad_norm=1.0, lr=1e-4, num_tokens=4096, step_s=0.5)
        writer.close()
        seconds, _ = timed(lambda run=run: read_steps(run))
        yield Row(
            "event log, read from its beginning", steps, "steps", seconds, global_log(run).stat().st_size, "of the log"
        )


def checkpoints(folder: Path) -> Iterator[Row]:
    """The division of a checkpoint among ranks: once a run, on every rank, of what each says that it has."""
    tensors = {f"model.layers.{number}.weight": torch.empty(1) for number in range(600)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    own = planner.create_local_plan()
    for ranks in (16, 64, 256):
        plans = [replace(own, items=list(own.items)) for _ in range(ranks)]
        seconds, _ = timed(lambda plans=plans: divide(planner, plans, 0))
        size = len(pickle.dumps(own)) * ranks
        yield Row("division of a checkpoint of 600 tensors", ranks, "ranks", seconds, size, "gathered on each rank")
    for count in (1_000, 10_000):
        names = {f"tensor{number}": torch.empty(1) for number in range(count)}
        planner.set_up_planner(names, is_coordinator=True)
        plan = planner.create_local_plan()
        seconds, saved = timed(lambda plan=plan: lay_out(plan))
        yield Row(
            "layout of a rank's file of a checkpoint", count, "tensors", seconds, len(saved.header), "of its header"
        )


PARTS = (orders, batches_by_tokens, shares, beats, logs, checkpoints)


def growth(rows: list[dict[str, Any]], row: dict[str, Any], key: str) -> str:
    """The exponent from the next smaller size of the same."""
    smaller = [one for one in rows if one["what"] == row["what"] and one["size"] < row["size"] and one[key] > 0]
    if not smaller or not row[key]:
        return ""
    last = max(smaller, key=lambda one: one["size"])
    return f"{math.log(row[key] / last[key]) / math.log(row['size'] / last['size']):.2f}"


def page_text(found: dict[str, Any]) -> str:
    lines = ["| what | size | CPU-s | growth | MiB | growth |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        size = f"{row['kept_bytes'] / 2**20:,.2f} {row['bytes_of']}"
        first, second = (growth(found["rows"], row, key) for key in ("cpu_s", "kept_bytes"))
        cells = (row["what"], f"{row['size']:,} {row['unit']}", f"{row['cpu_s']:.3f}", first, size, second)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"{found['machine']['kind']}; measured {found['measured']} UTC, code {found['code']}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", default="", help="parts with this word in their name")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for part in PARTS:
            for row in part(Path(name)) if asked.only in part.__name__ else ():
                rows.append(asdict(row))
                print(row, flush=True)
    found = {"machine": describe_machine(), **stamp(), "rows": rows}
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if asked.page:
        fill_page(asked.page, page_text(found), "figures")


if __name__ == "__main__":
    main()
