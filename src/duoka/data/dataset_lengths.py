"""Sample lengths of a config's data, for its plan: from tokens, from an earlier run's cache, or estimated from files.

`duoka train` measures the tokenized data and leaves the figures in the cache, where `duoka plan` finds them as long as
files and settings are the same. Knows no torch; an estimate reads some megabytes and tokenizes some samples at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from duoka.config.schema import RunConfig, TrainConfig
from duoka.data.feed.epoch_plan import EpochPlan, plan_epochs
from duoka.data.feed.prefixes import find_repeats
from duoka.data.read.example import AnyExample, BadRecord, Preference
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import FilePiece, Record, find_pieces, read_piece
from duoka.data.read.registry import ResolvedSet, find_sets
from duoka.errors import ConfigError, Fault, Faults, StorageError
from duoka.plan.lengths import Lengths
from duoka.plan.prefixes import shares
from duoka.runs.cache import cache_folder, file_version, make_folder
from duoka.runs.folder import read_json, write_json_atomic
from duoka.units import Amount, parse_amount

if TYPE_CHECKING:
    from duoka.data.feed.loader import Samples
    from duoka.data.feed.prompts import PromptRows
    from duoka.data.feed.text_rows import TextRows
    from duoka.data.prepare import PreparedData
    from duoka.data.tokens.tokenizer import ChatTokenizer

KNOWN_VERSION = 4  # raise it when the same data would give other figures
# Epochs are walked until so many samples were laid out; of more samples, an evenly chosen subset is used.
_MOST_SAMPLES = 1_000_000
# Estimates from files: enough for a good guess, little enough to read in a fraction of a second.
_READ_BYTES = 16 * 2**20
_LOOKED_AT = 1000
_MOST_DRAWN = 65536
# UTF-8 bytes per token, about right for English and Chinese alike with today's vocabularies, and what a chat template
# writes around each message.
_BYTES_PER_TOKEN = 4.0
_TOKENS_PER_MESSAGE = 5
_ROWS_LOOKED_AT = 64  # of a row of documents, for how long these are
# So many global batches are looked at for what their samples begin with alike, the first so many tokens of each.
_BATCHES_LOOKED_AT, _MICRO_TOKENS, _PAIRS_AT_ONCE = 16, 2048, 4
# Where the model's tokenizer is here, so many samples are cut into tokens, of those that are no longer than this.
_COUNTED, _LONGEST_COUNTED = 64, 8192


def lengths_of(prepared: PreparedData, config: RunConfig) -> Lengths:
    """Of tokenized data: exact, and the fullest of the batches that this run will see."""
    from duoka.data.feed.loader import laid_lengths
    from duoka.data.feed.prompts import PromptRows
    from duoka.data.feed.stream_source import StreamSource
    from duoka.data.feed.text_rows import TextRows

    train = prepared.train
    if isinstance(train, StreamSource):
        row_tokens = train.packing.row_tokens
        return Lengths("tokenized", None, float(row_tokens), row_tokens)
    if isinstance(train, PromptRows):
        return _lengths_of_answers(train, config)
    some = slice(None, None, max(1, len(train) // _MOST_SAMPLES))
    plan = plan_epochs(train, config.train, some)
    laid = laid_lengths(train, config.data.packs)
    batch = sorted(laid[some][_fullest(plan, config.train)].tolist(), reverse=True)
    shared = _find_shared(train, plan) if shares(config) and some.step == 1 else []
    return Lengths(
        "tokenized", len(train), float(train.lengths.mean()), int(laid.max()), tuple(batch),
        *((sum(shared) / len(shared), min(shared)) if shared else (0.0, 0.0)),
        document=_document_length(train) if isinstance(train, TextRows) else 0.0,
    )  # fmt: skip


def _document_length(rows: TextRows) -> float:
    """Of the documents in some rows, weighted by their tokens."""
    some = range(0, len(rows), max(1, len(rows) // _ROWS_LOOKED_AT))
    return _seen_in([len(part.input_ids) for row in some for part in rows.segments(row)])


def _seen_in(lengths: Sequence[int], longest: int = 2**31) -> float:
    """How long a token's own document is, on average: longer ones have more tokens."""
    cut = [min(length, longest) for length in lengths]
    return sum(length**2 for length in cut) / max(1, sum(cut))


def _find_shared(train: Samples, plan: EpochPlan) -> list[float]:
    """Of some micro-batches as `auto` makes them: the share of tokens that others of it begin with too."""
    found, per_epoch = [], plan.num_batches()
    for index in range(0, per_epoch, max(1, per_epoch // _BATCHES_LOOKED_AT)):
        segments: list[np.ndarray] = []
        ids = plan.batch(0, index)
        for sample in ids[np.argsort(-plan.lengths[ids].astype(np.int64), kind="stable")].tolist():
            own = [part.input_ids for part in train.segments(sample)]
            if segments and sum(map(len, segments + own)) > _MICRO_TOKENS:
                break
            segments += own
        row, lengths = np.concatenate(segments), np.array([len(part) for part in segments])
        repeats = find_repeats(row, lengths)
        found.append(1 - float(repeats[0].mean()) if repeats else 0.0)
    return found


def _lengths_of_answers(prompts: PromptRows, config: RunConfig) -> Lengths:
    """Of prompts that the model will answer: each answer as long as it may be."""
    plan, room = plan_epochs(prompts, config.train), config.rl.max_new_tokens
    longest = prompts.lengths.astype(np.int64) + room
    batch = np.repeat(longest[_fullest(plan, config.train)], config.rl.samples)
    mean = float(longest.mean())
    return Lengths("tokenized", len(prompts), mean, int(longest.max()), tuple(sorted(batch.tolist(), reverse=True)))


def _fullest(plan: EpochPlan, train: TrainConfig) -> np.ndarray:
    """The ids of the samples of the global batch with most tokens."""
    per_epoch = plan.num_batches()
    asked = plan.num_steps(1.0 if train.epochs is None else train.epochs)
    num_steps = min(asked, train.max_steps or math.inf)
    best, most = (0, 0), -1
    for epoch in range(min(math.ceil(num_steps / per_epoch), max(1, _MOST_SAMPLES // plan.num_samples))):
        tokens = plan.batch_tokens(epoch)[: int(min(per_epoch, num_steps - epoch * per_epoch))]
        place = int(tokens.argmax())
        if tokens[place] > most:
            best, most = (epoch, place), int(tokens[place])
    return plan.batch(*best)


# --- what an earlier run found ---


def remember_lengths(lengths: Lengths, config: RunConfig, base: Path) -> None:
    """For the next `duoka plan`. A cache that cannot be written does not stop a run."""
    with contextlib.suppress(StorageError, OSError, Faults):
        write_json_atomic(make_folder(cache_folder() / "lengths") / _key_of(config, base), lengths.to_json())


def find_lengths(config: RunConfig, base: Path) -> Lengths | None:
    """What `remember_lengths` left for the same files and settings, else a guess from the files; None without any."""
    try:
        known = read_json(cache_folder() / "lengths" / _key_of(config, base))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return Lengths.from_json(known or {})
        sets = [found for found in find_sets(config, base) if found.split == "train"]
        return guess_lengths(config, sets, _own_tokenizer(config, base))
    except (Faults, OSError):
        return None  # the data may lie on another machine


def _key_of(config: RunConfig, base: Path) -> str:
    """Cache key: everything that decides lengths and batches; files by version, not by content."""
    facts: dict[str, Any] = {
        "version": KNOWN_VERSION,
        "files": [_facts(path) for found in find_sets(config, base) for path in found.files],
        "model": [str(base), config.model.model_dump(mode="json")],
        "data": config.data.model_dump(mode="json", exclude={"workers", "packing", "fixed_rows"}),
        "stage": config.stage.model_dump(mode="json"),
        # A padded pair takes twice its longer answer, a packed one both as they are.
        **({"padded": True} if config.stage.kind.judges and not config.data.packs else {}),
        "answers": [config.rl.samples, config.rl.max_new_tokens] if config.stage.kind.draws else [],
        "train": [getattr(config.train, name) for name in ("global_batch", "seed", "epochs", "max_steps")],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _facts(path: Path) -> list[Any]:
    return [str(path.absolute()), *file_version(path)]


# --- a look ---


def _own_tokenizer(config: RunConfig, base: Path) -> ChatTokenizer | None:
    """The model's, where it is on this machine and read without transformers, which takes seconds to import."""
    from duoka.data.tokens.tokenizer import load_tokenizer
    from duoka.hub.models import known_folder, local_tokenizer

    folder = local_tokenizer(config.model, base) if config.model.tokenizer else known_folder(config.model, base)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    with contextlib.suppress(ConfigError, ValueError):
        return load_tokenizer(folder, config.model.template)
    return None


def guess_lengths(config: RunConfig, sets: list[ResolvedSet], tokenizer: ChatTokenizer | None) -> Lengths | None:
    """From the first records of each file, at 4 bytes a token or as some of them are cut into tokens; their number too,
    where sets are used as they are."""
    guessed: list[int] = []
    shared: list[float] = []
    total: float | None = 0.0
    for found in sets:
        examples, number = _look_at(found)
        own = [_guess_tokens(example) for example in examples]
        own = own if tokenizer is None else _as_counted(own, examples, tokenizer)
        if found.form.kind == "preference" and "labeled" in config.stage.kind.records:  # each pair is two answers
            own, number = [-(-size // 2) for size in own for _ in range(2)], 2 * number
        guessed += own
        shared += _guess_shared(examples) if shares(config) and config.stage.kind.sequences > 1 else []
        known = found.weight is None and found.share is None and total is not None
        counted = min(number, found.max_samples or number) * (found.epochs or 1.0)
        total = total + counted if known and total is not None else None
    if not guessed:
        return None
    longest, mean = config.sample_tokens, sum(guessed) / len(guessed)
    if isinstance(config.data.eval, float) and total is not None:
        total -= round(config.data.eval * total)
    if config.stage.kind.reads_text or any(found.form.kind == "text" for found in sets):
        rows = None if total is None else max(1, round(total * mean / longest))
        return Lengths("sampled", rows, float(longest), longest, document=_seen_in(guessed, longest))
    if config.stage.kind.draws:  # each prompt is answered at whatever length; no more than this is known
        return Lengths("sampled", None if total is None else max(1, round(total)), float(longest), longest)
    cut = [min(longest, length) for length in guessed]
    batch = _guess_batch(cut, parse_amount(config.train.global_batch), sum(cut) / len(cut))
    number_of = None if total is None else max(1, round(total))
    of_both = (sum(shared) / len(shared), min(shared)) if shared else ()
    return Lengths("sampled", number_of, sum(cut) / len(cut), max(cut), batch, *of_both)


def _look_at(found: ResolvedSet) -> tuple[list[AnyExample], float]:
    """(some records, about how many there are)."""
    examples: list[AnyExample] = []
    num_records, room = 0, float(_READ_BYTES)
    size = sum(path.stat().st_size for path in found.files)
    for piece in _pieces(found):
        if room <= 0:
            break
        room -= piece.size_bytes
        for record in read_piece(piece):
            num_records += not isinstance(record, Fault)
            if isinstance(record, Record) and len(examples) < _LOOKED_AT:
                with contextlib.suppress(BadRecord):
                    examples.append(read_record(record.value, found.form))
    read = _READ_BYTES - room
    return examples, num_records * max(1.0, size / read) if room <= 0 else float(num_records)


def _pieces(found: ResolvedSet) -> Iterator[FilePiece]:
    for path in found.files:
        yield from (piece for piece in find_pieces(path, _READ_BYTES // 4) if isinstance(piece, FilePiece))


def _guess_tokens(example: AnyExample) -> int:
    """A pair counts both answers, each with its prompt, as training does."""
    messages = list(getattr(example, "messages", ()))
    answers = [getattr(example, name) for name in ("chosen", "rejected") if hasattr(example, name)]
    texts = [message.content for message in messages] * max(1, len(answers)) + [one.content for one in answers]
    texts += [getattr(example, "text", ""), getattr(example, "tools", None) or ""]
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return max(1, round(num_bytes / _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * (len(texts) - 2))


def _guess_shared(examples: Sequence[AnyExample]) -> list[float]:
    """Of some pairs at a time: the share of both answers' texts that is the second copy of their question."""
    pairs = [one for one in examples if isinstance(one, Preference)]
    asked = [sum(len(message.content) for message in one.messages) for one in pairs]
    whole = [
        2 * size + len(one.chosen.content) + len(one.rejected.content) for size, one in zip(asked, pairs, strict=True)
    ]
    every = range(0, len(pairs), _PAIRS_AT_ONCE)
    return [sum(asked[at : at + _PAIRS_AT_ONCE]) / max(1, sum(whole[at : at + _PAIRS_AT_ONCE])) for at in every]


def _as_counted(guessed: list[int], examples: Sequence[AnyExample], tokenizer: ChatTokenizer) -> list[int]:
    """Guesses as they are where some were counted: a template writes as much around short samples as around long ones,
    so that by which a guess is too small is a share of it and a number of tokens."""
    from duoka.data.tokens.encode import encode_examples

    every = max(1, len(examples) // _COUNTED)
    some = [place for place in range(0, len(examples), every) if guessed[place] <= _LONGEST_COUNTED]
    encoded = encode_examples([examples[place] for place in some], tokenizer, targets="assistant")
    pairs = [
        (guessed[place], sum(len(part.input_ids) for part in one.parts))
        for place, one in zip(some, encoded, strict=True)
        if not isinstance(one, BadRecord)
    ]
    if not pairs:
        return guessed
    near, real = np.array(pairs, dtype=float).T
    spread = ((near - near.mean()) ** 2).sum()
    slope = ((near - near.mean()) * (real - real.mean())).sum() / spread if spread else 0.0
    if slope <= 0:
        slope = real.mean() / near.mean()
    start = real.mean() - slope * near.mean()
    return [max(1, round(slope * guess + start)) for guess in guessed]


def _guess_batch(lengths: list[int], step: Amount, mean: float) -> tuple[int, ...]:
    """The fullest of some batches drawn from what was seen, the same at each call."""
    dice = random.Random(0)
    count = step.count if step.unit == "samples" else max(1, round(step.count / mean))
    if count > _MOST_DRAWN:
        return ()
    draws = (dice.choices(lengths, k=count) for _ in range(max(1, min(32, _MOST_DRAWN // count))))
    return tuple(sorted(max(draws, key=sum), reverse=True))
