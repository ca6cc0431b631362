"""Rewards: computed in processes that may hang, crash or print what they like, and never a silent zero."""

import os
import time

import pytest

from duoka.config.rl import ALGORITHMS
from duoka.tasks.rewards import RewardPool
from duoka.train.rl.advantages import advantages, has_signal

FUNCTIONS = r"""
import os, subprocess, sys, time
def length(messages, completion, example):
    print("functions may print")
    return len(completion) + len(messages) + len(example["answer"])
def none(messages, completion, example):
    return None
def broken(messages, completion, example):
    return {}["nothing"]
def endless(messages, completion, example):
    if completion == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "of-a-reward"])
        time.sleep(600)
    if completion == "die":
        os._exit(3)
    return float("nan") if completion == "nan" else 1
def forking(messages, completion, example):
    os.fork()  # and nobody ends the child: it would answer too
    return len(completion)
def words(messages, completion, example):
    raise ValueError(b"caf\xe9".decode("utf-8", "surrogateescape") + "\n" + "x" * 9000)
def column(messages, completion, example):
    return len(example["when"])
def large(messages, completion, example):
    return -1e200 if completion == "small" else 10 ** 400 if completion == "no float" else 1e200
def text(messages, completion, example):
    return "1"
def slow(messages, completion, example):
    time.sleep(0.3)
    return int(completion)
"""


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS, encoding="utf-8")
    pools = []

    def make(*names, deadline_s=1.0, num_workers=1):
        pools.append(RewardPool(names, tmp_path, deadline_s=deadline_s, num_workers=num_workers))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def question(completion, **more):
    facts = {"source": "task:sort", "id": "sort/train-0", "messages": [["user", "Sort"]], "answer": "1 2", "facts": {}}
    return {**facts, "completion": completion, "is_cut": False, **more}


def test_functions_and_checks_of_tasks_are_summed_by_their_weights(pool):
    one, two = pool("task", "mine.py:length", deadline_s=30.0).score([question("1 2"), question("2 1 ")])
    assert one.values == (1.0, 7.0) and two.values == (0.0, 8.0) and not one.faults
    assert one.total((1.0, 0.5)) == 4.5 and two.total((0.0, 1.0)) == 8.0


def test_the_records_own_answer_counts_before_a_last_turn(pool):
    own, turn = pool("mine.py:length").score([question("", facts={"answer": "four"}, answer=""), question("")])
    assert (own.values, turn.values) == ((5.0,), (4.0,))


def test_a_file_is_a_module_as_others_are_and_loaded_once(pool, tmp_path):
    (tmp_path / "typed.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        f"open({str(tmp_path / 'loaded')!r}, 'a').write('x')\n@dataclass\nclass Case:\n    gain: float\n"
        "def one(messages, completion, example):\n    return Case(1.0).gain\n"
        "def two(messages, completion, example):\n    return Case(2.0).gain\n".replace(
            "'loaded'", repr(str(tmp_path / "loaded"))
        )
    )
    (found,) = pool("typed.py:one", "typed.py:two").score([question("")])
    assert found.values == (1.0, 2.0) and (tmp_path / "loaded").read_text() == "x"


def test_no_failure_is_a_zero_and_each_is_told(pool):
    found = pool("mine.py:endless", num_workers=2).score([question(word) for word in ("hang", "fine", "die", "nan")])
    assert [one.total((1.0,)) for one in found] == [None, 1.0, None, None]
    assert "no answer within 1 s" in found[0].faults[0] and "ended (3)" in found[2].faults[0]
    assert "nan" in found[3].faults[0] and not found[1].faults


def test_what_a_hanging_function_started_is_gone_with_it(pool):
    import psutil

    pool("mine.py:endless").score([question("hang"), question("fine")])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        mine = [p for p in psutil.process_iter(["cmdline"]) if "of-a-reward" in (p.info["cmdline"] or ())]
        if not mine:
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {mine}")


def test_an_exception_and_no_opinion_differ(pool):
    broken, none, missing, other = (
        pool(name).score([question("x")])[0] for name in ("mine.py:broken", "mine.py:none", "mine.py:no", "not.py:x")
    )
    assert broken.total((1,)) is None and "KeyError" in broken.faults[0]
    assert none.total((1,)) is None and not none.faults
    assert "no function 'no'" in missing.faults[0] and "no file 'not.py'" in other.faults[0]


def is_alive(pid):
    """One that nobody has waited for yet is dead all the same."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nobody_is_left_when_the_asking_process_dies(tmp_path):
    import subprocess
    import sys

    (tmp_path / "mine.py").write_text(FUNCTIONS, encoding="utf-8")
    code = (
        "import os, sys\nfrom duoka.tasks.rewards import RewardPool\n"
        f"pool = RewardPool(['mine.py:length'], {str(tmp_path)!r}, deadline_s=30)\n"
        f"pool.score([{question('x')!r}])\n"
        "import psutil\nprint(psutil.Process().children()[0].pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid) and done.returncode == -9 and os.getpid() != pid


def test_what_cannot_be_loaded_says_so_before_anything_is_asked(pool, tmp_path):
    (tmp_path / "imports.py").write_text("import nothing_like_this\ndef good(m, c, e): return 1\n", encoding="utf-8")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(4)\n", encoding="utf-8")
    (told,) = pool("mine.py:length", "imports.py:good", "task").faults()
    assert told.startswith("imports.py:good: ModuleNotFoundError: No module named 'nothing_like_this'")
    assert pool("leaves.py:good").faults() == ["leaves.py:good: the process ended"]
    fine = pool("mine.py:length")
    for _ in range(2):
        assert fine.faults() == [] and fine.score([question("x")])[0].values == (5.0,)
    asked = pool("mine.py:length")
    asked.score([question("x")])
    began = time.monotonic()
    assert asked.faults() == [] and time.monotonic() - began < 20


SHAPES = """
def two(messages, completion): return 1
def named(messages, completion, example, *, judge): return 1
def four(messages, completion, example, more): return 1
def fine(messages, completion, example, more=1, **rest): return 1
def any(*given): return 1
later = fine
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.py:x", "there is no file 'nothing.py'"), ("shapes.py:x", "has no function 'x'"),
        ("shapes.py:two", "two takes (messages, completion)"), ("shapes.py:named", "judge"),
        ("shapes.py:four", "more), and rewards are called with three"), ("wrong.py:f", "wrong.py is no Python: "),
        ("shapes.py:fine", ""), ("shapes.py:any", ""), ("shapes.py:later", ""),
    ],
)  # fmt: skip
def test_functions_are_looked_up_before_anything_starts(tmp_path, name, said):
    from duoka.config.schema import RunConfig
    from duoka.tasks.check import check_tasks

    (tmp_path / "shapes.py").write_text(SHAPES, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(m, c, e)\n    return 1\n", encoding="utf-8")
    settings = {"model": "demo", "stage": "rl", "data": {"train": ["task:sort"]}, "rl": {"rewards": [name]}}
    faults = check_tasks(RunConfig.model_validate(settings), tmp_path)
    assert len(faults) == bool(said) and all(said in fault.what for fault in faults)
    if name == "wrong.py:f":
        assert faults[0].line == 2 and faults[0].source == "def f(m, c, e)"
    assert all(fault.fix or fault.line for fault in faults)


def test_only_so_many_are_computed_as_there_is_time_for(pool):
    found = pool("mine.py:slow", num_workers=2).score([question(str(n)) for n in range(9)], for_s=0.5)
    assert 2 <= len(found) < 9 and [one.values for one in found] == [(float(n),) for n in range(len(found))]


def test_a_path_with_a_tilde_is_found(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pool("~/mine.py:length").score([question("xy")])[0].values == (6.0,)


def test_a_function_that_forks_answers_each_question_once(pool):
    found = pool("mine.py:forking").score([question("x" * size) for size in range(6)])
    assert [one.values for one in found] == [(float(size),) for size in range(6)]


def test_what_a_function_says_can_be_written_to_a_file(pool):
    (one,) = pool("mine.py:words").score([question("x")])
    assert one.values == (None,) and "caf" in one.faults[0] and len(one.faults[0]) < 600
    assert "\n" not in one.faults[0] and one.faults[0].encode("utf-8")


def test_columns_that_json_does_not_know_reach_functions_as_words(pool):
    import datetime

    when = {"when": datetime.datetime(2024, 5, 6)}
    (one,) = pool("mine.py:column").score([question("x", facts=when)])
    assert one.values == (19.0,) and not one.faults


def test_rewards_beyond_what_numbers_bear_are_failures_and_others_give_finite_advantages(pool):
    found = pool("mine.py:large").score([question(word) for word in ("small", "large", "no float")])
    assert [one.values for one in found] == [(None,)] * 3
    assert all("mine.py:large" in one.faults[0] for one in found) and "1e+200" in found[1].faults[0]
    assert pool("mine.py:text").score([question("x")])[0].faults, "words are no number"
    for kind in ("center", "group_std", "leave_one_out", "batch_std"):
        (values,) = advantages([[1e30, -1e30, 3.0, None]], kind)
        assert all(value is None or abs(value) < 1e31 for value in values) and values[0] > 0 > values[1]


def test_an_answer_without_a_reward_leaves_its_group():
    groups = [[1.0, 0.0, None, 1.0], [0.5, None, None, None], [0.3, 0.3, 0.3, None]]
    centered = advantages(groups, "center")
    assert centered[0] == [pytest.approx(1 / 3), pytest.approx(-2 / 3), None, pytest.approx(1 / 3)]
    assert centered[1] == [0.0, None, None, None] and centered[2] == [0.0, 0.0, 0.0, None]
    assert [has_signal(group) for group in groups] == [True, False, False]
    assert advantages(groups, "leave_one_out")[0] == [pytest.approx(0.5), pytest.approx(-1.0), None, pytest.approx(0.5)]
    assert advantages(groups, "group_std")[2] == [0.0, 0.0, 0.0, None]


def test_every_algorithm_is_a_row_and_a_key_beside_it_wins():
    from duoka.config.rl import RlConfig

    for name, row in ALGORITHMS.items():
        assert RlConfig(algorithm=name).row == row
        assert name in RlConfig(algorithm=name).sentence()
    changed = RlConfig(algorithm="dapo", advantage="center", normalize="length", clip=(0.1, 0.5), drop_equal=False).row
    assert (changed.advantage, changed.normalize, changed.clip) == ("center", "length", (0.1, 0.5))
    assert not changed.drop_equal
