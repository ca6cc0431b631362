"""Ranks of a foreign launcher (torchrun, Slurm, by hand) wait here until rank 0 has prepared the run folder.

There is no process group yet, so they rendezvous through small files in RUN/.join: a waiting rank writes a nonce, and
rank 0's answer repeats it, so that a file left over from an earlier start cannot be mistaken for an answer. Each world
has a folder of its own there: of two that are started for one run at once, the second is refused, and its ranks alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from duoka.cluster.run_lock import JOIN_FOLDER
from duoka.errors import DuokaError, StorageError, WorkerFailed
from duoka.runs.folder import RunFolder, read_json

_BEAT_S = 0.25
_REFUSED_S = 1.0  # how long a refusal stays readable
_RANK_0_SPEAKS_S = 4.0  # a launcher takes the first rank that exits for the cause and ends the others
SILENCE_S = 300.0  # without a heartbeat of rank 0 for so long, it is taken for dead


class RefusedElsewhere(DuokaError):
    """Rank 0 refused the run and has printed why; this rank only exits with the same code."""

    def __init__(self, exit_code: int, what: str) -> None:
        super().__init__(what)
        self.exit_code = exit_code


@contextmanager
def lead(run: RunFolder) -> Iterator[Leader]:
    """Rank 0's side: the body prepares the folder, calls `ready`, and works; heartbeats tell waiting ranks so."""
    folder = _make_folder(run)
    (folder / "answer.json").unlink(missing_ok=True)
    leader = Leader(folder)
    leader.start()
    try:
        yield leader
    except BaseException as error:  # of any kind: the waiting ranks are told, then it is raised again
        code = error.exit_code if isinstance(error, DuokaError) else 1
        leader.say({"state": "refused", "exit_code": code, "what": str(error).split("\n")[0]})
        time.sleep(_REFUSED_S)
        raise
    finally:
        leader.end()
        with suppress(OSError):
            folder.parent.rmdir()
            run.path.rmdir()  # only when nothing but .join was in it


class Leader(threading.Thread):
    """Answers waiting ranks, also late ones, until rank 0 ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="duoka-join", daemon=True)
        self.folder = folder
        self._news: dict[str, Any] = {"state": "working"}
        self._ended = threading.Event()

    def say(self, news: dict[str, Any]) -> None:
        self._news = news

    def ready(self) -> None:
        self.say({"state": "ready"})

    def end(self) -> None:
        self._ended.set()
        self.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self) -> None:
        beat, answered = 0, ""
        while not self._ended.wait(_BEAT_S):
            words = {}
            for path in self.folder.glob("rank*.json"):
                asked = read_json(path)
                if asked:
                    words[str(asked.get("rank"))] = asked.get("word")
            if self._news["state"] == "ready" and answered == repr(words):
                continue  # no new rank: no need to touch the disk
            beat += 1
            with suppress(OSError):
                _write(self.folder / "answer.json", {**self._news, "beat": beat, "words": words})
                answered = repr(words) if self._news["state"] == "ready" else ""


def follow(run: RunFolder, rank: int, *, silence_s: float = SILENCE_S) -> None:
    """Every other rank's side: return when the folder is ready; raise when rank 0 refused or is gone."""
    folder = _make_folder(run)
    word = f"{socket.gethostname()}-{uuid.uuid4().hex}"
    path = folder / f"rank{rank:05d}.json"
    last_beat, heard_at = -1, time.monotonic()
    _write(path, {"rank": rank, "word": word})
    try:
        while True:
            answer = read_json(folder / "answer.json") or {}
            if answer.get("words", {}).get(str(rank)) == word:
                if answer["state"] == "ready":
                    return
                if answer["state"] == "refused":
                    time.sleep(_RANK_0_SPEAKS_S)
                    raise RefusedElsewhere(int(answer["exit_code"]), f"rank 0 refused: {answer['what']}")
                if answer["beat"] != last_beat:
                    last_beat, heard_at = answer["beat"], time.monotonic()
            if time.monotonic() - heard_at > silence_s:
                raise WorkerFailed(
                    f"rank {rank} has not heard from rank 0 for {silence_s:g} s",
                    where=f"they rendezvous in {folder}",
                    fix="the run folder must be the same for all machines (a shared file system), and rank 0 started",
                )
            time.sleep(_BEAT_S)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Atomic for readers, but without fsync: on a busy disk that would stop rank 0's heartbeat for minutes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value), encoding="utf-8")
    os.replace(draft, path)


def _make_folder(run: RunFolder) -> Path:
    # What ranks of one world have in common, whoever started them; machines may know the address by different names.
    known = [os.environ.get(name, "") for name in ("MASTER_PORT", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")]
    folder = run.path / JOIN_FOLDER / re.sub(r"\W+", "_", "-".join(["world", *known]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the run folder {run.path}: {error.strerror or error}",
            fix="set output: to a folder that you may write to",
        ) from None
    return folder
