"""Contradictions of compiled layers in CUDA graphs: what changes shapes or addresses from step to step.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import GRAPHS, RunConfig


def _has_graphs(c: RunConfig) -> bool:
    return c.train.compile == GRAPHS


COMPILE_RULES: tuple[Rule, ...] = (
    Rule(
        "graphs-of-rows-of-one-length",
        ("train.compile", "data.fixed_rows", "stage"),
        lambda c: _has_graphs(c) and not c.row_tokens,
        "train.compile is {c.train.compile}, whose CUDA graphs are recorded once for each length, and rows of stage "
        "{c.stage.name} have other lengths in every step",
        "write under data   fixed_rows: true   (rows of exactly max_length), or   compile: true",
    ),
    Rule(
        "graphs-of-whole-models",
        ("train.compile", "parallel.strategy"),
        lambda c: _has_graphs(c) and c.parallel.strategy not in ("auto", "single", "ddp"),
        "train.compile is {c.train.compile}, whose CUDA graphs read weights where they lay when they were recorded, "
        "and strategy {c.parallel.strategy} moves them",
        "write:   strategy: ddp   or   compile: true",
    ),
    Rule(
        "graphs-keep-what-they-compute",
        ("train.compile", "train.recompute"),
        lambda c: _has_graphs(c) and c.train.recompute not in ("auto", "none"),
        "train.compile is {c.train.compile} and train.recompute is {c.train.recompute}: layers that are computed again "
        "in the backward pass have not been tried in CUDA graphs",
        "write:   recompute: none   or   compile: true",
    ),
    Rule(
        "graphs-of-likelihoods",
        ("train.compile", "stage"),
        lambda c: _has_graphs(c) and (c.stage.kind.judges or c.stage.kind.scores or c.stage.kind.draws),
        "train.compile is {c.train.compile}, and the loss of stage {c.stage.name} has not been tried over CUDA graphs",
        "write:   compile: true",
    ),
)
