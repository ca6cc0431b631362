"""Stages and schedules of a pipeline by arithmetic: every order can be computed, and holds what it says it holds."""

import itertools

import pytest

from duoka.config.schema import RunConfig
from duoka.errors import Faults
from duoka.plan.hardware import Machine
from duoka.plan.pipeline import Costs, PassTimes, bubble, cut_layers, most_in_flight, passes_of
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zbv", 2))
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
                needed += [("backward", stage, micro)] if kind == "weights" else []
                if not all(one in done for one in needed):
                    break
                done.add((kind, stage, micro))
                at[rank] += 1
                is_moving = True
    kinds = 3 if schedule in ("zero-bubble", "zbv") else 2
    return len(done) == kinds * num_micro * (last + 1) and at == [len(order) for order in orders]


def test_every_schedule_comes_to_an_end_with_any_number_of_micro_batches():
    for num_ranks, num_micro in itertools.product(range(2, 7), range(1, 20)):
        for schedule, virtual in (*SCHEDULES, ("interleaved", 3)):
            assert compute_all(schedule, num_ranks, virtual, num_micro), (schedule, num_ranks, virtual, num_micro)


def test_gradients_of_a_stage_are_added_in_the_order_of_micro_batches():
    for schedule, virtual in SCHEDULES:
        for rank in range(3):
            order = passes_of(schedule, 3, virtual, 7, rank)
            for stage, kind in {(one.stage, one.kind) for one in order}:
                assert [one.micro for one in order if one.kind == kind and one.stage == stage] == list(range(7))


def test_one_backward_after_each_forward_holds_no_more_micro_batches_than_stages():
    assert [most_in_flight("1f1b", 4, 1, 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight("gpipe", 4, 1, 16, rank) for rank in range(4)] == [16] * 4
    assert 4 < most_in_flight("interleaved", 4, 2, 16, 0) <= 6
    for num_ranks, num_micro in ((2, 1), (2, 5), (4, 16), (5, 7), (8, 40)):
        for schedule, virtual in (("zero-bubble", 1), ("zbv", 2)):
            held = [most_in_flight(schedule, num_ranks, virtual, num_micro, rank) for rank in range(num_ranks)]
            assert max(held) <= num_ranks, (schedule, num_ranks, num_micro, held)


def idle_by_clock(schedule, num_ranks, virtual, num_micro, forward, backward, weights):
    """What a rank waits of a step, on a clock that goes tick by tick; times are whole ticks of one stage."""
    rank_has = {
        one.stage: rank for rank in range(num_ranks) for one in passes_of(schedule, num_ranks, virtual, 1, rank)
    }
    queues = [list(passes_of(schedule, num_ranks, virtual, num_micro, rank)) for rank in range(num_ranks)]
    lasts = {"forward": forward, "backward": backward, "weights": weights}
    busy_until, done_at, now = [0] * num_ranks, {}, 0
    assert sorted(rank_has) == list(range(num_ranks * virtual))
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and busy_until[rank] <= now:
                kind, stage, micro = queue[0]
                before = {"forward": ("forward", stage - 1, micro), "backward": ("backward", stage + 1, micro)}.get(
                    kind
                )
                outside = before is None or not 0 <= before[1] < num_ranks * virtual
                if not outside and done_at.get(before, 1 << 30) > now:
                    break
                queue.pop(0)
                busy_until[rank] = now + lasts[kind]
                done_at[kind, stage, micro] = busy_until[rank]
        now += 1
    return max(busy_until) - virtual * num_micro * (forward + backward + weights)


def test_bubbles_are_those_of_a_clock():
    whole, halves = PassTimes(2, 4), PassTimes(2, 3, 1)
    for num_ranks, num_micro in ((2, 4), (3, 7), (4, 16), (6, 12)):
        for schedule, virtual in SCHEDULES:
            times = halves if schedule in ("zero-bubble", "zbv") else whole
            if schedule == "interleaved" and num_micro % num_ranks:
                continue  # with a longer round they wait a little more
            waited = idle_by_clock(schedule, num_ranks, virtual, num_micro, *map(int, times))
            share = waited / (virtual * num_micro * sum(times))
            said = bubble(schedule, num_ranks, virtual, num_micro, times)
            assert said == pytest.approx(share, abs=2e-3), (schedule, num_ranks, num_micro, said, share)
    assert bubble("1f1b", 4, 1, 16) == 3 / 16 and bubble("interleaved", 4, 2, 16) == 3 / 32
    # Qi et al.: (p - 1)(F + B - W) of ZB-H1, where 1f1b has (p - 1)(F + B + W); zbv half of its F where all are equal.
    assert bubble("zero-bubble", 4, 1, 16, halves) == pytest.approx(3 * (2 + 3 - 1) / (16 * 6), abs=1e-3)
    assert bubble("zbv", 4, 2, 16, PassTimes(1, 1, 1)) == pytest.approx(3 / 2 / (16 * 3), abs=1e-3)


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
    with pytest.raises(Faults, match=r"(?s)fed with 2 micro-batches a step.*pipeline: 1"):
        planned(4, {"pipeline": 4}, global_batch=4, micro_batch=2)
    assert planned(4, {"pipeline": 4}, global_batch=8, micro_batch=2).layout.name == "single·pp4"


def test_auto_feeds_a_pipeline_and_leaves_weights_on_their_stages():
    plan = planned(4, {"pipeline": 2}, global_batch=64)
    assert plan.layout.name == "ddp2·pp2" and plan.batch.accumulation >= 2
    assert plan.speed.parts["pipeline bubble"] > 0
    layout = planned(4, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 3}, global_batch=64).layout
    assert (layout.schedule, layout.virtual) == ("interleaved", 3)
    layout = planned(4, {"pipeline": 2, "schedule": "zbv"}, global_batch=64).layout
    assert (layout.strategy, layout.virtual) == ("ddp", 2)
    assert type(layout).from_json(layout.to_json()) == layout
