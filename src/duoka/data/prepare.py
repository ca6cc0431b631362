"""Data of a config to token stores: found, tokenized once, split and mixed, and reported.

The launcher calls `prepare_data` before any process group exists; workers call it again and find the work done. What
it writes is keyed by content (data, template, tokenizer, options), appears in one step, and is never changed after.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from duoka.config.schema import DataConfig, ModelConfig, RunConfig, StageConfig
from duoka.data.feed.answers import AnswerRows
from duoka.data.feed.epoch_plan import EpochPlan
from duoka.data.feed.labeled import LabeledRows
from duoka.data.feed.pairs import PairRows
from duoka.data.feed.prompts import PromptRows
from duoka.data.feed.stream_source import StreamSource, build_source
from duoka.data.feed.text_rows import TextRows, as_samples
from duoka.data.mixture import Mixture, mix_parts
from duoka.data.prompts import prepare_prompts
from duoka.data.read.records import FilePiece, find_pieces, read_piece
from duoka.data.read.registry import MOST_FAULTS, ResolvedSet, find_sets, max_record_bytes
from duoka.data.report import DataReport, SetReport, count_lengths, cut_notes, label_notes, measure_padding
from duoka.data.set_key import key_of
from duoka.data.tokens.rows import refuse_prompts_without_row, refuse_without_row
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenPart, TokenStore, write_part
from duoka.data.tokens.tokenize import Counts, Job, PieceResult, read_arrays, tokenize_pieces
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.data.tokens.turn_borders import thought_notes
from duoka.errors import DataError, Fault, Faults, StorageError
from duoka.hub.models import resolve_tokenizer
from duoka.plan.hardware import count_usable_cores
from duoka.runs.cache import cache_folder, hold_lock, make_folder
from duoka.runs.folder import read_json, write_json_atomic
from duoka.units import format_count, format_seconds, parse_amount

PIECE_BYTES = (256 << 10, 4 << 20)
_SAY_EVERY_S = 2.0
_SHOWN_SKIPPED = 3
_LOOKED_AT = 64
_PADDING_SAMPLES = 10_000


@dataclass(frozen=True)
class PreparedData:
    """What training reads: samples, rows of plain text, prompts, or a stream read while training."""

    train: TokenStore | TextRows | AnswerRows | PromptRows | StreamSource
    eval: TokenStore | TextRows | AnswerRows | None
    report: DataReport
    pad_id: int
    text_bytes: np.ndarray | None = None  # of each token, in plain text of a byte-level tokenizer

    @property
    def num_samples(self) -> int | None:
        """What an epoch holds; None for a stream."""
        return None if isinstance(self.train, StreamSource) else len(self.train)

    @property
    def mean_length(self) -> float:
        if isinstance(self.train, StreamSource):
            return float(self.train.packing.row_tokens)
        return float(self.train.lengths.mean())

    @property
    def num_shown(self) -> int:
        """How many samples, rows, or first rows of streams there are to look at."""
        return self.train.plan.num_streams if isinstance(self.train, StreamSource) else len(self.train)

    def shown(self, place: int) -> list[Sample]:
        """One of them: a conversation, or the parts of documents in a row."""
        return self.train.first_row(place) if isinstance(self.train, StreamSource) else self.train.segments(place)

    def check_world(self, num_ranks: int) -> None:
        """Refuse more ranks than the data has work for."""
        if isinstance(self.train, StreamSource):
            self.train.check_world(num_ranks)


def prepare_data(
    config: RunConfig, base: Path, model_folder: Path, *, say: Callable[[str], None] = lambda text: None
) -> PreparedData:
    """Token stores for a config. Raises Faults (wrong records), DataError (nothing left), StorageError."""
    if config.stage.kind.draws:
        tokenizer = read_tokenizer(config.model, base, model_folder)
        prompts, said = prepare_prompts(config, base, tokenizer)
        refuse_prompts_without_row(prompts.ids, tokenizer, model_folder)
        return PreparedData(prompts, None, said, tokenizer.pad_id)
    sets = find_sets(config, base)
    tokenizer = read_tokenizer(config.model, base, model_folder)
    streamed = [found for found in sets if config.data.stream and found.split == "train"]
    kept = [found for found in sets if found not in streamed]
    prepared = [_prepare_set(found, config.data, tokenizer, say) for found in kept]
    named = [(found.name, part) for found, (part, _) in zip(kept, prepared, strict=True)]
    refuse_without_row(named, tokenizer, model_folder, config.data)
    reports = [report for _, report in prepared]
    parts = [(found, part) for found, (part, _) in zip(kept, prepared, strict=True)]
    notes = tuple(note for found in sets for note in found.notes)
    if streamed:
        return _with_stream(build_source(streamed, config, tokenizer), parts, reports, notes, config, tokenizer)
    mixture = mix_parts(parts, config)
    train = as_samples(mixture.train, [found for found in kept if found.split == "train"], config)
    held_out = [found for found in kept if found.split == "eval"] or kept
    evaluation = as_samples(mixture.eval, held_out, config, held_out=True) if mixture.eval else None
    report = _build_report(mixture, train, evaluation, reports, notes, tokenizer, config)
    report = replace(report, mixture=_shares(mixture.train, [found for found in kept if found.split == "train"]))
    return PreparedData(train, evaluation, report, tokenizer.pad_id, _text_bytes(config.stage, tokenizer))


def _shares(store: TokenStore, sets: list[ResolvedSet]) -> tuple[tuple[str, float, float], ...]:
    """What a mixture that was asked for comes to: shares count samples, and sets with longer ones give more tokens."""
    if len(sets) < 2 or all(one.weight is None and one.share is None and one.epochs is None for one in sets):
        return ()
    sizes = store.sizes_of_parts()
    samples, tokens = (max(1, sum(column)) for column in zip(*sizes, strict=True))
    return tuple((one.name, count / samples, size / tokens) for one, (count, size) in zip(sets, sizes, strict=True))


def _text_bytes(stage: StageConfig, tokenizer: ChatTokenizer) -> np.ndarray | None:
    return tokenizer.text_bytes if stage.kind.reads_text else None


def _with_stream(
    source: StreamSource,
    parts: list[tuple[ResolvedSet, TokenPart]],
    reports: list[SetReport],
    notes: tuple[str, ...],
    config: RunConfig,
    tokenizer: ChatTokenizer,
) -> PreparedData:
    """Only evaluation data is tokenized ahead."""
    evaluation = None
    if parts:
        store = TokenStore([part for _, part in parts])
        if not len(store):
            raise DataError("no sample is left in data.eval", fix="look at the counts above")
        evaluation = as_samples(store, [found for found, _ in parts], config, held_out=True)
    report = DataReport(
        sets=tuple(reports),
        stream=source.sentence(),
        num_eval=len(evaluation or ()),
        row_tokens=config.data.max_length,
        notes=notes,
    )
    return PreparedData(source, evaluation, report, tokenizer.pad_id, _text_bytes(config.stage, tokenizer))


def read_tokenizer(model: ModelConfig, base: Path, model_folder: Path) -> ChatTokenizer:
    """The run's tokenizer: that of the model, unless the config names another."""
    folder = resolve_tokenizer(model, base, model_folder)
    return load_tokenizer(folder, model.template, trust_remote_code=model.trust_remote_code)


def _build_report(
    mixture: Mixture,
    train: TokenStore | TextRows | AnswerRows,
    evaluation: TokenStore | TextRows | AnswerRows | None,
    reports: list[SetReport],
    set_notes: tuple[str, ...],
    tokenizer: ChatTokenizer,
    config: RunConfig,
) -> DataReport:
    store = mixture.train
    lengths = train.lengths if isinstance(train, AnswerRows) else store.lengths
    common: dict[str, Any] = {
        "sets": tuple(reports),
        "num_train": len(lengths),
        "num_eval": len(evaluation) if evaluation is not None else 0,
        "train_tokens": int(lengths.sum(dtype=np.int64)),
        "train_targets": int(train.num_targets.sum(dtype=np.int64)),
        "longest": int(lengths.max()),
        "histogram": count_lengths(lengths),
    }
    if isinstance(train, TextRows):
        return DataReport(**common, num_rows=len(train), row_tokens=train.row_tokens, notes=set_notes)
    last = _last_targets(store)
    ends = tokenizer.eos_id in last if last else None
    notes = [*tokenizer.notes, *set_notes, *thought_notes(tokenizer)]
    if last and not ends and not any(tokenizer.decode([one]) in tokenizer.special_texts for one in last):
        end = tokenizer.special_tokens.get("eos_token")
        named = f"the tokenizer's end token {end!r}" if end else "an end token (the tokenizer names none)"
        notes.append(f"no answer ends with {named}, so a chat may not know when to stop")
    if isinstance(train, LabeledRows):
        notes += label_notes(train, config.stage)
    if config.stage.kind.scores:
        notes += cut_notes(reports, config.data.max_length)
    # A pair is two rows: how many tokens padding takes is not a matter of one length.
    padding = None if isinstance(train, AnswerRows) else measure_padding(_any_plan(store, config), config.sample_tokens)
    return DataReport(
        **common,
        has_pairs=isinstance(train, PairRows),
        num_good=int(train.is_good.sum()) if isinstance(train, LabeledRows) else None,
        template="the model's own" if tokenizer.template_name == "model" else tokenizer.template_name,
        padding=padding,
        ends_with_eos=ends,
        notes=tuple(notes),
    )


def _any_plan(train: TokenStore, config: RunConfig) -> EpochPlan:
    """Batches like those of the run; the padding in them needs no exact order."""
    some = slice(0, _PADDING_SAMPLES)
    batch = parse_amount(config.train.global_batch)
    return EpochPlan(train.lengths[some], train.num_targets[some], fingerprint="report", seed=0, global_batch=batch)


def _last_targets(train: TokenStore) -> set[int]:
    """What some answers end with."""
    looked_at = (train.sample(place) for place in range(min(len(train), _LOOKED_AT)))
    return {int(sample.input_ids[sample.is_target][-1]) for sample in looked_at if sample.is_target.any()}


# ---------------------------------------------------------------------------------------------- one set


def _prepare_set(
    found: ResolvedSet, data: DataConfig, tokenizer: ChatTokenizer, say: Callable[[str], None]
) -> tuple[TokenPart, SetReport]:
    root = make_folder(cache_folder() / "tokens")
    job = Job(found.form, data.targets, data.max_length, data.on_long, max_record_bytes(data.max_length))
    try:
        folder = root / key_of(found, job, tokenizer, root)
    except OSError as error:
        raise _of_file(error, found) or error from None
    reused = TokenPart.is_whole(folder)
    if not reused:
        try:
            with hold_lock(
                root / f"{folder.name}.lock", on_wait=lambda: say(f"{found.name}: another run is tokenizing it")
            ):
                reused = TokenPart.is_whole(folder)  # the other run may have finished it meanwhile
                if not reused:
                    _tokenize_set(found, data, job, tokenizer, folder, say)
        except OSError as error:
            raise _of_file(error, found) or StorageError(
                f"cannot keep the tokens of {found.name!r}: {error.strerror or error}",
                where=str(root),
                fix="make room, or set DUOKA_CACHE to another folder",
            ) from None
    part = TokenPart(folder)
    bad = [Fault(**fault) for fault in part.meta["bad"]]
    if bad and data.on_bad == "error":
        raise _refusal(bad, part.meta["counts"]["num_bad"])
    report = SetReport(
        name=found.name,
        split=found.split,
        files=tuple(map(str, found.files)),
        formatting=found.form.name,
        counts=Counts(**part.meta["counts"]),
        reused=reused,
        skipped=tuple(bad[:_SHOWN_SKIPPED]),
        skipped_list=str(folder / "bad.jsonl") if bad else "",
    )
    say(report.line())
    return part, report


def _of_file(error: OSError, found: ResolvedSet) -> DataError | None:
    """What is said where a file of the data, and not the cache, is the trouble: gone, or not to be read."""
    named = [path for path in found.files if str(path) == str(error.filename)]
    lost = next((path for path in found.files if not path.is_file()), None)
    if not named and lost is None:
        return None
    why = "it is there no more" if lost is not None else str(error.strerror or error)
    return DataError(
        f"a file of {found.name!r} cannot be read: {why}",
        where=str(lost or named[0]),
        fix="put it back and start again: files have to stay where they are until they are tokenized",
    )


def _tokenize_set(
    found: ResolvedSet,
    data: DataConfig,
    job: Job,
    tokenizer: ChatTokenizer,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Write one set's part. The caller holds its lock."""
    num_workers = data.workers or count_usable_cores()
    pieces, lost = _cut_set(found, num_workers, job.max_record_bytes)
    draft = _open_draft(folder.with_suffix(".draft"), pieces)
    results: dict[int, PieceResult] = {}
    progress = _Progress(found.name, sum(piece.size_bytes for piece, _ in pieces), say)

    def done(number: int, result: PieceResult) -> bool:
        results[number] = result
        progress.add(pieces[number][0], result.counts)
        faults = sum(len(result.long) + (data.on_bad == "error") * len(result.bad) for result in results.values())
        return faults < MOST_FAULTS

    tokenize_pieces(pieces, job, tokenizer, draft, num_workers=num_workers, done=done)
    if key_of(found, job, tokenizer, folder.parent) != folder.name:
        shutil.rmtree(draft)
        what = f"the files of {found.name!r} were changed while they were read"
        raise DataError(what, where="some of the tokens are of before, some of after", fix="start again")
    ordered = [results[number] for number in sorted(results)]
    bad = [fault for result in ordered for fault in result.bad] + lost
    long = [fault for result in ordered for fault in result.long]
    refused = long + (bad if data.on_bad == "error" else [])
    if refused:
        shutil.rmtree(draft)
        raise _refusal(refused, len(refused))
    counts = Counts()
    for result in ordered:
        counts.add(result.counts)
    counts.num_bad += len(lost)
    counts.num_records += len(lost)
    whole = folder.with_suffix(".whole")
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    lines = [json.dumps(vars(fault), ensure_ascii=False) + "\n" for fault in bad]
    (whole / "bad.jsonl").write_text("".join(lines), encoding="utf-8")
    meta = {"name": found.name, "counts": vars(counts), "bad": [vars(fault) for fault in bad[:MOST_FAULTS]]}
    write_part(whole, (read_arrays(draft, number) for number in range(len(pieces))), meta, counts.num_tokens)
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one, if any
    os.replace(whole, folder)
    shutil.rmtree(draft)


def _cut_set(
    found: ResolvedSet, num_workers: int, max_record: int
) -> tuple[list[tuple[FilePiece, int | None]], list[Fault]]:
    """Pieces of all files in order, each with its number of wanted records, and the faults of unreadable files."""
    size_bytes = sum(path.stat().st_size for path in found.files)
    least, most = PIECE_BYTES
    piece_bytes = min(max(size_bytes // (8 * num_workers), least), most)
    pieces: list[tuple[FilePiece, int | None]] = []
    lost: list[Fault] = []
    room = found.max_samples
    for path in found.files:
        for piece in find_pieces(path, piece_bytes):
            if room is not None and room <= 0:
                return pieces, lost
            if isinstance(piece, Fault):
                lost.append(piece)
                room = None if room is None else room - 1
            elif room is None:
                pieces.append((piece, None))
            else:
                pieces.append((piece, room))
                room -= sum(1 for _ in read_piece(piece, max_record))
    return pieces, lost


def _open_draft(draft: Path, pieces: list[tuple[FilePiece, int | None]]) -> Path:
    """The folder of finished pieces; what an earlier run left counts only if it cut the files in the same places."""
    plan = {"pieces": [[*astuple(piece), limit] for piece, limit in pieces]}
    if read_json(draft / "pieces.json") != plan:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        write_json_atomic(draft / "pieces.json", plan)
    return draft


def _refusal(faults: list[Fault], num_faults: int) -> Faults:
    shown = faults[:MOST_FAULTS]
    if num_faults > len(shown):
        shown.append(Fault(f"and {num_faults - len(shown)} more", fix="data.on_bad: skip leaves wrong records out"))
    return Faults(shown, title="data error")


class _Progress:
    """Prints a set's progress now and then."""

    def __init__(self, name: str, size_bytes: int, say: Callable[[str], None]) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.say = say
        self.started = self.said = time.monotonic()
        self.done_bytes = 0
        self.num_tokens = 0

    def add(self, piece: FilePiece, counts: Counts) -> None:
        self.done_bytes += piece.size_bytes
        self.num_tokens += counts.num_tokens
        now = time.monotonic()
        if now - self.said < _SAY_EVERY_S or not self.done_bytes:
            return
        self.said = now
        share = self.done_bytes / max(1, self.size_bytes)
        took_s = now - self.started
        left = format_seconds(took_s / share - took_s)
        speed = f"{format_count(self.num_tokens)} tokens, {format_count(self.num_tokens / took_s)}/s"
        self.say(f"{self.name}: tokenizing, {share:.0%} ({speed}, {left} left)")
