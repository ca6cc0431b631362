"""Saving and finding checkpoints: full logical tensors by name, readable by any layout; no pickle anywhere.

A checkpoint is written to a hidden folder, its manifest last, and takes its name by one rename: under a final name
it is whole. Ranks write in parallel (torch's DCP in safetensors form); damaged ones are named and passed over.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from duoka.errors import StorageError
from duoka.optim.build import optimizer_tensors
from duoka.parallel.apply import Parallelized
from duoka.parallel.world import World
from duoka.plan.layout import Layout
from duoka.train.manifest import (
    FileRecord,
    Manifest,
    check_files,
    folder_name,
    hash_file,
    list_checkpoints,
    read_manifest,
    sync_folder,
    write_manifest,
)
from duoka.train.state import TrainState, read_random_state, set_random_state
from duoka.train.step import Numerics
from duoka.units import format_bytes

STATE = "state.json"


@dataclass
class Contents:
    """What a run saves and restores: live objects, filled in place on loading."""

    parallel: Parallelized
    optimizer: torch.optim.Optimizer
    numerics: Numerics
    state: TrainState

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.parallel.named_trainable()
        tensors = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        tensors |= {f"optim.{name}": value for name, value in optimizer_tensors(self.optimizer, named).items()}
        return tensors


@dataclass(frozen=True)
class Saved:
    path: Path
    size_bytes: int
    blocked_s: float


class CheckpointStore:
    """The checkpoints of one run. Every method that moves tensors is called by all ranks together."""

    def __init__(self, folder: Path, world: World, layout: Layout, config_hash: str, versions: dict[str, str]) -> None:
        self.folder = folder
        self.world = world
        self.layout = layout
        self.config_hash = config_hash
        self.versions = versions

    def save(self, contents: Contents, *, keep: int) -> Saved:
        """Write the state of this step and remove all but the newest `keep`; one that exists already stays."""
        started = time.perf_counter()
        final = self.folder / folder_name(contents.state.step)
        if not self.world.agree(final.exists()):
            self.write(final, contents)
            if self.world.is_main:
                self._remove_old(keep)
            self.world.barrier()
        return Saved(final, _folder_bytes(final), time.perf_counter() - started)

    def write(self, final: Path, contents: Contents) -> None:
        """Write the state to `final`; a checkpoint that is there already is replaced when the new one is whole."""
        draft, old = (final.with_name(f".{final.name}.{kind}") for kind in ("draft", "old"))
        if self.world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self.world.barrier()
        fault, own = self._try_to_write(draft, contents)
        everyone = self.world.gather((fault, own))
        faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(everyone) if fault]
        if faults:
            # Every rank hears of it, so that none waits for the others in a collective.
            shutil.rmtree(draft, ignore_errors=True)
            raise StorageError(
                f"the checkpoint of step {contents.state.step} could not be written to {final.parent}",
                where="\n".join(faults),
                fix=f"{_free_space(final.parent)}; earlier checkpoints are intact, the same command goes on from them",
            )
        if self.world.is_main:
            files = {name: record for _, part in everyone for name, record in part.items()}
            write_manifest(draft, self._manifest(contents.state.step, files))
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            draft.rename(final)
            sync_folder(final.parent)
            shutil.rmtree(old, ignore_errors=True)
        self.world.barrier()

    def _try_to_write(self, draft: Path, contents: Contents) -> tuple[str, dict[str, FileRecord]]:
        """This rank's files; a fault is returned, not raised: all ranks must come to the gather."""
        try:
            self._write_files(draft, contents)
            return "", {path.name: hash_file(path) for path in self._own_files(draft)}
        except (OSError, CheckpointException, SafetensorError) as error:
            return str(error).strip().splitlines()[-1], {}

    def load(self, folder: Path, contents: Contents) -> None:
        """Fill model, optimizer and state from a checkpoint written by any layout."""
        tensors = contents.tensors()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                dict(tensors),
                storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
                no_dist=self.world.size == 1,
            )
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, value in saved["progress"].items():
            setattr(contents.state, name, value)
        if contents.numerics.scaler.is_enabled() and saved["scaler"]:
            contents.numerics.scaler.load_state_dict(saved["scaler"])
        random = folder / _random_name(self.world.rank)
        if random.is_file():
            # A world that grew has ranks without a saved generator: they keep their seeded one.
            set_random_state(load_file(random), self.world.device)

    def _write_files(self, draft: Path, contents: Contents) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's notes on its own deprecations
            dcp.save(
                dict(contents.tensors()),
                storage_writer=dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True),
                no_dist=self.world.size == 1,
            )
        save_file(read_random_state(self.world.device), draft / _random_name(self.world.rank))
        if self.world.is_main:
            saved = {"progress": asdict(contents.state), "scaler": contents.numerics.scaler.state_dict()}
            (draft / STATE).write_text(json.dumps(saved, indent=1), encoding="utf-8")
        for path in self._own_files(draft):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def _own_files(self, draft: Path) -> list[Path]:
        """The files that this rank wrote, by DCP's naming (it counts shards from 1)."""
        shard = f"shard-{self.world.rank + 1:05d}-"
        mine = [path for path in draft.iterdir() if path.name.startswith(shard)]
        mine.append(draft / _random_name(self.world.rank))
        return mine + ([draft / STATE] if self.world.is_main else [])

    def _manifest(self, step: int, files: dict[str, FileRecord]) -> Manifest:
        return Manifest(step, self.layout.to_json(), self.world.size, self.config_hash, self.versions, files)

    def _remove_old(self, keep: int) -> None:
        for folder in list_checkpoints(self.folder)[keep:]:
            # Renamed first: a removal cut in the middle must not leave half a checkpoint under a valid name.
            doomed = folder.with_name(f".{folder.name}.old")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def clean_drafts(self) -> list[str]:
        """Remove what a killed process left half-written; returns the names."""
        if not self.world.is_main or not self.folder.is_dir():
            return []
        left = [p for p in self.folder.iterdir() if p.name.startswith(".step-") and p.name.endswith((".draft", ".old"))]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return [path.name for path in left]


def describe_damage(folder: Path) -> str:
    """What is wrong with a checkpoint, or "" when it is whole."""
    try:
        wrong = check_files(folder, read_manifest(folder))
    except StorageError as error:
        return error.what
    return "; ".join(wrong)


def choose_checkpoint(checkpoints: Path, resume: str, world: World, say: Callable[[str], None]) -> Path | None:
    """What `checkpoint.resume` asks for: the newest valid one, none, or the named folder; the same on all ranks."""
    if resume == "never":
        return None
    answer = world.agree(_try_to_choose(checkpoints, resume, say) if world.is_main else None)
    if isinstance(answer, StorageError):
        raise answer
    return Path(answer) if answer else None


def _try_to_choose(checkpoints: Path, resume: str, say: Callable[[str], None]) -> str | StorageError:
    """Rank 0's choice; an error is returned, not raised, because the other ranks wait to hear of it."""
    if resume == "auto":
        for folder in list_checkpoints(checkpoints):
            fault = describe_damage(folder)
            if not fault:
                return str(folder)
            say(f"passing over the damaged checkpoint {folder.name}: {fault}")
        if list_checkpoints(checkpoints):
            return StorageError(
                f"every checkpoint in {checkpoints} is damaged",
                fix="delete the run folder to begin anew, or bring the files back from a copy",
            )
        return ""
    folder = Path(resume).expanduser()
    folder = folder if folder.is_dir() else checkpoints / resume
    fault = describe_damage(folder) if folder.is_dir() else "there is no such folder"
    if fault:
        return StorageError(f"checkpoint.resume is {resume!r}: {fault}")
    return str(folder)


def _free_space(folder: Path) -> str:
    return f"{format_bytes(shutil.disk_usage(folder).free)} are free there"


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
