"""Whole runs of mixtures of experts: what they learn under each layout, what they leave, and where they go on."""

import json
import shutil

import pytest
from families import write_family
from oracle import train as oracle_train
from safetensors import safe_open
from test_families import GLOBAL_BATCH, NUM_SAMPLES, RECIPE, YAML, events_of
from tiny import build_tiny_tokenizer, write_conversations, write_labeled
from worlds import train_all

pytestmark = pytest.mark.timeout(400)

SHARED = ("parallel.strategy=fsdp", "parallel.expert=2")
SAVES = ("checkpoint.every=1", "checkpoint.keep=9", "checkpoint.resume=auto")
RUNS = {
    "alone": ("qwen3_moe", 1, SAVES),
    "ddp": ("qwen3_moe", 2, ("parallel.strategy=ddp",)),
    "fsdp": ("mixtral", 2, ("parallel.strategy=fsdp", "data.packing=false")),
    "shared": ("mixtral", 2, ("parallel.expert=2",)),
    "zero1, shared": ("deepseek_v3", 2, ("parallel.strategy=zero1", "parallel.expert=2", "data.eval=0.2")),
}
# Each goes on from what the one before it saved, after as many steps.
CUT = ("parallel.tensor=2", "parallel.expert=2", "parallel.check_replicas=1")
WIDER = ("parallel.tensor=2", "parallel.expert=4", "parallel.check_replicas=1")
CHAIN = (
    ("alone", 1, "then ep2", 2, SHARED),
    ("then ep2", 2, "then alone", 1, ()),
    ("alone", 1, "then fsdp2.tp2.ep4", 4, WIDER),
    ("then fsdp2.tp2.ep4", 2, "then tp2.ep2", 2, CUT),
)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    data = write_conversations(folder / "chats.jsonl", NUM_SAMPLES, seed=3)
    tokenizer, models, yamls = build_tiny_tokenizer(), {}, {}
    for name in sorted({model for model, *_ in RUNS.values()}):
        models[name] = write_family(folder / "models" / name, name, tokenizer=tokenizer)
        yamls[name] = folder / f"{name}.yaml"
        yamls[name].write_text(YAML.format(model=models[name], data=data, output=folder / "out"), encoding="utf-8")
    for size in (1, 2):
        train_all([(str(yamls[m]), [*how], str(folder / one)) for one, (m, n, how) in RUNS.items() if n == size], size)
    return folder, data, models, yamls


@pytest.fixture(scope="module")
def batches(case):
    """The order of samples, which the oracle takes as given."""
    from duoka.config.load import load_config
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.prepare import prepare_data
    from duoka.units import parse_amount

    folder, _, models, yamls = case
    store = prepare_data(load_config(str(yamls["qwen3_moe"])).config, folder, models["qwen3_moe"]).train
    size = parse_amount(GLOBAL_BATCH)
    plan = EpochPlan(store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=size)
    return [plan.batch(0, i).tolist() for i in range(plan.num_batches(0))]


def load_whole(folder):
    """By transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def names_in(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def check_run(folder, losses, norms, weights, what):
    steps = events_of(folder, "step")
    last = steps[-1]["step"]
    for key, want in (("loss", losses), ("grad_norm", norms)):
        for step in steps:
            value = want[step["step"] - 1]
            assert abs(step[key] / value - 1) < 1e-4, f"{key} of {what}: {step[key]} against {value}"
    assert last == len(losses)
    final = load_whole(folder / "final")
    for name, wanted in weights.items():
        error = float((final[name] - wanted).norm() / wanted.norm())
        assert error < 1e-3, f"{name} of {what} is off by {error}"


def test_runs_learn_what_transformers_computes_alone(case, batches):
    folder, data, models, _ = case
    known = {}
    for name, (model, _, how) in RUNS.items():
        if "data.eval=0.2" in how:
            continue
        if model not in known:
            losses, norms, _, weights = oracle_train(data, models[model], batches, **RECIPE)
            known[model] = losses, norms, weights
        check_run(folder / name, *known[model], name)


def test_the_final_folder_has_the_names_of_the_model_that_came(case):
    folder, _, models, _ = case
    for name, (model, *_) in RUNS.items():
        assert names_in(folder / name / "final") == names_in(models[model]), name
        assert any(".experts.0." in one for one in names_in(models[model]))


def test_frozen_parts_of_a_router_stay_and_evaluations_run(case):
    folder, _, models, _ = case
    before, after = (load_whole(path) for path in (models["deepseek_v3"], folder / "zero1, shared" / "final"))
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases and all((before[name] == after[name]).all() for name in biases)
    assert events_of(folder / "zero1, shared", "eval")


def take_over(folder, before, step, name):
    place = f"checkpoints/step-{step:08d}"
    (folder / name / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder / before / place, folder / name / place)


def test_a_run_goes_on_under_one_layout_after_the_other(case, batches):
    folder, data, models, yamls = case
    losses, norms, _, weights = oracle_train(data, models["qwen3_moe"], batches, **RECIPE)
    for before, step, name, size, how in CHAIN:
        take_over(folder, before, step, name)
        train_all([(str(yamls["qwen3_moe"]), [*SAVES, *how], str(folder / name))], size)
        assert events_of(folder / name, "step")[0]["step"] == step + 1
        check_run(folder / name, losses, norms, weights, name)


def test_fewer_experts_than_ranks_go_on_among_fewer_and_more_ranks(case, batches):
    """Four ranks share the rows of two experts, two the experts."""
    folder, data, _, yamls = case
    model = write_family(folder / "models" / "few", "qwen3_moe", tokenizer=build_tiny_tokenizer(), num_experts=2)
    losses, norms, _, weights = oracle_train(data, model, batches, **RECIPE)
    sharded = "parallel.strategy=fsdp"
    chain = (("", 0, "four", 4), ("four", 1, "two", 2), ("two", 2, "four again", 4), ("four", 2, "one", 1))
    for before, step, name, size in chain:
        if before:
            take_over(folder, before, step, name)
        how = [f"model={model}", *SAVES, *[sharded] * (size > 1)]
        train_all([(str(yamls["qwen3_moe"]), how, str(folder / name))], size)
        assert events_of(folder / name, "step")[0]["step"] == step + 1
        check_run(folder / name, losses, norms, weights, name)


def test_each_run_had_the_layout_that_it_asked_for(case):
    folder, *_ = case
    names = {one: json.loads((folder / one / "plan.json").read_text())["layout"]["name"] for one in RUNS}
    assert names["shared"] == "fsdp2·ep2" and names["zero1, shared"] == "zero1x2·ep2", names


ANSWERS = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 64}}
rl: {{algorithm: dapo, samples: 2, max_new_tokens: 6, rewards: [{folder}/rewards.py:same]}}
train: {{max_steps: 2, global_batch: 2, precision: fp32, router_aux_loss: 0.1}}
log: {{to: []}}
output: {folder}/out
"""


def test_a_step_in_which_no_answer_says_anything_balances_nothing(case):
    folder, _, models, _ = case
    (folder / "rewards.py").write_text("def same(messages, completion, example):\n    return 1\n", encoding="utf-8")
    yaml = folder / "answers.yaml"
    yaml.write_text(ANSWERS.format(model=models["qwen3_moe"], folder=folder), encoding="utf-8")
    train_all([(str(yaml), [], str(folder / "answers"))], 1)
    steps = events_of(folder / "answers", "step")
    assert [(one["num_samples"], one["loss"], one["grad_norm"]) for one in steps] == [(0, 0, 0)] * 2


LABELED = """
model: {model}
stage: {{name: kto, beta: 0.3}}
data: {{train: [{data}], max_length: 96}}
optim: {{lr: 1e-2}}
train: {{max_steps: 4, global_batch: 4, precision: fp32, seed: 7}}
log: {{to: []}}
output: {folder}/out
"""


def test_a_stage_that_looks_ahead_does_so_beside_the_balancing_loss(case):
    """KTO's z0 comes of passes before the step's own. A balancing loss of next to nothing changes none of it."""
    folder, _, models, _ = case
    data, yaml = write_labeled(folder / "labeled.jsonl", 11, seed=3), folder / "labeled.yaml"
    yaml.write_text(LABELED.format(model=models["qwen3_moe"], data=data, folder=folder), encoding="utf-8")
    train_all([(str(yaml), [f"train.router_aux_loss={one}"], str(folder / one)) for one in ("0", "1e-9")], 1)
    plain, balanced = (events_of(folder / one, "step") for one in ("0", "1e-9"))
    assert max(one["kl"] for one in plain) > 0.01 and len(plain) == 4
    for ours, theirs in zip(balanced, plain, strict=True):
        for key in ("loss", "kl", "drift", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), f"{key} of step {ours['step']}"


def test_padding_between_rows_of_a_fixed_length_has_no_part_in_the_balancing_loss(case):
    folder, _, _, yamls = case
    rows = ("data.fixed_rows=true", "data.max_length=256", "train.micro_batch=768 tokens")
    ways = {"by samples": ("data.max_length=256",), "by rows": rows}
    yaml, strong = str(yamls["qwen3_moe"]), "train.router_aux_loss=1"
    train_all([(yaml, [strong, *how], str(folder / name)) for name, how in ways.items()], 1)
    ours, theirs = (events_of(folder / way, "step") for way in ("by rows", "by samples"))
    assert len(ours) == len(theirs) > 1
    for mine, want in zip(ours, theirs, strict=True):
        assert (mine["loss"], mine["grad_norm"]) == pytest.approx((want["loss"], want["grad_norm"]), rel=1e-5)
