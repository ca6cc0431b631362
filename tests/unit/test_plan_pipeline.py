"""Stages and schedules of a pipeline by arithmetic: every order can be computed, and holds what it says it holds."""

import itertools

import pytest

from duoka.config.schema import RunConfig
from duoka.errors import Faults
from duoka.plan.hardware import Machine
from duoka.plan.pipeline import Costs, bubble, cut_layers, most_in_flight, passes_of
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

CPU = Machine(num_cores=2, memory_bytes=24 << 30, available_bytes=20 << 30)


def compute_all(schedule, num_ranks, virtual, num_micro):
    """Let ranks compute in their order, each as far as its inputs are there; True when all comes to an end."""
    orders = [passes_of(schedule, num_ranks, virtual, num_micro, rank) for rank in range(num_ranks)]
    done, at, last = set(), [0] * num_ranks, num_ranks * virtual - 1
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, micro = order[at[rank]]
                needed = [("forward", stage - 1, micro)] if stage and kind == "forward" else []
                needed += [("forward", stage, micro)] if kind == "backward" else []
                needed += [("backward", stage + 1, micro)] if kind == "backward" and stage < last else []
                if not all(one in done for one in needed):
                    break
                done.add((kind, stage, micro))
                at[rank] += 1
                is_moving = True
    return len(done) == 2 * num_micro * (last + 1) and at == [len(order) for order in orders]


def test_every_schedule_comes_to_an_end_with_any_number_of_micro_batches():
    for num_ranks, num_micro in itertools.product(range(2, 7), range(1, 20)):
        for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)):
            assert compute_all(schedule, num_ranks, virtual, num_micro), (schedule, num_ranks, virtual, num_micro)


def test_gradients_of_a_stage_are_added_in_the_order_of_micro_batches():
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for rank in range(3):
            order = passes_of(schedule, 3, virtual, 7, rank)
            for stage in {one.stage for one in order}:
                assert [one.micro for one in order if one.kind == "backward" and one.stage == stage] == list(range(7))


def test_one_backward_after_each_forward_holds_no_more_micro_batches_than_stages():
    assert [most_in_flight("1f1b", 4, 1, 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight("gpipe", 4, 1, 16, rank) for rank in range(4)] == [16] * 4
    assert 4 < most_in_flight("interleaved", 4, 2, 16, 0) <= 6
    assert bubble(4, 1, 16) == 3 / 16 and bubble(4, 2, 16) == 3 / 32


def test_the_head_counts_as_the_layers_that_it_is_worth():
    assert cut_layers(8, 2, Costs(layer=1.0, head=0.1, embedding=0.1)) == (0, 4, 8)
    assert cut_layers(8, 2, Costs(layer=1.0, head=2.0, embedding=2.0)) == (0, 5, 8)
    assert cut_layers(5, 5, Costs(layer=1.0, head=9.0)) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5"):
        cut_layers(4, 5, Costs(1.0, 0.0))


def planned(world_size, parallel, **train):
    config = {"model": "demo", "data": {"train": ["identity"]}, "parallel": parallel, "train": train}
    return make_plan(RunConfig.model_validate(config), demo_shape(), CPU, world_size)


def test_more_stages_than_layers_or_micro_batches_are_refused_with_what_works():
    layers = demo_shape().num_layers
    with pytest.raises(Faults, match=f"(?s)the model has {layers} layers.*pipeline: 16"):
        planned(32, {"pipeline": 32}, global_batch=64)
    with pytest.raises(Faults, match=r"(?s)is 32 stages.*schedule: 1f1b"):
        planned(16, {"pipeline": 16, "schedule": "interleaved"}, global_batch=64)
    with pytest.raises(Faults, match=r"(?s)fed with 2 micro-batches a step.*pipeline: 2"):
        planned(4, {"pipeline": 4}, global_batch=4, micro_batch=2)
    assert planned(4, {"pipeline": 4}, global_batch=8, micro_batch=2).layout.name == "single·pp4"


def test_auto_feeds_a_pipeline_and_leaves_weights_on_their_stages():
    plan = planned(4, {"pipeline": 2}, global_batch=64)
    assert plan.layout.name == "ddp2·pp2" and plan.batch.accumulation >= 2
    assert plan.speed.parts["pipeline bubble"] > 0
    layout = planned(4, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 3}, global_batch=64).layout
    assert (layout.schedule, layout.virtual) == ("interleaved", 3)
    assert type(layout).from_json(layout.to_json()) == layout
