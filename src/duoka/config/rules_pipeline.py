"""Contradictions between a pipeline and other settings. A part of the table in rules.py, which evaluates it."""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.rules_parallel import ddp_settings
from duoka.config.schema import RunConfig
from duoka.config.schema_running import ADDS_ONCE

_SHARE_STATE = ("zero1", "zero2", "zero3", "fsdp", "hsdp")


def _has_stages(c: RunConfig) -> bool:
    return c.parallel.pipeline > 1


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline-with-one-process",
        ("parallel.strategy", "parallel.pipeline"),
        lambda c: _has_stages(c) and c.parallel.strategy in ("single", "dp"),
        "parallel.strategy is {c.parallel.strategy}, which is one process, and parallel.pipeline is "
        "{c.parallel.pipeline}",
        "write:   strategy: auto",
    ),
    Rule(
        "pipeline-with-compile",
        ("train.compile", "parallel.pipeline"),
        lambda c: _has_stages(c) and bool(c.train.compile),
        "train.compile is on, and compiled layers have not been tried in a pipeline",
        "write:   compile: false",
    ),
    Rule(
        "pipeline-with-compress",
        ("parallel.compress", "parallel.pipeline"),
        lambda c: _has_stages(c) and c.parallel.compression.changes_anything,
        "parallel.compress is {c.parallel.compress}, and gradients of a pipeline travel as they are",
        "delete compress, or write:   pipeline: 1",
    ),
    Rule(
        "pipeline-with-ddp-settings",
        ("parallel.pipeline",),
        lambda c: _has_stages(c) and bool(ddp_settings(c)),
        "parallel.pipeline is {c.parallel.pipeline}, whose data ranks add their gradients after the schedule: "
        "find_unused_parameters, static_graph, bucket_mb and bucket_view are settings of DDP's own exchange",
        "delete them, or write:   pipeline: 1",
    ),
    Rule(
        "pipeline-with-offload",
        ("parallel.offload", "parallel.pipeline"),
        lambda c: _has_stages(c) and c.parallel.offloads.params != "none",
        "parallel.offload is params: a stage of a pipeline would fetch its weights again for each micro-batch",
        "write:   offload: optimizer   or more stages",
    ),
    Rule(
        "pipeline-in-fp16",
        ("train.precision", "parallel.pipeline"),
        lambda c: _has_stages(c) and c.train.precision == "fp16",
        "train.precision is fp16, whose loss scale each stage of a pipeline would have to know of the others",
        "write:   precision: bf16   or   pipeline: 1",
    ),
    Rule(
        "pipeline-of-packed-weights",
        ("model.quantization", "parallel.pipeline"),
        lambda c: _has_stages(c) and c.model.quantization != "none",
        "model.quantization is {c.model.quantization}: packed weights cannot be read a stage at a time",
        "write:   quantization: none   or   pipeline: 1",
    ),
    Rule(
        "interleaved-with-zero",
        ("parallel.schedule", "parallel.strategy"),
        lambda c: _has_stages(c) and c.parallel.schedule in ADDS_ONCE and c.parallel.strategy in _SHARE_STATE,
        "parallel.schedule is {c.parallel.schedule} and strategy is {c.parallel.strategy}: gradients would be "
        "exchanged when some of them are there, and others are not",
        "write:   schedule: 1f1b   or   strategy: ddp",
    ),
    Rule(
        "virtual-stages-of-one",
        ("parallel.virtual_stages", "parallel.schedule"),
        lambda c: (
            c.parallel.virtual_stages not in (None, 2 if c.parallel.schedule == "zbv" else None)
            and c.parallel.schedule != "interleaved"
        ),
        "parallel.virtual_stages is {c.parallel.virtual_stages}, which only the schedule interleaved may choose (zbv "
        "has 2); schedule is {c.parallel.schedule}",
        "delete it, or write:   schedule: interleaved",
    ),
    Rule(
        "schedule-without-pipeline",
        ("parallel.schedule", "parallel.pipeline"),
        lambda c: c.parallel.schedule != "1f1b" and c.parallel.pipeline == 1,
        "parallel.schedule is {c.parallel.schedule}, and without a pipeline there is nothing to schedule",
        "delete it, or write:   pipeline: 2",
    ),
)
