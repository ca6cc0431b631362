"""The plan of parallel.engine deepspeed: what it holds and sends; promises/test_deepspeed.py counts it in runs."""

import math

import pytest
from test_plan_memory import SHAPE

from duoka.accelerator.settings import check_parallel
from duoka.bench.dry_run import dry_run
from duoka.config.schema import ParallelConfig, RunConfig
from duoka.config.schema_running import DeepSpeedConfig
from duoka.errors import ConfigError
from duoka.plan.layout import Layout
from duoka.plan.memory import estimate_memory
from duoka.plan.recipe import Work, static_memory
from duoka.plan.traffic import traffic

RANKS = 4


def layout(strategy):
    return Layout(dp=RANKS, strategy=strategy, shard=1 if strategy == "ddp" else RANKS)


def work(**switches):
    return Work(SHAPE, None, deepspeed=DeepSpeedConfig(**switches))


LIVE = {"stage3_max_live_parameters": 0}


@pytest.mark.parametrize(
    ("strategy", "per_parameter", "sent", "switches"),
    [
        ("ddp", 16, 2, {}),
        ("zero1", 8 + 12 / RANKS, 3, {}),
        ("zero2", 4 + 16 / RANKS, 2 * 3 + 1, {}),
        ("fsdp", 20 / RANKS, 3 * 3, LIVE),
        ("fsdp", 20 / RANKS, 2 * 3, {}),  # all of it stays gathered for the backward pass
    ],
)
def test_each_stage_holds_and_sends_its_own(strategy, per_parameter, sent, switches):
    own, at = work(**switches), layout(strategy)
    static = static_memory(own, at)
    assert math.isclose(static.total_bytes, per_parameter * SHAPE.num_parameters, rel_tol=1e-6)
    exchanged = sum(one.sent_bytes for one in traffic(own, at, RANKS, accumulation=3))
    assert math.isclose(exchanged, sent * 4 * SHAPE.num_parameters * (RANKS - 1) / RANKS, rel_tol=1e-6)


def test_the_live_window_of_stage_3_is_part_of_the_peak():
    small = estimate_memory(work(stage3_prefetch_bucket_size=0, **LIVE), layout("fsdp"), 64)
    large = estimate_memory(work(), layout("fsdp"), 64)
    assert large.peak_bytes - small.peak_bytes > 0.5 * 4 * (SHAPE.num_parameters - SHAPE.num_embedding)


def test_who_has_not_model_and_optimizer_together_refuses_it():
    with pytest.raises(ConfigError, match="natively in a loop of your own"):
        check_parallel(ParallelConfig(engine="deepspeed", strategy="zero2"), "fp32")
    raw = {"model": "demo", "data": {"train": ["identity"]}, "parallel": {"engine": "deepspeed", "strategy": "zero2"}}
    with pytest.raises(ValueError, match="duoka's own engine"):
        dry_run(RunConfig.model_validate(raw), {}, layout("zero2"), [8])
