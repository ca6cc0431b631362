"""What of the kernels' table a CPU cannot try: Liger's and duoka's kernels in a model, and layers as CUDA graphs."""

import pytest
import torch
from test_attention import documents, packed
from test_gpu_kernels import LIMITS, on, precise

from duoka.comm.world import World
from duoka.config.schema import GRAPHS, ParallelConfig
from duoka.model import gpu_kernels
from duoka.model.build import LossModel, load_model
from duoka.model.fused import apply_fused
from duoka.model.request import ModelRequest
from duoka.parallel.apply import parallelize
from duoka.parallel.mesh import Mesh
from duoka.plan.gpu_packages import why_no_liger, why_no_triton
from duoka.plan.layout import Layout

LLAMA_8B = gpu_kernels.Sizes(4096, 32, 8, 128, 14336, 128256)


@pytest.fixture(autouse=True)
def anew():
    gpu_kernels.forget()
    yield
    gpu_kernels.forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_installed_answers_as_torch_does(gpu, dtype):
    found = gpu_kernels.try_all(torch.device(gpu, 0), dtype, LLAMA_8B)
    assert found["loss"] == why_no_triton()
    assert {part: found[part] for part in ("norm", "rotation", "MLP")} == dict.fromkeys(
        ("norm", "rotation", "MLP"), why_no_liger()
    )


def learn(model, batches, precision="bf16"):
    losses = []
    for batch in batches:
        with precise(precision, "cuda"):
            loss, _ = model(**on("cuda", batch))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def check_same(ours, plain, limit):
    for one, two in zip(ours[0], plain[0], strict=True):
        assert abs(one / two - 1) < limit
    for one, two in zip(ours[1], plain[1], strict=True):
        assert float((one - two).norm() / two.norm()) < 10 * limit


def test_a_model_learns_the_same_with_them(gpu, tiny_model):
    answers = []
    for tried in (False, True):
        if tried:
            gpu_kernels.try_all(torch.device(gpu, 0), torch.bfloat16, gpu_kernels.Sizes())
        lm = load_model(ModelRequest(tiny_model, dtype=torch.float32))
        apply_fused(lm)
        answers.append(learn(LossModel(lm).to(gpu).train(), [packed(documents(256))]))
    check_same(answers[1], answers[0], LIMITS["bf16"])


@pytest.mark.parametrize("how", [True, GRAPHS])
def test_compiled_layers_and_cuda_graphs_learn_the_same(gpu, tiny_model, how):
    """Three steps of two micro-batches, whose gradients are added up."""
    docs = documents(256)
    batches = [packed(docs), packed(docs[::-1])]
    models = [LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).to(gpu).train() for _ in range(2)]
    layout = Layout(precision="bf16", compile=how)
    mesh = Mesh(everyone=World(device=torch.device(gpu, 0)))
    parallelize(models[0], layout, ParallelConfig(), mesh, row_tokens=sum(map(len, docs)))
    assert models[0].steady is not None
    for _ in range(3):
        ours, plain = (learn(model, batches) for model in models)
        check_same(ours, plain, LIMITS["bf16"])
        for model in models:
            model.zero_grad(set_to_none=True)
