"""What to type after a run that is done: commands that take what it made."""

from __future__ import annotations

from typing import Any

from duoka.errors import typed
from duoka.runs.folder import RunFolder
from duoka.watch.differences import read_config

_TASK = "task:"


def next_commands(run: RunFolder) -> list[str]:
    config = read_config(run)
    stage = config.get("stage") or {}
    name = stage.get("name", "sft") if isinstance(stage, dict) else str(stage)
    if name == "reward":  # it says no words
        return [f"duoka score {typed(run.path)} DATA"]
    model = run.path.parent / (run.name + "-model")
    export = f"duoka export {typed(run.path)} -o {typed(model)}"
    return [f"duoka chat {typed(run.path)}", _measured(run, name, config), export]


def _measured(run: RunFolder, stage: str, config: dict[str, Any]) -> str:
    """On what it kept aside, where that is something whose likelihood can be measured."""
    data = config.get("data") or {}
    names = [one if isinstance(one, str) else str(one.get("name")) for one in data.get("train") or ()]
    tasks = [name.removeprefix(_TASK) for name in names if name.startswith(_TASK)]
    if stage == "rl" and tasks:
        return f"duoka eval {typed(run.path)} --tasks {','.join(tasks)}"
    has_data = not config or (data.get("eval") and stage not in ("dpo", "kto", "rl"))
    return f"duoka eval {typed(run.path)}" + ("" if has_data else " --data NAME")
