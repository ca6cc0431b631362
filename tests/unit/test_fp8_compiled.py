"""`train.precision: fp8` beside `train.compile`: the compiled step's loss and gradients are those of the eager one."""

import pytest
import torch
import torch._dynamo
from fakegpu.run import find_compiler
from transformers import LlamaConfig, LlamaForCausalLM

from duoka.config.schema import ParallelConfig
from duoka.model.attention import NAME, register_attention
from duoka.model.build import LossModel
from duoka.model.fp8 import Fp8Linear
from duoka.parallel.apply import parallelize
from duoka.parallel.mesh import Mesh
from duoka.plan.layout import Layout

NO_COMPILER = "NO C++ COMPILER (g++ or clang++): products in 8 bits were not compiled, only traced"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip
IDS = torch.arange(24)[None] * 7 % 64


def build(num_layers, **layout):
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=num_layers, attn_implementation=NAME)
    model = LossModel(LlamaForCausalLM(config)).train()
    parallelize(model, Layout(precision="fp8", packing=False, **layout), ParallelConfig(), Mesh())
    assert sum(isinstance(one, Fp8Linear) for one in model.modules()) == 7 * num_layers
    return model


def steps(model, count=3):
    """Losses, and the gradients of the last step, of plain SGD."""
    losses, trained = [], dict(model.named_parameters())
    for step in range(count):
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(IDS, IDS.roll(-1), torch.arange(IDS.shape[1])[None])
        loss.backward()
        losses.append(float(loss.detach()))
        if step == count - 1:
            break
        with torch.no_grad():
            for parameter in trained.values():
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
    return losses, {name.replace("_orig_mod.", ""): one.grad for name, one in trained.items()}


@pytest.fixture
def compile_by(monkeypatch):
    """Layers are compiled by the backend of that name, "" by none; what comes back notes its graphs."""
    whole = torch.compile

    def use(name):
        graphs = []

        def compile_noted(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(name)(graph, inputs)

        compiled = (lambda call, **how: whole(call, **{**how, "backend": compile_noted})) if name else _as_it_is
        monkeypatch.setattr(torch, "compile", compiled)
        torch._dynamo.reset()
        return graphs

    yield use
    torch._dynamo.reset()


def _as_it_is(call, **how):
    return call


@pytest.mark.parametrize(
    ("backend", "layers", "recompute", "most"),
    [
        ("aot_eager", 2, "1/2", 0.0),
        # Fused sums round otherwise, and what falls on the other side of an 8-bit step is a quarter of itself away.
        pytest.param("inductor", 1, "full", 0.15, marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_step_is_the_eager_one(compile_by, backend, layers, recompute, most):
    if backend == "inductor" and find_compiler() is None:
        pytest.skip(NO_COMPILER)
    compile_by("")
    wanted, want_grads = steps(build(layers, compile=True, recompute=recompute))
    graphs = compile_by(backend)
    found, grads = steps(build(layers, compile=True, recompute=recompute))
    assert graphs, "nothing was compiled"
    assert wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, rel=max(1e-6, most / 100))
    assert grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert float((grads[name] - grad).norm() / grad.norm()) <= max(1e-6, most), name


def test_compiled_or_not_it_learns_what_fused_parts_learn(compile_by):
    """`compile` leaves the house's kernels out; in 8 bits the two differ by what is rounded otherwise."""
    compile_by("")
    wanted, _ = steps(build(2))
    found, _ = steps(build(2, compile=True))
    assert found == pytest.approx(wanted, rel=2e-3)
