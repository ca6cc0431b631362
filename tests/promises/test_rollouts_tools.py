"""Stage rl with tools: the model calls, reads what they answer and goes on; what a tool said is read, not learned."""

import json
from pathlib import Path

import pytest
from talking import ASKS_SUM, ASKS_WEATHER, SUNNY, write_talking_model
from test_any_split import read_run
from worlds import train_all

from duoka.runs.folder import RunFolder
from duoka.watch.report import summary_to_json

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: rl
data: {{train: [{prompts}], max_length: 256}}
rl: {{algorithm: grpo, samples: 4, max_new_tokens: 160, temperature: 0.3, updates: 2, tools: [calculator], rewards: ["{file}:right"]}}
optim: {{lr: 1e-4}}
train: {{max_steps: 4, global_batch: 2, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {output}
"""  # noqa: E501
FUNCTIONS = '''
def right(messages, completion, example):
    return float("1000" in completion) + 0.1 * len(example["calls"])

def sunny(messages, completion, example):
    return float("sunny" in completion and example["calls"][0]["answer"] == "sunny")

def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny" if city == "Oslo" else "rain"
'''
UNFORESEEN = """
def weather(city: str) -> str:
    return "zz 9q " + city[::-1] + " 31 % of what is 7"  # nothing it was taught to go on from
"""
SPOKEN = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts-tools")
    model = write_talking_model(folder / "model")
    (folder / "mine.py").write_text(FUNCTIONS, encoding="utf-8")
    (folder / "other.py").write_text(UNFORESEEN, encoding="utf-8")
    for name, ask in (("sums", ASKS_SUM), ("weather", ASKS_WEATHER)):
        (folder / f"{name}.jsonl").write_text((json.dumps({"prompt": ask}) + "\n") * 2, encoding="utf-8")
    yaml = folder / "run.yaml"
    text = YAML.format(model=model, prompts="sums.jsonl", file="mine.py", output=folder / "out")
    yaml.write_text(text, encoding="utf-8")

    def job(name, *overrides):
        return (str(yaml), list(overrides), str(folder / name))

    short = ["train.max_steps=1", "rl.updates=1"]
    train_all([
        job("whole"),
        job("again", f"rl.replay={folder / 'whole' / 'rollouts'}"),
        job("mine", *short, "data.train=[weather.jsonl]", "rl.tools=[mine.py:weather]", "rl.rewards=[mine.py:sunny]"),
        job("no room", *short, "rl.max_new_tokens=90"),
        job("once", *short, "rl.tool_rounds=1"),
        job("unforeseen", *short, "data.train=[weather.jsonl]", "rl.tools=[other.py:weather]", "rl.temperature=0.8",
            "rl.samples=12", "rl.rewards=[mine.py:right]"),
    ], 1)  # fmt: skip
    train_all([
        job("two", "parallel.strategy=ddp", *short),
        job("two, fsdp", "parallel.strategy=fsdp", *short),
    ], 2)  # fmt: skip
    return folder


def answers(folder: Path, number: int = 0) -> list:
    text = (folder / "rollouts" / f"step-{number:08d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[1:]]


def called(folder: Path) -> list:
    found = [one for one in answers(folder) if one["calls"]]
    assert len(found) >= 4, "the model was taught to call"
    return found


def decode(folder: Path, ids: list) -> str:
    from duoka.data.tokens.tokenizer import load_tokenizer

    return load_tokenizer(folder / "model").decode(ids)


def test_what_a_tool_said_stands_as_the_template_writes_it_and_only_the_rest_was_drawn(case):
    for one in called(case / "whole"):
        call = {"name": "calculator", "arguments": {"expression": "2**10 - 24"}, "answer": "1000"}
        assert one["calls"][0] == call
        said = decode(case, [token for token, own in zip(one["ids"], one["own"], strict=True) if not own])
        assert said == "".join(SPOKEN.format(call["answer"]) for call in one["calls"])
        assert len(one["drawn"]) == len(one["old"]) == sum(one["own"]) < len(one["ids"]) == len(one["own"])
        assert len(one["calls"]) > 1 or (one["text"] == "It is 1000." and one["reward"] == pytest.approx(1.1))
        first = '<tool_call>{"name": "calculator", "arguments": {"expression": "2**10 - 24"}}</tool_call><|im_end|>'
        assert decode(case, one["ids"]).startswith(first + SPOKEN.format("1000"))


def test_what_is_drawn_is_what_is_learned_and_calls_are_counted(case):
    first = read_run(case / "whole")[0]
    assert first["rollouts_s"] > 0 and "rollouts" in summary_to_json(RunFolder(case / "whole"))["seconds"]
    assert first["logp_gap"] < 1e-4 and first["ratio"] == 1.0 and first["tool_errors"] == 0
    found = answers(case / "whole")
    assert first["tool_calls"] == sum(len(one["calls"]) for one in found) / 8 >= 0.5
    assert first["num_targets"] == sum(sum(one["own"]) for one in found)


def test_behind_a_tool_draws_are_counted_on(case):
    import torch
    from transformers import AutoModelForCausalLM

    from duoka.model.sampling import uniform

    model = AutoModelForCausalLM.from_pretrained(case / "model", dtype=torch.float64, attn_implementation="eager")
    for one in called(case / "unforeseen"):
        ids = torch.tensor([*one["prompt_ids"], *one["ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(one["prompt_ids"]) - 1 : -1] / 0.8
        for position, (row, token, own) in enumerate(zip(logits, one["ids"], one["own"], strict=True)):
            passed = row.softmax(-1).cumsum(-1)
            at = uniform(7, 0, one["prompt"], one["sample"], position)
            falls_on = (passed[token - 1] if token else 0.0) - 1e-5 < at < passed[token] + 1e-5
            assert falls_on or not own, (one["sample"], position)


def test_any_world_draws_the_same_and_recorded_answers_give_the_run_again(case):
    def facts(name):
        return [(one["ids"], one["own"], one["calls"], one["reward"]) for one in answers(case / name)]

    assert facts("two") == facts("two, fsdp") == facts("whole")
    numbers = [[(step["loss"], step["grad_norm"]) for step in read_run(case / name)] for name in ("again", "whole")]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4


def test_a_function_is_a_tool_and_its_reward_sees_the_calls(case):
    right = [one for one in called(case / "mine") if one["calls"][0]["answer"] == "sunny" and one["text"] == SUNNY]
    assert len(right) >= 4 and all(one["reward"] == 1.0 for one in right)


def test_an_answer_whose_tool_leaves_no_room_is_cut_there(case):
    found = called(case / "no room")
    assert all(not one["ended"] and all(one["own"]) and len(one["ids"]) <= 90 for one in found)
    assert all(len(one["calls"]) == 1 for one in called(case / "once"))
