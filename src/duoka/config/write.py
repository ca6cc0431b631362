"""From a RunConfig back to text: the resolved YAML with origins, its hash, and what differs between two runs.

`load.py` offers these to the rooms above. What is written here, `load_config` reads back as an equal RunConfig.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from duoka import __version__
from duoka.config.catalog import is_execution_key, leaves
from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.config.yaml_text import EnvText, yaml_text
from duoka.units import parse_amount, parse_seconds

_COMMENT_COLUMN = 44
_SHOWN_LETTERS = 60


@dataclass(frozen=True)
class Difference:
    """A key that two configs set differently; values as YAML."""

    key: str
    old: str
    new: str


def _meaning(key: str, value: Any) -> Any:
    """A value as it acts, so that two spellings of one batch or time compare as equal."""
    if key == "train.global_batch":
        return str(parse_amount(value))
    if key == "parallel.timeout":
        return parse_seconds(value)
    return value


def result_leaves(config: RunConfig) -> dict[str, Any]:
    """Every value that results depend on, by dotted key."""
    return {key: _meaning(key, value) for key, value in leaves(config).items() if not is_execution_key(key)}


def config_hash(config: RunConfig) -> str:
    """16 hex digits that change when, and only when, a key changes that results depend on."""
    text = json.dumps(result_leaves(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_values(loaded: Loaded) -> dict[str, str]:
    """Every key that results depend on with its value in short, secrets as they were written: for comparisons."""
    shown = {}
    for key, value in result_leaves(loaded.config).items():
        text = yaml_text(compact(with_secrets(value, key, loaded.secrets)))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        shown[key] = text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}... ({digest})"
    return shown


def result_differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """The keys that change results and that the two configs set differently, in the file's order."""
    before, after = result_leaves(old), result_leaves(new)
    for block in ("lora", "train_only"):
        if (getattr(old, block) is None) == (getattr(new, block) is None):
            continue
        for values, config in ((before, old), (after, new)):
            for key in [key for key in values if key.split(".")[0] == block]:
                del values[key]
            section = getattr(config, block)
            values[block] = section.model_dump() if section else None
    keys = list(dict.fromkeys([*before, *after]))
    return [
        Difference(key, yaml_text(before.get(key)), yaml_text(after.get(key)))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def resolved_yaml(loaded: Loaded, chosen: Mapping[str, str] | None = None) -> str:
    """Canonical YAML of every key, with the origin of its value as a comment, and what `auto` became by key.

    `auto` itself stays: a run that goes on keeps what it chose by its checkpoint, and elsewhere may choose anew.
    """
    name = yaml_text(loaded.path.name)
    lines = [
        f"# Resolved by duoka {__version__} from {name}: every key, and where its value came from.",
        f"base: {yaml_text(str(loaded.base.resolve()))}  # relative paths: the current folder first, then this one",
    ]
    lines += _block(loaded.config.model_dump(mode="python"), "", loaded, chosen or {})
    return "\n".join(lines) + "\n"


def shown_values(loaded: Loaded) -> dict[str, Any]:
    """The config as plain JSON values, secrets as they were written."""
    values = loaded.config.model_dump(mode="json")
    return {key: with_secrets(value, key, loaded.secrets) for key, value in values.items()}


def _block(values: dict[str, Any], prefix: str, loaded: Loaded, chosen: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _block(value, f"{name}.", loaded, chosen)
            continue
        text = f"{indent}{key}: {yaml_text(compact(with_secrets(value, name, loaded.secrets)))}"
        became = f"; here {chosen[name]}" if name in chosen else ""
        yield f"{text:<{_COMMENT_COLUMN}}  # {loaded.origins.get(name, 'default')}{became}"


def compact(value: Any) -> Any:
    """Data sets without the keys that they don't set; one that sets only its name in its short form."""
    if not isinstance(value, (list, tuple)):
        return value
    out = []
    for item in value:
        if isinstance(item, dict):
            item = {key: inner for key, inner in item.items() if inner is not None}
            item = item["name"] if set(item) == {"name"} else item
        out.append(item)
    return out


def with_secrets(value: Any, name: str, secrets: dict[str, str]) -> Any:
    if name in secrets:
        return EnvText(secrets[name])
    if isinstance(value, dict):
        return {key: with_secrets(item, f"{name}.{key}", secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_secrets(item, f"{name}.{index}", secrets) for index, item in enumerate(value)]
    return value
