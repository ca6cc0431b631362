"""Do trained adapters fit the model that they are named for? Looked at by names and shapes alone, before any start.

models.py asks as part of its checks. Nothing here reads a tensor or knows torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from duoka.config.adapters import (
    WEIGHTS,
    AdapterFacts,
    check_counted_once,
    find_adapter,
    named_adapters,
    read_adapter,
)
from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError, Fault
from duoka.hub.base import other_base, read_base
from duoka.plan.shape import ModelShape, adapted_linears, demo_shape, read_shape

_MATRIX = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.weight$")
_IN_LAYER = re.compile(r"^.*?\.(\d+)\.(.+)$")
_MOST_HEADER_BYTES = 100_000_000
Shapes = dict[str, dict[str, tuple[int, ...]]]  # module -> A or B -> shape


def read_shapes(folder: Path) -> Shapes:
    """The shapes of an adapter's matrices, from the file's header; refuses what is no plain low-rank adapter."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MOST_HEADER_BYTES:
                raise ValueError("it is no safetensors file")
            header = json.loads(file.read(size))
        tensors = {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read: {error}", fix="copy the adapter again") from None
    shapes: Shapes = {}
    for name, shape in tensors.items():
        found = _MATRIX.match(name)
        if found is None:
            raise ConfigError(
                f"{folder / WEIGHTS} holds {name}, which belongs to no plain adapter", fix="merge it first"
            )
        shapes.setdefault(found.group(1), {})[found.group(2)] = shape
    return shapes


def check_fit(lora: LoraConfig | None, base: Path, folder: Path | None) -> list[Fault]:
    """Faults of adapters that do not belong beside the model in `folder`, by default the demo."""
    faults: list[Fault] = []
    if not named_adapters(lora):
        return faults
    shape = demo_shape() if folder is None else read_shape(folder)
    for key, name in named_adapters(lora):
        try:
            facts = read_adapter(name, base, key)
            for what, fix in _misfits(facts, shape, is_merged=key.startswith("lora.merge")):
                faults.append(Fault(f"{key} is {name!r}, {what}", key=key, fix=fix))
        except ConfigError as error:
            faults.append(Fault(error.what, key=key, fix=error.fix or ""))
    return faults or check_counted_once(named_adapters(lora), base)


def note_other_bases(lora: LoraConfig | None, base: Path, folder: Path) -> list[str]:
    """A note for each adapter that the config names beside another model than it was trained on."""
    notes = []
    for key, name in named_adapters(lora):
        if differs := other_base(read_base(find_adapter(name, base, key)), folder):
            notes.append(f"{key} {name} was trained on another model than model.name\n{differs}")
    return notes


def _misfits(facts: AdapterFacts, shape: ModelShape, *, is_merged: bool) -> Iterator[tuple[str, str]]:
    """At most one sentence: of many matrices that do not fit, the first says it."""
    shapes = read_shapes(facts.folder)
    other = "name the model that it was trained on" + (f": {facts.base_name}" if facts.base_name else "")
    outside = [module for module in shapes if _IN_LAYER.match(module) is None]
    if is_merged and (outside or facts.is_transposed):
        what = outside[0] if outside else "weights that are kept the other way round"
        yield f"which lies on {what}: duoka does not merge that", "merge it first:   duoka export, and name the result"
        return
    linears = {linear.name: linear for linear in (*shape.linears, *shape.dense_linears)}
    seen: set[tuple[int, str]] = set()
    for module, pair in shapes.items():
        found = _IN_LAYER.match(module)
        layer, name = (int(found.group(1)), found.group(2)) if found else (-1, module)
        seen.add((layer, name))
        if set(pair) != {"A", "B"} or pair["A"][0] != facts.rank or pair["B"][1] != facts.rank:
            yield (
                f"whose matrices of {module} are not of rank {facts.rank}, as its config says",
                "copy the adapter again",
            )
            return
        linear = linears.get(name)
        wanted = (linear.num_in, linear.num_out) if linear else None
        got = (pair["A"][1], pair["B"][0])
        if wanted and got != wanted:
            yield (
                f"an adapter of another model: its {module} is for {got[0]} x {got[1]}, and here {_times(wanted)}",
                other,
            )
            return
        if layer >= shape.num_layers:
            yield f"an adapter of another model: it has layer {layer}, and here there are {shape.num_layers}", other
            return
    missing = _first_missing(shape, facts, seen)
    if missing and not is_merged:
        what = f"which has nothing on {missing}: it is of a model with fewer layers, or of some layers only"
        yield what, f"{other}, or write it under lora.merge"


def _times(pair: tuple[int, int]) -> str:
    return f"{pair[0]} x {pair[1]}"


def _first_missing(shape: ModelShape, facts: AdapterFacts, seen: set[tuple[int, str]]) -> str:
    """A module that `targets` name and the file lacks; of models with layers of two kinds nothing is said here."""
    if shape.dense_linears or not shape.exact:
        return ""
    linears = adapted_linears(shape, LoraConfig(rank=facts.rank, targets=facts.targets))
    for layer in range(shape.num_layers):
        for linear in linears:
            if (layer, linear.name) not in seen:
                return f"layer {layer}'s {linear.name}"
    return ""
