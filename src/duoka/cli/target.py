"""What stands behind `duoka export|chat|eval`: a run, a model, or a file that names one. Not a command itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duoka.config.foreign_task import AskedFile, Purpose
    from duoka.serve.load_run import Trained


def find_target(
    target: str, overrides: tuple[str, ...], purpose: Purpose, step: int | None, say: Callable[[str], None]
) -> tuple[Trained, AskedFile | None]:
    """The trained thing that TARGET means, and the file of another tool that named it, if one did."""
    from duoka.config.foreign_task import is_config_file, read_asked
    from duoka.errors import ConfigError
    from duoka.serve.load_run import find_trained, find_trained_on

    if not is_config_file(target):
        if overrides:
            what = f'"{overrides[0]}" changes a key of a file, and {target} is none'
            raise ConfigError(what, fix=f"leave it out, or name a YAML file (see duoka {purpose} --help)")
        return find_trained(target, step=step, say=say), None
    asked = read_asked(target, purpose, overrides)
    if asked is None:
        return find_trained(str(_run_of(target, overrides)), step=step, say=say), None
    for note in asked.notes:
        say(f"note: {note}")
    if step is not None:
        raise ConfigError("--checkpoint names a step of a run", fix="name the run instead of the file")
    trained = find_trained_on(asked.model, asked.adapters, say=say)
    return replace(trained, template=asked.template, trusts_code=asked.is_on("trust_remote_code")), asked


def _run_of(target: str, overrides: tuple[str, ...]) -> Path:
    """The folder of the run that a config of ours describes."""
    from duoka.cluster.run_lock import find_run_folder
    from duoka.config.load import load_config
    from duoka.errors import ConfigError, typed

    run = find_run_folder(load_config(target, overrides))
    if not run.exists():
        what = f"{target} has not been trained: there is no run in {run.path}"
        raise ConfigError(what, fix=f"duoka train {typed(target)}")
    return run.path
