"""What data costs: tokenizing, planning, packing, balance and resuming, beside the libraries that people use for it.

    python benchmarks/data.py --out benchmarks/data.json [--peers PYTHON] [--model FOLDER]

`--peers` is the interpreter of an environment with datasets, trl, torchdata and accelerate; without it, or for those
that it lacks, the result says "not measured". Times are ratios on one machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(__file__).with_name("data_peers.py")
ROW = 2048


def chat_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as chat data have them: log-normal, median 365 tokens, cut at 2048."""
    return np.clip(np.random.default_rng(seed).lognormal(5.9, 0.9, count), 16, ROW).astype(np.int32)


def in_own_process(name: str, *arguments: str) -> Any:
    """Run one measure alone, so that its memory is its own."""
    command = [sys.executable, __file__, "--one", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def peak_bytes() -> int:
    """This process's highest memory, not that of the process which started it, as ru_maxrss may be."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def plan_epoch(count: str) -> dict[str, float]:
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.units import Amount

    lengths = chat_lengths(int(count))
    before = peak_bytes()
    out: dict[str, float] = {}
    for name, batch in (("samples", Amount(64, "samples")), ("tokens", Amount(65_536, "tokens"))):
        started = time.perf_counter()
        plan = EpochPlan(lengths, lengths // 2, fingerprint="f", seed=1, global_batch=batch)
        last = plan.num_batches() * 9 // 10
        plan.batch(0, last)
        out[f"{name}_s"] = time.perf_counter() - started
    return {**out, "peak_bytes": peak_bytes(), "before_bytes": before}


def tokenize(folder: str, data: str) -> dict[str, float]:
    os.environ["DUOKA_CACHE"] = tempfile.mkdtemp(dir=Path(data).parent)
    from duoka.config.schema import RunConfig
    from duoka.data.prepare import prepare_data

    sets = {"train": [data], "max_length": ROW, "workers": 2}
    config = RunConfig.model_validate({"model": "demo", "data": sets})
    times = []
    for _ in range(2):
        started = time.perf_counter()
        prepared = prepare_data(config, Path(), Path(folder))
        times.append(time.perf_counter() - started)
    num_tokens = prepared.report.train_tokens
    return {"first_s": times[0], "reused_s": times[1], "num_tokens": num_tokens, "tokens_per_s": num_tokens / times[0]}


def write_chats(path: Path, count: int) -> None:
    dice = np.random.default_rng(3)
    words = [
        f"{a}{b}" for a in ("pre", "con", "un", "re", "多", "inter") for b in ("form", "卡", "act", "ing ", "port")
    ]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = []
            for turn in range(4):
                text = " ".join(dice.choice(words, int(dice.integers(10, 120))))
                turns.append({"role": "assistant" if turn % 2 else "user", "content": text})
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def layouts() -> dict[str, float]:
    """Fill of flat packing and of fixed rows, and balance over 8 ranks."""
    from duoka.data.feed.epoch_plan import EpochPlan, cost_of, share_batch, share_rows
    from duoka.units import Amount

    lengths = chat_lengths(20_000)
    by_samples = EpochPlan(lengths, lengths // 2, fingerprint="f", seed=1, global_batch=Amount(512, "samples"))
    worst, computed, real = 1.0, 0, 0
    for index in range(by_samples.num_batches() - 1):
        ids = by_samples.batch(0, index)
        shares = share_batch(ids, lengths, 8, Amount(8192, "tokens"), packing=True, max_length=ROW)
        costs = [sum(cost_of(int(lengths[i])) for plan in share for i in plan.sample_ids) for share in shares]
        worst = max(worst, max(costs) / float(np.mean(costs)))
        real += int(lengths[ids].sum())
        computed += sum(max(1, sum(int(lengths[i]) for i in plan.sample_ids)) for share in shares for plan in share)
    out = {"flat_not_real": 1 - real / computed, "costliest_rank_over_mean": worst}
    for tokens in (65_536, 262_144, 524_288):
        plan = EpochPlan(lengths, lengths // 2, fingerprint="f", seed=1, global_batch=Amount(tokens, "tokens"))
        rows = used = 0
        for index in range(plan.num_batches()):
            ids = plan.batch(0, index)
            (share,) = share_rows(ids, lengths, 1, 1, max_length=ROW)
            rows, used = rows + sum(len(micro.rows) for micro in share), used + int(lengths[ids].sum())
        out[f"fixed_rows_full_at_{tokens}_tokens"] = used / (rows * ROW)
    return out


def resume(count: str) -> dict[str, float]:
    """From lengths in memory to the batch at 90% of the epoch, and back at the start of one."""
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.feed.loader import Loader
    from duoka.data.feed.prefetch import EpochLoader
    from duoka.data.tokens.template import Sample
    from duoka.units import Amount

    class Stub:
        lengths = chat_lengths(int(count))

        def __len__(self) -> int:
            return len(self.lengths)

        def segments(self, index: int) -> list[Sample]:
            size = int(self.lengths[index])
            return [Sample(np.ones(size, np.int32), np.ones(size, bool))]

    store = Stub()
    times = {}
    for name, share in (("start_s", 0.0), ("resume_at_90_percent_s", 0.9)):
        started = time.perf_counter()
        plan = EpochPlan(store.lengths, store.lengths // 2, fingerprint="f", seed=1, global_batch=Amount(64, "samples"))
        micro = Amount(8192, "tokens")
        loader = EpochLoader(
            Loader(store, plan, rank=0, num_ranks=1, micro=micro, packing=True, max_length=ROW, pad_id=0), prefetch=0
        )
        loader.load_state_dict({**loader.state_dict(), "index": int(share * len(loader))})
        next(iter(loader))
        times[name] = time.perf_counter() - started
    times["one_batch_of_64_s"] = _timed(lambda: loader.loader.global_batch(0, 5))
    return times


def _timed(function: Any) -> float:
    started = time.perf_counter()
    for _ in range(10):
        function()
    return (time.perf_counter() - started) / 10


MEASURES = {"plan": plan_epoch, "tokenize": tokenize, "layouts": layouts, "resume": resume}


def peer(python: str | None, name: str, *arguments: str) -> Any:
    if python is None:
        return "not measured"
    done = subprocess.run([python, str(PEERS), name, *arguments], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else "not measured"


def measure_all(python: str | None, model: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "chats.jsonl"
        write_chats(data, 8_000)
        lengths = Path(folder) / "lengths.json"
        lengths.write_text(json.dumps(chat_lengths(20_000).tolist()))
        return {
            "planning": {count: in_own_process("plan", count) for count in ("100000", "1000000", "10000000")},
            "layouts": in_own_process("layouts"),
            "packing_trl_bfd": peer(python, "bfd", str(lengths)),
            "tokenizing": in_own_process("tokenize", model, str(data)) if model else "not measured",
            "tokenizing_datasets_map": peer(python, "map", model, str(data)) if model else "not measured",
            "resume": {count: in_own_process("resume", count) for count in ("100000", "1000000", "10000000")},
            "resume_skip_first_batches": peer(python, "skip", "1000000"),
            "resume_stateful_loader": peer(python, "stateful", "1000000"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers")
    parser.add_argument("--model")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, *arguments = options.one
        print(json.dumps(MEASURES[name](*arguments)))
        return
    machine = {
        "processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(), **{name: version(name) for name in ("numpy", "torch", "tokenizers")},
    }  # fmt: skip
    config = {"row_tokens": ROW, "lengths": "log-normal(5.9, 0.9) cut to 16..2048", "chats": 8_000, "workers": 2}
    text = json.dumps({"machine": machine, "config": config, **measure_all(options.peers, options.model)}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
