"""Stage rl: every algorithm gives the float64 oracle's losses, norms, weights, however recorded answers are split."""

from functools import partial

import pytest
from oracle_rollouts import train as oracle_train
from oracle_rollouts import write_steps
from safetensors.torch import load_file
from test_any_split import TOLERANCE, read_run, worst
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(400)

RECIPE = {"lr": 2e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1}
NUM_STEPS = 4
YAML = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{samples: 4, max_new_tokens: 12, replay: {replay}}}
optim: {{lr: 2e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1, eps: 1.0e-4}}
train: {{max_steps: 4, global_batch: 3, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {output}
"""
LORA = "lora={rank: 3, dropout: 0}"
WHOLE, TWO, ONE = "train.micro_batch=100000 tokens", "train.micro_batch=2", "train.micro_batch=1"
PADDED = "data.packing=false"

# name -> (keys of the block rl, the oracle's names for them)
CASES = {
    "reinforce": ({}, {}),
    "rloo": ({"algorithm": "rloo"}, {"algorithm": "rloo"}),
    "grpo": ({"algorithm": "grpo", "updates": 2}, {"algorithm": "grpo", "updates": 2}),
    "grpo, KL": ({"algorithm": "grpo", "updates": 2, "kl": 0.3}, {"algorithm": "grpo", "updates": 2, "kl": 0.3}),
    "dr_grpo": ({"algorithm": "dr_grpo", "updates": 4}, {"algorithm": "dr_grpo", "updates": 4}),
    "dapo": (
        {"algorithm": "dapo", "updates": 2, "truncated": "mask"},
        {"algorithm": "dapo", "updates": 2, "mask": True},
    ),
    "gspo": ({"algorithm": "gspo", "updates": 2}, {"algorithm": "gspo", "updates": 2}),
    "gspo, KL, wide": (
        {"algorithm": "gspo", "updates": 2, "kl": 0.1, "clip": "[0.1, 0.1]", "temperature": 0.7},
        {"algorithm": "gspo", "updates": 2, "kl": 0.1, "ratio_clip": (0.1, 0.1), "temperature": 0.7},
    ),
    "cispo": ({"algorithm": "cispo", "updates": 2}, {"algorithm": "cispo", "updates": 2}),
    "cispo, narrow": (
        {"algorithm": "cispo", "updates": 2, "clip": "[0.05, 0.05]"},
        {"algorithm": "cispo", "updates": 2, "ratio_clip": (0.05, 0.05)},
    ),
    "grpo, weighed": (
        {"algorithm": "grpo", "updates": 2, "importance": 2},
        {"algorithm": "grpo", "updates": 2, "importance": 2.0},
    ),
    "of the batch": (
        {"algorithm": "grpo", "advantage": "batch_std", "normalize": "length", "temperature": 1.3},
        {"algorithm": "grpo", "advantage": "batch_std", "normalize": "length", "temperature": 1.3},
    ),
}
# name -> (processes, settings)
SPLITS = {
    "whole": (1, [WHOLE]),
    "auto": (1, ["train.micro_batch=auto"]),
    "two at a time, padded": (1, [TWO, PADDED]),
    "one at a time": (1, [ONE]),
    "LoRA": (1, [TWO, LORA]),
    "2, ddp": (2, ["parallel.strategy=ddp", ONE]),
    "2, ddp, auto": (2, ["parallel.strategy=ddp", "train.micro_batch=auto"]),
    "2, ddp, LoRA, padded": (2, ["parallel.strategy=ddp", TWO, LORA, PADDED]),
    "2, zero1": (2, ["parallel.strategy=zero1", TWO]),
    "2, zero2, padded": (2, ["parallel.strategy=zero2", WHOLE, PADDED]),
    "2, fsdp": (2, ["parallel.strategy=fsdp", TWO]),
    "4, ddp, padded": (4, ["parallel.strategy=ddp", ONE, PADDED]),
}
# Every case and every split of few processes once; `make nightly` runs all of all.
DAILY = [
    ("reinforce", "whole"), ("reinforce", "2, ddp"), ("rloo", "one at a time"), ("rloo", "2, zero1"), ("grpo", "auto"),
    ("grpo", "2, ddp, auto"), ("grpo, KL", "LoRA"), ("grpo, KL", "2, ddp"), ("dr_grpo", "two at a time, padded"),
    ("dapo", "2, ddp"), ("gspo", "2, zero2, padded"), ("gspo, KL, wide", "2, ddp, LoRA, padded"), ("cispo", "2, fsdp"),
    ("grpo, weighed", "2, fsdp"),
    ("grpo, KL", "2, fsdp"), ("grpo, KL", "2, zero2, padded"), ("cispo, narrow", "one at a time"),
    ("of the batch", "2, ddp"), ("gspo, KL, wide", "two at a time, padded"),
]  # fmt: skip


def settings_of(case):
    return [f"rl.{key}={value}" for key, value in CASES[case][0].items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    model = write_tiny_model(folder / "model", tied=False, odd=True, layers=2)
    write_steps(folder / "recorded", NUM_STEPS, seed=5)
    yaml = folder / "run.yaml"
    text = YAML.format(model=model, replay=folder / "recorded", output=folder / "out")
    yaml.write_text(text, encoding="utf-8")
    return folder, yaml, model


def run_all(place, cells):
    folder, yaml, _ = place
    worlds = {}
    for case, split in cells:
        size, overrides = SPLITS[split]
        job = (str(yaml), [*settings_of(case), *overrides], str(folder / f"{case}; {split}"))
        worlds.setdefault(size, []).append(job)
    for size, jobs in sorted(worlds.items()):
        train_all(jobs, size)


@pytest.fixture(scope="module")
def runs(place):
    run_all(place, DAILY)


@pytest.fixture(scope="module")
def oracle(place):
    """By (case, with adapters), each made once."""
    from duoka.config.schema import LoraConfig
    from duoka.model.lora import apply_lora

    folder, _, model = place
    adapt = partial(apply_lora, lora=LoraConfig(rank=3, dropout=0.0), seed=7)
    known = {}

    def ask(case, lora):
        if (case, lora) not in known:
            names = {"algorithm": "reinforce", **CASES[case][1]}
            known[case, lora] = oracle_train(
                model, folder / "recorded", NUM_STEPS, **names, **RECIPE, max_new_tokens=12,
                adapt=adapt if lora else None,
            )  # fmt: skip
        return known[case, lora]

    return ask


def compare(place, oracle, case, split):
    folder = place[0] / f"{case}; {split}"
    has_lora = LORA in SPLITS[split][1]
    losses, norms, weights, logged = oracle(case, has_lora)
    steps = read_run(folder)
    assert len(steps) == NUM_STEPS
    for key, want in (("loss", losses), ("grad_norm", norms)):
        # Advantages add up to 0, and with them the loss of a first update: only its gradient says something.
        # And a narrow clip leaves none of it at the second.
        floor = 1e-2 if key == "loss" else 1e-3
        pairs = zip([step[key] for step in steps], want, strict=True)
        error = max(abs(ours - theirs) / max(abs(theirs), floor) for ours, theirs in pairs)
        assert error < TOLERANCE, f"{key} of {case}, {split}, is off by {error}"
    for step, want in zip(steps, logged, strict=True):
        for key in want.keys() & step.keys():
            assert abs(step[key] - want[key]) < 1e-5 * max(1.0, abs(want[key])), f"{key} of {case}, {split}"
    if case == "gspo":
        assert {key for one in logged for key in ("clip_low", "clip_high") if one[key]} == {"clip_low", "clip_high"}
    if "ratio" in steps[0]:
        updates = CASES[case][0].get("updates", 1)
        firsts = [step["ratio"] for step in steps[::updates]]
        assert firsts == [1.0] * len(firsts), "at the first update the policy is the one that drew"
        assert updates == 1 or abs(steps[1]["ratio"] - 1.0) > 1e-4
    name = "adapter_model.safetensors" if has_lora else "model.safetensors"
    weights = {key.replace(".default.", "."): value for key, value in weights.items()}
    error, tensor = worst(load_file(folder / "final" / name), weights)
    assert error < TOLERANCE, f"{tensor} of {case}, {split}, is off by {error}"


@pytest.mark.parametrize(("case", "split"), DAILY)
def test_every_algorithm_on_its_split_equals_the_oracle(place, runs, oracle, case, split):
    compare(place, oracle, case, split)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_algorithm_on_every_split_equals_the_oracle(place, oracle):
    cells = [(case, split) for case in CASES for split in SPLITS if not ("KL" in case and "fsdp" in split)]
    run_all(place, cells)
    for case, split in cells:
        compare(place, oracle, case, split)
