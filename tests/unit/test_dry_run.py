"""The dry run against a real step of the same model, and its collectives against theory."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from held_layers import AllocatedPeak

from duoka.bench import dry_run as module
from duoka.bench.dry_run import dry_run
from duoka.config.schema import RunConfig
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.memory import estimate_memory
from duoka.plan.moments import AHEAD, EMBEDDING, HEAD
from duoka.plan.recipe import Work
from duoka.plan.shape import shape_from_config
from duoka.plan.traffic import traffic

TOKENS = 256
FACTS = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
SHALLOW = FACTS | {"num_hidden_layers": 2}  # half of the time, where a layer is as all
NAMED = {"model": "demo", "data": {"train": ["x"]}}
PLAIN = RunConfig.model_validate(NAMED)
ADAPTED = RunConfig.model_validate({**NAMED, "lora": {"rank": 8, "dropout": 0.0}})
FEW = RunConfig.model_validate({**NAMED, "lora": {"rank": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}})


def real_peak(lora, recompute):
    """Two real steps, with nothing of the dry run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from duoka.model.attention import register_attention
    from duoka.model.build import LossModel
    from duoka.model.fused import apply_fused
    from duoka.model.lora import apply_lora

    settings = {key: value for key, value in FACTS.items() if key != "model_type"}
    lm = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation=register_attention()))
    lm = apply_lora(lm, lora) if lora else lm
    apply_fused(lm)  # the parts that parallelize puts in
    if recompute != "none":
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recompute == "1/3":
        for place, layer in enumerate(lm.model.layers):
            layer.gradient_checkpointing = place in (0, 2)  # two of four are the least that is a third
    model = LossModel(lm.train())
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], fused=True)
    ids = torch.zeros((1, TOKENS), dtype=torch.long)
    for _ in range(2):
        gc.collect()
        states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        with AllocatedPeak([*lm.parameters(), *lm.buffers(), *states]) as live:
            loss, _ = model(ids, ids, ids)
            loss.backward()
            del loss
            optimizer.step()
        optimizer.zero_grad()
    return live.peak


@pytest.mark.parametrize(("config", "recompute"), [(PLAIN, "none"), (PLAIN, "full"), (PLAIN, "1/3"), (ADAPTED, "none")])
def test_a_dry_run_sees_what_a_real_step_allocates(config, recompute, monkeypatch):
    # By MKL, wherever this runs: oneDNN has copies of its own.
    monkeypatch.setattr("duoka.model.onednn_products.onednn_product", None)
    found = dry_run(config, FACTS, Layout(recompute=recompute, packing=False), [TOKENS])
    measured = real_peak(config.lora, recompute)
    assert abs(found.peak_bytes / measured - 1) <= 0.03, (
        f"{found.peak_bytes / 2**20:.2f} against {measured / 2**20:.2f}"
    )
    assert not dist.is_initialized()


def test_a_straight_line_through_models_of_which_as_much_is_computed_again(monkeypatch):
    """A third of 15 layers, from 6 and 12 of them; and run whole."""
    layout, facts = Layout(recompute="1/3", packing=False), FACTS | {"num_hidden_layers": 15}
    line = dry_run(PLAIN, facts, layout, [TOKENS])
    monkeypatch.setattr(module, "PROBED_LAYERS", (16, 32))
    whole = dry_run(PLAIN, facts, layout, [TOKENS])
    assert line.probed == (6, 12) and whole.probed == (15,)
    assert line.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    "name", ["fsdp8", "zero1x8", "zero2x8", "hsdp2x4", "fsdp4·sp2", "zero1x2·sp4", "fsdp4·tp2", "zero1x2·tp2·sp2"]
)
def test_a_rank_of_a_world_that_is_not_there_sends_what_theory_says(name):
    layout = replace(parse_layout(name), packing=False)
    found = dry_run(PLAIN, SHALLOW, layout, [TOKENS])
    shape = shape_from_config(SHALLOW)
    theory = traffic(Work(shape, None), layout, 8, accumulation=1, tokens=TOKENS * layout.sp)
    wanted = sum(one.sent_bytes for one in theory)
    sent = sum(one.sent_bytes for one in found.traffic.values())
    assert sent == pytest.approx(wanted, rel=0.02), {kind: vars(one) for kind, one in found.traffic.items()}


def test_layers_are_extrapolated_along_a_line(monkeypatch):
    layout, facts = replace(parse_layout("ddp4"), packing=False), FACTS | {"num_hidden_layers": 5}
    monkeypatch.setattr(module, "PROBED_LAYERS", (3, 4))
    line = dry_run(PLAIN, facts, layout, [TOKENS])
    monkeypatch.setattr(module, "PROBED_LAYERS", (5, 6))
    whole = dry_run(PLAIN, facts, layout, [TOKENS])
    assert (line.probed, whole.probed) == ((3, 4), (5,))
    for phase in ("forward", "backward", "optimizer step"):
        assert line.phases[phase] == pytest.approx(whole.phases[phase], rel=1e-3), phase


@pytest.mark.parametrize(
    "name", ["single.tp2", "fsdp4.tp2", "single.pp2", "zero1x2.tp2.pp2", "ddp1.pp2.sp2", "zero1x1.tp2.sp2"]
)
def test_a_dry_run_walks_along_the_axes(name):
    """Real code on fake tensors, beside the plan's arithmetic of the same rank."""
    layout = replace(parse_layout(name), packing=False)
    work = Work(shape_from_config(SHALLOW), None, "cpu")
    memory = estimate_memory(work, layout, TOKENS * layout.sp, accumulation=8)
    found = dry_run(PLAIN, SHALLOW, layout, [memory.tokens, memory.later], 8)
    planned = memory.peak_bytes - memory.parts.get("framework", 0) - memory.parts.get("checkpoint copy", 0)
    assert found.peak_bytes == pytest.approx(planned, rel=0.25), (found.phases, memory.parts)


# Enough words and width that each moment of a step is the peak of some run.
WIDE = {
    "model_type": "llama", "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
WAYS = {
    "full": (PLAIN, {}),
    "lora": (ADAPTED, {"lora": ADAPTED.lora}),
    "lora of queries": (FEW, {"lora": FEW.lora}),
    "bf16 weights": (RunConfig.model_validate({**NAMED, "train": {"weights": "bf16"}}), {"narrow_weights": True}),
    "muon": (RunConfig.model_validate({**NAMED, "optim": {"name": "muon"}}), {"optimizer": "muon"}),
}
STRATEGIES = ["single", "zero1x8", "zero2x8", "fsdp8", "hsdp2x4"]
EVERY_DAY = [
    *[("full", name, "full", 2) for name in ("single", "zero2x8", "fsdp8")],
    ("full", "single", "none", 1), ("full", "zero1x8", "full", 1), ("full", "fsdp8", "none", 2),
    ("full", "fsdp64", "full", 1), ("lora of queries", "fsdp8", "none", 1), ("bf16 weights", "fsdp8", "full", 1),
    ("full", "single.tp2", "none", 2), ("full", "single.pp2", "none", 4), ("lora", "fsdp8", "none", 2),
    ("lora", "fsdp8", "full", 1), ("lora", "single.tp2", "none", 2),
]  # fmt: skip
NIGHTLY = [
    *[("full", name, recompute, micro) for name in STRATEGIES for recompute in ("none", "full") for micro in (1, 2)],
    *[("full", name, "selective", 2) for name in ("single", "fsdp8")],
    *[("full", name, "none", 2) for name in ("fsdp4.tp2", "fsdp4·sp2", "single.pp2")],
    *[("full", name, "none", 4) for name in ("single.pp4", "zero2x2.pp2")],
    *[
        (way, name, "none", 2)
        for way in ("lora", "lora of queries", "bf16 weights", "muon")
        for name in ("single", "zero1x8", "fsdp8")
    ],
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("way", "name", "recompute", "micro"),
    EVERY_DAY + [pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY if one not in EVERY_DAY],
)
def test_arithmetic_is_what_the_real_code_holds(tied, way, name, recompute, micro):
    """At every end of a pass: of few micro-batches and of many, one weight at both ends or two."""
    config, asked = WAYS[way]
    layout = replace(parse_layout(name), packing=False, precision="bf16", recompute=recompute)
    facts, tokens = WIDE | {"tie_word_embeddings": tied}, 1024
    # Without a C library's heap, whose free pieces no tensor has.
    work = Work(shape_from_config(facts), device="cpu", has_kernels=False, **({"lora": None} | asked))
    later = tokens * layout.sp if micro > 1 else 0
    memory = estimate_memory(work, layout, tokens * layout.sp, later=later, accumulation=micro)
    found = dry_run(config, facts, layout, [tokens] * min(2, micro), micro)
    planned = memory.peak_bytes - memory.parts["framework"]
    assert planned == pytest.approx(found.peak_bytes, rel=0.04), (memory.moments, found.phases)


@pytest.mark.parametrize("name", ["single", "fsdp8", "zero1x8", "zero2x8"])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_gradient_of_one_weight_at_both_ends_is_made_of_two(name, micro):
    """Of so few tokens it is the peak, of which one tensor more would be a sixth."""
    layout, facts = replace(parse_layout(name), packing=False), SHALLOW | {"vocab_size": 32768}
    work = Work(shape_from_config(facts), None, has_kernels=False)
    memory = estimate_memory(work, layout, 16, later=16 if micro > 1 else 0, accumulation=micro)
    found = dry_run(PLAIN, facts, layout, [16] * micro, micro)
    assert memory.peak_moment == EMBEDDING
    planned = memory.peak_bytes - memory.parts["framework"]
    assert planned == pytest.approx(found.phases["backward"], rel=0.06), (memory.moments, found.phases)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("size", [1792, 7168])  # smaller than the head, and larger
def test_the_next_is_gathered_while_a_layer_is_still_there(size, recompute):
    """Where nothing learns that is as large: a layer, what came of it, and of the next."""
    layout = replace(parse_layout("fsdp8"), packing=False, recompute=recompute)
    facts = WIDE | {"intermediate_size": size}
    work = Work(shape_from_config(facts), ADAPTED.lora, has_kernels=False)
    memory = estimate_memory(work, layout, 64)
    found = dry_run(ADAPTED, facts, layout, [64])
    assert memory.peak_moment == (AHEAD if size > 1792 else HEAD)
    planned = memory.peak_bytes - memory.parts["framework"]
    # torch 2.15 lets what was gathered of the last layer go before the head is.
    earlier = size == 1792 and torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)
    assert planned == pytest.approx(found.phases["forward"], rel=0.12 if earlier else 0.03), (memory.moments, found)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_peak_that_lies_elsewhere_in_deeper_models_is_found(monkeypatch, recompute):
    """Of few layers the backward pass has its peak at its end, of many where it begins: two straight lines."""
    layout = Layout(packing=False, precision="bf16", recompute=recompute)
    facts = WIDE | {"num_hidden_layers": 16, "tie_word_embeddings": False}
    line = dry_run(PLAIN, facts, layout, [1024])
    monkeypatch.setattr(module, "PROBED_LAYERS", (16, 32))
    whole = dry_run(PLAIN, facts, layout, [1024])
    assert (line.probed, whole.probed) == ((4, 8), (16,))
    for phase in ("forward", "backward", "optimizer step"):
        assert line.phases[phase] == pytest.approx(whole.phases[phase], rel=2e-3), phase


MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "head_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352,
}  # fmt: skip


@pytest.mark.parametrize("name", ["single", "fsdp4.ep4", "fsdp4.ep2", "fsdp2.tp2.ep4", "single.tp2.ep2"])
def test_a_dry_run_walks_along_the_axis_of_experts(name):
    """As if all experts were asked equally often: memory beside the plan's, and what travels."""
    layout = replace(parse_layout(name), packing=False)
    work = Work(shape_from_config(MIXTURE), None, "cpu")
    memory = estimate_memory(work, layout, TOKENS)
    found = dry_run(PLAIN, MIXTURE, layout, [TOKENS])
    planned = memory.peak_bytes - memory.parts.get("framework", 0) - memory.parts.get("checkpoint copy", 0)
    assert found.peak_bytes == pytest.approx(planned, rel=0.25), (found.phases, memory.parts)
    theory = traffic(work, layout, 8, accumulation=1, tokens=TOKENS)
    wanted = sum(one.sent_bytes for one in theory)
    sent = sum(one.sent_bytes for one in found.traffic.values())
    assert sent == pytest.approx(wanted, rel=0.05), ({k: vars(v) for k, v in found.traffic.items()}, theory)


@pytest.mark.parametrize("name", ["fsdp16", "fsdp6"])
def test_experts_that_are_fewer_than_ranks_or_no_multiple_of_them(name):
    """Sixteen ranks share the rows of eight experts. Six cannot, and have four more that are zeros."""
    facts = MIXTURE | {"tie_word_embeddings": False, "num_hidden_layers": 4, "vocab_size": 512}
    layout = replace(parse_layout(name), packing=False, precision="bf16", recompute="full")
    work = Work(shape_from_config(facts), None, "cpu", has_kernels=False)
    memory = estimate_memory(work, layout, 64, later=0, accumulation=1)
    found = dry_run(PLAIN, facts, layout, [64])
    planned = memory.peak_bytes - memory.parts["framework"]
    assert planned == pytest.approx(found.peak_bytes, rel=0.08), (memory.moments, found.phases)
    wanted = sum(one.sent_bytes for one in traffic(work, layout, 8, accumulation=1, tokens=64))
    assert sum(one.sent_bytes for one in found.traffic.values()) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    ("facts", "name"), [(MIXTURE, "single"), (MIXTURE, "single.tp2.ep2"), (WIDE, "single"), (WIDE, "single.tp2")]
)
def test_ranks_of_a_tensor_axis_keep_a_part_of_what_layers_read(facts, name):
    """What more layers keep of more tokens, which is nothing of weights."""
    layout = replace(parse_layout(name), packing=False)

    def forward(layers, tokens):
        return dry_run(PLAIN, facts | {"num_hidden_layers": layers}, layout, [tokens]).phases["forward"]

    kept = ((forward(3, 512) - forward(3, 256)) - (forward(1, 512) - forward(1, 256))) / 2 / 256
    planned, _ = activation_bytes_per_token(Work(shape_from_config(facts), None, has_kernels=False), layout)
    assert planned == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("settings", [{"train": {"weights": "bf16"}}, {"optim": {"name": "muon"}}])
def test_an_optimizer_that_asks_for_the_number_of_its_step_is_run(settings):
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, **settings})
    layout = replace(parse_layout("fsdp4"), packing=False, precision="bf16")
    found = dry_run(config, SHALLOW, layout, [TOKENS])
    assert found.phases["optimizer step"] > 0


def test_what_is_only_planned_has_no_code_to_run():
    with pytest.raises(ValueError, match="planned only"):
        dry_run(PLAIN, FACTS, parse_layout("ddp4·tp2"), [TOKENS])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_layout_of_bloom_is_run_whole():
    """384 ranks: 8 copies of 12 stages of 4 ranks; sizes are BLOOM's, layers those that stages of ours may have."""
    facts = {
        "model_type": "llama", "vocab_size": 250880, "hidden_size": 14336, "intermediate_size": 38400,
        "num_hidden_layers": 70, "num_attention_heads": 112, "num_key_value_heads": 112, "tie_word_embeddings": True,
    }  # fmt: skip
    layout = replace(parse_layout("zero1x8.tp4.pp12"), precision="bf16", recompute="full")
    found = dry_run(PLAIN, facts, layout, [2048, 2048], 32)
    weights = 176e9 * 4 / 48  # fp32 masters of a rank's share; the ends have the words beside fewer layers
    assert weights < found.peak_bytes < 4 * weights, found


# Ranks of a tensor axis put products together again, all of an MLP's or of attention's, and hold them whole.
JOINED = {
    "phi3": {"pad_token_id": 0, "sliding_window": None}, "glm4": {"pad_token_id": 0, "head_dim": 64},
    "olmo2": {"num_key_value_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("way", ["full", "lora"])
@pytest.mark.parametrize("family", JOINED)
def test_what_ranks_put_together_again_is_held_and_sent_as_planned(family, way):
    config, asked = WAYS[way]
    layout, tokens = replace(parse_layout("single.tp4"), packing=False, precision="bf16", recompute="none"), 2048
    facts = WIDE | {"model_type": family} | JOINED[family]
    work = Work(shape_from_config(facts), device="cpu", has_kernels=False, **({"lora": None} | asked))
    memory = estimate_memory(work, layout, tokens, later=0, accumulation=1)
    found = dry_run(config, facts, layout, [tokens], 1)
    assert memory.peak_bytes - memory.parts["framework"] == pytest.approx(found.peak_bytes, rel=0.1)
    planned = sum(one.sent_bytes for one in traffic(work, layout, 8, tokens=tokens) if one.kind == "all-gather")
    assert found.traffic["all-gather"].sent_bytes == pytest.approx(planned, rel=0.01)
