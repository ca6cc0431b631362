"""Contradictions of plain text: a stage that reads it, its rows, and streams that are read while they are learned.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.derive import count_batch_tokens
from duoka.config.rule import Rule, names_of
from duoka.config.schema import RunConfig
from duoka.units import parse_budget, parse_every

LAST_FILE = "last_file"  # what data.eval calls the last file of a stream


def _ends_before_one_step(c: RunConfig) -> bool:
    budget = None if c.train.tokens is None else parse_budget(c.train.tokens)
    return budget is not None and not budget.is_per_parameter and budget.count < count_batch_tokens(c)


def _counts_in_epochs(every: int | str) -> bool:
    return parse_every(every).unit == "epochs"


def _names_epochs(c: RunConfig) -> bool:
    return _counts_in_epochs(c.checkpoint.every) or bool(c.is_evaluated and _counts_in_epochs(c.train.eval_every))


TEXT_RULES: tuple[Rule, ...] = (
    Rule(
        "pretrain-rows-are-packed",
        ("data.packing", "parallel.strategy", "stage"),
        lambda c: c.stage.kind.reads_text and (not c.data.packing or c.parallel.strategy == "dp"),
        "stage {c.stage.name} learns rows that hold several documents, but data.packing is {c.data.packing} and "
        "parallel.strategy is {c.parallel.strategy}: padded rows have no borders inside",
        "write:   packing: true   (and not strategy: dp, which pads)",
    ),
    Rule(
        "pretrain-learns-every-token",
        ("data.targets", "data.on_long", "stage"),
        lambda c: c.stage.kind.reads_text and (c.data.targets != "assistant" or c.data.on_long != "truncate"),
        "stage {c.stage.name} learns every token, and cuts text into rows without losing any; data.targets "
        "({c.data.targets}) and data.on_long ({c.data.on_long}) are settings for conversations",
        "delete them",
    ),
    Rule(
        "stream-of-text-only",
        ("data.stream", "stage"),
        lambda c: c.data.stream and not c.stage.kind.reads_text,
        "data.stream is for stage pretrain, and stage is {c.stage.name}: answers are marked before training begins",
        "delete stream, or write:   stage: pretrain",
    ),
    Rule(
        "streams-without-stream",
        ("data.streams", "data.stream"),
        lambda c: c.data.streams is not None and not c.data.stream,
        "data.streams is {c.data.streams}, but data.stream is false: nothing is streamed",
        "delete streams, or write:   stream: true",
    ),
    Rule(
        "stream-has-no-known-end",
        ("train.max_steps", "train.epochs", "data.stream"),
        lambda c: (
            c.data.stream
            and ((c.train.max_steps is None and c.train.tokens is None) or c.train.epochs not in (3.0, None))
        ),
        "how many steps an epoch of a stream takes is not known before all of it is read: train.epochs cannot end "
        "the run, train.max_steps and train.tokens do",
        "write:   max_steps: 10000   (or tokens: 2B) and delete epochs",
    ),
    Rule(
        "tokens-of-no-text",
        ("train.tokens", "stage"),
        lambda c: c.train.tokens is not None and not c.stage.kind.reads_text,
        "train.tokens ends stage pretrain, which learns every token alike; stage is {c.stage.name}",
        "write:   epochs: 3   or   max_steps: 1000",
    ),
    Rule(
        "tokens-below-a-batch",
        ("train.tokens", "train.global_batch"),
        _ends_before_one_step,
        "train.tokens is {c.train.tokens}, which is less text than one step learns from (train.global_batch "
        "{c.train.global_batch})",
        "a number of tokens is the whole run's:   tokens: 2B   for each parameter write:   tokens: 20x",
    ),
    Rule(
        "samples-that-begin-with-nothing",
        ("log.samples",),
        lambda c: isinstance(c.log.samples, tuple) and "" in c.log.samples,
        "log.samples has an empty beginning: there is nothing to continue",
        "write for example:   samples: [Once upon a time]   or a number of beginnings from data.eval:   samples: 2",
    ),
    Rule(
        "samples-of-no-text",
        ("log.samples", "data.eval", "stage"),
        lambda c: bool(c.log.samples) and (not c.stage.kind.reads_text or not c.data.eval),
        "log.samples continues plain text after each evaluation (stage pretrain); stage is {c.stage.name} and "
        "data.eval is {c.data.eval}",
        "delete samples   (talk to a run at any time: duoka chat)",
    ),
    Rule(
        "nothing-ends-the-run",
        ("train.epochs",),
        lambda c: c.train.epochs is None and c.train.tokens is None and c.train.max_steps is None,
        "train.epochs is null, and neither train.max_steps nor train.tokens says when the run ends",
        "write:   epochs: 3   or   max_steps: 1000",
    ),
    Rule(
        "stream-counts-no-epochs",
        ("checkpoint.every", "train.eval_every", "data.stream"),
        lambda c: c.data.stream and _names_epochs(c),
        "checkpoint.every is {c.checkpoint.every} and train.eval_every is {c.train.eval_every}, but an epoch of a "
        "stream has no known length",
        'write steps or a time:   every: 500   eval_every: 500   or "10min"',
    ),
    Rule(
        "stream-is-not-split",
        ("data.eval", "data.stream"),
        lambda c: c.data.stream and bool(c.data.eval) and not isinstance(c.data.eval, tuple),
        "data.eval is {c.data.eval}, but a stream is not read before training, so no share of it can be split off",
        "write:   eval: last_file   or name a data set, or eval: 0",
    ),
    Rule(
        "last-file-of-no-stream",
        ("data.eval", "data.stream"),
        lambda c: LAST_FILE in names_of(c.data.eval) and not c.data.stream,
        "data.eval is last_file, which is the last file of a stream, but data.stream is false",
        "write a share:   eval: 0.1   or name a data set",
    ),
    Rule(
        "stream-takes-all",
        ("data.train", "data.stream"),
        lambda c: (
            c.data.stream and any(not source.is_plain or source.max_samples is not None for source in c.data.train)
        ),
        "data.train gives a weight, share, epochs or max_samples, but a stream reads every row group of its files once "
        "per epoch",
        "delete them, or leave data.stream out",
    ),
)
