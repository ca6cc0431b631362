"""Contradictions between 8-bit products (`train.precision: fp8`) and other settings.

A part of the table in rules.py, which evaluates it. Whether the machine has such products, plan/choose.py knows.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import RunConfig
from duoka.config.schema_running import SPLIT

_BF16 = "write:   precision: bf16"


def _is_on(c: RunConfig) -> bool:
    return c.train.precision == "fp8"


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        "fp8-with-adapters",
        ("train.precision", "lora"),
        lambda c: _is_on(c) and c.lora is not None,
        "train.precision is fp8, and the block lora asks for adapters: their products are made together with those of "
        "the frozen weights, in 16 bits",
        f"{_BF16}   or delete the block lora",
    ),
    Rule(
        "fp8-with-tensor",
        ("train.precision", "parallel.tensor"),
        lambda c: _is_on(c) and c.parallel.tensor > 1,
        "train.precision is fp8, whose scale is one for a whole matrix, and parallel.tensor {c.parallel.tensor} gives "
        "each rank a part of it",
        f"{_BF16}   or delete tensor: (strategy fsdp shares weights too)",
    ),
    Rule(
        "fp8-with-expert",
        ("train.precision", "parallel.expert"),
        lambda c: _is_on(c) and c.parallel.expert > 1,
        "train.precision is fp8, which experts have no products in, and parallel.expert {c.parallel.expert} shares "
        "experts out: the two have not been tried together",
        f"{_BF16}   or delete expert:",
    ),
    Rule(
        "fp8-with-split-passes",
        ("train.precision", "parallel.schedule"),
        lambda c: _is_on(c) and c.parallel.pipeline > 1 and c.parallel.schedule in SPLIT,
        "train.precision is fp8, and parallel.schedule is {c.parallel.schedule}, which computes weights' gradients "
        "later: 8-bit products give both at once",
        f"write:   schedule: 1f1b   or   {_BF16[9:]}",
    ),
    Rule(
        "fp8-with-deepspeed",
        ("train.precision", "parallel.engine"),
        lambda c: _is_on(c) and c.parallel.engine == "deepspeed",
        "train.precision is fp8, and parallel.engine is deepspeed, which moves the weights of modules that it knows",
        f"{_BF16}   or   engine: native",
    ),
    Rule(
        "fp8-with-rollouts",
        ("train.precision", "stage"),
        lambda c: _is_on(c) and c.stage.name == "rl",
        "train.precision is fp8, and stage rl draws answers: rows that are drawn together share a scale, and the "
        "policy that draws must be the one that learns",
        _BF16,
    ),
)
