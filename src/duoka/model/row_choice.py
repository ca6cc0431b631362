"""How a run's documents are laid out and its model's passes computed, as the self-test of its architecture found it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from duoka.config.schema import ModelConfig, RunConfig
from duoka.errors import ConfigError
from duoka.model.attention import NAME
from duoka.model.exactness import SelfTest, check_architecture
from duoka.plan.sizes import ModelShape


@dataclass(frozen=True)
class RowChoice:
    """How a run lays its documents out, and what a user should know about it."""

    packing: bool
    notes: tuple[str, ...] = ()
    writes_scores: bool = False  # the model's own attention does, where it is written out

    def applied_to(self, config: RunConfig) -> RunConfig:
        """The config with this in place of `auto`: what is planned with."""
        return config.model_copy(update={"data": config.data.model_copy(update={"packing": self.packing})})

    def seen_in(self, shape: ModelShape) -> ModelShape:
        return replace(shape, writes_scores=self.writes_scores)


@dataclass(frozen=True)
class Passes:
    """How a model's passes are computed: by which attention, and whether the loss takes the model's own logits,
    because our head is not all that it does after its layers; and whether common prefixes may be computed once."""

    attention: str = NAME
    own_logits: bool = False
    no_sharing: str = ""  # why what documents begin with alike is computed in each of them


def choose_rows(config: RunConfig, folder: Path) -> RowChoice:
    """Packed where that is exact, padded where only that is; refuses what is neither, or what was asked otherwise."""
    tested = check_architecture(folder, trust_remote_code=config.model.trust_remote_code)
    if config.parallel.sequence > 1:
        _check_pieces(config, tested)
    pads = not config.data.packs or config.parallel.strategy == "dp"
    if not pads and tested.trial("packed").is_exact:
        return RowChoice(True)
    notes = _find_padding(config, tested)
    writes_scores = bool(notes) and tested.written_attention == "eager"
    if pads:
        return RowChoice(False, notes, writes_scores)
    packed = tested.trial("packed")
    found = f"a tiny copy of it, two documents in a row against each alone: {packed.sentence()}"
    what = f"documents of model type {tested.name} see each other when they are packed"
    if not math.isfinite(packed.error):
        what = f"model type {tested.name} cannot be packed"
    if config.stage.kind.reads_text or config.data.fixed_rows:
        needs = f"stage {config.stage.name} learns" if config.stage.kind.reads_text else "data.fixed_rows makes"
        raise ConfigError(
            f"{needs} rows that hold several documents, and {what}", where=found, fix="use another model",
        )  # fmt: skip
    if config.data.packing is True:
        raise ConfigError(
            f"data.packing is true, and {what}", where=found, fix="write:   packing: auto   (it pads then)"
        )
    return RowChoice(False, (f"padded rows, not packed ones: {what} ({packed.sentence()})", *notes), writes_scores)


def _find_padding(config: RunConfig, tested: SelfTest) -> tuple[str, ...]:
    """Notes of how padded rows are computed; refuses a model whose are not exact by any attention."""
    if tested.trial("padded").is_exact:
        return ()
    written = tested.trial("as written")
    if not written.is_exact:
        raise ConfigError(
            f"duoka does not compute model type {tested.name} as transformers does, so it does not train it",
            where=f"a tiny copy of it, two documents in padded rows against each alone: {written.sentence()}",
            fix="use another model; docs/models.md lists what is exact",
        )
    if config.parallel.sequence > 1:
        raise ConfigError(
            f"parallel.sequence is {config.parallel.sequence}, and model type {tested.name} is computed by its own "
            "attention, which does not exchange what other ranks have of a row",
            where=f"a tiny copy of it by duoka's attention: {tested.trial('padded').sentence()}",
            fix="write:   sequence: 1   with strategy: fsdp, or recompute: full, where memory is short",
        )
    if tested.written_attention != "eager":
        return (f"attention as model type {tested.name} brings it: by duoka's it is not the same model",)
    return (f"attention as model type {tested.name} writes it out: it keeps scores of all pairs of a row's tokens",)


def _check_pieces(config: RunConfig, tested: SelfTest) -> None:
    """Refuse to cut the rows of an architecture whose other layers need whole ones."""
    fix = "write:   sequence: 1   with strategy: fsdp, or recompute: full, where memory is short"
    pieces = tested.pieces
    if not pieces.is_exact:
        found = f"logits are off by {pieces.error:.1%}: {pieces.why}" if math.isfinite(pieces.error) else pieces.why
        raise ConfigError(
            f"parallel.sequence is {config.parallel.sequence}, and rows of model type {tested.name} cannot be cut",
            where=f"a tiny copy of it, one row in two pieces against the whole: {found}",
            fix=fix,
        )
    stretched = tested.stretched_from
    if stretched is not None and config.data.max_length > stretched:
        raise ConfigError(
            f"parallel.sequence is {config.parallel.sequence}, and the rotary embedding of model type {tested.name} "
            f"depends on how long a row is beyond {stretched:,} tokens; data.max_length is {config.data.max_length:,}",
            where="ranks that each see a stretch of a row would each take another",
            fix=f"write:   max_length: {stretched}   or\n{fix}",
        )


def find_passes(model: ModelConfig, folder: Path, packing: bool) -> Passes:
    tested = check_architecture(folder, trust_remote_code=model.trust_remote_code)
    layout = tested.layout_for(packing=packing)
    attention = tested.written_attention if layout == "as written" else NAME
    return Passes(attention, tested.trial(layout).own_logits, tested.why_no_sharing() if packing else "")


def check_stages(model: ModelConfig, folder: Path) -> None:
    """Refuse a pipeline of a model that does more with hidden states than its layers and last norm do."""
    tested = check_architecture(folder, trust_remote_code=model.trust_remote_code)
    trial = tested.trial_in_stages()
    if not trial.is_exact:
        raise ConfigError(
            f"parallel.pipeline cannot cut model type {tested.name} into stages",
            where=f"a tiny copy of it in two stages, beside the whole: {trial.sentence()}",
            fix="write   pipeline: 1   and share the model by   strategy: fsdp",
        )
