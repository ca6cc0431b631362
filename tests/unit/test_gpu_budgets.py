"""What a training step asks of a GPU: kernels a layer, waits of the host, what lies on which side. On a fake one.

Budgets are what was measured when they were written (docs/decisions.md says what came before): a change that costs a
kernel or two per layer turns them red. tests/fakegpu says what such a step can show and what not.
"""

import pytest
from fakegpu.run import compile_guard, run_on_fake_gpu, why_not

pytestmark = pytest.mark.timeout(420)

LORA = {"rank": 4}
# Steps whose kernels are counted per layer, from one with one layer and one with two.
PER_LAYER = {
    "full": ({}, 84),
    "lora": ({"lora": LORA}, 145),
    "fp8": ({"precision": "fp8"}, 277),
    "bf16 weights": ({"weights": "bf16"}, 60),
    "full, shared prefixes": ({"alike": True}, 88),
    "gemma3": ({"family": "gemma3"}, 118),
    "gemma3, lora": ({"family": "gemma3", "lora": LORA}, 195),
    "phi3": ({"family": "phi3"}, 70),
    "gpt2": ({"family": "gpt2"}, 62),
}
# With kernels of Liger's form in the places of theirs: the same steps launch fewer.
KERNELS = ["norm", "rotation", "MLP", "loss"]
WITH_LIGER = {
    "full, Liger": ({"kernels": KERNELS}, 62),
    "lora, Liger": ({"lora": LORA, "kernels": KERNELS}, 131),
    "full, selective, Liger": ({"recompute": "selective", "kernels": KERNELS}, 95),
}
# Steps of two layers that must run, with as few waits as any.
OTHERS = {
    "full, selective": {"recompute": "selective"},
    "full, full recompute": {"recompute": "full"},
    "full, every second layer": {"recompute": "1/2"},
}
# Of worlds whose process group refuses tensors of the host, as NCCL's: ("zero3" is fsdp).
SHARED = {
    "zero2": {"strategy": "zero2", "size": 4},
    "fsdp": {"strategy": "fsdp", "size": 4},
    "fsdp, every second layer": {"strategy": "fsdp", "size": 4, "recompute": "1/2"},
}
# The same at other places of the code: `make nightly` runs them.
PER_LAYER_AT_NIGHT = {
    "full, fsdp": ({"strategy": "fsdp", "size": 8}, 84),
    "fp8, fsdp": ({"strategy": "fsdp", "size": 8, "precision": "fp8"}, 340),
}
RARE = {
    "fp8, recompute": {"precision": "fp8", "recompute": "full"},
    "fp8, selective": {"precision": "fp8", "recompute": "selective"},
    "qwen3, lora, dropout": {"family": "qwen3", "lora": {**LORA, "dropout": 0.1}},
    "zero1, lora, loaded whole": {"strategy": "zero1", "size": 4, "lora": LORA, "by_slices": False},
    "fsdp, bf16 weights": {"strategy": "fsdp", "size": 4, "weights": "bf16"},
    "zero2, muon": {"strategy": "zero2", "size": 4, "optim": "muon"},
    "fsdp, fp32, padded": {"strategy": "fsdp", "size": 4, "precision": "fp32", "packed": False},
}
OFFLOADED = {
    "fsdp, offload params": {"strategy": "fsdp", "size": 4, "offload": "params"},
    "offload optimizer": {"offload": "optimizer"},
}
OWN = {"triton_norm", "triton_norm_backward"}
LIGERS = OWN | {f"liger_{name}" for name in ("turn", "product", "product_backward", "loss")}
RARE_OFFLOADED = {
    "fp8, fsdp, offload params": {"precision": "fp8", "strategy": "fsdp", "size": 4, "offload": "params"},
}
# Lines that look at tensors in host memory in every step.
HOST_WORK = ("duoka/model/drawing.py",)  # whether torch's random state of the host has moved


def count_steps(calls, folder, others=None):
    if why_not():
        pytest.skip(why_not())
    guard = compile_guard(folder)
    steps = {name: ("count_step", how) for name, how in calls.items()}
    found = run_on_fake_gpu(guard, steps | (others or {}), folder)
    return {name: {**answer, "name": name} for name, answer in found.items()}


def by_layers(cases):
    return {f"{name} {layers}": {**how, "num_layers": layers} for name, (how, _) in cases.items() for layers in (1, 2)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    cases = by_layers(PER_LAYER | WITH_LIGER) | OTHERS | SHARED | OFFLOADED
    others = {"host tensors": ("carry_host_tensors", {}), "card": ("measure_the_card", {})}
    return count_steps(cases, tmp_path_factory.mktemp("fakegpu"), others)


@pytest.fixture(scope="module")
def rare_steps(tmp_path_factory):
    return count_steps(by_layers(PER_LAYER_AT_NIGHT) | RARE | RARE_OFFLOADED, tmp_path_factory.mktemp("rare"))


def ran(step):
    assert "error" not in step, f"{step['name']}: {step['error']}"
    assert step["has_stepped"], f"{step['name']}: the optimizer was left out"
    return step


def check_layer(steps, name, budget):
    one, two = (ran(steps[f"{name} {layers}"]) for layers in (1, 2))
    per_layer = (two["kernels"] - one["kernels"]) / 2  # micro-batches
    assert per_layer <= budget, f"{per_layer} kernels a layer and micro-batch: {two['by_kernel']}"
    assert per_layer > budget / 2, "kernels were not seen"


@pytest.mark.parametrize("name", PER_LAYER)
def test_a_layer_stays_within_its_kernels(steps, name):
    check_layer(steps, name, PER_LAYER[name][1])


@pytest.mark.parametrize("name", WITH_LIGER)
def test_a_layer_with_liger_s_kernels_launches_fewer(steps, name):
    check_layer(steps, name, WITH_LIGER[name][1])
    check_waits(steps[f"{name} 2"])
    called = {kernel for kernel in ran(steps[f"{name} 2"])["by_kernel"] if kernel in LIGERS}
    assert called == (LIGERS - {"liger_turn"} if "selective" in name else LIGERS), "selective recompute keeps products"


@pytest.mark.parametrize("name", PER_LAYER)
def test_without_liger_nothing_of_it_is_called(steps, name):
    assert not LIGERS & set(ran(steps[f"{name} 2"])["by_kernel"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PER_LAYER_AT_NIGHT)
def test_a_sharded_layer_stays_within_its_kernels(rare_steps, name):
    check_layer(rare_steps, name, PER_LAYER_AT_NIGHT[name][1])


def check_waits(step):
    """The host waits for the GPU once a step."""
    syncs = ran(step)["syncs"]
    assert sum(syncs.values()) == 1, syncs


def check_places(step):
    """Nothing of a step is on the host."""
    ran(step)
    assert not step["held_on_host"], step["held_on_host"]
    strange = [line for line in step["on_host"] if not line.partition(" ")[2].startswith(HOST_WORK)]
    assert not strange, strange
    waiting = [line for line in step["uploads"] if line.startswith("waits ")]
    assert not waiting, waiting


@pytest.mark.parametrize("name", [*(f"{name} 2" for name in PER_LAYER), *OTHERS, *SHARED])
def test_the_host_waits_for_the_gpu_once_a_step(steps, name):
    check_waits(steps[name])


@pytest.mark.parametrize("name", [*(f"{name} 2" for name in PER_LAYER), *OTHERS, *SHARED])
def test_nothing_of_a_step_is_on_the_host(steps, name):
    check_places(steps[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*(f"{name} 2" for name in PER_LAYER_AT_NIGHT), *RARE])
def test_other_steps_wait_once_and_have_nothing_on_the_host(rare_steps, name):
    check_waits(rare_steps[name])
    check_places(rare_steps[name])


def test_the_group_of_shared_steps_refuses_tensors_of_the_host(steps):
    """What NCCL alone says of them. A step that ran in such a world exchanged nothing that lies on the host."""
    refused = {name: text for name, text in steps["host tensors"].items() if name != "name"}
    assert len(refused) == 5
    assert all("No backend type associated with device type cpu" in text for text in refused.values()), refused
    for name in SHARED:
        assert {"all-gather", "reduce-scatter"} <= set(ran(steps[name])["exchanged"]), name


def test_what_gpu_check_measures_of_a_card_runs_on_one(steps):
    """Each timed product and copy takes the 8 ms that lie between any two events here."""
    card = steps["card"]
    assert "error" not in card, card["error"]
    assert (card["products"], card["copies"]) == (25, 25)
    assert card["product_flops"] == pytest.approx(2 * 8192**3 / 0.008)
    assert card["copy_bytes_per_s"] == pytest.approx(2 * 2 * 2**30 / 0.008)


def test_passes_take_the_time_that_the_gpu_took(steps):
    """The host only launches them."""
    assert ran(steps["full 2"])["seconds"] == [2 * 0.008, 2 * 0.008]


def test_recomputing_selectively_computes_attention_once(steps):
    halves = {"full, every second layer": 1.5, "fsdp, every second layer": 1.5, "fsdp": 1}
    for name, times in ({"full, selective": 1, "full, full recompute": 2, "full 2": 1} | halves).items():
        kernels = ran(steps[name])["by_kernel"]
        assert kernels["_varlen_attn"] == times * kernels["_varlen_attn_backward"] == times * 4, name


def products_in_8_bits(step):
    return ran(step)["by_kernel"].get("_scaled_mm", 0) / step["num_layers"] / step["micro_batches"]


@pytest.mark.parametrize("name", ["fp8 1", "fp8 2"])
def test_each_linear_layer_multiplies_three_times_in_8_bits(steps, name):
    assert products_in_8_bits(steps[name]) == 3 * 7
    assert products_in_8_bits(steps["full 2"]) == 0
    # What is left are products of the head, in the loss.
    assert ran(steps["fp8 1"])["by_kernel"]["mm"] == ran(steps["fp8 2"])["by_kernel"]["mm"]


@pytest.mark.nightly
def test_other_strategies_multiply_in_8_bits_too(rare_steps):
    assert products_in_8_bits(rare_steps["fp8, fsdp 2"]) == products_in_8_bits(rare_steps["fp8, selective"]) == 3 * 7
    assert products_in_8_bits(rare_steps["fp8, fsdp, offload params"]) == 3 * 7
    assert products_in_8_bits(rare_steps["fp8, recompute"]) == 4 * 7


def test_offloaded_shards_stay_on_the_host_until_they_are_gathered(steps):
    step = ran(steps["fsdp, offload params"])
    assert [name for name in step["held_on_host"] if name.endswith("q_proj.weight")], step["held_on_host"]


def test_offloaded_state_travels_while_the_host_computes(steps):
    step = ran(steps["offload optimizer"])
    assert all(name.startswith("exp_avg") for name in step["held_on_host"]), "weights stay on the GPU"
    assert not [line for line in step["uploads"] if line.startswith("waits ")], step["uploads"]
    assert not [line for line in step["syncs"] if line.startswith("copy")], step["syncs"]
