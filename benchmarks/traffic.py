"""Bytes that each strategy sends in a step: theory, the ledger, and the network's own counters, side by side.

    python benchmarks/traffic.py --out benchmarks/traffic.json --table benchmarks/traffic.md

Each world runs in a network namespace of its own, so that the loopback device's counter is this benchmark's alone;
where no namespace can be made, the column says "not measured". Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIZES, MICRO_BATCHES = (2, 4), (1, 3)
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
TOKENS, VOCABULARY = 16, 512
# Copies of all parameters that a step moves, for g micro-batches, each times (N-1)/N. Written by hand and shared with
# nothing: plan/traffic.py is held against the ledger by a test, and the ledger against this and the wire here.
THEORY = {
    "ddp": ("2P", lambda g: 2),
    "zero1": ("2P", lambda g: 2),
    "zero2": ("(g+1)P", lambda g: g + 1),
    "fsdp": ("3gP", lambda g: 3 * g),
}


def loopback_bytes() -> int:
    """Bytes that went through the loopback device of this namespace (/sys would show the machine's)."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def build_model() -> Any:
    """An untied head: a tied one belongs to the root, which stays gathered between forward and backward."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from duoka.model.attention import register_attention
    from duoka.model.build import LossModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation=register_attention(),
    )  # fmt: skip
    return LossModel(LlamaForCausalLM(config))


def take_step(engine: Any, num_micro_batches: int) -> None:
    import torch

    from duoka.optim.clip import clip_gradients

    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    places = torch.arange(TOKENS)[None]
    for index in range(num_micro_batches):
        with engine.exchange(index == num_micro_batches - 1):
            loss, _ = engine.model(input_ids=ids, labels=ids, position_ids=places)
            loss.backward()
    clip_gradients(engine.named_trainable().values(), 1.0)
    for parameter in engine.named_trainable().values():
        parameter.grad = None


def measure(strategy: str, world: Any, *, is_honest: bool) -> list[dict[str, Any]]:
    """Rows of one strategy on this world; `is_honest=False` uses gloo's own reduce-scatter."""
    import torch.distributed as dist

    from duoka.comm.ledger import LEDGER, sent_bytes
    from duoka.config.schema import ParallelConfig
    from duoka.parallel import fsdp_comm
    from duoka.parallel.apply import parallelize
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import Layout

    plain = fsdp_comm.is_gloo
    fsdp_comm.is_gloo = plain if is_honest else lambda *_: False
    config = ParallelConfig(strategy=strategy)  # type: ignore[arg-type]
    shard = 1 if strategy == "ddp" else world.size
    layout = Layout(dp=world.size, strategy=strategy, shard=shard)  # type: ignore[arg-type]
    engine = parallelize(build_model(), layout, config, build_mesh(layout, world))
    parameters = sum(p.numel() for p in engine.named_trainable().values())
    rows = []
    for count in MICRO_BATCHES:
        take_step(engine, count)  # DDP settles its buckets, FSDP its order
        take_step(engine, count)
        dist.barrier()
        before, started = loopback_bytes(), time.perf_counter()
        LEDGER.take()
        take_step(engine, count)
        dist.barrier()
        seconds, wire = time.perf_counter() - started, loopback_bytes() - before
        words, copies = THEORY[strategy]
        rows.append({
            "strategy": strategy, "num_processes": world.size, "num_micro_batches": count, "formula": words,
            "gloo_reduce_scatter": not is_honest, "num_parameters": parameters,
            "theory_bytes": copies(count) * 4 * parameters * (world.size - 1) // world.size,
            "ledger_bytes": sent_bytes(LEDGER.take()), "wire_bytes": wire // world.size, "seconds": seconds,
        })  # fmt: skip
    fsdp_comm.is_gloo = plain
    return rows


def work() -> None:
    """One rank."""
    import torch

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig

    torch.set_num_threads(1)
    world = start_world(ParallelConfig())
    rows = [row for strategy in STRATEGIES for row in measure(strategy, world, is_honest=True)]
    rows += [row for strategy in STRATEGIES[1:] for row in measure(strategy, world, is_honest=False)]
    if world.is_main:
        print(json.dumps(rows))
    end_world(world)


def run_world(size: int, script: str = __file__, *words: str, within_s: float = 200) -> list[dict[str, Any]]:
    """A world of processes of a script of this folder, called with --rank and `words`; rank 0 prints the rows."""
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    command = [sys.executable, script, "--rank", *words]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said, _ = ranks[0].communicate(timeout=within_s)
        if any(rank.wait(timeout=30) for rank in ranks):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
    return list(json.loads(said.splitlines()[-1]))


def table(found: dict[str, Any]) -> str:
    """The result as a page."""
    rows, alone = found["rows"], found["namespace"]
    honest = [row for row in rows if not row["gloo_reduce_scatter"]]
    out = [
        "# Bytes that a rank sends in one step", "",
        f"Model: {honest[0]['num_parameters']:,} parameters in fp32 with a head of its own; N processes, g "
        "micro-batches in a step. Theory is the formula times 4 bytes times (N-1)/N. *Ledger*: what duoka counts in "
        "every run (`sent_bytes` in the event log). *Wire*: the loopback device's counter per rank, headers "
        "included, in a network namespace of its own. The guides' 1 : 1 : 1.5 holds for g = 1 only.", "",
        "| strategy | N | g | theory | MB | ledger | wire |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in honest:
        out.append(_line(row, alone))
    out += [
        "", "The same with gloo's own reduce-scatter, which sends a whole all-reduce (duoka uses an all-to-all and a "
        "local sum there instead); times are one step each, an indication:", "",
        "| strategy | N | g | theory | MB | wire | time beside duoka's |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    key = ("strategy", "num_processes", "num_micro_batches")
    for row in (row for row in rows if row["gloo_reduce_scatter"]):
        twin = next(one for one in honest if all(one[name] == row[name] for name in key))
        wire = f"{row['wire_bytes'] / row['theory_bytes']:.3f}" if alone else "not measured"
        out.append(
            f"| {row['strategy']} | {row['num_processes']} | {row['num_micro_batches']} | {row['formula']} "
            f"| {row['theory_bytes'] / 1e6:.2f} | {wire} | {row['seconds'] / twin['seconds']:.2f} |"
        )
    out += ["", f"Ledger and wire are shares of the theory. {found['machine']}, torch {found['torch']}.", ""]
    return "\n".join(out)


def _line(row: dict[str, Any], alone: bool) -> str:
    ledger, wire = (row[name] / row["theory_bytes"] for name in ("ledger_bytes", "wire_bytes"))
    return (
        f"| {row['strategy']} | {row['num_processes']} | {row['num_micro_batches']} | {row['formula']} "
        f"| {row['theory_bytes'] / 1e6:.2f} | {ledger:.3f} | {f'{wire:.3f}' if alone else 'not measured'} |"
    )


def begin_alone() -> None:
    """This script anew, in a network namespace whose loopback nobody else counts on; here, where none can be made."""
    words = " ".join(f"'{word}'" for word in [sys.executable, *sys.argv, "--alone"])
    inside = ["unshare", "-rn", "sh", "-c", f"ip link set lo up && exec {words}"]
    can = subprocess.run([*inside[:4], "ip link set lo up"], capture_output=True).returncode == 0
    os.execvp(inside[0], inside) if can else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.rank:
        work()
        return
    if not options.alone:
        begin_alone()
    rows = [row for size in SIZES for row in run_world(size)]
    report({"rows": rows, "namespace": options.alone}, table, options)


def report(found: dict[str, Any], page: Callable[[dict[str, Any]], str], options: argparse.Namespace) -> None:
    """The figures to `--out`, their page to `--table` and to the screen; muon.py reports in the same way."""
    found |= {"torch": version("torch"), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for path, text in ((options.out, json.dumps(found, indent=1) + "\n"), (options.table, page(found))):
        if path:
            path.write_text(text, encoding="utf-8")
    print(page(found))


if __name__ == "__main__":
    main()
