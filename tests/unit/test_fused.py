"""Fused parts give the values and gradients of the model's own code, and what is not understood stays as it is."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from duoka.config.schema import LoraConfig
from duoka.model.adapted import AdaptedProduct
from duoka.model.build import LossModel, load_model
from duoka.model.fused import apply_fused, fused_parts
from duoka.model.gated import GatedDown, forward_gated
from duoka.model.gates import Gated
from duoka.model.loss import Goal
from duoka.model.norms import RmsNorm
from duoka.model.remade import remade
from duoka.model.request import ModelRequest


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: RmsNorm.apply(x, w, 1e-3), (draw(2, 3, 5), draw(5)))
    assert torch.autograd.gradcheck(Gated.apply, (draw(3, 4), draw(3, 4)))
    assert torch.autograd.gradcheck(GatedDown.apply, (draw(2, 3, 4), draw(2, 3, 4), draw(5, 4)))
    weight, bias = draw(6, 5).detach(), draw(6).detach()
    adapted = (draw(2, 3, 5), draw(2, 5), draw(6, 2))
    assert torch.autograd.gradcheck(lambda x, a, b: AdaptedProduct.apply(x, weight, bias, a, b, 1.7), adapted)


class Down(torch.nn.Linear):
    """As a rank has it: a part of the inputs' weights, and the answer is the sum over ranks, here of two alike."""

    def __init__(self, takes_parts):
        super().__init__(4, 3, bias=False)
        self.takes_parts = takes_parts

    def forward(self, x):
        return self.given(F.linear(x, self.weight))

    def own_weight(self):
        return self.weight

    def given(self, out):
        return 2 * out


@pytest.mark.parametrize("takes_parts", [True, False])
def test_a_rank_s_part_behind_a_gate_is_summed_up_and_one_of_whole_inputs_is_left_to_itself(takes_parts):
    torch.manual_seed(0)
    mlp = torch.nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = torch.nn.Linear(5, 4), torch.nn.Linear(5, 4), Down(takes_parts)
    asked = []
    mlp.down_proj.own_weight = lambda: asked.append("weight") or mlp.down_proj.weight
    x = torch.randn(2, 5)
    wanted = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(forward_gated(mlp, x), wanted)
    assert asked == (["weight"] if takes_parts else [])


def learn(folder, lora, fuse, dtype=torch.float32, autocast=False):
    lm = load_model(ModelRequest(folder, dtype=dtype, lora=lora))
    if lora:  # B begins as zero, which would hide A's gradient
        torch.manual_seed(2)
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1)
    count = apply_fused(lm) if fuse else 0
    model = LossModel(lm).train()
    torch.manual_seed(1)
    ids = torch.randint(3, 260, (1, 40))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = model(ids, ids.roll(-1), torch.arange(40)[None], torch.tensor([0, 11, 40], dtype=torch.int32))
    loss.backward()
    return count, loss.detach(), {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=4, dropout=0.0), LoraConfig(rank=4, dropout=0.0, targets=["lm_head", "q_proj"])]
)
def test_a_whole_model_learns_the_same(tiny_model, lora):
    count, ours, got = learn(tiny_model, lora, True)
    _, plain, want = learn(tiny_model, lora, False)
    # Per layer: 2 norms, an MLP, a rotation, 7 adapters; and the last norm. The head's adapter is read by the loss.
    adapters = 0 if lora is None else 4 * (7 if lora.targets == "all" else 1)
    assert count == 4 * 4 + 1 + adapters
    assert abs(ours.item() / plain.item() - 1) < 1e-6
    for name, grad in want.items():
        error = float((got[name] - grad).norm() / grad.norm())
        assert error < 1e-5, f"{name}: gradient is off by {error}"


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.0)])
def test_in_half_precision_it_is_as_near(tiny_model, lora):
    dtype = torch.bfloat16 if lora else torch.float32
    _, ours, got = learn(tiny_model, lora, True, dtype, autocast=True)
    _, exact, want = learn(tiny_model, lora, False)
    assert abs(ours.item() / exact.item() - 1) < 1e-2
    for name, grad in want.items():
        error = float((got[name].float() - grad).norm() / grad.norm())
        assert error < 0.1, f"{name}: gradient is off by {error}"


def test_dropout_is_never_left_out(tiny_model):
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32, lora=LoraConfig(rank=4, dropout=0.5)))
    assert apply_fused(lm) == 4 * 4 + 1


def test_norms_of_queries_and_keys_learn_the_same():
    """Qwen3's: their gradients come with heads and tokens swapped."""
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    plain = Qwen3ForCausalLM(config)
    fused = copy.deepcopy(plain)
    assert apply_fused(fused) == 7
    ids = torch.arange(14).view(2, 7)
    for model in (plain, fused):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, want), got in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-4, atol=1e-7), name


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "layer_types": ["full_attention"]}
QWEN = {**SMALL, "layer_types": ["full_attention"], "hidden_act": "gelu"}
OTHERS = {  # norms by 1 + weight, or whose class has them without one; how many, and what else is replaced
    "gemma": (GemmaConfig(**SMALL), 3, 2),
    "gemma2": (Gemma2Config(**SMALL, query_pre_attn_scalar=8), 5, 2),
    "gemma3": (Gemma3TextConfig(**SMALL, query_pre_attn_scalar=8), 7, 2),
    "gemma4": (Gemma4TextConfig(**SMALL, **PLAIN), 7, 1),
    "qwen3.5": (Qwen3_5TextConfig(**QWEN), 5, 2),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("narrow", [False, True])
def test_norms_by_one_plus_weight_and_gates_by_gelu_learn_the_same(name, narrow):
    config, num_norms, others = OTHERS[name]
    torch.manual_seed(0)
    exact = AutoModelForCausalLM.from_config(config)
    for parameter in exact.parameters():  # norms begin as 1
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    plain, fused = copy.deepcopy(exact), copy.deepcopy(exact)
    assert apply_fused(fused) == num_norms + others
    by = "gelu" if name == "qwen3.5" else "gelu_pytorch_tanh"
    assert fused_parts(fused) - {"rotation"} == {"norm", f"MLP by {by}"}
    ids = torch.randint(1, 32, (2, 20))
    for model in (exact, plain, fused):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow and model is not exact):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    for (name, want), rounded, got in zip(
        exact.named_parameters(), plain.parameters(), fused.parameters(), strict=True
    ):
        far = (got.grad - want.grad).norm() / want.grad.norm()
        # In half precision, no further than the model's own code.
        limit = 2 * (rounded.grad - want.grad).norm() / want.grad.norm() + 1e-3 if narrow else 1e-5
        assert far < limit, f"{name}: gradient is off by {far}, the model's own by {limit}"


def test_what_computes_otherwise_is_left_alone():
    config = CohereConfig(**{**SMALL, "attn_implementation": "sdpa"}, logit_scale=1.0)  # its norms take the mean away
    assert fused_parts(made := CohereForCausalLM(config)) == set() and apply_fused(made) == 1
    assert fused_parts(made) == {"MLP by silu"}, "its rotation turns pairs that lie side by side"


def test_a_decorated_attention_turns_by_our_rotation_and_keeps_its_decorator(monkeypatch):
    """As transformers decorates it, where an argument has another name since a later version."""

    def renamed(forward):
        @functools.wraps(forward)
        def wrapped(*args, **named):
            called.append(sorted(named))
            return forward(*args, **{"attention_mask" if name == "mask" else name: one for name, one in named.items()})

        return wrapped

    class Decorated(LlamaAttention):
        forward = renamed(LlamaAttention.forward)

    called = []
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa")
    plain = torch.nn.ModuleList([LlamaAttention(config, 0)])
    ours = copy.deepcopy(plain)
    ours[0].__class__ = Decorated
    plain.config = ours.config = config
    assert apply_fused(ours) == 1 and fused_parts(ours) == {"rotation"}
    x, places = torch.randn(1, 5, 16), torch.arange(5)[None]
    tables = LlamaRotaryEmbedding(config)(x, places)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    want, _ = plain[0](x, position_embeddings=tables, attention_mask=mask)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", None)  # nobody calls theirs
    got, _ = ours[0](x, position_embeddings=tables, mask=mask)
    assert torch.equal(got, want) and called == [["mask", "position_embeddings"]]


def test_smoothing_is_for_training_only(tiny_model):
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32))
    torch.manual_seed(1)
    ids = torch.randint(3, 260, (1, 40))
    labels = ids.roll(-1)
    logits = lm(ids).logits[0]
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        ours, _ = LossModel(lm, Goal(0.1)).train(training)(ids, labels, torch.arange(40)[None])
        want = F.cross_entropy(logits, labels[0], reduction="sum", label_smoothing=smoothing)
        assert abs(ours.item() / want.item() - 1) < 1e-6, f"training={training}"


def test_a_norm_that_may_be_given_a_gate_is_no_norm_of_one_input():
    """Bamba's in transformers 5.17: of one input it is an RMS norm."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden_states):
            inverse = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (hidden_states * inverse)

    class Gated(Plain):
        def forward(self, hidden_states, gate=None):
            hidden_states = hidden_states if gate is None else hidden_states * torch.nn.functional.silu(gate)
            inverse = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (hidden_states * inverse)

    found = []
    for kind, part in ((Gated, "gated norm"), (Plain, "norm")):
        held = torch.nn.ModuleList([kind()])
        assert apply_fused(held) == 1 and fused_parts(held) == {part}
        found.append(held[0])
    x, gate = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(found[0](x), found[1](x))
    torch.testing.assert_close(found[0](x, gate), Gated()(x, gate))


def test_a_norm_is_called_by_the_name_of_its_input_and_may_lack_a_weight():
    class Norm(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight, self.eps = weight, 1e-6

        def forward(self, states):
            states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
            return states if self.weight is None else states * self.weight

    x, bare, norms = torch.randn(3, 8), Norm(None), torch.nn.ModuleList([Norm(torch.nn.Parameter(torch.ones(8)))])
    assert apply_fused(torch.nn.ModuleList([bare])) == 0 and apply_fused(norms) == 1
    torch.testing.assert_close(norms[0](states=x), bare(x))


@pytest.mark.parametrize("act", [torch.nn.GELU(approximate="tanh"), torch.nn.GELU(), torch.nn.SiLU()], ids=repr)
def test_a_gate_is_known_by_what_it_computes(act):
    """Two of one class may not be the same."""

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(8, 12), torch.nn.Linear(8, 12)
            self.down_proj, self.act_fn = torch.nn.Linear(12, 8), act

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    ours, x = Gated(), torch.randn(3, 8)
    want = ours(x)
    assert apply_fused(ours) == 1
    torch.testing.assert_close(ours(x), want)


def test_an_activation_in_steps_is_one_kernel_and_adapters_behind_it_keep_nothing_of_it():
    from transformers.activations import ACT2FN

    for name in ("gelu_new", "gelu_fast", "gelu", "gelu_pytorch_tanh", "silu", "relu2"):
        steps = ACT2FN[name]
        ours, x = copy.deepcopy(steps), torch.randn(3, 8, requires_grad=True)
        assert apply_fused(torch.nn.ModuleList([ours])) == 1, name
        torch.testing.assert_close(ours(x), steps(x))
        torch.testing.assert_close(*(torch.autograd.grad(act(x).sum(), x) for act in (ours, steps)))
        again = remade(ours(x))
        assert again is not None and again.sources[0] is x and torch.equal(again.recipe.make(again.sources), ours(x))
    for name in ("relu", "quick_gelu"):
        assert apply_fused(torch.nn.ModuleList([ACT2FN[name]])) == 0, name
    assert apply_fused(torch.nn.ModuleList([torch.nn.SiLU(inplace=True)])) == 0
