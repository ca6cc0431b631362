"""Run folders written by a script, as training writes them: for tests and benchmarks of what watches runs.

Losses fall along 1/sqrt(step) with a small wave, so that any point of a curve can be told from its step alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from duoka.runs.folder import RunFolder, write_json_atomic

GIB = 2**30
T0 = 1_790_000_000.0


def loss_at(step: int) -> float:
    return 2.0 + 8.0 / math.sqrt(max(1, step)) + 0.05 * math.sin(step / 7)


def step_line(step: int, *, t: float | None = None, **changes: object) -> str:
    values = {
        "v": 1, "type": "step", "t": T0 + step if t is None else t, "step": step, "epoch": step / 1000,
        "loss": loss_at(step), "grad_norm": 1.0 + 1.0 / step, "lr": 2e-4, "num_targets": 800, "num_tokens": 1000,
        "num_samples": 8, "tokens_per_s": 2000.0, "step_s": 0.5, "data_s": 0.01, "forward_s": 0.15,
        "backward_s": 0.25, "wait_s": 0.06, "optimizer_s": 0.02, "sent_bytes": 71736, "memory_bytes": GIB,
    }  # fmt: skip
    return json.dumps({**values, **changes}, ensure_ascii=False) + "\n"


def event_line(type: str, step: int, *, t: float | None = None, **values: object) -> str:
    head = {"v": 1, "type": type, "t": T0 + step if t is None else t, "step": step}
    return json.dumps({**head, **values}, ensure_ascii=False) + "\n"


def nonfinite_line(step: int) -> str:
    """As training writes it of a batch that it leaves out: null, and what it was."""
    return event_line(
        "warning", step, text=f"step {step}: the loss is not finite; its 8 samples were left out (nonfinite.jsonl)",
        loss=None, grad_norm=1.0, nonfinite={"loss": "nan"},
    )  # fmt: skip


def rank_line(rank: int, step: int, *, wait_s: float, memory_bytes: int = GIB, t: float | None = None) -> str:
    return (
        f'{{"v": 1, "type": "rank", "t": {T0 + step if t is None else t}, "rank": {rank}, "step": {step}, '
        f'"step_s": 0.5, "cpu_s": 0.4, "data_s": 0.01, "forward_s": 0.15, "backward_s": {0.3 - wait_s:.6f}, '
        f'"wait_s": {wait_s:.6f}, "optimizer_s": 0.02, "sent_bytes": 71736, "memory_bytes": {memory_bytes}}}\n'
    )


def write_run(
    folder: Path,
    steps: int = 40,
    *,
    ranks: int = 4,
    slow_rank: int | None = None,
    total_steps: int | None = None,
    state: str | None = "done",
    rank_steps: int | None = None,
    **status: object,
) -> RunFolder:
    """A whole run: log, ranks' logs, plan, config, status; `slow_rank` waits least. `rank_steps`: of ranks' logs."""
    run = RunFolder(folder)
    run.make()
    total = total_steps or steps
    with (run.events / "run.jsonl").open("w", encoding="utf-8") as file:
        file.write(event_line("run", 0, total_steps=total, world_size=ranks, layout={"name": f"ddp{ranks}"}))
        for step in range(1, steps + 1):
            file.write(step_line(step))
            if step % max(1, steps // 4) == 0:
                file.write(event_line("eval", step, loss=loss_at(step) + 0.1, accuracy=0.5, num_samples=99))
                file.write(event_line("samples", step, samples=[{"prompt": "多卡 is", "text": f" at step {step}"}]))
                size = {"size_bytes": 3 * GIB, "blocked_s": 0.02, "write_s": 1.0}
                file.write(event_line("checkpoint", step, path=f"step-{step:08d}", **size))
        if state == "done":
            file.write(event_line("end", steps, reason="done"))
    for rank in range(ranks):
        count = rank_steps or steps
        wait_s = 0.01 if rank == slow_rank else 0.1
        with (run.events / f"rank{rank:05d}.jsonl").open("w", encoding="utf-8") as file:
            every = max(1, steps // max(1, count))
            file.writelines(
                rank_line(rank, step, wait_s=wait_s, memory_bytes=GIB + rank * 2**20)
                for step in range(every, steps + 1, every)
            )
    (run.logs / "rank00000.log").write_text("begins\ntrains 训练\n", encoding="utf-8")
    run.config.write_text(f"model: demo\noptim:\n  lr: 0.0002\noutput: {folder}\n", encoding="utf-8")
    write_json_atomic(run.plan, plan_of(ranks))
    write_json_atomic(run.env, {"duoka": "0.1.0", "python": "3.11", "packages": {"torch": "2.13.0"}, "host": "one"})
    if state is not None:
        write_json_atomic(run.status, {"state": state, "world_size": ranks, "version": 1, **status})
        progress = {"after": 1, "state": state, "step": steps, "total_steps": total, "loss": loss_at(steps)}
        write_json_atomic(run.progress, progress)
    return run


def plan_of(ranks: int) -> dict[str, object]:
    memory = {"peak_bytes": GIB, "low_bytes": GIB // 2, "high_bytes": 2 * GIB, "available_bytes": 4 * GIB, "parts": {}}
    costs = {"price_per_hour": 3.0}
    return {"memory": memory, "machine": {"device": "cpu", "gpus": []}, "costs": costs, "layout": {"name": "ddp"}}
