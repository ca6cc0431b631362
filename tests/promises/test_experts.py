"""Mixtures of experts against a plain loop through transformers: losses, norms, every gradient and all weights."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from needs import since
from sequences import CASES, CLIP, WIDE, Case, distance, heads, learn_alone_once, learn_together
from worlds import run_world

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
# Norms of heads get a thousandth of all gradient: plain fp32 is 3e-6 from float64, four times as far as elsewhere.
ROUNDING = {"two take all": 3e-5}
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
    "balanced": Case("qwen3_moe", {**QWEN, "head_dim": 8, "mlp_only_layers": [0]}, balance=0.5, recompute="1/2"),
    "balanced, padded": replace(CASES["experts of Mixtral"], packing=False, balance=0.5),
    "LoRA": Case("qwen3_moe", {**QWEN, "head_dim": 8}, lora=("q_proj", "v_proj"), optimizer="adamw"),
    # On four ranks no expert is whole on any.
    "fewer than ranks": Case("qwen3_moe", {**QWEN, "head_dim": 8, "num_experts": 2}, optimizer="adamw"),
    "LoRA of fewer": Case("qwen3_moe", {**QWEN, "head_dim": 8, "num_experts": 2}, lora=True, optimizer="adamw"),
    "LoRA of experts": Case("qwen3_moe", {**QWEN, "head_dim": 8}, lora=True, optimizer="adamw"),
}
FEW = ["fewer than ranks", "LoRA of fewer"]
SHARED = [name for name in OWN if name not in ("LoRA of experts", *FEW)]
FOUR = (((0,), (3,)), ((1,), ()), ((2,), (5,)), ((4, 6), ()))
SOME = ["Qwen3", "balanced", "two take all", "LoRA", "DeepSeek-V3"]


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
            alone = learn_alone_once(case, world)
            assert max(alone.norms) > CLIP, "clipping must have been active"
            if one == "two take all":
                check_skew(alone)
            error, what = distance(learn_together(case, layout, mesh), alone)
            print(f"{name} {one}: {error:.1e} {what}", flush=True)
            if not error < ROUNDING.get(one, TOLERANCE):
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
    run_world(2, compare_all, [("ddp2", SOME[:3]), ("fsdp2", [*SOME, "LoRA of experts"]), ("zero1x2", SOME[:2])])


def test_ranks_that_share_experts_learn_what_one_process_learns():
    run_world(2, compare_all, [("fsdp2·ep2", [*SOME, "Mixtral, padded"]), ("zero1x2·ep2", SOME[:2])])


def test_four_ranks_share_experts_beside_copies_and_sequences():
    few = SOME[:2]
    run_world(
        4,
        compare_all,
        [("fsdp4", FEW), ("zero2x4", FEW[:1]), ("fsdp4·ep4", few[:1]), ("fsdp4·ep2", few), ("fsdp2·sp2·ep2", few)],
    )


@since(transformers="5.23")  # a part for the experts of Qwen2
def test_tensor_ranks_share_experts_and_send_a_part_of_the_tokens_each():
    run_world(
        2, compare_all, [("single·tp2·ep2", ["Qwen3", "balanced", "two take all", "LoRA", "Mixtral, padded", "Qwen2"])]
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_mixture_learns_alike_under_every_strategy():
    two = [(name, list(OWN)) for name in ("ddp2", "zero1x2", "zero2x2", "fsdp2")]
    run_world(2, compare_all, [*two, *((f"{name}·ep2", SHARED) for name in ("zero1x2", "zero2x2", "fsdp2"))])
    layouts = ("fsdp4·ep4", "fsdp4·ep2", "zero2x4·ep2", "hsdp2x2·ep2", "fsdp2·sp2·ep2")
    run_world(4, compare_all, [(name, SOME) for name in layouts])
    # Latent attention has no part in transformers' plan: see test_tensor_families.py.
    cut = [name for name in SHARED if not name.startswith("DeepSeek")]
    run_world(4, compare_all, [(name, cut) for name in ("fsdp2·tp2·ep2", "fsdp2·tp2·ep4", "zero1x1·sp2·tp2·ep4")])


def count_bytes():
    """The ledger of a step beside theory: rows that other ranks' experts got, there and back, in both passes."""
    from unittest import mock

    import duoka.parallel.expert as expert
    from duoka.comm.ledger import LEDGER
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout
    from duoka.plan.recipe import Work
    from duoka.plan.shape import shape_from_config
    from duoka.plan.traffic import traffic

    world = start_world(ParallelConfig(strategy="fsdp"))
    mesh = build_mesh(parse_layout("fsdp2·ep2"), world)
    for recompute, passes in (("none", 4), ("full", 6), ("1/2", 5)):
        case = replace(OWN["Qwen3"], lengths=(300, 280), rows=(((0,),), ((1,),)), recompute=recompute)
        routed = []

        class Watched(expert.TokenExchange):
            def compute(self, rows, counts, own):
                if torch._C._current_graph_task_id() < 0:  # in a backward pass it is computed again
                    routed.append(counts.view(2, -1).sum(dim=1)[1 - world.rank].item())  # noqa: B023
                return super().compute(rows, counts, own)

        with mock.patch.object(expert, "TokenExchange", Watched):
            LEDGER.take()
            learn_together(case, parse_layout("fsdp2·ep2"), mesh, steps=0)
        sent = LEDGER.take()["all-to-all"].sent_bytes
        both = world.sum([float(sum(routed)), float(sent)])
        # What goes out comes back: half of the passes carry this rank's rows, the others those it was sent.
        theory = both[0] * passes * 4 * case.settings["hidden_size"]
        counts = (passes // 2 - 1) * 2 * 2 * 8 * 8 / 2
        assert abs(both[1] / (theory + counts) - 1) < 0.02, (recompute, both, theory)
        layout = replace(parse_layout("fsdp2·ep2"), recompute=recompute)
        sizes = {"vocab_size": 96, "num_hidden_layers": 2, "intermediate_size": 96}
        shape = shape_from_config({"model_type": "qwen3_moe", **case.settings, **sizes})
        (planned,) = (
            one for one in traffic(Work(shape, None), layout, 2, tokens=290) if one.what == "expert parallel: tokens"
        )
        assert abs(both[1] / (2 * planned.sent_bytes) - 1) < 0.2, (recompute, both, planned)
    world.barrier()
    end_world(world)


def test_bytes_on_the_wire_are_the_theory_s():
    run_world(2, count_bytes)


def make_mistakes():
    """Each of them must be seen, and the same world without one is right."""
    from unittest import mock

    import duoka.parallel.engine as engine
    import duoka.parallel.expert as expert
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.optim.spread import spread_of
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    def average_copies(parameters, world):
        parameters = list(parameters)
        expert.sum_copies(parameters, world)
        for parameter in parameters:
            parameter.grad /= world.size

    class RankAfterRank(expert.TokenExchange):
        """Rows go through the experts in the order in which they came."""

        def compute(self, rows, counts, own):
            return super().compute(rows, counts, lambda here, number: own(here.flip(0), number).flip(0))

    there, turns = expert.travel, itertools.count()  # there, then back
    mistakes = {
        "none": (),
        "copies not summed": ((engine, "sum_copies", lambda *_: None),),
        "copies averaged": ((engine, "sum_copies", average_copies),),
        "experts in the norm of one rank": (
            (engine, "spread_of", lambda one: () if expert.is_shared_expert(one) else spread_of(one)),
        ),
        "gradients that do not travel": (
            (expert, "travel", lambda rows, *how: there(rows if next(turns) % 2 else rows.detach(), *how)),
        ),
        "rows to the wrong expert": ((expert, "TokenExchange", RankAfterRank),),
    }
    world = start_world(ParallelConfig(strategy="fsdp"))
    layout = parse_layout("fsdp4·ep2")
    mesh, case = build_mesh(layout, world), replace(OWN["Qwen3"], rows=FOUR)
    alone = learn_alone_once(case, world)
    seen = {}
    for name, patches in mistakes.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            seen[name] = distance(learn_together(case, layout, mesh), alone)
    print(seen, flush=True)
    world.barrier()
    end_world(world)
    assert seen.pop("none")[0] < TOLERANCE
    assert all(error > 1e-3 for error, _ in seen.values()), seen


@pytest.mark.nightly
def test_each_mistake_would_be_seen():
    run_world(4, make_mistakes)


def make_mistakes_beside_tensor():
    """Tensor ranks have the same tokens: what would come of each sending all, and of a part of a gradient."""
    from unittest import mock

    import duoka.parallel.expert as expert
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel import tensor_exchange
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    def own_gradient_alone(x, world, dim):
        first, size = tensor_exchange.bounds(x.shape[dim], world)
        return x.narrow(dim, first, size)

    def summed(x, world, size, dim):
        return tensor_exchange.joined(x, world, size, dim) * world.size

    sends_all = {"enter": lambda self, *tokens: tokens, "leave": lambda self, out, count: out}
    mistakes = {
        "none": {},
        "each sends all tokens": {(expert.TokenExchange, name): wrong for name, wrong in sends_all.items()},
        "gradients of a part of the tokens": {(expert, "own_part"): own_gradient_alone},
        "answers counted by each": {(expert, "joined"): summed},
        "copies not summed": {(engine_module(), "sum_copies"): lambda *_: None},
    }
    world = start_world(ParallelConfig(strategy="fsdp"))
    layout = parse_layout("fsdp2·tp2·ep2")
    mesh, case = build_mesh(layout, world), replace(OWN["Qwen3"], rows=WIDE)
    alone = learn_alone_once(case, world)
    seen = {}
    for name, patches in mistakes.items():
        with contextlib.ExitStack() as stack:
            for (where, what), wrong in patches.items():
                stack.enter_context(mock.patch.object(where, what, wrong))
            seen[name] = distance(learn_together(case, layout, mesh), alone)
    print(seen, flush=True)
    world.barrier()
    end_world(world)
    assert seen.pop("none")[0] < TOLERANCE
    assert all(error > 1e-3 for error, _ in seen.values()), seen


def engine_module():
    from duoka.parallel import engine

    return engine


@pytest.mark.nightly
def test_each_mistake_beside_tensor_would_be_seen():
    run_world(4, make_mistakes_beside_tensor)
