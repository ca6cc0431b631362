"""PPO: the value head's losses, norms and weights are the float64 oracle's, however recorded answers are split."""

import shutil
from functools import partial

import pytest
import torch
from oracle_rollouts import write_steps
from oracle_values import gae
from oracle_values import train as oracle_train
from safetensors.torch import load_file
from test_any_split import TOLERANCE, read_run, worst
from test_rollouts import LORA, ONE, PADDED, RECIPE, TWO, WHOLE, YAML
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(400)
NUM_STEPS = 4

# name -> (keys of the block rl, the oracle's names for them)
CASES = {
    "one update": (["rl.updates=1"], {"updates": 1}),
    "two updates": (["rl.updates=2"], {"updates": 2}),
    "strange": (
        ["rl.updates=4", "rl.values={discount: 0.9, gae_lambda: 0.4, weight: 2, clip: 0.01, whiten: false}",
         "rl.temperature=0.7", "rl.truncated=mask"],
        {"updates": 4, "gamma": 0.9, "lam": 0.4, "weight": 2.0, "value_clip": 0.01, "whiten": False,
         "temperature": 0.7, "mask": True},
    ),
    "unclipped": (["rl.updates=2", "rl.values={clip: 0, weight: 1}"], {"updates": 2, "value_clip": 0, "weight": 1.0}),
}  # fmt: skip
SPLITS = {
    "whole": (1, [WHOLE]),
    "one at a time": (1, [ONE]),
    "two at a time, padded": (1, [TWO, PADDED]),
    "LoRA": (1, [TWO, LORA]),
    "2, ddp": (2, ["parallel.strategy=ddp", ONE]),
    "2, ddp, LoRA, padded": (2, ["parallel.strategy=ddp", TWO, LORA, PADDED]),
    "2, zero1": (2, ["parallel.strategy=zero1", TWO]),
    "2, zero2, padded": (2, ["parallel.strategy=zero2", WHOLE, PADDED]),
    "2, fsdp": (2, ["parallel.strategy=fsdp", ONE]),
    "2, fsdp, LoRA": (2, ["parallel.strategy=fsdp", ONE, LORA]),
    "4, hsdp": (4, ["parallel.strategy=hsdp", "parallel.shard_ranks=2", ONE]),
    "2, fsdp, offload": (2, ["parallel.strategy=fsdp", "parallel.offload=params", TWO]),
    "2, zero1, disk": (2, ["parallel.strategy=zero1", "parallel.offload={optimizer: disk}", TWO]),
}
DAILY = [
    ("one update", "whole"), ("one update", "2, ddp"), ("two updates", "one at a time"), ("two updates", "2, fsdp"),
    ("two updates", "2, ddp, LoRA, padded"), ("strange", "two at a time, padded"), ("strange", "LoRA"),
    ("strange", "2, zero1"), ("strange", "2, zero2, padded"), ("unclipped", "2, ddp"), ("unclipped", "2, fsdp, LoRA"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    model = write_tiny_model(folder / "model", tied=False, odd=True, layers=2)
    write_steps(folder / "recorded", NUM_STEPS, seed=5)
    yaml = folder / "run.yaml"
    text = YAML.format(model=model, replay=folder / "recorded", output=folder / "out")
    yaml.write_text(text.replace("rl: {", "rl: {algorithm: ppo, "), encoding="utf-8")
    return folder, yaml, model


def run_all(place, cells):
    folder, yaml, _ = place
    worlds = {}
    for case, split in cells:
        size, overrides = SPLITS[split]
        job = (str(yaml), [*CASES[case][0], *overrides], str(folder / f"{case}; {split}"))
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
            known[case, lora] = oracle_train(
                model, folder / "recorded", NUM_STEPS, **CASES[case][1], **RECIPE, adapt=adapt if lora else None
            )
        return known[case, lora]

    return ask


def saved(folder):
    """What a finished run left: weights, and the head's beside them."""
    name = "adapter_model.safetensors" if (folder / "final" / "adapter_model.safetensors").exists() else None
    head = load_file(folder / "final" / "value_head.safetensors")
    return load_file(folder / "final" / (name or "model.safetensors")) | head


def compare(place, oracle, case, split):
    folder = place[0] / f"{case}; {split}"
    losses, norms, weights, missed = oracle(case, LORA in SPLITS[split][1])
    steps = read_run(folder)
    assert len(steps) == NUM_STEPS
    for key, want in (("loss", losses), ("grad_norm", norms), ("value_loss", missed)):
        floor = 1e-2 if key == "loss" else 1e-3
        pairs = zip([step[key] for step in steps], want, strict=True)
        error = max(abs(ours - theirs) / max(abs(theirs), floor) for ours, theirs in pairs)
        assert error < TOLERANCE, f"{key} of {case}, {split}, is off by {error}"
    error, tensor = worst(saved(folder), {key.replace(".default.", "."): value for key, value in weights.items()})
    assert error < TOLERANCE, f"{tensor} of {case}, {split}, is off by {error}"
    assert weights["v_head.summary.weight"].abs().max() > 1e-4, "the head learned"


@pytest.mark.parametrize(("case", "split"), DAILY)
def test_ppo_on_its_split_equals_the_oracle(place, runs, oracle, case, split):
    compare(place, oracle, case, split)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ppo_on_every_split_equals_the_oracle(place, oracle):
    cells = [(case, split) for case in CASES for split in SPLITS]
    run_all(place, cells)
    for case, split in cells:
        compare(place, oracle, case, split)


# --- runs that draw their own answers ---

REWARDS = "def letters(messages, completion, example):\n    return sum(one.isascii() for one in completion) / 10\n"
DRAWS = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{algorithm: ppo, samples: 2, max_new_tokens: 10, updates: 2, rewards: [{folder}/rewards.py:letters]}}
optim: {{lr: 3e-3, warmup: 0.3}}
train: {{max_steps: 6, global_batch: 3, precision: fp32, seed: 7}}
checkpoint: {{every: 1, keep: 10}}
log: {{to: []}}
output: {folder}/out
"""
LEARNING = ["rl.updates=1", "train.max_steps=16", "train.global_batch=32", "rl.samples=2", "optim.lr=1e-2",
            "checkpoint.every=100", "optim.schedule=constant"]  # fmt: skip


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values-drawn")
    model = write_tiny_model(folder / "model", layers=2)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    yaml = folder / "run.yaml"
    yaml.write_text(DRAWS.format(model=model, folder=folder), encoding="utf-8")
    train_all([(str(yaml), [], str(folder / "whole")), (str(yaml), LEARNING, str(folder / "learning"))], 1)
    return folder


def keep_until(folder, source, step):
    for name in ("checkpoints", "rollouts"):
        shutil.copytree(source / name, folder / name)
    for later in (folder / "checkpoints").glob("step-*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)


def test_a_run_goes_on_between_two_updates_to_the_same_bits_of_model_and_head(drawn):
    keep_until(drawn / "half", drawn / "whole", 3)
    train_all([(str(drawn / "run.yaml"), [], str(drawn / "half"))], 1)
    ours, theirs = saved(drawn / "half"), saved(drawn / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_run_goes_on_by_other_ranks_with_the_head_in_shards(drawn):
    keep_until(drawn / "wide", drawn / "whole", 4)
    more = [
        "parallel.strategy=fsdp",
        f"rl.replay={drawn / 'whole' / 'rollouts'}",
        "checkpoint.allow_changes=[rl.replay]",
    ]
    train_all([(str(drawn / "run.yaml"), more, str(drawn / "wide"))], 2)
    error, tensor = worst(saved(drawn / "wide"), saved(drawn / "whole"))
    assert error < TOLERANCE, f"{tensor} is off by {error}"


def test_the_reward_rises_and_the_head_foresees_some_of_it(drawn):
    steps = read_run(drawn / "learning")
    mean = [sum(step["reward"] for step in part) / 4 for part in (steps[:4], steps[-4:])]
    assert mean[1] > mean[0] + 0.1
    assert steps[0]["value"] == 0 and steps[-1]["value"] > 0.05
    assert "groups_equal" not in steps[0], "with one reward for a whole group something is learned too"


def test_what_is_saved_is_a_plain_model_and_the_head_beside_it(drawn):
    from transformers import AutoModelForCausalLM

    _, found = AutoModelForCausalLM.from_pretrained(drawn / "whole" / "final", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    head = load_file(drawn / "whole" / "final" / "value_head.safetensors")
    assert {name: len(tensor.shape) for name, tensor in head.items()} == {
        "v_head.summary.weight": 2, "v_head.summary.bias": 1,
    }  # fmt: skip


def test_gae_is_the_papers_sum():
    from duoka.train.rl.advantages import estimate

    values = [0.3, -0.2, 0.7, 0.1]
    for discount, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)):
        want = gae(values, 2.0, discount, lam)
        assert estimate(values, 2.0, discount, lam) == pytest.approx(want, abs=1e-12)
    assert estimate(values, 2.0, 1.0, 1.0) == pytest.approx([2.0 - value for value in values])
