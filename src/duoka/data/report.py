"""The data report, in numbers and lines: shown by `duoka data inspect`, kept in the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duoka.config.stages import StageConfig
from duoka.data.feed.epoch_plan import EpochPlan, share_batch
from duoka.data.feed.labeled import LabeledRows
from duoka.data.tokens.tokenize import Counts
from duoka.errors import Fault
from duoka.runs.folder import json_lines, write_json_atomic, write_text_atomic
from duoka.units import Amount, format_count

_BATCHES_LOOKED_AT = 20
_ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class SetReport:
    """One data set: where it came from and what was kept of it."""

    name: str
    split: str
    files: tuple[str, ...]
    formatting: str
    counts: Counts
    reused: bool
    skipped: tuple[Fault, ...] = ()  # the first wrong records, with on_bad: skip
    skipped_list: str = ""  # a file with all of them

    def line(self) -> str:
        counts = self.counts
        num_kept = counts.num_kept - counts.num_parts + counts.num_split  # records, as what it is said beside
        parts = [f"{num_kept:,} of {counts.num_records:,} kept"]
        for number, words in (
            (counts.num_truncated, "truncated"),
            (counts.num_dropped_long, "too long, dropped"),
            (counts.num_dropped_masked, "nothing to learn, dropped"),
            (counts.num_bad, "wrong, skipped"),
        ):
            if number:
                parts.append(f"{number:,} {words}")
        if counts.num_split:
            parts.append(f"{counts.num_split:,} split into {counts.num_parts:,}")
        if counts.num_damaged:
            parts.append(f"{counts.num_damaged:,} with U+FFFD (characters were lost before)")
        if counts.num_unknown:
            parts.append(f"{counts.num_unknown:,} tokens stand for characters that the tokenizer does not have")
        parts.append(f"{format_count(counts.num_tokens)} tokens, {format_count(counts.num_targets)} of them targets")
        where = " (for evaluation)" if self.split == "eval" else ""
        return f"{self.name}{where}: {self.formatting}; " + "; ".join(parts) + ("; reused" if self.reused else "")


@dataclass(frozen=True)
class Padding:
    """Shares of computed positions that hold no token, in some global batches, per way to lay them out."""

    unsorted: float  # rows as they come, as a plain loader pads them
    padded: float  # data.packing: false, rows of like length together
    packed: float


@dataclass(frozen=True)
class DataReport:
    """The whole data of a run. Sample counts are those after the split and the mixture.

    Of plain text, `num_train` counts documents and `num_eval` rows. Of a stream, only `stream` and `num_eval` tell.
    """

    sets: tuple[SetReport, ...]
    num_train: int = 0
    num_eval: int = 0
    train_tokens: int = 0
    train_targets: int = 0
    longest: int = 0
    has_pairs: bool = False  # a sample is two sequences
    num_good: int | None = None  # of labeled answers
    has_prompts: bool = False  # a sample is a prompt, which the model answers while it is trained
    template: str = ""  # nothing for plain text
    num_rows: int = 0  # that plain text was cut into
    row_tokens: int = 0
    stream: str = ""
    mixture: tuple[tuple[str, float, float], ...] = ()  # asked for: (set, its share of samples, of tokens)
    histogram: tuple[tuple[int, int], ...] = ()  # (longer than half of this and at most this, so many samples)
    padding: Padding | None = None
    ends_with_eos: bool | None = None  # None: nothing is learned
    notes: tuple[str, ...] = ()

    @property
    def mean_length(self) -> float:
        return self.train_tokens / max(1, self.num_train)

    def lines(self, *, histogram: bool = True) -> list[str]:
        out = [report.line() for report in self.sets]
        out += [
            f"  wrong: {fault.file}, line {fault.line}: {fault.what}" for one in self.sets for fault in one.skipped[:3]
        ]
        out.append(self._train_line())
        if self.mixture:
            each = (f"{name} {samples:.1%} and {tokens:.1%}" for name, samples, tokens in self.mixture)
            noun = "documents" if self.row_tokens else self.noun or "samples"
            out.append(f"mixture (share of {noun}, which weight and share mean, and of tokens): " + ", ".join(each))
        if self.histogram and histogram:
            total = max(1, self.num_train)
            out.append(
                "tokens: " + ", ".join(f"to {top:,} {count / total:.0%}" for top, count in self.histogram if count)
            )
        if self.padding is not None:
            pad = self.padding
            out.append(
                f"padding ({_ROWS_AT_ONCE} rows at once): packed {pad.packed:.1%}, padded {pad.padded:.1%}, "
                f"unsorted rows {pad.unsorted:.1%} of what is computed"
            )
        if self.ends_with_eos:
            out.append("answers end with the tokenizer's end token")
        if self.template:
            out.append(f"chat template: {self.template}")
        return out + [f"note: {note}" for note in self.notes]

    def _train_line(self) -> str:
        if self.stream:
            return f"train: {self.stream}; eval: {self.num_eval:,} rows"
        sizes = f"(mean {self.mean_length:.0f}, longest {self.longest:,})"
        if self.has_prompts:
            return f"train: {self.num_train:,} prompts, {format_count(self.train_tokens)} tokens {sizes}"
        counts = f"{format_count(self.train_tokens)} tokens {sizes}, {format_count(self.train_targets)} targets"
        if self.row_tokens:
            rows = f"in {self.num_rows:,} rows of {self.row_tokens:,} tokens"
            return f"train: {self.num_train:,} documents, {counts}, {rows}; eval: {self.num_eval:,} rows"
        noun = self.noun or "samples"
        return f"train: {self.num_train:,} {noun}{self._labels()}, {counts}; eval: {self.num_eval:,} {noun}"

    @property
    def noun(self) -> str:
        """What judged samples are called; "" for others."""
        return "pairs" if self.has_pairs else "answers" if self.num_good is not None else ""

    def _labels(self) -> str:
        return "" if self.num_good is None else f" ({self.num_good:,} good, {self.num_train - self.num_good:,} bad)"

    def sentence(self) -> str:
        """The data in one line of a banner."""
        held_out = f", {self.num_eval:,} {'rows ' if self.row_tokens else ''}held out" if self.num_eval else ""
        if self.stream:
            return self.stream + held_out
        if self.row_tokens:
            rows = f"in {self.num_rows:,} rows of {self.row_tokens:,}"
            return f"{self.num_train:,} documents, {self.train_tokens:,} tokens, {rows}{held_out}"
        if self.has_prompts:
            return f"{self.num_train:,} prompts, {self.train_tokens:,} tokens"
        counts = f"{self.train_tokens:,} tokens, {self.train_targets:,} of them targets"
        return f"{self.num_train:,} {self.noun or 'conversations'}{self._labels()}, {counts}{held_out}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean_length": self.mean_length}


# KTO's authors advise that (weight x number) of good answers to bad ones lies here (arXiv 2402.01306, section 4.2).
_ADVISED = (1.0, 4 / 3)


def label_notes(answers: LabeledRows, stage: StageConfig) -> list[str]:
    """What to know of labeled answers before a run: where they are from, and how good ones weigh against bad ones."""
    notes = []
    if answers.of_pairs:
        notes.append("pairs are split in two: the better answer as a good one, the worse as a bad one")
    num_good = int(answers.is_good.sum())
    num_bad = len(answers) - num_good
    if not num_good or not num_bad:
        notes.append(f"all answers are {'good' if num_good else 'bad'}: there is nothing to tell them from")
        return notes
    ratio = num_good * stage.good_weight / max(1e-9, num_bad * stage.bad_weight)
    if not _ADVISED[0] * 0.99 <= ratio <= _ADVISED[1] * 1.01:
        low, high = (f"{edge * num_bad * stage.bad_weight / num_good:.3g}" for edge in _ADVISED)
        notes.append(
            f"good answers weigh {ratio:.3g} times what bad ones do; KTO's authors advise 1 to 4/3:   "
            f"stage.desirable_weight: {low} to {high}"
        )
    return notes


def cut_notes(sets: Sequence[SetReport], max_length: int) -> list[str]:
    """Before scores are learned: that of an answer that was cut in the middle of a sentence; it is read at an end."""
    num_cut = sum(one.counts.num_truncated for one in sets)
    if not num_cut:
        return []
    what = f"of {num_cut:,} pairs data.max_length ({max_length:,}) cut an answer"
    fix = "raise max_length, or leave such pairs out:   on_long: drop"
    return [f"{what}, whose score is learned where it was cut: {fix}"]


def count_lengths(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """A histogram over powers of two."""
    tops = 1 << np.arange(3, 31)
    places = np.searchsorted(tops, lengths, "left")
    counts = np.bincount(places, minlength=len(tops))
    return tuple((int(top), int(count)) for top, count in zip(tops, counts, strict=False) if count)


def measure_padding(plan: EpochPlan, max_length: int) -> Padding:
    """Padding that each layout would compute in the first global batches."""
    lengths = plan.lengths
    computed = dict.fromkeys(("unsorted", "padded", "packed"), 0)
    real = 0
    for index in range(min(plan.num_batches(), _BATCHES_LOOKED_AT)):
        ids = plan.batch(0, index)
        own = lengths[ids].astype(np.int64)
        real += int(own.sum())
        for at in range(0, len(own), _ROWS_AT_ONCE):
            rows = own[at : at + _ROWS_AT_ONCE]
            computed["unsorted"] += int(rows.max()) * len(rows)
        for packing in (True, False):
            micro = Amount(_ROWS_AT_ONCE, "samples")
            (share,) = share_batch(ids, lengths, 1, micro, packing=packing, max_length=max(max_length, int(own.max())))
            for one in share:
                sizes = [sum(int(lengths[sample]) for sample in row) for row in one.rows]
                computed["packed" if packing else "padded"] += max(sizes) * len(sizes)
    return Padding(**{name: 1 - real / max(1, count) for name, count in computed.items()})


def write_data_report(report: DataReport, folder: Path) -> None:
    """data.json, and bad.jsonl with every record that was skipped, in a run's folder."""
    write_json_atomic(folder / "data.json", report.to_json())
    lines = []
    for one in report.sets:
        if one.skipped_list:
            for fault in json_lines(Path(one.skipped_list).read_text(encoding="utf-8")):
                lines.append(json.dumps({"set": one.name, **fault}, ensure_ascii=False) + "\n")
    if lines:
        write_text_atomic(folder / "bad.jsonl", "".join(lines))
    else:
        (folder / "bad.jsonl").unlink(missing_ok=True)  # of an earlier start, before the data were mended
