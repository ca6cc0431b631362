"""A step is as long as its fullest rank's, and exchanges once for each of that rank's micro-batches."""

from dataclasses import replace

import pytest

from duoka.plan.catalog import parse_cluster
from duoka.plan.layout import parse_layout
from duoka.plan.recipe import Work
from duoka.plan.shape import shape_from_parameters
from duoka.plan.speed import estimate_speed
from duoka.plan.task import Task, load_of
from duoka.units import Amount

WORK = Work(shape_from_parameters(1e9), None, "cuda")
EIGHT = replace(parse_layout("fsdp8"), precision="bf16")


def dealt(samples, ranks, length, micro):
    """By hand, sample after sample: (tokens of the rank with most, its micro-batches of up to `micro` tokens)."""
    own = [0] * ranks
    for sample in range(samples):
        own[sample % ranks] += 1
    rows, full = 1, 0
    for _ in range(max(own)):
        if full and full + length > micro:
            rows, full = rows + 1, 0
        full += length
    return max(own) * length, rows


@pytest.mark.parametrize("samples", [8, 9, 10, 16, 24, 64, 100, 256])
@pytest.mark.parametrize(("length", "micro"), [(1024, 1024), (1024, 4096), (1024, 16384), (1000, 4096), (2048, 3000)])
def test_exchanges_are_as_many_as_micro_batches_of_the_fullest_rank(samples, length, micro):
    task = Task(WORK, Amount(samples, "samples"), length)
    layout = replace(EIGHT, micro=Amount(micro, "tokens"))
    tokens, count = dealt(samples, 8, length, micro)
    load = load_of(task, layout)
    assert load.accumulation == count and load.accumulation * load.tokens == pytest.approx(tokens)
    speed = estimate_speed(WORK, layout, parse_cluster("8xRTX3090"), load)
    assert {one.times for one in speed.exchanges} == {count}
    assert speed.tokens_per_s == pytest.approx(samples * length / speed.step_s)


def test_a_step_of_ten_samples_takes_eight_cards_as_long_as_one_of_sixteen():
    layout = replace(EIGHT, micro=Amount(1, "samples"))
    seconds = {
        samples: estimate_speed(
            WORK, layout, parse_cluster("8xH100"), load_of(Task(WORK, Amount(samples, "samples"), 2048), layout)
        ).step_s
        for samples in (8, 10, 16)
    }
    assert seconds[10] == pytest.approx(seconds[16]) and seconds[8] < 0.6 * seconds[16]


def test_more_cards_than_samples_take_a_sample_each():
    """Those that have none wait for the others."""
    step, layout = Amount(4, "samples"), replace(EIGHT, micro=Amount(2048, "tokens"))
    load = load_of(Task(WORK, step, 2048), layout)
    assert (load.accumulation, load.tokens, load.tokens_per_step) == (1, 2048, 4 * 2048)
