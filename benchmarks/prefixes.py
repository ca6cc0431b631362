"""What prefix sharing brings: a pass over rows whose documents begin alike, with it and without, in turns.

    python benchmarks/prefixes.py --out benchmarks/prefixes.json --page docs/speed.md [--rounds 3] [--layers 30]

One process, one thread, a random model of SmolLM2-135M's shape, forward and backward of one packed row of about 2,000
tokens, full fine-tuning and LoRA. A figure is the best of the rounds, in CPU-seconds of this process. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from options import SHAPE
from watching import describe_machine, package_versions, publish, stamp

from duoka.config.schema import LoraConfig
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.documents import Documents
from duoka.model.fused import apply_fused
from duoka.model.lora import apply_lora
from duoka.model.wide_products import widen_products

Draw = Iterator[int]


def conversations(draw: Draw) -> list[tuple[list[int], int]]:
    """Six under one system prompt, half of the rest answers: (tokens, how many are no targets)."""
    system = take(draw, 21)
    return [(system + take(draw, size), 21 + size // 2) for size in (200, 350, 280, 410, 150, 330)]


def pairs(draw: Draw) -> list[tuple[list[int], int]]:
    """Three questions with two answers each."""
    asked = [take(draw, 200) for _ in range(3)]
    return [(question + take(draw, 150), 200) for question in asked for _ in range(2)]


def group(draw: Draw) -> list[tuple[list[int], int]]:
    """Eight answers to one question."""
    question = take(draw, 150)
    return [(question + take(draw, 100), 150) for _ in range(8)]


CASES = {
    "conversations under one system prompt (sft)": conversations,
    "pairs of answers (dpo)": pairs,
    "8 answers to one prompt (rl)": group,
}


def take(draw: Draw, count: int) -> list[int]:
    return [next(draw) for _ in range(count)]


def drawn() -> Draw:
    numbers = torch.Generator().manual_seed(1)
    while True:
        yield from torch.randint(3, SHAPE["vocab_size"], (4096,), generator=numbers).tolist()


def lay(documents: list[tuple[list[int], int]]) -> dict[str, Any]:
    ids = torch.tensor([token for tokens, _ in documents for token in tokens])[None]
    labels = [[-100] * (start - 1) + tokens[start:] + [-100] for tokens, start in documents]
    places = [place for tokens, _ in documents for place in range(len(tokens))]
    edges = torch.tensor([0, *torch.tensor([len(tokens) for tokens, _ in documents]).cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": ids, "labels": torch.tensor([label for part in labels for label in part])[None],
        "position_ids": torch.tensor(places)[None], "boundaries": Documents.of(edges, ids.device, ids),
    }  # fmt: skip


def build(layers: int, lora: bool) -> LossModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers, attn_implementation=register_attention()))
    if lora:
        lm = apply_lora(lm, LoraConfig(rank=8), 0)
    widen_products()
    apply_fused(lm)
    return LossModel(lm).train()


def measure(layers: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for lora in (False, True):
        model = build(layers, lora)
        for precision in ("fp32", "bf16"):
            for case, make in CASES.items():
                rows.append({"case": case, "what": "LoRA" if lora else "full", "precision": precision})
                rows[-1] |= in_turns(model, lay(make(drawn())), precision, rounds)
                print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def in_turns(model: LossModel, batch: dict[str, Any], precision: str, rounds: int) -> dict[str, Any]:
    spent: dict[bool, list[float]] = {True: [], False: []}
    losses = {}
    tokens = batch["input_ids"].shape[1]
    for _ in range(rounds + 1):  # the first compiles programs for these sizes
        for shares in (False, True):
            model.no_sharing, model.num_shared = "" if shares else "asked", 0
            began = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**batch)[0]
            loss.backward()
            spent[shares].append(time.process_time() - began)
            losses[shares] = float(loss.detach()) / tokens
            model.zero_grad()
            if shares:
                left_out = model.num_shared
    alone, shared = (min(spent[shares][1:]) for shares in (False, True))
    return {
        "tokens": tokens, "left_out": left_out, "alone_s": alone, "shared_s": shared,
        "loss_alone": losses[False], "loss_shared": losses[True],
    }  # fmt: skip


def page_text(found: dict[str, Any]) -> str:
    lines = [
        "| a row of | what | tokens | of these computed once for several | CPU-s without | with | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        left_out, speed = row["left_out"] / row["tokens"], row["alone_s"] / row["shared_s"]
        lines.append(
            f"| {row['case']} | {row['what']}, {row['precision']} | {row['tokens']:,} | {left_out:.0%} "
            f"| {row['alone_s']:.2f} | {row['shared_s']:.2f} | {speed:.2f} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += [
        "",
        f"{found['layers']} layers, best of {found['rounds']} rounds in turns. {found['machine']['kind']}; {versions}; "
        f"measured {found['measured']} UTC, code {found['code']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    found = {
        "machine": describe_machine(), "versions": package_versions(sys.executable, ("torch", "transformers")),
        "layers": asked.layers, "rounds": asked.rounds, **stamp(), "rows": measure(asked.layers, asked.rounds),
    }  # fmt: skip
    publish(found, page_text(found), asked.out, asked.page, "prefixes")


if __name__ == "__main__":
    main()
