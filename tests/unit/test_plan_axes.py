"""Tensor, pipeline and sequence axes of a config: refused before anything starts where they make no layout."""

import pytest

from duoka.config.schema import ParallelConfig, RunConfig
from duoka.errors import Faults
from duoka.plan.axes import check_axes
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
