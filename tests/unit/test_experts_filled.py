"""Experts on CPUs that multiply bf16: rows of zeros behind each expert's change nothing but the number of rows."""

import pytest
import torch
import torch.nn.functional as F

ROWS = [0, 5, 31, 32, 33, 100]


MODELS = {  # by gates without a bias, with weights transposed and biases, and without a gate
    "qwen3_moe": {"num_experts": len(ROWS), "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": len(ROWS), "intermediate_size": 24},
    "nemotron_h": {"n_routed_experts": len(ROWS), "moe_intermediate_size": 24, "layers_block_type": ["moe"]},
}


def build_experts(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    from duoka.model.experts import find_experts, use_own_experts

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **MODELS[family]))
    use_own_experts(model)
    found = next(module for _, module in find_experts(model))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def learn(module, rows, slope, dtype):
    """(what comes out, the gradients of rows and weights), computed in this type."""
    from duoka.model.experts import compute_experts

    given = rows.to(dtype).requires_grad_(True)
    wanted = [given, *module.parameters()]
    out = compute_experts(module, given, torch.tensor(ROWS))
    return [out.detach().double(), *(one.double() for one in torch.autograd.grad(out, wanted, slope.to(dtype)))]


@pytest.mark.parametrize("family", list(MODELS))
def test_filled_experts_learn_what_bare_ones_learn(family, monkeypatch):
    from duoka.model import experts

    module, dice = build_experts(family), torch.Generator().manual_seed(1)
    rows, slope = (torch.randn(sum(ROWS), 16, generator=dice).bfloat16() for _ in range(2))
    exact = learn(module.double(), rows, slope, torch.float64)
    off, seen, linear = {}, {}, F.linear
    for fills in (False, True):
        seen[fills] = []
        monkeypatch.setattr(experts, "fills_experts", lambda fills=fills: fills)
        monkeypatch.setattr(F, "linear", lambda a, b, to=seen[fills]: to.append(len(a)) or linear(a, b))
        found = learn(module.bfloat16(), rows, slope, torch.bfloat16)
        off[fills] = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert seen == {False: ROWS[1:] * 2, True: [5, 31, 32, 64, 128] * 2}
    assert all(filled < 1.2 * bare < 0.02 for filled, bare in zip(off[True], off[False], strict=True)), off


def test_products_in_fp32_get_no_rows(monkeypatch):
    from duoka.model import experts

    module, seen, linear = build_experts("qwen3_moe"), [], F.linear
    monkeypatch.setattr(experts, "fills_experts", lambda: True)
    monkeypatch.setattr(F, "linear", lambda a, b: seen.append(len(a)) or linear(a, b))
    learn(module, torch.randn(sum(ROWS), 16), torch.randn(sum(ROWS), 16), torch.float32)
    assert seen == ROWS[1:] * 2


@pytest.mark.parametrize("family", list(MODELS))
def test_experts_of_older_transformers_are_found_too(family):
    """Release 5.17 tells neither of expert parallelism nor of a norm behind experts."""
    module, dice = build_experts(family), torch.Generator().manual_seed(1)
    rows, slope = (torch.randn(sum(ROWS), 16, generator=dice) for _ in range(2))
    want = learn(module, rows, slope, torch.float32)
    for name in ("_is_expert_parallel", "has_post_expert_norm"):
        module.__dict__.pop(name, None)

    from duoka.model.experts import find_experts

    assert [one for _, one in find_experts(module)] == [module]
    for one, two in zip(learn(module, rows, slope, torch.float32), want, strict=True):
        assert torch.equal(one, two)
