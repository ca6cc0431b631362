"""Whole runs on emulated GPUs (tests/emulated) learn what a CPU learns: every layout and stage, step by step."""

import json
import subprocess
import sys

import pytest
from emulated.peaks import ROWS, TOKENS, WIDTH, WORDS
from emulated.run import compile_gpus, compile_nccl, environment, train_on_gpus, why_not
from families import write_family
from held_layers import FAMILIES
from tiny import build_tiny_tokenizer, write_tiny_model
from worlds import fresh_cache, train_all

pytestmark = pytest.mark.timeout(420)

EXACT, NEAR, HALF = 2e-5, 2e-3, 2e-2
YAML = """\
model: {model}
data: {{train: {data}, max_length: 256, eval: 0.1}}
train: {{max_steps: 3, global_batch: 8, precision: fp32}}
checkpoint: {{every: 2}}
"""
FULL, LORA = [], ["lora.rank=4"]
BF16, FP16 = ["train.precision=bf16"], ["train.precision=fp16"]
# name -> (file, overrides, how near); all on one GPU.
ONE = {
    "full": ("sft", FULL, EXACT),
    "bf16, selective": ("sft", [*BF16, "train.recompute=selective"], HALF),
    "lora, bf16": ("sft", [*LORA, *BF16], HALF),
    "bf16 weights": ("sft", ["train.weights=bf16", *BF16], HALF),
    "fp16": ("sft", FP16, NEAR),
    "optimizer in host memory": ("sft", ["parallel.offload=optimizer"], EXACT),
    "activations in host memory": ("sft", ["parallel.offload={activations: host}"], EXACT),
    "dpo": ("dpo", FULL, EXACT),
    "linear attention": ("qwen3_5_text", FULL, NEAR),
    "scans of Mamba 1": ("mamba", FULL, NEAR),
    "scans of Mamba 2, recompute": ("mamba2", ["train.recompute=full"], NEAR),
}
STATES = ("qwen3_5_text", "mamba", "mamba2")
# On two, in one world: every other layout, and what draws answers.
TWO = {
    "ddp": ("sft", ["parallel.strategy=ddp"], EXACT),
    "ddp, bf16": ("sft", ["parallel.strategy=ddp", *BF16], HALF),
    "zero1": ("sft", ["parallel.strategy=zero1"], EXACT),
    "zero2, optimizer in host memory": ("sft", ["parallel.strategy=zero2", "parallel.offload=optimizer"], EXACT),
    "fsdp, lora": ("sft", ["parallel.strategy=fsdp", *LORA], EXACT),
    "fsdp, bf16, recompute": ("sft", ["parallel.strategy=fsdp", "train.recompute=full", *BF16], HALF),
    "zero2, fp16": ("sft", ["parallel.strategy=zero2", *FP16], NEAR),
    "fsdp, weights in host memory": ("sft", ["parallel.strategy=fsdp", "parallel.offload=params"], EXACT),
    "tensor": ("sft", ["parallel.tensor=2"], EXACT),
    "pipeline": ("sft", ["parallel.pipeline=2"], EXACT),
    "sequence": ("sft", ["parallel.sequence=2"], EXACT),
    "fsdp, dpo": ("dpo", ["parallel.strategy=fsdp"], EXACT),
    "fsdp, linear attention, recompute": (
        "qwen3_5_text",
        ["parallel.strategy=fsdp", "train.recompute=full", "data.packing=true"],
        NEAR,
    ),
    "rl": ("rl", FULL, EXACT),
    "rl, fsdp, kl": ("rl", ["parallel.strategy=fsdp", "rl.kl=0.1"], EXACT),
}
DEEPSPEED = {
    "DeepSpeed, zero1": ("sft", ["parallel.engine=deepspeed", "parallel.strategy=zero1"], EXACT),
    "DeepSpeed, zero2": ("sft", ["parallel.engine=deepspeed", "parallel.strategy=zero2"], EXACT),
    "DeepSpeed, zero3, lora": ("sft", ["parallel.engine=deepspeed", "parallel.strategy=zero3", *LORA], EXACT),
}
RL = """\
model: tiny
stage: rl
data: {train: [task:arithmetic], max_length: 128}
rl: {algorithm: grpo, samples: 4, max_new_tokens: 12, rewards: ["rewards.py:length"]}
optim: {lr: 1e-4}
train: {max_steps: 3, global_batch: 4, precision: fp32}
"""


def conversation(number):
    system = {"role": "system", "content": "Answer in a few words, and kindly."}  # what samples share
    asked = {"role": "user", "content": f"What is {number} and {number * 7 % 13}?"}
    return [system, asked], [{"role": "assistant", "content": "It is " + "so " * (number % 9) + f"{number * 5 % 11}."}]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    if why_not():
        pytest.skip(why_not().replace("fake GPU was", "GPUs were"))
    folder = tmp_path_factory.mktemp("gpus")
    write_tiny_model(folder / "tiny")
    talks = [conversation(number) for number in range(60)]
    lines = [{"messages": [*asked, *answer]} for asked, answer in talks]
    pairs = [
        {"prompt": asked, "chosen": answer, "rejected": talks[place - 7][1]}
        for place, (asked, answer) in enumerate(talks)
    ]
    for name in STATES:
        write_family(folder / name, name, tokenizer=build_tiny_tokenizer())
    of_states = [(name, name, lines) for name in STATES]
    for name, model, records in (("sft", "tiny", lines), ("dpo", "tiny", pairs), *of_states):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(YAML.format(model=model, data=f"{name}.jsonl"), encoding="utf-8")
    with (folder / "dpo.yaml").open("a") as file:
        file.write("stage: dpo\n")
    (folder / "rl.yaml").write_text(RL, encoding="utf-8")
    (folder / "rewards.py").write_text(
        "def length(messages, completion, example):\n    return sum(map(ord, completion)) % 17 / 17\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def library(home):
    return compile_gpus(home)


def jobs_of(cases, folder, home):
    return [
        (home / f"{yaml}.yaml", [*overrides, "log.to=[]"], folder / name)
        for name, (yaml, overrides, _) in cases.items()
    ]


def learn_here(cases, home):
    """What one process on the CPU learns: layouts are not its business, and fp16 is not its type."""
    alone = {
        name: (yaml, [one for one in overrides if not one.startswith("parallel.") and one not in FP16], near)
        for name, (yaml, overrides, near) in cases.items()
    }
    train_all([(str(yaml), more, str(folder)) for yaml, more, folder in jobs_of(alone, home / "cpu", home)], 1)


@pytest.fixture(scope="module")
def on_one(home, library):
    learn_here(ONE, home)
    env = environment(1, library) | fresh_cache(home / "cache")
    train_on_gpus(jobs_of(ONE, home / "gpu", home), 1, env)
    return home


@pytest.fixture(scope="module")
def on_two(home, library):
    learn_here(TWO | DEEPSPEED, home)
    env = environment(2, library, compile_nccl(home)) | fresh_cache(home / "cache")
    train_on_gpus(jobs_of(TWO, home / "gpu", home), 2, env)
    return home, env


@pytest.fixture(scope="module")
def by_deepspeed(on_two):
    pytest.importorskip("deepspeed")
    home, env = on_two
    train_on_gpus(jobs_of(DEEPSPEED, home / "gpu", home), 2, env)
    return home


def learned(folder):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["type"] in ("step", "eval")]


def compare(home, name, near):
    there, here = learned(home / "gpu" / name), learned(home / "cpu" / name)
    assert len(there) == len(here) >= 3
    for ours, theirs in zip(there, here, strict=True):
        for key in ("loss", "grad_norm", "num_targets", "mean_reward"):
            if theirs.get(key) is not None:
                assert ours[key] == pytest.approx(theirs[key], rel=near, abs=near * 1e-2), (key, ours, theirs)
    plan = json.loads((home / "gpu" / name / "plan.json").read_text(encoding="utf-8"))
    assert plan["machine"]["device"] == "cuda", "it was planned for a GPU, by what torch says of it"


@pytest.mark.parametrize("name", ONE)
def test_a_gpu_learns_what_a_cpu_learns(on_one, name):
    compare(on_one, name, ONE[name][2])


@pytest.mark.nightly
def test_a_gpu_before_ampere_learns_it_too(on_one, library):
    """A T4: without bf16, and without FlashAttention."""
    env = environment(1, library) | fresh_cache(on_one / "cache") | {"EMULATED_CAPABILITY": "7.5"}
    jobs = {"full": ["train.precision=auto"], "fp16": FP16}
    train_on_gpus(
        [(on_one / "sft.yaml", [*more, "log.to=[]"], on_one / "t4" / name) for name, more in jobs.items()], 1, env
    )
    for name, (_, _, near) in ONE.items():
        if name not in jobs:
            continue
        there, here = (learned(on_one / where / name) for where in ("t4", "cpu"))
        assert [one["loss"] for one in there] == pytest.approx([one["loss"] for one in here], rel=near)
        plan = json.loads((on_one / "t4" / name / "plan.json").read_text(encoding="utf-8"))
        assert plan["layout"]["precision"] == ("fp32" if name == "full" else "fp16")
        assert plan["kernels"][0]["by"] == "torch, one call per document"


def test_what_a_gpu_holds_is_counted(on_one):
    """By the device, not by the process: the interpreter alone takes 300 MiB."""
    events = (on_one / "gpu" / "full" / "events" / "rank00000.jsonl").read_text(encoding="utf-8").splitlines()
    peaks = [event["memory_bytes"] for event in map(json.loads, events) if event["type"] == "rank"]
    assert peaks and 2**20 < max(peaks) < 64 * 2**20


def test_losses_hold_logits_once_in_each_type(home, library):
    """A narrow product that still had a name lay beside the slope's narrow copy: half a gigabyte of each GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "emulated.peaks"], env=environment(1, library), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    peaks = json.loads(done.stdout)
    logits, head, rows = 4 * WORDS * ROWS, WORDS * WIDTH, ROWS * WIDTH
    beside = 8 * head + 12 * rows  # a narrow head, its gradient in both types; rows and theirs
    assert peaks["loss"] <= 1.5 * logits + beside, peaks
    assert peaks["log-probabilities"] <= 1.5 * logits + beside, peaks
    assert peaks["entropy"] <= 2 * logits + beside, peaks
    # Scores of 8 heads, that torch's definition of attention keeps where no fused kernel knows heads that share keys.
    scores = 8 * 4 * TOKENS**2
    assert peaks["attention in fp32"] < scores / 2 and peaks["attention within a window"] < scores / 2, peaks
    assert peaks["soft cap"] <= 2.5 * logits / 4 + beside, peaks


def compare_layers(families, library):
    """Bytes that layers keep on a GPU, beside what a plan counts of them."""
    done = subprocess.run(
        [sys.executable, "-m", "held_layers", *families], env=environment(1, library), capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    wrong = [
        case
        for case in json.loads(done.stdout)
        if case[3] != pytest.approx(case[2], rel=0.035) and not is_widened_here(*case[:2])
    ]
    assert not wrong, wrong


def is_widened_here(family, way):
    """Norms by 1 + weight of what is narrow: duoka's kernel reads it so; without Triton torch keeps a wide copy."""
    return family.startswith("gemma") and way not in ("full, fp32", "lora, fp32")


def test_layers_keep_what_is_planned(library):
    compare_layers(["llama", "deepseek_v3", "qwen3_moe"], library)


@pytest.mark.nightly
def test_layers_of_all_families_keep_what_is_planned(library):
    compare_layers(FAMILIES, library)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWO)
def test_two_gpus_learn_what_a_cpu_learns(on_two, name):
    compare(on_two[0], name, TWO[name][2])


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEEPSPEED)
def test_two_gpus_under_deepspeed_learn_what_a_cpu_learns(by_deepspeed, name):
    compare(by_deepspeed, name, DEEPSPEED[name][2])
