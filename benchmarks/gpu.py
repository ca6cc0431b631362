"""What one GPU brings: speed beside its own rate, memory beside the plan, for models of 0.1 to 8 billion parameters.

    python benchmarks/gpu.py --out benchmarks/gpu.json --table benchmarks/gpu.md [--cases full-1b lora-8b] [--minutes 7]

Every case is one `duoka train` of a model with random weights on this machine's Python library as text, packed rows,
bf16. MFU stands beside two rates: the best bf16 product of 8,192 x 8,192 matrices measured here, and the data sheet's.
Cases that --out holds already from this code are kept, so that a series can be done in parts. What cannot be run here
(memory, time) is named with its reason. Within --minutes cases begin, those that say most first, until there is no time
for another. `--tiny` is a rehearsal of all cases on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain import read_documents

VOCABULARY_LEARNED = 4096
GIB = 1 << 30
SHORTEST_S = 45  # what a case took on one host, its model's writing counted: with less left none begins
WARM_STEPS = 4  # compilation, the allocator, the first batch


@dataclass(frozen=True)
class Size:
    """An architecture of that name in transformers, by its own published sizes."""

    kind: str
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def config(self, tiny: bool) -> dict[str, Any]:
        small = {"layers": 2, "width": 64, "mlp": 128, "heads": 2, "kv_heads": 1, "vocabulary": 5000}
        facts = {**vars(self), **(small if tiny else {})}
        return {
            "num_hidden_layers": facts["layers"], "hidden_size": facts["width"], "intermediate_size": facts["mlp"],
            "num_attention_heads": facts["heads"], "num_key_value_heads": facts["kv_heads"],
            "head_dim": facts["width"] // facts["heads"], "vocab_size": facts["vocabulary"],
            "tie_word_embeddings": self.tied, "max_position_embeddings": 32768,
        }  # fmt: skip


SIZES = {
    "135m": Size("llama", 30, 576, 1536, 9, 3, 49152, True),
    "1b": Size("llama", 16, 2048, 8192, 32, 8, 128256, True),
    "3b": Size("llama", 28, 3072, 8192, 24, 8, 128256, True),
    "8b": Size("llama", 32, 4096, 14336, 32, 8, 128256, False),
}


@dataclass(frozen=True)
class Case:
    size: str
    row: int
    tokens: int  # per optimizer step
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    steps: int = 14


CASES = {
    "full-1b": Case("1b", 4096, 65536),
    "lora-8b": Case("8b", 4096, 32768, lora=True, steps=10),
    "pretrain-135m": Case("135m", 2048, 131072),
    "full-1b-compiled": Case("1b", 4096, 65536, {"train.compile": True}),
    "full-1b-fp8-compiled": Case("1b", 4096, 65536, {"train.compile": True, "train.precision": "fp8"}),
    "pretrain-135m-graphs": Case("135m", 2048, 131072, {"train.compile": "reduce-overhead"}),
    "full-3b": Case("3b", 4096, 65536, steps=10),
    "full-1b-recompute": Case("1b", 4096, 65536, {"train.recompute": "full"}),
    "lora-1b": Case("1b", 4096, 65536, lora=True),
    "pretrain-135m-compiled": Case("135m", 2048, 131072, {"train.compile": True}),
}


def write_tokenizer(folder: Path, documents: list[str], vocabulary: int) -> None:
    """A small byte-level BPE with as many unused entries behind it as the model's vocabulary asks for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    begin = "<|bos|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LEARNED, special_tokens=[begin], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    facts = json.loads(tokenizer.to_str())
    words = facts["model"]["vocab"]
    words.update({f"<unused{place}>": place for place in range(len(words), vocabulary)})
    whole = Tokenizer.from_str(json.dumps(facts))
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token=begin, eos_token=begin, pad_token=begin)
    fast.save_pretrained(folder)


def write_model(folder: Path, size: Size, documents: list[str], weights: bool, tiny: bool) -> None:
    """The folder that a config names: sizes and tokenizer, and weights in bf16 where a base model is needed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(size.kind, **size.config(tiny))
    config.architectures = ["LlamaForCausalLM"]
    write_tokenizer(folder, documents, config.vocab_size)
    config.save_pretrained(folder)
    if not weights:
        return
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measure_card() -> dict[str, Any]:
    """The rate of bf16 products and of copies here, random data, median of timed ones after a warm-up."""
    import torch

    if not torch.cuda.is_available():
        return {"name": "no GPU", "product_flops": None, "copy_bytes_per_s": None}
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flat = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(flat)

    def take(work: Any) -> float:
        times = []
        for turn in range(25):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times += [begin.elapsed_time(end) / 1e3] if turn >= 5 else []
        return statistics.median(times)

    product = take(lambda: left @ right)
    copied = take(lambda: other.copy_(flat))
    return {
        "name": torch.cuda.get_device_name(), "total_bytes": torch.cuda.mem_get_info()[1],
        "product_flops": 2 * 8192**3 / product, "copy_bytes_per_s": 2 * flat.nbytes / copied,
        "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip


def config_of(case: Case, model: Path, texts: Path, output: Path, tiny: bool) -> dict[str, Any]:
    row, tokens = (64, 256) if tiny else (case.row, case.tokens)
    config: dict[str, Any] = {
        "model": {"name": str(model)} if case.lora else {"name": str(model), "from_scratch": True},
        "stage": "pretrain",
        "data": {"train": [str(texts)], "max_length": row},
        "optim": {"lr": 1e-4, "warmup": 2},
        "train": {"max_steps": 1000, "global_batch": f"{tokens} tokens", "precision": "bf16"},
        "checkpoint": {"every": 10**6}, "log": {"to": []}, "output": str(output),
    }  # fmt: skip
    if case.lora:
        config["lora"] = {"rank": 16}
    for key, value in case.settings.items():
        part, _, name = key.partition(".")
        # CUDA graphs ask for a GPU: rehearsed as compiled layers.
        config.setdefault(part, {})[name] = True if tiny and value == "reduce-overhead" else value
    return config


def run_case(
    case: Case, folder: Path, model: Path, texts: Path, limit: float, options: argparse.Namespace
) -> dict[str, Any]:
    """`limit`: in seconds."""
    config = config_of(case, model, texts, folder / "run", options.tiny)
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "duoka", "train", str(folder / "run.yaml")]
    began = time.monotonic()
    Path(options.logs).mkdir(parents=True, exist_ok=True)
    log = Path(options.logs) / f"{folder.name}.txt"
    events = folder / "run" / "events" / "run.jsonl"
    steps = WARM_STEPS + 2 if options.tiny else case.steps
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and time.monotonic() - began < limit and count_steps(events) < steps:
            time.sleep(0.1)
        ended = process.poll()
        if ended is None:  # what it would write in the end is measured elsewhere
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = round(time.monotonic() - began, 1)
    if count_steps(events) < steps:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-12:]
        return {"error": [*last, f"exit {ended}, after {took} s"], "took_s": took}
    return {**read_run(folder / "run", steps), "took_s": took}


def count_steps(events: Path) -> int:
    return events.read_text().count('"type": "step"') if events.exists() else 0


def read_lines(file: Path) -> list[dict[str, Any]]:
    """All but a last one that the end cut short."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def read_run(run: Path, num_steps: int) -> dict[str, Any]:
    plan = json.loads((run / "plan.json").read_text())
    events = read_lines(run / "events" / "run.jsonl")
    steps = [event for event in events if event["type"] == "step"][:num_steps]
    start = next(event["t"] for event in events if event["type"] == "run")
    timed = steps[WARM_STEPS:]
    # The median: one step in which a layer is compiled anew, for more documents, takes as long as several.
    ends = [step["t"] for step in steps[WARM_STEPS - 1 :]]
    took = [end - begin for begin, end in itertools.pairwise(ends)]
    step_s = statistics.median(took)
    seconds, tokens = sum(took), statistics.mean(step["num_tokens"] for step in timed)
    ranks = read_lines(run / "events" / "rank00000.jsonl")
    memory = plan["memory"]
    return {
        "layout": plan["layout"], "batch": plan["batch"]["sentence"],
        "tokens_per_s": tokens / step_s, "step_s": step_s, "slowest_step_s": max(took),
        "planned_tokens_per_s": plan["speed"]["tokens_per_s"],
        "flops_per_token": plan["compute"]["flops_per_token"], "sheet_flops": plan["compute"]["peak_flops"],
        "peak_bytes": max(rank.get("memory_bytes", 0) for rank in ranks),
        "planned_bytes": memory["peak_bytes"], "planned_framework_bytes": memory["parts"].get("framework", 0),
        "planned_parts": memory["parts"],
        "first_step_s": steps[0]["t"] - start, "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
        "shares": {name: sum(step[name] for step in timed) / seconds
                   for name in ("data_s", "forward_s", "backward_s", "optimizer_s")},
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    card = results["card"]
    rate = card.get("product_flops")
    lines = [
        "| case | layout | tokens/s | planned | MFU of the sheet | of the product measured here | peak GiB | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results["cases"].items():
        if "error" in one:
            lines.append(f"| {name} | not measured: {' '.join(one['error'][-1:])[:120]} | | | | | | |")
            continue
        flops = one["flops_per_token"] * one["tokens_per_s"]
        shares = [
            f"{flops / one['sheet_flops']:.1%}" if one["sheet_flops"] else "",
            f"{flops / rate:.1%}" if rate else "",
        ]
        layout = one["layout"]
        words = ", ".join(
            [layout["micro"], f"recompute {layout['recompute']}"] + (["compiled"] if layout["compile"] else [])
        )
        memory = (one["peak_bytes"] / GIB, (one["planned_bytes"] - one["planned_framework_bytes"]) / GIB)
        lines.append(
            f"| {name} | {words} | {one['tokens_per_s']:,.0f} | {one['planned_tokens_per_s']:,.0f} | {shares[0]} | "
            f"{shares[1]} | {memory[0]:.2f} | {memory[1]:.2f} |"
        )
    tail = f"{card['name']}"
    if rate:
        tail += (
            f", torch {card['torch']}, CUDA {card['cuda']}: {rate / 1e12:.0f} TFLOP/s in a bf16 product of "
            f"8,192 x 8,192, "
            f"{card['copy_bytes_per_s'] / 1e12:.2f} TB/s in copies (read and written)."
        )
    return "\n".join([*lines, "", tail, ""])


def write(results: dict[str, Any], out: Path, page: Path) -> None:
    out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    page.write_text(table(results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--table", default="gpu.md")
    parser.add_argument("--logs", default="gpu-logs")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=150, help="seconds per case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all cases; those left are said")
    parser.add_argument("--tiny", action="store_true", help="models of two layers, as a rehearsal anywhere")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    card = measure_card()
    if not card["product_flops"] and not options.tiny:
        print("no GPU here: nothing is measured")
        return
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    results["card"] = card
    documents = read_documents(12_000_000)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        texts = base / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        for key in options.cases:
            case, left_s = CASES[key], ends - time.monotonic()
            if left_s < SHORTEST_S:
                results["cases"].setdefault(key, {"error": [f"the {options.minutes:g} minutes were spent"]})
                continue
            model = base / f"{case.size}-{'base' if case.lora else 'sizes'}"
            if not model.exists():
                write_model(model, SIZES[case.size], documents, case.lora, options.tiny)
            (base / key).mkdir()
            left_s = min(options.limit, ends - time.monotonic())
            results["cases"][key] = run_case(case, base / key, model, texts, left_s, options)
            write(results, out, Path(options.table))
            print(table({**results, "cases": {key: results["cases"][key]}}).splitlines()[2], flush=True)
    write(results, out, Path(options.table))
    print(table(results))


if __name__ == "__main__":
    main()
