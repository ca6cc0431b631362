"""Attention and loss as training calls them, on each device, beside plain mathematics in fp64 or on the CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_attention import documents, packed, separate_loss

from duoka.config.schema import OptimConfig
from duoka.model.build import LossModel, load_model
from duoka.model.dropout import place_key
from duoka.model.experts import compute_experts, find_experts
from duoka.model.fp8 import CAPABILITY, E4M3, E5M2, Fp8Linear, quantize
from duoka.model.loss import sum_cross_entropy
from duoka.model.request import ModelRequest
from duoka.optim import narrow
from duoka.optim.build import build_optimizer

# Of the largest value: fp32 without TF32, and what 8 and 11 bits leave.
LIMITS = {"fp32": 2e-5, "fp16": 5e-3, "bf16": 3e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def full_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on(device, batch):
    """As the training step sends a micro-batch: edges of documents stay on the host."""
    return {name: value if name == "boundaries" else value.to(device) for name, value in batch.items()}


def precise(precision, device):
    return torch.autocast(device, dtype=DTYPES[precision], enabled=precision != "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_packed_documents_are_isolated(tiny_model, device, precision):
    if precision == "fp16" and device == "cpu":
        pytest.skip("no fp16 training on CPUs")
    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).to(device)
    plain = load_model(ModelRequest(tiny_model, dtype=torch.float32, attention="sdpa"))
    docs = documents(plain.config.vocab_size)
    with precise(precision, device):
        ours, _ = model(**on(device, packed(docs)))
    ours.backward()
    want = separate_loss(plain, docs)
    want.backward()
    assert abs(ours.item() / want.item() - 1) < LIMITS[precision]
    for (name, mine), theirs in zip(model.lm.named_parameters(), plain.parameters(), strict=True):
        error = float((mine.grad.cpu() - theirs.grad).norm() / theirs.grad.norm())
        assert error < 10 * LIMITS[precision], f"{name}: gradient is off by {error}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_and_its_gradients_are_exact(device, precision):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(700, 64, generator=generator).to(device, DTYPES[precision])
    weight = (0.1 * torch.randn(5003, 64, generator=generator)).to(device, DTYPES[precision])
    labels = torch.randint(5003, (700,), generator=generator).to(device)
    labels[::3] = -100
    wide = [copy.deepcopy(tensor).double().requires_grad_() for tensor in (hidden, weight)]
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    want = F.cross_entropy(wide[0] @ wide[1].T, labels, ignore_index=-100, reduction="sum")
    want.backward()
    got, _ = sum_cross_entropy(*ours, labels)
    got.backward()
    assert abs(float(got.detach()) / float(want.detach()) - 1) < LIMITS[precision]
    for mine, theirs in zip(ours, wide, strict=True):
        assert float((mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < LIMITS[precision]


def test_the_loss_never_holds_all_logits(gpu):
    """What a plain form keeps is tokens x vocabulary x 4 bytes, here 12.9 GB, several times over."""
    tokens, width, vocabulary = 65536, 256, 49152
    hidden = torch.randn(tokens, width, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=gpu)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sum_cross_entropy(hidden, weight, labels)[0].backward()
    grew = torch.cuda.max_memory_allocated() - before
    assert grew < 4 * tokens * vocabulary / 6, f"{grew / 1e6:.0f} MB"


def test_all_experts_in_one_launch_are_each_by_itself(device):
    """Two experts without a token among eight; on a CPU both are the same loop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1, vocab_size=64, num_attention_heads=4, **facts)
    _, experts = next(find_experts(AutoModelForCausalLM.from_config(config)))
    generator = torch.Generator().manual_seed(3)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    counts = torch.tensor([5, 0, 17, 1, 0, 40, 8, 9])
    rows = torch.randn(80, 64, generator=generator)
    wide = copy.deepcopy(experts).double()
    want = compute_experts(wide, rows.double(), counts)
    want.square().sum().backward()
    experts.to(device)
    with torch.autocast(device, torch.bfloat16):
        got = compute_experts(experts, rows.to(device), counts.to(device))
    got.float().square().sum().backward()
    assert float((got.cpu().double() - want).norm() / want.norm()) < LIMITS["bf16"]
    for mine, theirs in zip(experts.parameters(), wide.parameters(), strict=True):
        assert float((mine.grad.cpu().double() - theirs.grad).norm() / theirs.grad.norm()) < LIMITS["bf16"]


@pytest.mark.parametrize("rows", [1, 37, 256])
def test_a_layer_in_8_bits_is_the_one_that_the_cpu_emulates(device, rows):
    """Beside sums in fp64 of the same 8-bit numbers: kernels for them sum in another order, and round once to bf16."""
    if device == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("this GPU does not multiply 8-bit floats")
    dice = torch.Generator().manual_seed(5)
    x, weight, grad = (torch.randn(*shape, generator=dice) for shape in ((rows, 96), (160, 96), (rows, 160)))
    linear = Fp8Linear(96, 160, bias=False)
    linear.rounds_again = False
    with torch.no_grad():
        linear.weight.copy_(weight)
    linear, ours = linear.to(device), x.to(device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = linear(ours)
    out.backward(grad.to(device, torch.bfloat16))
    narrow = [quantize(one.bfloat16(), dtype) for one, dtype in ((x, E4M3), (weight, E4M3), (grad, E5M2))]
    x8, w8, g8 = (one.values.double() * one.scale.double() for one in narrow)
    for found, want in ((out, x8 @ w8.t()), (ours.grad, g8 @ w8), (linear.weight.grad, g8.t() @ x8)):
        assert float((found.cpu().double() - want).abs().max() / want.abs().max()) < 2**-7


def test_bf16_weights_are_rounded_alike_by_every_form(device):
    """Three steps by the device's kernel, and by torch's functions on the CPU: the same chances."""
    generator = torch.Generator().manual_seed(5)
    weight, grad = (torch.randn(301, 40, generator=generator).bfloat16() for _ in range(2))
    ours, plain = torch.nn.Parameter(weight.to(device)), [weight, *(torch.zeros_like(weight) for _ in range(2))]
    told = OptimConfig(lr=1e-3, weight_decay=0.1)
    optimizer = build_optimizer({"layer": ours}, told)
    for step in range(1, 4):
        ours.grad = grad.to(device)
        optimizer.step()
        numbers = [plain[0], grad, plain[1], plain[2]]
        narrow.update_narrow(
            *(one.view(-1) for one in numbers), 0, place_key("layer", step), told.lr, *told.betas, told.eps, 0.1,
            1 / (1 - told.betas[0] ** step), (1 - told.betas[1] ** step) ** -0.5,
        )  # fmt: skip
    # Sums of another order move a few numbers over the edge of a chance.
    assert float((ours.cpu() == plain[0]).float().mean()) > 0.98
