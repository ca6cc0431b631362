"""A run of stage rl from end to end: the same answers on any world, crashes, what it learns and what it says."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_any_split import read_run
from tiny import write_tiny_model
from worlds import end_processes, start_processes, train_all, train_jobs

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{samples: 4, max_new_tokens: 10, algorithm: grpo, updates: 2, rewards: [{rewards}:letters]}}
optim: {{lr: 3e-3, warmup: 0.3}}
train: {{max_steps: 6, global_batch: 3, precision: fp32, seed: 7}}
checkpoint: {{every: 1, keep: 10}}
log: {{to: []}}
output: {output}
"""
REWARDS = """
def letters(messages, completion, example):
    return sum(letter.isascii() for letter in completion) / 10

def less(messages, completion, example):
    return -letters(messages, completion, example)

def same(messages, completion, example):
    return 1.0

def sometimes(messages, completion, example):
    if sum(map(ord, completion)) % 3 == 0:
        raise KeyError("no such thing")
    return letters(messages, completion, example)

def never(messages, completion, example):
    raise RuntimeError("the judge is gone")
"""
# Scores of a task on the way; an evaluation changes no result, and the best step is one of those that were scored.
SCORED = ["train.eval_tasks=[sort]", "train.eval_every=2", "train.eval_items=4", "checkpoint.keep_best=true",
          "checkpoint.best_by=sort"]  # fmt: skip
FEW = ["train.global_batch=2", "rl.samples=2"]  # where there is nothing to learn
# Fewer, larger steps on the same prompts, to see what is learned.
LEARNING = ["rl.algorithm=reinforce", "rl.updates=1", "train.max_steps=16", "train.global_batch=8", "rl.samples=8",
            "optim.lr=1e-2", "checkpoint.every=100", "optim.schedule=constant"]  # fmt: skip


def lines_of(folder, number):
    file = folder / "rollouts" / f"step-{number:08d}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def drawn(folder, number):
    return [(one["prompt"], one["sample"], one["ids"], one["reward"]) for one in lines_of(folder, number)[1:]]


def events_of(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] == kind]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts-run")
    model = write_tiny_model(folder / "model", layers=2)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    yaml = folder / "run.yaml"
    text = YAML.format(model=model, rewards=folder / "rewards.py", output=folder / "out")
    yaml.write_text(text, encoding="utf-8")

    def job(name, *overrides):
        return (str(yaml), list(overrides), str(folder / name))

    mine = f"{folder / 'rewards.py'}:"
    train_all(
        [
            job("whole"),
            job("rows", "rl.rows=3", "train.max_steps=1", "rl.updates=1"),
            job("again", f"rl.replay={folder / 'whole' / 'rollouts'}", *SCORED),
            job("some fail", f"rl.rewards=[{mine}sometimes]", "train.max_steps=2"),
            job("up", *LEARNING),
            job("down", *LEARNING, f"rl.rewards=[{mine}less]"),
            job("none left", *LEARNING, "rl.algorithm=dapo", f"rl.rewards=[{mine}same]", "train.max_steps=1", *FEW),
            job("flat", *LEARNING, f"rl.rewards=[{mine}same]", "train.max_steps=24", "optim.weight_decay=0", *FEW),
        ],
        1,
    )
    two = ["parallel.strategy=ddp"]
    train_all(
        [
            job("two", *two, f"rl.replay={folder / 'whole' / 'rollouts'}"),
            job("two, drawn", *two, "train.max_steps=1", "rl.updates=1", *SCORED),
            job("two, fsdp", "parallel.strategy=fsdp", "train.max_steps=1", "rl.updates=1", *SCORED),
            job("two, zero2", "parallel.strategy=zero2", "train.max_steps=1", "rl.updates=1"),
        ],
        2,
    )
    return folder


def test_one_set_of_weights_gives_the_same_answers_on_any_world_and_in_any_rows(case):
    want = drawn(case / "whole", 0)
    assert len(want) == 12 and len({tuple(ids) for _, _, ids, _ in want}) == 12
    for name in ("rows", "two, drawn", "two, fsdp", "two, zero2"):
        assert drawn(case / name, 0) == want, name


def test_recorded_answers_replayed_give_the_run_again_and_on_two_processes_within_rounding(case):
    def numbers(name):
        return [(one["loss"], one["grad_norm"], one["reward"]) for one in read_run(case / name)]

    assert numbers("again") == numbers("whole") and len(numbers("whole")) == 6
    for ours, theirs in zip(numbers("two"), numbers("whole"), strict=True):
        assert ours[2] == theirs[2]
        assert abs(ours[1] - theirs[1]) < 1e-5 * theirs[1] and abs(ours[0] - theirs[0]) < 1e-5
    ours, theirs = (load_file(case / name / "final" / "model.safetensors") for name in ("again", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_drawn_is_what_is_learned(case):
    first = read_run(case / "whole")[0]
    assert first["logp_gap"] < 1e-5 and first["ratio"] == 1.0
    head, *answers = lines_of(case / "whole", 0)
    assert head["answers"] == 12 and all(len(one["drawn"]) == len(one["ids"]) == len(one["old"]) for one in answers)
    assert all(one["ended"] == (one["ids"][-1] == 2) for one in answers), "the stop mark is a part of what is learned"
    assert first["answer_tokens"] == sum(len(one["ids"]) for one in answers) / 12
    assert first["num_targets"] == sum(len(one["ids"]) for one in answers)


def test_tasks_are_scored_on_the_way_without_other_data(case):
    scored = {name: events_of(case / name, "tasks") for name in ("again", "two, drawn", "two, fsdp")}
    assert [event["step"] for event in scored["again"]] == [2, 4, 6]
    assert all(event["scores"][0]["task"] == "sort" and event["scores"][0]["n"] == 4 for event in scored["again"])
    (file,) = (case / "again" / "checkpoints").glob("step-*6/state.json")
    assert json.loads(file.read_text(encoding="utf-8"))["progress"]["best_step"] == 2, "equal scores: the first"
    assert [event["step"] for event in scored["two, drawn"]] == [1]
    assert scored["two, drawn"][0]["scores"] == scored["two, fsdp"][0]["scores"]


def test_rewards_that_fail_are_counted_and_leave_their_answers_out(case):
    steps = read_run(case / "some fail")
    answers = lines_of(case / "some fail", 0)[1:]
    lost = [one for one in answers if one["reward"] is None]
    assert 0 < len(lost) < 12 and all("KeyError" in one["faults"][0] for one in lost)
    assert steps[0]["unrewarded"] == len(lost) / 12 and steps[0]["num_samples"] == 12 - len(lost)
    known = [one["reward"] for one in answers if one["reward"] is not None]
    assert abs(steps[0]["reward"] - sum(known) / len(known)) < 1e-9
    assert any("have no reward" in event["text"] for event in events_of(case / "some fail", "warning"))


def test_the_reward_rises_and_its_controls_do_not(case):
    def mean(name, part):
        return sum(step["reward"] for step in read_run(case / name)[part]) / 4

    first, last = slice(0, 4), slice(-4, None)
    assert mean("up", last) > mean("up", first) + 0.15
    assert mean("down", last) > mean("down", first) + 0.05, "the negated reward falls when letters become fewer"
    flat = read_run(case / "flat")
    assert all(step["grad_norm"] == 0 and step["groups_equal"] == 1 for step in flat)
    said = [event["text"] for event in events_of(case / "flat", "warning")]
    assert any("nothing is learned" in text and "100%" in text for text in said)


def test_of_a_step_without_answers_to_learn_from_nothing_is_said_of_the_policy(case):
    (step,) = read_run(case / "none left")
    assert step["num_samples"] == 0 and step["groups_equal"] == 1 and step["reward"] == 1
    assert not {"entropy", "logp_gap", "ratio", "clip_low", "clip_high"} & step.keys(), "0 would be a collapsed policy"
    assert {"entropy", "logp_gap"} <= read_run(case / "flat")[0].keys()


# --- crashes ---


def struck_run(job, where, count):
    """The run, which ends itself with SIGKILL the `count`th time that it comes to that place."""
    import duoka.parallel.engine
    import duoka.store.checkpoint
    import duoka.tasks.rewards
    import duoka.train.rl.draw

    seen = [0]
    target, name = {
        "rollout": (duoka.train.rl.draw, "draw_rows"),
        "scoring": (duoka.tasks.rewards.RewardPool, "score"),
        "update": (duoka.parallel.engine.Engine, "step"),
        "save": (duoka.store.checkpoint.CheckpointStore, "save"),
    }[where]
    plain = getattr(target, name)

    def strike(*args, **kwargs):
        found = plain(*args, **kwargs)
        seen[0] += 1
        if seen[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(target, name, strike)
    train_jobs([job])


def strike_and_go_on(case, where, count, name):
    yaml = case / "run.yaml"
    job = (str(yaml), [], str(case / name))
    processes = start_processes(1, struck_run, job, where, count)
    try:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL]
    finally:
        end_processes(processes)
    before = {file.name: file.stat().st_mtime_ns for file in Path(case / name, "rollouts").glob("*.jsonl")}
    whole = {file: lines_of(case / name, int(file[5:13]))[0] for file in before}
    train_all([job], 1)
    ours, theirs = (load_file(case / one / "final" / "model.safetensors") for one in (name, "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs), f"killed in {where}"
    assert [drawn(case / name, number) for number in range(3)] == [drawn(case / "whole", n) for n in range(3)]
    return before, whole


def test_killed_between_two_updates_on_the_same_answers_it_ends_in_the_same_weights(case):
    before, _ = strike_and_go_on(case, "update", 4, "killed in update")
    assert len(before) == 2
    # Of step 1 everything was there: it is read, and written by nobody but the first update that was begun again.
    head = lines_of(case / "killed in update", 1)[0]
    assert head["fingerprint"] == lines_of(case / "whole", 1)[0]["fingerprint"]


@pytest.mark.nightly
@pytest.mark.parametrize(("where", "count"), [("rollout", 13), ("scoring", 2), ("update", 3), ("save", 2), ("save", 3)])
def test_killed_anywhere_it_ends_in_the_same_weights(case, where, count):
    name = f"killed in {where} {count}"
    shutil.rmtree(case / name, ignore_errors=True)
    strike_and_go_on(case, where, count, name)


def refuse(yaml, overrides, folder):
    from duoka.errors import DuokaError

    try:
        train_jobs([(yaml, overrides, folder)])
    except DuokaError as error:
        Path(folder, "said.txt").write_text(str(error), encoding="utf-8")


def test_answers_of_another_model_or_longer_ones_are_not_replayed(case):
    from worlds import run_world

    lines = lines_of(case / "whole", 0)
    for name, ids, said in (("foreign", [9, 4000], "token 4000"), ("long", [9] * 100, "data.max_length (96)")):
        lines[1] = {**lines[1], "ids": ids, "drawn": [0.0] * len(ids)}
        (case / f"{name} answers").mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (case / f"{name} answers" / "step-00000000.jsonl").write_text(text, encoding="utf-8")
        run_world(1, refuse, str(case / "run.yaml"), [f"rl.replay={case / f'{name} answers'}"], str(case / name))
        assert said in (case / name / "said.txt").read_text(encoding="utf-8")


def test_a_step_that_lost_what_its_first_update_saw_does_not_go_on(case):
    from worlds import run_world

    for name in ("checkpoints", "rollouts"):
        shutil.copytree(case / "whole" / name, case / "lost" / name)
    for number in (4, 5, 6):
        shutil.rmtree(case / "lost" / "checkpoints" / f"step-{number:08d}")  # the next one is the second of two
    file = case / "lost" / "rollouts" / "step-00000001.jsonl"
    lines = [{key: value for key, value in line.items() if key != "old"} for line in lines_of(case / "lost", 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run_world(1, refuse, str(case / "run.yaml"), [], str(case / "lost"))
    assert "without the log-probabilities" in (case / "lost" / "said.txt").read_text(encoding="utf-8")


def test_rewards_that_all_fail_end_the_run_and_keep_the_answers(case):
    from worlds import run_world

    folder = case / "no judge"
    run_world(1, refuse, str(case / "run.yaml"), [f"rl.rewards=[{case / 'rewards.py'}:never]"], str(folder))
    said = (folder / "said.txt").read_text(encoding="utf-8")
    assert "12 of 12" in said and "the judge is gone" in said
    assert len(lines_of(folder, 0)) == 13 and not events_of(folder, "step")


def test_a_mended_function_rewards_the_steps_before_it_too(case):
    """Or weights would be learned from two functions, the first of which nobody has any more."""
    from worlds import run_world

    folder, file, calls = case / "mended", case / "mended.py", case / "calls"
    file.write_text(
        f"def length(messages, completion, example):\n"
        f"    with open({str(calls)!r}, 'a+') as seen:\n"
        f"        seen.write('x')\n"
        f"        if seen.tell() > 12:\n"
        f"            raise RuntimeError('not thought of')\n"
        f"    return 1000 + len(completion)\n"
    )
    changes = [f"rl.rewards=[{file}:length]", "train.max_steps=4", "checkpoint.every=100"]
    run_world(1, refuse, str(case / "run.yaml"), changes, str(folder))
    assert "not thought of" in (folder / "said.txt").read_text(encoding="utf-8")
    before = [one["ids"] for one in lines_of(folder, 0)[1:]]
    assert min(one["reward"] for one in lines_of(folder, 0)[1:]) >= 1000
    file.write_text("def length(messages, completion, example):\n    return len(completion)\n")
    (folder / "said.txt").unlink()
    run_world(1, refuse, str(case / "run.yaml"), changes, str(folder))
    assert not (folder / "said.txt").exists()
    assert [one["ids"] for one in lines_of(folder, 0)[1:]] == before, "answers are drawn once"
    assert max(one["reward"] for number in (0, 1) for one in lines_of(folder, number)[1:]) < 1000
