"""Contradictions of stages: settings that one does not read, and what a comparison with the run's start does not bear.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import RunConfig


def _wrong_smoothing(c: RunConfig) -> bool:
    return c.stage.pair_loss == "robust" and not c.stage.label_smoothing


def _written_loss(c: RunConfig) -> bool:
    return c.train.loss != "likelihood" or c.train.label_smoothing > 0


def _changes_more_than_a_head(c: RunConfig) -> bool:
    lora = c.lora
    by_adapters = lora is not None and bool(lora.init != "random" or lora.adapter or lora.merge)
    return c.train_only is not None or c.model.quantization != "none" or by_adapters


STAGE_RULES: tuple[Rule, ...] = (
    Rule(
        "stage-does-not-read-it",
        ("stage",),
        lambda c: bool(c.stage.unread),
        "stage {c.stage.title} does not read {c.stage.unread}",
        "delete it; duoka explain stage.loss says which settings a loss has",
    ),
    Rule(
        "robust-needs-a-share",
        ("stage.label_smoothing", "stage.loss"),
        lambda c: c.stage.kind.has_pair_loss and _wrong_smoothing(c),
        "stage.loss is robust, which corrects for pairs that are the wrong way round, and label_smoothing says of none",
        "write for example:   label_smoothing: 0.1   or   loss: sigmoid",
    ),
    Rule(
        "pairs-have-their-own-loss",
        ("train.loss", "train.label_smoothing", "stage"),
        lambda c: c.stage.kind.judges and _written_loss(c),
        "train.loss ({c.train.loss}) and train.label_smoothing ({c.train.label_smoothing}) are of single tokens, and "
        "stage {c.stage.name} judges whole answers",
        "delete them; duoka explain stage.name says which loss a stage has",
    ),
    Rule(
        "pairs-mark-the-last-answer",
        ("data.targets", "data.on_long", "stage"),
        lambda c: c.stage.kind.judges and (c.data.targets not in ("assistant", "last") or c.data.on_long == "split"),
        "stage {c.stage.name} judges the last answer to a prompt; data.targets ({c.data.targets}) and data.on_long "
        "({c.data.on_long}) would judge the prompt, or cut an answer into parts",
        "delete them",
    ),
    Rule(
        "pairs-are-not-cut",
        ("parallel.sequence", "parallel.tensor", "parallel.pipeline", "stage"),
        lambda c: c.stage.kind.judges and c.parallel.sequence * c.parallel.tensor * c.parallel.pipeline > 1,
        "stage {c.stage.name} sums each answer on one rank, and parallel: shares one model between several",
        "delete tensor, pipeline and sequence",
    ),
    Rule(
        "no-dropout-beside-a-reference",
        ("lora.dropout", "stage"),
        lambda c: c.stage.has_reference and c.lora is not None and c.lora.dropout > 0,
        "lora.dropout is {c.lora.dropout}, and stage {c.stage.name} compares the model with where it began: what is "
        "dropped at random would count as a difference",
        "write:   dropout: 0",
    ),
    Rule(
        "scores-have-a-head-of-their-own",
        ("train_only", "model.quantization", "lora.init", "lora.adapter", "lora.merge", "stage"),
        lambda c: c.stage.kind.scores and _changes_more_than_a_head(c),
        "stage {c.stage.name} trains a new head on the model as it is: with all its weights, or with a new adapter",
        "delete train_only, model.quantization, lora.init, lora.adapter and lora.merge; to begin from an adapter, "
        "merge it first:   duoka export RUN -o FOLDER",
    ),
)
