"""What each axis costs beside one process, on one machine's CPUs: bytes by theory, ledger and wire, CPU seconds, waits.

    python benchmarks/parallel.py --out benchmarks/parallel.json --table benchmarks/parallel.md

Worlds run in a network namespace of their own, as those of traffic.py. transformers' and DeepSpeed's own tensor
parallelism compute the same tokens through the same sizes. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from traffic import begin_alone, loopback_bytes, report, run_world

# Layers, width, feed-forward, heads, key-value heads, words.
L, D, F, H, K, V = 8, 192, 512, 4, 2, 512
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 128
TOKENS, MICROS, STEPS = 128, 8, 2
KINDS = ("llama", "qwen3_moe")
# Layout, schedule, model.
CASES: dict[int, list[tuple[str, str, str]]] = {
    1: [("single", "1f1b", "llama"), ("single", "1f1b", "qwen3_moe")],
    2: [
        ("ddp2", "1f1b", "llama"), ("single.tp2", "1f1b", "llama"), ("ddp1.sp2", "1f1b", "llama"),
        *(("single.pp2", schedule, "llama") for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")),
        ("fsdp2.ep2", "1f1b", "qwen3_moe"),
    ],
    4: [
        ("fsdp2.tp2", "1f1b", "llama"), ("single.tp2.pp2", "1f1b", "llama"), ("zero1x1.tp2.sp2", "1f1b", "llama"),
        ("ddp2.pp2", "zero-bubble", "llama"), ("single.pp4", "1f1b", "llama"), ("single.pp4", "zbv", "llama"),
    ],
}  # fmt: skip


def theory(layout: Any, kind: str, targets: int) -> float:
    """Bytes that a rank sends in a step, on average, by hand; shared with nothing. `targets` of a micro-batch."""
    rows, micros, head = TOKENS / layout.sp, MICROS / layout.dp, D // H
    layers = L / layout.pp
    attention = 2 * D * D + 2 * D * K * head
    plain = 2 * D + attention + (3 * D * F if kind == "llama" else D * EXPERTS + 2 * head)
    cut = layers * (plain - 2 * D) / layout.tp + layers * 2 * D + V * D * 2 / layout.pp / layout.tp
    sent = 0.0
    if layout.dp * layout.sp > 1:
        ranks = layout.dp * layout.sp
        copies = {"ddp": 2, "zero1": 2, "fsdp": 3 * micros}[layout.strategy]
        sent += copies * cut * (ranks - 1) / ranks
    if layout.tp > 1:
        ends = (rows * D + targets / layout.sp * (D + 3)) / layout.pp
        sent += 2 * (layout.tp - 1) / layout.tp * micros * (4 * layers * rows * D + ends)
    if layout.sp > 1:
        queries, held = H // layout.tp, max(1, K // layout.tp)
        asked = (queries + 2 * max(held, layout.sp)) * head
        sent += 2 * micros * layers * rows * (asked + queries * head) * (layout.sp - 1) / layout.sp
    if layout.pp > 1:
        cuts = layout.pp * layout.virtual - 1 - (layout.schedule == "zbv")
        sent += 2 * micros * cuts / layout.pp * rows * D
    if layout.ep > 1:
        sent += 4 * micros * layers * rows * CHOSEN * D * (layout.ep - 1) / layout.ep
    return 4 * sent


def write_config(kind: str) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": H,
        "num_key_value_heads": K, "tie_word_embeddings": False, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "llama":
        return LlamaConfig(**sizes)
    return Qwen3MoeConfig(
        **sizes, head_dim=D // H, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=EXPERT_WIDTH
    )


def draw(step: int) -> Any:
    """(micro-batches, tokens) of one step; every second token is a target."""
    import torch

    return torch.randint(3, V, (MICROS, TOKENS), generator=torch.Generator().manual_seed(step))


def batch_of(step: int, mesh: Any) -> Any:
    import numpy as np
    import torch

    from duoka.data.feed.loader import Batch, GlobalBatch

    drawn, micros = draw(step), []
    for ids in drawn[mesh.data.rank :: mesh.data.size]:
        labels = ids.roll(-1)
        labels[::2] = -100
        micros.append(
            Batch(
                input_ids=ids[None], labels=labels[None], position_ids=torch.arange(TOKENS)[None],
                boundaries=torch.tensor([0, TOKENS], dtype=torch.int32), attention_mask=None,
                num_targets=TOKENS // 2, num_tokens=TOKENS, num_samples=1,
            )
        )  # fmt: skip
    return GlobalBatch(micros, MICROS * TOKENS // 2, MICROS, MICROS * TOKENS, 0, step, np.arange(MICROS))


class Mean:
    """The objective: mean over targets."""

    metrics: dict[str, str] = {}  # noqa: RUF012

    def denominators(self, batch: Any) -> dict[str, float]:
        return {"tokens": batch.global_targets}

    def sums(self, model: Any, micro: Any, device: Any) -> Any:
        from duoka.parallel.inputs import model_inputs
        from duoka.parallel.objective import Sums

        return Sums({"tokens": model(**model_inputs(micro, device))[0]})


def measure(layout: Any, kind: str, world: Any, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from duoka.comm.ledger import LEDGER, sent_bytes
    from duoka.config.schema import ParallelConfig
    from duoka.model.build import LossModel
    from duoka.model.request import ModelRequest
    from duoka.model.shards import build_without_memory
    from duoka.parallel.apply import parallelize
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.pipeline import bubble

    lm, source = build_without_memory(ModelRequest(folder / kind, dtype=torch.float32))
    mesh = build_mesh(layout, world)
    asked = ParallelConfig(strategy="auto" if layout.strategy == "single" else layout.strategy)
    engine = parallelize(LossModel(lm), layout, asked, mesh, source)
    optimizer = torch.optim.SGD(list(engine.named_trainable().values()), lr=1e-3)
    engine.model.train()

    def step(number: int) -> Any:
        sums = engine.forward_backward(batch_of(number, mesh), Mean())
        engine.clip(optimizer, 1.0)
        engine.step(optimizer)
        engine.zero_grad(optimizer)
        return sums

    step(0), step(1)
    wait = dist.barrier if world.size > 1 else lambda: None
    wait()
    LEDGER.take()
    wire, cpu, started = loopback_bytes(), time.process_time(), time.perf_counter()
    waited = sum(step(2 + number).times.wait_s for number in range(STEPS))
    cpu = time.process_time() - cpu
    sent = sent_bytes(LEDGER.take())
    wait()
    seconds, wire = time.perf_counter() - started, loopback_bytes() - wire
    cpu, sent, waited = world.sum([cpu, float(sent), waited])
    return {
        "layout": layout.name, "schedule": layout.schedule if layout.pp > 1 else "", "model": kind,
        "num_processes": world.size, "cpu_s": cpu / STEPS, "seconds": seconds / STEPS,
        "waited_share": waited / world.size / seconds,
        "theory_bytes": theory(layout, kind, TOKENS // 2), "ledger_bytes": sent / world.size / STEPS,
        "wire_bytes": wire / world.size / STEPS,
        "bubble": bubble(layout.schedule, layout.pp, layout.virtual, MICROS / layout.dp) if layout.pp > 1 else 0.0,
    }  # fmt: skip


def work(folder: Path) -> None:
    """One rank."""
    import torch

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.plan.layout import parse_layout

    torch.set_num_threads(1)
    world = start_world(ParallelConfig(strategy="fsdp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto"))
    rows = []
    for name, schedule, kind in CASES[world.size]:
        virtual = 2 if schedule in ("interleaved", "zbv") else 1
        layout = replace(parse_layout(name), schedule=schedule, virtual=virtual)  # type: ignore[arg-type]
        rows.append(measure(layout, kind, world, folder))
        if world.is_main:
            print(f"{rows[-1]['layout']} {schedule}: {rows[-1]['seconds']:.1f} s a step", file=sys.stderr, flush=True)
    if world.is_main:
        print(json.dumps(rows))
    end_world(world)


def loss_of(model: Any, ids: Any) -> Any:
    """A micro-batch's part of the mean over a step's targets."""
    import torch.nn.functional as functional

    labels = ids.roll(-1)
    labels[::2] = -100
    logits = model(input_ids=ids[None]).logits[0]
    return functional.cross_entropy(logits, labels, reduction="sum") / (MICROS * TOKENS // 2)


def time_peer(name: str, step: Callable[[int], None]) -> None:
    import torch
    import torch.distributed as dist

    step(0), step(1)
    dist.barrier()
    wire, cpu, started = loopback_bytes(), time.process_time(), time.perf_counter()
    for number in range(STEPS):
        step(2 + number)
    spent = torch.tensor([time.process_time() - cpu])
    dist.barrier()
    seconds, wire = time.perf_counter() - started, loopback_bytes() - wire
    dist.all_reduce(spent)
    if dist.get_rank() == 0:
        print(json.dumps([{
            "layout": name, "schedule": "", "model": "llama", "num_processes": 2,
            "cpu_s": float(spent) / STEPS, "seconds": seconds / STEPS, "wire_bytes": wire / 2 / STEPS,
        }]))  # fmt: skip
    dist.destroy_process_group()


def work_as_transformers(folder: Path) -> None:
    """One rank of transformers' own tensor parallelism: the same tokens, the same sum of losses, the same update."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", tp_plan="auto", dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step(number: int) -> None:
        for ids in draw(number):
            loss_of(model, ids).backward()
        optimizer.step()  # no norm: theirs over cut and whole tensors is not the model's
        optimizer.zero_grad()

    time_peer("transformers tp2", step)


def work_as_deepspeed(folder: Path) -> None:
    """And one of DeepSpeed's AutoTP, at stage 0."""
    import torch
    import torch.distributed as dist

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile it now
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32).train()
    model = deepspeed.tp_model_init(plain, tp_size=2, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROS, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 2}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(number: int) -> None:
        for ids in draw(number):
            engine.backward(loss_of(engine, ids))
            engine.step()

    time_peer("DeepSpeed AutoTP 2", step)


PEERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "transformers": (
        work_as_transformers,
        "transformers tp2 is `from_pretrained(tp_plan='auto')` over gloo; its MB are the wire's. It gathers logits, "
        "and its step has no gradient norm, which it does not compute over cut tensors.",
    ),
    "deepspeed": (
        work_as_deepspeed,
        "DeepSpeed AutoTP 2 is `tp_model_init` at stage 0 over gloo, clipping on; its MB are the wire's.",
    ),
}


def table(found: dict[str, Any]) -> str:
    """The result as a page."""
    rows, alone = found["rows"], found["namespace"]
    out = [
        "# What each axis costs on one machine's CPUs", "",
        f"A Llama of {L} layers, {D} wide ({EXPERTS} experts a layer in Qwen3-MoE), fp32; a step is {MICROS} "
        f"micro-batches of {TOKENS} tokens, whatever the layout. Bytes are what a rank sends in a step, on average: by "
        "hand, then *ledger* and *wire* (the loopback device's counter, headers included) as shares of that. CPU "
        "seconds are those of all processes together beside one process of the same model: what the exchange costs "
        "where all share the cores. *Bubble* is the schedule's, where forward pass and both parts of the backward pass "
        "last alike; *waited* is what ranks waited for each other in this run, on cores that they share.", "",
        "| layout | schedule | N | MB sent | ledger | wire | CPU s beside one | bubble | waited |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    one = {row["model"]: row["cpu_s"] for row in rows if row["num_processes"] == 1}
    for row in rows:
        out.append(_line(row, one[row["model"]], alone))
    out += ["", *found["notes"], "", f"{found['machine']}, torch {found['torch']}.", ""]
    return "\n".join(out)


def _line(row: dict[str, Any], one: float, alone: bool) -> str:
    by_hand = row.get("theory_bytes", 0.0)
    shares = ["", ""]
    if by_hand:
        wire = f"{row['wire_bytes'] / by_hand:.3f}" if alone else "not measured"
        shares = [f"{row['ledger_bytes'] / by_hand:.3f}", wire]
    sent = by_hand or row["wire_bytes"] if row["num_processes"] > 1 else 0.0
    words = f"{row['layout']}{' (experts)' if row['model'] != 'llama' else ''}"
    bubble = f"{row['bubble']:.3f}" if row.get("bubble") else ""
    waited = f"{row['waited_share']:.2f}" if "waited_share" in row and row["num_processes"] > 1 else ""
    return (
        f"| {words} | {row['schedule']} | {row['num_processes']} | {sent / 1e6:.2f} | {shares[0]} | {shares[1]} "
        f"| {row['cpu_s'] / one:.2f} | {bubble} | {waited} |"
    )


def peers(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name, (_, what) in PEERS.items():
        try:
            rows += run_world(2, __file__, str(folder), "--peer", name)
        except (SystemExit, subprocess.TimeoutExpired, IndexError) as error:
            notes.append(f"{name}'s own tensor parallelism did not run: {error or type(error).__name__}.")
        else:
            notes.append(what)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    for flag in ("--rank", "--alone"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.rank:
        run: Callable[[Path], None] = PEERS[options.peer][0] if options.peer else work
        run(options.folder)
        return
    if not options.alone:
        begin_alone()
    with tempfile.TemporaryDirectory() as made:
        import torch
        from transformers import AutoModelForCausalLM

        for kind in KINDS:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(write_config(kind), dtype=torch.float32).save_pretrained(Path(made) / kind)
        notes: list[str] = []
        rows = [row for size in CASES for row in run_world(size, __file__, made, within_s=900)]
        rows += peers(Path(made), notes)
    report({"rows": rows, "namespace": options.alone, "notes": notes}, table, options)


if __name__ == "__main__":
    main()
