"""Stages: what a job can learn, one row each, and the block of the YAML that chooses one.

A row is what must be known of a stage before torch is there: checks, data and the plan ask it, and never for a name.
The stage itself is the class in duoka/train/stages/ that the row names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from duoka.config.fields import Number, Section, Share

RecordKind = Literal["conversation", "text", "prompt", "preference", "labeled"]
StageName = Literal["sft", "pretrain", "mid", "dpo", "kto", "reward", "rl"]
PairLossName = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "simpo", "cpo", "orpo"]
Positive = Annotated[Number, Field(gt=0)]
Weight = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True)
class StageKind:
    """`stage`: its class; `learns`: what from, as in "learns the answers of conversations"; `records`: kinds it reads.

    `references`: frozen copies of the model that a rank holds while all weights are trained, for the plan. Under
    adapters there are none: a copy without them is the same model with its adapters off. `settings`: keys of the
    block beside the name. `sequences`: how many a sample has, each of up to data.max_length tokens. `has_reference`:
    its loss looks at how far answers have moved since the run began. `looks`: passes without gradients, each over
    about as many tokens as the step has, that come before a step's loss. `scores`: the model answers a sequence with
    one number, by a head of its own in place of the vocabulary's. `draws`: data has prompts alone, and what is
    learned from the model answers while it is trained.
    """

    stage: str
    learns: str
    records: tuple[RecordKind, ...]
    references: int = 0
    settings: tuple[str, ...] = ()
    sequences: int = 1
    has_reference: bool = False
    looks: int = 0
    scores: bool = False
    draws: bool = False

    @property
    def reads_text(self) -> bool:
        """Documents end to end, every token a target: rows of one length, streams, counts of tokens and of bytes."""
        return self.records == ("text",)

    @property
    def judges(self) -> bool:
        """Whole answers are judged, by a pair or a label, and no token is learned by itself."""
        return set(self.records) <= {"preference", "labeled"}

    @property
    def has_pair_loss(self) -> bool:
        return "loss" in self.settings


_LIKELIHOOD = "duoka.train.stages.likelihood:Likelihood"
_OF_PAIRS = ("loss", "beta", "label_smoothing", "gamma", "sft_weight", "sft_mean", "ld_alpha")
STAGES: dict[StageName, StageKind] = {
    "sft": StageKind(_LIKELIHOOD, "the answers of conversations", ("conversation",)),
    "pretrain": StageKind(_LIKELIHOOD, "every token of plain text", ("text",)),
    # Between the two: what `derive.py` fills in makes it another preset of the same loss.
    "mid": StageKind(_LIKELIHOOD, "every token of conversations and tasks", ("conversation",)),
    "dpo": StageKind(
        "duoka.train.stages.pairs:Pairs", "from preference pairs, the better answer before the worse", ("preference",),
        settings=_OF_PAIRS, sequences=2,
    ),
    "kto": StageKind(
        "duoka.train.stages.labeled:Labeled", "from answers labeled good or bad", ("labeled", "preference"),
        settings=("beta", "desirable_weight", "undesirable_weight"), has_reference=True, looks=1,
    ),
    "reward": StageKind(
        "duoka.train.stages.rewards:Rewards", "to score answers, from preference pairs", ("preference",),
        settings=("centering",), sequences=2, scores=True,
    ),
    "rl": StageKind(
        "duoka.train.stages.policy:Policy", "from rewards of answers that the model draws", ("conversation", "prompt"),
        draws=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PairLoss:
    """`settings`: keys that this loss reads, beside those that all do. `has_reference`: it looks at how far answers
    have moved from where the run began, so their log-probabilities there are computed before the first step."""

    settings: tuple[str, ...] = ()
    has_reference: bool = True
    sft_weight: float = 0.0  # where none is written


PAIR_LOSSES: dict[PairLossName, PairLoss] = {
    "sigmoid": PairLoss(("label_smoothing", "ld_alpha")),
    "hinge": PairLoss(("ld_alpha",)),
    "ipo": PairLoss(),
    "robust": PairLoss(("label_smoothing", "ld_alpha")),
    "apo_zero": PairLoss(("ld_alpha",)),
    "apo_down": PairLoss(("ld_alpha",)),
    "simpo": PairLoss(("gamma",), has_reference=False),
    "cpo": PairLoss(has_reference=False, sft_weight=1.0),
    "orpo": PairLoss(has_reference=False, sft_weight=1.0),
}
_OF_ALL_LOSSES = ("loss", "beta", "sft_weight", "sft_mean")


class StageConfig(Section):
    """What the job learns. `stage: sft` is short for `stage: {name: sft}`."""

    name: StageName = Field(
        "sft",
        description=f"What the job learns: {'; '.join(f'{name}: {one.learns}' for name, one in STAGES.items())}.",
    )
    loss: PairLossName | None = Field(
        None, description="With dpo: the loss of a pair (docs/preferences.md has the formulas); left out: sigmoid."
    )
    beta: Positive | None = Field(
        None, description="With dpo and kto: how much a log-probability counts, the lambda of orpo; left out: 0.1."
    )
    label_smoothing: Annotated[Share, Field(lt=0.5)] | None = Field(
        None, description="With loss sigmoid (cDPO) and robust: the share of pairs that are the wrong way round."
    )
    gamma: Weight | None = Field(
        None, description="With loss simpo: the margin that the better answer is to have; left out: 0.5."
    )
    sft_weight: Weight | None = Field(
        None, description="With dpo: how much -log p of the better answer counts beside the loss (RPO); left out: 0, "
        "and 1 with cpo and orpo."
    )  # fmt: skip
    sft_mean: Literal["sequences", "tokens"] | None = Field(
        None, description="With dpo: what that term is the mean over: answers, each by its own mean, or all their "
        "tokens; left out: sequences."
    )  # fmt: skip
    ld_alpha: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        None, description="With dpo: what tokens beyond the shorter answer's length count (LD-DPO); left out: 1."
    )
    desirable_weight: Weight | None = Field(None, description="With kto: what a good answer counts; left out: 1.")
    undesirable_weight: Weight | None = Field(None, description="With kto: what a bad answer counts; left out: 1.")

    centering: Weight | None = Field(
        None, description="With reward: how much (sum of both scores)^2 counts, which keeps them around 0; left out: 0."
    )

    @property
    def kind(self) -> StageKind:
        return STAGES[self.name]

    @property
    def title(self) -> str:
        """Its name, with the loss where it has several."""
        return f"{self.name} with loss {self.pair_loss}" if self.kind.has_pair_loss else self.name

    @property
    def pair_loss(self) -> PairLossName:
        return self.loss or "sigmoid"

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities of the model that the run begins with are a part of the loss."""
        if self.kind.has_pair_loss:
            return PAIR_LOSSES[self.pair_loss].has_reference
        return self.kind.has_reference

    @property
    def good_weight(self) -> float:
        return 1.0 if self.desirable_weight is None else self.desirable_weight

    @property
    def bad_weight(self) -> float:
        return 1.0 if self.undesirable_weight is None else self.undesirable_weight

    @property
    def unread(self) -> str:
        """Settings that are written and that this stage, or its loss, does not read."""
        read = set(self.kind.settings)
        if self.kind.has_pair_loss:
            read &= {*_OF_ALL_LOSSES, *PAIR_LOSSES[self.pair_loss].settings}
        others = set(type(self).model_fields) - read - {"name"}
        return ", ".join(key for key in type(self).model_fields if key in others and getattr(self, key) is not None)


def stages_that_read(kind: RecordKind) -> list[StageName]:
    return [name for name, one in STAGES.items() if kind in one.records]
