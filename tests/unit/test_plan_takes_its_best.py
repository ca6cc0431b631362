"""What auto takes is the fastest row of the plan's own table, over models, machines and batches."""

import itertools
from dataclasses import replace

import pytest

from duoka.config.schema import RunConfig
from duoka.errors import Faults
from duoka.plan.catalog import cluster_of, parse_cluster
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.picture import ranking_lines
from duoka.plan.report import make_plan
from duoka.plan.search import WORTH_IT
from duoka.plan.shape import demo_shape, shape_from_parameters

CLUSTERS = ("4 CPU ranks", "1xH100", "2xRTX4090", "8xRTX4090", "8xA100-80G", "2x8xH100-80G", "4x8xA100-80G@1x25GbE")
MODELS = ("demo", 7e9, 3e10)
BATCHES = ("16", "1M tokens")
WAYS = (
    {},
    {"lora": {}},
    {"train": {"recompute": "none"}},
    {"optim": {"name": "muon"}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"pipeline": 2, "schedule": "zbv"}},
    {"parallel": {"compress": "powersgd"}},
)


def machines(on):
    """(a machine, the cluster that is made of it, how many ranks)."""
    if "CPU" in on:
        machine, ranks = Machine(16, 512 << 30, 500 << 30), int(on[0])
        return machine, cluster_of(machine, 1, ranks), ranks
    cluster = parse_cluster(on)
    gpu = Gpu(cluster.device.name, cluster.device.memory_bytes, cluster.device.memory_bytes, 9.0)
    return Machine(64, 2 << 40, 2 << 40, gpus=(gpu,) * cluster.per_node), cluster, cluster.num_devices


def planned(model, on, batch, way):
    machine, cluster, ranks = machines(on)
    shape = demo_shape() if model == "demo" else shape_from_parameters(int(model))
    # A made-up model has sizes that nothing divides: these are divided by what clusters are made of.
    shape = replace(shape, num_heads=32, num_kv_heads=8, intermediate_size=-(-shape.intermediate_size // 64) * 64)
    facts = {"model": "demo", "data": {"train": ["x"], "max_length": 2048}, **way}
    facts["train"] = {"global_batch": batch, **way.get("train", {})}
    return make_plan(
        RunConfig.model_validate(facts), shape, machine, ranks, local_size=cluster.per_node, cluster=cluster,
        is_ranked=True,
    )  # fmt: skip


@pytest.mark.parametrize("on", CLUSTERS)
def test_auto_takes_the_fastest_row_of_its_own_table(on):
    taken = set()
    for model, batch, way in itertools.product(MODELS, BATCHES, WAYS):
        if way.get("parallel", {}).keys() & {"tensor", "pipeline"} and on == "1xH100":
            continue
        try:
            plan = planned(model, on, batch, way)
        except Faults as faults:
            assert "pipeline" in str(way) and "most stages would always wait" in str(faults)
            continue
        asked = {"tp": 2} if "tensor" in way.get("parallel", {}) else {"pp": 2} if "pipeline" in str(way) else None
        rows = [one for one in plan.ranking.trainable if asked is None or one.layout.axes == asked]
        where = f"{model} on {on}, {batch}, {way}: {plan.layout.name}"
        if not rows:
            assert plan.verdict != "fits" or plan.warnings, where
            continue
        fastest = max(one.speed.tokens_per_s for one in rows)
        assert plan.speed.tokens_per_s * WORTH_IT["cpu" if "CPU" in on else "cuda"] >= fastest, (
            f"{where}, and {rows[0].layout.name} is faster"
        )
        assert any(one.layout == plan.layout for one in rows), f"{where} is no row"
        assert asked or not any("the fastest:" in line for line in ranking_lines(plan)), where
        taken.add(plan.layout.name)
    assert len(taken) > (2 if on != "1xH100" else 0), taken


@pytest.mark.parametrize("reshard", [True, False])
def test_a_row_of_the_table_is_as_fast_as_the_run_it_stands_for(reshard):
    way = {"parallel": {"strategy": "fsdp", "reshard": reshard}}
    plan = planned(7e9, "8xH100", 256, way)
    (row,) = (one for one in plan.ranking.candidates if one.layout == plan.layout)
    assert row.speed.step_s == plan.speed.step_s


def test_auto_takes_no_pipeline_that_micro_batches_as_they_are_written_cannot_feed():
    """Two stages were taken, and refused in words about a key that nobody wrote."""
    way = {"lora": {}, "train": {"micro_batch": "8192 tokens"}, "data": {"train": ["x"], "max_length": 64}}
    plan = planned(7e9, "4x8xA100-80G@1x25GbE", 16, way)
    assert plan.batch.accumulation >= plan.layout.pp
