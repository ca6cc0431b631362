"""Saving and loading checkpoints: full logical tensors by name, readable by any layout; no pickle anywhere.

A thread writes while training goes on, on a process group of its own: from a copy what lies on a GPU, from the live
tensors what lies in host memory (host_live_copy.py). The files go to a hidden folder, their manifest last, and the
folder takes its name by one rename: under a final name it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_safetensors

from duoka.comm.world import World, close_side_world, open_side_world
from duoka.errors import StorageError
from duoka.parallel.powersgd import changes_in_passes
from duoka.plan.hardware import available_memory_bytes
from duoka.plan.layout import Layout
from duoka.process.no_room import more_room
from duoka.runs.folder import RunFolder, read_owner
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
from duoka.store.contents import Contents
from duoka.store.host_live_copy import LiveFile
from duoka.store.loading import fill_contents, random_name
from duoka.store.resume import STATE
from duoka.store.retention import DRAFT, Keep, make_way, remove_old
from duoka.store.snapshot import CHUNK_BYTES, Chunk, Copier, HeapBuffer, HostBuffer, SavePlan, plan_share, write_share
from duoka.store.state import read_random_state
from duoka.torch_private import side_thread
from duoka.units import format_bytes

SMALL_FILES_BYTES = 1 << 20  # generators, config, state and manifest, per rank and generously


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about its run, beside the tensors. `data` is the fingerprint of the training samples."""

    config_hash: str = ""
    config_text: str = ""
    data: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)  # which model training began with


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


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint goes. Without `keep` it stands alone, and takes the place of one that is there."""

    step: int
    final: Path
    keep: Keep | None

    @property
    def draft(self) -> Path:
        return self.final.with_name(f".{self.final.name}{DRAFT}")


class CheckpointStore:
    """The checkpoints of one run. Every method that moves tensors is called by all ranks together."""

    def __init__(
        self, folder: Path, world: World, layout: Layout, facts: Facts | None = None, *, asynchronous: bool = True
    ) -> None:
        self.folder = folder
        self.world = world
        self.side: World | None = None
        self.layout = layout
        self.facts = facts or Facts()
        self.asynchronous = asynchronous
        self.waited_s = 0.0  # of the latest save, for the one before it
        self._run = RunFolder(folder.parent)
        self._owner = read_owner(self._run)
        self._share: SavePlan | None = None
        self._needed = 0  # bytes of a whole checkpoint
        self._buffer: HostBuffer | None = None
        self._live: LiveFile | None = None
        self._spare: list[HeapBuffer] = []  # as much as the latest save needed
        self._blocked_s = 0.0  # by the save under way
        # One thread, so that two saves can never be under way at once.
        self._thread = side_thread("duoka-save", world.device)
        self._warming: Future[None] | None = None
        self._writing: Future[Saved | SaveFault] | None = None

    # --- saving ---

    def get_ready(self, contents: Contents) -> None:
        """Divide the work and have the memory for the copy ready, beside the first steps; all ranks call it."""
        share = self._plan(contents)
        self.side = open_side_world(self.world) if self.asynchronous else self.world
        size = share.size_bytes if self._copies_first else min(CHUNK_BYTES, share.size_bytes)
        if self.asynchronous and not self._copies_first:
            contents.optimizer.register_step_pre_hook(lambda *_: self.release())
        self._buffer = HostBuffer(size, self.world.device)
        may_pin = size <= available_memory_bytes() / 2 / self.world.local_size
        if self.asynchronous:
            self._warming = self._thread.submit(self._buffer.touch, may_pin=may_pin)
        else:
            self._buffer.touch(may_pin=may_pin)

    def _plan(self, contents: Contents) -> SavePlan:
        """What each rank writes, and what that comes to; all ranks call it together the first time."""
        if self._share is None:
            self._share = plan_share(contents.tensors(), self.world)
            # Each tensor, or shard, is in one rank's share: no rank need hold, or know of, those of the others.
            (written,) = self.world.sum([float(sum(piece.size_bytes for piece in self._share.pieces))])
            self._needed = int(written) + self.world.size * SMALL_FILES_BYTES
        return self._share

    @property
    def _copies_first(self) -> bool:
        """From a GPU the bus brings everything at once; the writer cannot read there."""
        return self.asynchronous and self.world.device.type != "cpu"

    def release(self) -> None:
        """Call it before weights or state change: what a save under way has not read yet is copied now.

        An optimizer whose contents are saved does so by itself.
        """
        live, self._live = self._live, None
        if live is None or not (unread := live.unread_bytes()):
            return
        started = time.perf_counter()
        self.world.heart.tell("save")
        # Half of what is free, shared with the other ranks here: else the disk decides how long it takes. State that
        # was offloaded to a disk has no room in memory.
        fits = unread <= available_memory_bytes() / 2 / self.world.local_size
        live.release(may_copy=fits and self.layout.disk == "none")
        self._blocked_s += time.perf_counter() - started

    def save(self, contents: Contents, keep: Keep) -> Saved | SaveFault | None:
        """Begin to write the state of this step; returns what was under way or, synchronous, this one's end."""
        started = time.perf_counter()
        before = self.wait()
        self.waited_s = time.perf_counter() - started
        if isinstance(before, SaveFault):
            return before
        step = contents.state.step
        self._begin(_Target(step, self.folder / folder_name(step), keep), contents, started)
        return before if self.asynchronous else self.wait()

    def write(self, final: Path, contents: Contents) -> None:
        """Write the state to any folder, now; one that is there is replaced when the new one is whole."""
        assert not self.asynchronous, "for stores that write while their caller waits"
        self._begin(_Target(contents.state.step, final, None), contents, time.perf_counter())
        ended = self.wait()
        if isinstance(ended, SaveFault):
            raise ended.error()

    def _begin(self, target: _Target, contents: Contents, started: float) -> None:
        if self._buffer is None:
            self.get_ready(contents)
        answer = self.world.agree(self._try_to_begin(target, contents) if self.world.is_main else None)
        self._writing, self._blocked_s = Future(), 0.0
        if isinstance(answer, (Saved, SaveFault)):
            self._writing.set_result(answer)
            return
        assert self._share is not None and self._buffer is not None
        if self._warming is not None:
            self._warming.result()
        small, tensors = self._small_files(contents), contents.tensors()
        copier, buffer, size = Copier(self._share, tensors, self.world.device), self._buffer, self._share.size_bytes
        if not self.asynchronous:
            self._writing.set_result(self._finish(target, started, small, lambda: copier.chunks(buffer)))
            return
        if self._copies_first:
            copier.fill(buffer, 0, size)
            self._writing = self._thread.submit(self._finish, target, started, small, lambda: buffer.chunks(size))
        else:
            live = self._live = LiveFile(copier, self._spare)
            self._writing = self._thread.submit(
                self._finish, target, started, small, lambda: live.chunks(buffer), live.close
            )
            if changes_in_passes(tensors):
                self.release()
        self._blocked_s = time.perf_counter() - started

    def collect(self) -> Saved | SaveFault | None:
        """The end of a save that this rank has seen, once; None while one is under way."""
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> Saved | SaveFault | None:
        """Until nothing is under way; returns how that ended."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        ended, self._live = writing.result(), None
        return replace(ended, blocked_s=self._blocked_s) if isinstance(ended, Saved) and self.asynchronous else ended

    def close(self, patience_s: float = 20.0) -> None:
        """Let a save under way end, unless it takes longer; how it ends was said or is of no use now."""
        under_way: list[Future[Any]] = [work for work in (self._warming, self._writing) if work is not None]
        self._thread.shutdown(wait=False)
        if not wait(under_way, patience_s).not_done:
            if self._buffer is not None:
                self._buffer.close()
            if self.side is not None:
                close_side_world(self.side)

    def measure_room(self, contents: Contents) -> tuple[int, int | None, int]:
        """Bytes that a checkpoint takes, bytes that are free (None: unknown), and how many are there already."""
        free: int | None = None
        num_there = 0
        if self.world.is_main:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.folder).free
                num_there = len(list_checkpoints(self.folder))
        free, num_there = self.world.agree((free, num_there))
        self._plan(contents)
        return self._needed, free, num_there

    def has_room(self) -> bool:
        """Whether this rank could write now: enough is free, and a file can be made. After a save was tried."""
        probe = self.folder / f".step-probe-{self.world.rank}{DRAFT}"
        try:
            probe.mkdir()
            probe.rmdir()
            return shutil.disk_usage(self.folder).free >= self._needed
        except OSError:
            return False

    def _try_to_begin(self, target: _Target, contents: Contents) -> Saved | SaveFault | None:
        """Rank 0 makes the draft's folder; what stands in the way is returned, for all ranks to hear of it."""
        if self._owner and read_owner(self._run) not in ("", self._owner):
            return self._taken(target)
        if target.keep is not None and target.final.exists():
            return Saved(target.step, target.final, _folder_bytes(target.final), 0.0, 0.0)
        needed = self._needed
        try:
            if shutil.disk_usage(target.final.parent).free < needed:
                return self._fault(target, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], needed)
            shutil.rmtree(target.draft, ignore_errors=True)
            target.draft.mkdir()
        except OSError as error:
            return self._fault(target, [error], needed)
        return None

    def _small_files(self, contents: Contents) -> dict[str, bytes]:
        """This rank's files beside its tensors: generators, and on rank 0 the state and the config."""
        files = {random_name(self.world.rank): to_safetensors(read_random_state(self.world.device))}
        if self.world.is_main:
            saved = {"progress": asdict(contents.state), "scaler": contents.numerics.scaler.state_dict()}
            files[STATE] = json.dumps(saved, indent=1).encode()
            files[CONFIG] = self.facts.config_text.encode()
        return files

    def _finish(
        self,
        target: _Target,
        started: float,
        small: dict[str, bytes],
        chunks: Callable[[], Iterator[Chunk]],
        close: Callable[[], None] = lambda: None,
    ) -> Saved | SaveFault:
        """Write what `chunks` gives; talks in the side group only, so that it may be a thread's work."""
        assert self.side is not None
        try:
            records, error = self._try_to_write(target.draft, small, chunks)
        finally:
            close()
        everyone = self.side.gather((records, error))
        files = {name: record for part, _ in everyone for name, record in part.items()}
        fault: SaveFault | None = None
        if self.world.is_main:
            fault = self._try_to_name(target, files, [other for _, other in everyone if other is not None])
        fault = self.side.agree(fault)
        if fault is not None:
            return fault
        write_s = time.perf_counter() - started
        size_bytes = sum(record.size_bytes for record in files.values())
        return Saved(target.step, target.final, size_bytes, write_s, write_s)

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

    def _try_to_name(self, target: _Target, files: dict[str, FileRecord], errors: list[OSError]) -> SaveFault | None:
        """Rank 0: manifest, final name, and the removal of what is not kept; or the removal of a failed draft."""
        draft, final, facts = target.draft, target.final, self.facts
        try:
            if not errors:
                layout, size = self.layout.to_json(), self.world.size
                manifest = Manifest(
                    target.step, layout, size, facts.config_hash, facts.data, facts.versions, files, facts.base
                )
                write_manifest(draft, manifest)
                with make_way(final):
                    draft.rename(final)
                sync_folder(final.parent)
        except OSError as error:
            errors = [error]
        if errors:
            fault = self._fault(target, errors, self._needed)
            shutil.rmtree(draft, ignore_errors=True)
            return fault
        if target.keep is not None:
            remove_old(final.parent, target.keep)
        return None

    def _taken(self, target: _Target) -> SaveFault:
        """Without this, two runs' checkpoints would lie side by side, and each go on from the other's."""
        what = f"the checkpoint of step {target.step} could not be written to {target.final.parent}"
        taken = f"{self._run.path} was deleted while this run worked in it, and another start works there now"
        return SaveFault(target.step, what, taken, "stop one of the two, or give it another output:")

    def _fault(self, target: _Target, errors: list[OSError], needed: int) -> SaveFault:
        """In users' words, with needed and free bytes."""
        folder = target.final.parent
        what = f"the checkpoint of step {target.step} could not be written to {folder}"
        reasons = "; ".join(dict.fromkeys(error.strerror or str(error) for error in errors))
        # Half gone, too: somebody is deleting it at this moment.
        if not folder.is_dir() or {error.errno for error in errors} == {errno.ENOENT}:
            gone = f"{folder} is gone: it was deleted while this run worked in it"
            return SaveFault(target.step, what, gone, "earlier checkpoints went with it; start the run again")
        try:
            free = f"{format_bytes(shutil.disk_usage(folder).free)} are free there, {format_bytes(needed)} needed"
        except OSError as error:
            free = f"the free space there is unknown: {error.strerror}"
        newest = next(iter(list_checkpoints(folder)), None)
        kept = f"{newest.name} is intact" if newest else "there is no earlier checkpoint"
        fix = f"{kept}; {more_room(errors[0])}, and the same command goes on"
        return SaveFault(target.step, what, f"{reasons}\n{free}", fix)

    # --- loading ---

    def load(self, folder: Path, contents: Contents) -> None:
        """Fill model, optimizer and state from a checkpoint written by any layout; all ranks call it."""
        self.release()
        fill_contents(folder, contents, self.world)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
