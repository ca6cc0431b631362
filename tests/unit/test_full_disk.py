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

from duoka.cluster.blame import judge_world
from duoka.cluster.launch import WorldSpec
from duoka.data import prepare
from duoka.data.prepare import prepare_data
from duoka.data.tokens import tokenize
from duoka.data.tokens.token_store import TokenPart, write_part
from duoka.errors import StorageError
from duoka.process.exits import RankExit
from duoka.runs.failure import clear_failures, drop_reserved, read_failures, reserve_account, write_failure
from duoka.runs.folder import RunFolder
from duoka.runs.heart import Heart


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


def test_a_rank_that_a_full_disk_ends_can_still_say_so(disk: Path) -> None:
    """The message was made of a traceback that the log had half of: "rank 0 of 2 raised stopped_by = after step 6"."""
    run = RunFolder(disk / "run")
    run.make()
    heart = Heart(run, 0)
    reserve_account(run, 0)
    fill(disk, 0)
    (run.logs / "rank00000.log").write_bytes(b"")
    heart.tell("save", 96)  # the event log ends at step 6
    what = "the checkpoint of step 96 could not be written"
    write_failure(run, 0, StorageError(what, where="No space left", fix="free some space"), 6)
    assert [one.lines[0] for one in read_failures(run)] == [f"storage error: {what}"]
    exits = [RankExit(0, os.getpid(), 6, 1.0), RankExit(1, 1, -15, 2.0, by_us=True)]
    verdict = judge_world(WorldSpec(("x",), 2, run), exits, stopped_by="", left_at_once=False)
    assert verdict.exit_code == 6 and verdict.lines[0] == f"storage error: {what}"
    assert "  (seen by rank 0 of 2 after step 96)" in verdict.lines and not verdict.details[0].startswith("  Trace")
    write_failure(run, 0, ValueError("a long story " * 999), 6)
    (told,) = read_failures(run)
    assert told.kind == "ValueError" and told.lines[0].startswith("a long story")
    drop_reserved(run)
    clear_failures(run)
    assert not read_failures(run) and not list(run.logs.glob(".failure*"))
    heart.close()
