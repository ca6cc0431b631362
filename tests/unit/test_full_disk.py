"""A disk that is full where nobody thinks of it: it is said to be, with exit code 6, and what is kept goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import config_for, simple_records, write_jsonl

from duoka.data import prepare
from duoka.data.prepare import prepare_data
from duoka.data.tokens import tokenize
from duoka.data.tokens.token_store import TokenPart, write_part
from duoka.errors import StorageError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight MiB, where the machine lets us make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    made = subprocess.run(words, capture_output=True, text=True)
    if made.returncode:
        warnings.warn(f"no small disk could be mounted, full disks are NOT tested: {made.stderr.strip()}", stacklevel=1)
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - left)))
    return filler


def test_joined_tokens_that_find_no_room_are_an_error_and_no_dead_process(disk: Path) -> None:
    """Written through a mapping they were a SIGBUS: the command was gone without a word."""
    ids = np.arange(4_000_000, dtype=np.int32)
    piece = tokenize.pack_arrays([prepare.Sample(ids, np.ones(len(ids), bool))])
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_part(disk, [piece], {})
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    assert os.read(reader, 16) == b"28"
    os.close(reader)


def test_joined_tokens_are_those_of_the_pieces(tmp_path: Path) -> None:
    pieces = [
        tokenize.pack_arrays([prepare.Sample(np.arange(at, at + size), np.arange(size) % 2 == 0)])
        for at, size in ((0, 5), (7, 1), (100, 12))
    ]
    write_part(tmp_path, iter(pieces), {}, 18)
    arrays = TokenPart(tmp_path).arrays
    assert TokenPart.is_whole(tmp_path) and arrays.ids.dtype == np.int32 and arrays.targets.dtype == np.bool_
    assert np.array_equal(arrays.ids, np.concatenate([piece.ids for piece in pieces]))
    assert np.array_equal(arrays.targets, np.concatenate([piece.targets for piece in pieces]))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_cache_is_said_to_be_and_what_was_made_is_kept(
    disk: Path, tmp_path: Path, tiny_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("DUOKA_CACHE", str(disk))
    monkeypatch.setattr(tokenize, "SMALL_BYTES", 0)
    monkeypatch.setattr(prepare, "PIECE_BYTES", (20_000, 20_000))
    data = write_jsonl(tmp_path / "data.jsonl", simple_records(3000))
    filler = fill(disk, 200_000)

    def run() -> Any:
        return prepare_data(config_for(data, workers=workers), tmp_path, tiny_tokenizer_folder)

    with pytest.raises(StorageError, match="No space left") as caught:
        run()
    assert caught.value.exit_code == 6 and str(disk / "tokens") in str(caught.value)
    kept = len(list(disk.glob("tokens/*.draft/piece-*.json")))
    assert kept, "finished pieces"
    filler.unlink()
    assert len(run().train) == 3000
