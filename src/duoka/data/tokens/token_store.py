"""Tokenized samples on disk, memory-mapped: what training reads, and how it is written.

A `TokenPart` is one data set's folder of plain arrays, never changed once it is there; a `TokenStore` is a choice of
samples from several parts (a mixture, a split). `prepare` makes both; the loader only reads.

    ids.npy       (tokens,) int32     targets.npy    (tokens,) bool
    offsets.npy   (samples + 1,) int64                num_targets.npy (samples,) int32
    content.npy   (samples,) uint64: a hash of each sample     marks.npy      (samples,) int32
    margins.npy   (samples,) float64, where one is not 0       records.npy  (samples,) uint64, where one was split
    meta.json: what it is, written last

A mark is what a kind of data has to say of a sample: how many of a preference pair's tokens are the chosen part, or
whether a labeled answer is good (1) or not (0). A margin is by how much a pair's better answer is to score higher.
Parts of one conversation that was split are of one record, whose number is a hash of all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from duoka.data.tokens.template import Sample
from duoka.runs.folder import read_json, write_json_atomic

ARRAYS = ("ids", "targets", "offsets", "num_targets", "content", "marks")
_OPTIONAL = ("margins", "records")  # where there are any
_COLUMNS = ("num_targets", "content", "marks")  # one number a sample


@dataclass(frozen=True)
class Arrays:
    """The arrays of some samples, end to end."""

    ids: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    num_targets: np.ndarray
    content: np.ndarray
    marks: np.ndarray
    margins: np.ndarray | None = None
    records: np.ndarray | None = None

    def named(self) -> dict[str, np.ndarray]:
        """Those that are there, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None}


def hash_of(sample: Sample, salt: bytes = b"") -> int:
    """A hash of a sample's tokens and targets."""
    held = sample.input_ids.tobytes() + sample.is_target.tobytes()
    return int.from_bytes(hashlib.blake2b(held, digest_size=8, salt=salt).digest(), sys.byteorder)


def pack_arrays(
    samples: Sequence[Sample],
    marks: Sequence[int] | None = None,
    margins: Sequence[float] | None = None,
    records: Sequence[int | None] = (),
) -> Arrays:
    all_marks = np.zeros(len(samples), np.int32) if marks is None else np.array(marks, np.int32)
    all_margins = np.zeros(len(samples)) if margins is None else np.array(margins, np.float64)
    lengths = np.array([len(sample.input_ids) for sample in samples], np.int64)
    hashes = [
        hash_of(sample, _salt(int(mark), float(margin)))
        for sample, mark, margin in zip(samples, all_marks, all_margins, strict=True)
    ]
    content = np.array(hashes, np.uint64)
    of = [own if record is None else record for own, record in zip(hashes, records, strict=bool(records))]
    return Arrays(
        ids=np.concatenate([np.zeros(0, np.int32), *(sample.input_ids for sample in samples)]),
        targets=np.concatenate([np.zeros(0, bool), *(sample.is_target for sample in samples)]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        num_targets=np.array([sample.num_targets for sample in samples], np.int32),
        content=content,
        marks=all_marks,
        margins=all_margins if all_margins.any() else None,
        records=np.array(of, np.uint64) if any(record is not None for record in records) else None,
    )


def _salt(mark: int, margin: float) -> bytes:
    """Equal tokens with another mark or margin are another sample. Most have none, and keep the plain hash."""
    first = mark.to_bytes(8, "little", signed=True) if mark or margin else b""
    return first + (struct.pack("<d", margin) if margin else b"")


def write_part(folder: Path, pieces: Iterable[Arrays], meta: dict[str, Any], num_tokens: int | None = None) -> None:
    """Join pieces into the arrays of one part. `folder` is a draft: its owner renames it when it is whole.

    With `num_tokens`, what they hold together, each piece is let go before the next is asked for.
    """
    if num_tokens is None:
        pieces = list(pieces)
        num_tokens = sum(len(piece.ids) for piece in pieces)
    empty = pack_arrays([])
    sizes: list[np.ndarray] = [np.zeros(0, np.int64)]
    columns: dict[str, list[np.ndarray]] = {name: [getattr(empty, name)] for name in _COLUMNS}
    margins, records, at = [np.zeros(0)], [np.zeros(0, np.uint64)], 0
    is_split = False
    with contextlib.ExitStack() as files:
        ids = files.enter_context(_open_array(folder / "ids.npy", np.int32, num_tokens))
        targets = files.enter_context(_open_array(folder / "targets.npy", np.bool_, num_tokens))
        for piece in pieces:
            ids.write(np.ascontiguousarray(piece.ids, np.int32).data)
            targets.write(np.ascontiguousarray(piece.targets, np.bool_).data)
            at += len(piece.ids)
            sizes.append(np.diff(piece.offsets))
            for name, parts in columns.items():
                parts.append(getattr(piece, name))
            margins.append(np.zeros(len(piece.marks)) if piece.margins is None else piece.margins)
            records.append(piece.content if piece.records is None else piece.records)
            is_split = is_split or piece.records is not None
    if at != num_tokens:
        raise ValueError(f"the pieces hold {at} tokens, and {num_tokens} were counted")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    np.save(folder / "offsets.npy", offsets, allow_pickle=False)
    for name, parts in columns.items():
        np.save(folder / f"{name}.npy", np.concatenate(parts), allow_pickle=False)
    if any(part.any() for part in margins):
        np.save(folder / "margins.npy", np.concatenate(margins), allow_pickle=False)
    if is_split:
        np.save(folder / "records.npy", np.concatenate(records), allow_pickle=False)
    sizes_bytes = {file.stem: file.stat().st_size for file in sorted(folder.glob("*.npy"))}
    write_json_atomic(folder / "meta.json", {**meta, "sizes_bytes": sizes_bytes})


@contextlib.contextmanager
def _open_array(path: Path, dtype: type[np.generic], length: int) -> Iterator[IO[bytes]]:
    """A .npy file whose values are to follow. Mapped, a full disk would be a SIGBUS: written, it is an error."""
    head = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (length,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        yield file
        file.flush()
        os.fsync(file.fileno())


def _names_in(sizes_bytes: Mapping[str, int]) -> tuple[str, ...]:
    return (*ARRAYS, *(name for name in _OPTIONAL if name in sizes_bytes))


class TokenPart:
    """One data set's samples in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = read_json(folder / "meta.json") or {}
        names = _names_in(self.meta.get("sizes_bytes", {}))
        loaded = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        self.arrays = Arrays(**loaded)

    @staticmethod
    def is_whole(folder: Path) -> bool:
        """True when the folder was written to its end, and nothing in it was cut since."""
        sizes = (read_json(folder / "meta.json") or {}).get("sizes_bytes", {})
        files = {name: folder / f"{name}.npy" for name in _names_in(sizes)}
        return all(file.is_file() and file.stat().st_size == sizes.get(name) for name, file in files.items())

    def __len__(self) -> int:
        return len(self.arrays.num_targets)

    @property
    def records(self) -> np.ndarray:
        """What each sample is a part of: itself, but for parts of one conversation that was split."""
        return self.arrays.content if self.arrays.records is None else self.arrays.records

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.arrays.offsets).astype(np.int32)

    def sample(self, index: int) -> Sample:
        start, end = self.arrays.offsets[index : index + 2]
        return Sample(self.arrays.ids[start:end], self.arrays.targets[start:end])


class TokenStore:
    """Samples 0 to len - 1: sample i is number `index[i]` of the parts laid end to end."""

    def __init__(self, parts: Sequence[TokenPart], index: np.ndarray | None = None) -> None:
        self.parts = tuple(parts)
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])]).astype(np.int64)
        self._index = np.arange(self._starts[-1], dtype=np.int64) if index is None else index
        self.lengths = self._chosen([part.lengths for part in self.parts], np.int32)
        self.num_targets = self._chosen([part.arrays.num_targets for part in self.parts], np.int32)

    def _chosen(self, columns: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        whole: np.ndarray = np.concatenate([np.zeros(0, dtype), *columns])
        return whole[self._index]

    def __len__(self) -> int:
        return len(self._index)

    def sizes_of_parts(self) -> list[tuple[int, int]]:
        """Of each part, how many of these samples are from it, and how many tokens they have."""
        part = np.searchsorted(self._starts, self._index, side="right") - 1
        counts = np.bincount(part, minlength=len(self.parts))
        tokens = np.bincount(part, weights=self.lengths, minlength=len(self.parts))
        return [(int(count), int(size)) for count, size in zip(counts, tokens, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Made of the samples and their order alone: the same data in another file gives the same training."""
        content = self._chosen([part.arrays.content for part in self.parts], np.uint64)
        return hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()

    def sample(self, index: int) -> Sample:
        """Ids and targets of one sample, read where they lie."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(self._index[index])
        part = int(np.searchsorted(self._starts, place, side="right")) - 1
        return self.parts[part].sample(place - int(self._starts[part]))

    def segments(self, index: int) -> list[Sample]:
        """What lies end to end in a sample without seeing each other: here, the sample alone (see TextRows)."""
        return [self.sample(index)]

    @cached_property
    def marks(self) -> np.ndarray:
        return self._chosen([part.arrays.marks for part in self.parts], np.int32)

    @cached_property
    def margins(self) -> np.ndarray | None:
        """(samples,) float64; None where all are 0."""
        found = [part.arrays.margins for part in self.parts]
        if all(one is None for one in found):
            return None
        sizes = map(len, self.parts)
        whole = [np.zeros(size) if one is None else one for one, size in zip(found, sizes, strict=True)]
        return self._chosen(whole, np.float64)

    def __repr__(self) -> str:
        return f"TokenStore({len(self):,} samples, {int(self.lengths.sum(dtype=np.int64)):,} tokens)"
