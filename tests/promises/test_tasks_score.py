"""Scores of tasks: the same file at any number of processes and batch size, also after a kill; and right ones."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import write_conversations, write_tiny_model
from transformers import AutoModelForCausalLM
from worlds import run_world, train_all

from duoka.cli import run as duoka
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import ConfigError
from duoka.serve.load_run import find_trained
from duoka.serve.score_tasks import Asked, find_asked, score_tasks

pytestmark = pytest.mark.timeout(300)
NAMES = ("sort", "arithmetic", "core:core", "mmlu:mmlu")
LIMIT = 12


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tiny_model(folder / "model", tied=False, layers=2)
    core = folder / "core"
    answers, whos = ["a cat", "two", "so it is", "多卡"], [[f"He {n}", "She ran and"] for n in range(5)]
    mc = [{"query": f"Say {n * 7}", "choices": answers, "gold": n % 4} for n in range(9)]
    write(core / "eval_data/mc.jsonl", *mc)
    sc = [{"context_options": who, "continuation": "is there", "gold": 0} for who in whos]
    write(core / "eval_data/sc.jsonl", *sc)
    write(core / "eval_data/lm.jsonl", *({"context": f"one two {n}", "continuation": "x"} for n in range(5)))
    (core / "core.yaml").write_text(
        "icl_tasks:\n- {label: mc, dataset_uri: mc.jsonl, num_fewshot: [1], icl_task_type: multiple_choice}\n"
        "- {label: sc, dataset_uri: sc.jsonl, num_fewshot: [0], icl_task_type: schema}\n"
        "- {label: lm, dataset_uri: lm.jsonl, num_fewshot: [0], icl_task_type: language_modeling}\n",
        encoding="utf-8",
    )
    (core / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nmc,25\nsc,50\nlm,0\n", encoding="utf-8")
    choices = ["one", "two", "three", "four"]
    write(folder / "mmlu/test.jsonl", *({"question": f"Q{n}", "choices": choices, "answer": n % 4} for n in range(16)))
    return folder


def score_in(folder, sizes):
    """On every process: the tasks at each batch size, into a folder of its own."""
    import os

    os.chdir(folder)
    trained = find_trained("model", say=lambda text: None)
    for batch, out in sizes:
        asked = Asked(NAMES, LIMIT, batch, max_new_tokens=12)
        score_tasks(trained, asked, Path(out), say=lambda text: None)


def files_of(folder):
    return {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/items.jsonl"))}


@pytest.fixture(scope="module")
def scored(place):
    run_world(1, score_in, place, [(1, "w1b1"), (8, "w1b8")])
    run_world(2, score_in, place, [(3, "w2b3")])
    return place


def test_the_file_of_items_is_the_same_at_any_number_of_processes_and_batch_size(scored):
    alone = files_of(scored / "w1b1")
    assert sorted(name.rsplit("-", 1)[0] for name in alone) == [
        "arithmetic", "core-lm", "core-mc", "core-sc", "mmlu", "sort"
    ]  # fmt: skip
    assert alone == files_of(scored / "w1b8") == files_of(scored / "w2b3")
    answers = {json.loads(line)["answer"] for text in alone.values() for line in text.splitlines()}
    assert len(answers) > 8, "the model answers all alike, so this test shows little"
    assert not list(scored.glob("*/*/part.jsonl"))


def test_options_are_chosen_by_brute_force_log_probability(scored):
    lm = AutoModelForCausalLM.from_pretrained(scored / "model", dtype=torch.float64).eval()
    tokenizer = load_tokenizer(scored / "model")
    bos = [tokenizer.bos_id]

    def mean_logp(text, num_last):
        ids = bos + tokenizer.encode(text)[0]
        with torch.no_grad():
            logps = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = range(len(ids) - num_last, len(ids))
        return sum(logps[at - 1, ids[at]].item() for at in own) / num_last

    (sc,) = [task for task in find_asked(Asked((f"core:{scored / 'core'}",))) if task.name == "core/sc"]
    lines = next(text for name, text in files_of(scored / "w1b8").items() if name.startswith("core-sc"))
    chosen = {one["id"]: one for one in map(json.loads, lines.splitlines())}
    for item in sc.items("test"):
        # What follows the contexts: the blank between, and "is there", a byte a token; no context ends like the other.
        values = [mean_logp(option.before + option.text, len(" is there")) for option in item.options]
        assert chosen[item.id]["answer"] == str(values.index(max(values)))
        assert chosen[item.id]["score"] == float(chosen[item.id]["answer"] == item.answer)


def test_answers_are_those_of_a_plain_loop_without_a_cache(scored):
    lm = AutoModelForCausalLM.from_pretrained(scored / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(scored / "model")
    (task,) = find_asked(Asked(("sort",)))
    lines = next(text for name, text in files_of(scored / "w1b8").items() if name.startswith("sort"))
    questions = {item.id: item.question[0][1] for item in task.items("test")}
    for one in [json.loads(line) for line in lines.splitlines()][:3]:
        text = f"<|im_start|>user\n{questions[one['id']]}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text)[0]
        new = []
        while len(new) < 12:
            with torch.no_grad():
                token = int(lm(torch.tensor([ids + new])).logits[0, -1].argmax())
            if token == tokenizer.eos_id:
                break
            new.append(token)
        assert one["answer"] == tokenizer.backend.decode(new, skip_special_tokens=True)
        assert one["is_unfinished"] == (len(new) == 12)


def test_the_score_says_how_sure_it_is(scored):
    (folder,) = (scored / "w1b8").glob("mmlu-*")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    scores = [json.loads(line)["score"] for line in (folder / "items.jsonl").read_text().splitlines()]
    mean = sum(scores) / len(scores)
    found = result["score"]
    assert found["n"] == LIMIT == len(scores) and found["score"] == pytest.approx(mean, abs=1e-6)
    se = math.sqrt(sum((one - mean) ** 2 for one in scores) / (LIMIT - 1)) / math.sqrt(LIMIT)
    assert found["se"] == pytest.approx(se, abs=1e-6)
    assert found["centered"] == pytest.approx((mean - 0.25) / 0.75, abs=1e-6)
    assert all(result[name] for name in ("prompts", "template", "model"))


def test_an_interrupted_task_goes_on_and_a_finished_one_is_kept(scored, monkeypatch, tmp_path):
    monkeypatch.chdir(scored)
    import duoka.parallel.task_score as module

    trained = find_trained("model", say=lambda text: None)
    asked = Asked(("sort", "mmlu:mmlu"), LIMIT, 4, max_new_tokens=12)
    counts = []
    plain = module.likeliest_answers

    def counted(lm, asked, *rest):
        counts.append(len(asked))
        if len(counts) == 3 and not tmp_path.joinpath("again").exists():
            raise KeyboardInterrupt
        return plain(lm, asked, *rest)

    monkeypatch.setattr(module, "likeliest_answers", counted)
    with pytest.raises(KeyboardInterrupt):
        score_tasks(trained, asked, tmp_path / "out", say=lambda text: None)
    (part,) = (tmp_path / "out").glob("*/part.jsonl")
    with part.open("a", encoding="utf-8") as file:
        file.write('{"7": {"ids": [1')  # what a kill leaves
    done = sum(counts[:2])
    tmp_path.joinpath("again").touch()
    counts.clear()
    score_tasks(trained, asked, tmp_path / "out", say=lambda text: None)
    assert sum(counts) == LIMIT - done, "rows that were done are not asked again"
    found = files_of(tmp_path / "out")
    assert found and all(files_of(scored / "w1b1")[name] == text for name, text in found.items())
    counts.clear()
    score_tasks(trained, asked, tmp_path / "out", say=lambda text: None)
    assert not counts


def test_a_terminal_shows_each_score_once_computed_or_kept(place, tmp_path, capsys):
    for _ in range(2):
        words = ["eval", str(place / "model"), "--tasks", "sort,reverse", "--limit", "2", "--out", str(tmp_path)]
        assert duoka(words) == 0
        shown = "".join(capsys.readouterr())  # both streams are one terminal
        lines = [line.split()[0] for line in shown.splitlines() if "(n 2" in line]
        assert lines == ["sort", "reverse"], shown


def test_items_that_do_not_fit_are_cut_and_counted(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    long = "x" * 3000
    write(tmp_path / "test.jsonl", {"question": long, "choices": ["a", "b"], "answer": 0},
          {"question": "y", "choices": ["a", "b"], "answer": 1})  # fmt: skip
    trained = find_trained("model", say=lambda text: None)
    (score,) = score_tasks(trained, Asked((f"mmlu:{tmp_path}",)), tmp_path / "out", say=lambda text: None)
    assert (score.n, score.num_cut) == (2, 1) and "1 cut to the model's window" in score.sentence()


def test_programs_run_only_when_asked(tmp_path):
    write(tmp_path / "HumanEval.jsonl", {"task_id": "0", "prompt": "", "canonical_solution": "", "test": "",
                                         "entry_point": "f"})  # fmt: skip
    with pytest.raises(ConfigError, match="runs programs that the model wrote"):
        find_asked(Asked((f"humaneval:{tmp_path}",)))
    assert find_asked(Asked((f"humaneval:{tmp_path}",), run_code=True))


YAML = """
model: {{name: "{place}/model"}}
data: {{train: ["{place}/talk.jsonl"], eval: 0.2, max_length: 256}}
optim: {{lr: 0.01}}
train: {{max_steps: 4, global_batch: 8, precision: fp32, eval_every: 2, eval_tasks: [sort, "mmlu:{place}/mmlu"],
  eval_items: 6}}
checkpoint: {{every: 2, keep: 1, keep_best: true, best_by: "mmlu:{place}/mmlu"}}
log: {{to: []}}
"""


def test_training_scores_tasks_under_any_layout_and_keeps_the_best_by_one(place):
    write_conversations(place / "talk.jsonl", 40)
    yaml = place / "run.yaml"
    yaml.write_text(YAML.format(place=place), encoding="utf-8")
    train_all([(yaml, [], place / "alone")], 1)
    layouts = ("ddp", "fsdp")
    train_all([(yaml, [f"parallel.strategy={name}"], place / name) for name in layouts], 2)
    events = {name: scores_of(place / name) for name in ("alone", *layouts)}
    assert [step for step, _ in events["alone"]] == [2, 4]
    assert events["alone"] == events["ddp"] == events["fsdp"]
    trained = find_trained(str(place / "alone"), say=lambda text: None)
    asked = Asked(("sort", f"mmlu:{place}/mmlu"), limit=6)
    again = [score.__dict__ for score in score_tasks(trained, asked, place / "again", say=lambda text: None)]
    assert again == events["alone"][-1][1], "duoka eval says the same of the result"
    (file,) = (place / "alone" / "checkpoints").glob("step-*4/state.json")
    state = json.loads(file.read_text(encoding="utf-8"))["progress"]
    best = max(events["alone"], key=lambda one: one[1][1]["score"])
    assert (state["best_step"], state["best_loss"]) == (best[0], 1.0 - best[1][1]["score"])


def scores_of(folder):
    lines = [json.loads(line) for path in (folder / "events").glob("*.jsonl") for line in path.open(encoding="utf-8")]
    return [(one["step"], one["scores"]) for one in lines if one.get("type") == "tasks"]
