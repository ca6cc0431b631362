"""Tasks: what they ask, what counts as right, and that no test item is ever learned."""

import gzip
import json
import time
from pathlib import Path

import pytest

from duoka.config.load import load_config
from duoka.data.read.registry import check_data, find_sets
from duoka.errors import ConfigError, DataError, Faults
from duoka.serve.score_tasks import Asked, find_asked
from duoka.tasks.check import check_tasks
from duoka.tasks.drawn import Arithmetic, Reverse, Sort, Spaced, Spelling
from duoka.tasks.find import find_tasks, in_order, task_data
from duoka.tasks.run_code import passes

DRAWN = [Spelling, Arithmetic, Reverse, Sort]
GSM8K = {"question": "6 eggs, 2 broken?", "answer": "6-2=<<6-2=4>>4 left.\n#### 4"}
MMLU = {"question": "Which?", "subject": "logic", "choices": ["a", "b", "c", "d"], "answer": 2}
STEM = {"stem": "Hot?", "choices": [{"text": "ice", "label": "1"}, {"text": "sun", "label": "2"}]}
ARC = {"id": "q1", "question": STEM, "answerKey": "2"}
HUMAN = {"task_id": "H/0", "prompt": "import math\n\ndef two():\n    '''2'''\n", "canonical_solution": "    return 2\n",
         "test": "def check(f):\n    assert f() == 2\n", "entry_point": "two"}  # fmt: skip


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def right_answer(question):
    """Worked out by another way than the tasks do."""
    kind, rest = question.split(": ") if ": " in question else ("sum", question[8:-1])
    if kind == "sum":
        return str(eval(rest))
    if kind.startswith("Sort"):
        return " ".join(sorted(rest.split(), key=int))
    return "-".join(rest) if kind.startswith("Spell") else "".join(reversed(rest))


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_tasks_are_right_distinct_and_never_test_what_is_learned(kind):
    task = kind()
    train, test = task.items("train"), task.items("test")
    assert all(item.answer == right_answer(item.question[0][1]) for item in (*train, *test))
    questions = [item.question for item in (*train, *test)]
    assert len(set(questions)) == len(questions) == 5500
    assert [item.id for item in kind().items("test")] == [item.id for item in test]
    assert all(task.check(item, f" {item.answer}\n") == 1.0 for item in test[:50])
    assert not any(task.check(item, item.answer + "0") for item in test[:50])


def test_stories_are_text_to_read_and_no_score(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    (task,) = find_tasks("stories")
    train, test = task.texts("train"), task.texts("test")
    assert len({*train, *test}) == len(train) + len(test) == 4100
    assert all("." in text and 200 < len(text) < 800 for text in train[:100])
    lines = task_data("task:stories", tmp_path, "test").read_text("utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == list(test)
    with pytest.raises(ConfigError, match="is text to read"):
        find_asked(Asked(("stories",)))
    (tmp_path / "a.yaml").write_text(
        "model: {depth: 2, tokenizer: demo}\ndata: {train: ['task:stories'], eval: ['task:stories']}\n"
    )
    loaded = load_config(tmp_path / "a.yaml", checks=(check_data, check_tasks))
    assert [found.form.kind for found in find_sets(loaded.config, loaded.base)] == ["text", "text"]
    with pytest.raises(Faults, match="is text to read"):
        load_config(tmp_path / "a.yaml", ["train.eval_tasks=[stories]"], checks=(check_data, check_tasks))


def test_spaced_answers_in_another_form_what_spelling_asks():
    spaced = Spaced()
    items = (*spaced.items("train")[:200], *spaced.items("test"))
    assert all(item.answer == " ".join(item.question[0][1].removeprefix("Spell the word: ")) for item in items)
    learned = {item.question for item in spaced.items("train")}
    assert not learned & {item.question for item in Spelling().items("test")}, "no word that spelling tests is learned"


def test_they_are_the_same_for_ever():
    firsts = [kind().items("test")[0] for kind in DRAWN]
    assert [(item.question[0][1], item.answer) for item in firsts] == FIRSTS


FIRSTS = [
    ("Spell the word: ceji", "c-e-j-i"),
    ("What is 80 - 58?", "22"),
    ("Reverse the letters: jvujbpma", "ampbjuvj"),
    ("Sort the numbers: 4 25 77 78", "4 25 77 78"),
]


def test_gsm8k_counts_the_last_marked_number(tmp_path):
    write(tmp_path / "train.jsonl", GSM8K, GSM8K)
    write(tmp_path / "test.jsonl", {**GSM8K, "answer": "So\n#### 1,234"}, GSM8K)
    (task,) = find_tasks(f"gsm8k:{tmp_path}")
    first, second = task.items("test")
    assert len(task.items("train")) == 2 and "<<" not in second.answer
    assert task.check(first, "#### 3 no: #### 1234.0") == task.check(first, "that is 1,234.") == 1.0
    assert task.check(first, "#### 1234 no: #### 3") == task.check(first, "") == 0.0


def test_choices_are_read_in_each_published_form(tmp_path):
    write(tmp_path / "m" / "test-00000.jsonl", MMLU)
    (tmp_path / "csv" / "test").mkdir(parents=True)
    (tmp_path / "csv" / "test" / "logic_test.csv").write_text('"Which, of these?",a,b,c,d,C\n', encoding="utf-8")
    for place in ("m", "csv"):
        (item,) = find_tasks(f"mmlu:{tmp_path / place}")[0].items("test")
        assert (item.answer, item.right, len(item.options)) == ("C", 2, 4) and "- c=C\n" in item.question[0][1]
    flat = {"id": "q2", "question": "Hot?", "choices": {"text": ["ice", "sun"], "label": ["A", "B"]}, "answerKey": "B"}
    write(tmp_path / "ARC-Easy-Test.jsonl", ARC, flat)
    (task,) = find_tasks(f"arc:{tmp_path / 'ARC-Easy-Test.jsonl'}")
    assert [item.answer for item in task.items("test")] == ["2", "B"] and not task.items("train")
    assert task.example(task.items("test")[0])[-1] == {"role": "assistant", "content": "2"}


def test_programs_are_run_and_killed_at_the_deadline(tmp_path):
    write(tmp_path / "HumanEval.jsonl", HUMAN)
    (task,) = find_tasks(f"humaneval:{tmp_path}")
    (item,) = task.items("test")
    assert task.runs_code and task.check(item, item.answer) == 1.0
    assert task.check(item, "```python\ndef two():\n    return int(math.sqrt(4))\n```") == 1.0
    assert task.check(item, "    return 3\n") == task.check(item, "import os; os._exit(0)") == 0.0
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    started = time.monotonic()
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass\n"
    assert not passes(program, deadline_s=1.0)
    time.sleep(max(0.0, 2.5 - (time.monotonic() - started)))
    assert not mark.exists(), "what the program started outlived it"
    assert not passes("x = bytearray(4 << 30)")


def test_core_asks_and_shows_as_its_bundle_says(tmp_path):
    (tmp_path / "core.yaml").write_text(
        "icl_tasks:\n"
        "- {label: mc, dataset_uri: a/mc.jsonl, num_fewshot: [2], icl_task_type: multiple_choice,"
        " continuation_delimiter: '\\nAnswer: '}\n"
        "- {label: sc, dataset_uri: sc.jsonl, num_fewshot: [0], icl_task_type: schema}\n"
        "- {label: lm, dataset_uri: lm.jsonl, num_fewshot: [1], icl_task_type: language_modeling}\n",
        encoding="utf-8",
    )
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nmc,25\nsc,50\nlm,0\n", encoding="utf-8")
    write(
        tmp_path / "eval_data/a/mc.jsonl", *({"query": f"q{n}", "choices": ["x", "y"], "gold": n % 2} for n in range(4))
    )
    write(tmp_path / "eval_data/sc.jsonl", {"context_options": ["He", "She"], "continuation": "ran", "gold": 1})
    write(tmp_path / "eval_data/lm.jsonl", *({"context": f"c{n} ", "continuation": f"d{n}"} for n in range(2)))
    mc, sc, lm = find_tasks(f"core:{tmp_path}")
    assert [(task.name, task.chance, task.measure) for task in (mc, sc, lm)] == [
        ("core/mc", 0.25, "mean"), ("core/sc", 0.5, "mean"), ("core/lm", 0.0, "greedy")
    ]  # fmt: skip
    for item in mc.items("test"):
        before = item.options[0].before
        own = before.split("\n\n")[-1][: -len("\nAnswer: ")]
        assert before.count("Answer: ") == 3 and before.count(own) == 1, "an item is never shown its own answer"
        assert item.answer == str(int(own[1]) % 2) and [option.text for option in item.options] == ["x", "y"]
    (item,) = sc.items("test")
    assert [option.before + option.text for option in item.options] == ["He ran", "She ran"] and item.right == 1
    for item in lm.items("test"):
        (option,) = item.options
        assert option.text.startswith(" d") and option.before.endswith(f"c{option.text[2:]}")
    with pytest.raises(DataError, match="no train items that are conversations"):
        task_data(f"core:{tmp_path}", Path(), "train")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmetics", "did you mean 'arithmetic'"),
        ("gsm8k", "no path is named"),
        ("gsm8k:nowhere", "no file or folder 'nowhere'"),
        ("sort:x", "takes no path"),
        ("core:.", "no CORE bundle"),
    ],
)
def test_what_is_no_task_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_tasks(name)
    assert words in str(caught.value)


def test_a_task_is_a_data_set_whose_evaluation_is_its_test_items(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model: demo\ndata: {train: [{name: 'task:sort', max_samples: 100}], eval: ['task:sort']}\n"
    Path("run.yaml").write_text(text, encoding="utf-8")
    loaded = load_config("run.yaml", checks=[check_data])
    train, test = find_sets(loaded.config, loaded.base)
    learned = set(train.files[0].read_text(encoding="utf-8").splitlines())
    tested = test.files[0].read_text(encoding="utf-8").splitlines()
    assert len(tested) == 500 and not learned & set(tested) and train.max_samples == 100
    Path("run.yaml").write_text(text.replace("task:sort", "task:sor"), encoding="utf-8")
    with pytest.raises(Faults, match="no task named 'sor'"):
        load_config("run.yaml", checks=[check_data])


def test_a_limit_takes_items_from_all_over_the_file(tmp_path):
    write(tmp_path / "test.jsonl", *({**MMLU, "subject": f"s{n // 50}"} for n in range(200)))
    (task,) = find_tasks(f"mmlu:{tmp_path}")
    some = in_order(task, 40)
    assert [item.id for item in some] == [item.id for item in in_order(task, None)[:40]]
    assert len({item.id.split("-")[0] for item in some}) == 4


def test_files_of_spreadsheets_and_windows_are_read_and_cut_ones_named(tmp_path):
    """A mark of UTF-8 at the beginning, blank lines at the end."""
    rows = "Which?,a,b,c,d,C\r\nWhy?,a,b,c,d,A\r\n\r\n"
    (tmp_path / "test.csv").write_text(rows, encoding="utf-8-sig", newline="")
    (task,) = find_tasks(f"mmlu:{tmp_path}")
    first, second = task.items("test")
    assert first.question[0][1].startswith("Multiple Choice question: Which?\n") and second.answer == "A"
    (tmp_path / "gsm").mkdir()
    file = tmp_path / "gsm" / "test.jsonl"
    file.write_text(json.dumps(GSM8K) + "\r\n", encoding="utf-8-sig", newline="")
    (task,) = find_tasks(f"gsm8k:{file}")
    assert task.items("test")[0].facts["value"] == "4"
    packed = tmp_path / "gsm" / "test.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(GSM8K).encode())[:-12])
    (task,) = find_tasks(f"gsm8k:{packed}")
    with pytest.raises(DataError, match="cannot be unpacked"):
        task.items("test")
