"""How many weights a model's files hold, by the headers of its safetensors alone: what config.json does not tell.

Of types that families.py has no row for the plan counts these; and what a model has beside what reads text (towers for
images and sound), which training on text leaves as it is.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duoka.plan.sizes import ModelShape
from duoka.units import format_count

_MOST_HEADER_BYTES = 100_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS, _TABLES_OF_NUMBERS = {"F32", "F16", "BF16"}, {"I64", "BOOL"}  # other types are packed weights
_READS_TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head)(\.|$)")
_BESIDE = re.compile(r"(^|[._])(visual|vision|image|video|audio|speech|multi_modal|connector|projector)[._]")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks?)\.(\d+)\.")
_TABLE = re.compile(r"(^|\.)embed\w*\.weight$|(^|\.)w[tp]e\.weight$")
# Layers that guess further words, and buffers: transformers loads neither.
_NOT_LOADED = re.compile(r"(^|\.)mtp\.|\.inv_freq$")
_TOWERS_WITHIN = {"phi4_multimodal"}  # in what reads text, and trained with it
# Read as the part that reads text alone, and the rest stays in the files: their classes for both cannot be called.
TEXT_ALONE = {"llama4"}
# What configs of towers call their layers, their width, and that of their MLPs.
_SIZES = (
    ("num_hidden_layers", "depth", "num_layers", "encoder_layers"), ("hidden_size", "embed_dim", "d_model"),
    ("intermediate_size", "encoder_ffn_dim", "mlp_dim"),
)  # fmt: skip
# What only models have that read more than text.
_TOWERS = ("text_config", "vision_config", "audio_config")


@dataclass(frozen=True)
class InFiles:
    """Parameters: in layers; in tables that words are looked up in, and the rest at both ends; beside all that."""

    in_layers: int
    tables: int
    ends: int
    beside: int
    has_head: bool  # of its own


def as_in_files(shape: ModelShape, folder: Path | None, facts: Mapping[str, Any]) -> ModelShape:
    """`shape` with what a config does not tell: towers, and the weights of a type that is not in the table.

    Of files that are not here, or packed, towers are guessed.
    """
    if shape.exact and not any(isinstance(facts.get(key), dict) for key in _TOWERS):
        return shape
    found = None if folder is None or shape.packed_by else count_in_files(folder, facts)
    if found is None:
        return replace(shape, num_beside=_guess_towers(facts))
    shape = replace(shape, num_beside=found.beside, tied=not found.has_head)
    if shape.exact:
        return shape
    ends = shape.num_head + shape.num_head_bias + shape.num_final_norm_parameters
    return replace(
        shape,
        is_counted=True,
        num_tables=found.tables - shape.num_embedding,
        num_more=found.in_layers + found.ends - shape.num_in_layers - ends,
    )


def _guess_towers(facts: Mapping[str, Any]) -> int:
    """Attention's four matrices and the MLP's two of each layer."""
    if facts.get("model_type") in TEXT_ALONE | _TOWERS_WITHIN:
        return 0
    total = 0
    for key in ("vision_config", "audio_config"):
        sizes = facts.get(key)
        if isinstance(sizes, dict):
            layers, width, inside = (
                next((sizes[name] for name in names if isinstance(sizes.get(name), int)), 0) for names in _SIZES
            )
            total += layers * (4 * width * width + 2 * width * (inside or 4 * width))
    return total


def count_notes(shape: ModelShape) -> tuple[str, ...]:
    """What a reader of a plan has to know of its counts."""
    notes = []
    if not shape.exact:
        known = ["its parameters are those in its files"] if shape.is_counted else []
        known += ["what its layers keep was measured"] if shape.kept else []
        what = "its counts are estimates; whether it is packed or padded is seen when a run begins"
        what = f"{', '.join(known)}, the rest of the plan estimates" if known else what
        notes.append(f"model type {shape.model_type} is not in the plan's table: {what}")
    if shape.num_beside:
        count = format_count(shape.num_beside)
        notes.append(f"{count} parameters for images or sound are frozen: no text reaches them")
    return tuple(notes)


def count_in_files(folder: Path, facts: Mapping[str, Any]) -> InFiles | None:
    """None where there are no safetensors, or packed ones, or damaged ones: reading these reports it."""
    try:
        sizes = _read_sizes(folder)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None
    if not sizes:
        return None
    model_type = str(facts.get("model_type", ""))
    text_facts = facts.get("text_config") or {}
    skipped = {int(number) for number in text_facts.get("cross_attention_layers") or ()}
    has_parts = any(_READS_TEXT.search(name) and "lm_head" not in name for name in sizes)

    def is_beside(name: str) -> bool:
        if model_type in _TOWERS_WITHIN:
            return False
        if (layer := _LAYER.search(name)) and int(layer[3]) in skipped and "language_model" in name:
            return True  # it looks at images alone
        return not _READS_TEXT.search(name) if has_parts else bool(_BESIDE.search(name))

    is_tied = bool({**text_facts, **facts}.get("tie_word_embeddings"))
    text = {name: size for name, size in sizes.items() if not is_beside(name)}
    inside = sum(size for name, size in text.items() if _LAYER.search(name))
    tables = sum(size for name, size in text.items() if _TABLE.search(name) and not _LAYER.search(name))
    heads = [size for name, size in text.items() if name.endswith("lm_head.weight")]
    return InFiles(
        in_layers=inside,
        tables=tables,
        ends=sum(text.values()) - inside - tables - (sum(heads) if is_tied else 0),
        beside=0 if model_type in TEXT_ALONE else sum(sizes.values()) - sum(text.values()),
        has_head=bool(heads) and not is_tied,
    )


def _read_sizes(folder: Path) -> dict[str, int]:
    """Numbers in each tensor by name; none where one is packed."""
    if (folder / _SINGLE).is_file():
        files = {_SINGLE}
    elif (folder / _INDEX).is_file():
        files = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    else:
        return {}
    sizes: dict[str, int] = {}
    for file in files:
        for name, tensor in read_header(folder / file)[1].items():
            if tensor["dtype"] not in _WEIGHTS | _TABLES_OF_NUMBERS:
                return {}
            if tensor["dtype"] in _WEIGHTS and not _NOT_LOADED.search(name):
                sizes[name] = math.prod(tensor["shape"])
    return sizes


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """(where the tensors of a safetensors file begin, what its header says of each)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(file.read(length))
    return 8 + length, {name: tensor for name, tensor in header.items() if name != "__metadata__"}
