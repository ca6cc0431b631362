"""What differs between runs: keys of configs, environments and plans; what is equal is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from duoka.process.secrets import hide_in_command, hide_secrets
from duoka.runs.folder import RunFolder, open_plain, read_json

_OF_ENV = ("duoka", "python", "packages", "host", "system", "machine", "git", "environment", "command")
_OF_PLAN = ("layout", "batch", "steps")
_EACH_RUNS_OWN = ("output",)
_NOT_THERE = None
# Whoever knows a webhook's address can post there, and a command may hold a password: pages are handed on.
_PRIVATE = ("command", "webhook")
_PRIVATE_LINE = re.compile(rf"""^(\s*(?:{"|".join(_PRIVATE)}):[ ])(?!''|"")(?:.*?(  # [^#]*)|.*)$""", re.MULTILINE)
_MASK = "***"


def find_differences(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Rows of source, key and one text a run; null where a run does not have the key."""
    out = []
    for source, read in (("config", read_config), ("environment", _environment), ("plan", _plan)):
        found = [dict(_flatten(read(run))) for run in runs]
        for key in sorted(set().union(*found)):
            values = [one.get(key, _NOT_THERE) for one in found]
            if any(value != values[0] for value in values[1:]) and key not in _EACH_RUNS_OWN:
                out.append({"source": source, "key": key, "values": values})
    return out


def read_config(run: RunFolder) -> dict[str, Any]:
    """What the run's config.yaml says; {} where it cannot be read."""
    try:
        with open_plain(run.config) as file:
            found = yaml.safe_load(file.read().decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def shown_config(run: RunFolder) -> str:
    """The text of the run's config.yaml as others may see it; empty where it cannot be read."""
    try:
        with open_plain(run.config) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return hide_secrets(_PRIVATE_LINE.sub(lambda found: f'{found[1]}"{_MASK}"{found[2] or ""}', text))


def _environment(run: RunFolder) -> Any:
    found = read_json(run.env) or {}
    if isinstance(found.get("command"), list):  # runs of before wrote it whole
        found["command"] = hide_in_command([str(word) for word in found["command"]])
    return {key: found[key] for key in _OF_ENV if key in found}


def _plan(run: RunFolder) -> Any:
    found = read_json(run.plan) or {}
    return {key: found[key] for key in _OF_PLAN if key in found}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif name:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        is_private = name in [f"log.alert.{key}" for key in _PRIVATE] and text
        yield name, _MASK if is_private else hide_secrets(text)
