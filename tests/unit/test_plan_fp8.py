"""The plan of 8-bit products: what it refuses, the arithmetic of time, and memory beside what a real step allocates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan_memory import FACTS, SHAPE, TOKENS, measured_peak
from test_plan_report import BF16_CPU, CPU, GIB, H100, LLAMA_8B, config, gpus

from duoka.plan.catalog import devices, parse_cluster
from duoka.plan.changes import single_changes
from duoka.plan.choose import check_machine
from duoka.plan.compiler import has_kernels
from duoka.plan.fp8 import FP8_SHARE, fp8_weights, rounding_bytes
from duoka.plan.hardware import Gpu
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.memory import estimate_memory
from duoka.plan.moments import LOSS, pass_moments
from duoka.plan.recipe import Work, shares
from duoka.plan.report import make_plan
from duoka.plan.search import why_not
from duoka.plan.shape import demo_shape, shape_from_config
from duoka.plan.speed import Load, estimate_speed
from duoka.plan.task import Task
from duoka.plan.yardstick import yardstick_of
from duoka.units import Amount

A100 = Gpu("A100-80G", 80 * GIB, 79 * GIB, 8.0)
L4 = Gpu("L4", 24 * GIB, 23 * GIB, 8.9)
MI300X = Gpu("MI300X", 192 * GIB, 190 * GIB, 9.4)
LLAMA_70B = shape_from_config(
    {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    }
)  # fmt: skip
LLAMA_1B = shape_from_config(
    {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
)  # fmt: skip
FP8 = {"train": {"precision": "fp8"}}
# Of each layer of Llama 8B: q and o, k and v, gate and up and down.
WEIGHTS_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


@pytest.mark.parametrize(("gpu", "why"), [(A100, "A100-80G (compute capability 8)"), (MI300X, "MI300X is AMD's")])
def test_a_gpu_without_such_products_is_refused(gpu, why):
    (fault,) = check_machine(config(**FP8), gpus(gpu, 1), 1)
    assert fault.key == "train.precision" and why in fault.what and "bf16" in fault.fix
    assert not check_machine(config(), gpus(gpu, 1), 1)


@pytest.mark.parametrize("gpu", [L4, H100])
def test_gpus_that_have_them_are_not(gpu):
    assert not check_machine(config(**FP8), gpus(gpu, 1), 1)
    assert make_plan(config(**FP8), demo_shape(), gpus(gpu, 1), 1).layout.precision == "fp8"


def test_a_cpu_emulates_it_and_says_so():
    for machine in (CPU, BF16_CPU):
        plan = make_plan(config(**FP8), demo_shape(), machine, 1)
        assert plan.layout.precision == "fp8" and any("emulates" in text for text in plan.warnings)
        assert not any("emulates" in text for text in make_plan(config(), demo_shape(), machine, 1).warnings)


@pytest.mark.parametrize("machine", [CPU, BF16_CPU, gpus(H100, 8), gpus(L4, 1)])
def test_auto_never_takes_it(machine):
    assert make_plan(config(), demo_shape(), machine, 1).layout.precision in ("fp32", "bf16")


def test_nothing_is_advised_that_a_rule_refuses():
    adapters = "lora: {rank: 8} and train.precision: bf16"
    plan = make_plan(config(**FP8, parallel={"strategy": "ddp"}), LLAMA_8B, gpus(H100, 8), 8)
    assert plan.refusal() is not None and adapters in plan.smaller
    cluster, layout = parse_cluster("8xH100-80G"), Layout(precision="fp8", micro=Amount(512, "tokens"))
    task = Task(Work(LLAMA_8B, None, "cuda"), Amount(512, "samples"), 512)
    assert adapters in [one.words for one in single_changes(config(**FP8), task, layout, cluster, 70 * GIB)]
    for name, said in (("zero1x4.tp2", "one scale for a whole matrix"), ("fsdp8.ep2", "not been tried together")):
        layout = replace(parse_layout(name), micro=Amount(512, "tokens"))
        assert said in why_not(replace(layout, precision="fp8"), task, cluster)
        assert said not in str(why_not(replace(layout, precision="bf16"), task, cluster))


def test_weights_of_the_layers_are_counted_and_of_a_mixture_no_experts():
    assert fp8_weights(LLAMA_8B) == WEIGHTS_8B
    odd = shape_from_config({"model_type": "llama", **FACTS, "intermediate_size": 700})
    assert fp8_weights(odd) == 4 * (2 * 256 * 256 + 2 * 256 * 128)
    mixture = shape_from_config({
        "model_type": "qwen3_moe", **FACTS, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "head_dim": 32, "mlp_only_layers": [], "decoder_sparse_step": 1,
    })  # fmt: skip
    assert fp8_weights(mixture) == 4 * (2 * 256 * 256 + 2 * 256 * 128), "attention's"


def test_only_products_of_the_layers_run_at_the_peak_of_8_bits():
    assert devices()["H100-80G"].fp8_flops == 1979e12 and devices()["A100-80G"].fp8_flops == 0
    cluster, load = parse_cluster("H100-80G"), Load(1, 16384, 4096, 16384)
    work = Work(LLAMA_8B, None, "cuda")
    half, narrow = (
        estimate_speed(work, Layout(precision=name, micro=Amount(16384, "tokens")), cluster, load)
        for name in ("bf16", "fp8")
    )
    head = 128256 * 4096
    whole = half.parts["matrix products"]
    wanted = whole * (WEIGHTS_8B * 989.4 / (1979 * FP8_SHARE) + head) / (WEIGHTS_8B + head)
    assert narrow.parts["matrix products"] == pytest.approx(wanted, rel=1e-3)
    assert narrow.parts["attention"] == half.parts["attention"]
    # Rounding is no product: it is read and written by memory.
    per_token, per_pass = rounding_bytes(LLAMA_8B)
    assert per_token / 32 == 7 * (2 * 4096 + 4096 + 14336 + 2 * 4096 + 2 * 1024 + 4096 + 2 * 14336) + 5 * 14336
    assert per_pass == 13 * WEIGHTS_8B
    bytes_per_s = devices()["H100-80G"].memory_bytes_per_s * 0.8
    saved = half.parts["memory traffic"] - narrow.parts["memory traffic"]
    kept = 2.5 * 3 * (16 - 15) * 4096 * 32 * 16384 / bytes_per_s  # what is not kept is not written
    assert kept - saved == pytest.approx((16384 * per_token + per_pass) / bytes_per_s, rel=0.02)


# torchtitan on H100 of 96 GB, compiled: tokens/s a GPU in bf16 and in float8 with a scale per tensor. FP8_SHARE was
# fitted to the first; tensor parallelism beside 8 bits is planned only.
PUBLISHED = [
    (LLAMA_8B, "8xH100-96G", "fsdp8", "selective", 2, 8532 / 6667, 0.03),
    (LLAMA_70B, "32x8xH100-96G", "fsdp32.tp8", "full", 16, 809.8 / 597.3, 0.15),
    (LLAMA_8B, "8x8xH100-96G", "fsdp8.tp8", "selective", 12, 5078.1 / 4378, 0.15),
]


@pytest.mark.parametrize(("shape", "on", "name", "recompute", "rows", "gain", "within"), PUBLISHED)
def test_on_h100s_it_gains_about_what_was_published(shape, on, name, recompute, rows, gain, within):
    cluster, layout = parse_cluster(on), parse_layout(name)
    load = Load(1, rows * 8192, 8192, layout.dp * rows * 8192)
    layout = replace(layout, recompute=recompute, compile=True, micro=Amount(rows * 8192, "tokens"))
    half, narrow = (
        estimate_speed(Work(shape, None, "cuda"), replace(layout, precision=one), cluster, load).tokens_per_s
        for one in ("bf16", "fp8")
    )
    assert narrow / half == pytest.approx(gain, rel=within)


def test_on_an_h200_a_small_model_gains_as_little_as_was_measured():
    """And holds as much: compiled code rounds again in the backward pass (benchmarks/gpu.json)."""
    cases = json.loads((Path(__file__).parents[2] / "benchmarks" / "gpu.json").read_text())["cases"]
    measured = {"bf16": cases["full-1b-compiled"], "fp8": cases["full-1b-fp8-compiled"]}
    work, cluster, load = Work(LLAMA_1B, None, "cuda"), parse_cluster("H200"), Load(4, 16384, 345, 65536)
    speeds = {}
    for name, one in measured.items():
        layout = Layout(precision=name, compile=True, micro=Amount(16384, "tokens"))
        speeds[name] = estimate_speed(work, layout, cluster, load).tokens_per_s
        memory = estimate_memory(work, layout, 16384)
        planned = memory.peak_bytes - memory.parts["framework"]
        assert planned == pytest.approx(one["peak_bytes"], rel=0.02), name
    gain = measured["fp8"]["tokens_per_s"] / measured["bf16"]["tokens_per_s"]
    assert speeds["fp8"] / speeds["bf16"] == pytest.approx(gain, rel=0.03)


def test_mfu_compares_with_the_peak_of_bf16():
    task, cluster = Task(Work(SHAPE, None, "cuda"), Amount(8, "samples"), 64), parse_cluster("H100-80G")
    for name in ("bf16", "fp8"):
        assert yardstick_of(task, Layout(precision=name), cluster).peak_flops == 989.4e12


@pytest.mark.parametrize(
    ("tokens", "recompute", "allowed"),
    [(256, "none", 0.05), (1024, "none", 0.05), (4096, "none", 0.05), (1024, "full", 0.15), (1024, "selective", 0.15)],
)
def test_predicted_peak_is_what_a_real_step_allocates(tokens, recompute, allowed):
    """The more tokens, the more of it are activations; at 256 the optimizer's step is the peak."""
    layout = Layout(precision="fp8", recompute=recompute, micro=Amount(tokens, "tokens"))
    memory = estimate_memory(Work(SHAPE, None, has_kernels=has_kernels()), layout, tokens, later=0)
    predicted = memory.peak_bytes - memory.parts["framework"]
    measured = measured_peak(None, "fp8", recompute, (tokens,))
    assert abs(predicted / measured - 1) < allowed, f"{predicted / 2**20:.1f} MiB, {measured / 2**20:.1f} measured"


def test_activations_and_copies_of_weights_are_fewer_than_in_bf16():
    work = Work(SHAPE, None, has_kernels=has_kernels())

    def at_the_loss(layout):
        share = shares(work, layout)[0]
        return dict(pass_moments(work, layout, share, TOKENS, 0, is_first=True, is_only=True))[LOSS]

    half, narrow = (at_the_loss(Layout(precision=name)) for name in ("bf16", "fp8"))
    assert narrow["activations"] < half["activations"]
    assert narrow["casts"] == half["casts"] // 2
    assert at_the_loss(replace(parse_layout("fsdp2"), precision="fp8"))["casts"] == 0
