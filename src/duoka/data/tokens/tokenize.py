"""Pieces of files to tokens: the work itself, and the processes that share it.

`prepare` calls `tokenize_pieces`. Small data is done on the spot; large data by processes that are plain programs of
their own (`python -m duoka.data.tokens.tokenize JOB`), so that neither a script without a main guard nor threads in the
caller can break them. Finished pieces are kept on disk until the set is whole: interrupted work goes on from there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from duoka.data.read.example import AnyExample, BadRecord, SetFormat
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import FilePiece, Record, read_piece
from duoka.data.tokens.encode import Encoded, encode_examples, fit_length
from duoka.data.tokens.template import Targets
from duoka.data.tokens.token_store import Arrays, pack_arrays
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import Fault, WorkerFailed
from duoka.process.lifeline import die_with_parent
from duoka.runs.folder import read_json, write_json_atomic

OnLong = Literal["truncate", "split", "drop", "error"]
SMALL_BYTES = 2 << 20  # below this, starting processes takes longer than the work
_DONE = None
_RECORDS_AT_ONCE = 64
_FAULT = "fault "  # before what a worker says of the system's refusal: its number, and the file that it names


@dataclass(frozen=True)
class Job:
    """What is the same for every piece of a set."""

    form: SetFormat
    targets: Targets
    max_length: int
    on_long: OnLong
    max_record_bytes: int


@dataclass
class Counts:
    """Counts of records by outcome. `num_kept` counts samples: truncated ones too, and each part of a split one."""

    num_records: int = 0
    num_kept: int = 0
    num_truncated: int = 0
    num_split: int = 0  # records that were cut
    num_parts: int = 0  # samples that they became
    num_dropped_long: int = 0
    num_dropped_masked: int = 0
    num_bad: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_unknown: int = 0  # tokens for characters that the tokenizer does not have
    num_damaged: int = 0  # records whose text holds U+FFFD

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class PieceResult:
    """A finished piece: its counts, wrong records (never learned) and too long ones that `on_long: error` forbids."""

    counts: Counts = field(default_factory=Counts)
    bad: list[Fault] = field(default_factory=list)
    long: list[Fault] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> PieceResult:
        bad, long = ([Fault(**fault) for fault in raw[name]] for name in ("bad", "long"))
        return cls(Counts(**raw["counts"]), bad, long)


def tokenize_piece(
    piece: FilePiece, limit: int | None, job: Job, tokenizer: ChatTokenizer
) -> tuple[PieceResult, list[Encoded]]:
    """The samples of a piece's first `limit` records, in order."""
    result: PieceResult = PieceResult()
    samples: list[Encoded] = []
    counts = result.counts
    records = itertools.islice(read_piece(piece, job.max_record_bytes), limit)
    while some := list(itertools.islice(records, _RECORDS_AT_ONCE)):
        counts.num_records += len(some)
        read = [(record, _read(record, job)) for record in some]
        good = [example for _, example in read if not isinstance(example, Fault)]
        encoded = iter(encode_examples(good, tokenizer, targets=job.targets))
        for record, example in read:
            if isinstance(example, Fault):
                result.bad.append(example)
            elif isinstance(record, Record):
                found = next(encoded)
                if isinstance(found, BadRecord):
                    result.bad.append(_fault_of(found, record))
                else:
                    samples += _keep(found, example, record, job, result)
    counts.num_kept = len(samples)
    counts.num_bad = len(result.bad)
    counts.num_tokens = sum(len(part.input_ids) for sample in samples for part in sample.parts)
    counts.num_targets = sum(sample.joined().num_targets for sample in samples)
    return result, samples


def _read(record: Record | Fault, job: Job) -> AnyExample | Fault:
    if isinstance(record, Fault):
        return record
    try:
        return read_record(record.value, job.form, source=record.file, line=record.line)
    except BadRecord as error:
        return _fault_of(error, record)


def _fault_of(error: BadRecord, record: Record) -> Fault:
    return Fault(error.rule, file=record.file, line=record.line, source=record.text, fix=error.fix)


def _keep(encoded: Encoded, example: AnyExample, record: Record, job: Job, result: PieceResult) -> list[Encoded]:
    """What of a record is learned: all of it, parts, or nothing; counted in `result`."""
    counts = result.counts
    kept = [encoded]
    # Plain text may be of any length: training cuts it into rows, and loses none of it.
    is_long = encoded.longest > job.max_length and job.form.kind != "text"
    if is_long and job.on_long == "error":
        what = f"the conversation has {encoded.longest:,} tokens, and data.max_length is {job.max_length:,}"
        fix = "raise data.max_length, or set data.on_long: truncate (or split, or drop)"
        result.long.append(Fault(what, file=record.file, line=record.line, source=record.text, fix=fix))
        return []
    if is_long:
        kept = [] if job.on_long == "drop" else fit_length(encoded, job.max_length, job.on_long, example)
        if not kept and (job.on_long == "drop" or job.form.kind == "prompt"):
            counts.num_dropped_long += 1
            return []
    if job.form.kind != "prompt":
        kept = [one for one in kept if all(part.num_targets for part in one.parts) and not one.is_even]
    if not kept:
        counts.num_dropped_masked += 1
        return []
    counts.num_unknown += encoded.num_unknown
    counts.num_damaged += encoded.is_damaged
    if is_long and job.on_long == "split" and job.form.kind == "conversation":
        counts.num_split += 1
        counts.num_parts += len(kept)
    elif is_long:
        counts.num_truncated += 1
    return kept


# ------------------------------------------------------------------------------------- pieces on disk


def read_result(draft: Path, number: int) -> PieceResult | None:
    """A piece that is already done, or None."""
    raw = read_json(draft / f"piece-{number:06d}.json")
    return None if raw is None else PieceResult.from_json(raw)


def read_arrays(draft: Path, number: int) -> Arrays:
    with np.load(draft / f"piece-{number:06d}.npz", allow_pickle=False) as file:
        return Arrays(**{name: file[name] for name in file.files})


def _write_piece(draft: Path, number: int, result: PieceResult, samples: list[Encoded]) -> None:
    marks, margins = [sample.mark for sample in samples], [sample.margin for sample in samples]
    arrays = pack_arrays([sample.joined() for sample in samples], marks, margins, [one.record for one in samples])
    name = draft / f"piece-{number:06d}"
    with open(f"{name}.draft", "wb") as file:
        np.savez(file, allow_pickle=False, **arrays.named())
        file.flush()
        os.fsync(file.fileno())  # else, after a power cut, the file below could be there and this one be cut
    os.replace(f"{name}.draft", f"{name}.npz")
    write_json_atomic(Path(f"{name}.json"), result.to_json())  # last: it says that the arrays are whole


# ---------------------------------------------------------------------------------------- sharing work


def tokenize_pieces(
    pieces: list[tuple[FilePiece, int | None]],
    job: Job,
    tokenizer: ChatTokenizer,
    draft: Path,
    *,
    num_workers: int,
    done: Callable[[int, PieceResult], bool],
) -> None:
    """Tokenize every piece that `draft` lacks. `done(number, result)` is called for each; False stops early."""
    todo = []
    for number, (piece, limit) in enumerate(pieces):
        known = read_result(draft, number)
        if known is None:
            todo.append((number, piece, limit))
        elif not done(number, known):
            return
    size_bytes = sum(piece.size_bytes for _, piece, _ in todo)
    num_workers = min(num_workers, len(todo))
    if num_workers <= 1 or size_bytes < SMALL_BYTES:
        for number, piece, limit in todo:
            result, samples = tokenize_piece(piece, limit, job, tokenizer)
            _write_piece(draft, number, result, samples)
            if not done(number, result):
                return
        return
    tokenizer.save(draft / "tokenizer.json")
    write_json_atomic(draft / "job.json", asdict(job))
    for number in _with_processes(todo, draft, num_workers):
        result = read_result(draft, number) or PieceResult()
        if not done(number, result):
            return


def _with_processes(todo: Iterable[tuple[int, FilePiece, int | None]], draft: Path, num_workers: int) -> Iterator[int]:
    """Numbers of pieces as they are finished. Ends every process it started, however it is left."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for item in todo:
        waiting.put(item)
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers = [_start_worker(draft) for _ in range(num_workers)]
    threads = [threading.Thread(target=_feed, args=(worker, waiting, finished), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        num_alive = num_workers
        while num_alive:
            number = finished.get()
            if isinstance(number, Exception):
                raise number
            if number is _DONE:
                num_alive -= 1
            else:
                yield number
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for thread in threads:
            thread.join()
        for pipe in (pipe for worker in workers for pipe in (worker.stdin, worker.stdout) if pipe is not None):
            with contextlib.suppress(OSError):  # the rest of the buffer, to the closed pipe of a dead worker
                pipe.close()


def _start_worker(draft: Path) -> subprocess.Popen[str]:
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    # One thread each: processes are the parallelism, and more threads than cores only wait for one another.
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "duoka.data.tokens.tokenize", str(draft), str(os.getpid())]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, encoding="utf-8",
        start_new_session=True,  # a Ctrl-C in the terminal goes to the parent, which ends its workers
    )  # fmt: skip


def _feed(worker: subprocess.Popen[str], waiting: queue.SimpleQueue[Any], finished: queue.SimpleQueue[Any]) -> None:
    """Give one process piece after piece; its answer is the piece's number."""
    assert worker.stdin is not None and worker.stdout is not None
    while True:
        try:
            number, piece, limit = waiting.get_nowait()
        except queue.Empty:
            finished.put(_DONE)
            return
        try:
            worker.stdin.write(json.dumps([number, asdict(piece), limit]) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        if answer.startswith(_FAULT):  # a disk that is full, or a file of the data that is there no more
            code, name = json.loads(answer.removeprefix(_FAULT))
            finished.put(OSError(code, os.strerror(code), name))
            return
        if answer.strip() != str(number):
            code = worker.wait()
            where = f"{piece.path}, from line {piece.line}"
            finished.put(WorkerFailed(f"a tokenizing process died (exit code {code})", where=where))
            return
        finished.put(number)


def main(draft: Path) -> None:
    """One worker: a piece per line of stdin, its number on stdout when it is on disk."""
    raw = json.loads((draft / "job.json").read_text(encoding="utf-8"))
    form = raw.pop("form")
    job = Job(form=SetFormat(**form), **raw)
    tokenizer = ChatTokenizer.load(draft / "tokenizer.json")
    for line in sys.stdin:
        number, piece, limit = json.loads(line)
        try:
            result, samples = tokenize_piece(FilePiece(**piece), limit, job, tokenizer)
            _write_piece(draft, number, result, samples)
        except OSError as error:
            if error.errno is None:
                raise
            name = None if error.filename is None else str(error.filename)
            print(f"{_FAULT}{json.dumps([error.errno, name])}", flush=True)
            return
        print(number, flush=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(Path(sys.argv[1]))
