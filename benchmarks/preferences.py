"""What a DPO step costs, and whether its loss depends on how a batch is split: duoka beside TRL, on the same pairs.

    python benchmarks/preferences.py --out benchmarks/preferences.json --table benchmarks/preferences.md \\
        --peers PYTHON [--llamafactory PYTHON]

`--peers` is the interpreter of an environment with trl, peft and datasets, `--llamafactory` that of one with
LLaMA-Factory. The model is drawn from a seed (19M parameters, the demo's tokenizer), so figures are of the programs and
not of a model. Cases run in turns, one at a time, watched from outside; `--rows 0 8 4 1` lays the same batch of 8 pairs
out in as many rows, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sft import WORDS
from watching import describe_machine, end_like_an_interrupt, fill_page, package_versions, stamp, watch

PEERS = Path(__file__).with_name("preferences_peers.py")
NUM_PAIRS, MAX_LENGTH, BATCH = 32, 512, 8
# trl: its defaults. trl-tuned: the reference computed once, no activation computed twice.
LF = ("torch", "transformers", "trl", "llamafactory")
TOOLS = ("duoka", "trl", "trl-tuned", "llamafactory")


def write_model(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from duoka.config.schema import ModelConfig
    from duoka.hub.models import model_folder

    source = model_folder(ModelConfig(name="demo"), Path())
    words = json.loads((source / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words["vocab_size"], hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=words["bos_token_id"], eos_token_id=words["eos_token_id"], pad_token_id=words.get("pad_token_id"),
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def write_pairs(path: Path) -> None:
    """Better answers have other words than worse ones; 60 to 900 tokens, a median of about 230."""
    dice, words = np.random.default_rng(0), WORDS.split()
    half = len(words) // 2
    with path.open("w", encoding="utf-8") as file:
        for length in np.clip(dice.lognormal(5.0, 0.6, NUM_PAIRS), 20, 400).astype(int):
            asked = " ".join(dice.choice(words, max(4, int(length) // 2)))
            turn = {"prompt": [{"role": "user", "content": asked}]}
            for side, some in (("chosen", words[:half]), ("rejected", words[half:])):
                said = " ".join(dice.choice(some, max(4, int(length * dice.uniform(0.5, 1.5)))))
                turn[side] = [{"role": "assistant", "content": said}]
            file.write(json.dumps(turn) + "\n")


def command_of(
    tool: str, rows: int, folder: Path, model: Path, data: Path, options: argparse.Namespace
) -> tuple[list[str], list[Path]]:
    if tool == "duoka":
        config = {
            "model": str(model), "stage": {"name": "dpo", "beta": 0.1},
            "data": {"train": [{"name": str(data)}], "max_length": MAX_LENGTH},
            "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant", "weight_decay": 0},
            "train": {"global_batch": BATCH, "micro_batch": rows or "auto", "precision": "fp32", "seed": 0,
                      "max_steps": options.steps + 1},
            "checkpoint": {"every": 1000}, "output": str(folder / "run"),
        }  # fmt: skip
        (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
        log = folder / "run" / "events" / "run.jsonl"
        return [sys.executable, "-m", "duoka", "train", str(folder / "run.yaml")], [log]
    facts = {
        "tool": tool, "model": str(model), "data": str(data), "steps": options.steps + 1, "max_length": MAX_LENGTH,
        "rows": rows or 2, "accumulation": BATCH // (rows or 2), "progress": str(folder / "progress"),
        "work": str(folder / "work"),
    }  # fmt: skip
    (folder / "case.json").write_text(json.dumps(facts), encoding="utf-8")
    python = options.llamafactory if tool == "llamafactory" else options.peers
    return [python, str(PEERS), str(folder / "case.json")], [folder / "progress.0"]


def curve(log: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [one for one in lines if one.get("type", "step") == "step"]
    return [{key: one[key] for key in ("loss", "grad_norm", "margin") if key in one} for one in steps]


def measure(tool: str, rows: int, name: Path, model: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=name))
    (folder / "cache").mkdir()
    command, logs = command_of(tool, rows, folder, model, data, options)
    load = os.getloadavg()[0]
    seen = watch(command, logs, folder, options.steps, options.limit_s)
    steps = curve(logs[0]) if logs[0].exists() else []
    return {"tool": tool, "rows": rows, **seen.numbers(), "steps": steps[: options.steps],
            "load_at_start": round(load, 1), **stamp()}  # fmt: skip


def page_text(found: dict[str, Any]) -> str:
    """Each tool as it chooses its rows, then how far the same batches move when they are laid out otherwise."""
    own = [row for row in found["results"] if not row["rows"]]
    head = ["tool", "tokens/s", "tokens per CPU-second", "peak of a process", "losses", "margins"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in own:
        if "error" in row:
            lines.append(f"| {row['tool']} | {row['error'].replace('|', '/')} | | | | |")
            continue
        losses, margins = (
            ", ".join(f"{step[key]:.3g}" for step in row["steps"] if step.get(key) is not None)
            for key in ("loss", "margin")
        )
        cells = [
            f"{row['tokens_per_wall_s']:.0f}",
            f"{row['tokens_per_cpu_s']:.0f}",
            f"{row['peak_bytes'] / 2**30:.2f} GiB",
        ]
        lines.append(f"| {' | '.join([row['tool'], *cells, losses, margins])} |")
    lines += ["", "| tool | loss | gradient norm |", "|---|---|---|"]
    for tool in dict.fromkeys(row["tool"] for row in found["results"]):
        cut = [row["steps"] for row in found["results"] if row["tool"] == tool and row["rows"] and row.get("steps")]
        if len(cut) > 1:
            lines.append(f"| {tool} | {_spread(cut, 'loss')} | {_spread(cut, 'grad_norm')} |")
    versions, machine = found["versions"], found["machine"]
    peers = ", ".join(f"{tool}: {', '.join(f'{k} {v}' for k, v in one.items())}" for tool, one in versions.items())
    last = found["results"][-1]
    where = f"{machine['kind']}, {machine['threads_per_process']} threads; {peers}"
    return "\n".join([*lines, "", f"{where}; measured {last['measured']} (UTC), code {last['code']}."])


def _spread(cut: list[list[dict[str, float]]], key: str) -> str:
    """The largest of all steps, as a share: of a step's numbers, one for each way to lay its batch out."""
    steps = zip(*([step[key] for step in steps] for steps in cut), strict=False)
    return f"{max((max(one) - min(one)) / max(map(abs, one)) for one in steps):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--peers", required=True, help="interpreter with trl, peft, datasets")
    parser.add_argument("--llamafactory", help="interpreter with LLaMA-Factory")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 8, 4, 1], help="pairs at once; 0: the tool's own")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps, the first of which is start-up")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one case")
    options = parser.parse_args()
    end_like_an_interrupt()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with tempfile.TemporaryDirectory() as place:
        model, data = write_model(Path(place) / "model"), Path(place) / "pairs.jsonl"
        write_pairs(data)
        results = []
        for rows in options.rows:
            for tool in options.tools:
                if (rows and tool in ("trl", "llamafactory")) or (tool == "llamafactory" and not options.llamafactory):
                    continue
                results.append(measure(tool, rows, Path(place), model, data, options))
                print({key: value for key, value in results[-1].items() if key != "steps"}, flush=True)
                found = {
                    "machine": describe_machine(), "results": results,
                    "versions": {"duoka": package_versions(sys.executable, ("torch", "transformers")),
                                 "trl": package_versions(options.peers, ("torch", "transformers", "trl")),
                                 **({"llamafactory": package_versions(options.llamafactory, LF)}
                                    if options.llamafactory else {})},
                    "work": {"parameters": "19M", "pairs": NUM_PAIRS, "batch": BATCH, "max_length": MAX_LENGTH},
                }  # fmt: skip
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fill_page(options.table, page_text(found), "preferences")


if __name__ == "__main__":
    main()
