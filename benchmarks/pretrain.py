"""What pretraining costs: duoka beside nanochat, from nothing, on the same text with the same vocabulary.

    python benchmarks/pretrain.py --out benchmarks/pretrain.json --page benchmarks/pretrain.md \
        [--nanochat FOLDER --python PYTHON] [--processes 1 2] [--precisions fp32 bf16] [--steps 100]

FOLDER is a checkout of nanochat as it is, PYTHON an interpreter with its packages (torch, rustbpe, tiktoken, pyarrow;
wandb is not needed). The text is this machine's Python library. Both models have 4 layers of width 256 with 4 heads,
and a head of their own; both learn 2,048 tokens a step in rows of 512, by Muon and AdamW, eager. Runs take turns and
are watched from outside; in the end both say the loss of the same held-out documents, each in a row alone. Rows of
other machines, precisions, lengths and numbers of processes that --out holds already stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from watching import describe_machine, fill_page, machine_kind, package_versions, stamp, watch

PEER = Path(__file__).with_name("pretrain_peer.py")
VOCABULARY, ROW, TOKENS_PER_STEP = 8192, 512, 2048
LAYERS, WIDTH, HEADS, HEAD_DIM = 4, 256, 4, 64
MLP = 688  # three matrices of 256 x 688 are as many products as nanochat's two of 256 x 1024
BEGIN = "<|bos|>"
DOCUMENT_CHARS, ROW_GROUP, NUM_HELD_OUT = 1200, 128, 256
NUM_FILES = 4  # the last one is held out


@dataclass(frozen=True)
class Case:
    tool: str  # duoka, nanochat
    processes: int
    turn: int
    precision: str = "fp32"
    machine: str = ""
    threads: int = 1  # of each process


# --- the same text and vocabulary for both ---


def read_documents(most_chars: int) -> list[str]:
    """Pieces of the library's files of about DOCUMENT_CHARS, cut between lines, in an order that scatters files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts and "test" not in file.parts]
    documents: list[str] = []
    total = 0
    for file in files:
        piece: list[str] = []
        for line in file.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True):
            piece.append(line)
            if sum(map(len, piece)) >= DOCUMENT_CHARS:
                documents.append("".join(piece))
                piece = []
        documents += ["".join(piece)] if "".join(piece).strip() else []
        total += file.stat().st_size
        if total > most_chars:
            break
    # A stride that shares no factor with their number: neighbors come from different files.
    stride = next(step for step in range(1009, 10**6) if len(documents) % step)
    return [documents[(place * stride) % len(documents)] for place in range(len(documents))]


def write_parquet(folder: Path, documents: list[str]) -> list[str]:
    """Files of row groups, the last for validation; returns its documents."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    held_out = documents[:NUM_HELD_OUT]
    rest = documents[NUM_HELD_OUT:]
    share = -(-len(rest) // (NUM_FILES - 1))
    parts = [rest[start : start + share] for start in range(0, len(rest), share)] + [held_out]
    for number, part in enumerate(parts):
        pq.write_table(pa.table({"text": part}), folder / f"shard_{number:05d}.parquet", row_group_size=ROW_GROUP)
    return held_out


def train_tokenizer(folder: Path, documents: list[str]) -> None:
    """Byte-level BPE with one token that begins a document, as a transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=BEGIN, pad_token=BEGIN)
    fast.save_pretrained(folder)


# --- the runs ---


def duoka_command(case: Case, folder: Path, base: Path, options: argparse.Namespace) -> tuple[list[str], list[Path]]:
    config = {
        "model": {
            "depth": LAYERS, "width": WIDTH, "head_dim": HEAD_DIM, "mlp_width": MLP,
            "tokenizer": str(base / "tokenizer"),
        },
        "stage": "pretrain",
        "data": {"train": [str(base / "text")], "eval": "last_file", "stream": True, "max_length": ROW},
        "optim": {"min_lr": 0.05, "warmup": 5, "clip": 0},
        "train": {
            "global_batch": f"{TOKENS_PER_STEP} tokens", "precision": case.precision, "max_steps": options.steps,
            "micro_batch": options.micro_batch, "recompute": "none", "eval_every": options.steps,
        },
        "parallel": {"strategy": "single" if case.processes == 1 else options.strategy, "check_replicas": 0},
        "checkpoint": {"every": 10 * options.steps, "async": False}, "log": {"to": []}, "output": str(folder / "run"),
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "duoka", "train", str(folder / "run.yaml"), "--nproc", str(case.processes)]
    return command, [folder / "run" / "events" / "run.jsonl"]


def nanochat_command(case: Case, folder: Path, options: argparse.Namespace) -> tuple[list[str], list[Path]]:
    rows = TOKENS_PER_STEP // ROW // case.processes
    flags = {
        "depth": LAYERS, "head-dim": HEAD_DIM, "window-pattern": "L", "max-seq-len": ROW, "device-batch-size": rows,
        "total-batch-size": TOKENS_PER_STEP, "num-iterations": options.steps, "warmup-steps": 5,
        "warmdown-ratio": 0.5, "eval-every": -1, "core-metric-every": -1, "sample-every": -1, "device-type": "cpu",
    }  # fmt: skip
    start = [options.python]
    if case.processes > 1:
        start = [options.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    log = folder / "progress.jsonl"
    own = [str(PEER), "train", str(log), *(f"--{key}={value}" for key, value in flags.items())]
    return [*start, *own], [log]


def loss_of_duoka(model: Path, rows: list[list[int]], facts: dict[str, Any]) -> float:
    """Mean loss over the tokens of held-out documents, each alone in its row."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    facts["parameters"]["duoka"] = sum(p.numel() for p in lm.parameters())
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row])
            logits = lm(input_ids=ids[:, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(row) - 1
    return total / count


def train_losses(log: Path) -> list[float]:
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [event["loss"] for event in events if event.get("type", "step") == "step"]


def measure(
    case: Case, base: Path, rows: list[list[int]], facts: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.tool == "duoka":
            command, logs = duoka_command(case, folder, base, options)
            where, variables = None, {}
        else:
            command, logs = nanochat_command(case, folder, options)
            where, variables = Path(options.nanochat), nanochat_variables(base, options, case.precision)
        load = os.getloadavg()[0]
        seen = watch(
            command, logs, folder, options.steps, options.limit_s, to_end=True, cwd=where,
            variables=variables,
        )  # fmt: skip
        found = {**asdict(case), "steps": options.steps, **seen.numbers(), "load_at_start": round(load, 1), **stamp()}
        if options.keep:
            (Path(options.keep) / f"{case.tool}-{case.processes}.log").write_bytes((folder / "out.log").read_bytes())
        if seen.error:
            return found
        losses = train_losses(logs[0])
        if case.tool == "duoka":
            held_out = loss_of_duoka(folder / "run" / "final", rows, facts)
        else:
            (folder / "rows.json").write_text(json.dumps(rows))
            held_out = float(run_peer(options, base, "loss", str(folder / "rows.json"), str(options.steps)))
        return {**found, "first_loss": round(losses[0], 4), "held_out_loss": round(held_out, 4)}


# --- nanochat's own process ---


def nanochat_variables(base: Path, options: argparse.Namespace, precision: str = "fp32") -> dict[str, str]:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return {
        "NANOCHAT_BASE_DIR": str(base / "nanochat"), "NANOCHAT_DTYPE": dtype,
        "PYTHONPATH": str(Path(options.nanochat).resolve()),
    }  # fmt: skip


def run_peer(options: argparse.Namespace, base: Path, *words: str) -> str:
    """What pretrain_peer.py prints last, run by nanochat's interpreter."""
    env = {**os.environ, **nanochat_variables(base, options)}
    command = [options.python, str(PEER), *words]
    done = subprocess.run(command, env=env, cwd=options.nanochat, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"nanochat's process failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def prepare(base: Path, options: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """Text, tokenizer and models in `base`; returns the held-out rows and what they are made of."""
    from transformers import AutoTokenizer

    documents = read_documents(options.megabytes * 10**6)
    held_out = write_parquet(base / "text", documents)
    train_tokenizer(base / "tokenizer", documents[NUM_HELD_OUT:])
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in held_out]
    facts = {"documents": len(documents), "characters": sum(map(len, documents)), "parameters": {}}
    if options.nanochat:
        target = base / "nanochat" / "base_data_climbmix"
        target.parent.mkdir()
        target.symlink_to(base / "text")
        said = json.loads(
            run_peer(options, base, "prepare", str(base / "tokenizer" / "tokenizer.json"), BEGIN, held_out[0])
        )
        assert said["ids"] == ids[0], "the two tokenizers differ"
        facts["parameters"]["nanochat"] = said["parameters"]
    return [[0, *row[:ROW]] for row in ids], facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from --out")
    parser.add_argument("--nanochat", help="a checkout of nanochat")
    parser.add_argument("--python", default=sys.executable, help="interpreter with nanochat's packages")
    parser.add_argument("--tools", nargs="+", default=["nanochat", "duoka"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=8, help="of text, at most")
    parser.add_argument("--strategy", default="zero1", help="duoka's, with several processes")
    parser.add_argument("--micro-batch", default="1024 tokens", help="duoka's; changes no result")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--keep", help="folder for the runs' own output")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as name:
        rows, facts = prepare(Path(name), options)
        results = kept_results(options)
        for case in choose_cases(options):
            results.append(measure(case, Path(name), rows, facts, options))
            print(json.dumps(results[-1]), flush=True)
            write(options, facts, results)


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """Tools innermost: what is compared lies beside each other in time."""
    tools = [tool for tool in options.tools if tool != "nanochat" or options.nanochat]
    lists = (options.precisions, options.processes, range(options.turns), tools)
    return [
        Case(tool, processes, turn, precision, machine_kind(), options.threads)
        for precision, processes, turn, tool in itertools.product(*lists)
    ]


def kept_results(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What an earlier part of the series measured, and this one does not measure again."""
    if not options.out.is_file():
        return []
    rows = json.loads(options.out.read_text(encoding="utf-8"))["results"]
    anew = [(*asdict(case).values(), options.steps) for case in choose_cases(options)]
    names = [field.name for field in fields(Case)]
    return [row for row in rows if (*(row[name] for name in names), row["steps"]) not in anew]


def write(options: argparse.Namespace, facts: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """After every run, so that a series that is cut short leaves what it measured."""
    versions = {"duoka": package_versions(sys.executable, ("torch", "transformers"))}
    if options.nanochat:
        versions["nanochat"] = package_versions(options.python, ("torch", "tiktoken"))
    work = {
        "layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY, "row_tokens": ROW,
        "tokens_per_step": TOKENS_PER_STEP, **facts,
        "measured": "CPU of the process tree and wall time from the end of the first step to the end of the last; "
        "peaks of the whole run; held-out loss over the same tokens",
    }  # fmt: skip
    found = {"machine": describe_machine(), "versions": versions, "work": work, "results": results}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.page:
        fill_page(options.page, table(results), "figures")
    print(table(results), flush=True)


def table(results: list[dict[str, Any]]) -> str:
    heads = (
        "machine", "work, processes x threads", "tool", "steps", "tokens per CPU-s", "per s", "largest process",
        "all processes", "held-out", "measured, code",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in results:
        work = f"{row['precision']}, {row['processes']} x {row['threads']}"
        start = f"| {row['machine']} | {work} | {row['tool']} | {row['steps']} | "
        if "error" in row:
            lines.append(f"{start}{row['error']} | | | | | |")
            continue
        speeds = f"{row['tokens_per_cpu_s']:,.0f} | {row['tokens_per_wall_s']:,.0f}"
        largest, all_ = row["peak_bytes"] / 2**20, row["sum_of_peaks_bytes"] / 2**20
        lines.append(
            f"{start}{speeds} | {largest:,.0f} MiB | {all_:,.0f} MiB | {row['held_out_loss']:.3f} "
            f"| {row.get('measured', 'before rows were dated')}, {row.get('code', '')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
