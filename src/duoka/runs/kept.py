"""What layers of model types in no table keep of a token: measured once (model/kept_bytes.py), then read here."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from duoka.config.schema import RunConfig
from duoka.errors import StorageError
from duoka.plan.sizes import ModelShape
from duoka.runs.cache import cache_folder, make_folder
from duoka.runs.folder import write_json_atomic

_MEASURED_SO = 5  # another number where layers, or how they are measured, keep something else
Measure = Callable[[Mapping[str, Any], str], dict[str, float] | None]  # None: not now


def with_kept(shape: ModelShape, facts: Mapping[str, Any], config: RunConfig, measure: Measure) -> ModelShape:
    """`shape` with that of such a run, where its type is in no table and is not packed; `facts` is its config.json."""
    if shape.exact or shape.packed_by or "model_type" not in facts:
        return shape
    way = f"{'lora' if config.lora else 'full'} {'fp32' if config.train.precision == 'fp32' else 'bf16'}"
    libraries = [f"{name} {version(name)}" for name in ("duoka", "torch", "transformers", "peft")]
    name = hashlib.sha256(
        json.dumps([_MEASURED_SO, way, facts, libraries], sort_keys=True, default=str).encode()
    ).hexdigest()
    with contextlib.suppress(OSError, ValueError, AttributeError, StorageError):
        path = cache_folder() / "kept" / f"{name[:32]}.json"
        return replace(shape, kept=tuple(json.loads(path.read_text(encoding="utf-8")).items()))
    if (found := measure(facts, way)) is None:
        return shape
    with contextlib.suppress(OSError, StorageError):  # it is measured again then
        make_folder(cache_folder() / "kept")
        write_json_atomic(cache_folder() / "kept" / f"{name[:32]}.json", found, durable=False)
    return replace(shape, kept=tuple(found.items()))
