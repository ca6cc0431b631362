"""What spans several keys: settings that contradict each other, as one table, all rows evaluated.

`load.py` calls `check_rules`. A row knows the config only; what depends on files, models or the machine is checked
by the rooms that know those.
"""

from __future__ import annotations

import os

from duoka.config.rule import Rule, names_of
from duoka.config.rules_text import TEXT_RULES
from duoka.config.schema import RunConfig
from duoka.config.write import leaves
from duoka.units import parse_amount, parse_seconds

__all__ = ["RULES", "Rule", "check_rules"]

DAY_S = 86_400.0
_NO_FOLDERS = ("", "no", "off", "none", "false", "yes", "on", "true", "latest", "last", "always")


def check_rules(config: RunConfig, skipped_keys: set[str] | frozenset[str] = frozenset()) -> list[Rule]:
    """Every rule that the config breaks, leaving out those about keys that were refused already."""
    return [rule for rule in RULES if not skipped_keys.intersection(rule.keys) and rule.is_broken(config)]


def _max_length_is_more_than_the_batch(c: RunConfig) -> bool:
    batch = parse_amount(c.train.global_batch)
    return batch.unit == "tokens" and batch.count < c.data.max_length


def _micro_is_more_than_global(c: RunConfig) -> bool:
    if c.train.micro_batch == "auto":
        return False
    micro, batch = parse_amount(c.train.micro_batch), parse_amount(c.train.global_batch)
    return micro.unit == batch.unit and micro.count > batch.count


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _bad_output(c: RunConfig) -> bool:
    path = os.path.normpath(os.path.expanduser(c.output))
    return bool(c.output) and path in (".", "..", "/", os.path.expanduser("~"))


def _betas_diverge(c: RunConfig) -> bool:
    return c.optim.betas[0] > 0 and c.optim.betas[0] ** 2 >= c.optim.betas[1]


def _lora_scale_is_odd(c: RunConfig) -> bool:
    return c.lora is not None and not 1e-3 <= c.lora.alpha / c.lora.rank <= 1e3


def _lora_names(c: RunConfig) -> tuple[str, ...]:
    return c.lora.targets if c.lora is not None and isinstance(c.lora.targets, tuple) else ()


def _strategy_is(c: RunConfig, *names: str) -> bool:
    return c.parallel.strategy in ("auto", *names)


_DDP_DEFAULTS = {"find_unused_parameters": False, "bucket_view": True, "static_graph": False, "bucket_mb": 25.0}


def ddp_settings(c: RunConfig) -> list[str]:
    """Keys that were set and that only ddp knows: with `strategy: auto` they are a wish for ddp."""
    found = [f"parallel.{name}" for name, value in _DDP_DEFAULTS.items() if getattr(c.parallel, name) != value]
    return found + (["parallel.compress"] if c.parallel.compress in ("fp16", "powersgd") else [])


RULES: tuple[Rule, ...] = (
    Rule(
        "warmup-eats-the-run",
        ("optim.warmup", "train.max_steps"),
        lambda c: c.train.max_steps is not None and 1 <= c.train.max_steps <= c.optim.warmup,
        "optim.warmup is {c.optim.warmup:g} steps, but train.max_steps ends the run after {c.train.max_steps}: "
        "the learning rate would never come down from its climb",
        "write a share, such as   warmup: 0.03   or fewer steps than max_steps",
    ),
    Rule(
        "warmup-is-not-whole",
        ("optim.warmup",),
        lambda c: c.optim.warmup > 1 and c.optim.warmup != int(c.optim.warmup),
        "optim.warmup is {c.optim.warmup:g}: from 1 on it counts steps, and a step is whole",
        "write whole steps, such as   warmup: 100   or a share below 1, such as   warmup: 0.03",
    ),
    Rule(
        "min-lr-without-decay",
        ("optim.min_lr", "optim.schedule"),
        lambda c: c.optim.schedule == "constant" and c.optim.min_lr > 0,
        "optim.min_lr is {c.optim.min_lr:g}, but a constant schedule never goes down to it",
        "delete min_lr, or write:   schedule: cosine",
    ),
    Rule(
        "lr-scaling-without-a-batch",
        ("optim.lr_scaling", "optim.lr_batch"),
        lambda c: (c.optim.lr_scaling == "none") != (c.optim.lr_batch is None),
        "optim.lr_scaling is {c.optim.lr_scaling} and optim.lr_batch is {c.optim.lr_batch}: the two belong together, "
        "the rule and the batch that lr was found for",
        "write both, for example   lr_scaling: sqrt   and   lr_batch: 64   or neither",
    ),
    Rule(
        "lr-batch-in-another-unit",
        ("optim.lr_batch", "train.global_batch"),
        lambda c: (
            c.optim.lr_batch is not None
            and parse_amount(c.optim.lr_batch).unit != parse_amount(c.train.global_batch).unit
        ),
        "optim.lr_batch is {c.optim.lr_batch} and train.global_batch is {c.train.global_batch}: "
        "samples and tokens can't be compared",
        "write both in samples, or both in tokens",
    ),
    Rule(
        "muon-knows-no-rate-for-the-rest",
        ("optim.name",),
        lambda c: c.optim.name == "muon" and c.optim.adamw_lr is None and c.lora is None,
        "optim.name is muon, and optim.lr ({c.optim.lr:g}) is the rate of the layers' matrices only: embedding, head, "
        "norms and biases learn by AdamW, at a rate of their own",
        "write it too, for example:   lr: 0.02   and   adamw_lr: 3.0e-4",
    ),
    Rule(
        "adamw-lr-without-muon",
        ("optim.adamw_lr", "optim.name"),
        lambda c: c.optim.name != "muon" and c.optim.adamw_lr is not None,
        "optim.adamw_lr is the rate of what AdamW trains beside Muon, but optim.name is {c.optim.name}",
        "write   name: muon   or delete adamw_lr (lr is the rate)",
    ),
    Rule(
        "muon-in-fp16",
        ("optim.name", "train.precision"),
        lambda c: c.optim.name == "muon" and c.train.precision == "fp16",
        "optim.name is muon and train.precision is fp16: what overflows there is seen by the owner of a matrix only",
        "write   precision: bf16   or fp32",
    ),
    Rule(
        "optimizer-is-not-offloaded",
        ("optim.name", "parallel.offload"),
        lambda c: c.optim.name != "adamw" and c.parallel.offload != "none",
        "parallel.offload is {c.parallel.offload}, which AdamW's state only can follow; optim.name is {c.optim.name}",
        "write   name: adamw   or   offload: none",
    ),
    Rule(
        "adafactor-needs-whole-weights",
        ("optim.name", "parallel.strategy"),
        lambda c: c.optim.name == "adafactor" and not _strategy_is(c, "single", "dp", "ddp"),
        "optim.name is adafactor, which looks at whole rows and columns, and {c.parallel.strategy} shares matrices out",
        "write   strategy: ddp   (Adafactor's own state is small), or another optimizer",
    ),
    Rule(
        "lr-is-no-rate",
        ("optim.lr",),
        lambda c: c.optim.lr > 1 and c.optim.name != "lars",
        "optim.lr is {c.optim.lr:g}: {c.optim.name} moves each weight by about lr at every step",
        "write for example:   lr: 2.0e-5",
    ),
    Rule(
        "betas-diverge",
        ("optim.betas",),
        _betas_diverge,
        "optim.betas are {c.optim.betas}: AdamW diverges when the first, squared, is not below the second",
        "write for example:   betas: [0.9, 0.999]   (the second is the slower average)",
    ),
    Rule(
        "batch-below-one-sample",
        ("train.global_batch", "data.max_length"),
        _max_length_is_more_than_the_batch,
        'train.global_batch is "{c.train.global_batch}", but one conversation may have data.max_length = '
        "{c.data.max_length} tokens and would not fit into a batch",
        "write a larger global_batch, or a smaller max_length",
    ),
    Rule(
        "micro-above-global",
        ("train.micro_batch", "train.global_batch"),
        _micro_is_more_than_global,
        "train.micro_batch ({c.train.micro_batch}) is more than train.global_batch ({c.train.global_batch}): "
        "one rank would compute at once more than a whole step holds",
        "write:   micro_batch: auto   or a larger global_batch",
    ),
    Rule(
        "eval-every-without-eval",
        ("train.eval_every", "data.eval"),
        lambda c: not c.data.eval and c.train.eval_every != "1 epoch",
        "train.eval_every is {c.train.eval_every}, but data.eval is 0: there is nothing to evaluate",
        "write:   eval: 0.1   under data:, or delete eval_every",
    ),
    Rule(
        "train-set-twice",
        ("data.train",),
        lambda c: len(set(names_of(c.data.train))) < len(c.data.train),
        "data.train names a data set twice: its samples would be learned twice in every epoch",
        "name it once; train.epochs says how often all is seen, a weight how much a set counts",
    ),
    Rule(
        "eval-set-twice",
        ("data.eval",),
        lambda c: len(set(names_of(c.data.eval))) < len(names_of(c.data.eval)),
        "data.eval names a data set twice: its samples would be measured twice",
        "name it once",
    ),
    Rule(
        "eval-on-train",
        ("data.eval", "data.train"),
        lambda c: bool(set(names_of(c.data.train)) & set(names_of(c.data.eval))),
        "data.eval names a data set that data.train learns: its loss would say nothing about new data",
        "write:   eval: 0.1   to hold a tenth of train back, or name another set",
    ),
    Rule(
        "eval-weight",
        ("data.eval",),
        lambda c: isinstance(c.data.eval, tuple) and any(source.weight is not None for source in c.data.eval),
        "data.eval gives a weight: an evaluation counts every sample once",
        "delete the weight",
    ),
    Rule(
        "fixed-rows-are-packed",
        ("data.fixed_rows", "data.packing", "parallel.strategy"),
        lambda c: c.data.fixed_rows and (not c.data.packing or c.parallel.strategy == "dp"),
        "data.fixed_rows packs samples into rows, but data.packing is {c.data.packing} and parallel.strategy is "
        "{c.parallel.strategy}",
        "delete fixed_rows, or write:   packing: true   (and not strategy: dp, which pads)",
    ),
    Rule(
        "lora-without-targets",
        ("lora.targets",),
        lambda c: c.lora is not None and c.lora.targets == (),
        "lora.targets is empty: nothing would be trained",
        "write:   targets: all   or for example   targets: [q_proj, v_proj]",
    ),
    Rule(
        "lora-all-in-a-list",
        ("lora.targets",),
        lambda c: "all" in _lora_names(c),
        "lora.targets lists all beside or as a module's name",
        "write:   targets: all   without brackets",
    ),
    Rule(
        "lora-target-twice",
        ("lora.targets",),
        lambda c: len(set(_lora_names(c))) < len(_lora_names(c)),
        "lora.targets names a module twice",
        "name it once",
    ),
    Rule(
        "lora-target-is-no-name",
        ("lora.targets",),
        lambda c: any(not name.strip() or "," in name or name != name.strip() for name in _lora_names(c)),
        "lora.targets has an entry that is no module's name",
        "write for example:   targets: [q_proj, v_proj]",
    ),
    Rule(
        "lora-scale",
        ("lora.alpha", "lora.rank"),
        _lora_scale_is_odd,
        "lora.alpha is {c.lora.alpha:g} with lora.rank {c.lora.rank}: adapters count alpha / rank, "
        "and that is no useful number here",
        "alpha is usually one or two times the rank:   alpha: 16",
    ),
    Rule(
        "lora-and-train-only",
        ("train_only", "lora"),
        lambda c: c.train_only is not None and c.lora is not None,
        "lora and train_only are both given: one trains adapters beside frozen weights, the other some of the weights",
        "delete one of the two blocks",
    ),
    Rule(
        "train-only-nothing",
        ("train_only.layers", "train_only"),
        lambda c: c.train_only is not None and c.train_only.layers in (0, ()) and not c.train_only.extra,
        "train_only names no layer and no module: nothing would be trained",
        "write for example:   layers: 2",
    ),
    Rule(
        "spread-of-named-layers",
        ("train_only.spread", "train_only.layers"),
        lambda c: (
            c.train_only is not None
            and c.train_only.spread
            and not (isinstance(c.train_only.layers, int) and c.train_only.layers > 0)
        ),
        "train_only.spread needs a number of layers to spread, and layers is {c.train_only.layers}",
        "write for example:   layers: 8",
    ),
    Rule(
        "ddp-settings-without-ddp",
        ("parallel.strategy", *(f"parallel.{name}" for name in _DDP_DEFAULTS)),
        lambda c: (
            not _strategy_is(c, "ddp")
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
        "single-with-backend",
        ("parallel.backend", "parallel.strategy"),
        lambda c: c.parallel.strategy == "single" and c.parallel.backend != "auto",
        "parallel.backend is {c.parallel.backend}, but parallel.strategy single has nobody to talk to",
        "delete backend, or write:   strategy: auto",
    ),
    Rule(
        "revision-of-no-hub-model",
        ("model.revision", "model.name"),
        lambda c: c.model.revision is not None and (c.model.name == "demo" or _is_path(c.model.name)),
        "model.revision is {c.model.revision}, but {c.model.name} comes from no Hub and has no revisions",
        "delete revision",
    ),
    Rule(
        "resume-is-a-switch",
        ("checkpoint.resume",),
        lambda c: c.checkpoint.resume.strip().lower() in _NO_FOLDERS,
        'checkpoint.resume is "{c.checkpoint.resume}", which is neither auto, nor never, nor a folder',
        "write:   resume: auto   to go on from the newest checkpoint, or   resume: never",
    ),
    Rule(
        "keep-best-of-nothing",
        ("checkpoint.keep_best", "data.eval"),
        lambda c: c.checkpoint.keep_best and not c.data.eval,
        "checkpoint.keep_best is on, but data.eval is 0: nothing says which checkpoint is the best",
        "write:   eval: 0.1   under data:, or delete keep_best",
    ),
    Rule(
        "allowed-change-of-no-key",
        ("checkpoint.allow_changes",),
        lambda c: bool(set(c.checkpoint.allow_changes) - set(leaves(c)) - set(type(c).model_fields)),
        "checkpoint.allow_changes names what is no key: {c.checkpoint.allow_changes}",
        "write keys with their block, such as   allow_changes: [optim.lr]",
    ),
    Rule(
        "output-is-a-shared-folder",
        ("output",),
        _bad_output,
        "output is {c.output}: a run needs a folder of its own",
        "write for example:   output: runs/identity",
    ),
    Rule(
        "timeout-is-forever",
        ("parallel.timeout",),
        lambda c: parse_seconds(c.parallel.timeout) > DAY_S,
        "parallel.timeout is {c.parallel.timeout}, more than a day: a hanging run would hold its machines that long",
        'write for example:   timeout: "10min"',
        is_note=True,
    ),
    *TEXT_RULES,
)
