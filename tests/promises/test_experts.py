"""Mixtures of experts against a plain loop through transformers: losses, norms, every gradient and all weights."""

from dataclasses import replace

import pytest
from sequences import CASES, CLIP, WIDE, Case, adapt_of, distance, heads, learn_alone, learn_together
from worlds import run_world

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
LATENT = {
    **heads(4, 4), "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
QWEN = {**heads(4, 2), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Beside those of the sequence axis: routers of four kinds, shared experts, layers without experts.
OWN = {
    "Qwen3": CASES["experts of Qwen3"],
    "Mixtral": replace(CASES["experts of Mixtral"], optimizer="adamw"),
    "Mixtral, padded": replace(CASES["experts of Mixtral"], packing=False, rows=(((0, 1), (3, 4, 6), ()),)),
    "Qwen2": Case("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "Qwen3, recomputing": Case("qwen3_moe", {**QWEN, "head_dim": 8}, recompute="full"),
    "Qwen3, recomputing what is cheap": Case("qwen3_moe", {**QWEN, "head_dim": 8}, recompute="selective"),
    "DeepSeek-V2": Case("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0}),
    "DeepSeek-V3": Case("deepseek_v3", {**LATENT, "head_dim": 8}),
    # All tokens go to two of the eight, and six have none, on every rank.
    "two take all": Case("qwen3_moe", {**QWEN, "head_dim": 8, "skewed": True}),
    "LoRA": Case("qwen3_moe", {**QWEN, "head_dim": 8}, lora=("q_proj", "v_proj"), optimizer="adamw"),
    "LoRA of experts": Case("qwen3_moe", {**QWEN, "head_dim": 8}, lora=True, optimizer="adamw"),
}
SHARED = [name for name in OWN if name != "LoRA of experts"]
FOUR = (((0,), (3,)), ((1,), ()), ((2,), (5,)), ((4, 6), ()))
SOME = ["Qwen3", "two take all", "Qwen3, recomputing", "LoRA", "DeepSeek-V3"]


def compare_all(layouts):
    """Each (layout, names of cases) in this world."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    world = start_world(ParallelConfig(strategy="fsdp"))
    failed = []
    for name, cases in layouts:
        layout = parse_layout(name)
        mesh = build_mesh(layout, world)
        for one in cases:
            case = OWN[one] if layout.dp == 1 else replace(OWN[one], rows=WIDE if layout.dp == 2 else FOUR)
            alone = learn_alone(case, adapt_of(case))
            assert max(alone.norms) > CLIP, "clipping must have been active"
            if one == "two take all":
                check_skew(alone)
            error, what = distance(learn_together(case, layout, mesh), alone)
            print(f"{name} {one}: {error:.1e} {what}", flush=True)
            if not error < TOLERANCE:
                failed.append(f"{what} of {one} under {name} is off by {error:.1e}")
    world.barrier()
    end_world(world)
    assert not failed, failed


def check_skew(alone):
    full = [gradient for name, gradient in alone.gradients.items() if ".experts." in name]
    used = [[expert for expert in range(8) if one[expert].any()] for one in full]
    assert used == [[1, 6]] * len(full), used


def test_one_process_learns_what_transformers_learns():
    compare_all([("single", list(OWN))])


def test_two_ranks_learn_what_one_process_learns():
    run_world(2, compare_all, [("ddp2", list(OWN)), ("fsdp2", list(OWN)), ("zero1x2", SOME), ("zero2x2", SOME[:2])])


def test_ranks_that_share_experts_learn_what_one_process_learns():
    run_world(2, compare_all, [("fsdp2·ep2", SHARED), ("zero1x2·ep2", SOME)])


def test_four_ranks_share_experts_beside_copies_and_sequences():
    few = SOME[:3]
    run_world(
        4, compare_all, [("fsdp4·ep4", few), ("fsdp4·ep2", few), ("zero2x4·ep2", few[:2]), ("fsdp2·sp2·ep2", few)]
    )
