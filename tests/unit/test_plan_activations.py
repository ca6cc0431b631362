"""The plan of activations that lie elsewhere: three layers here, all but one there, and their way beside the passes."""

from dataclasses import replace

import pytest
from test_plan_report import CPU, GIB, H100, LLAMA_8B, config, gpus

from duoka.errors import Faults
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

LONG = {"data": {"max_length": 32768}, "lora": {}, "train": {"global_batch": 1, "micro_batch": 1, "recompute": "none"}}


def plan_of(shape, machine, **offload):
    sections = LONG | ({"parallel": {"offload": offload}} if offload else {})
    return make_plan(config(**sections), shape, machine, 1)


def test_three_layers_stay_and_all_but_one_are_counted_there():
    plain, away = (plan_of(LLAMA_8B, gpus(H100, 1), **how) for how in ({}, {"activations": "host"}))
    here = plain.memory.parts["activations"]
    assert away.memory.moments["loss"] == plain.memory.moments["loss"] - here + here // 32 * 3
    assert away.memory.host_bytes - plain.memory.host_bytes == here // 32 * 31
    assert plain.memory.disk_bytes == away.memory.disk_bytes == 0


def test_under_recomputing_each_layers_input_goes():
    settings = {**LONG, "train": {**LONG["train"], "recompute": "full"}}
    plain, away = (
        make_plan(config(**settings, parallel=one), LLAMA_8B, gpus(H100, 1), 1).memory
        for one in ({}, {"offload": {"activations": "host"}})
    )
    assert away.host_bytes - plain.host_bytes == 31 * 2 * 4096 * 32768
    assert away.moments["loss"] == plain.moments["loss"] - 29 * 2 * 4096 * 32768


def test_a_disk_has_room_for_them_or_the_run_is_refused():
    small = replace(CPU, disk_free_bytes=GIB)
    away = plan_of(demo_shape(), small, activations="disk")
    assert away.memory.disk_bytes > GIB and "disk" in str(away.refusal())
    assert plan_of(demo_shape(), replace(CPU, disk_free_bytes=900 * GIB), activations="disk").refusal() is None


def test_what_the_passes_do_not_hide_costs_time():
    """Of a slow bus against a fast card: 2 x 31 layers of 32,768 tokens."""
    plain, away = (plan_of(LLAMA_8B, gpus(H100, 1), **how) for how in ({}, {"activations": "host"}))
    moved = 2 * (away.memory.host_bytes - plain.memory.host_bytes)
    waits = away.speed.parts.get("moving activations", 0.0)
    assert away.speed.step_s == pytest.approx(plain.speed.step_s + waits)
    assert waits == pytest.approx(
        max(0.0, moved / 12e9 - plain.speed.step_s + plain.speed.parts["optimizer"]), rel=1e-6
    )


def test_on_a_cpu_they_lie_in_host_memory_already():
    with pytest.raises(Faults) as caught:
        plan_of(demo_shape(), CPU, activations="host")
    assert [fault.key for fault in caught.value.faults] == ["parallel.offload.activations"]
