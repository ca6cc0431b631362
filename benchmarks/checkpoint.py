"""What saving and going on cost: a 135M model with AdamW's state, beside the savers that people use.

    python benchmarks/checkpoint.py --out benchmarks/checkpoint.json --page benchmarks/checkpoint.md \
        [--only blocked overhead load] [--folder DIR]

Times are of one machine; nothing is asserted. Each measure runs in a process of its own, files are dropped from the
page cache before they are read, and `blocked` alternates all savers, so that a slow disk slows them all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from watching import fill_page, stamp

ROUNDS = 4
TOKENS = 64  # of one row: a step of about a second on two cores; people's are longer
STEPS_A_WINDOW, NUM_SAVES = 4, 9
SMOLLM2_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def build() -> tuple[Any, Any]:
    """The model, in fp32, and an AdamW that has stepped once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4, fused=True)
    for parameter in lm.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return lm, optimizer


def build_store(lm: Any, optimizer: Any, folder: Path, *, asynchronous: bool = True) -> tuple[Any, Any]:
    """duoka's own: the store of a run, and what it saves."""

    from duoka.comm.world import World
    from duoka.model.build import LossModel
    from duoka.parallel.engine import EngineSpec
    from duoka.parallel.single import Single
    from duoka.plan.layout import Layout
    from duoka.store.checkpoint import CheckpointStore
    from duoka.store.contents import Contents
    from duoka.store.state import TrainState

    contents = Contents(Single(EngineSpec(LossModel(lm))), optimizer, TrainState(step=1))
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder, World(), Layout(), asynchronous=asynchronous)
    store.get_ready(contents)
    return store, contents


def on_disk(folder: Path) -> None:
    """Bring what was written to the disk, outside of what is timed: the next saver shall not pay for it."""
    subprocess.run(["sync", "-f", str(folder)], check=True)


def drop_from_cache(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else [folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- how long training stands still ---


def measure_blocked(folder: Path) -> dict[str, Any]:
    import torch

    from duoka.store.checkpoint import Saved
    from duoka.store.retention import Keep

    lm, optimizer = build()
    store, contents = build_store(lm, optimizer, folder / "duoka")
    slow, _ = build_store(lm, optimizer, folder / "duoka-sync", asynchronous=False)
    accelerator = _accelerator(lm, optimizer)
    peers: dict[str, Callable[[Path], Any]] = {
        "accelerate save_state": lambda place: accelerator.save_state(str(place)),
        "transformers Trainer": _trainer(lm, folder),
    }
    times: dict[str, list[float]] = {}
    writes: list[float] = []
    sizes: dict[str, int] = {}
    tokens = torch.randint(0, 1000, (1, TOKENS))
    for _ in range(ROUNDS):
        target = folder / "plain.pt"
        state = {"model": lm.state_dict(), "optimizer": optimizer.state_dict()}
        times.setdefault("torch.save", []).append(timed(lambda: torch.save(state, target)))  # noqa: B023
        flush = timed(lambda: on_disk(folder))
        times.setdefault("torch.save, until on disk", []).append(times["torch.save"][-1] + flush)
        for name, num_passes in (("duoka", 1), ("duoka, the optimizer steps at once", 0)):
            contents.state.step += 1
            store.save(contents, Keep(1))
            for _ in range(num_passes):
                lm(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            store.release()  # what the optimizer's step begins with
            optimizer.zero_grad(set_to_none=True)
            saved = store.wait()
            assert isinstance(saved, Saved), saved
            times.setdefault(name, []).append(saved.blocked_s)
        sizes |= {"duoka": saved.size_bytes, "torch.save": target.stat().st_size}
        writes.append(saved.write_s)
        saved = slow.save(contents, Keep(1))
        assert isinstance(saved, Saved), saved
        times.setdefault("duoka, async: false", []).append(saved.blocked_s)
        for name, save in peers.items():
            place = folder / "peer"
            times.setdefault(name, []).append(timed(lambda: save(place)))  # noqa: B023
            on_disk(folder)
            sizes[name] = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            shutil.rmtree(place, ignore_errors=True)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "size_bytes": sizes,
        "blocked_s": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "duoka_until_on_disk_s": [round(value, 3) for value in writes],
        "of_torch_save": {name: round(value / middle["torch.save"], 4) for name, value in middle.items()},
    }


def _accelerator(lm: Any, optimizer: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(lm, optimizer)
    return accelerator


def _trainer(lm: Any, folder: Path) -> Callable[[Path], Any]:
    """Trainer's own checkpoint: model, AdamW, scheduler, generators and its state."""
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}] * 2
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=True, report_to=[], max_steps=1, save_strategy="no",
        per_device_train_batch_size=1, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=lm, args=arguments, train_dataset=rows)
    trainer.train()

    def save(place: Path) -> None:
        arguments.output_dir = str(place)
        trainer._save_checkpoint(lm, trial=None)

    return save


# --- what it costs a run ---


def measure_overhead(folder: Path) -> dict[str, Any]:
    """Windows of steps with a save in them, between windows without; the difference is what a save costs."""
    import torch

    from duoka.store.retention import Keep

    lm, optimizer = build()
    store, contents = build_store(lm, optimizer, folder / "duoka")
    tokens = torch.randint(0, 1000, (1, TOKENS))

    def step() -> None:
        lm(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def window(number: int) -> float:
        started = time.perf_counter()
        if number:
            contents.state.step = number
            store.save(contents, Keep(1))
        for _ in range(STEPS_A_WINDOW):
            step()
        spent = time.perf_counter() - started
        store.wait()
        return spent

    processor: list[float] = []
    finish = store._finish

    def finish_timed(*arguments: Any) -> Any:
        used = time.thread_time()
        ended = finish(*arguments)
        processor.append(time.thread_time() - used)
        return ended

    store._finish = finish_timed
    for _ in range(3):
        step()
    before, costs = window(0), []
    plain = [before]
    for number in range(1, NUM_SAVES + 1):
        saving = window(number)
        after = window(0)
        costs.append(saving - (before + after) / 2)
        plain.append(after)
        before = after
    return {
        "step_s": round(statistics.median(plain) / STEPS_A_WINDOW, 3),
        "cost_of_a_save_s": [round(value, 3) for value in costs],
        "processor_time_of_the_writing_thread_s": [round(value, 3) for value in processor],
        "overhead_at_one_save_a_minute": round(statistics.median(costs) / 60, 4),
    }


# --- going on ---


def measure_load(folder: Path) -> dict[str, Any]:
    import torch

    from duoka.comm.world import World
    from duoka.store.resume import find_damage
    from duoka.store.retention import Keep

    lm, optimizer = build()
    store, contents = build_store(lm, optimizer, folder / "duoka", asynchronous=False)
    saved = store.save(contents, Keep(1))
    path = saved.path
    torch.save({"model": lm.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    accelerator = _accelerator(lm, optimizer)
    accelerator.save_state(str(folder / "accelerate"))

    def plain() -> None:
        state = torch.load(folder / "plain.pt", weights_only=True)
        lm.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def read_bytes() -> None:
        block = bytearray(1 << 22)
        for file in path.iterdir():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(block):
                    pass

    works: dict[str, Callable[[], Any]] = {
        "reading the bytes": read_bytes,
        "duoka: check": lambda: find_damage(path, World()),
        "duoka: check and load": lambda: (find_damage(path, World()), store.load(path, contents)),
        "torch.load": plain,
        "accelerate load_state": lambda: accelerator.load_state(str(folder / "accelerate")),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            drop_from_cache(folder)
            times[name].append(round(timed(work), 3))
    return {"seconds": times, "median_s": {name: statistics.median(values) for name, values in times.items()}}


MEASURES = {"blocked": measure_blocked, "overhead": measure_overhead, "load": measure_load}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from --out")
    parser.add_argument("--only", nargs="*", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--folder", type=Path, help="Where checkpoints go; default: beside the result.")
    parser.add_argument("--one", choices=list(MEASURES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(MEASURES[given.one](given.folder)))
        return
    found = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for name in given.only:
        base = given.folder or Path(tempfile.gettempdir())
        with tempfile.TemporaryDirectory(dir=base) as folder:
            command = [sys.executable, __file__, "--one", name, "--folder", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        threads = os.environ.get("OMP_NUM_THREADS", f"all of {os.cpu_count()}")
        found[name] = {**json.loads(done.stdout.splitlines()[-1]), "threads": threads, **stamp()}
        print(name, json.dumps(found[name], indent=1), flush=True)
    names = ("duoka", "torch", "transformers", "accelerate")
    found["machine"] = {"cpu": platform.processor() or platform.machine(), "num_cores": os.cpu_count()}
    found["versions"] = {name: version(name) for name in names} | {"python": platform.python_version()}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.page:
        fill_page(given.page, page_text(found), "figures")


def page_text(found: dict[str, Any]) -> str:
    """All that was measured, as tables; a measure that is not in `found` is left out."""
    lines: list[str] = []
    if blocked := found.get("blocked"):
        lines += ["| saver | training stands still, median | spread | of `torch.save` |", "|---|---|---|---|"]
        for name, share in sorted(blocked["of_torch_save"].items(), key=lambda item: item[1]):
            times = blocked["blocked_s"][name]
            middle = statistics.median(times)
            lines.append(f"| {name} | {middle:.2f} s | {min(times):.2f} to {max(times):.2f} | {share:.2f} |")
        until = statistics.median(blocked["duoka_until_on_disk_s"])
        lines += ["", f"duoka's was on the disk, checksummed, {until:.2f} s after the request (median)."]
        lines += [_measured(blocked), ""]
    if load := found.get("load"):
        lines += ["| going on | median |", "|---|---|"]
        lines += [f"| {name} | {seconds:.2f} s |" for name, seconds in load["median_s"].items()]
        lines += ["", _measured(load), ""]
    if overhead := found.get("overhead"):
        costs = overhead["cost_of_a_save_s"]
        lines += [
            f"A save costs a run of steps of {overhead['step_s']:.2f} s {statistics.median(costs):.2f} s (median; "
            f"{min(costs):.2f} to {max(costs):.2f}): {overhead['overhead_at_one_save_a_minute']:.1%} at one a minute.",
            _measured(overhead),
        ]
    return "\n".join(lines)


def _measured(part: dict[str, Any]) -> str:
    return f"Measured {part['measured']} UTC, code {part['code']}, threads: {part['threads']}."


if __name__ == "__main__":
    main()
