"""What is known about the config's keys without loading any file: names, words for their types, effect on results.

Read from the schema once, on demand. Messages, docs, the JSON Schema's words and the comparison of two runs all
take their facts from here, so that a new key in schema.py needs no second entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from duoka.config.fields import Means, Section
from duoka.config.schema import NAMED_BLOCKS, DataSource, RunConfig
from duoka.config.yaml_text import yaml_text

# Keys that change speed, memory, printing or places, and never a loss or a weight. `section.*` means all of it.
EXECUTION_KEYS: tuple[str, ...] = (
    "train.micro_batch",
    "train.recompute",
    "train.compile",
    "train.rehearse",
    "train.eval_every",
    "train.eval_tasks",
    "train.eval_items",
    "data.packing",
    "data.fixed_rows",
    "data.prefix_sharing",
    "data.workers",
    "rl.reward_deadline",
    "rl.tool_deadline",
    "rl.reward_workers",
    "rl.max_failed",
    "parallel.*",
    "checkpoint.*",
    "faults.*",
    "cluster.*",
    "log.*",
    "output",
)
# Inside these sections, and yet with a say in what is learned.
RESULT_KEYS: tuple[str, ...] = ("parallel.compress", "parallel.compress.weights", "parallel.compress.gradients")

# What to write where there is no default to show.
_EXAMPLES: dict[str, str] = {
    "model": "demo",
    "model.name": "demo",
    "model.depth": "12",
    "model.width": "768",
    "model.head_dim": "128",
    "model.kv_heads": "2",
    "model.mlp_width": "2304",
    "model.context": "2048",
    "model.from_scratch": "true",
    "model.revision": "main",
    "model.tokenizer": "path/to/tokenizer",
    "stage": "sft",
    "stage.loss": "sigmoid",
    "stage.beta": "0.1",
    "stage.label_smoothing": "0.1",
    "stage.gamma": "0.5",
    "stage.sft_weight": "1",
    "stage.sft_mean": "tokens",
    "stage.ld_alpha": "0.5",
    "stage.desirable_weight": "1.3",
    "stage.undesirable_weight": "1",
    "stage.centering": "0.01",
    "data": "{train: [identity]}",
    "data.train": "[identity]",
    "data.train.name": "identity",
    "data.train.weight": "0.5",
    "data.train.share": "0.2",
    "data.train.epochs": "4",
    "data.train.max_samples": "1000",
    "data.eval": "0.1",
    "data.folder": "data",
    "data.workers": "4",
    "data.streams": "8",
    "lora": "{rank: 8}",
    "lora.targets": "[q_proj, v_proj]",
    "lora.adapter": "runs/first",
    "lora.merge": "[runs/first]",
    "train_only": "{layers: 2}",
    "train_only.modules": "[mlp]",
    "train_only.extra": "[embed_tokens]",
    "rl": "{algorithm: grpo}",
    "rl.rewards": "[task]",
    "rl.reward_weights": "[1, 0.2]",
    "rl.advantage": "center",
    "rl.normalize": "tokens",
    "rl.clip": "[0.2, 0.28]",
    "rl.importance": "2",
    "rl.tools": "[calculator]",
    "rl.engine": "vllm:http://127.0.0.1:8000",
    "rl.drop_equal": "true",
    "rl.replay": "runs/first/rollouts",
    "optim.state": "runs/base",
    "optim.adamw_lr": "3e-4",
    "optim.embedding_lr": "2e-3",
    "optim.head_lr": "1e-3",
    "optim.lr_batch": "64",
    "train.max_steps": "500",
    "train.tokens": "20x",
    "train.eval_tasks": "[arithmetic]",
    "checkpoint.keep_every": "1000",
    "checkpoint.allow_changes": "[train.epochs]",
    "parallel.layout": "fsdp2.tp2",
    "parallel.shard_ranks": "2",
    "parallel.offload.folder": "/fast",
    "parallel.tensor": "2",
    "parallel.pipeline": "2",
    "parallel.sequence": "2",
    "cluster.hosts": "[node1, node2]",
    "parallel.virtual_stages": "2",
    "output": "runs/identity",
}


@dataclass(frozen=True)
class Key:
    """One key of the YAML, as a user meets it."""

    name: str  # dotted
    words: str  # what a value must be
    choices: tuple[str, ...]  # of the value, or of a list's items
    description: str
    default: Any
    is_required: bool
    is_nullable: bool
    example: str  # YAML of a value that is right
    section: type[Section] | None  # the block's type, when the key opens a block
    items: type[Section] | None  # the type of a list's blocks


@cache
def known_keys() -> dict[str, Key]:
    """All keys by dotted name, in the order of the file; keys inside a data set are `data.train.weight`."""
    return {key.name: key for key in _keys_of(RunConfig, "")}


def _keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, info in section.model_fields.items():
        key = _describe(f"{prefix}{name}", info)
        yield key
        inner = key.section or key.items
        if inner is not None:
            yield from _keys_of(inner, f"{key.name}.")


def _describe(name: str, info: FieldInfo) -> Key:
    types = list(_parts(info.annotation, tuple(_flat(info.metadata))))
    section = next((part for part, _ in types if _is_section(part)), None)
    items = next((inner for part, _ in types if (inner := _list_section(part)) is not None), None)
    choices = tuple(choice for part, _ in types for choice in _choices(part))
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    nullable = any(part is type(None) for part, _ in types)
    description = info.description or (section.__doc__ or "" if section else "")
    if name in NAMED_BLOCKS:
        words = f"a {name}'s name, or a block of keys"
    else:
        words = ", or ".join(dict.fromkeys(_words(part, meta) for part, meta in types if part is not type(None)))
    example = _EXAMPLES.get(name.replace("data.eval.", "data.train."))
    if example is None:
        example = _plain_example(default)
    return Key(
        name=name,
        words=words,
        choices=choices,
        description=" ".join(description.split()),
        default=default,
        is_required=info.is_required(),
        is_nullable=nullable,
        example=example,
        section=section,
        items=items,
    )


def _choices(part: Any) -> tuple[str, ...]:
    """The words that a value, or an item of a list, must be one of."""
    if get_origin(part) is tuple:
        return _choices(get_args(part)[0])
    return tuple(str(choice) for choice in get_args(part)) if get_origin(part) is Literal else ()


def _plain_example(default: Any) -> str:
    if isinstance(default, Section):
        filled = {key: value for key, value in default.model_dump().items() if value is not None}
        first = next(iter(filled))
        return "{" + f"{first}: {yaml_text(filled[first])}" + "}"
    if isinstance(default, float) and default == int(default):
        return str(int(default))
    return yaml_text(default)


def _parts(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The members of a union with their constraints; a type described by `Means` counts as one."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        metadata = (*metadata, *_flat(more))
        if any(isinstance(item, Means) for item in metadata):
            yield inner, metadata
        else:
            yield from _parts(inner, metadata)
    elif get_origin(annotation) in (Union, UnionType) and not any(isinstance(item, Means) for item in metadata):
        for part in get_args(annotation):
            yield from _parts(part, metadata)
    else:
        yield annotation, metadata


def _flat(metadata: Any) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _is_section(part: Any) -> bool:
    # Python 3.10 takes tuple[int, ...] for a class too.
    return get_origin(part) is None and isinstance(part, type) and issubclass(part, Section)


def _list_section(part: Any) -> type[Section] | None:
    inner = get_args(part)[:1]
    return inner[0] if get_origin(part) is tuple and inner and _is_section(inner[0]) else None


def _words(part: Any, metadata: tuple[Any, ...]) -> str:
    for item in metadata:
        if isinstance(item, Means):
            return item.words
    if get_origin(part) is Literal:
        choices = [str(choice) for choice in get_args(part)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(part) is tuple:
        return _list_words(get_args(part))
    if part is bool:
        return "true or false"
    if part in (int, float):
        return ("a whole number" if part is int else "a number") + _bounds(metadata)
    if part is str:
        return "text"
    return "a block of keys"


def _list_words(inner: tuple[Any, ...]) -> str:
    if inner[0] is DataSource:
        return "a list of data sets"
    word, metadata = next(iter(_parts(inner[0])))
    if len(inner) == 2 and inner[1] is not Ellipsis:
        return f"a list of two numbers{_bounds(metadata, each=', each')}"
    if word in (int, float):
        return "a list of numbers"
    if get_origin(word) is Literal:
        return "a list of " + ", ".join(str(choice) for choice in get_args(word))
    return "a list of names"


def _bounds(metadata: tuple[Any, ...], each: str = "") -> str:
    """In words; of several bounds on one side the tightest alone, so that none is said that a value could not have."""
    lows: list[tuple[Any, str]] = [(item.ge, f"of at least {item.ge:g}") for item in metadata if isinstance(item, Ge)]
    lows += [(item.gt, f"above {item.gt:g}") for item in metadata if isinstance(item, Gt)]
    tops: list[tuple[Any, str]] = [(item.lt, f"below {item.lt:g}") for item in metadata if isinstance(item, Lt)]
    tops += [(item.le, f"at most {item.le:g}") for item in metadata if isinstance(item, Le)]
    # Of an open and a closed bound at one number the open one holds: it stands last of the first, first of the second.
    words = [word for _, word in (*sorted(lows, key=_number)[-1:], *sorted(tops, key=_number)[:1])]
    return f"{each} {' and '.join(words)}" if words else ""


def _number(bound: tuple[Any, str]) -> Any:
    return bound[0]


def is_execution_key(name: str) -> bool:
    """True for a key that changes no result, so that a run may go on under another value."""
    if name in RESULT_KEYS:
        return False
    return any(name == key or (key.endswith(".*") and name.startswith(key[:-1])) for key in EXECUTION_KEYS)


def leaves(config: RunConfig) -> dict[str, Any]:
    """Every value by dotted key; a list is one value, an absent block is None."""
    return dict(_leaves(config.model_dump(mode="python"), ""))


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
