"""The schema in other clothes: the JSON Schema for editors, the page docs/config.md, the YAML that `duoka init` writes.

All three come from the schema's own descriptions, so none can fall behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from duoka.config.catalog import Key, is_execution_key, known_keys
from duoka.config.schema import NAMED_BLOCKS, RunConfig
from duoka.config.yaml_text import yaml_text
from duoka.errors import typed

# The canonical form: what a first config shows, and with which values. All other keys keep their defaults.
_STARTER: dict[str, str] = {
    "data.eval": "0.1",
    "data.max_length": "512",
    "data.packing": "auto",
    "lora.rank": "8",
    "lora.alpha": "16",
    "lora.dropout": "0.0",
    "lora.targets": "all",
    "optim.name": "adamw",
    "optim.lr": "2.0e-5",
    "optim.schedule": "cosine",
    "optim.warmup": "0.03",
    "optim.clip": "1.0",
    "optim.weight_decay": "0.0",
    "train.epochs": "3",
    "train.global_batch": "16",
    "train.micro_batch": "auto",
    "train.precision": "auto",
    "train.recompute": "auto",
    "train.seed": "42",
    "parallel.strategy": "auto",
    "checkpoint.every": "50",
    "checkpoint.keep": "2",
    "checkpoint.resume": "auto",
    "faults.hang_after": "auto",
    "faults.stop_within": "auto",
    "faults.nonfinite": "stop",
    "cluster.hosts": "[]",
    "log.every": "10",
    "log.to": "[tensorboard]",
}

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

_META_KEYS = {
    "extends": "Another YAML, relative to this one, that this one lies on: blocks are merged, values replaced.",
    "base": "Folder for relative paths that are not found from the current one. Written into resolved configs.",
}

_PAGE_HEAD = """\
# The config

One YAML describes a run. This page is made from the schema (`duoka config schema --markdown`); do not edit it.

- `duoka init sft.yaml` writes a commented file, `duoka config show sft.yaml` prints every value with its origin.
- `duoka config schema` prints the JSON Schema, with which an editor completes keys and marks mistakes.
- `model: demo` is short for `model: {name: demo}`, `stage: sft` for `stage: {name: sft}`, and `train: [identity]` for
  `train: [{name: identity}]`.
- Command line: `duoka train sft.yaml optim.lr=1e-4 lora=null`. Values are read as YAML; a later one wins.
- `extends: base.yaml` lays this file on another one: blocks are merged key by key, lists and values replaced.
- `${env:NAME}` or `${env:NAME,default}` takes a value from the environment. What comes from a variable whose name
  says secret, token, key or password is never printed or written. `$${env:` is the text itself.
- Relative paths are looked up from the current folder first, then from the YAML's.
- `2e-5`, `2.0e-5` and `"2e-5"` are the same number; `yes`, `no`, `on` and `off` work where true and false do.
- All faults of a file are reported together, before anything starts, and end with exit code 2.

The last column tells whether a run may be resumed under another value: keys that change no result say yes.
"""


def json_schema() -> dict[str, Any]:
    """JSON Schema of what the loader accepts, short forms included."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "duoka run"
    properties = schema["properties"]
    for name, description in _META_KEYS.items():
        properties[name] = {"type": "string", "description": description}
    short = {"type": "string", "description": "Short for {name: ...}."}
    properties |= {block: {"anyOf": [short, properties[block]]} for block in NAMED_BLOCKS}
    data = schema["$defs"]["DataConfig"]["properties"]
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/DataSource"}]}
    data["train"]["items"] = source
    data["train"] = _with_short_form(data["train"], [{"type": "string"}, _bare(data["train"])])
    evals = [part for part in data["eval"]["anyOf"] if part.get("type") != "array"]
    array = {"type": "array", "items": source}
    data["eval"] = _with_short_form(data["eval"], [*evals, {"type": "string"}, array])
    return dict(_with_json_bounds(schema))


def _with_json_bounds(part: Any) -> Any:
    """pydantic writes a bound that follows a validator under its own name, which no editor knows."""
    if isinstance(part, list):
        return [_with_json_bounds(item) for item in part]
    if isinstance(part, dict):
        return {_BOUNDS.get(key, key): _with_json_bounds(value) for key, value in part.items()}
    return part


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("description", "title", "default")}


def _with_short_form(part: dict[str, Any], forms: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {key: value for key, value in part.items() if key in ("description", "title", "default")}
    return {**kept, "anyOf": forms}


def config_markdown() -> str:
    """The text of docs/config.md."""
    out = [_PAGE_HEAD]
    keys = known_keys()
    out += ["## At the top", "", *_table(key for key in keys.values() if "." not in key.name), ""]
    out += ["Beside these, in files:", "", *(f"- `{name}`: {text}" for name, text in _META_KEYS.items()), ""]
    for section in (key for key in keys.values() if key.section is not None):
        out += [f"## {section.name}", "", section.description, ""]
        out += _table(key for key in keys.values() if key.name.rpartition(".")[0] == section.name)
        out.append("")
        if section.name == "data":
            out += ["### A data set in data.train or data.eval", ""]
            out += _table(key for key in keys.values() if key.name.startswith("data.train."))
            out.append("")
    return "\n".join(out).rstrip() + "\n"


def _table(keys: Iterable[Key]) -> list[str]:
    lines = ["| key | default | must be | meaning | resumes |", "|---|---|---|---|---|"]
    for key in keys:
        last = key.name.rpartition(".")[2]
        resumes = "" if key.section is not None else "yes" if is_execution_key(key.name) else "no"
        cells = [f"`{last}`", _default_text(key), key.words, key.description, resumes]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _default_text(key: Key) -> str:
    if key.is_required:
        return "required"
    if key.section is not None:
        return "left out" if key.is_nullable else "its defaults"
    if key.name == "output":
        return "`runs/` and the YAML's name"
    return "left out" if key.default is None else f"`{yaml_text(key.default)}`"


def starter_yaml(model: str, data: Iterable[str], file_name: str) -> str:
    """A commented YAML of the canonical form, ready to train."""
    keys = known_keys()
    name = file_name.rsplit("/", 1)[-1]
    lines = [
        f"# A run of duoka. Start it:   duoka train {typed(name)}",
        f"# See every value:            duoka config show {name}",
        "",
        f"# {keys['model.name'].description}",
        f"model: {yaml_text(model)}",
        "",
        f"# {keys['stage.name'].description}",
        "stage: sft",
        "",
        f"# {keys['data'].description}",
        "data:",
        f"  # {keys['data.train'].description}",
        f"  train: {yaml_text(list(data))}",
    ]
    section = "data"
    for dotted, value in _STARTER.items():
        block, _, last = dotted.rpartition(".")
        if block != section:
            lines += ["", f"# {keys[block].description}", f"{block}:"]
            section = block
        lines += [f"  # {keys[dotted].description}", f"  {last}: {value}"]
    stem = name.rsplit(".", 1)[0] or "run"
    lines += ["", f"# {keys['output'].description}", f"output: {yaml_text(f'runs/{stem}')}"]
    return "\n".join(lines) + "\n"
