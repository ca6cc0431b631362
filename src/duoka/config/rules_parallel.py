"""Contradictions between a strategy and its settings: what only ddp, fsdp or hsdp know.

A part of the table in rules.py, which evaluates it; the planner asks `ddp_settings` what was wished for.
"""

from __future__ import annotations

from duoka.config.layout_name import read_layout_name
from duoka.config.rule import Rule
from duoka.config.schema import RunConfig
from duoka.units import parse_seconds

DAY_S = 86_400.0
_DDP_DEFAULTS = {"find_unused_parameters": False, "bucket_view": True, "static_graph": False, "bucket_mb": 25.0}


def ddp_settings(c: RunConfig) -> list[str]:
    """Keys that were set and that only ddp knows: with `strategy: auto` they are a wish for ddp."""
    found = [f"parallel.{name}" for name, value in _DDP_DEFAULTS.items() if getattr(c.parallel, name) != value]
    return found + (["parallel.compress"] if c.parallel.compression.gradients in ("fp16", "powersgd") else [])


def sharing_settings(c: RunConfig) -> list[str]:
    """Keys that were set and that only strategies which share state know: with `strategy: auto` a wish for these."""
    found = [] if c.parallel.offloads.params == "none" else ["parallel.offload.params"]
    found += [] if c.parallel.reshard is True else ["parallel.reshard"]
    return found + (["parallel.compress"] if _is_packed(c) else [])


def _is_packed(c: RunConfig) -> bool:
    return bool(c.parallel.compression.weight_bits or c.parallel.compression.gradient_bits)


def _other_than_layout(c: RunConfig) -> bool:
    """Keys beside `layout` that say something else than it does."""
    if c.parallel.layout is None:
        return False
    meant = read_layout_name(c.parallel.layout).meant()
    strategy = "fsdp" if c.parallel.strategy == "zero3" else c.parallel.strategy
    return strategy != meant.pop("strategy") or any(getattr(c.parallel, key) != value for key, value in meant.items())


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "layout-against-its-keys",
        ("parallel.layout", *(f"parallel.{key}" for key in read_layout_name("tp2").meant())),
        _other_than_layout,
        "parallel.layout is {c.parallel.layout}, and another key of parallel: says otherwise",
        "keep the layout, or delete it and keep strategy, tensor, pipeline, sequence and shard_ranks",
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
        "settings-of-ddp-and-of-sharing",
        ("parallel.strategy", "parallel.offload", "parallel.reshard", "parallel.compress"),
        lambda c: c.parallel.strategy == "auto" and bool(ddp_settings(c)) and bool(sharing_settings(c)),
        "parallel.strategy is auto, and of what is set some is for ddp only (find_unused_parameters, static_graph, "
        "bucket_mb, bucket_view, compress: fp16 or powersgd), and some for what shares state (reshard, packed compress "
        "and offloaded params)",
        "keep the settings of one of them, and write its name:   strategy: ddp   or   strategy: fsdp",
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
        "compile-with-sequence",
        ("parallel.sequence", "train.compile"),
        lambda c: c.parallel.sequence > 1 and bool(c.train.compile),
        "train.compile is on and parallel.sequence is {c.parallel.sequence}: layers that exchange are not compiled",
        "write:   compile: false",
    ),
    Rule(
        "reshard-without-fsdp",
        ("parallel.reshard", "parallel.strategy"),
        lambda c: c.parallel.reshard is not True and c.parallel.strategy not in ("auto", "zero3", "fsdp", "hsdp"),
        "parallel.reshard is {c.parallel.reshard}, which only fsdp and hsdp know; strategy is {c.parallel.strategy}",
        "delete it, or write:   strategy: fsdp",
    ),
    Rule(
        "offload-params-of-whole-models",
        ("parallel.offload", "parallel.strategy"),
        lambda c: (
            c.parallel.offloads.params == "host"  # of a disk the next rule says more
            and c.parallel.strategy not in ("auto", "zero1", "zero2", "zero3", "fsdp", "hsdp")
        ),
        "parallel.offload is params, which needs a strategy that gathers weights when they are used; "
        "strategy is {c.parallel.strategy}",
        "write:   strategy: fsdp   (on one process too), or   offload: optimizer",
    ),
    Rule(
        "offload-params-to-disk-of-whole-models",
        ("parallel.offload", "parallel.strategy"),
        lambda c: c.parallel.offloads.params == "disk" and c.parallel.strategy not in ("auto", "zero3", "fsdp", "hsdp"),
        "parallel.offload has params: disk, which zero3 and hsdp know, as they gather a layer at a time; strategy is "
        "{c.parallel.strategy}",
        "write:   strategy: zero3   (on one process too), or   offload: {optimizer: disk}",
    ),
    Rule(
        "offload-params-deeper-than-optimizer",
        ("parallel.offload",),
        lambda c: c.parallel.offloads.params == "disk" and c.parallel.offloads.optimizer == "host",
        "parallel.offload has params: disk and optimizer: host: what is larger and needed less often goes first",
        "write:   offload: {params: disk}   (the optimizer's state goes along)",
    ),
    Rule(
        "offload-params-to-disk-unresharded",
        ("parallel.offload", "parallel.reshard"),
        lambda c: c.parallel.offloads.params == "disk" and c.parallel.reshard is False,
        "parallel.offload has params: disk and parallel.reshard is false, which keeps all weights gathered in memory",
        "delete reshard",
    ),
    Rule(
        "offload-share-of-nothing-or-of-weights",
        ("parallel.offload.share", "parallel.offload"),
        lambda c: (
            c.parallel.offloads.share < 1
            and (c.parallel.offloads.optimizer == "none" or c.parallel.offloads.params != "none")
        ),
        "parallel.offload.share is {c.parallel.offloads.share}, and is a share of the optimizer's state alone; "
        "offload is {c.parallel.offloads}",
        "write:   offload: {optimizer: host, share: 0.5}   or delete share",
    ),
    Rule(
        "offload-activations-of-selective",
        ("parallel.offload", "train.recompute"),
        lambda c: c.parallel.offloads.activations != "none" and c.train.recompute == "selective",
        "parallel.offload has activations: {c.parallel.offloads.activations} and train.recompute is selective, which "
        "keeps what it keeps by itself",
        "write:   recompute: none   (all is moved), or   full   (each layer's input is)",
    ),
    Rule(
        "offload-activations-of-compiled-layers",
        ("parallel.offload", "train.compile"),
        lambda c: c.parallel.offloads.activations != "none" and bool(c.train.compile),
        "parallel.offload has activations: {c.parallel.offloads.activations} and train.compile is on: compiled "
        "layers keep what they choose",
        "write:   compile: false",
    ),
    Rule(
        "offload-activations-of-stages-or-dp",
        ("parallel.offload", "parallel.pipeline", "parallel.strategy", "parallel.engine"),
        lambda c: (
            c.parallel.offloads.activations != "none"
            and (c.parallel.pipeline > 1 or c.parallel.strategy == "dp" or c.parallel.engine == "deepspeed")
        ),
        "parallel.offload has activations: {c.parallel.offloads.activations}, which a pipeline, strategy dp and "
        "DeepSpeed do not know: others than one micro-batch of one model pass the layers there",
        "write:   recompute: full   in place of it, or strategy: ddp without a pipeline",
    ),
    Rule(
        "offload-folder-without-disk",
        ("parallel.offload.folder", "parallel.offload"),
        lambda c: c.parallel.offloads.folder is not None and not c.parallel.offloads.uses_disk,
        "parallel.offload.folder is {c.parallel.offloads.folder}, and nothing is offloaded to a disk",
        "write:   optimizer: disk   or delete folder",
    ),
    Rule(
        "compress-without-exchange",
        ("parallel.compress", "parallel.strategy"),
        lambda c: c.parallel.compression.changes_anything and c.parallel.strategy in ("single", "dp"),
        "parallel.compress is {c.parallel.compress}, but strategy {c.parallel.strategy} exchanges no gradients",
        "delete it, or write:   strategy: ddp",
    ),
    Rule(
        "compress-of-ddp-only",
        ("parallel.compress", "parallel.strategy"),
        lambda c: (
            c.parallel.compression.gradients in ("fp16", "powersgd")
            and c.parallel.strategy not in ("single", "dp", "ddp")
        ),
        "parallel.compress is {c.parallel.compress}, which only ddp knows; strategy is {c.parallel.strategy}",
        "write:   compress: bf16   or   strategy: ddp",
    ),
    Rule(
        "packed-exchange-of-shards-only",
        ("parallel.compress", "parallel.strategy"),
        lambda c: _is_packed(c) and c.parallel.strategy not in ("auto", "zero1", "zero2", "zero3", "fsdp"),
        "parallel.compress is {c.parallel.compress}, which zero1, zero2 and zero3 know; strategy is "
        "{c.parallel.strategy}",
        "write:   strategy: zero3   or   compress: bf16",
    ),
    Rule(
        "packed-exchange-with-tensor",
        ("parallel.compress", "parallel.tensor"),
        lambda c: _is_packed(c) and c.parallel.tensor > 1,
        "parallel.compress is {c.parallel.compress}, and parts of matrices, which parallel.tensor {c.parallel.tensor} "
        "cuts, travel as they are",
        "delete compress, or tensor",
    ),
    Rule(
        "packed-exchange-with-muon",
        ("parallel.compress", "optim.name"),
        lambda c: _is_packed(c) and c.optim.name == "muon",
        "parallel.compress is {c.parallel.compress}, and optim.name muon exchanges matrices in a way of its own",
        "write:   name: adamw   or   compress: bf16",
    ),
    Rule(
        "packed-exchange-of-frozen-weights",
        ("parallel.compress", "lora", "train_only"),
        lambda c: c.parallel.compression.weights != "none" and (c.lora is not None or c.train_only is not None),
        "parallel.compress has weights: {c.parallel.compression.weights}, and small trained weights would share scales "
        "with the frozen ones beside them, which round them away",
        "write:   strategy: zero1   and delete weights: it never exchanges frozen ones",
    ),
    Rule(
        "powersgd-in-fp16",
        ("parallel.compress", "train.precision"),
        lambda c: c.parallel.compression.gradients == "powersgd" and c.train.precision == "fp16",
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
