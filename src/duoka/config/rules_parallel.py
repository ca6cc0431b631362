"""Contradictions between a strategy and its settings: what only ddp, fsdp or hsdp know.

A part of the table in rules.py, which evaluates it; the planner asks `ddp_settings` what was wished for.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import RunConfig
from duoka.units import parse_seconds

DAY_S = 86_400.0
_DDP_DEFAULTS = {"find_unused_parameters": False, "bucket_view": True, "static_graph": False, "bucket_mb": 25.0}


def ddp_settings(c: RunConfig) -> list[str]:
    """Keys that were set and that only ddp knows: with `strategy: auto` they are a wish for ddp."""
    found = [f"parallel.{name}" for name, value in _DDP_DEFAULTS.items() if getattr(c.parallel, name) != value]
    return found + (["parallel.compress"] if c.parallel.compress in ("fp16", "powersgd") else [])


def _has_axes(c: RunConfig) -> bool:
    return c.parallel.tensor * c.parallel.pipeline * c.parallel.sequence > 1


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "one-process-with-axes",
        ("parallel.strategy", "parallel.tensor", "parallel.pipeline", "parallel.sequence"),
        lambda c: c.parallel.strategy in ("single", "dp") and _has_axes(c),
        "parallel.strategy is {c.parallel.strategy}, which is one process, but an axis shares a model between several",
        "delete strategy",
    ),
    Rule(
        "pipeline-of-shards",
        ("parallel.strategy", "parallel.pipeline"),
        lambda c: c.parallel.pipeline > 1 and c.parallel.strategy in ("zero3", "fsdp", "hsdp"),
        "parallel.strategy is {c.parallel.strategy} beside pipeline {c.parallel.pipeline}: a stage would gather its "
        "weights again for each of its many micro-batches",
        "write:   strategy: zero1   (weights stay on their stage), or   pipeline: 1",
    ),
    Rule(
        "pipeline-with-compress",
        ("parallel.compress", "parallel.pipeline"),
        lambda c: c.parallel.pipeline > 1 and c.parallel.compress != "none",
        "parallel.compress is {c.parallel.compress}, and gradients of a pipeline travel as they are",
        "delete compress, or write:   pipeline: 1",
    ),
    Rule(
        "pipeline-with-ddp-settings",
        ("parallel.pipeline", *(f"parallel.{name}" for name in _DDP_DEFAULTS)),
        lambda c: c.parallel.pipeline > 1 and any(getattr(c.parallel, n) != v for n, v in _DDP_DEFAULTS.items()),
        "parallel.pipeline is {c.parallel.pipeline}, whose data ranks add their gradients after the schedule: "
        "find_unused_parameters, static_graph, bucket_mb and bucket_view are settings of DDP's own exchange",
        "delete them, or write:   pipeline: 1",
    ),
    Rule(
        "pipeline-with-offload",
        ("parallel.offload", "parallel.pipeline"),
        lambda c: c.parallel.pipeline > 1 and c.parallel.offload == "params",
        "parallel.offload is params: a stage of a pipeline would fetch its weights again for each micro-batch",
        "write:   offload: optimizer   or more stages",
    ),
    Rule(
        "pipeline-in-fp16",
        ("train.precision", "parallel.pipeline"),
        lambda c: c.parallel.pipeline > 1 and c.train.precision == "fp16",
        "train.precision is fp16, whose loss scale each stage of a pipeline would have to know of the others",
        "write:   precision: bf16   or   pipeline: 1",
    ),
    Rule(
        "pipeline-of-packed-weights",
        ("model.quantization", "parallel.pipeline"),
        lambda c: c.parallel.pipeline > 1 and c.model.quantization != "none",
        "model.quantization is {c.model.quantization}: packed weights cannot be read a stage at a time",
        "write:   quantization: none   or   pipeline: 1",
    ),
    Rule(
        "interleaved-with-zero",
        ("parallel.schedule", "parallel.strategy"),
        lambda c: (
            c.parallel.pipeline > 1
            and c.parallel.schedule == "interleaved"
            and c.parallel.strategy in ("zero1", "zero2")
        ),
        "parallel.schedule is interleaved and strategy is {c.parallel.strategy}: gradients would be exchanged when one "
        "of a rank's stages is done, and others are not",
        "write:   schedule: 1f1b   or   strategy: ddp",
    ),
    Rule(
        "virtual-stages-of-one",
        ("parallel.virtual_stages", "parallel.schedule"),
        lambda c: c.parallel.virtual_stages is not None and c.parallel.schedule != "interleaved",
        "parallel.virtual_stages is {c.parallel.virtual_stages}, which only the schedule interleaved knows; "
        "schedule is {c.parallel.schedule}",
        "delete it, or write:   schedule: interleaved",
    ),
    Rule(
        "schedule-without-pipeline",
        ("parallel.schedule", "parallel.pipeline"),
        lambda c: c.parallel.schedule != "1f1b" and c.parallel.pipeline == 1,
        "parallel.schedule is {c.parallel.schedule}, and without a pipeline there is nothing to schedule",
        "delete it, or write:   pipeline: 2",
    ),
    Rule(
        "ddp-settings-without-ddp",
        ("parallel.strategy", *(f"parallel.{name}" for name in _DDP_DEFAULTS)),
        lambda c: (
            c.parallel.strategy not in ("auto", "ddp")
            and any(getattr(c.parallel, name) != value for name, value in _DDP_DEFAULTS.items())
        ),
        "parallel.strategy is {c.parallel.strategy}, but find_unused_parameters, static_graph, bucket_mb and "
        "bucket_view are settings of ddp",
        "delete them, or write:   strategy: ddp",
    ),
    Rule(
        "static-graph-looks-for-unused",
        ("parallel.find_unused_parameters", "parallel.static_graph"),
        lambda c: c.parallel.static_graph and c.parallel.find_unused_parameters,
        "parallel.static_graph and find_unused_parameters are both on: one says that nothing changes, "
        "the other looks at every step for what changed",
        "keep one of them",
    ),
    Rule(
        "shard-ranks-without-hsdp",
        ("parallel.shard_ranks", "parallel.strategy"),
        lambda c: c.parallel.shard_ranks is not None and c.parallel.strategy != "hsdp",
        "parallel.shard_ranks is {c.parallel.shard_ranks}, which only hsdp knows; strategy is {c.parallel.strategy}",
        "delete it, or write:   strategy: hsdp",
    ),
    Rule(
        "reshard-without-fsdp",
        ("parallel.reshard", "parallel.strategy"),
        lambda c: not c.parallel.reshard and c.parallel.strategy not in ("zero3", "fsdp", "hsdp"),
        "parallel.reshard is false, which only fsdp and hsdp know; strategy is {c.parallel.strategy}",
        "delete it, or write:   strategy: fsdp",
    ),
    Rule(
        "offload-params-of-whole-models",
        ("parallel.offload", "parallel.strategy"),
        lambda c: (
            c.parallel.offload == "params" and c.parallel.strategy not in ("zero1", "zero2", "zero3", "fsdp", "hsdp")
        ),
        "parallel.offload is params, which needs a strategy that gathers weights when they are used; "
        "strategy is {c.parallel.strategy}",
        "write:   strategy: fsdp   (on one process too), or   offload: optimizer",
    ),
    Rule(
        "compress-without-exchange",
        ("parallel.compress", "parallel.strategy"),
        lambda c: c.parallel.compress != "none" and c.parallel.strategy in ("single", "dp"),
        "parallel.compress is {c.parallel.compress}, but strategy {c.parallel.strategy} exchanges no gradients",
        "delete it, or write:   strategy: ddp",
    ),
    Rule(
        "compress-of-ddp-only",
        ("parallel.compress", "parallel.strategy"),
        lambda c: c.parallel.compress in ("fp16", "powersgd") and c.parallel.strategy not in ("single", "dp", "ddp"),
        "parallel.compress is {c.parallel.compress}, which only ddp knows; strategy is {c.parallel.strategy}",
        "write:   compress: bf16   or   strategy: ddp",
    ),
    Rule(
        "powersgd-in-fp16",
        ("parallel.compress", "train.precision"),
        lambda c: c.parallel.compress == "powersgd" and c.train.precision == "fp16",
        "parallel.compress is powersgd and train.precision is fp16: what it leaves out would keep an old loss scale",
        "write:   precision: bf16   or   compress: fp16",
    ),
    Rule(
        "single-with-backend",
        ("parallel.backend", "parallel.strategy"),
        lambda c: c.parallel.strategy == "single" and c.parallel.backend != "auto",
        "parallel.backend is {c.parallel.backend}, but parallel.strategy single has nobody to talk to",
        "delete backend, or write:   strategy: auto",
    ),
    Rule(
        "timeout-is-forever",
        ("parallel.timeout",),
        lambda c: parse_seconds(c.parallel.timeout) > DAY_S,
        "parallel.timeout is {c.parallel.timeout}, more than a day: a hanging run would hold its machines that long",
        'write for example:   timeout: "10min"',
        is_note=True,
    ),
)
