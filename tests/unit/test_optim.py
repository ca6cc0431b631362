"""Rates follow optimizer steps; AdamW is torch's; clipping uses the one global norm."""

import itertools
import math

import pytest
import torch

from duoka.config.rates import batch_factor, warmup_steps
from duoka.config.schema import OptimConfig
from duoka.errors import ConfigError
from duoka.model.layers import find_layers
from duoka.optim.build import build_optimizer, describe_optimizer, optimizer_tensors, set_learning_rate
from duoka.optim.clip import clip_gradients
from duoka.optim.muon import orthogonalise
from duoka.optim.owners import share_matrices, work_of
from duoka.optim.roles import assign_roles
from duoka.optim.schedule import learning_rate, lost_peak, tokens_per_step
from duoka.units import parse_amount


def rates(total, **optim):
    return [learning_rate(OptimConfig(lr=1.0, **optim), step, total) for step in range(1, total + 1)]


def test_warmup_as_a_share_and_as_steps():
    assert warmup_steps(OptimConfig(warmup=0.03), 100) == 3
    assert warmup_steps(OptimConfig(warmup=0.03), 10) == 1
    assert warmup_steps(OptimConfig(warmup=7), 100) == 7
    assert warmup_steps(OptimConfig(warmup=200), 100) == 100
    assert warmup_steps(OptimConfig(warmup=0), 100) == 0


def test_warmup_in_tokens_is_the_steps_that_hold_them():
    samples, tokens = parse_amount(16), parse_amount("2048 tokens")
    assert warmup_steps(OptimConfig(warmup="1M tokens"), 1000, tokens_per_step(tokens, 99.0)) == 489  # 488.28
    assert warmup_steps(OptimConfig(warmup="32k tokens"), 1000, tokens_per_step(samples, 200.0)) == 10
    assert warmup_steps(OptimConfig(warmup="1B tokens"), 1000, tokens_per_step(tokens, 99.0)) == 1000
    with pytest.raises(ConfigError, match="how many tokens a step has"):
        warmup_steps(OptimConfig(warmup="1M tokens"), 1000)


def test_the_first_step_learns_and_the_peak_is_reached():
    seen = rates(10, warmup=4, schedule="constant")
    assert seen == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_cosine_and_linear_fall_to_min_lr_after_the_last_step():
    for schedule in ("cosine", "linear"):
        seen = rates(100, warmup=0, schedule=schedule, min_lr=0.1)
        assert seen[0] == 1.0
        assert all(later < earlier for earlier, later in itertools.pairwise(seen))
        assert 0.1 < seen[-1] < 0.12
    assert rates(4, warmup=0, schedule="cosine")[2] == pytest.approx(0.5)
    assert rates(8, warmup=0, schedule="cosine")[2] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2))


def test_the_second_matrix_of_an_adapter_learns_so_many_times_faster():
    torch.manual_seed(0)
    values = {f"layer.lora_{side}.default.weight": torch.randn(3, 4) for side in "AB"}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = build_optimizer(ours, OptimConfig(weight_decay=0.1), b_lr_ratio=16.0)
    plain = [torch.nn.Parameter(value.clone()) for value in values.values()]
    reference = [torch.optim.AdamW([p], lr=0.0, weight_decay=0.1, foreach=False, fused=False) for p in plain]
    for step in range(3):
        set_learning_rate(optimizer, 0.01 * (step + 1))
        for opt, ratio in zip(reference, (1, 16), strict=True):
            opt.param_groups[0]["lr"] = 0.01 * (step + 1) * ratio
        for p, q in zip(ours.values(), plain, strict=True):
            p.grad = torch.randn(3, 4)
            q.grad = p.grad.clone()
        for opt in (optimizer, *reference):
            opt.step()
    for p, q in zip(ours.values(), plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_adamw_equals_torchs_plain_adamw_with_decay_on_matrices_only():
    ours, plain = small_model(), small_model()
    optim = OptimConfig(lr=0.03, weight_decay=0.2, betas=(0.8, 0.95))
    optimizer = build_optimizer(dict(ours.named_parameters()), optim)
    groups = [
        {"params": [plain[0].weight, plain[2].weight], "weight_decay": 0.2},
        {"params": [plain[0].bias, plain[1].weight, plain[1].bias, plain[2].bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.95), foreach=False, fused=False)
    for step in range(5):
        set_learning_rate(optimizer, 0.03 / (step + 1))
        for group in reference.param_groups:
            group["lr"] = 0.03 / (step + 1)
        batch = torch.randn(4, 6)
        for model, opt in ((ours, optimizer), (plain, reference)):
            opt.zero_grad()
            model(batch).square().sum().backward()
            opt.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_state_made_before_the_first_step_changes_nothing():
    early, late = small_model(), small_model()
    results = []
    for model, make_early in ((early, True), (late, False)):
        optimizer = build_optimizer(dict(model.named_parameters()), OptimConfig(lr=0.1))
        if make_early:
            optimizer_tensors(optimizer, dict(model.named_parameters()))
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_in_host_memory_changes_no_number():
    """On a CPU nothing moves: three steps of HostAdamW are those of torch's own, bit for bit."""
    results = []
    for on_host in (False, True):
        model = small_model()
        optimizer = build_optimizer(dict(model.named_parameters()), OptimConfig(lr=0.1), on_host=on_host)
        for _ in range(3):
            model(torch.ones(3, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer_tensors(optimizer, dict(model.named_parameters())) | dict(model.named_parameters()))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e9])
def test_clipping_uses_the_global_norm(limit):
    model = small_model()
    model(torch.ones(3, 6)).square().sum().backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    norm = float(clip_gradients(model.parameters(), limit))
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert norm == pytest.approx(float(before.norm()), rel=1e-6)
    wanted = before if limit == 0.0 or norm < limit else before * (limit / norm)
    assert torch.allclose(after, wanted, rtol=1e-4)


def test_wsd_stays_up_and_falls_at_the_end():
    seen = rates(100, warmup=10, schedule="wsd", decay=0.2)
    assert seen[9:80] == [1.0] * 71
    assert seen[80] == pytest.approx(1.0) and seen[90] == pytest.approx(0.5) and seen[-1] == pytest.approx(0.05)


def test_wsd_that_falls_before_its_warmup_ends_turns_where_both_meet():
    """It jumped from 0.8 of a warm-up's end to 0.5 of the fall in one step."""
    seen = rates(20, warmup=15, schedule="wsd", decay=0.5)
    rising, falling = [step / 15 for step in range(1, 21)], [(21 - step) / 10 for step in range(1, 21)]
    assert seen == pytest.approx([min(one, other, 1.0) for one, other in zip(rising, falling, strict=True)])
    assert max(abs(a - b) for a, b in itertools.pairwise(seen)) <= 0.1 + 1e-9, "no step is a jump"
    optim = OptimConfig(lr=2.0, warmup=15, schedule="wsd", decay=0.5)
    assert lost_peak(optim, 20) == pytest.approx(2.0 * 12 / 15), "said at the start: it never reaches 2"
    assert lost_peak(optim.model_copy(update={"warmup": 11}), 20) is None


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_rates_follow_the_batch_as_asked(rule, factor):
    optim = OptimConfig(lr_scaling=rule, lr_batch=None if rule == "none" else 16)
    assert batch_factor(optim, parse_amount(64)) == factor


def test_owners_share_the_work_of_whole_matrices_evenly():
    shapes = [(64, 64)] * 8 + [(64, 160)] * 12 + [(7, 3)]
    for num_ranks in (1, 2, 3, 4, 5):
        buckets = share_matrices(shapes, num_ranks, bucket_bytes=5 * 4 * 64 * 64)
        assert sorted(m for bucket in buckets for m in bucket.members) == list(range(len(shapes)))
        work = [sum(work_of(b.shape) * b.counts(num_ranks)[rank] for b in buckets) for rank in range(num_ranks)]
        assert max(work) - min(work) <= work_of((64, 160)), f"{num_ranks} ranks: {work}"
        assert [b.members[-1] for b in buckets] == sorted(b.members[-1] for b in buckets)


@pytest.mark.parametrize("shape", [(12, 48), (48, 12)])
def test_muon_at_adamws_scale_moves_as_torchs_own(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(3, *shape)
    moved = []
    for name in ("torch", "adamw", "shape"):
        p = torch.nn.Parameter(start.clone())
        options = {"lr": 0.1, "weight_decay": 0.2}
        if name == "torch":
            optimizer = torch.optim.Muon([p], adjust_lr_fn="match_rms_adamw", **options)
        else:
            optim = OptimConfig(name="muon", adamw_lr=0.1, muon_scale=name, **options)
            optimizer = build_optimizer({"p": p}, optim, roles={"p": "matrix"})
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        moved.append(p.detach() - start)
    assert (moved[1] - moved[0]).norm() < 0.02 * moved[0].norm()  # torch iterates in bf16
    assert (moved[2] - moved[0]).norm() > 0.1 * moved[0].norm()


def test_muon_and_the_rest_are_said_apart():
    model = small_model()
    optim = OptimConfig(name="muon", lr=0.02, adamw_lr=3e-4)
    optimizer = build_optimizer(dict(model.named_parameters()), optim)
    assert (
        describe_optimizer(optimizer, optim, 1.0)
        == "muon lr 0.02 for 2 matrices, adamw lr 0.0003 for 4 others (AdamW fused)"
    )
    assert describe_optimizer(optimizer, optim, 2.0).endswith("0.0006 for 4 others (0.02 by lr_scaling) (AdamW fused)")
    for group in optimizer.param_groups:  # as DeepSpeed's stage 3 leaves them, whose own lines are stepped on
        group["params"] = []
    assert describe_optimizer(optimizer, optim, 1.0).startswith("muon lr 0.02 for 2 matrices, adamw lr 0.0003 for 4")
    set_learning_rate(optimizer, 0.01)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([1.5e-4, 0.01])


def test_adamw8bit_learns_as_adamw_does_goes_on_bit_for_bit_and_keeps_two_bytes():
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    start = {"large": torch.randn(64, 128), "small": torch.randn(40)}  # small ones keep 32 bits
    gradients = [{name: torch.randn_like(value) for name, value in start.items()} for _ in range(8)]
    optim = OptimConfig(name="adamw8bit", lr=0.01, weight_decay=0.1)

    def learn(optimizer, named, steps):
        for gradient in gradients[steps]:
            for name, parameter in named.items():
                parameter.grad = gradient[name].clone()
            optimizer.step()

    def fresh(values, optim=optim):
        named = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        return build_optimizer(named, optim), named

    ours, named = fresh(start)
    learn(ours, named, slice(0, 5))
    saved = {name: value.clone() for name, value in optimizer_tensors(ours, named).items()}
    weights = {name: p.detach().clone() for name, p in named.items()}
    learn(ours, named, slice(5, 8))
    exact, wanted = fresh(start, optim.model_copy(update={"name": "adamw"}))
    learn(exact, wanted, slice(0, 8))
    moved = {name: (p - start[name]).norm() for name, p in wanted.items()}
    assert (named["large"] - wanted["large"]).norm() < 0.03 * moved["large"]
    assert (named["small"] - wanted["small"]).norm() < 1e-5 * moved["small"]

    again, others = fresh(weights)
    for name, value in optimizer_tensors(again, others).items():
        value.copy_(saved[name])
    learn(again, others, slice(5, 8))
    assert all(torch.equal(others[name], p) for name, p in named.items())
    large = [value for name, value in saved.items() if name.endswith(".large")]
    assert sum(value.numel() * value.element_size() for value in large) < 2.05 * start["large"].numel()


@pytest.mark.parametrize("shape", [(2, 131, 200), (1, 260, 128), (3, 20, 8)])
def test_orthogonalised_matrices_are_five_steps_of_the_quintic(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    for matrix, found in zip(matrices.double(), orthogonalise(matrices), strict=True):
        x = matrix / torch.linalg.matrix_norm(matrix)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        assert (found - x).norm() < 1e-5 * x.norm()


def test_adamw8bit_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="bitsandbytes computes, and it is not installed"):
        build_optimizer({"w": torch.nn.Parameter(torch.zeros(3))}, OptimConfig(name="adamw8bit"))


def test_biases_of_experts_and_norms_of_heads_are_no_matrices_though_they_lie_as_such():
    """GPT-OSS has a bias for each expert, Cohere a norm for each head, Mamba its A, each as one tensor of two sizes."""
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        MambaConfig,
        MambaForCausalLM,
    )

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    with torch.device("meta"):
        models = (
            GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=4, head_dim=16)),
            CohereForCausalLM(CohereConfig(**sizes, **heads, use_qk_norm=True)),
            MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0)),
        )
    seen = set()
    for model in models:
        named = dict(model.named_parameters())
        roles = assign_roles(model, model, find_layers(model))
        optimizer = build_optimizer(named, OptimConfig(name="muon", adamw_lr=1e-3, weight_decay=0.1), roles=roles)
        of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in named.items():
            last, group = name.rpartition(".")[2], of[id(parameter)]
            is_vector = "bias" in last or "norm" in name.split(".")[-2] or last in ("A_log", "D", "sinks")
            assert (group["weight_decay"] == 0.0) == is_vector, name
            assert group["kind"] != "muon" or not is_vector, name
            seen |= {last} if is_vector and parameter.ndim == 2 else set()
    assert seen == {"gate_up_proj_bias", "down_proj_bias", "weight", "A_log"}
