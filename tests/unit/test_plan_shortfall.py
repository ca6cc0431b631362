"""After memory ran out: what is tried next follows from what was seen, not from halving blindly."""

import bisect

import pytest

from duoka.config.schema import RunConfig
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.memory import estimate_memory
from duoka.plan.recipe import Work
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
from duoka.plan.shortfall import Shortfall, correct_plan, counted_bytes, plan_with_less
from duoka.units import Amount

GIB = 2**30
WORK, LAYOUT = Work(demo_shape(), None, "cuda"), Layout(precision="bf16")


def real_need(tokens, factor):
    """A world in which the estimated part takes `factor` times what the plan thinks."""
    memory = estimate_memory(WORK, LAYOUT, tokens)
    fixed = counted_bytes(memory)
    return fixed + factor * (memory.peak_bytes - fixed)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("room", [6 * GIB, 20 * GIB])
def test_what_is_tried_next_soon_fits_and_is_not_far_too_small(factor, room):
    """Tokens that just fit are between a third of it and all of what was found, after three trials at most."""
    best = bisect.bisect_right(range(200_000), room, key=lambda tokens: real_need(tokens, factor)) - 1
    for first in (1.05, 1.5, 3, 8):
        tokens, trials = int(first * best), 0
        while real_need(tokens, factor) > room:
            seen = Shortfall(tokens, room, min(int(real_need(tokens, factor)), int(1.2 * room)))
            tokens, trials = correct_plan(WORK, LAYOUT, seen).tokens, trials + 1
        assert trials <= 4 and tokens > best / 3, (first, tokens, best, trials)


def test_less_room_than_planned_for_is_met_in_one_trial():
    """Another program took the memory: the plan is right, and says at once what fits in what is left."""
    tokens = 32768
    room = int(real_need(4096, 1.0) / 0.88)
    found = correct_plan(WORK, LAYOUT, Shortfall(tokens, room))
    assert found.factor == 1.0 and found.tokens == 4096, found
    assert "were not enough" in found.sentence()


def test_a_near_miss_takes_half_and_counts_more_from_then_on():
    found = correct_plan(WORK, LAYOUT, Shortfall(4096, int(real_need(4096, 1.0))))
    assert found.tokens == 2048 and found.factor == pytest.approx(1.1, rel=1e-3)


def test_nothing_fits_and_the_smallest_is_tried():
    assert correct_plan(WORK, LAYOUT, Shortfall(4096, GIB)).tokens == 128


def test_a_plan_that_memory_proved_wrong_is_the_same_run_with_less_at_once():
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"], "max_length": 512}})
    before = make_plan(config, demo_shape(), Machine(2, 64 * GIB, 60 * GIB), 1)
    after = plan_with_less(before, 1024, ran_out_at=before.memory.tokens)
    assert after.layout.micro == Amount(1024, "tokens") and after.memory.tokens == after.batch.tokens_at_once == 1024
    assert after.memory.peak_bytes < before.memory.peak_bytes and after.batch.accumulation > before.batch.accumulation
    assert "memory ran out with" in after.warnings[-1] and "were not enough" in after.warnings[-1]
    assert plan_with_less(before, 1024).warnings == before.warnings
