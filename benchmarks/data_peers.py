"""The same work as benchmarks/data.py, done by datasets, trl, accelerate and torchdata; run by it, in their own
environment. Prints one JSON object as its last line."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

ROW = 2048


def map_chats(folder: str, data: str) -> dict[str, Any]:
    """Chat template and tokenizer through datasets.map, batched, on two processes."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer.apply_chat_template(batch["messages"], truncation=True, max_length=ROW, return_dict=False)
        return {"input_ids": ids}

    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=data, split="train", cache_dir=cache)
        started = time.perf_counter()
        done = rows.map(encode, batched=True, num_proc=2, remove_columns=["messages"])
        took_s = time.perf_counter() - started
        num_tokens = sum(len(ids) for ids in done["input_ids"])
    facts = {"mask": "none: ids only, while duoka also marks the targets", "datasets": version("datasets")}
    return {"first_s": took_s, "num_tokens": num_tokens, "tokens_per_s": num_tokens / took_s, **facts}


def bfd(lengths: str) -> dict[str, Any]:
    import datasets
    from trl import pack_dataset

    with open(lengths) as file:
        sizes = json.load(file)
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * size for size in sizes]})
    started = time.perf_counter()
    packed = pack_dataset(rows, ROW, strategy="bfd")
    took_s = time.perf_counter() - started
    return {"full": sum(sizes) / (len(packed) * ROW), "s": took_s, "over": "the whole data set", "trl": version("trl")}


class _Numbers:
    """A data set whose items cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class _Stream:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def skip(count: str) -> dict[str, Any]:
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader, IterableDataset

    class Items(_Stream, IterableDataset):  # type: ignore[type-arg]
        pass

    batches = int(count) * 9 // 10 // 64
    out: dict[str, Any] = {"accelerate": version("accelerate")}
    for name, data in (("map_style_s", _Numbers(int(count))), ("iterable_s", Items(int(count)))):
        loader: Any = DataLoader(data, batch_size=64)  # type: ignore[arg-type]
        started = time.perf_counter()
        next(iter(skip_first_batches(loader, batches)))
        out[name] = time.perf_counter() - started
    return out


def stateful(count: str) -> dict[str, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(_Numbers(int(count)), batch_size=64, shuffle=True)

    walk = loader()
    for index, _ in enumerate(walk):
        if index >= int(count) * 9 // 10 // 64:
            break
    state = walk.state_dict()
    started = time.perf_counter()
    fresh = loader()
    fresh.load_state_dict(state)
    next(iter(fresh))
    return {"map_style_s": time.perf_counter() - started, "torchdata": version("torchdata")}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps({"map": map_chats, "bfd": bfd, "skip": skip, "stateful": stateful}[name](*arguments)))
