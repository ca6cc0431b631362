"""Tasks of reasoning-gym: drawn once, split by the questions themselves, checked by the package."""

import json
import sys
from types import SimpleNamespace

import pytest

from duoka.errors import ConfigError
from duoka.tasks import gym
from duoka.tasks.find import find_tasks, task_data


class Entries:
    """Sums of two numbers up to `most`, as the package's data sets have them."""

    def __init__(self, size, seed, most):
        self.size, self.seed, self.most = size, seed, most

    def __getitem__(self, place):
        one, other = place % self.most, (place * 7 + self.seed) % self.most
        return {"question": f"{one} + {other} =", "answer": str(one + other), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if int(answer) == int(entry["answer"]) else 0.01


CACHED = (gym.entries_of, gym.entry_of, gym.drawn_items)


@pytest.fixture
def package(monkeypatch, tmp_path):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    made = {"sums": 100_000, "few": 5, "composite": 1}
    known = SimpleNamespace(
        factory=SimpleNamespace(DATASETS=made),
        create_dataset=lambda name, size, seed: Entries(size, seed, made[name]),
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", known)
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def test_questions_are_for_training_or_for_testing_and_each_is_there_once(package, tmp_path):
    (task,) = find_tasks("task:gym:sums")
    train, test = task.items("train"), task.items("test")
    assert (len(train), len(test), task.name) == (2000, 200, "gym-sums")
    questions = [one.question for one in (*train, *test)]
    assert len(set(questions)) == 2200
    (few,) = find_tasks("gym:few")
    assert 0 < len(few.items("train")) + len(few.items("test")) <= 35, "a package that repeats itself ends"
    lines = task_data("task:gym:sums", tmp_path, "train").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])["messages"]
    assert [turn["role"] for turn in first] == ["user", "assistant"] and first[1]["content"] == train[0].answer


def test_questions_are_drawn_once_for_all_processes_and_slow_ones_with_a_word(package, monkeypatch, capsys):
    monkeypatch.setattr(gym, "SLOW_S", -1.0)
    first = gym.drawn_items("sums")
    assert "gym:sums: 2200 questions are being drawn" in capsys.readouterr().err
    for cached in CACHED:  # as another process would find it
        cached.cache_clear()
    asked = []
    plain = Entries.__getitem__
    monkeypatch.setattr(Entries, "__getitem__", lambda self, place: asked.append(place) or plain(self, place))
    assert gym.drawn_items("sums") == first and not capsys.readouterr().err
    (task,) = find_tasks("gym:sums")
    assert task.check(first["train"][7], first["train"][7].answer) == 1.0
    assert asked == [first["train"][7].facts["place"]], "no question is drawn again but the one that is checked"


def test_a_damaged_file_of_questions_is_drawn_again(package, tmp_path):
    first = gym.drawn_items("sums")
    (file,) = (tmp_path / "gym").glob("*.json")
    file.write_text(file.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    gym.drawn_items.cache_clear()
    assert gym.drawn_items("sums") == first


def test_answers_are_checked_by_the_package_and_nonsense_is_worth_nothing(package):
    (task,) = find_tasks("gym:sums")
    item = task.items("test")[3]
    assert task.check(item, f" {item.answer}\n") == 1.0
    assert task.check(item, f"Let me see <answer>1</answer> no, <answer>{item.answer}</answer>") == 1.0
    assert task.check(item, str(int(item.answer) + 1)) == 0.01
    assert task.check(item, "no number") == 0.0


def test_what_is_not_there_is_said(package, monkeypatch):
    with pytest.raises(ConfigError, match="no data set named 'sumz'") as told:
        find_tasks("gym:sumz")
    assert "did you mean gym:sums" in told.value.fix and "it has 2" in told.value.fix
    with pytest.raises(ConfigError, match="no data set named 'composite'"):
        find_tasks("gym:composite")
    with pytest.raises(ConfigError, match="there is no task named 'gym'") as told:
        find_tasks("gym")
    assert "gym:NAME" in told.value.fix
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="needs the package reasoning-gym") as told:
        find_tasks("gym:sums")
    assert "pip install 'duoka[gym]'" in told.value.fix


def test_the_package_itself_agrees_where_it_is_installed():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install 'duoka[gym]'")
    for name in ("chain_sum", "spell_backward", "maze"):
        (task,) = find_tasks(f"gym:{name}")
        some = [item for item in task.items("test")[:20] if item.answer]
        assert some and all(task.check(item, item.answer) == 1.0 for item in some), name
        assert all(task.check(item, "no idea") < 0.5 for item in some), name
