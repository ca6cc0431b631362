"""The nested YAML of DDP guides: trainer, model, data, ddp and output, with LLaMA-Factory's keys inside.

The blocks are headings only; a key means what its row in llamafactory.py says, wherever it stands. Five words are
this dialect's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects.llamafactory import llamafactory
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Dialect,
    Refusal,
    implemented,
    is_none,
    reported,
    switch,
    table,
    timeout_answer,
    words,
)

BLOCKS = ("trainer", "model", "data", "ddp", "output")
_STRATEGIES = {
    "ddp": "ddp", "single": "single", "auto": "auto", "fsdp": "fsdp", "zero1": "zero1", "zero2": "zero2",
    "zero3": "zero3",
}  # fmt: skip


_AXES = {"tp": "parallel.tensor", "pp": "parallel.pipeline", "sp": "parallel.sequence"}


def _strategy(value: Any, asked: Asked) -> Any:
    word = str(value).strip().lower()
    if word == "dp":
        return Answer({"parallel.strategy": "auto"}, "one process for all GPUs is slower everywhere: DDP is used")
    axis, ranks = word[:2], word[2:]
    if axis in _AXES and not ranks:
        what = f"trainer.type {word} does not say how many ranks share one model"
        raise Refusal(what, f"write the number behind it, for example:   type: {word}2", "trainer.type")
    if axis in _AXES and ranks.isdecimal() and 0 < len(ranks) < 6:
        return Answer({_AXES[axis]: int(ranks)})
    strategy = words("trainer.type", _STRATEGIES)(value, asked)
    if strategy == "ddp" and not is_none(asked.get("deepspeed")):
        return Answer(note="one process per GPU; how they share the work is said by the DeepSpeed file")
    return strategy


def _fits(top: Mapping[str, Any]) -> bool:
    model, data = top.get("model"), top.get("data")
    if isinstance(model, dict) and "model_name_or_path" in model:
        return True
    return isinstance(top.get("trainer"), dict) and isinstance(data, dict) and "dataset" in data


@cache
def nested() -> Dialect:
    own = [
        *implemented("strategy", "parallel.strategy", _strategy, ""),
        *switch("gradient_as_bucket_view", "parallel.bucket_view"),
        *implemented("timeout", "parallel.timeout", lambda value, asked: timeout_answer(value, "ddp.timeout")),
        *reported("a file is one part: it is all learned", "train_split"),
        *reported("a file has no parts of its own; to hold some back write val_size: 0.1", "eval_split"),
    ]
    shared = llamafactory()
    rename = {
        "trainer.type": "strategy", "trainer.max_epochs": "num_train_epochs",
        "data.max_seq_len": "cutoff_len", "ddp.find_unused_parameters": "ddp_find_unused_parameters",
    }  # fmt: skip
    return Dialect(
        "nested",
        "the nested DDP form",
        table(shared.rows.values(), own),
        _fits,
        shared.defaults,
        rename,
        BLOCKS,
        task=shared.task,
        meant=shared.meant,
    )
