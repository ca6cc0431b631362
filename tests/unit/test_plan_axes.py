"""Tensor, pipeline and sequence axes of a config: refused before anything starts where they make no layout."""

import pytest

from duoka.config.schema import ParallelConfig, RunConfig
from duoka.errors import Faults
from duoka.plan.axes import check_axes, key_value_heads, why_exchange
from duoka.plan.hardware import Machine
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

CPU = Machine(num_cores=2, memory_bytes=24 << 30, available_bytes=20 << 30)


@pytest.mark.parametrize(
    ("axes", "world", "words"),
    [
        ({"tensor": 3}, 4, ["parallel.tensor 3 takes 3 processes", "--nproc 3 or 6", "tensor: 4 / tensor: 2"]),
        (
            {"tensor": 2, "pipeline": 3},
            8,
            ["parallel.tensor 2 x parallel.pipeline 3 is 6 processes", "--nproc 6 or 12", "tensor: 2, pipeline: 4"],
        ),
        ({"sequence": 8}, 4, ["--nproc 8", "sequence: 4"]),
    ],
)
def test_axes_that_do_not_divide_the_world_are_told_the_nearest_that_do(axes, world, words, monkeypatch):
    monkeypatch.setattr("duoka.plan.axes.TRAINABLE_AXES", ("tp", "pp", "sp"))
    (fault,) = check_axes(ParallelConfig(**axes), world)
    for word in words:
        assert word in f"{fault.what} {fault.fix}"


def test_an_axis_that_only_the_plan_knows_is_refused(monkeypatch):
    monkeypatch.setattr("duoka.plan.axes.TRAINABLE_AXES", ())
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}, "parallel": {"pipeline": 2}})
    with pytest.raises(Faults, match="does not train with it"):
        make_plan(config, demo_shape(), CPU, 2)


def plan_of(**parallel):
    config = {"model": "demo", "data": {"train": ["identity"]}, "parallel": parallel}
    return make_plan(RunConfig.model_validate(config), demo_shape(), CPU, 4)


def test_a_sequence_axis_is_planned_with_its_reason_and_its_memory():
    whole, shared = plan_of(strategy="ddp"), plan_of(sequence=4)
    assert shared.layout.name == "ddp1·sp4" and shared.layout.is_trainable
    assert "all-gather: 9 heads do not divide by 4" in shared.reasons["parallel.sequence"]
    assert "all-to-all: each rank attends with 3 of 9 heads" in why_exchange(9, 3)
    assert shared.memory.tokens == -(-shared.layout.micro.count // 4)
    assert shared.memory.parts["optimizer"] == whole.memory.parts["optimizer"]
    fsdp = plan_of(sequence=4, strategy="fsdp")
    assert fsdp.layout.name == "fsdp1·sp4" and fsdp.layout.state_ranks == 4
    assert abs(fsdp.memory.parts["optimizer"] / whole.memory.parts["optimizer"] - 1 / 4) < 0.01


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"sequence": 3}, "no multiple"),
        ({"sequence": 4, "strategy": "single"}, "is one process"),
        ({"sequence": 2, "strategy": "dp"}, "is one process"),
        ({"sequence": 2, "tensor": 2}, "parallel.tensor"),
    ],
)
def test_a_sequence_axis_that_makes_no_run_is_refused(parallel, words):
    with pytest.raises(Faults, match=words):
        plan_of(**parallel)


@pytest.mark.parametrize(
    ("heads", "held", "ranks", "sent"),
    [
        (6, 3, 2, [0, 0, 1, 1, 2, 2]),
        (6, 1, 2, [0, 0]),
        (6, 2, 2, [0, 1]),
        (8, 2, 4, [0, 0, 1, 1]),
        (8, 4, 2, [0, 1, 2, 3]),
        (12, 3, 6, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_each_rank_gets_the_key_value_heads_that_its_heads_ask_for(heads, held, ranks, sent):
    assert key_value_heads(heads, held, ranks) == sent
    own, each = heads // ranks, len(sent) // ranks
    for head in range(heads):
        rank, place = divmod(head, own)
        assert sent[rank * each + place // (own // each)] == head // (heads // held)
