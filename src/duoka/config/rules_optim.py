"""Contradictions between the optimizer's settings: rates, warm-up, schedules, what can be offloaded or shared out.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import RunConfig
from duoka.units import Amount, parse_amount, parse_warmup


def _betas_diverge(c: RunConfig) -> bool:
    return c.optim.betas[0] > 0 and c.optim.betas[0] ** 2 >= c.optim.betas[1]


def _warmup_steps(c: RunConfig) -> float:
    """Steps that are written, or that follow from tokens of both; 0 for shares, which always fit."""
    warm, batch = parse_warmup(c.optim.warmup), parse_amount(c.train.global_batch)
    if isinstance(warm, Amount):
        return warm.count / batch.count if batch.unit == "tokens" else 0.0
    return warm if warm >= 1 else 0.0


# Adafactor looks at whole rows and columns; bitsandbytes knows no shards.
WHOLE_WEIGHT_OPTIMIZERS = ("adafactor", "adamw8bit")
RELATIVE = ("lamb", "lars", "adafactor")  # whose rates are shares of a matrix's own size
NO_BITSANDBYTES = "optim.name is adamw8bit, which bitsandbytes computes, and it is not installed here"
GET_BITSANDBYTES = "pip install 'duoka[quant]'   or write:   name: adamw"


def _narrow(c: RunConfig) -> bool:
    return c.train.weights == "bf16"


def _default(c: RunConfig, *names: str) -> bool:
    """Whether keys of optim are what they are where nothing is written; of a new model they follow from its depth."""
    return c.model.depth is not None or all(
        getattr(c.optim, name) == type(c.optim).model_fields[name].default for name in names
    )


def _trains_no_head(c: RunConfig) -> bool:
    if c.lora is None or c.stage.kind.scores:
        return False
    return c.lora.targets == "all" or not any(name.endswith(HEADS) for name in c.lora.targets)


HEADS = ("lm_head", "embed_out", "output_layer")  # as families call them
# What no optimizer or schedule of this config reads: said, and no fault, because overlays and stages hand keys on.
UNREAD_RULES: tuple[Rule, ...] = (
    Rule(
        "decay-without-wsd",
        ("optim.decay", "optim.schedule"),
        lambda c: c.optim.schedule != "wsd" and not _default(c, "decay"),
        "optim.decay is {c.optim.decay:g}, the share of steps in which schedule wsd falls, and optim.schedule is "
        "{c.optim.schedule}: it changes nothing",
        "write   schedule: wsd   or delete decay",
        is_note=True,
    ),
    Rule(
        "momentum-of-others",
        ("optim.momentum", "optim.name"),
        lambda c: c.optim.name not in ("muon", "lars") and not _default(c, "momentum"),
        "optim.momentum is {c.optim.momentum:g}, which Muon and LARS read, and optim.name is {c.optim.name}: it "
        "changes nothing",
        "write   betas: [0.9, 0.999]   for AdamW's averages, or delete momentum",
        is_note=True,
    ),
    Rule(
        "betas-of-others",
        ("optim.betas", "optim.eps", "optim.name"),
        lambda c: c.optim.name in ("lars", "adafactor") and not _default(c, "betas", "eps"),
        "optim.betas {c.optim.betas} and eps {c.optim.eps:g} are AdamW's and LAMB's, and optim.name is "
        "{c.optim.name}: they change nothing",
        "delete betas and eps",
        is_note=True,
    ),
    Rule(
        "rate-of-a-frozen-embedding",
        ("optim.embedding_lr", "lora"),
        lambda c: c.lora is not None and c.optim.embedding_lr is not None,
        "optim.embedding_lr is {c.optim.embedding_lr:g}, and lora leaves the embedding as it is: it changes nothing",
        "delete embedding_lr",
        is_note=True,
    ),
    Rule(
        "rate-of-a-frozen-head",
        ("optim.head_lr", "lora"),
        lambda c: _trains_no_head(c) and c.optim.head_lr is not None,
        "optim.head_lr is {c.optim.head_lr:g}, and lora leaves the head as it is: it changes nothing",
        "delete head_lr, or name the head among lora.targets",
        is_note=True,
    ),
)

OPTIM_RULES: tuple[Rule, ...] = (
    *UNREAD_RULES,
    Rule(
        "narrow-weights-in-wide-passes",
        ("train.weights", "train.precision"),
        lambda c: _narrow(c) and c.train.precision not in ("auto", "bf16"),
        "train.weights is bf16, and train.precision is {c.train.precision}: passes compute in what weights are kept in",
        "write   precision: bf16   or delete weights",
    ),
    Rule(
        "narrow-weights-of-adapters",
        ("train.weights", "lora"),
        lambda c: _narrow(c) and c.lora is not None,
        "train.weights is bf16, and lora trains adapters only: these are small and stay fp32, and the base below them "
        "is bf16 by itself",
        "delete weights, or delete lora to train all weights",
    ),
    Rule(
        "narrow-weights-by-another-optimizer",
        ("train.weights", "optim.name"),
        lambda c: _narrow(c) and c.optim.name != "adamw",
        "train.weights is bf16, and optim.name is {c.optim.name}: only adamw rounds its steps at random, and "
        "rounded to the nearest most of them would be lost",
        "write   name: adamw   or delete weights",
    ),
    Rule(
        "narrow-weights-elsewhere",
        ("train.weights", "parallel.offload", "parallel.engine"),
        lambda c: _narrow(c) and (c.parallel.offloads.moves_anything or c.parallel.engine != "native"),
        "train.weights is bf16, whose steps are made where the model computes; parallel.engine is {c.parallel.engine} "
        "and parallel.offload {c.parallel.offload}",
        "write   engine: native   and   offload: none   or delete weights",
    ),
    Rule(
        "narrow-weights-in-pieces",
        ("train.weights", "parallel.tensor", "parallel.expert"),
        lambda c: _narrow(c) and (c.parallel.tensor > 1 or c.parallel.expert > 1),
        "train.weights is bf16, and parallel.tensor is {c.parallel.tensor}, parallel.expert {c.parallel.expert}: how a "
        "number is rounded is counted by its place in whole rows, which these cut or hand out",
        "write   tensor: 1   and   expert: 1   (fsdp shares the memory too), or delete weights",
    ),
    Rule(
        "narrow-weights-compressed",
        ("train.weights", "parallel.compress"),
        lambda c: _narrow(c) and c.parallel.compression.changes_anything,
        "train.weights is bf16, and so are gradients; parallel.compress is {c.parallel.compress} beside it",
        "write   compress: none   or delete weights",
    ),
    Rule(
        "warmup-eats-the-run",
        ("optim.warmup", "train.max_steps"),
        lambda c: c.train.max_steps is not None and 1 <= c.train.max_steps <= _warmup_steps(c),
        "optim.warmup is {c.optim.warmup}, but train.max_steps ends the run after {c.train.max_steps}: "
        "the learning rate would never come down from its climb",
        "write a share, such as   warmup: 0.03   or fewer steps than max_steps",
    ),
    Rule(
        "warmup-is-not-whole",
        ("optim.warmup",),
        lambda c: not isinstance(c.optim.warmup, str) and c.optim.warmup > 1 and c.optim.warmup % 1 != 0,
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
        "muon-scale-without-muon",
        ("optim.muon_scale", "optim.name"),
        lambda c: c.optim.name != "muon" and c.optim.muon_scale != "shape",
        "optim.muon_scale says how far Muon moves a matrix, but optim.name is {c.optim.name}",
        "write   name: muon   or delete muon_scale",
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
        lambda c: c.optim.name != "adamw" and c.parallel.offloads.moves_anything,
        "parallel.offload is {c.parallel.offload}, which AdamW's state only can follow; optim.name is {c.optim.name}",
        "write   name: adamw   or   offload: none",
    ),
    Rule(
        "optimizer-needs-whole-weights",
        ("optim.name", "parallel.strategy"),
        lambda c: (
            c.optim.name in WHOLE_WEIGHT_OPTIMIZERS and c.parallel.strategy not in ("auto", "single", "dp", "ddp")
        ),
        "optim.name is {c.optim.name}, which works on whole tensors, and parallel.strategy {c.parallel.strategy} "
        "shares them out",
        "write   strategy: ddp   (its own state is small), or another optimizer",
    ),
    Rule(
        "dft-with-smoothing",
        ("train.loss", "train.label_smoothing"),
        lambda c: c.train.loss == "dft" and c.train.label_smoothing > 0,
        "train.loss is dft, which weighs each token's loss with its own probability, and train.label_smoothing "
        "{c.train.label_smoothing:g} spreads targets over all tokens",
        "keep one of them",
    ),
    Rule(
        "state-of-new-weights",
        ("optim.state",),
        lambda c: c.optim.state is not None and (c.lora is not None or c.model.depth is not None),
        "optim.state is {c.optim.state!r}, the optimizer state of weights that were trained before, and what is "
        "trained here (adapters, or a model from nothing) is new",
        "delete optim.state, or train all weights of the run before, as in   model: runs/base",
    ),
    Rule(
        "rate-of-adamw",
        ("optim.name", "optim.lr"),
        lambda c: c.optim.name in RELATIVE and c.optim.lr <= 1e-4 and c.model.depth is None,
        "optim.name is {c.optim.name}, which moves a matrix by about lr times its own size (lars: by a thousandth of "
        "that), and optim.lr {c.optim.lr:g} is a rate for adamw: it would hardly learn",
        "write for example   lr: 0.01   (lars: lr: 2), or   name: adamw",
        is_note=True,
    ),
    Rule(
        "lr-is-no-rate",
        ("optim.lr",),
        lambda c: c.optim.lr > 1 and c.optim.name != "lars",
        "optim.lr is {c.optim.lr:g}: {c.optim.name} moves each weight by about lr, or by that share of it, at every "
        "step",
        "write for example:   lr: 2.0e-5   (lamb, adafactor: 0.01)",
    ),
    Rule(
        "betas-diverge",
        ("optim.betas",),
        _betas_diverge,
        "optim.betas are {c.optim.betas}: AdamW diverges when the first, squared, is not below the second",
        "write for example:   betas: [0.9, 0.999]   (the second is the slower average)",
    ),
)
