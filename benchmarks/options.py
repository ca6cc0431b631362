"""What each option of one device brings: bf16, fused parts, compiled kernels, torch.compile, accumulation.

    python benchmarks/options.py --out benchmarks/options.json --page docs/speed.md [--rounds 3] [--skip compile]

One process, one thread, a random model of SmolLM2-135M's shape with fewer layers, one packed row of documents, full
fine-tuning through the engine that `duoka train` uses. All options step in turns, so that a busy machine slows each of
them alike; a figure is the best of the rounds, in CPU-seconds of this process. Asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from watching import describe_machine, package_versions, publish, stamp

from duoka.config.schema import OptimConfig, ParallelConfig
from duoka.model import native
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.documents import Documents
from duoka.optim.build import build_optimizer
from duoka.parallel.apply import parallelize
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.mesh import Mesh
from duoka.parallel.precision import compute_in
from duoka.parallel.single import Single
from duoka.plan.layout import Layout

LENGTHS = (512, 512, 340, 256, 230, 198)  # documents of the row
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Option:
    title: str
    precision: str = "fp32"
    compile: bool = False
    fused: bool = True
    kernels: bool = True
    parts: int = 1  # micro-batches of a step
    beside: str = ""  # the option that it is compared with


OPTIONS = (
    Option("fp32, as transformers writes it", fused=False),
    Option("fp32, fused parts", beside="fp32, as transformers writes it"),
    Option("fp32, fused parts, 3 micro-batches a step", parts=3, beside="fp32, fused parts"),
    Option("fp32, torch.compile", compile=True, beside="fp32, as transformers writes it"),
    Option("bf16, as transformers writes it", "bf16", fused=False, beside="fp32, as transformers writes it"),
    Option("bf16, fused parts", "bf16", kernels=False, beside="bf16, as transformers writes it"),
    Option("bf16, fused parts, compiled kernels", "bf16", beside="bf16, fused parts"),
    Option("bf16, torch.compile", "bf16", compile=True, kernels=False, beside="bf16, as transformers writes it"),
)


def build_step(option: Option, layers: int) -> Callable[[], float]:
    """One optimizer step of it; answers with its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, attn_implementation=register_attention())
    model = LossModel(LlamaForCausalLM(config)).train()
    layout = Layout(precision=option.precision, compile=option.compile)
    engine: Engine = Single(EngineSpec(model, layout))
    if option.fused:
        engine = parallelize(model, layout, ParallelConfig(), Mesh())
    optimizer = build_optimizer(engine.named_trainable(), OptimConfig(lr=2e-5))
    micros = cut(LENGTHS, option.parts)

    def step() -> float:
        with without_kernels() if not option.kernels else nullcontext():
            losses = [learn(engine, option, micro) for micro in micros]
            engine.clip(optimizer, 1.0)
            engine.step(optimizer)
            engine.zero_grad(optimizer)
        return sum(losses)

    return step


def without_kernels() -> AbstractContextManager[Any]:
    return patch.object(native, "find", lambda: None)


def cut(lengths: tuple[int, ...], parts: int) -> list[tuple[Any, ...]]:
    """Micro-batches of whole documents; half of the tokens are targets."""
    dice = np.random.default_rng(0)
    groups = np.array_split(np.array(lengths), parts)
    micros = []
    for group in groups:
        count = int(group.sum())
        ids = torch.from_numpy(dice.integers(0, SHAPE["vocab_size"], count))
        labels = torch.from_numpy(np.where(dice.random(count) < 0.5, np.roll(ids.numpy(), -1), -100))
        places = torch.cat([torch.arange(length) for length in group.tolist()])
        edges = torch.from_numpy(np.cumsum([0, *group]).astype(np.int32))
        micros.append((ids[None], labels[None], places[None], Documents.of(edges, CPU)))
    return micros


def learn(engine: Engine, option: Option, micro: tuple[Any, ...]) -> float:
    with compute_in(option.precision, CPU):
        loss, _ = engine.model(*micro)
    (loss / sum(LENGTHS)).backward()
    return float(loss.detach()) / sum(LENGTHS)


def measure(options: list[Option], layers: int, rounds: int) -> list[dict[str, Any]]:
    steps = {option.title: build_step(option, layers) for option in options}
    losses, best = {}, dict.fromkeys(steps, float("inf"))
    for title, step in steps.items():  # buffers, the optimizer's state, compilers
        losses[title] = step()
        print(title, f"{losses[title]:.4f}", flush=True)
    for _ in range(rounds):
        for title, step in steps.items():
            started = time.process_time()
            step()
            best[title] = min(best[title], time.process_time() - started)
    return [
        {"title": one.title, "beside": one.beside, "cpu_s": round(best[one.title], 3), "loss": losses[one.title]}
        for one in options
    ]


def page_text(found: dict[str, Any]) -> str:
    by_title = {row["title"]: row for row in found["rows"]}
    lines = ["| option | CPU-s a step | speed | beside | first loss |", "|---|---|---|---|---|"]
    for row in found["rows"]:
        other = by_title.get(row["beside"])
        ratio = f"{other['cpu_s'] / row['cpu_s']:.2f} | {row['beside']}" if other else " | "
        lines.append(f"| {row['title']} | {row['cpu_s']:.2f} | {ratio} | {row['loss']:.4f} |")
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines += [
        "",
        f"{found['layers']} layers, {sum(LENGTHS):,} tokens a step, best of {found['rounds']} rounds in turns. ",
    ]
    lines[-1] += f"{found['machine']['kind']}; {versions}; measured {found['measured']} UTC, code {found['code']}."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", default="\0", help="leave out options with this word")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options = [option for option in OPTIONS if asked.skip not in option.title]
    found = {
        "machine": describe_machine(), "versions": package_versions(sys.executable, ("torch", "transformers")),
        "layers": asked.layers, "rounds": asked.rounds, **stamp(),
        "rows": measure(options, asked.layers, asked.rounds),
    }  # fmt: skip
    publish(found, page_text(found), asked.out, asked.page, "figures")


if __name__ == "__main__":
    main()
