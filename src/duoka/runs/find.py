"""Which runs a folder has, and which one a user means by a name."""

from __future__ import annotations

import os
from pathlib import Path

from duoka.errors import ConfigError
from duoka.registry import nearest
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.heart import beat_path

STAGES_FILE = "pipeline.json"  # in the folder of `duoka run`


def is_run(folder: Path) -> bool:
    return (folder / "status.json").is_file() or (folder / "events").is_dir()


def runs_in(folder: Path) -> list[RunFolder]:
    """The run that `folder` is, or the runs in it, by name."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", fix="runs are written where a config's output: says")
    if is_run(folder):
        return [RunFolder(folder)]
    open_to_us = (sub for sub in sorted(folder.iterdir()) if sub.is_dir() and os.access(sub, os.R_OK | os.X_OK))
    return [RunFolder(sub) for sub in open_to_us if is_run(sub)]


def find_run(name: str, folder: Path) -> RunFolder:
    """A run by its folder, or by its name in `folder`; of several stages, the last."""
    for path in (Path(name).expanduser(), folder / name):
        if path.is_dir() and is_run(path):
            return RunFolder(path)
        if (last := last_of_stages(path)) is not None:
            return last
    names = [run.name for run in runs_in(folder)] if folder.is_dir() else []
    guess = nearest(name, names)
    hint = f"did you mean {guess}? " if guess else ""
    words = "duoka runs" if folder == Path("runs") else f"duoka runs {folder}"
    known = f"`{words}` lists them" if names else f"there are none in {folder}"
    raise ConfigError(f"there is no run {name}", fix=f"{hint}{known}")


def last_of_stages(folder: Path) -> RunFolder | None:
    """The last stage that trained, in a folder of `duoka run`; None: it is no such folder, or none is done."""
    facts = read_json(folder / STAGES_FILE) or {}
    stages = facts.get("stages", {})
    known = [stages[name] for name in facts.get("order", stages) if name in stages]  # stages may have come and gone
    done = [one["folder"] for one in known if one["kind"] == "train" and one["state"] == "done"]
    return RunFolder(folder / done[-1]) if done else None


def newest_run(folder: Path) -> RunFolder:
    """The one that was written to last."""
    runs = runs_in(folder) if folder.is_dir() else []
    if not runs:
        raise ConfigError(f"there are no runs in {folder}", fix="name a run, or start one:   duoka train sft.yaml")
    return max(runs, key=written_at)


def written_at(run: RunFolder) -> float:
    """When something about a run was written last, by the clock of the disk; 0 for an empty folder.

    Rank 0's heartbeat counts: a long evaluation, or a step of many micro-batches, writes no line and is alive.
    """
    found = 0.0
    for path in (run.events / "run.jsonl", run.progress, run.status, beat_path(run, 0)):
        try:
            found = max(found, path.stat().st_mtime)
        except OSError:
            continue
    return found
