"""Which checkpoints stay, and the removal of the others and of what killed processes left. Rank 0's work alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duoka.runs.folder import remove_folder
from duoka.runs.manifest import list_checkpoints, step_of
from duoka.store.resume import DAMAGED

DRAFT, DOOMED = ".draft", ".old"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the newest `last`, those of every `every` steps, and the one named `best`."""

    last: int = 2
    every: int | None = None
    best: int | None = None

    def removes(self, steps: list[int]) -> list[int]:
        """The steps to remove, of all that are there, newest first."""
        old = steps[self.last :]
        return [step for step in old if step != self.best and not (self.every and step % self.every == 0)]


def remove_old(checkpoints: Path, keep: Keep) -> None:
    by_step = {step_of(folder): folder for folder in list_checkpoints(checkpoints)}
    for step in keep.removes(list(by_step)):
        # Renamed first: a removal cut in the middle must not leave half a checkpoint under a valid name.
        doomed = checkpoints / f".{by_step[step].name}{DOOMED}"
        try:
            by_step[step].rename(doomed)
        except OSError:
            continue  # it stays, and is tried again after the next save
        remove_folder(doomed)
    newest = max(by_step, default=0)
    for damaged in checkpoints.glob(f"step-*{DAMAGED}*"):
        # Kept until the run has passed its step, for inspection.
        if step_of(damaged) <= newest:
            remove_folder(damaged)


@contextmanager
def make_way(final: Path) -> Iterator[None]:
    """Move what stands at `final` out of the way, and remove it when the block has put something there."""
    old = final.with_name(f".{final.name}{DOOMED}")
    there = os.path.lexists(final)
    if there:
        remove_folder(old)
        final.rename(old)
    try:
        yield
    except OSError:
        if there:
            old.rename(final)
        raise
    if there:
        remove_folder(old)


def clean_drafts(checkpoints: Path) -> list[str]:
    """Remove what a killed process left half-written or half-removed; returns the names."""
    if not checkpoints.is_dir():
        return []
    left = [p for p in checkpoints.iterdir() if p.name.startswith(".step-") and p.name.endswith((DRAFT, DOOMED))]
    for path in left:
        remove_folder(path)
    return sorted(path.name for path in left)
