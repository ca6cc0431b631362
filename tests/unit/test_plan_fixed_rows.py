"""Rows of exactly data.max_length are computed to their end, filled or not: a plan counts them, auto asks for no more.

The oracle is the loader's own sharing out of a batch.
"""

import numpy as np
import pytest

from duoka.config.schema import RunConfig
from duoka.data.feed.epoch_plan import share_rows
from duoka.plan.catalog import parse_cluster
from duoka.plan.lengths import Lengths
from duoka.plan.report import make_plan
from duoka.plan.shape import shape_from_parameters
from duoka.plan.task import load_of

LENGTH, RANKS = 1024, 8


def run(sizes, **train):
    cluster = parse_cluster(f"{RANKS}xH100-80G")
    facts = {
        "model": "demo", "data": {"train": ["x"], "max_length": LENGTH, "fixed_rows": True},
        "parallel": {"strategy": "ddp"}, "train": {"global_batch": len(sizes), **train},
    }  # fmt: skip
    mean = float(np.mean(sizes))
    lengths = Lengths("tokenized", 100 * len(sizes), mean, max(sizes), tuple(sorted(sizes, reverse=True)))
    return make_plan(
        RunConfig.model_validate(facts), shape_from_parameters(10**9), cluster.machine(), RANKS, local_size=RANKS,
        cluster=cluster, lengths=lengths,
    )  # fmt: skip


def computed(sizes, rows):
    """(tokens that a rank computes in a step, padding included, its micro-batches)."""
    shares = share_rows(np.arange(len(sizes)), np.array(sizes), RANKS, rows, max_length=LENGTH)
    return len(shares[0]) * rows * LENGTH, len(shares[0])


def batch_of(count, mean, seed=0):
    dice = np.random.default_rng(seed)
    return [int(size) for size in np.clip(dice.normal(mean, mean / 3, count), 16, LENGTH)]


@pytest.mark.parametrize("count", [16, 64, 200, 512])
@pytest.mark.parametrize("mean", [100, 300, 700])
def test_auto_asks_for_few_rows_that_stay_empty(count, mean):
    sizes = batch_of(count, mean)
    plan = run(sizes)
    tokens, _ = computed(sizes, plan.layout.micro.count // LENGTH)
    least, _ = computed(sizes, 1)
    assert tokens <= 1.35 * least + LENGTH, f"{plan.layout.micro}: {tokens} computed where {least} would do"


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("mean", [100, 300, 700])
def test_the_plan_counts_what_is_computed(rows, mean):
    sizes = batch_of(256, mean)
    plan = run(sizes, micro_batch=f"{rows * LENGTH} tokens")
    tokens, number = computed(sizes, rows)
    load = load_of(plan.task, plan.layout)
    assert load.tokens == rows * LENGTH
    planned = load.tokens * load.accumulation
    assert 0.95 * tokens <= planned <= 1.25 * tokens, f"{planned:,.0f} planned, {tokens:,} in {number} micro-batches"
    assert plan.speed.tokens_per_step == pytest.approx(sum(sizes))
