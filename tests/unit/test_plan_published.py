"""What other programs mean by selective recompute, and what the plan makes of their published runs with it."""

from dataclasses import replace

import pytest

from duoka.plan.memory import TIGHT, estimate_memory
from duoka.plan.published import read_points

# torchtitan on 64 A100 of 80 GB (its docs/performance.md): Llama 2 13B and 70B, Llama 3 8B and 70B.
POINTS = {point.id: point for point in read_points()[0]}
HALF, EVERY_OPERATOR, FULL = "1/2", "selective", "full"


def found(model, recompute, micro):
    (point,) = (
        one for one in POINTS.values()
        if (one.model, one.layout.recompute, one.micro, one.layout.name) == (model, recompute, micro, "fsdp64")
        and "performance.md" in one.source
    )  # fmt: skip
    return point


def activations_of(point, recompute=None):
    """Bytes kept of all layers when the backward pass begins, of one rank."""
    layout = replace(point.layout, recompute=recompute or point.layout.recompute)
    memory = estimate_memory(point.work, layout, round(point.load.tokens), length=round(point.load.length))
    return memory.parts["activations"]


@pytest.mark.parametrize("width", [8192])
def test_every_second_product_is_kept_operator_by_operator(width):
    """By hand, of a layer of 70B and a token, in bf16: its input, the products of q, v, gate and w2, attention's answer
    and its sums in fp32; and of the layer that is computed again what was not kept."""
    point = found("Llama 2 70B", EVERY_OPERATOR, 1)
    by_hand = 2 * (width + width + 1024 + 28672 + width + width) + 4 * 64
    tokens, layers = 4096, 80
    kept = by_hand * tokens * layers
    assert kept < activations_of(point) < 1.06 * kept
    assert activations_of(point) < 0.5 * activations_of(point, "none")


def test_70b_with_it_fits_a_sample_at_a_time_and_not_two():
    """As published: a batch of 1 ran, a batch of 2 ran out of memory; with full recompute 2 ran."""
    one, two, full = (found("Llama 2 70B", how, n) for how, n in ((EVERY_OPERATOR, 1), (EVERY_OPERATOR, 2), (FULL, 2)))
    room = TIGHT * one.cluster.device.memory_bytes
    assert one.ran and full.ran and not two.ran
    assert max(one.plan_memory().peak_bytes, full.plan_memory().peak_bytes) <= room < two.plan_memory().peak_bytes


@pytest.mark.parametrize(("model", "micro"), [("Llama 2 13B", 2), ("Llama 3 8B", 1)])
def test_every_second_layer_is_planned_as_it_ran(model, micro):
    half, operators = found(model, HALF, micro), found(model, EVERY_OPERATOR, micro)
    for point in (half, operators):
        assert point.plan_memory().peak_bytes <= TIGHT * point.cluster.device.memory_bytes
        assert point.plan_speed().step_s / point.step_s == pytest.approx(1, abs=0.25), point.id
    ratio = half.plan_speed().step_s / operators.plan_speed().step_s
    assert ratio == pytest.approx(half.step_s / operators.step_s, rel=0.08)


def test_what_it_costs_beside_none_is_what_was_published():
    plain = found("Llama 2 13B", "none", 2)
    for how in (HALF, EVERY_OPERATOR):
        again = found("Llama 2 13B", how, 2)
        planned = again.plan_speed().step_s / plain.plan_speed().step_s
        assert planned == pytest.approx(again.step_s / plain.step_s, rel=0.06), how


def test_megatron_s_kind_keeps_all_but_the_scores():
    point = next(one for one in POINTS.values() if one.work.program and one.work.program.kept_scores)
    tokens, length = round(point.load.tokens), round(point.load.length)
    kept = {
        how: estimate_memory(point.work, replace(point.layout, recompute=how), tokens, length=length)
        for how in ("none", "selective", "full")
    }
    sizes = {how: memory.parts["activations"] for how, memory in kept.items()}
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    # Korthikanti et al.: of the 34 + 5as/h bytes that a token and layer of width h keeps, 5as/h go.
    heads, width = point.shape.num_heads, point.shape.hidden_size
    gone = 5 * heads * length / width / (34 + 5 * heads * length / width)
    assert 1 - sizes["selective"] / sizes["none"] == pytest.approx(gone, rel=0.25)
    assert "all but attention's scores" in kept["selective"].formula


def test_the_plan_says_which_kind_is_meant():
    point = found("Llama 2 70B", EVERY_OPERATOR, 1)
    assert "every second product" in point.plan_memory().formula
    assert "1/2 of the layers" in found("Llama 2 13B", HALF, 2).plan_memory().formula
