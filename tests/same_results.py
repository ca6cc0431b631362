"""Does a refactoring change a bit? Trains tiny models through `duoka train`, and holds what comes out against a commit.

    PYTHONPATH=../before/src python tests/same_results.py record before.json    # another commit's work tree
    python tests/same_results.py record after.json
    python tests/same_results.py compare before.json after.json                 # 1 when anything differs

`record` writes, for each run of RUNS, every step's loss, gradient norm and learning rate and every evaluation (floats
as hex), and a SHA-256 of each tensor of the result and of the last checkpoint, whatever ranks and files these lie in.
It trains with the duoka that this interpreter imports, and knows only what users see: the command line, the YAML, the
event log and safetensors. So one script, with one environment, measures both commits. All runs are fp32 on the CPU with
one thread a rank. Seeds: the base model's 1, the data's 2, train.seed 7 (order, split, adapters, dropout).

Digits belong to a processor and a torch: `compare` says when these were others, and no recording belongs into git.
What generators held is not recorded: the losses of the runs with dropout depend on it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
MODEL_SEED, DATA_SEED, TRAIN_SEED = 1, 2, 7
NUM_STEPS = 6
STEP_KEYS = ("epoch", "num_samples", "num_tokens", "num_targets", "lr", "loss", "grad_norm")
STATE_KEYS = (
    "step", "epoch", "index", "streams", "num_samples", "num_tokens", "num_targets", "best_loss", "best_step",
)  # fmt: skip
EVALUATION_KEYS = (
    "step", "num_samples", "num_targets", "num_bytes", "loss", "accuracy", "perplexity", "bits_per_byte",
)  # fmt: skip

BASE = f"""
model: {{folder}}/model
data: {{{{train: [{{folder}}/chats.jsonl], max_length: 256, eval: 0.2}}}}
optim: {{{{lr: 3e-3, warmup: 2, weight_decay: 0.01, schedule: linear}}}}
train:
  max_steps: {NUM_STEPS}
  global_batch: 8
  micro_batch: "256 tokens"
  precision: fp32
  seed: {TRAIN_SEED}
  eval_every: 3
checkpoint: {{{{every: 3, keep: 2}}}}
log: {{{{to: []}}}}
"""
LORA = "lora={rank: 4, dropout: 0.1}"


@dataclass(frozen=True)
class Run:
    """A run of duoka: what is other than BASE, and, of one that is stopped, after which step it goes on."""

    name: str
    processes: int
    changes: tuple[str, ...]
    stops_after: int = 0


RUNS = (
    Run("single, padded", 1, ("data.packing=false", "train.micro_batch=2")),
    Run("ddp x2", 2, ("parallel.strategy=ddp",)),
    Run("zero1 x2", 2, ("parallel.strategy=zero1",)),
    Run("fsdp x2", 2, ("parallel.strategy=fsdp",)),
    Run("lora, dropout, packed", 1, (LORA,)),
    Run(
        "pretrain, stream", 1,
        ("stage=pretrain", "data.train=[texts]", "data.eval=last_file", "data.max_length=48", "data.stream=true",
         "data.streams=4", "train.epochs=null", "train.micro_batch=96 tokens"),
    ),
    Run("zero2 x2, muon", 2, ("parallel.strategy=zero2", "optim.name=muon", "optim.lr=0.02", "optim.adamw_lr=3e-3")),
    # Only a rate that knows no end lets a run go on to more steps.
    Run("ddp x2, resumed", 2, ("parallel.strategy=ddp", "optim.schedule=constant"), 4),
    Run("lora, ddp x2, resumed", 2, ("parallel.strategy=ddp", "optim.schedule=constant", LORA), 4),
)  # fmt: skip


# --- record ---


def record(out: Path, only: str) -> int:
    """Train every run whose name has `only` in it, and write what came out."""
    began = time.perf_counter()
    source = find_duoka()
    recording: dict[str, Any] = {"made_by": describe_maker(source), "runs": {}}
    with tempfile.TemporaryDirectory(prefix="same-results-") as folder:
        write_inputs(Path(folder))
        for run in (run for run in RUNS if only in run.name):
            started = time.perf_counter()
            train(run, Path(folder), source)
            recording["runs"][run.name] = read_results(run, output_of(run, Path(folder)))
            print(f"{run.name:24} {time.perf_counter() - started:5.1f} s", flush=True)
    out.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {len(recording['runs'])} runs of {source} in {time.perf_counter() - began:.0f} s")
    return 0


def find_duoka() -> Path:
    """The folder from which this interpreter imports duoka, without importing it."""
    spec = importlib.util.find_spec("duoka")
    if spec is None or spec.origin is None:
        sys.exit("this interpreter imports no duoka: install it, or set PYTHONPATH=.../src")
    return Path(spec.origin).resolve().parents[1]


def describe_maker(source: Path) -> dict[str, str]:
    """What the digits depend on beside the code, and which code it was."""
    import torch
    import transformers

    git = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {processor_name()}",
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_inputs(folder: Path) -> None:
    """The model, the conversations, the text and the YAML that all runs begin with."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tiny import write_conversations, write_tiny_model

    write_tiny_model(folder / "model", seed=MODEL_SEED, layers=4)
    write_conversations(folder / "chats.jsonl", 40, seed=DATA_SEED)
    (folder / "texts").mkdir()
    for number in range(4):
        texts = [f"<{number}/{row}> " + "多卡 ring " * ((7 * row + 3 * number) % 11) for row in range(12)]
        pq.write_table(pa.table({"text": texts}), folder / "texts" / f"{number}.parquet", row_group_size=3)
    (folder / "base.yaml").write_text(BASE.format(folder=folder), encoding="utf-8")


def output_of(run: Run, folder: Path) -> Path:
    return folder / "runs" / "-".join(run.name.replace(",", "").split())


def train(run: Run, folder: Path, source: Path) -> None:
    """`duoka train`, as often as the run is started."""
    env = {name: value for name, value in os.environ.items() if name not in RANK_NAMES} | ENVIRONMENT
    env["DUOKA_CACHE"] = str(folder / "cache")
    env["PYTHONPATH"] = str(source)
    # -P: a module that lies in the current folder must not win.
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-m", "duoka", "train", "base.yaml", f"output={output_of(run, folder)}"]
    command += [*run.changes, "--nproc", str(run.processes)]
    for steps in (run.stops_after, NUM_STEPS) if run.stops_after else (NUM_STEPS,):
        ended = subprocess.run(
            [*command, f"train.max_steps={steps}"], env=env, cwd=folder, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if ended.returncode:
            sys.exit(f"{ended.stdout}\n{run.name}: duoka train ended with exit code {ended.returncode}")


def read_results(run: Run, output: Path) -> dict[str, Any]:
    """All that is compared of a run, in the order in which a difference is told."""
    log = (output / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in log]
    steps = [event for event in events if event["type"] == "step"]
    resumed = [event["step"] for event in events if event["type"] == "resume"]
    wanted = [run.stops_after] if run.stops_after else []
    if [step["step"] for step in steps] != [*range(1, NUM_STEPS + 1)] or resumed != wanted:
        sys.exit(f"{run.name}: steps {[step['step'] for step in steps]}, resumed after {resumed}, not {wanted}")
    newest = max((output / "checkpoints").glob("step-*[0-9]"))
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    return {
        "steps": {str(one["step"]): pick(one, STEP_KEYS) for one in steps},
        "evaluations": [pick(event, EVALUATION_KEYS) for event in events if event["type"] == "eval"],
        "final": digests((output / "final").glob("*.safetensors")),
        "checkpoint": {"name": newest.name, "state": pick(state["progress"], STATE_KEYS)},
        "checkpoint tensors": digests(newest.glob("tensors-*.safetensors")),
    }


def pick(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """These keys of an event or a state, exactly. One that has gone would be compared with nothing: say so."""
    if missing := [key for key in keys if key not in values]:
        sys.exit(f"no {', '.join(missing)} in {values}")
    return {key: exact(values[key]) for key in keys}


def exact(value: Any) -> Any:
    """The value with every float in hex, so that equal texts are equal bits."""
    if isinstance(value, dict):
        return {key: exact(one) for key, one in value.items()}
    if isinstance(value, list):
        return [exact(one) for one in value]
    return value.hex() if isinstance(value, float) else value


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Each tensor's digest by name; of one that lies in several files, that of the whole."""
    import torch
    from safetensors import safe_open

    pieces: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in sorted(files):
        with safe_open(path, framework="pt") as file:
            # Torch's distributed checkpoints say in the header where a piece begins in its tensor.
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118  (no mapping)
                piece = file.get_tensor(name)
                start = places[name]["saved_offsets"] if name in places else [0] * piece.dim()
                pieces.setdefault(name, []).append((start, piece))
    if not pieces:
        sys.exit("a folder without safetensors: nothing to compare")
    return {name: digest(name, found) for name, found in sorted(pieces.items())}


def digest(name: str, pieces: list[tuple[list[int], Any]]) -> str:
    import torch

    ends = [[start + size for start, size in zip(starts, one.shape, strict=True)] for starts, one in pieces]
    whole = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=pieces[0][1].dtype)
    if sum(one.numel() for _, one in pieces) != whole.numel():
        sys.exit(f"{name}: its pieces make no whole tensor")
    for (starts, one), stops in zip(pieces, ends, strict=True):
        whole[tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))] = one
    content = hashlib.sha256(f"{whole.dtype} {list(whole.shape)} ".encode())
    content.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


# --- compare ---


def compare(before: Path, after: Path) -> int:
    """A line per run; 1 when anything differs or is missing."""
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    for what, (one, other) in both(ours["made_by"], theirs["made_by"]):
        if one == other or what == "commit":
            print(f"{what}: {one}" + (f" and {other}" if what == "commit" else ""))
        else:
            print(f"{what}: {one} and {other}: digits may differ for that alone")
    print(f"\n{'run':24} {'steps':>5}  result")
    num_different = 0
    for name, (one, other) in both(ours["runs"], theirs["runs"]):
        missing = before if one is None else after if other is None else None
        found = f"not in {missing}" if missing else next(differences(one, other), "")
        num_different += bool(found)
        print(f"{name:24} {len((one or other)['steps']):>5}  {found or 'equal'}")
    if not ours["runs"] or not theirs["runs"]:
        sys.exit("a recording without runs proves nothing")
    print(f"\n{num_different} runs differ" if num_different else "\nall equal, bit for bit")
    return int(num_different > 0)


def both(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Keys of either, in order, with the value in each; None where one has none."""
    for key in [*one, *(key for key in other if key not in one)]:
        yield key, (one.get(key), other.get(key))


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """What differs, the first first: the runs' own order is that of what happened."""
    if isinstance(one, list) and isinstance(other, list):
        one, other = ({str(place): value for place, value in enumerate(values)} for values in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key, (left, right) in both(one, other):
            yield from differences(left, right, f"{where} {key}".lstrip())
    elif one != other:
        yield f"{where}: {readable(one)} and {readable(other)}".lstrip(": ")


def readable(value: Any) -> str:
    """A float's digits beside its bits; a digest's beginning."""
    if value is None or isinstance(value, dict):
        return "nothing" if value is None else "something"
    if isinstance(value, str) and "0x" in value:
        return f"{float.fromhex(value)!r} ({value})"
    return str(value)[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="train, and write what came out")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--only", default="", help="runs whose name has this in it")
    comparer = commands.add_parser("compare", help="hold two recordings against each other")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.command == "compare":
        return compare(asked.before, asked.after)
    os.environ.update(ENVIRONMENT)  # before torch is imported here
    return record(asked.out, asked.only)


if __name__ == "__main__":
    sys.exit(main())
