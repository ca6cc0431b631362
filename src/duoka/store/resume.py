"""Where a run goes on: the checkpoint to take, whether it is whole, and what has changed since it was written.

All ranks call these functions together and get the same answer; files are checked by all ranks in parts. Called by
train/main.py before the model is filled, and by serve for one process. Nothing here reads a tensor.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.comm.world import World
from duoka.config.changes import (
    allowed_changes,
    allows_other_samples,
    changes_order,
    harmless_changes,
    how_to_go_on,
    refused_changes,
)
from duoka.config.load import load_config
from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, DuokaError, StorageError
from duoka.hub.base import BaseIdentity, other_base, read_identity
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import (
    CONFIG,
    Manifest,
    OtherFormat,
    check_files,
    find_misnaming,
    find_requested,
    has_whole,
    is_checkpoint,
    list_checkpoints,
    read_manifest,
    requested_name,
)

STATE = "state.json"
DAMAGED, SET_ASIDE = ".damaged", ".set-aside"
_SHOWN = {"dp": "processes", "shard": "ranks that share one model", "micro": "micro-batch"}

Say = Callable[[str], None]


def find_damage(folder: Path, world: World) -> str:
    """What is wrong with a checkpoint, or "" when it is whole; every rank looks at its part of the files.

    Raises OtherFormat, on all ranks.
    """
    foreign: OtherFormat | None = None
    try:
        manifest = read_manifest(folder)
        names = sorted(manifest.files)[world.rank :: world.size]
        wrong = [fault for fault in [find_misnaming(folder, manifest)] if fault]
        wrong += check_files(folder, manifest, names)
    except OtherFormat as error:
        wrong, foreign = [], error
    except StorageError as error:
        wrong = [error.what]
    everyone: list[tuple[list[str], OtherFormat | None]] = world.gather((wrong, foreign))
    for _, other in everyone:
        if other is not None:
            raise other
    return "; ".join(dict.fromkeys(fault for faults, _ in everyone for fault in faults))


def choose_checkpoint(run: RunFolder, resume: str, base: Path, world: World, say: Say) -> Path | None:
    """What `checkpoint.resume` asks for: the newest valid one, none, or that of a folder; the same on all ranks."""
    if resume == "never":
        return None
    if resume == "auto":
        return newest_valid(run.checkpoints, world, say, set_aside=True)
    if _has_begun_by(resume, run, world):
        name = requested_name(resume)
        say(f"this run began from {name} and has gone on since: the newest of its own checkpoints is taken")
        return newest_valid(run.checkpoints, world, say, set_aside=True)
    asked = world.agree(find_requested(resume, run, base) if world.is_main else None)
    if asked is None:
        name = requested_name(resume)
        raise StorageError(f"checkpoint.resume is {resume!r}: there is no {name}", fix=_what_there_is(run))
    if not is_checkpoint(asked):
        found = newest_valid(asked, world, say, set_aside=False)
        if found is None:
            raise StorageError(f"checkpoint.resume is {resume!r}: there is no checkpoint in {asked}")
        asked = found
    elif fault := find_damage(asked, world):
        what = f"checkpoint.resume is {resume!r}, and {asked.name} is damaged"
        raise StorageError(what, where=fault, fix=_what_there_is(run))
    _set_newer_aside(asked, run, world, say)
    return asked


def newest_valid(checkpoints: Path, world: World, say: Say, *, set_aside: bool = False) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named and, with `set_aside`, renamed."""
    folders: list[Path] = world.agree(list_checkpoints(checkpoints) if world.is_main else None)
    faults = []
    for folder in folders:
        fault = find_damage(folder, world)
        if not fault:
            # Only now, with another one to go on from, is the damaged one moved out of the way.
            if set_aside and world.is_main:
                for damaged in folders[: folders.index(folder)]:
                    _rename(damaged, DAMAGED)
            world.barrier()
            return folder
        faults.append(f"{folder.name}: {fault}")
        say(f"passing over the damaged checkpoint {folder.name}: {fault}")
    if faults:
        raise StorageError(
            f"every checkpoint in {checkpoints} is damaged",
            where="\n".join(faults),
            fix="bring the files back from a copy, or delete the run folder to begin anew",
        )
    return None


def _rename(folder: Path, ending: str) -> Path:
    """Out of the way, under a name that is free: what was moved there before stays."""
    target, count = folder.with_name(folder.name + ending), 1
    while os.path.lexists(target):
        count += 1
        target = folder.with_name(f"{folder.name}{ending}-{count}")
    return folder.rename(target)


def _has_begun_by(resume: str, run: RunFolder, world: World) -> bool:
    """Whether a checkpoint here was written under the same `checkpoint.resume`: then the same command goes on."""
    found = False
    for folder in list_checkpoints(run.checkpoints) if world.is_main else ():
        with contextlib.suppress(DuokaError):
            found = has_whole(folder, CONFIG) and load_config(folder / CONFIG).config.checkpoint.resume == resume
        if found:
            break
    return bool(world.agree(found))


def _set_newer_aside(asked: Path, run: RunFolder, world: World, say: Say) -> None:
    """Rename newer checkpoints of this run: they are of an abandoned branch, and the next start must not resume it."""
    is_own = asked.resolve().parent == run.checkpoints.resolve()
    fault: StorageError | None = None
    if world.is_main:
        newer = [folder for folder in list_checkpoints(run.checkpoints) if not is_own or folder.name > asked.name]
        if newer and not is_own:
            fault = StorageError(
                f"checkpoint.resume is {asked}, but {run.path} has checkpoints of its own, {newer[0].name} the newest",
                fix="write another output: for a run that begins elsewhere, or resume: auto",
            )
        for folder in newer if fault is None else ():
            say(f"{folder.name} is newer than {asked.name} and was set aside as {_rename(folder, SET_ASIDE).name}")
    fault = world.agree(fault)
    if fault is not None:
        raise fault


def _what_there_is(run: RunFolder) -> str:
    names = ", ".join(folder.name for folder in list_checkpoints(run.checkpoints))
    return f"{run.checkpoints} has: {names}" if names else f"{run.checkpoints} has no checkpoints"


# --- what has changed ---


@dataclass(frozen=True)
class Changes:
    """What the banner says: allowed changes of results, and others."""

    allowed: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        notes = [f"allowed to change: {', '.join(self.allowed)}"] if self.allowed else []
        notes += [f"changed, with the same results: {', '.join(self.harmless)}"] if self.harmless else []
        return [*notes, *self.others]


def check_changes(folder: Path, loaded: Loaded, data: str, base: Path, layout: Layout, world: World) -> Changes:
    """Compare the checkpoint's config, data, base model and layout with this start's; raises on all ranks alike."""
    answer: Changes | DuokaError | None = None
    if world.is_main:
        try:
            answer = compare_with_run(folder, loaded.config, data, base, layout)
        except DuokaError as error:
            answer = error
    answer = world.agree(answer)
    if isinstance(answer, DuokaError):
        raise answer
    assert answer is not None
    return answer


def compare_with_run(folder: Path, new: RunConfig, data: str, base: Path, layout: Layout) -> Changes:
    """What differs between this start and the run of the checkpoint `folder`; refuses what would change results."""
    manifest = read_manifest(folder)
    old = config_of(folder)
    refused = refused_changes(old, new)
    if refused:
        raise ConfigError(
            f"{folder.name} was written under other settings, and one run never mixes two",
            where="\n".join(f"{one.key}: {one.old} then, {one.new} now" for one in refused),
            fix=how_to_go_on(refused, old, str(folder.parent.parent)),
        )
    allowed = [f"{one.key} {one.old} -> {one.new}" for one in allowed_changes(old, new)]
    if manifest.data != data:
        if not allows_other_samples(old, new):
            raise ConfigError(
                f"the training data is not what it was when {folder.name} was written",
                where=f"fingerprint {manifest.data[:12]} then, {data[:12]} now: a file, or the way it is read, changed",
                fix="bring the data back, or allow it by name:   checkpoint.allow_changes=[data.train]",
            )
        allowed.append("the training data")
    if manifest.data != data or changes_order(old, new):
        _refuse_within_epoch(folder, allowed)
    harmless = (*_layout_changes(manifest, layout), *harmless_changes(old, new))
    others = [*_check_base(folder, manifest, new, base), *_changed_debts(old, new, manifest, layout)]
    return Changes(tuple(allowed), harmless, tuple(others))


def _check_base(folder: Path, manifest: Manifest, config: RunConfig, base: Path) -> list[str]:
    """Refuse another base model where results depend on it: the frozen weights, or what the loss compares with.

    A note where the checkpoint holds every weight itself.
    """
    before = read_identity(manifest.base)
    differs = other_base(before, base)
    if not differs or before is None:
        return []
    what = "the frozen weights come from it"
    if config.lora is None and config.train_only is None and before.config == BaseIdentity.of(base).config:
        if not _compares_with_start(config):
            return [f"the weights in {base} have changed; this run goes on with its own, all of them in {folder.name}"]
        what = "the loss compares with what that model says"
    raise ConfigError(
        f"the base model is not what it was when {folder.name} was written, and {what}",
        where=differs,
        fix=f"bring that model back to its place, or start anew:   output={folder.parent.parent}-2",
    )


def _compares_with_start(config: RunConfig) -> bool:
    """Whether the loss asks at each start anew what the model that the run began with says."""
    return config.stage.has_reference or (config.stage.kind.draws and config.rl.kl > 0)


def config_of(folder: Path) -> RunConfig:
    try:
        return load_config(folder / CONFIG).config
    except DuokaError as error:
        raise ConfigError(
            f"this duoka cannot read the config that {folder} was written under",
            where="\n".join(error.lines()),
            fix="go on with the version of duoka that wrote it",
        ) from None


def _refuse_within_epoch(folder: Path, allowed: list[str]) -> None:
    progress: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))["progress"]
    if progress["index"]:
        raise ConfigError(
            f"{folder.name} lies within epoch {progress['epoch'] + 1}, and the order of samples would change there: "
            "some would be trained on twice, others never",
            where=f"changed: {', '.join(allowed)}",
            fix="go on from a checkpoint at an epoch's end (checkpoint.every: 1 epoch), or start a new run",
        )


def _changed_debts(old: RunConfig, new: RunConfig, manifest: Manifest, layout: Layout) -> list[str]:
    """PowerSGD's error-feedback residuals belong to one number of processes."""
    if old.parallel.compression.gradients != "powersgd":
        return []
    if new.parallel.compression.gradients != "powersgd":
        return ["powersgd's error-feedback residuals are dropped"]
    before, now = int(manifest.layout["dp"]) * int(manifest.layout.get("sp", 1)), layout.dp * layout.sp
    if before == now:
        return []
    if layout.strategy != "ddp":
        return [f"powersgd's residuals of {before} processes are dropped: one process exchanges no gradients"]
    return [f"powersgd's residuals of {before} processes go to the {now} of now; results differ a little"]


def _layout_changes(manifest: Manifest, layout: Layout) -> list[str]:
    before, now = manifest.layout, layout.to_json()
    # Another precision gives other results; its key was allowed by name, and stands among those.
    keys = [key for key in now if key not in ("name", "precision") and before.get(key) != now[key]]
    return [f"{_SHOWN.get(key, key)} {before.get(key)} -> {now[key]}" for key in keys]
