"""What a compiled layer keeps for its backward pass on a GPU, as plans count it: torch's own partition of its graph.

Attention over documents is an operator that nothing looks into, as on a GPU. Nothing is computed in these types here.
"""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from duoka.config.schema import LoraConfig
from duoka.model import attention, fp8
from duoka.model.documents import Documents
from duoka.model.lora import apply_lora
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work
from duoka.plan.shape import shape_from_config

pytestmark = pytest.mark.timeout(240)
FACTS = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = 512


@pytest.fixture(scope="module", autouse=True)
def opaque():
    """Attention as one operator, and its gradient as another: they give tensors of the right form."""
    library = torch.library.Library("duoka_kept", "DEF")
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor edges) -> (Tensor, Tensor)")
    library.define("slopes(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor s) -> (Tensor, Tensor, Tensor)")

    def attend(q, k, v, edges):
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def slopes(g, q, k, v, o, s):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3], *output)

    def back(ctx, g, _):
        return *torch.ops.duoka_kept.slopes(g, *ctx.saved_tensors), None

    for name, function in (("attend", attend), ("slopes", slopes)):
        for key in ("CPU", "Meta"):
            library.impl(name, function, key)
    torch.library.register_autograd("duoka_kept::attend", back, setup_context=keep, lib=library)
    with pytest.MonkeyPatch.context() as patch:
        launch = lambda q, k, v, edges, *rest, **how: torch.ops.duoka_kept.attend(q, k, v, edges)[0]  # noqa: E731
        patch.setattr(attention, "find_varlen", lambda: launch)
        patch.setattr(attention, "has_kernel_for", lambda *_: True)
        yield
    library._destroy()


def kept_by(layer, rotary, stream):
    """Of what its forward graph hands to the backward one: bytes per token, but for what layers share, and bytes of
    weights in 8 bits."""
    found = []

    def look(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        shared = [node for node in graph.graph.nodes if node.op == "placeholder"][1:]  # all but the hidden states
        places = [place for place, node in enumerate(output.args[0]) if place and node is not None]
        places = [place for place in places if output.args[0][place] not in shared]

        def run(*args):
            answers = graph(*args)
            kept = [answers[place] for place in places if TOKENS in answers[place].shape]
            each = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}  # views: once
            eighths = [answers[place] for place in places if answers[place].itemsize == 1]
            weights = sum(one.nbytes for one in eighths if TOKENS not in one.shape)
            found.append((sum(each.values()) / TOKENS, weights))
            return answers

        return run

    backend = aot_autograd(
        fw_compiler=look, bw_compiler=lambda graph, inputs: graph, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    x = torch.randn(1, TOKENS, FACTS["hidden_size"], dtype=stream, requires_grad=True)
    places = torch.arange(TOKENS)[None]
    documents = Documents.of(torch.tensor([0, 100, 300, TOKENS]), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        tables = rotary(x, places)
        torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)(
            x, attention_mask=None, position_ids=places, position_embeddings=tables, documents=documents
        )
    (measured,) = found
    return measured


@pytest.fixture(params=["bf16", "fp8"])
def precision(request, monkeypatch):
    """8-bit products by the operator that GPUs have, for matrices as it takes them."""

    def multiply(a, b, scale_a, scale_b, out_dtype):
        a, b = fp8.lay_out(a, b)
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)

    monkeypatch.setattr(fp8, "multiply", multiply)
    torch.compiler.reset()
    return request.param


@pytest.mark.parametrize("kind", ["full", "bf16 weights", "LoRA"])
def test_a_compiled_layer_keeps_what_is_planned(kind, precision):
    if kind == "LoRA" and precision == "fp8":
        pytest.skip("adapters have no products in 8 bits")
    lora = LoraConfig(rank=8, dropout=0.0) if kind == "LoRA" else None
    lm = LlamaForCausalLM(LlamaConfig(**FACTS, attn_implementation=attention.register_attention()))
    lm = lm if kind == "full" else lm.to(torch.bfloat16)
    core = (lm if lora is None else apply_lora(lm, lora).get_base_model()).model
    stream = torch.float32 if kind == "full" else torch.bfloat16
    work = Work(
        shape_from_config({"model_type": "llama", **FACTS}), lora, "cuda", narrow_weights=kind == "bf16 weights"
    )  # fmt: skip
    check(core, work, precision, stream)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma", "olmo2"])
def test_other_families_layers_keep_what_is_planned(family, precision):
    """Norms of queries and keys; joined products; a norm by 1 + weight and another activation; norms behind."""
    config = AutoConfig.for_model(family, **FACTS, pad_token_id=0, head_dim=32)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register_attention())
    check(lm.model, Work(shape_from_config(config.to_dict()), None, "cuda"), precision, torch.float32)


def check(core, work, precision, stream):
    if precision == "fp8":
        fp8.apply_fp8(core, again=False)
    planned, _ = activation_bytes_per_token(work, Layout(precision=precision, compile=True))
    measured, weights = kept_by(core.layers[0], core.rotary_emb, stream)
    assert planned == pytest.approx(measured, rel=0.02), f"{planned:.0f} planned, {measured:.0f} kept"
    assert weights == 0 or precision == "bf16", f"{weights} bytes of weights in 8 bits, which plans do not count"
