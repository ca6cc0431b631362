"""A reward model among rl.rewards: its scores are those that transformers reads from its folder, on any ranks."""

import json
from pathlib import Path

import pytest
import torch
from tiny import write_pairs, write_tiny_model
from worlds import run_world, train_all, train_jobs

pytestmark = pytest.mark.timeout(300)

REWARD = """
model: {folder}/model
stage: reward
data: {{train: [{folder}/pairs.jsonl], max_length: 256}}
optim: {{lr: 5e-3}}
train: {{epochs: 1, global_batch: 4, precision: fp32, seed: 7}}
log: {{to: []}}
output: {folder}/judge
"""
RL = """
model: {folder}/model
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{algorithm: ppo, samples: 2, max_new_tokens: 8, rewards: [{folder}/rewards.py:length, "model:{folder}/judge"],
      reward_weights: [0.5, 2]}}
train: {{max_steps: 2, global_batch: 3, precision: fp32, seed: 7}}
log: {{to: []}}
output: {folder}/out
"""


def answers(folder, number=0):
    lines = (folder / "rollouts" / f"step-{number:08d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judges")
    write_tiny_model(folder / "model", layers=2)
    write_pairs(folder / "pairs.jsonl", 11)
    (folder / "rewards.py").write_text("def length(messages, completion, example):\n    return len(completion)\n")
    (folder / "reward.yaml").write_text(REWARD.format(folder=folder), encoding="utf-8")
    (folder / "rl.yaml").write_text(RL.format(folder=folder), encoding="utf-8")
    both = ("whole", []), ("adapter", ["lora={rank: 3}", "optim.lr=2e-2"])
    train_all([(str(folder / "reward.yaml"), more, str(folder / f"judge {name}")) for name, more in both], 1)
    jobs = [
        (str(folder / "rl.yaml"), [f"rl.rewards=[{folder}/rewards.py:length, 'model:{folder}/judge {name}']"],
         str(folder / name)) for name, _ in both
    ]  # fmt: skip
    train_all(jobs, 1)
    wide = [*jobs[0][1], "parallel.strategy=ddp", "train.max_steps=1"]
    train_all([(jobs[0][0], wide, str(folder / "wide"))], 2)
    return folder


def judge_tokens(place):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place / "model")


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_an_answer_s_reward_is_what_transformers_reads_from_the_judge(place, name):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    kind = {"whole": AutoModelForSequenceClassification, "adapter": AutoPeftModelForSequenceClassification}[name]
    judge = kind.from_pretrained(place / f"judge {name}" / "final", num_labels=1, dtype=torch.float32).eval()
    found = answers(place / name)
    assert len(found) == 6
    line_break = judge_tokens(place)("\n", add_special_tokens=False)["input_ids"]
    for one in found:
        ids = [*one["prompt_ids"], *one["ids"], *(line_break if one["ended"] else [2, *line_break])]
        with torch.no_grad():
            hidden = judge(input_ids=torch.tensor([ids])).logits
        length, score = one["rewards"]
        assert length == len(one["text"]) and abs(score - float(hidden[0, 0])) < 1e-5
        assert one["reward"] == pytest.approx(0.5 * length + 2 * score, abs=1e-6)
    assert len({round(one["rewards"][1], 6) for one in found}) > 3


def test_an_answer_is_scored_where_the_reward_model_learned_to(place):
    """Data have a line break behind ChatML's last token, and nobody draws it; one that was cut is closed."""
    from transformers import AutoModelForSequenceClassification

    from duoka.config.schema import ModelConfig
    from duoka.data.prepare import read_tokenizer
    from duoka.data.read.example import Example, Message
    from duoka.data.tokens.template import encode
    from duoka.model.answer import behind_answers, closing_of
    from duoka.tasks.rewards import Rewarded
    from duoka.train.rl.judges import Judges
    from duoka.train.rl.rollouts import Rollout

    tokenizer = read_tokenizer(ModelConfig(name=str(place / "model")), place, place / "model")
    name = f"model:{place / 'judge whole'}"
    judges = Judges(
        [name], place, place / "model", dtype=torch.float32, device=torch.device("cpu"), pad_id=tokenizer.pad_id,
        behind=behind_answers(tokenizer), closing=closing_of(tokenizer),
    )  # fmt: skip
    lm = AutoModelForSequenceClassification.from_pretrained(place / "judge whole" / "final", dtype=torch.float32).eval()
    for words in ("dog ring", "sum 多卡", "batch"):
        sample = encode(Example((Message("user", "cat"), Message("assistant", words))), tokenizer, targets="last")
        own = sample.is_target.nonzero()[0]
        parts = sample.input_ids.tolist()[: own[0]], sample.input_ids.tolist()[own[0] : own[-1] + 1]
        assert len(sample.input_ids) == own[-1] + 2, "a line break behind it"
        ended = Rollout(0, 0, "q", tuple(parts[0]), tuple(parts[1]), True, words, (0.0,) * len(own))
        cut = Rollout(0, 1, "q", tuple(parts[0]), tuple(parts[1][:-1]), False, words, (0.0,) * (len(own) - 1))
        given = judges.judge([ended, cut], [Rewarded(()), Rewarded(())], lambda: None)
        with torch.no_grad():
            wanted = lm(input_ids=torch.from_numpy(sample.input_ids.astype("int64"))[None]).logits.item()
        assert [one.values[0] for one in given] == pytest.approx([wanted, wanted], abs=1e-6)


def test_a_judge_of_its_own_padding_is_read_as_transformers_reads_it(place):
    """Its last words may be what the trained model pads with."""
    from transformers import AutoModelForSequenceClassification

    from duoka.tasks.rewards import Rewarded
    from duoka.train.rl.judges import Judges
    from duoka.train.rl.rollouts import Rollout

    answer = Rollout(0, 0, "q", (5, 6, 7), (8, 9), True, "", (0.0, 0.0))
    judges = Judges(
        [f"model:{place / 'judge whole'}"], place, place / "model", dtype=torch.float32, device=torch.device("cpu"),
        pad_id=9, behind={},
    )  # fmt: skip
    (found,) = judges.judge([answer], [Rewarded(())], lambda: None)
    lm = AutoModelForSequenceClassification.from_pretrained(place / "judge whole" / "final", dtype=torch.float32).eval()
    with torch.no_grad():
        assert found.values[0] == pytest.approx(lm(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits.item(), abs=1e-6)


def test_its_scores_are_the_same_bits_on_two_ranks(place):
    ours, theirs = (
        [(one["ids"], one["rewards"]) for one in answers(place / name)] for name in ("wide", "whole")
    )  # fmt: skip
    assert ours == theirs


def refuse(yaml, overrides, folder):
    from duoka.errors import DuokaError

    try:
        train_jobs([(yaml, overrides, folder)])
    except DuokaError as error:
        Path(folder, "said.txt").write_text(str(error), encoding="utf-8")


@pytest.mark.parametrize(
    ("judge", "said"), [("nowhere", "no reward model is there"), ("model", "no head for a score")]
)  # fmt: skip
def test_what_is_no_reward_model_is_refused_before_anything_is_drawn(place, judge, said):
    folder = place / f"refused {judge}"
    run_world(
        1,
        refuse,
        str(place / "rl.yaml"),
        [f"rl.rewards=[{place}/rewards.py:length, 'model:{place / judge}']"],
        str(folder),
    )
    assert said in (folder / "said.txt").read_text(encoding="utf-8")
    assert not (folder / "rollouts").exists()
