"""Mixtures of experts in the plan: what a token passes, what ranks that share experts hold, what is refused."""

from dataclasses import replace

import pytest
from needs import since

from duoka.config.schema import ParallelConfig, RunConfig
from duoka.plan.axes import check_axes, check_shape
from duoka.plan.hardware import Machine
from duoka.plan.layout import parse_layout
from duoka.plan.moments import END, pass_moments
from duoka.plan.picture import model_lines
from duoka.plan.recipe import Work, shares, static_memory
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape, shape_from_config

CPU = Machine(num_cores=2, memory_bytes=64 << 30, available_bytes=60 << 30)


def config(**parallel):
    return RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}, "parallel": parallel})


MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def test_a_mixture_of_experts_is_planned_with_what_a_token_passes():
    plan = make_plan(config(), shape_from_config(MIXTURE), CPU, 1)
    assert plan.verdict == "fits" and plan.refusal() is None
    assert "2 of 8 experts in each of 2 layers" in "\n".join(model_lines(plan))
    model = plan.to_json()["model"]
    each = 3 * 64 * 768
    assert model["num_parameters"] - model["num_active"] == 2 * 6 * each


def test_ranks_that_share_experts_hold_a_part_of_them_each():
    shape = shape_from_config(MIXTURE)
    layouts = [parse_layout(name) for name in ("fsdp4", "fsdp4.ep2", "fsdp4.ep4")]
    work = Work(shape, None)
    alone, two, four = (static_memory(work, layout).total_bytes for layout in layouts)
    experts = 16 * 2 * 8 * 3 * 64 * 768
    # Two ranks share what four shared; with four it is a quarter in either way.
    assert two - alone == pytest.approx(experts / 2 - experts / 4, abs=99)
    assert four == pytest.approx(alone, abs=99)


def test_experts_are_filled_up_to_the_ranks_unless_their_rows_are_shared():
    """Eight: to twelve on six ranks, and not on 16, by which the 64 numbers of a row can be divided."""
    shape, each = shape_from_config(MIXTURE), 2 * 3 * 64 * 768
    four, six, many = (
        static_memory(Work(shape, None), parse_layout(f"fsdp{ranks}")).weights_bytes * ranks / 4 for ranks in (4, 6, 16)
    )
    assert four == many == shape.num_parameters
    assert six == pytest.approx(shape.num_parameters + 4 * each, abs=6)


def test_gradients_of_experts_are_stacked_where_each_is_a_product_of_its_own():
    """By selective recompute, on a CPU; else they are computed where they belong, and one expert's is widened."""
    shape, plain = shape_from_config(MIXTURE), replace(parse_layout("single"), precision="bf16")

    def working(device, recompute="none"):
        work, layout = Work(shape, None, device), replace(plain, recompute=recompute)
        moments = pass_moments(work, layout, shares(work, layout)[0], 64, 64, is_first=True, is_only=True)
        return dict(moments)[END]["working"]

    assert working("cpu", "selective") - working("cuda", "selective") == 2 * 8 * 2 * 64 * 768
    assert working("cpu") - working("cuda") == 2 * 3 * 64 * 768


def mixture(count=8):
    facts = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    facts |= {"num_attention_heads": 4, "vocab_size": 512, "num_local_experts": count}
    return shape_from_config(facts | {"num_key_value_heads": 2})


@pytest.mark.parametrize(
    ("parallel", "world", "words"),
    [
        ({"expert": 3}, 4, ["among the 4 ranks that add their gradients", "expert: 4   or   expert: 2"]),
        ({"expert": 4, "sequence": 2}, 6, ["among the 6 ranks", "expert: 3   or   expert: 6"]),
        ({"expert": 4, "strategy": "hsdp", "shard_ranks": 2}, 4, ["among the 2 ranks that share a copy"]),
        ({"expert": 4, "tensor": 2, "pipeline": 2}, 4, ["among the 2 ranks that have the same layers", "expert: 2"]),
    ],
)
def test_an_expert_axis_that_does_not_divide_its_ranks_is_told_what_does(parallel, world, words):
    (fault,) = check_axes(ParallelConfig(**parallel), world)
    for word in words:
        assert word in f"{fault.what} {fault.fix}"


def test_experts_that_do_not_divide_are_refused_before_anything_starts():
    assert check_shape(ParallelConfig(expert=4), mixture(), 4) == []
    (fault,) = check_shape(ParallelConfig(expert=4), mixture(6), 4)
    assert "has 6 experts" in fault.what and "expert: 2" in fault.fix
    assert check_shape(ParallelConfig(expert=4, tensor=2), mixture(), 4) == []
    (fault,) = check_shape(ParallelConfig(tensor=2), mixture(), 4)
    assert "8 experts are shared out by expert: only" in fault.what and "expert: 2" in fault.fix
    assert "expert: 1" not in fault.fix, "which is what was refused"
    (fault,) = check_shape(ParallelConfig(tensor=2), mixture(7), 4)
    assert fault.fix == "write:   tensor: 1"
    (fault,) = check_shape(ParallelConfig(expert=2), demo_shape(), 2)
    assert "no mixture of experts" in fault.what


def test_an_expert_axis_takes_a_strategy_that_shares_state():
    plan = make_plan(config(expert=2), mixture(), CPU, 4)
    assert plan.layout.name == "fsdp4·ep2" and parse_layout("fsdp4·ep2").ep == 2
    with pytest.raises(ValueError, match="ranks that share state"):
        parse_layout("ddp2.ep2")
    cut = [make_plan(config(expert=2, tensor=2), mixture(), CPU, world).layout.name for world in (2, 4)]
    assert cut == ["single·tp2·ep2", "fsdp2·tp2·ep2"]
    alone, beside = (
        static_memory(Work(mixture(), None), parse_layout(name)) for name in ("fsdp2.ep2", "fsdp2.tp2.ep4")
    )
    assert beside.total_bytes == pytest.approx(alone.total_bytes / 2, rel=0.05), "half of both kinds"
    staged = make_plan(config(expert=2, pipeline=2), mixture(), CPU, 4)
    assert staged.layout.name == "zero1x2·pp2·ep2"
    whole, half = (
        static_memory(Work(mixture(), None), parse_layout(name)) for name in ("zero1x2.ep2", "zero1x2.pp2.ep2")
    )
    assert half.total_bytes < 0.7 * whole.total_bytes


@pytest.mark.parametrize(
    "model_type", ["afmoe", "flex_olmo", pytest.param("flint", marks=since(transformers="5.23")), "jetmoe", "mellum"]
)
def test_a_mixture_without_a_row_is_counted_by_what_its_config_says(model_type):
    """Not refused: whether it is right is tried on a tiny copy of it, and its counts are said to be estimates."""
    import torch
    from families import family_config
    from transformers import AutoModelForCausalLM

    from duoka.model.build import quiet_loading
    from duoka.model.tiny_copy import tiny_config

    asked = tiny_config(family_config(model_type))
    with quiet_loading(), torch.device("meta"):
        core = AutoModelForCausalLM.from_config(asked, dtype=torch.float32)
    shape = shape_from_config(asked.to_dict())
    assert shape.experts is not None and not shape.exact
    assert shape.num_parameters == pytest.approx(sum(p.numel() for p in core.parameters()), rel=0.1)
