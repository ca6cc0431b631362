"""nanochat's side of pretrain.py, run by nanochat's interpreter inside its checkout, which stays as it is.

    pretrain_peer.py prepare TOKENIZER.json BEGIN TEXT    the tokenizer in nanochat's form; prints ids of TEXT
    pretrain_peer.py train LOG FLAGS...                   scripts.base_train, a line of LOG for each step
    pretrain_peer.py loss ROWS.json STEP                  prints the mean loss of rows of tokens

What it lacks on a CPU is lent from here: a process group over gloo, and a stand-in for wandb.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LAYERS = 4


def prepare(tokenizer_file: str, begin: str, text: str) -> None:
    """tiktoken's form of a byte-level BPE: a token's rank is its id, since ids follow the merges."""
    import tiktoken
    import torch

    vocabulary = json.loads(Path(tokenizer_file).read_text(encoding="utf-8"))["model"]["vocab"]
    letters = byte_letters()
    ranks = {bytes(letters[c] for c in word): number for word, number in vocabulary.items() if word != begin}
    encoding = tiktoken.Encoding("shared", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={begin: 0})
    folder = Path(os.environ["NANOCHAT_BASE_DIR"]) / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    sizes = torch.zeros(encoding.n_vocab, dtype=torch.int32)
    for word, number in ranks.items():
        sizes[number] = len(word)
    torch.save(sizes, folder / "token_bytes.pt")
    print(json.dumps({"ids": encoding.encode_ordinary(text), "parameters": count_parameters(encoding.n_vocab)}))


def byte_letters() -> dict[str, int]:
    """Which byte a letter of byte-level BPE stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def count_parameters(vocabulary: int) -> int:
    import torch
    from nanochat.gpt import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(512, vocabulary, LAYERS, 4, 4, 256, "L"))
    return sum(p.numel() for p in model.parameters())


def lend_what_is_missing(log: Path) -> None:
    """gloo where nanochat starts no group at all, and its reductions without the futures that gloo does not have."""
    import torch
    import torch.distributed as dist

    try:
        import wandb  # noqa: F401
    except ImportError:
        sys.modules["wandb"] = types.ModuleType("wandb")
    from nanochat import common

    start = common.compute_init

    def start_with_gloo(device_type: str = "cpu") -> Any:
        found = start(device_type)
        if found[0] and not dist.is_initialized():
            dist.init_process_group("gloo")
        return found

    def say(text: Any = "", **options: Any) -> None:
        if int(os.environ.get("RANK", 0)):
            return
        print(text, flush=True, **options)
        if step := re.match(r"step (\d+)/.* loss: ([0-9.]+)", str(text)):
            line = {"step": int(step[1]), "loss": float(step[2]), "num_tokens": tokens_per_step()}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    class Waited:
        """A collective whose `wait` is the work's own."""

        def __init__(self, work: Any) -> None:
            self.wait = work.wait

        def get_future(self) -> Waited:
            return self

    def run_eagerly(function: Any = None, **options: Any) -> Any:
        return function if function is not None else run_eagerly

    torch.compile = run_eagerly
    common.compute_init, common.print0 = start_with_gloo, say
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        plain = getattr(dist, name)

        def waited(*args: Any, plain: Any = plain, **options: Any) -> Any:
            work = plain(*args, **options)
            return Waited(work) if options.get("async_op") else work

        setattr(dist, name, waited)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def tokens_per_step() -> int:
    return next(int(flag.split("=")[1]) for flag in sys.argv if flag.startswith("--total-batch-size="))


def train(log: str, *flags: str) -> None:
    lend_what_is_missing(Path(log))
    sys.argv = ["base_train", *flags]
    runpy.run_module("scripts.base_train", run_name="__main__")


def loss(rows_file: str, step: str) -> None:
    import torch
    from nanochat.checkpoint_manager import build_model

    base = Path(os.environ["NANOCHAT_BASE_DIR"])
    model = build_model(str(base / "base_checkpoints" / f"d{LAYERS}"), int(step), torch.device("cpu"), "eval")[0]
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in json.loads(Path(rows_file).read_text()):
            ids = torch.tensor([row])
            total += float(model(ids[:, :-1], ids[:, 1:], loss_reduction="sum"))
            count += len(row) - 1
    print(total / count)


if __name__ == "__main__":
    {"prepare": prepare, "train": train, "loss": loss}[sys.argv[1]](*sys.argv[2:])
