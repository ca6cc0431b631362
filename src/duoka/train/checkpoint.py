"""Saving and loading checkpoints: full logical tensors by name, readable by any layout; no pickle anywhere.

Training waits only for a copy in host memory; a thread writes it, on a process group of its own. The files go to a
hidden folder, their manifest last, and the folder takes its name by one rename: under a final name it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from duoka.errors import StorageError
from duoka.optim.build import optimizer_tensors
from duoka.parallel.apply import Parallelized
from duoka.parallel.world import World, close_side_world, open_side_world
from duoka.plan.layout import Layout
from duoka.runs.manifest import (
    CONFIG,
    FileRecord,
    Manifest,
    folder_name,
    list_checkpoints,
    sync_folder,
    write_file,
    write_manifest,
)
from duoka.train.resume import STATE
from duoka.train.retention import DRAFT, Keep, remove_old
from duoka.train.snapshot import CHUNK_BYTES, Chunk, Copier, HostBuffer, Share, plan_share, write_share
from duoka.train.state import TrainState, read_random_state, set_random_state
from duoka.train.step import Numerics
from duoka.units import format_bytes

SMALL_FILES_BYTES = 1 << 20  # generators, config, state and manifest, per rank and generously


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

    def size_bytes(self) -> int:
        """Of whole tensors, over all ranks."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about its run, beside the tensors. `data` is the fingerprint of the training samples."""

    config_hash: str = ""
    config_text: str = ""
    data: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """`blocked_s` is how long training waited, `write_s` from the request to the last byte on the disk."""

    step: int
    path: Path
    size_bytes: int
    blocked_s: float
    write_s: float


@dataclass(frozen=True)
class SaveFault:
    """Why a checkpoint could not be written; nothing of it is left. The same on all ranks."""

    step: int
    what: str
    where: str
    fix: str

    def error(self) -> StorageError:
        return StorageError(self.what, where=self.where, fix=self.fix)


class CheckpointStore:
    """The checkpoints of one run. Every method that moves tensors is called by all ranks together."""

    def __init__(
        self, folder: Path, world: World, layout: Layout, facts: Facts | None = None, *, asynchronous: bool = True
    ) -> None:
        self.folder = folder
        self.world = world
        self.side = open_side_world(world)
        self.layout = layout
        self.facts = facts or Facts()
        self.asynchronous = asynchronous
        self.waited_s = 0.0  # of the latest save, for the one before it
        self._share: Share | None = None
        self._buffer: HostBuffer | None = None
        # One thread, so that two saves can never be under way at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="duoka-save")
        self._warming: Future[None] | None = None
        self._writing: Future[Saved | SaveFault] | None = None

    # --- saving ---

    def get_ready(self, contents: Contents) -> None:
        """Divide the work and have the memory for the copy ready, beside the first steps; all ranks call it."""
        self._share = plan_share(contents.tensors(), self.world)
        size = self._share.size_bytes if self.asynchronous else min(CHUNK_BYTES, self._share.size_bytes)
        self._buffer = HostBuffer(size, self.world.device)
        self._warming = self._thread.submit(self._buffer.touch)

    def save(self, contents: Contents, keep: Keep) -> Saved | SaveFault | None:
        """Begin to write the state of this step; returns what was under way or, synchronous, this one's end."""
        started = time.perf_counter()
        before = self.wait()
        self.waited_s = time.perf_counter() - started
        if isinstance(before, SaveFault):
            return before
        step = contents.state.step
        answer = self.world.agree(self._try_to_begin(step, contents) if self.world.is_main else None)
        self._writing = Future()
        if isinstance(answer, (Saved, SaveFault)):
            self._writing.set_result(answer)
            return before
        small = self._small_files(contents)
        copier = self._copier(contents)
        buffer, size = self._ready_buffer(), copier.share.size_bytes
        if not self.asynchronous:
            self._writing.set_result(self._finish(started, None, step, small, keep, lambda: copier.chunks(buffer)))
            return self.wait()
        copier.fill(buffer, 0, size)
        blocked_s = time.perf_counter() - started
        self._writing = self._thread.submit(
            self._finish, started, blocked_s, step, small, keep, lambda: buffer.chunks(size)
        )
        return before

    def collect(self) -> Saved | SaveFault | None:
        """The end of a save that this rank has seen, once; None while one is under way."""
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> Saved | SaveFault | None:
        """Until nothing is under way; returns how that ended."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def close(self, patience_s: float = 20.0) -> None:
        """Let a save under way end, unless it takes longer; how it ends was said or is of no use now."""
        under_way = [work for work in (self._warming, self._writing) if work is not None]
        self._thread.shutdown(wait=False)
        if not wait(under_way, patience_s).not_done:
            if self._buffer is not None:
                self._buffer.close()
            close_side_world(self.side)

    def _copier(self, contents: Contents) -> Copier:
        if self._share is None:
            self.get_ready(contents)
        assert self._share is not None
        return Copier(self._share, contents.tensors(), self.world.device)

    def _ready_buffer(self) -> HostBuffer:
        assert self._buffer is not None and self._warming is not None
        self._warming.result()
        return self._buffer

    def _draft(self, step: int) -> Path:
        return self.folder / f".{folder_name(step)}{DRAFT}"

    def measure_room(self, contents: Contents) -> tuple[int, int | None, int]:
        """Bytes that a checkpoint takes, bytes that are free (None: nobody knows), and how many are there already."""
        free: int | None = None
        num_there = 0
        if self.world.is_main:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.folder).free
                num_there = len(list_checkpoints(self.folder))
        free, num_there = self.world.agree((free, num_there))
        return self._needed_bytes(contents), free, num_there

    def has_room(self, contents: Contents) -> bool:
        """Whether this rank could write now: enough is free, and a file can be made."""
        probe = self.folder / f".step-probe-{self.world.rank}{DRAFT}"
        try:
            probe.mkdir()
            probe.rmdir()
            return shutil.disk_usage(self.folder).free >= self._needed_bytes(contents)
        except OSError:
            return False

    def _needed_bytes(self, contents: Contents) -> int:
        return contents.size_bytes() + self.world.size * SMALL_FILES_BYTES

    def _try_to_begin(self, step: int, contents: Contents) -> Saved | SaveFault | None:
        """Rank 0 makes the draft's folder; what stands in the way is returned, for all ranks to hear of it."""
        final, draft = self.folder / folder_name(step), self._draft(step)
        if final.exists():
            return Saved(step, final, _folder_bytes(final), 0.0, 0.0)
        needed = self._needed_bytes(contents)
        try:
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                return self._fault(step, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], needed)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        except OSError as error:
            return self._fault(step, [error], needed)
        return None

    def _small_files(self, contents: Contents) -> dict[str, bytes]:
        """This rank's files beside its tensors: generators, and on rank 0 the state and the config."""
        files = {_random_name(self.world.rank): to_safetensors(read_random_state(self.world.device))}
        if self.world.is_main:
            saved = {"progress": asdict(contents.state), "scaler": contents.numerics.scaler.state_dict()}
            files[STATE] = json.dumps(saved, indent=1).encode()
            files[CONFIG] = self.facts.config_text.encode()
        return files

    def _finish(
        self,
        started: float,
        blocked_s: float | None,
        step: int,
        small: dict[str, bytes],
        keep: Keep,
        chunks: Callable[[], Iterator[Chunk]],
    ) -> Saved | SaveFault:
        """All that comes after the copy; talks in the side group only, so that it may be a thread's work."""
        records, error = self._try_to_write(self._draft(step), small, chunks)
        everyone = self.side.gather((records, error))
        errors = [other for _, other in everyone if other is not None]
        result: Path | SaveFault | None = None
        if self.world.is_main:
            files = {name: record for part, _ in everyone for name, record in part.items()}
            result = self._try_to_name(step, files, errors, keep)
        result = self.side.agree(result)
        if isinstance(result, SaveFault):
            return result
        assert result is not None
        size_bytes = sum(record.size_bytes for part, _ in everyone for record in part.values())
        write_s = time.perf_counter() - started
        return Saved(step, result, size_bytes, write_s if blocked_s is None else blocked_s, write_s)

    def _try_to_write(
        self, draft: Path, small: dict[str, bytes], chunks: Callable[[], Iterator[Chunk]]
    ) -> tuple[dict[str, FileRecord], OSError | None]:
        """This rank's files; a fault is returned, not raised: all ranks must come to the gather."""
        try:
            records = {name: write_file(draft / name, content) for name, content in small.items()}
            name = f"tensors-{self.world.rank:05d}.safetensors"
            return records | {name: write_share(draft / name, chunks)}, None
        except OSError as error:
            return {}, OSError(error.errno, f"{error.strerror or error} (rank {self.world.rank})")

    def _try_to_name(
        self, step: int, files: dict[str, FileRecord], errors: list[OSError], keep: Keep
    ) -> Path | SaveFault:
        """Rank 0: manifest, final name, and the removal of what is not kept; or the removal of a failed draft."""
        draft, final = self._draft(step), self.folder / folder_name(step)
        needed = sum(record.size_bytes for record in files.values())
        try:
            if not errors:
                facts = self.facts
                layout, size = self.layout.to_json(), self.world.size
                write_manifest(
                    draft, Manifest(step, layout, size, facts.config_hash, facts.data, facts.versions, files)
                )
                draft.rename(final)
                sync_folder(self.folder)
        except OSError as error:
            errors = [error]
        if errors:
            fault = self._fault(step, errors, needed)
            shutil.rmtree(draft, ignore_errors=True)
            return fault
        remove_old(self.folder, keep)
        return final

    def _fault(self, step: int, errors: list[OSError], needed: int) -> SaveFault:
        """In users' words, with needed and free bytes."""
        what = f"the checkpoint of step {step} could not be written to {self.folder}"
        reasons = "; ".join(dict.fromkeys(error.strerror or str(error) for error in errors))
        if not self.folder.is_dir():
            gone = f"{self.folder} is gone: somebody deleted it while this run worked in it"
            return SaveFault(step, what, gone, "this run's earlier checkpoints went with it; start it again")
        try:
            free = f"{format_bytes(shutil.disk_usage(self.folder).free)} are free there, {format_bytes(needed)} needed"
        except OSError as error:
            free = f"how much is free there cannot be told: {error.strerror}"
        newest = next(iter(list_checkpoints(self.folder)), None)
        kept = f"{newest.name} is intact" if newest else "there is no earlier checkpoint"
        return SaveFault(step, what, f"{reasons}\n{free}", f"{kept}; free some space, and the same command goes on")

    # --- loading ---

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


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
