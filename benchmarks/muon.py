"""Muon where FSDP2 has cut the matrices: duoka's exchange beside torch.optim.Muon on the same DTensors.

    python benchmarks/muon.py --out benchmarks/muon.json --table benchmarks/muon.md

Counts what one optimizer step sends: collectives, their bytes and the step's CPU time. Both counts are taken at
the dispatcher, below both optimizers; duoka's ledger stands beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from traffic import report, run_world

SIZES = (2,)  # with 4, torch.optim.Muon takes minutes on two cores
LAYERS, WIDTH, MLP = 1, 256, 704
STEPS = 1


def count_collectives(size: int) -> Any:
    """A mode that counts collectives below DTensor, and the bytes that a rank sends for them."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[str, int] = {}
            self.sent_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it unfolds into its own operations, which come here again
            name = func.overloadpacket.__name__
            if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
                self.calls[name] = self.calls.get(name, 0) + 1
                self.sent_bytes += sent_by(name, args, size)
            return func(*args, **(kwargs or {}))

    def sent_by(name: str, args: Any, size: int) -> int:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if "alltoall" in name:
            whole, rank = args[1], torch.distributed.get_rank()
            kept = args[4][rank] if args[4] else len(whole) // size
            return (whole.numel() - kept * (whole.numel() // max(1, len(whole)))) * whole.element_size()
        held = first.numel() * first.element_size()
        if "all_gather" in name or "allgather" in name:
            return held * (size - 1)
        return held * (size - 1) // size * (2 if "reduce" in name and "scatter" not in name else 1)

    return Counter()


def build(world: Any) -> dict[str, Any]:
    """The matrices of a model's layers, cut by FSDP2, with gradients that need no pass."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH)] * 4 + [(MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP)]
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(*(torch.nn.Linear(c, r, bias=False) for r, c in shapes)) for _ in range(LAYERS))
    )
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter).add_(parameter.detach())
    return dict(layers.named_parameters())


def measure(tool: str, world: Any) -> dict[str, Any]:
    import torch

    from duoka.comm.ledger import LEDGER, sent_bytes
    from duoka.config.schema import OptimConfig
    from duoka.optim.build import build_optimizer
    from duoka.parallel.matrices import RowMatrices

    named = build(world)
    if tool == "duoka":
        optim = OptimConfig(name="muon", lr=0.02, adamw_lr=1e-3)
        optimizer = build_optimizer(named, optim, roles=dict.fromkeys(named, "matrix"), sharing=RowMatrices)
    else:
        optimizer = torch.optim.Muon(named.values(), lr=0.02)
    optimizer.step()
    LEDGER.take()
    with count_collectives(world.size) as counted:
        optimizer.step()
    ledger = sent_bytes(LEDGER.take())
    cpu_s, started = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    spent = {
        "cpu_s": (time.process_time() - cpu_s) / STEPS, "wall_s": (time.perf_counter() - started) / STEPS,
        "sent_bytes": float(counted.sent_bytes), "ledger_bytes": float(ledger),
    }  # fmt: skip
    mean = {key: value / world.size for key, value in zip(spent, world.sum(list(spent.values())), strict=True)}
    num_calls = sum(counted.calls.values())
    return {
        "tool": tool, "num_processes": world.size, "num_matrices": len(named), "calls": counted.calls,
        "num_calls": num_calls, "calls_per_matrix": round(num_calls / len(named), 2), **mean,
    }  # fmt: skip


def work() -> None:
    """One rank."""
    import torch

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig

    torch.set_num_threads(1)
    world = start_world(ParallelConfig())
    rows = [measure(tool, world) for tool in ("duoka", "torch.optim.Muon")]
    if world.is_main:
        print(json.dumps(rows))
    end_world(world)


def table(found: dict[str, Any]) -> str:
    first = found["rows"][0]
    out = [
        "# What a step of Muon sends under FSDP2", "",
        f"{first['num_matrices']} matrices ({LAYERS} layer of width {WIDTH}), fp32, gloo, one thread each; means over "
        "ranks. torch.optim.Muon computes its products in bf16, duoka on a CPU in fp32: times are those of each as it "
        "is, and bf16 is slow on this machine.", "",
        "| optimizer | N | collectives a step | per matrix | MB sent | ledger | CPU s a step |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found["rows"]:
        ledger = f"{row['ledger_bytes'] / 1e6:.2f}" if row["ledger_bytes"] else ""
        out.append(
            f"| {row['tool']} | {row['num_processes']} | {row['num_calls']} | {row['calls_per_matrix']} "
            f"| {row['sent_bytes'] / 1e6:.2f} | {ledger} | {row['cpu_s']:.3f} |"
        )
    out += ["", f"{found['machine']}, torch {found['torch']}.", ""]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    if options.rank:
        work()
        return
    rows = [row for size in options.sizes for row in run_world(size, __file__)]
    report({"rows": rows}, table, options)


if __name__ == "__main__":
    main()
