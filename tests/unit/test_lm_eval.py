"""lm-evaluation-harness asks duoka's models: the items' numbers are those of `duoka eval --tasks`."""

import importlib.util
import json
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from families import load_plain, write_family
from tiny import build_tiny_tokenizer, write_tiny_model

from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError
from duoka.evals import lm_eval_model
from duoka.serve.load_run import find_trained
from duoka.serve.score_tasks import Asked, score_tasks
from duoka.tasks.find import find_tasks, in_order

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
QUESTIONS = [
    {"question": f"Which letter is number {number}?", "choices": list("abcd"), "answer": number % 4, "subject": "s"}
    for number in range(12)
]


class _Hook:
    def add_partial(self, method, arguments, result):
        return


@pytest.fixture
def harness(monkeypatch):
    """The package's base class, by its documented interface, where it is not installed."""
    if HAS_HARNESS:
        return
    stand_in = types.ModuleType("lm_eval.api.model")
    stand_in.LM = type("LM", (), {"rank": 0, "world_size": 1, "cache_hook": _Hook()})
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", stand_in)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    write_tiny_model(folder / "model", layers=2)
    (folder / "mmlu").mkdir()
    text = "".join(json.dumps(one) + "\n" for one in QUESTIONS)
    (folder / "mmlu" / "test.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def items(place):
    """What duoka eval says of every item, by task."""
    names = (f"mmlu:{place}/mmlu", "sort")
    trained = find_trained(str(place / "model"), say=lambda text: None)
    out = place / "evals"
    score_tasks(trained, Asked(names, limit=8, max_new_tokens=12), out, say=lambda text: None)
    found = {}
    for folder in out.iterdir():
        lines = (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()
        found[folder.name.split("-")[0]] = [json.loads(line) for line in lines]
    return found


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def chat_of(model, item):
    return model.apply_chat_template([{"role": role, "content": text} for role, text in item.question])


def test_choices_and_answers_are_those_of_duoka_eval(place, items, harness):
    model = lm_eval_model(str(place / "model"))
    (mmlu,), (sort,) = find_tasks(f"mmlu:{place}/mmlu"), find_tasks("sort")
    for item, line in zip(in_order(mmlu, 8), items["mmlu"], strict=True):
        scores = model.loglikelihood([asked(chat_of(model, item), option.text) for option in item.options])
        best = max(range(4), key=lambda place: scores[place][0])
        assert item.options[best].label == line["answer"] and float(best == item.right) == line["score"]
    chosen = in_order(sort, 8)
    said = model.generate_until([asked(chat_of(model, item), {"until": [], "max_gen_toks": 12}) for item in chosen])
    assert said == [line["answer"] for line in items["sort"]]
    short = model.generate_until([asked(chat_of(model, chosen[0]), {"until": [said[0][2:4]], "max_gen_toks": 12})])
    assert said[0][2:4] and short == [said[0][: said[0].index(said[0][2:4])]]


def test_log_probabilities_are_those_of_plain_transformers(place, harness):
    from transformers import AutoModelForCausalLM

    model, lm = lm_eval_model(str(place / "model")), AutoModelForCausalLM.from_pretrained(place / "model")
    pairs = [("One two three", " four"), ("One two ", "three"), ("", "alone"), ("x", " and a longer end of it")]
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (logp, is_greedy) in zip(pairs, found, strict=True):
        row = model.answers.pair(context, continuation)
        logits = lm(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        steps = range(row.start - 1, len(row.ids) - 1)
        want = sum(float(logits.detach()[at, row.ids[at + 1]]) for at in steps)
        assert math.isclose(logp, want, abs_tol=1e-4) and is_greedy == all(
            int(logits[at].argmax()) == row.ids[at + 1] for at in steps
        )
        assert model.answers.tokenizer.decode(list(row.ids)).endswith((context + continuation).lstrip())


def test_a_model_whose_head_is_not_read_by_ours_is_asked_for_its_own_logits(tmp_path, harness):
    """Llama 4: its decoder alone does not answer as others' do."""
    folder = write_family(tmp_path / "llama4", "llama4_text", tokenizer=build_tiny_tokenizer())
    model, plain = lm_eval_model(str(folder)), load_plain(folder)
    ((logp, _),) = model.loglikelihood([asked("One two three", " four")])
    row = model.answers.pair("One two three", " four")
    logits = plain(torch.tensor([row.ids])).logits[0].log_softmax(-1)
    want = sum(float(logits.detach()[at, row.ids[at + 1]]) for at in range(row.start - 1, len(row.ids) - 1))
    assert math.isclose(logp, want, abs_tol=1e-4)


def test_a_long_text_counts_every_token_once(place, harness):
    model = lm_eval_model(str(place / "model"))
    text = "a b c d e f g h " * 3
    ids = model.answers.tokenizer.encode(text)[0]
    whole = model.loglikelihood_rolling([asked(text)])[0]
    assert math.isclose(whole, model.loglikelihood([asked("", text)])[0][0], abs_tol=1e-4)
    seen = []
    model.answers.window, plain = 8, model.answers.score
    model.answers.score = lambda rows: seen.extend(rows) or plain(rows)
    model.loglikelihood_rolling([asked(text)])
    assert [token for row in seen for token in row.wanted] == ids and all(len(row.ids) <= 8 for row in seen)


def test_an_open_turn_stays_as_it_is_under_a_template_that_strips(place, harness, monkeypatch):
    plain = ChatTokenizer.render

    def strips(self, turns, *more):
        return plain(self, [{**one, "content": one["content"].strip()} for one in turns], *more)

    monkeypatch.setattr(ChatTokenizer, "render", strips)
    model = lm_eval_model(str(place / "model"))
    open_turn = "Here:\n```python\n"
    history = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": open_turn}]
    assert model.apply_chat_template(history, add_generation_prompt=False).endswith(open_turn)
    empty = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": " \n"}]
    assert model.apply_chat_template(empty, add_generation_prompt=False)


def test_what_it_cannot_do_is_refused(place, harness, monkeypatch):
    model = lm_eval_model(str(place / "model"))
    with pytest.raises(ConfigError, match="drawn answers"):
        model.generate_until([asked("x", {"do_sample": True, "temperature": 0.7})])
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        lm_eval_model(str(place / "model"))


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-evaluation-harness is not installed: pip install duoka[lm-eval]")
def test_the_real_harness_gives_duokas_numbers(place, items):
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    (mmlu,), (sort,) = find_tasks(f"mmlu:{place}/mmlu"), find_tasks("sort")
    for name, task in (("mmlu", mmlu), ("sort", sort)):
        rows = [
            {"ask": item.question[-1][1], "options": [one.text for one in item.options], "answer": item.answer,
             "right": item.right if item.options else 0} for item in in_order(task, 8)
        ]  # fmt: skip
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shared = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{ask}}", "target_delimiter": ""}
    files = {name: {"data_files": {"test": str(place / f"{name}.jsonl")}} for name in ("mmlu", "sort")}
    choice = {**shared, "task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{options}}",
              "doc_to_target": "right", "dataset_kwargs": files["mmlu"]}  # fmt: skip
    written = {**shared, "task": "written", "output_type": "generate_until", "doc_to_target": "{{answer}}",
               "dataset_kwargs": files["sort"],
               "generation_kwargs": {"until": [], "max_gen_toks": 12, "do_sample": False},
               "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    found = simple_evaluate(
        model=lm_eval_model(str(place / "model")), tasks=[ConfigurableTask(config=one) for one in (choice, written)],
        apply_chat_template=True, bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    by_task = {name: sorted(found["samples"][name], key=lambda one: one["doc_id"]) for name in ("choice", "written")}
    assert [one["acc"] for one in by_task["choice"]] == [line["score"] for line in items["mmlu"]]
    assert [one["resps"][0][0] for one in by_task["written"]] == [line["answer"] for line in items["sort"]]
