"""Rates for weights that this model does not have, or does not train, are named by the plan."""

from dataclasses import replace

import pytest

from duoka.config.schema import RunConfig
from duoka.plan.hardware import Machine
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

CPU = Machine(num_cores=8, memory_bytes=64 << 30, available_bytes=60 << 30)


@pytest.mark.parametrize(
    ("shape", "sections", "said"),
    [
        ({"tied": True}, {"optim": {"head_lr": 0.01}}, ["this model's head is its embedding"]),
        ({"tied": False}, {"optim": {"head_lr": 0.01}}, []),
        ({"tied": False}, {"optim": {"embedding_lr": 0.01}, "train_only": {"layers": 2}}, ["leaves the embedding"]),
        ({"tied": False}, {"optim": {"head_lr": 0.01}, "train_only": {"layers": 2}}, ["leaves the head"]),
        ({"tied": False}, {"optim": {"head_lr": 0.01}, "train_only": {"layers": 2, "extra": ["lm_head"]}}, []),
        ({"tied": True}, {"optim": {"embedding_lr": 0.01}, "train_only": {"layers": 2, "extra": ["lm_head"]}}, []),
    ],
)
def test_rates_that_no_weight_of_this_model_has_are_named(shape, sections, said):
    plan = make_plan(
        RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, **sections}),
        replace(demo_shape(), **shape),
        CPU,
        1,
    )
    found = [line for line in plan.warnings if "_lr is 0.01" in line]
    assert len(found) == len(said) and all(word in line for word, line in zip(said, found, strict=True)), found
