"""Stages: what a job can learn, one row each, and the block of the YAML that chooses one.

A row is what must be known of a stage before torch is there: checks, data and the plan ask it, and never for a name.
The stage itself is the class in duoka/train/stages/ that the row names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from duoka.config.fields import Section

RecordKind = Literal["conversation", "text", "prompt", "preference", "labeled"]
StageName = Literal["sft", "pretrain", "mid"]


@dataclass(frozen=True)
class StageKind:
    """`stage`: its class; `learns`: what from, as in "learns the answers of conversations"; `records`: kinds it reads.

    `references`: frozen copies of the model that a rank holds while all weights are trained, for the plan. Under
    adapters there are none: a copy without them is the same model with its adapters off.
    """

    stage: str
    learns: str
    records: tuple[RecordKind, ...]
    references: int = 0

    @property
    def reads_text(self) -> bool:
        """Documents end to end, every token a target: rows of one length, streams, counts of tokens and of bytes."""
        return self.records == ("text",)


STAGES: dict[StageName, StageKind] = {
    "sft": StageKind("duoka.train.stages.likelihood:Likelihood", "the answers of conversations", ("conversation",)),
    "pretrain": StageKind("duoka.train.stages.likelihood:Likelihood", "every token of plain text", ("text",)),
    # Between the two: what `derive.py` fills in makes it another preset of the same loss.
    "mid": StageKind(
        "duoka.train.stages.likelihood:Likelihood", "every token of conversations and tasks", ("conversation",)
    ),
}


class StageConfig(Section):
    """What the job learns. `stage: sft` is short for `stage: {name: sft}`."""

    name: StageName = Field(
        "sft",
        description=f"What the job learns: {'; '.join(f'{name}: {one.learns}' for name, one in STAGES.items())}.",
    )

    @property
    def kind(self) -> StageKind:
        return STAGES[self.name]


def stages_that_read(kind: RecordKind) -> list[StageName]:
    return [name for name, one in STAGES.items() if kind in one.records]
