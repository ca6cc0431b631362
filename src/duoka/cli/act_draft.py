"""The form of `duoka board --control`: the schema as fields, a draft as YAML, its plan and start. No command itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from duoka.config.catalog import Key, known_keys
from duoka.config.yaml_lines import parse_yaml
from duoka.config.yaml_text import yaml_text
from duoka.errors import ConfigError, DoesNotFit, Fault
from duoka.explain.find import chinese_keys
from duoka.runs.find import is_run
from duoka.runs.folder import RunFolder
from duoka.watch.control import Draft

FILE = "start.yaml"  # in the run's logs/: what the form said
OUTPUT = "board.log"  # beside it: what a run that was started from a page prints
_PLAN_S = 120.0
_NAME = re.compile(r"\w[\w .+-]{0,99}")
# What a first run is asked for; the form has all other keys below these.
FIRST = (
    "model.name", "data.train", "data.eval", "data.max_length", "stage.name", "lora", "lora.rank", "optim.lr",
    "train.epochs", "train.global_batch",
)  # fmt: skip
_FILLED = {"model.name": "demo", "data.train": "[identity]", "lora": "true"}
# The form has these elsewhere, or they belong to a file that lies on another.
_LEFT_OUT = ("output", "extends", "base")


def form_fields() -> dict[str, Any]:
    return {"fields": list(_fields()), "first": FIRST, "filled": _FILLED}


def _fields() -> Iterator[dict[str, Any]]:
    chinese = chinese_keys()
    blocks = set()
    for name, key in known_keys().items():
        if key.items is not None:  # a list's blocks are written as YAML in the list's own field
            blocks.add(name)
        if name in _LEFT_OUT or any(name.startswith(f"{block}.") for block in blocks) or not _is_field(key):
            continue
        is_switch = key.section is not None
        yield {
            "name": name, "block": name.partition(".")[0], "is_switch": is_switch,
            "choices": [] if is_switch else _choices(key), "default": _default(key), "words": key.words,
            "help": [key.description, chinese.get(name, key.description)],
        }  # fmt: skip


def _is_field(key: Key) -> bool:
    """A block is a field, a switch, only where it may be left out and then means nothing."""
    return key.section is None or (key.is_nullable and key.default is None)


def _choices(key: Key) -> list[str]:
    is_list = isinstance(key.default, (list, tuple))
    if isinstance(key.default, bool):
        return ["true", "false"]
    is_closed = key.words == f"one of {', '.join(key.choices)}"  # else other values are right too: a list, a number
    return list(key.choices) if is_closed and not is_list else []


def _default(key: Key) -> str:
    if key.is_required or key.section is not None or key.default in (None, ""):
        return ""
    try:
        return yaml_text(key.default)
    except TypeError:
        return str(key.default)


# --- a draft ---


def draft_yaml(values: Mapping[str, str]) -> str:
    """What was typed, as a file: each value stands as it was typed where that is YAML, else as text."""
    tree: dict[str, Any] = {}
    unknown = [key for key in values if key not in known_keys() or key in _LEFT_OUT]
    if unknown:
        raise ConfigError(f"the form has no key {', '.join(unknown)}")
    for key in known_keys():
        text = values.get(key, "").strip()
        if not text:
            continue
        *blocks, last = key.split(".")
        inner = tree
        for block in blocks:
            inner = inner[block] if isinstance(inner.get(block), dict) else inner.setdefault(block, {})
        if known_keys()[key].section is not None:
            if text == "true":
                inner.setdefault(last, {})
        else:
            inner[last] = _as_yaml(text)
    return "\n".join(_lines(tree, "")) + "\n"


def _as_yaml(text: str) -> str:
    faults: list[Fault] = []
    tree = parse_yaml(text, "the form", faults)
    is_open_block = tree is not None and isinstance(tree.value, (dict, list)) and text[0] not in "{["
    return yaml_text(text) if faults or tree is None or is_open_block or "\n" in text else text


def _lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value or '{}'}"


def plan_draft(draft: Draft) -> dict[str, Any]:
    """In a process of its own: a plan may fetch a model's config, and what it reads is not kept in the board."""
    text = draft_yaml(draft.values)
    with tempfile.TemporaryDirectory(prefix="duoka-draft-") as folder:
        path = Path(folder) / FILE
        path.write_text(text, encoding="utf-8")
        nproc = ["--nproc", str(draft.num_processes)] if draft.num_processes else []
        command = [sys.executable, "-m", "duoka", "plan", str(path), "--json", *nproc]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PLAN_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return {"yaml": text, "faults": [f"the plan took more than {_PLAN_S:g} s"]}
        said = [line.replace(str(path), FILE) for line in done.stderr.splitlines()]
    if done.returncode not in (0, DoesNotFit.exit_code) or not done.stdout.startswith("{"):
        return {"yaml": text, "faults": said or [f"`duoka plan` ended with exit code {done.returncode}"]}
    return {"yaml": text, "plan": _brief(json.loads(done.stdout)), "notes": said}


def _brief(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a form shows of a plan."""
    memory, speed = plan["memory"], plan.get("speed") or {}
    names = ("peak_bytes", "low_bytes", "high_bytes", "available_bytes", "parts", "basis")
    return {
        "verdict": plan["verdict"], "layout": plan["layout"], "batch": plan["batch"]["sentence"],
        "steps": plan["steps"], "memory": {name: memory.get(name) for name in names},
        "tokens_per_s": speed.get("tokens_per_s"), "total_s": (plan.get("costs") or {}).get("total_s"),
        "parameters": plan["model"]["num_parameters"], "trained": plan["model"]["num_trainable"],
        "warnings": plan["warnings"], "notes": plan["notes"], "smaller": plan["smaller"],
        "reasons": plan["reasons"],
    }  # fmt: skip


def prepare_start(folder: Path, draft: Draft) -> tuple[RunFolder, list[str]]:
    """A new run's folder with the draft in it, and the command that trains it. Raises before anything is written."""
    name = draft.name.strip()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a run", fix="use letters, digits, spaces and . _ + -; a letter first"
        )
    if is_run(folder):
        raise ConfigError(f"{folder} is one run", fix="start the board on the folder that holds it")
    run = RunFolder(folder / name)
    if run.path.exists() and (not run.path.is_dir() or {entry.name for entry in run.path.iterdir()} - {"logs"}):
        raise ConfigError(f"there is a {name} in {folder} already", fix="choose another name; Go on continues a run")
    found = plan_draft(draft)
    if "plan" not in found:
        raise ConfigError("this config has faults", fix="\n".join(found["faults"]))
    if found["plan"]["verdict"] == "does not fit":
        raise DoesNotFit(f"{name} does not fit on this machine", fix="the plan beside the form says what would")
    run.logs.mkdir(parents=True, exist_ok=True)
    file = run.logs / FILE
    file.write_text(found["yaml"], encoding="utf-8")
    return run, [
        sys.executable, "-m", "duoka", "train", str(file.resolve()), f"output={run.path.resolve()}",
        *(["--nproc", str(draft.num_processes)] if draft.num_processes else []),
    ]  # fmt: skip
