"""Traffic, speed and search: against arithmetic done here by hand, and against what experts would do."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from duoka.config.schema import LoraConfig, TrainOnlyConfig
from duoka.model.freeze import apply_train_only
from duoka.plan.catalog import parse_cluster
from duoka.plan.crossval import cross_validate
from duoka.plan.flops import model_flops_per_token
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.lengths import Lengths
from duoka.plan.published import read_points
from duoka.plan.recipe import Work
from duoka.plan.search import WORTH_IT, layouts_of, search, why_not
from duoka.plan.shape import shape_from_config, shape_from_parameters
from duoka.plan.speed import Load, estimate_speed
from duoka.plan.task import Task, load_of
from duoka.plan.traffic import Exchange, Group, place_group, traffic
from duoka.plan.yardstick import yardstick_of
from duoka.units import Amount

GIB = 2**30
LLAMA_8B = shape_from_config(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }
)  # fmt: skip
HALF = Layout(precision="bf16", micro=Amount(4096, "tokens"))
NODES = parse_cluster("2x8xH100-80G")


def sent(name, accumulation, shape=LLAMA_8B):
    exchanges = traffic(
        Work(shape, None, "cuda"), replace(parse_layout(name), precision="fp32"), 8, accumulation=accumulation
    )
    return sum(one.sent_bytes for one in exchanges) / (4 * shape.num_parameters * 7 / 8)


@pytest.mark.parametrize(
    ("name", "times"),
    [("ddp8", (2, 2, 2)), ("zero1x8", (2, 2, 2)), ("zero2x8", (2, 3, 5)), ("fsdp8", (3, 6, 12))],
)
def test_bytes_sent_are_those_of_theory_in_units_of_the_parameters(name, times):
    """DDP 2P, ZeRO-1 2P, ZeRO-2 (g + 1)P, ZeRO-3 3gP for g micro-batches a step."""
    assert [sent(name, g) for g in (1, 2, 4)] == pytest.approx(times)


def test_without_resharding_weights_are_gathered_once_per_micro_batch():
    work = Work(LLAMA_8B, None, "cuda", reshard=False)
    kinds = [one.what for one in traffic(work, parse_layout("fsdp8"), 8, accumulation=1)]
    assert kinds == ["weights, forward", "gradients"]


def test_an_all_reduce_takes_its_bytes_over_the_slowest_part_of_its_way():
    payload, group = 8e9, Group(8, 2)
    exchange = Exchange("gradients", "all-reduce", payload, 1, group, "backward")
    inside = 2 * payload * 15 / 16 / NODES.link.bytes_per_s  # the node's links are the slower part here
    assert inside < exchange.seconds(NODES) < 1.5 * inside
    slow = parse_cluster("2x8xH100-80G@1x100GbE")
    across = 2 * payload / 2 / slow.network.bytes_per_s
    assert across < exchange.seconds(slow) < 1.5 * across


def test_an_all_to_all_brings_each_member_s_half_to_the_other_node():
    """Nothing is summed or shared on the way: eight members' halves share the node's one card."""
    slow = parse_cluster("2x8xH100-80G@1x100GbE")
    exchange = Exchange("heads", "all-to-all", 8e9, 1, Group(8, 2), "between")
    across = 8 * 8e9 / 2 / slow.network.bytes_per_s
    assert across < exchange.seconds(slow) < 1.5 * across


@pytest.mark.parametrize(
    ("size", "stride", "group"),
    [(8, 1, Group(8, 1)), (16, 1, Group(8, 2)), (2, 8, Group(1, 2, 8)), (4, 2, Group(4, 1)), (8, 4, Group(2, 4, 4))],
)
def test_groups_lie_where_their_ranks_do(size, stride, group):
    assert place_group(size, stride, 8) == group


def test_a_step_takes_longer_with_recompute_and_less_on_faster_cards():
    work, layout, load = (
        Work(LLAMA_8B, None, "cuda"),
        replace(HALF, **vars_of("fsdp16")),
        Load(4, 4096, 4096, 4 * 16 * 4096),
    )
    plain = estimate_speed(work, layout, NODES, load)
    again = estimate_speed(work, replace(layout, recompute="full"), NODES, load)
    assert 1.2 < again.step_s / plain.step_s < 1.34 and again.mfu < plain.mfu
    assert sum(plain.parts.values()) == pytest.approx(plain.step_s)
    slow = estimate_speed(work, layout, parse_cluster("2x8xA100-80G"), load)
    assert slow.step_s > 1.8 * plain.step_s
    assert 0.25 < plain.mfu < 0.6, "a figure that public runs do not reach, or that nobody would accept"


def vars_of(name):
    layout = parse_layout(name)
    return {key: getattr(layout, key) for key in ("dp", "strategy", "shard", "tp", "pp", "sp")}


def test_a_slow_network_shows_as_the_limit_and_hsdp_as_the_way_out():
    work, load = Work(LLAMA_8B, None, "cuda"), Load(8, 4096, 4096, 8 * 16 * 4096)
    slow = parse_cluster("2x8xH100-80G@1x25GbE")
    flat = estimate_speed(work, replace(HALF, **vars_of("fsdp16")), slow, load)
    nested = estimate_speed(work, replace(HALF, **vars_of("hsdp2x8")), slow, load)
    assert "25GbE" in flat.limit and flat.exposed_s > 0.5 * flat.step_s
    assert nested.step_s < 0.3 * flat.step_s  # between nodes once per step, not three times per micro-batch


def test_the_bubble_is_that_of_the_formula():
    work = Work(LLAMA_8B, None, "cuda")
    speed = estimate_speed(work, replace(HALF, **vars_of("zero1x2·pp8")), NODES, Load(16, 4096, 4096, 2 * 16 * 4096))
    compute = sum(speed.parts[name] for name in ("matrix products", "attention", "memory traffic"))
    assert speed.parts["pipeline bubble"] == pytest.approx(compute * 7 / 16)


def ranked(params, on, tokens, length=4096):
    cluster = parse_cluster(on)
    task = Task(Work(shape_from_parameters(params), None, "cuda"), Amount(int(tokens), "tokens"), length)
    return search(task, cluster, HALF, int(0.99 * cluster.device.memory_bytes))


def test_search_ranks_like_an_expert():
    small = ranked(3e8, "8xH100", 1e6)
    assert small.trainable[0].layout.strategy == "ddp" or (
        small.trainable[0].speed.tokens_per_s < 1.03 * next(
            one.speed.tokens_per_s for one in small.trainable if one.layout.strategy == "ddp"
        )
    )  # fmt: skip
    large = ranked(7e9, "8xA100-80G", 1e6)
    assert {one.layout.strategy for one in large.trainable if not one.layout.axes} <= {"zero1", "zero2", "fsdp"}
    assert any(one.layout == "ddp8" and "needs at least" in one.reason for one in large.rejected)


def test_bloom_is_laid_out_as_its_authors_did_after_weeks_of_trials():
    """176B on 48 nodes of 8 A100: they took dp 8 x tp 4 x pp 12, with ZeRO-1 and full recompute."""
    found = ranked(1.76e11, "48x8xA100-80G@4xEDR", 2048 * 2048, 2048)
    speeds = {one.layout.name: one.speed.tokens_per_s for one in found.candidates[:6]}
    assert WORTH_IT["cuda"] * speeds.get("zero1x8·tp4·pp12", 0.0) >= max(speeds.values()), speeds


def test_every_layout_fills_the_devices_and_every_rejection_has_a_reason():
    for layout in layouts_of(NODES, HALF, 4096):
        assert layout.world_size == 16
    found = ranked(7e10, "2x8xH100-80G", 1e6)
    assert found.rejected and all(one.reason for one in found.rejected)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("ddp1·tp16", "key-value heads"),
        ("fsdp2·pp8", "gather them for each"),
        ("zero1x1·pp16", "fewer micro-batches"),
        ("ddp16", None),
    ],
)
def test_layouts_that_make_no_sense_say_why(name, word):
    step = Amount(8 * 4096 if word and "fewer" in word else 1_000_000, "tokens")
    task = Task(Work(LLAMA_8B, None, "cuda"), step, 4096)
    reason = why_not(replace(HALF, **vars_of(name)), task, NODES)
    assert (reason is None) == (word is None) and (word is None or word in reason), reason


def test_a_source_that_is_left_out_has_no_say_in_the_constants_that_foretell_it():
    points = [point for point in read_points()[0] if point.step_s and point.ran]
    some = [point for name in ("Megatron-LM", "torchtune") for point in points if point.project == name]
    honest = {fold.source: fold for fold in cross_validate(some) if fold.quantity == "step time"}
    lying = [replace(point, step_s=2 * point.step_s) if point.project == "torchtune" else point for point in some]
    told = {fold.source: fold for fold in cross_validate(lying) if fold.quantity == "step time"}
    assert told["torchtune"].constants == honest["torchtune"].constants
    assert told["torchtune"].bias == pytest.approx((1 + honest["torchtune"].bias) / 2 - 1)
    assert told["Megatron-LM"].constants != honest["Megatron-LM"].constants


def test_a_load_is_at_least_one_micro_batch_and_never_more_tokens_than_there_are():
    task = Task(Work(LLAMA_8B, None, "cuda"), Amount(32768, "tokens"), 4096, Lengths("sampled", None, 100.0, 100))
    load = load_of(task, replace(HALF, **vars_of("ddp16")))
    assert (load.accumulation, load.tokens) == (1, 2048)


@pytest.mark.parametrize(
    ("precision", "compile", "flops"),
    [("fp32", False, 2e11), ("bf16", False, 5e11), ("bf16", True, None), ("fp16", False, None)],
)
def test_attention_on_a_cpu_takes_as_long_as_it_was_measured_to(precision, compile, flops):
    """Where training computes it by what was measured: compiled layers and fp16 have torch's kernels."""
    work, load = Work(LLAMA_8B, None, "cpu"), Load(1, 2048, 512, 2048)
    bare = replace(NODES.device, generation="cpu", measured=True)
    rates = [replace(bare, fp32_attention=scale * 2e11, half_attention=scale * 5e11) for scale in (1, 2)]
    layout = Layout(precision=precision, compile=compile)
    cluster = replace(NODES, num_nodes=1, per_node=1)
    once, twice = (
        estimate_speed(work, layout, replace(cluster, device=device), load).parts["attention"] for device in rates
    )
    if flops is None:
        guess = estimate_speed(work, layout, replace(cluster, device=bare), load).parts["attention"]
        assert once == twice == guess
    else:
        looked_at = 4 * 32 * 4096 * 2048 * (512 + 1) / 2
        assert (once, twice) == pytest.approx((3.5 * looked_at / flops, 3.5 * looked_at / flops / 2))


@pytest.mark.parametrize(
    ("precision", "lora", "reached"),
    [("bf16", False, 0.4), ("bf16", True, 0.7), ("fp32", False, None), ("fp32", True, None)],
)
def test_products_on_a_cpu_take_as_long_as_a_layers_were_measured_to(precision, lora, reached):
    """And never less than by the largest product alone, which is what else is measured."""
    work, load = Work(LLAMA_8B, LoraConfig(rank=8) if lora else None, "cpu"), Load(1, 2048, 512, 2048)
    cluster, layout = replace(NODES, num_nodes=1, per_node=1), Layout(precision=precision)
    bare = replace(NODES.device, generation="cpu", measured=True, half_flops=1e12, fp32_flops=2e11)

    def seconds(**measured):
        device = replace(bare, **measured)
        return estimate_speed(work, layout, replace(cluster, device=device), load).parts["matrix products"]

    slow = seconds(half_trained=0.4e12, half_frozen=0.7e12)
    assert slow == pytest.approx(seconds() * (1 if reached is None else 0.92 / reached))
    assert seconds(half_trained=2e12, half_frozen=2e12) == seconds()


def test_a_cpus_adapters_are_counted_by_what_they_read_and_write():
    work, layout, load = Work(LLAMA_8B, LoraConfig(rank=8), "cpu"), Layout(precision="bf16"), Load(1, 2048, 512, 2048)

    def traffic_of(generation):
        device = replace(NODES.device, generation=generation, measured=True, memory_bytes_per_s=1e12)
        cluster = replace(NODES, num_nodes=1, per_node=1, device=device)
        return estimate_speed(work, layout, cluster, load).parts["memory traffic"]

    into = 6 * 4096 + 14336
    out = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    more = 3 * 2 * 2048 * 32 * (into + 2 * out) / 0.8e12  # in the forward pass once, backwards twice
    assert traffic_of("cpu") - traffic_of("ampere") == pytest.approx(more, rel=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [{"layers": 1}, {"layers": 3}, {"layers": -4}, {"layers": 2, "modules": ["self_attn"]},
     {"layers": [0], "extra": ["norm"]}, {"layers": 4, "extra": ["lm_head"]}, {"layers": 1, "extra": ["embed_tokens"]}],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_what_some_trained_layers_cost_is_what_torch_counts(chosen, tied):
    """The forward pass, and a backward pass that goes no further down than there is something to learn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}  # fmt: skip
    chosen, length = TrainOnlyConfig(**chosen), 8
    lm = LlamaForCausalLM(LlamaConfig(**facts, attn_implementation="eager"))
    apply_train_only(lm, chosen)
    with FlopCounterMode(display=False) as counter:
        lm(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    work = Work(shape_from_config({"model_type": "llama", **facts}), None, "cuda", train_only=chosen)
    counted = counter.get_total_flops() / length
    assert model_flops_per_token(work, length) == pytest.approx(counted, rel=0.06)
    whole, some = (
        estimate_speed(one, HALF, NODES, Load(1, length, length, length)).parts["matrix products"]
        for one in (replace(work, train_only=None), work)
    )
    assert some / whole == pytest.approx(
        counted / (model_flops_per_token(replace(work, train_only=None), length)), rel=0.06
    )


def test_mfu_is_held_against_all_devices_and_a_cpu_nobody_measured_has_none():
    """By hand: 6 per weight that multiplies, and per layer 12 x width x half the length: tokens see backwards only."""
    layout, length = replace(HALF, strategy="ddp", dp=16), 2048
    task = Task(Work(LLAMA_8B, None, "cuda"), Amount(2**19, "tokens"), length)
    found = yardstick_of(task, layout, NODES)
    multiply = LLAMA_8B.num_parameters - 128256 * 4096
    by_hand = 6 * multiply + 12 * 32 * 4096 * length / 2
    assert found.flops_per_token == pytest.approx(by_hand, rel=2e-3)
    assert found.peak_flops == 16 * NODES.device.half_flops
    assert found.mfu(1e5) == pytest.approx(1e5 * found.flops_per_token / found.peak_flops)
    cpu = replace(NODES, device=replace(NODES.device, generation="cpu", measured=False))
    assert yardstick_of(task, layout, cpu).mfu(1e5) is None
    measured = replace(cpu, device=replace(cpu.device, measured=True))
    assert yardstick_of(task, layout, measured).peak_flops == 2 * NODES.device.half_flops  # one CPU a node


def test_tensor_parallel_rows_on_h100_are_planned_near_what_ran():
    """8B and 70B with TP8, of a program whose tensor ranks share rows between norms; nothing was fitted to them."""
    rows = [one for one in read_points()[0] if one.layout.tp == 8 and one.cluster.device.name.startswith("H100")]
    assert {one.model for one in rows} == {"Llama 3.1 8B", "Llama 3.1 70B"} and {one.split for one in rows} == {"judge"}
    for one in rows:
        assert one.plan_speed().step_s == pytest.approx(one.step_s, rel=0.25), one.id
        assert one.plan_memory().peak_bytes < 0.9 * one.cluster.device.memory_bytes, one.id
