"""The fewest ranks of each strategy, against plans of runs on that many and on one less."""

import pytest

from duoka.config.schema import RunConfig
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.picture import plan_lines
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import shape_from_parameters

GIB = 2**30
A100 = Gpu("A100-80G", 80 * GIB, int(79.2 * GIB), 8.0)


def plan_on(strategy: str, ranks: int, size: float = 70e9) -> Plan:
    machine = Machine(64, 4096 * GIB, 4000 * GIB, gpus=(A100,) * ranks)
    config = RunConfig.model_validate(
        {
            "model": "demo",
            "data": {"train": ["x"], "max_length": 2048},
            "train": {"recompute": "full", "micro_batch": 1, "global_batch": 4096, "precision": "bf16"},
            "parallel": {"strategy": strategy},
        }
    )
    return make_plan(config, shape_from_parameters(size), machine, ranks)


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 70e9), ("zero2", 13e9)])
def test_a_run_fits_on_the_fewest_ranks_and_not_on_one_less(strategy, size):
    least = plan_on(strategy, 8, size).fewest[strategy]
    assert least is not None and least > 2
    assert plan_on(strategy, least, size).verdict == "fits"
    assert plan_on(strategy, least - 1, size).verdict != "fits"
    assert plan_on(strategy, least + 3, size).fewest[strategy] == least, "it does not depend on how many were asked for"


def test_what_no_number_of_ranks_holds_is_said():
    plan = plan_on("fsdp", 8)
    assert [plan.fewest[name] for name in ("single", "ddp", "zero1", "zero2")] == [None] * 4
    table = "\n".join(plan_lines(plan))
    assert "none  4Pt + 4Pt + 8Pt" in table and f"{plan.fewest['fsdp']}  (4Pt + 4Pt + 8Pt)/N" in table
    assert plan.to_json()["fewest_ranks"]["fsdp"] == plan.fewest["fsdp"]
