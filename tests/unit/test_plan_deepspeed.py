"""The plan of parallel.engine deepspeed: what it holds and sends; promises/test_deepspeed.py counts it in runs."""

import math
from dataclasses import replace

import pytest
from test_plan_memory import SHAPE

from duoka.accelerator.settings import check_parallel
from duoka.bench.dry_run import dry_run
from duoka.config.schema import ParallelConfig, RunConfig
from duoka.config.schema_running import DeepSpeedConfig
from duoka.errors import ConfigError
from duoka.plan.catalog import cluster_of
from duoka.plan.choose import check_machine
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.memory import estimate_memory
from duoka.plan.offload import moved_bytes
from duoka.plan.recipe import Work, static_memory
from duoka.plan.shape import shape_from_config
from duoka.plan.speed import Load, estimate_speed
from duoka.plan.traffic import traffic

RANKS = 4


def layout(strategy):
    return Layout(dp=RANKS, strategy=strategy, shard=1 if strategy == "ddp" else RANKS)


def work(**switches):
    return Work(SHAPE, None, deepspeed=DeepSpeedConfig(**switches))


LIVE = {"stage3_max_live_parameters": 0}


@pytest.mark.parametrize(
    ("strategy", "per_parameter", "sent", "switches"),
    [
        ("ddp", 16, 2, {}),
        ("zero1", 8 + 12 / RANKS, 3, {}),
        ("zero2", 4 + 16 / RANKS, 2 * 3 + 1, {}),
        ("fsdp", 20 / RANKS, 3 * 3, LIVE),
        ("fsdp", 20 / RANKS, 2 * 3, {}),  # all of it stays gathered for the backward pass
    ],
)
def test_each_stage_holds_and_sends_its_own(strategy, per_parameter, sent, switches):
    own, at = work(**switches), layout(strategy)
    static = static_memory(own, at)
    assert math.isclose(static.total_bytes, per_parameter * SHAPE.num_parameters, rel_tol=1e-6)
    exchanged = sum(one.sent_bytes for one in traffic(own, at, RANKS, accumulation=3))
    assert math.isclose(exchanged, sent * 4 * SHAPE.num_parameters * (RANKS - 1) / RANKS, rel_tol=1e-6)


def test_copies_inside_nodes_hold_more_and_send_less_between_them():
    own, at = work(**LIVE), layout("fsdp")
    sent = {how: traffic(replace(own, reshard=how), at, 2, accumulation=3) for how in (True, "node")}
    across = {how: sum(one.sent_bytes for one in found if one.group.nodes > 1) for how, found in sent.items()}
    gather = 4 * SHAPE.num_parameters * (RANKS - 1) / RANKS
    assert across[True] == pytest.approx(9 * gather) and across["node"] == pytest.approx(4 * gather)
    plain, copies = (estimate_memory(replace(own, node_ranks=near), at, 64).peak_bytes for near in (0, 2))
    assert copies - plain == pytest.approx(4 * SHAPE.num_parameters / 2, rel=0.01)


@pytest.mark.parametrize(("disk", "kept"), [("optimizer", 4 / RANKS + 4 / RANKS), ("params", 4 / RANKS)])
def test_what_lies_in_files_takes_no_memory_but_its_buffers(disk, kept):
    """Weights and gradients of a rank, or gradients alone; a group of what is stepped passes four times."""
    own, at = work(sub_group_size=1000, **LIVE), replace(layout("fsdp"), offload="optimizer", disk=disk)
    found = estimate_memory(own, at, 64)
    assert found.disk_bytes == pytest.approx((16 + (disk == "params") * 4) * SHAPE.num_parameters / RANKS, rel=1e-6)
    held = sum(found.parts.get(part, 0) for part in ("weights", "gradients", "optimizer"))
    elsewhere = 0 if "gradients" in found.parts else 4 * SHAPE.num_parameters / RANKS
    assert held + elsewhere == pytest.approx(kept * SHAPE.num_parameters, rel=1e-6)
    assert found.parts["disk buffers"] >= 4 * 4 * 1000


def test_weights_on_a_disk_are_read_from_it_by_each_pass():
    """Past the page cache, however much memory there is; natively that keeps them. Gradients are put away beside the
    optimizer's state when the last micro-batch has added to them, and read for the update."""
    at = replace(layout("fsdp"), offload="optimizer")
    cluster = cluster_of(Machine(2, 64 << 30, 60 << 30), 1, RANKS)
    moved = [moved_bytes(work(), replace(at, disk=disk), 3, cluster) for disk in ("none", "optimizer", "params")]
    own = SHAPE.num_parameters / RANKS
    once = 2 * (12 + 4) * own
    assert moved == pytest.approx([0, once, once + 4 * own * (2 * 3 + 2)], rel=1e-6)


def test_the_live_window_of_stage_3_is_part_of_the_peak():
    small = estimate_memory(work(stage3_prefetch_bucket_size=0, **LIVE), layout("fsdp"), 64)
    large = estimate_memory(work(), layout("fsdp"), 64)
    assert large.peak_bytes - small.peak_bytes > 0.5 * 4 * (SHAPE.num_parameters - SHAPE.num_embedding)


def test_one_process_does_not_compute_again_with_weights_of_a_disk():
    raw = {"model": "demo", "data": {"train": ["identity"]}, "train": {"recompute": "full"}}
    raw["parallel"] = {"engine": "deepspeed", "strategy": "zero3", "offload": {"params": "disk"}}
    config, machine = RunConfig.model_validate(raw), Machine(2, 8 << 30, 8 << 30)
    assert [fault.key for fault in check_machine(config, machine, 1)] == ["train.recompute"]
    assert not check_machine(config, machine, 2)


def test_who_has_not_model_and_optimizer_together_refuses_it():
    with pytest.raises(ConfigError, match="natively in a loop of your own"):
        check_parallel(ParallelConfig(engine="deepspeed", strategy="zero2"), "fp32")
    raw = {"model": "demo", "data": {"train": ["identity"]}, "parallel": {"engine": "deepspeed", "strategy": "zero2"}}
    with pytest.raises(ValueError, match="duoka's own engine"):
        dry_run(RunConfig.model_validate(raw), {}, layout("zero2"), [8])


def test_autotp_has_both_ends_whole_and_sums_before_each_product_by_columns():
    own, at = work(), Layout(dp=1, tp=2, strategy="single")
    ends = SHAPE.num_embedding + SHAPE.num_head
    held = (SHAPE.num_parameters - ends) / 2 + ends
    assert static_memory(own, at).total_bytes == pytest.approx(16 * held, rel=1e-6)
    native = static_memory(replace(own, deepspeed=None), at)
    assert native.total_bytes < static_memory(own, at).total_bytes
    (sums,) = traffic(own, at, 2, accumulation=3, tokens=100)
    wanted = 3 * SHAPE.num_layers * 7 * 4 * SHAPE.hidden_size * 100
    assert sums.sent_bytes == pytest.approx(wanted)  # an all-reduce over two: what it has, once
    (again,) = traffic(own, replace(at, recompute="full"), 2, accumulation=3, tokens=100)
    assert again.sent_bytes == pytest.approx(wanted * 8 / 7)
    shared = replace(at, dp=2, strategy="zero1", shard=2)
    assert static_memory(own, shared).total_bytes == pytest.approx((8 + 12 / 2) * held, rel=1e-6)


def test_weights_in_8_bits_send_a_quarter_and_gradients_in_4_an_eighth_between_nodes():
    plain, packed = (replace(work(**LIVE), weight_bits=bits, gradient_bits=bits // 2) for bits in (0, 8))
    sent = {
        (bits, nodes): {
            kind: sum(one.sent_bytes for one in traffic(own, layout("fsdp"), RANKS // nodes) if one.kind == kind)
            for kind in ("all-gather", "reduce-scatter")
        }
        for bits, own in ((0, plain), (8, packed))
        for nodes in (1, 2)
    }
    for nodes in (1, 2):
        assert sent[8, nodes]["all-gather"] == pytest.approx(sent[0, nodes]["all-gather"] / 4)
    assert sent[8, 1]["reduce-scatter"] == sent[0, 1]["reduce-scatter"]
    with_scales = (0.5 + 4 / SHAPE.hidden_size) / 4
    assert sent[8, 2]["reduce-scatter"] == pytest.approx(sent[0, 2]["reduce-scatter"] * with_scales)
    # Between nodes travels what was added up inside them: half of the gradients, and half of that each way.
    (across,) = (one for one in traffic(packed, layout("fsdp"), 2) if one.what == "gradients, between nodes")
    assert across.sent_bytes == pytest.approx(with_scales * 4 * SHAPE.num_parameters / 4)


def test_copies_inside_a_node_are_not_packed_again():
    """A node's copy holds what arrived in 8 bits, and would be rounded once more."""
    own = replace(work(**LIVE), weight_bits=8, reshard="node")
    found = {one.what: one for one in traffic(own, layout("fsdp"), 2, accumulation=3)}
    wide = 4 * SHAPE.num_parameters
    assert found["weights, forward"].payload_bytes == pytest.approx(wide / 4)
    assert found["weights, backward"].payload_bytes == found["weights, forward again"].payload_bytes == wide


def test_each_tensor_rank_computes_the_whole_head():
    """AutoTP's ranks have all logits, where duoka's own axis shares them: of a step all else takes as long."""
    cluster, load = (
        cluster_of(Machine(2, 8 << 30, 8 << 30), 1, 2),
        Load(accumulation=2, tokens=64, length=64, tokens_per_step=128),
    )
    at = Layout(dp=1, tp=2, strategy="single")
    own, native = (
        estimate_speed(replace(work(), deepspeed=switches), at, cluster, load).parts["matrix products"]
        for switches in (DeepSpeedConfig(), None)
    )
    products = (SHAPE.num_parameters - SHAPE.num_embedding - SHAPE.num_head, SHAPE.vocab_size * SHAPE.hidden_size)
    assert own / native == pytest.approx((products[0] / 2 + products[1]) / (sum(products) / 2), rel=1e-3)


# A Llama of 51.8M parameters on two ranks with gloo and tcmalloc, three steps of two micro-batches of about 390 tokens,
# recompute full: the most memory that a rank had in its steps, in MiB (2026-11-25; bf16 without offload 2026-11-29;
# DeepSpeed 0.19.8).
LLAMA = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 640, "intermediate_size": 1600, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
MEASURED = {
    ("ddp", "fp32", "none"): 1406, ("ddp", "bf16", "none"): 1451,
    ("zero1", "fp32", "none"): 1526, ("zero1", "bf16", "none"): 1568,
    ("zero2", "fp32", "none"): 1525, ("zero2", "bf16", "none"): 1573,
    ("zero2", "fp32", "optimizer"): 1767, ("zero2", "bf16", "optimizer"): 1767,
    ("fsdp", "fp32", "none"): 1782, ("fsdp", "bf16", "none"): 1806,
    ("fsdp", "fp32", "optimizer"): 1881, ("fsdp", "bf16", "optimizer"): 1888,
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED)
def test_the_plan_is_within_a_tenth_of_what_ranks_took(case):
    strategy, precision, offload = case
    own = Work(shape_from_config(LLAMA), None, deepspeed=DeepSpeedConfig())
    at = Layout(
        dp=2, strategy=strategy, shard=1 if strategy == "ddp" else 2, precision=precision, offload=offload,
        recompute="full",
    )  # fmt: skip
    planned = estimate_memory(own, at, 393, later=393).peak_bytes / 2**20
    assert planned == pytest.approx(MEASURED[case], rel=0.1), f"{planned:.0f} MiB"
