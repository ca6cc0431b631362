"""The plan's choices, arithmetic and verdict, on machines that are made up here."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from duoka.config.load import load_config, resolved_yaml
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, DoesNotFit, Faults
from duoka.plan.batch import count_steps, spread_batch
from duoka.plan.costs import most_checkpoints
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths, Rows
from duoka.plan.picture import plan_lines
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape, shape_from_config
from duoka.units import Amount, parse_amount

GIB = 2**30
CPU = Machine(num_cores=8, memory_bytes=64 * GIB, available_bytes=60 * GIB)
BF16_CPU = Machine(num_cores=8, memory_bytes=64 * GIB, available_bytes=60 * GIB, cpu_bf16="amx_bf16")
H100 = Gpu("H100", 80 * GIB, 79 * GIB, 9.0)
V100 = Gpu("V100", 32 * GIB, 31 * GIB, 7.0)
LLAMA_8B = shape_from_config(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }
)  # fmt: skip


def known(num_samples, batch=(90, 80, 70, 60, 60, 50, 40, 30)):
    """Of tokenized data."""
    return Lengths("tokenized", num_samples, sum(batch) / len(batch), max(batch), batch)


def gpus(gpu, count):
    return Machine(16, 256 * GIB, 250 * GIB, gpus=(gpu,) * count)


def config(*, data=None, **sections):
    return RunConfig.model_validate(
        {"model": "demo", "data": {"train": ["x"], "max_length": 512, **(data or {})}, **sections}
    )


def test_one_process_is_single_and_more_are_ddp():
    assert make_plan(config(), demo_shape(), CPU, 1).layout.name == "single"
    plan = make_plan(config(), demo_shape(), CPU, 4)
    assert plan.layout.name == "ddp4" and plan.layout.dp == 4
    assert plan.reasons["parallel.strategy"].startswith("ddp: 4 processes")


def test_more_processes_share_one_model_only_when_memory_asks_for_it():
    plan = make_plan(config(train={"global_batch": 512}), LLAMA_8B, gpus(H100, 8), 8)
    assert plan.layout.name == "fsdp8" and plan.layout.shard == 8
    assert plan.reasons["parallel.strategy"].startswith("fsdp: 8 processes share one model")
    assert plan.refusal() is None
    assert make_plan(config(lora={}), LLAMA_8B, gpus(H100, 8), 8).layout.name == "ddp8"


@pytest.mark.parametrize("settings", [{"bucket_mb": 50}, {"compress": "powersgd"}, {"static_graph": True}])
def test_settings_of_ddp_are_a_wish_for_ddp_and_never_ignored(settings):
    plan = make_plan(config(parallel=settings), LLAMA_8B, gpus(H100, 8), 8)
    assert plan.layout.name == "ddp8" and plan.refusal() is not None
    assert f"parallel.{next(iter(settings))} is for ddp only" in plan.reasons["parallel.strategy"]


@pytest.mark.parametrize(
    ("parallel", "world", "name"),
    [
        ({"strategy": "zero3"}, 4, "fsdp4"),
        ({"strategy": "zero1"}, 4, "zero1x4"),
        ({"strategy": "hsdp"}, 4, "hsdp1x4"),
        ({"strategy": "hsdp", "shard_ranks": 2}, 4, "hsdp2x2"),
        ({"strategy": "dp"}, 1, "dp"),
    ],
)
def test_a_strategy_that_is_asked_for_is_taken_and_survives_a_manifest(parallel, world, name):
    layout = make_plan(config(parallel=parallel), demo_shape(), CPU, world).layout
    assert layout.name == name
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("parallel", "world", "word"),
    [
        ({"strategy": "hsdp", "shard_ranks": 3}, 4, "groups of that size"),
        ({"strategy": "dp"}, 2, "dp, which is one process"),
    ],
)
def test_a_world_that_the_strategy_cannot_use_is_refused(parallel, world, word):
    with pytest.raises(Faults, match=word):
        make_plan(config(parallel=parallel), demo_shape(), CPU, world)


def test_weights_that_are_not_given_back_are_there_whole():
    """FSDP with reshard: false gathers each layer once, and keeps it until the backward pass."""
    kept, given = (
        make_plan(config(parallel={"strategy": "fsdp", "reshard": one}), LLAMA_8B, gpus(H100, 8), 8).memory
        for one in (False, True)
    )
    layers = LLAMA_8B.num_parameters - LLAMA_8B.num_embedding
    assert kept.moments["start of the backward pass"] >= 2 * layers + 4 * LLAMA_8B.num_embedding
    assert kept.moments["loss"] - given.moments["loss"] > 1.8 * layers
    assert kept.moments["end of the backward pass"] == given.moments["end of the backward pass"]
    assert kept.moments["optimizer step"] == given.moments["optimizer step"]


def test_offloading_moves_bytes_off_the_gpu_and_none_on_a_cpu():
    def parts(machine, **parallel):
        return make_plan(config(parallel=parallel), demo_shape(), machine, 2).memory.parts

    whole, host = parts(gpus(H100, 2), strategy="ddp"), parts(gpus(H100, 2), strategy="ddp", offload="optimizer")
    assert host.get("optimizer", 0) == 0 < whole["optimizer"]
    host = parts(gpus(H100, 2), strategy="fsdp", offload="params")
    assert host.get("weights", 0) == host.get("optimizer", 0) == 0 < host["gathered"]
    half = parts(gpus(H100, 2), strategy="ddp", offload={"optimizer": "host", "share": 0.5})
    part = parts(gpus(H100, 2), strategy="ddp", offload="optimizer")
    assert half["optimizer"] == pytest.approx(whole["optimizer"] / 2) and part.get("optimizer", 0) == 0
    assert parts(CPU, strategy="ddp", offload="optimizer") == parts(CPU, strategy="ddp")


def test_what_is_offloaded_must_fit_in_the_host():
    asked = config(parallel={"strategy": "fsdp", "offload": "params"}, checkpoint={"async": False})
    for host, verdict in ((300, "fits"), (132, "tight"), (100, "does not fit")):
        machine = Machine(16, 512 * GIB, host * GIB, gpus=(H100,) * 8)
        plan = make_plan(asked, LLAMA_8B, machine, 8)
        assert (plan.verdict, plan.host.verdict) == (verdict, verdict)
        assert plan.host.needed_bytes == pytest.approx(16 * LLAMA_8B.num_parameters, rel=1e-6)
    refusal = plan.refusal()
    assert isinstance(refusal, DoesNotFit) and "host memory, which does not fit in 100 GiB" in refusal.what
    assert "120 GiB in a node's host memory" in "\n".join(plan_lines(plan))


def test_checkpoints_have_a_size_a_rate_and_an_interval():
    run = config(checkpoint={"every": 10, "keep": 3})
    costs = make_plan(run, demo_shape(), CPU, 2, lengths=known(1600)).costs
    assert costs.checkpoint_bytes == 12 * demo_shape().num_parameters and not costs.is_disk_measured
    assert costs.checkpoint_s == costs.checkpoint_bytes / 1e9 > costs.blocked_s
    assert costs.interval_s == pytest.approx(math.sqrt(2 * costs.blocked_s * costs.between_failures_s))
    assert costs.disk_bytes == 4 * costs.checkpoint_bytes + 4 * demo_shape().num_parameters
    narrow = make_plan(config(train={"weights": "bf16"}), demo_shape(), CPU, 2, lengths=known(1600)).costs
    assert narrow.checkpoint_bytes == costs.checkpoint_bytes / 2, "bf16 weights and moments"
    owing = make_plan(config(parallel={"compress": "powersgd"}), demo_shape(), CPU, 2).costs
    assert owing.checkpoint_bytes == (12 + 2 * 4) * demo_shape().num_parameters, "both ranks' residuals"
    waits = make_plan(config(checkpoint={"async": False}), demo_shape(), CPU, 2).costs
    assert waits.blocked_s == waits.checkpoint_s and waits.disk_bytes is None and waits.interval_s > costs.interval_s
    assert most_checkpoints(run.checkpoint, steps_left=5) == 1 and most_checkpoints(run.checkpoint, 500, 2) == 4


@pytest.mark.parametrize(
    ("machine", "precision", "word"),
    [
        (CPU, "fp32", "emulated"),
        (BF16_CPU, "bf16", "amx_bf16"),
        (gpus(H100, 1), "bf16", "capability 9"),
        (gpus(V100, 1), "fp32", "does not compute"),
    ],
)
def test_auto_precision_is_bf16_only_where_it_is_native_and_says_why(machine, precision, word):
    plan = make_plan(config(), demo_shape(), machine, 1)
    assert plan.layout.precision == precision
    assert word in plan.reasons["train.precision"]


def test_fp16_on_a_cpu_is_refused_with_its_key():
    with pytest.raises(ConfigError) as caught:
        make_plan(config(train={"precision": "fp16"}), demo_shape(), BF16_CPU, 1)
    assert isinstance(caught.value, Faults)
    assert [fault.key for fault in caught.value.faults] == ["train.precision"]
    assert "bf16" in caught.value.faults[0].fix


def test_everything_that_the_machine_cannot_do_is_refused_together():
    bad = config(train={"precision": "fp16"}, parallel={"strategy": "single", "backend": "nccl"})
    with pytest.raises(Faults) as caught:
        make_plan(bad, demo_shape(), CPU, 2)
    keys = {fault.key for fault in caught.value.faults}
    assert keys == {"train.precision", "parallel.strategy", "parallel.backend"}


def test_more_processes_than_gpus_are_refused_but_not_when_they_are_on_other_machines():
    with pytest.raises(Faults, match="it has 2 GPUs"):
        make_plan(config(), demo_shape(), gpus(H100, 2), 4)
    assert make_plan(config(), demo_shape(), gpus(H100, 2), 4, local_size=2).layout.dp == 4


def test_bf16_without_native_support_is_allowed_with_a_warning():
    plan = make_plan(config(train={"precision": "bf16"}), demo_shape(), CPU, 1)
    assert plan.layout.precision == "bf16"
    assert any("emulated" in warning for warning in plan.warnings)
    assert not make_plan(config(train={"precision": "bf16"}), demo_shape(), BF16_CPU, 1).warnings


def test_auto_micro_batch_stops_where_more_brings_nothing():
    on_cpu = make_plan(config(lora={"dropout": 0.0}), demo_shape(), CPU, 1)
    assert on_cpu.layout.micro == Amount(2048, "tokens")
    on_gpu = make_plan(config(lora={}), demo_shape(), gpus(H100, 1), 1)
    assert on_gpu.layout.micro == Amount(16384, "tokens")
    long = make_plan(config(data={"max_length": 8192}, lora={"dropout": 0.0}), demo_shape(), CPU, 1)
    assert long.layout.micro == Amount(8192, "tokens"), "one sample must always fit in a micro-batch"


def test_less_memory_means_smaller_micro_batches_and_then_recompute():
    def plan(gib, **train):
        machine = Machine(2, 64 * GIB, int(gib * GIB))
        return make_plan(config(lora={}, train=train), demo_shape(), machine, 1)

    tokens = [plan(gib).layout.micro.count for gib in (60, 8, 3, 2)]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] == 2048 and tokens[-1] == 512, tokens
    assert {1024, 2048} & set(tokens), f"no rung between: {tokens}"
    assert plan(2).layout.recompute == "none"
    for gib, how in ((1.45, "1/2"), (1.2, "full")):
        starved = plan(gib)
        assert starved.layout.recompute == how and "without it" in starved.reasons["train.recompute"]
    assert plan(1.45, recompute="none").layout.recompute == "none", "what the user wrote stands"


def test_ranks_of_one_machine_share_its_memory_and_gpus_do_not():
    one, four = (make_plan(config(), demo_shape(), CPU, n) for n in (1, 4))
    assert four.available_bytes == one.available_bytes // 4
    one, four = (make_plan(config(), demo_shape(), gpus(H100, 4), n) for n in (1, 4))
    assert four.available_bytes == one.available_bytes
    # What data-parallel guides get wrong: a replica does not shrink with the number of cards.
    assert four.table[1].total_bytes == one.table[0].total_bytes


def test_static_memory_is_the_known_bytes_per_parameter():
    number = LLAMA_8B.num_parameters
    asked = config(parallel={"strategy": "fsdp"})
    rows = {row.strategy: row for row in make_plan(asked, LLAMA_8B, gpus(H100, 8), 8).table}
    assert rows["ddp"].total_bytes == 16 * number
    wide = 2 * LLAMA_8B.num_embedding  # gathered in fp32, as the residual stream begins
    assert rows["zero1"].total_bytes == pytest.approx((2 + 4 + 12 / 8) * number + wide, rel=1e-6)
    assert rows["zero2"].total_bytes == pytest.approx((2 + 16 / 8) * number + wide, rel=1e-6)
    assert rows["fsdp"].total_bytes == pytest.approx(16 / 8 * number, rel=1e-6)


def test_a_frozen_base_is_stored_in_the_compute_type_and_adapters_in_fp32():
    trained = 5_242_880 * 4  # rank 8 on all linear layers of an 8B Llama
    for machine, size in ((gpus(H100, 1), 2), (gpus(V100, 1), 4)):
        row = make_plan(config(lora={"rank": 8}), LLAMA_8B, machine, 1).table[0]
        assert row.weights_bytes == size * LLAMA_8B.num_parameters + 4 * trained
        assert (row.gradients_bytes, row.optimizer_bytes) == (4 * trained, 8 * trained)


def test_a_run_that_does_not_fit_ends_with_code_4_the_largest_terms_and_a_way_out():
    plan = make_plan(config(), LLAMA_8B, gpus(H100, 1), 1)
    refusal = plan.refusal()
    assert plan.verdict == "does not fit"
    assert isinstance(refusal, DoesNotFit) and refusal.exit_code == 4
    assert "optimizer" in (refusal.where or "") and "lora" in (refusal.fix or "")
    assert make_plan(config(lora={}), LLAMA_8B, gpus(H100, 1), 1).refusal() is None


def test_tight_lies_between_fits_and_does_not_fit():
    peak = make_plan(config(train={"micro_batch": 1}), demo_shape(), CPU, 1).memory.peak_bytes
    verdicts = []
    for share in (0.5, 0.93, 0.99):
        machine = Machine(2, 64 * GIB, int(peak / share))
        plan = make_plan(config(train={"micro_batch": 1, "recompute": "none"}), demo_shape(), machine, 1)
        verdicts.append(plan.verdict)
    assert verdicts == ["fits", "tight", "does not fit"]


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "accumulation", "sentence"),
    [
        (16, Amount(4, "samples"), 2, 2, "16 samples per step = 2 ranks x 4 samples x 2 micro-batches"),
        (16, Amount(4096, "tokens"), 2, 1, "= 2 ranks x 8 samples, in 1 micro-batch of up to 4,096 tokens"),
        (16, Amount(1024, "tokens"), 3, 3, "= 3 ranks x 5 to 6 samples, in 3 micro-batches"),
        ("8k tokens", Amount(1024, "tokens"), 2, 4, "= 2 ranks x about 4,000 tokens, in 4 micro-batches"),
        (1, Amount(4, "samples"), 4, 1, "0 to 1 samples"),
        (16, Amount(4, "samples"), 3, 2, "= 3 ranks x 5 to 6 samples, in 2 micro-batches of up to 4 samples"),
    ],
)
def test_batch_arithmetic_is_written_out(global_batch, micro, ranks, accumulation, sentence):
    batch = spread_batch(parse_amount(global_batch), micro, ranks, Rows(512))
    assert batch.accumulation == accumulation
    assert sentence in batch.sentence(), batch.sentence()


def test_a_known_mean_length_gives_the_likely_accumulation_beside_the_most():
    batch = spread_batch(
        Amount(16, "samples"), Amount(1024, "tokens"), 1, Rows(512), Lengths("tokenized", 99, 64.0, 80, (64,) * 16)
    )
    assert (batch.accumulation, batch.accumulation_likely) == (8, 1)
    assert "about 1 (at most 8) micro-batches" in batch.sentence()


@pytest.mark.parametrize(
    ("train", "samples", "total"),
    [
        ({"epochs": 3, "global_batch": 16}, 160, 30),
        ({"epochs": 3, "global_batch": 16}, 161, 33),
        ({"epochs": 0.5, "global_batch": 10}, 100, 5),
        ({"epochs": 1.5, "global_batch": 10}, 100, 15),
        ({"epochs": 3, "global_batch": 16, "max_steps": 7}, 160, 7),
        ({"epochs": 1, "global_batch": 64}, 3, 1),
    ],
)
def test_steps_count_the_short_last_batch_and_end_at_max_steps(train, samples, total):
    steps = count_steps(config(train=train).train, known(samples))
    assert steps is not None and (steps.total, steps.is_exact) == (total, True)


def test_steps_of_token_batches_come_from_tokens_and_are_about_what_a_look_says():
    train = config(train={"global_batch": "8k tokens", "epochs": 1}).train
    assert count_steps(train, None) is None
    for basis in ("tokenized", "sampled"):
        steps = count_steps(train, replace(known(1000), basis=basis, mean=100.0))
        assert steps is not None and (steps.total, steps.is_exact) == (12, basis == "tokenized")


def test_the_plan_is_plain_json_and_its_layout_comes_back():
    plan = make_plan(config(lora={}), demo_shape(), CPU, 2, lengths=known(181))
    raw = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert Layout.from_json(raw["layout"]) == plan.layout
    memory = raw["memory"]
    assert memory["low_bytes"] < memory["peak_bytes"] < memory["high_bytes"]
    assert sum(memory["parts"].values()) == memory["peak_bytes"]
    assert memory["peak_bytes"] == max(memory["moments"].values())


def test_the_same_question_has_the_same_answer():
    plans = [make_plan(config(lora={}), demo_shape(), CPU, 2) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json() and plan_lines(plans[0]) == plan_lines(plans[1])


def test_the_printed_plan_names_what_people_ask_and_stays_narrow():
    text = plan_lines(make_plan(config(lora={}), demo_shape(), CPU, 2, lengths=known(181)))
    whole = "\n".join(text)
    for word in ("134,515,008", "2,442,240", "zero3=fsdp", "16 samples per step", "36 optimizer steps", "fits in"):
        assert word in whole, whole
    assert max(map(len, text)) <= 100


def test_planning_needs_no_torch():
    code = """
import sys
for name in ("torch", "transformers", "peft", "accelerate"):
    sys.modules[name] = None
from duoka.config.load import load_config, resolved_yaml
from duoka.config.schema import RunConfig
from duoka.plan.costs import most_checkpoints
from duoka.plan.hardware import read_machine
from duoka.plan.picture import plan_lines
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
run = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, "lora": {}})
plan = make_plan(run, demo_shape(), read_machine(env={"CUDA_VISIBLE_DEVICES": ""}), 2)
print(plan.layout.name, len(plan_lines(plan)) > 10, bool(plan.to_json()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["ddp2", "True", "True"], done.stderr


def test_layouts_that_contradict_themselves_cannot_be_made():
    with pytest.raises(ValueError, match="one process"):
        Layout(dp=2, strategy="single")
    with pytest.raises(ValueError, match="at least one"):
        Layout(dp=0)
    raw = Layout(dp=2, strategy="ddp").to_json() | {"strategy": "magic"}
    with pytest.raises(ValueError, match="magic"):
        Layout.from_json(raw)


def test_estimates_grow_with_tokens_and_shrink_with_recompute():
    def peak(**train):
        return make_plan(config(train=train), demo_shape(), CPU, 1).memory.peak_bytes

    assert peak(micro_batch=1) < peak(micro_batch=4) < peak(micro_batch=8)
    assert peak(micro_batch=8, recompute="full") < 0.6 * peak(micro_batch=8, recompute="none")
    assert math.isfinite(peak(micro_batch="1 tokens"))


def test_what_auto_became_is_written_beside_it_and_auto_stays(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: demo\ndata: {train: [identity]}\n", encoding="utf-8")
    reasons = make_plan(load_config(str(path)).config, demo_shape(), CPU, 2).reasons
    text = resolved_yaml(load_config(str(path)), reasons)
    for key in ("strategy", "precision", "recompute", "micro_batch"):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}: auto"))
        assert "; here " in line, line
    assert "strategy: auto" in text and "; here ddp: 2 processes, each with a whole model" in text
    path.write_text(text, encoding="utf-8")
    assert load_config(str(path)).config.train.micro_batch == "auto"
