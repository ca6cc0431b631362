"""What became of the data, in numbers and lines: shown by `duoka data inspect`, kept with the tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from duoka.data.tokenise import Counts
from duoka.errors import Fault
from duoka.units import format_count


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
        parts = [f"{counts.num_kept:,} of {counts.num_records:,} kept"]
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
class DataReport:
    """The whole data of a run. Sample counts are those after the split and the mixture."""

    sets: tuple[SetReport, ...]
    num_train: int
    num_eval: int
    train_tokens: int
    train_targets: int
    longest: int
    template: str
    notes: tuple[str, ...] = ()

    @property
    def mean_length(self) -> float:
        return self.train_tokens / max(1, self.num_train)

    def lines(self) -> list[str]:
        out = [report.line() for report in self.sets]
        out += [
            f"  wrong: {fault.file}, line {fault.line}: {fault.what}" for one in self.sets for fault in one.skipped[:3]
        ]
        out.append(
            f"train: {self.num_train:,} samples, {format_count(self.train_tokens)} tokens "
            f"(mean {self.mean_length:.0f}, longest {self.longest:,}), {format_count(self.train_targets)} targets; "
            f"eval: {self.num_eval:,} samples"
        )
        out.append(f"chat template: {self.template}")
        return out + [f"note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean_length": self.mean_length}
