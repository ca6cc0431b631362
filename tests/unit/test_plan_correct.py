"""After memory ran out: what is tried next follows from what was seen, not from halving blindly."""

import bisect

import pytest

from duoka.plan.correct import Shortfall, correct_plan, counted_bytes
from duoka.plan.layout import Layout
from duoka.plan.memory import estimate_memory
from duoka.plan.recipe import Work
from duoka.plan.shape import demo_shape

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
