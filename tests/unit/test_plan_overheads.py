"""What a plan counts for each micro-batch whatever its size."""

from dataclasses import replace

import pytest

from duoka.config.schema import LoraConfig
from duoka.plan.catalog import parse_cluster
from duoka.plan.flops import products
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work
from duoka.plan.shape import shape_from_config
from duoka.plan.speed import Load, estimate_speed

MODEL = shape_from_config(
    {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
    }
)  # fmt: skip
GPU = replace(parse_cluster("H100-80G"), num_nodes=1, per_node=1)
CPU = replace(GPU.device, generation="cpu", measured=True, memory_bytes_per_s=1e12, half_flops=1e12, fp32_flops=2e11)
BF16 = Layout(precision="bf16")


def seconds(work=None, layout=BF16, load=None, **device):
    cluster = replace(GPU, device=replace(CPU, **device))
    load = load or Load(1, 2048, 512, 2048)
    speed = estimate_speed(work or Work(MODEL, None, "cpu"), layout, cluster, load)
    assert sum(speed.parts.values()) == pytest.approx(speed.step_s)
    return speed.parts.get("per micro-batch", 0.0)


@pytest.mark.parametrize(("precision", "first", "later"), [("bf16", 12, 24), ("fp32", 0, 12)])
def test_a_cpus_weights_are_narrowed_and_gradients_added_for_each_micro_batch(precision, first, later):
    layout = Layout(precision=precision)
    one, three = (seconds(layout=layout, load=Load(count, 2048, 512, 2048)) for count in (1, 3))
    more = (later - first) * MODEL.num_parameters / 0.8e12
    assert three - 3 * one == pytest.approx(2 * more, rel=1e-6)
    adapted = Work(MODEL, LoraConfig(rank=8), "cpu")
    one, three = (seconds(adapted, layout, Load(count, 2048, 512, 2048)) for count in (1, 3))
    assert three == pytest.approx(3 * one)


def test_it_is_the_same_for_any_number_of_tokens():
    assert seconds(load=Load(1, 64, 64, 64)) == seconds(load=Load(1, 4096, 512, 4096)) > 8 * 2e-3


def test_each_adapter_counts():
    of_all, of_two = (
        seconds(Work(MODEL, LoraConfig(rank=8, targets=targets), "cpu")) for targets in ("all", ("q_proj", "v_proj"))
    )
    assert of_all - of_two == pytest.approx(8 * 5 * 0.35e-3)


def test_programs_are_written_for_new_lengths_of_16_bit_products():
    same, new = Load(4, 2048, 512, 8192), Load(4, 2048, 512, 8192, varies=True)
    of_all_kinds = 1000 * 512 + 2 * 512 * 512 + 2 * 256 * 512 + 3 * 1024 * 512
    assert seconds(load=new) - seconds(load=same) == pytest.approx(4 * 0.15 * (of_all_kinds / 30e6) ** 0.5, rel=1e-3)
    wide = Layout(precision="fp32")
    assert seconds(layout=wide, load=new) == seconds(layout=wide, load=same)
    emulated = {"half_flops": 1e11}
    assert seconds(load=new, **emulated) == seconds(load=same, **emulated)


def test_weights_of_16_bit_products_are_laid_out_in_each_pass():
    adapted = Work(MODEL, LoraConfig(rank=8), "cpu")
    laid_out = seconds(adapted) - seconds(adapted, half_flops=1e11)
    assert laid_out == pytest.approx(2 * 6 * products(MODEL) / 0.8e12)
    again = seconds(adapted, replace(BF16, recompute="full")) / seconds(adapted)
    assert again == pytest.approx(1.5)


@pytest.mark.parametrize(("device", "each"), [("cpu", 10.0), ("ampere", 2.5)])
def test_a_packed_base_is_unpacked_in_each_pass(device, each):
    adapted = Work(MODEL, LoraConfig(rank=8), "cpu" if device == "cpu" else "cuda")
    packed = seconds(replace(adapted, frozen_bits=4), generation=device)
    assert packed - seconds(adapted, generation=device) == pytest.approx(2 * each * MODEL.num_block_linear / 0.8e12)
    if device == "ampere":
        assert not seconds(adapted, generation=device)
