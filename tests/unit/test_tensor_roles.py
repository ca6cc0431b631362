"""What cannot be cut is refused by its name, before weights are read; and settings that cuts rule out, before that."""

import pytest
import torch

from duoka.accelerator.settings import read_parallel
from duoka.config.rules import check_rules
from duoka.config.schema import ParallelConfig, RunConfig
from duoka.errors import ConfigError, Faults
from duoka.parallel.tensor_roles import find_parts
from duoka.plan.axes import check_shape
from duoka.plan.hardware import Machine
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

SIZES = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip


def build(kind, **sizes):
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))


def test_every_matrix_of_a_llama_has_a_part():
    parts = find_parts(build("LlamaConfig", **SIZES), 3)
    assert parts["model.embed_tokens"] == "words" and parts["lm_head"] == "joined"
    block = {name.removeprefix("model.layers.1."): part for name, part in parts.items() if ".1." in name}
    columns, rows = ("self_attn.q_proj", "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj")
    assert {block[name] for name in columns} == {"columns"} and {block[name] for name in rows} == {"rows"}
    assert len(block) == 7 and len(parts) == 2 * 7 + 2


def test_a_name_of_older_transformers_means_the_same():
    model = build("LlamaConfig", **SIZES)
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert find_parts(model, 3)["model.embed_tokens"] == "words"


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, ["no tensor-parallel plan", "GPT2"]),
        ("LlamaConfig", SIZES, ["num_attention_heads", "9"]),
        ("LlamaConfig", {**SIZES, "num_attention_heads": 6, "hidden_size": 36}, ["num_key_value_heads", "3"]),
        (
            "LlamaConfig",
            {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 47},
            ["model.layers.0.mlp.gate_proj", "47 output features"],
        ),
        (
            "Qwen3MoeConfig",
            {
                **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            },
            ["model.layers.0.mlp.experts"],
        ),
    ],
)  # fmt: skip
def test_what_has_no_part_is_refused_by_name(kind, sizes, words):
    with pytest.raises(ConfigError) as caught:
        find_parts(build(kind, **sizes), 2)
    for word in ("parallel.tensor is 2", *words):
        assert word in str(caught.value), caught.value
    assert caught.value.fix


def test_a_matrix_that_the_plan_forgot_is_refused_by_name():
    model = build("LlamaConfig", **SIZES)
    model.model.layers[0].mlp.extra = torch.nn.Linear(36, 36, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.extra\.weight"):
        find_parts(model, 3)
    model = build("LlamaConfig", **SIZES)
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.empty(9, device="meta"))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.sinks"):
        find_parts(model, 3)


def config(**sections):
    return RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}, **sections})


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        ({"parallel": {"tensor": 2, "strategy": "ddp"}}, "tensor-with-ddp"),
        ({"parallel": {"tensor": 2, "strategy": "single"}}, "tensor-with-one-process"),
        ({"parallel": {"tensor": 2, "bucket_mb": 5.0}}, "tensor-with-ddp-settings"),
        ({"parallel": {"tensor": 2}, "optim": {"name": "muon"}}, "tensor-with-optimizer-of-whole-matrices"),
        ({"parallel": {"tensor": 2}, "train": {"compile": True}}, "tensor-with-compile"),
        ({"parallel": {"tensor": 2, "offload": "params", "strategy": "fsdp"}}, "tensor-with-offloaded-params"),
        ({"parallel": {"tensor": 2}, "model": {"name": "demo", "quantization": "nf4"}}, "tensor-with-packed-weights"),
    ],
)  # fmt: skip
def test_settings_that_cuts_rule_out_are_refused(sections, rule):
    broken = check_rules(config(**sections))
    assert rule in {one.id for one in broken}
    sections["parallel"]["tensor"] = 1
    assert rule not in {one.id for one in check_rules(config(**sections))}


@pytest.mark.parametrize(("name", "strategy"), [("muon", "fsdp"), ("adafactor", "ddp"), ("adamw8bit", "ddp")])
def test_optimizers_of_whole_matrices_are_told_what_shares_them(name, strategy):
    rates = {"lr": 0.02, "adamw_lr": 1e-3} if name == "muon" else {"lr": 1e-3}
    (broken,) = check_rules(config(parallel={"tensor": 2}, optim={"name": name, **rates}))
    _, _, advice = broken.fix.partition("delete tensor:")
    assert f"fsdp shares weights for {name}" in advice if strategy == "fsdp" else "the others are for ddp" in advice
    assert not check_rules(config(parallel={"strategy": strategy}, optim={"name": name, **rates}))


def test_nine_heads_for_two_ranks_are_told_what_divides_them_before_anything_starts():
    machine = Machine(num_cores=2, memory_bytes=24 << 30, available_bytes=20 << 30)
    shape = demo_shape()  # 9 heads of which 3 have keys and values
    with pytest.raises(Faults) as caught:
        make_plan(config(parallel={"tensor": 2}), shape, machine, 2)
    text = str(caught.value)
    assert "9 heads" in text and "tensor: 3 with --nproc 3" in text and "tensor: 1" in text
    assert check_shape(ParallelConfig(tensor=3), shape, 3) == []
    plan = make_plan(config(parallel={"tensor": 3}), shape, machine, 6)
    assert plan.layout.name == "zero1x2·tp3" and "zero1" in plan.reasons["parallel.strategy"]
    assert make_plan(config(parallel={"tensor": 3}), shape, machine, 3).layout.name == "single·tp3"


def test_a_loop_of_ones_own_is_not_cut():
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 2"):
        read_parallel("fsdp", {"tensor": 2}, {})
