"""Stage rl's settings, one by one: what is drawn, from which answers a run goes on, and where distances begin."""

import json
import shutil

import pytest
import torch
from test_any_split import read_run
from test_rollouts_run import REWARDS, YAML, drawn, lines_of
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(400)


STOPS = [2, *range(20, 110)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts-settings")
    model, drops = (write_tiny_model(folder / name, layers=2) for name in ("model", "drops"))
    facts = json.loads((drops / "config.json").read_text(encoding="utf-8"))
    (drops / "config.json").write_text(json.dumps({**facts, "attention_dropout": 0.5}), encoding="utf-8")
    # A third of the words end an answer; of a model that was drawn at random, the one mark hardly ever comes.
    (drops / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    asked = {"messages": [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "it"}]}
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    yaml, mine = folder / "run.yaml", f"{folder / 'rewards.py'}:"
    text = YAML.format(model=model, rewards=folder / "rewards.py", output=folder / "out")
    yaml.write_text(text, encoding="utf-8")

    def job(name, *overrides):
        return (str(yaml), list(overrides), str(folder / name))

    one_prompt = [f"data.train=[{folder / 'asked.jsonl'}]", "train.max_steps=null", "train.epochs=2", "rl.updates=3",
                  "train.global_batch=1", "optim.lr=1e-9", "rl.samples=2"]  # fmt: skip
    once, thrice = ["train.max_steps=1", "rl.updates=1"], ["train.max_steps=3", "rl.samples=2"]
    distant = ["rl.kl=0.5", "train.max_steps=4", "rl.samples=2"]
    train_all(
        [
            job("plain", *thrice),
            job("narrow", *once, "rl.temperature=0.5", "rl.top_k=3", f"model={drops}"),
            job("weighed", *once, f"rl.rewards=[{mine}letters, {mine}same]", "rl.reward_weights=[0.5, -2]"),
            job("one prompt", *one_prompt),
            job("one prompt, seed 8", *one_prompt, "train.seed=8"),
            job("distant", *distant),
        ],
        1,
    )
    begun = folder / "distant" / "checkpoints" / "step-00000002"
    shutil.copytree(begun, folder / "distant again" / "checkpoints" / begun.name)
    for name in ("warmer", "faster"):  # with answers to the same prompts, by other settings and by other weights
        shutil.copytree(folder / "plain" / "rollouts", folder / name / "rollouts")
    train_all(
        [
            job("distant again", *distant),
            job("warmer", *thrice, "train.max_steps=1", "rl.temperature=1.5"),
            job("faster", *thrice, "optim.lr=1e-2"),
        ],
        1,
    )
    return folder


def test_what_is_drawn_are_likely_tokens_at_the_temperature_as_transformers_has_them(case):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case / "model", dtype=torch.float32, attn_implementation="eager")
    (step,) = read_run(case / "narrow")
    assert step["logp_gap"] < 1e-5, "drawn without dropout, learned without it, both at the temperature"
    assert step["num_targets"] == sum(len(one["ids"]) for one in lines_of(case / "narrow", 0)[1:])
    answers, ranks = lines_of(case / "narrow", 0)[1:], set()
    for one in answers:
        start = len(one["prompt_ids"])
        ids = torch.tensor([*one["prompt_ids"], *one["ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
        logps = (logits / 0.5).log_softmax(-1).gather(1, ids[start:, None]).squeeze(1)
        assert (logps - torch.tensor(one["drawn"])).abs().max() < 1e-4
        ranks |= {int((row > row[token]).sum()) for row, token in zip(logits, ids[start:], strict=True)}
    assert ranks == {0, 1, 2}
    assert {one["ended"] for one in answers} == {True, False}
    for one in answers:
        *before, last = one["ids"]
        assert not set(before) & set(STOPS) and one["ended"] == (last in STOPS), "the mark that ends it is learned"
        assert one["ended"] or len(one["ids"]) == 10, "others are cut where they are as long as they may be"


@pytest.mark.parametrize(
    ("name", "seed", "number"), [("plain", 7, 0), ("one prompt", 7, 1), ("one prompt, seed 8", 8, 0)]
)
def test_each_token_is_the_one_that_its_number_falls_on(case, name, seed, number):
    from transformers import AutoModelForCausalLM

    from duoka.model.sampling import uniform

    model = AutoModelForCausalLM.from_pretrained(case / "model", dtype=torch.float64, attn_implementation="eager")
    for one in lines_of(case / name, number)[1:]:
        ids = torch.tensor([*one["prompt_ids"], *one["ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(one["prompt_ids"]) - 1 : -1]
        for position, (row, token) in enumerate(zip(logits, one["ids"], strict=True)):
            passed = row.softmax(-1).cumsum(-1)
            at = uniform(seed, number, one["prompt"], one["sample"], position)
            assert (passed[token - 1] if token else 0.0) - 1e-5 < at < passed[token] + 1e-5, (one["sample"], position)


def test_answers_of_other_steps_and_other_seeds_are_others(case):
    assert [step["step"] for step in read_run(case / "one prompt")] == [1, 2, 3, 4, 5, 6], "2 epochs of 3 updates each"
    ids = [tuple(tuple(ids) for *_, ids, _ in drawn(case / name, n)) for name in ("one prompt", "one prompt, seed 8")
           for n in (0, 1)]  # fmt: skip
    assert len(set(ids)) == 4 and len({answer for answers in ids for answer in answers}) == 8


def test_rewards_are_summed_by_their_weights(case):
    for one in lines_of(case / "weighed", 0)[1:]:
        assert one["rewards"][1] == 1.0 and abs(one["reward"] - (0.5 * one["rewards"][0] - 2)) < 1e-12


def test_a_resumed_run_measures_the_distance_from_where_it_began(case):
    def numbers(name):
        return [(one["step"], one["kl"], one["loss"], one["grad_norm"]) for one in read_run(case / name)]

    assert numbers("distant again") == numbers("distant")[2:] and numbers("distant")[3][1] > 1e-6
    assert numbers("distant")[0][1] == 0.0


def test_recorded_answers_of_other_settings_or_weights_are_not_taken(case):
    want = lines_of(case / "plain", 0)
    assert lines_of(case / "warmer", 0)[0]["fingerprint"] != want[0]["fingerprint"]
    assert drawn(case / "warmer", 0) != drawn(case / "plain", 0)
    assert lines_of(case / "faster", 0)[0] == want[0] and drawn(case / "faster", 0) == drawn(case / "plain", 0)
    ours, theirs = (lines_of(case / name, 1) for name in ("faster", "plain"))
    assert ours[0]["fingerprint"] != theirs[0]["fingerprint"] and ours[1]["drawn"] != theirs[1]["drawn"]


def test_a_policy_that_did_not_draw_its_answers_is_refused_at_the_first_step(case):
    from duoka.config.load import load_config
    from duoka.errors import ConfigError
    from duoka.train.stages.stage import build_stage

    stage = build_stage(load_config(case / "run.yaml").config)
    stage.check_first({"logp_gap": 1e-5}, "fp32")
    with pytest.raises(ConfigError, match="not the one that drew"):
        stage.check_first({"logp_gap": 1e-2}, "fp32")
