"""What auto takes is the fastest row of the plan's own table, over models, machines and batches."""

import itertools
from dataclasses import replace

import pytest

from duoka.config.rules import check_rules
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


@pytest.mark.parametrize(
    ("way", "takes"),
    [
        ({"offload": "params"}, {"zero1", "zero2", "fsdp", "hsdp"}),
        ({"offload": {"params": "disk"}}, {"fsdp", "hsdp"}),
        ({"reshard": False}, {"fsdp", "hsdp"}),
        ({"compress": {"gradients": "int8"}}, {"zero1", "zero2", "fsdp"}),
    ],
)
@pytest.mark.parametrize("on", ["4 CPU ranks", "8xA100-80G", "2x8xH100-80G"])
def test_auto_takes_what_holds_the_settings_of_sharing(way, takes, on):
    """They were refused beside strategy auto, as if it were ddp."""
    parallel = {"parallel": way}
    if "CPU" in on:
        assert not check_rules(RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, **parallel}))
    plan = planned("demo", on, 64, parallel)
    assert plan.layout.strategy in takes
    assert {one.layout.strategy for one in plan.ranking.candidates} <= takes
    assert next(iter(way)) in plan.reasons["parallel.strategy"]


@pytest.mark.parametrize("params", ["host", "disk"])
def test_auto_on_one_process_gathers_what_lies_elsewhere(params):
    plan = planned("demo", "1xH100", 64, {"parallel": {"offload": {"params": params}}})
    assert plan.layout.strategy == "fsdp"
    assert any(one.layout == plan.layout for one in plan.ranking.candidates)
    assert "gathers the weights" in plan.reasons["parallel.strategy"]


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("on", ["CPU", "A100-80G", "RTX4090"])
def test_numbers_that_are_no_powers_of_two_are_planned_as_well(ranks, on):
    """Axes of five and seven were no rows: of five cards no model was cut in five, which most have layers for."""
    cluster = parse_cluster(f"1x{ranks}x{on}") if on != "CPU" else None
    gpu = Gpu(on, 80 << 30, 80 << 30, 9.0)
    machine = Machine(60, 512 << 30, 500 << 30, gpus=() if cluster is None else (gpu,) * ranks)
    cluster = cluster or cluster_of(machine, 1, ranks)
    shape = replace(shape_from_parameters(int(7e9)), num_layers=84, num_heads=84, num_kv_heads=84)
    shape = (
        replace(shape, intermediate_size=84 * 5 * 128)
        if ranks != 5
        else replace(shape, num_layers=40, num_heads=40, num_kv_heads=40, intermediate_size=40 * 256)
    )
    for batch in (64, 60):
        facts = {"model": "demo", "data": {"train": ["x"], "max_length": 1024}, "train": {"global_batch": batch}}
        plan = make_plan(
            RunConfig.model_validate(facts), shape, machine, ranks, local_size=ranks, cluster=cluster, is_ranked=True
        )
        rows = plan.ranking.candidates
        names = {one.layout.name for one in rows} | {one.layout for one in plan.ranking.rejected}
        for axis in ("tp", "pp"):
            assert any(f"{axis}{ranks}" in name for name in names), names
        if rows := plan.ranking.trainable:
            fastest = max(one.speed.tokens_per_s for one in rows)
            assert plan.speed.tokens_per_s * WORTH_IT["cpu" if on == "CPU" else "cuda"] >= fastest
