"""The closing report from event logs as they really come: whole, cut, empty, resumed, full of nulls, very long."""

import html.parser
import json
import math
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from duoka.errors import typed
from duoka.runs.events import EventWriter, global_log, rank_log
from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.status import Status, leader_identity, write_status
from duoka.watch.history import read_history
from duoka.watch.next_steps import next_commands
from duoka.watch.report import end_lines, summary_to_json, write_report

GIB = 2**30


class LogMaker:
    """Writes a run's log the way training does."""

    def __init__(self, folder):
        self.run = RunFolder(folder)
        self.run.make()
        self.events = EventWriter(global_log(self.run))

    def step(self, step, loss, **changes):
        times = {"data_s": 0.1, "forward_s": 0.3, "backward_s": 0.4, "wait_s": 0.1, "optimizer_s": 0.05}
        numbers = {
            "epoch": step / 10, "loss": loss, "grad_norm": 1.5, "lr": 1e-4, "num_targets": 50, "num_tokens": 100,
            "num_samples": 4, "tokens_per_s": 100.0, "step_s": 1.0, "checkpoint_s": 0.0, "memory_bytes": GIB,
        }  # fmt: skip
        self.events.write("step", step=step, **{**numbers, **times, **changes})

    def plan(self, device="cpu"):
        memory = {"peak_bytes": 2 * GIB, "low_bytes": GIB, "high_bytes": 3 * GIB, "parts": {"framework": GIB // 2}}
        model = {"type": "llama", "num_parameters": 1000, "num_trainable": 10}
        write_json_atomic(self.run.plan, {"memory": memory, "machine": {"device": device}, "model": model})


@pytest.fixture
def log(tmp_path):
    return LogMaker(tmp_path / "a-run")


class Checked(html.parser.HTMLParser):
    """Collects what a page would fetch or run, and its text; refuses tags that do not close in order."""

    VOID = ("meta", "br", "rect", "line", "circle", "path", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.outside, self.open, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "link", "iframe", "object") or any(
            value and name in ("src", "href", "data") for name, value in attrs
        ):
            self.outside.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.words.append(data)


def read_page(run):
    path = write_report(run)
    assert path == run.path / "report.html"
    text = path.read_text(encoding="utf-8")
    picture = (run.path / "loss.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(picture).tag.endswith("svg"), "loss.svg must be a picture of its own"
    assert "nan" not in picture.lower().replace("nanum", ""), "no number may be NaN"
    page = Checked(text)
    assert not page.outside, f"the page must hold everything itself, found {page.outside}"
    assert "url(" not in text and "@import" not in text
    return " ".join(page.words)


def lines_of(run, encoding="utf-8"):
    lines = end_lines(run, encoding=encoding)
    wide = [line for line in lines if len(line) > 80 and str(run.path) not in line]
    assert not wide, wide
    return "\n".join(lines)


def test_the_end_report_names_losses_speed_time_memory_and_the_next_commands(log):
    for step in range(1, 21):
        log.step(step, 4.0 / step)
    log.events.write("eval", step=20, loss=0.25, perplexity=1.28, accuracy=0.9, num_samples=99, num_targets=500)
    log.events.write("checkpoint", step=20, path="checkpoints/step-00000020", size_bytes=3 * 2**20, blocked_s=5.0)
    log.plan()
    log.run.final.mkdir()
    write_status(log.run, Status(state="done", step=20))
    write_report(log.run)
    text = lines_of(log.run)
    for words in (
        "done", "4.0000 at step 1 → 0.2000 at step 20", "100 tokens/s over 2k tokens", "loss 0.2500",
        "token accuracy 90.0%, 99 samples", "forward 24%", "wait 8%", "checkpoint 20%", "1 GiB measured",
        "2 GiB predicted", f"duoka chat {log.run.path}", f"duoka eval {log.run.path}",
        f"duoka export {log.run.path} -o ", "report.html",
    ):  # fmt: skip
        assert words in text, f"{words!r} is missing in\n{text}"


def test_a_run_that_draws_answers_shows_its_reward(log):
    for step in range(1, 6):
        log.step(step, 0.0, reward=step / 10, answer_tokens=60.0 - step, rollouts_s=0.5, data_s=0.0)
    log.plan("cpu")
    text = lines_of(log.run)
    assert "reward      0.1 → 0.5" in text and "rollouts " in text, text
    write_report(log.run)
    page = (log.run.path / "report.html").read_text(encoding="utf-8")
    assert "Mean reward of a step's answers" in html.unescape(page) and "Tokens of an answer" in page


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ((0.1, 0.1), "90% of 2 ranks' time was their own work; `duoka bench run` measures it"),
        (
            (0.0, 0.4),
            "80% of 2 ranks' time was their own work; rank 0 is the slowest: it waits 0 s a step, the others 0.4",
        ),
        ((0.3, 0.3), "70% of 2 ranks' time was their own work; all wait alike: the exchange takes the rest"),
    ],
)
def test_the_end_report_says_how_much_of_the_ranks_time_was_work_and_why_not_more(log, waits, words):
    for rank, wait_s in enumerate(waits):
        events = EventWriter(rank_log(log.run, rank))
        for step in range(1, 5):
            log.step(step, 1.0) if not rank else None
            events.write("rank", rank=rank, step=step, step_s=1.0, wait_s=wait_s, forward_s=1 - wait_s)
    log.plan("cuda")
    assert "efficiency" not in lines_of(log.run), "a GPU's passes hold their waiting"
    log.plan("cpu")
    assert words in " ".join(lines_of(log.run).split())


@pytest.mark.parametrize(
    ("config", "first", "measured"),
    [
        ("stage: {name: reward}\ndata: {train: [a], eval: 0.1}\n", "score RUN DATA", None),
        ("stage: {name: sft}\ndata: {train: [a], eval: 0.1}\n", "chat RUN", "eval RUN"),
        ("stage: {name: sft}\ndata: {train: [a], eval: 0.0}\n", "chat RUN", "eval RUN --data NAME"),
        ("stage: {name: dpo}\ndata: {train: [a], eval: 0.1}\n", "chat RUN", "eval RUN --data NAME"),
        ("stage: {name: rl}\ndata: {train: ['task:sort', {name: 'task:gsm8k:x'}]}\n", "chat RUN",
         "eval RUN --tasks sort,gsm8k:x"),
        ("stage: {name: rl}\ndata: {train: [chat.jsonl]}\n", "chat RUN", "eval RUN --data NAME"),
    ],
)  # fmt: skip
def test_the_next_commands_take_what_the_run_made(log, config, first, measured):
    """Each of the others is refused: a reward model says no words, pairs have no likelihood of tokens."""
    log.step(1, 1.0)
    log.run.final.mkdir()
    log.run.config.write_text(config, encoding="utf-8")
    write_status(log.run, Status(state="done", step=1))
    _, _, said = lines_of(log.run).partition("next\n")
    commands = [line.strip().replace(str(log.run.path), "RUN") for line in said.splitlines()]
    assert commands[0] == f"duoka {first}" and (commands[1:2] == ([f"duoka {measured}"] if measured else []))


def test_commands_can_be_typed_as_they_are_shown(tmp_path):
    run = RunFolder(tmp_path / "my runs" / "多卡 it's")
    run.make()
    cut = [shlex.split(command) for command in next_commands(run)]
    assert [words[:3] for words in cut] == [["duoka", verb, str(run.path)] for verb in ("chat", "eval", "export")]
    assert cut[-1][3:] == ["-o", f"{run.path}-model"]
    assert typed("runs/多卡-2") == "runs/多卡-2", "quotes stand only where they are needed"


def test_the_page_shows_the_same_and_escapes_what_others_wrote(log):
    for step in range(1, 31):
        log.step(step, 3.0 - step / 20)
    log.events.write("eval", step=30, loss=1.25, perplexity=3.49, accuracy=0.5, num_samples=7, num_targets=70)
    log.events.write("warning", step=3, text="<script>alert(1)</script> & more")
    log.events.write("checkpoint", step=30, path="x/step-00000030", size_bytes=2**20, blocked_s=0.5)
    for rank in range(2):
        EventWriter(rank_log(log.run, rank)).write(
            "rank", rank=rank, step=30, step_s=1.0, memory_bytes=(rank + 1) * GIB
        )
    log.plan()
    log.run.config.write_text("model: demo  # <b>\n", encoding="utf-8")
    write_json_atomic(log.run.env, {"duoka": "0.1.0", "host": "node7", "packages": {"torch": "2.11.0", "numpy": "2"}})
    text = read_page(log.run)
    for words in (
        "1.2500",
        "50.0%",
        "<script>alert(1)</script> & more",
        "step-00000030",
        "rank 1",
        "2 GiB",
        "model: demo",
        "duoka 0.1.0, torch 2.11.0",
        "node7",
    ):
        assert words in text, words


def test_a_run_without_a_step_has_a_report_too(log):
    assert "no step was recorded" in lines_of(log.run)
    assert "nothing measured yet" in read_page(log.run)


def test_one_step_is_enough(log):
    log.step(1, 2.5)
    assert "2.5000 at step 1" in lines_of(log.run)
    assert "2.5000" in read_page(log.run)


def test_nulls_and_odd_values_leave_gaps_and_are_named(log):
    log.step(1, 2.0)
    log.step(2, math.nan)
    log.step(3, math.inf, grad_norm=None, step_s=None, num_tokens="many", memory_bytes=None)
    log.step(4, 1.0)
    log.events.write("eval", step=4, loss=math.nan, perplexity=None, accuracy=None, num_samples=None)
    log.events.write("step", step=None)
    log.events.write("checkpoint", step=4, path=None, size_bytes=None, blocked_s=None)
    text = lines_of(log.run)
    assert "loss or gradient of 2 steps not finite, first at step 2" in text
    assert "2.0000 at step 1 → 1.0000 at step 4" in text
    page = read_page(log.run)
    assert "first at step 2" in page and "not finite" in page


def test_only_nulls_do_not_break_it(log):
    log.step(1, None, grad_norm=None, lr=None, step_s=None)
    assert "nothing to draw yet" in lines_of(log.run)
    assert "nothing measured yet" in read_page(log.run)


def test_a_cut_last_line_and_rubbish_are_passed_over(log):
    for step in range(1, 6):
        log.step(step, 5.0 - step)
    with global_log(log.run).open("ab") as file:
        file.write(b'\xff\xfe rubbish\n[1,2]\n{"type": "step", "step": "six"}\n{"v": 1, "type": "step", "st')
    (log.run.events / "rank00000.jsonl").write_bytes(b'{"type": "rank"}\n{"type": "ra')
    log.run.plan.write_text("{", encoding="utf-8")
    assert "0.0000 at step 5" in lines_of(log.run)
    read_page(log.run)


def test_steps_that_a_crash_threw_away_count_once(log):
    for step in range(1, 8):
        log.step(step, 10.0)
    log.events.write("eval", step=7, loss=9.0)
    log.events.write("eval", step=4, loss=8.0)
    log.events.write("resume", step=4, total_steps=9)
    assert [step.step for step in read_history(log.run).steps] == [1, 2, 3, 4]
    for step in range(5, 10):
        log.step(step, 1.0)
    history = read_history(log.run)
    assert [step.step for step in history.steps] == list(range(1, 10))
    assert [step.loss for step in history.steps] == [10.0] * 4 + [1.0] * 5
    assert [event["loss"] for event in history.evals] == [8.0]
    assert history.resumes == [4] and history.total_s() == 9.0
    assert "resumed" in read_page(log.run)


def test_thirty_thousand_steps_stay_a_small_page(log):
    one = {"v": 1, "type": "step", "t": 0.0, "loss": 1.0, "num_tokens": 10, "step_s": 0.1, "lr": 1e-4, "grad_norm": 1.0}
    with global_log(log.run).open("ab") as file:
        for step in range(1, 30_001):
            file.write(json.dumps(one | {"step": step, "loss": 1 + (step % 7) / step}).encode() + b"\n")
    text = lines_of(log.run)
    assert "step 30,000" in text
    read_page(log.run)
    assert os.path.getsize(log.run.path / "report.html") < 300_000


def test_a_terminal_without_unicode_gets_plain_ascii(log):
    for step in range(1, 11):
        log.step(step, 5.0 / step)
    text = lines_of(log.run, encoding="ascii")
    assert text.encode("ascii") and "*" in text and "->" in text
    assert max(lines_of(log.run)) > "⠀", "and one with it gets braille"


def test_time_is_split_so_that_nothing_is_counted_twice(log):
    for step in range(1, 11):
        log.step(step, 1.0)
    split = read_history(log.run).time_split()
    assert split["other"] == pytest.approx(0.5)
    assert sum(split.values()) == pytest.approx(10.0)
    assert "checkpoint" not in split


def test_memory_of_a_gpu_is_compared_without_the_context_that_its_allocator_cannot_see(log):
    log.step(1, 1.0)
    log.plan(device="cuda")
    assert read_history(log.run).memory_predicted() == {"peak": 1.5 * GIB, "low": 0.5 * GIB, "high": 2.5 * GIB}
    log.plan(device="cpu")
    assert read_history(log.run).memory_predicted() == {"peak": 2 * GIB, "low": GIB, "high": 3 * GIB}


def test_a_run_that_did_not_finish_is_not_said_to_be_chatted_with(log):
    log.step(1, 1.0)
    write_status(log.run, Status(state="failed", step=1))
    text = lines_of(log.run)
    assert "failed" in text and "duoka chat" not in text and str(log.run.logs) in text


def test_the_report_needs_no_torch(log):
    log.step(1, 1.0)
    code = f"""
import sys
for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None
from pathlib import Path
from duoka.runs.folder import RunFolder
from duoka.watch.report import end_lines, summary_to_json, write_report
run = RunFolder(Path({str(log.run.path)!r}))
print(write_report(run).name, len(end_lines(run)) > 5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["report.html", "True"], done.stderr


def test_what_ranks_exchange_and_hold_is_said(log):
    from duoka.watch.report import summary_to_json

    log.step(1, 2.0, sent_bytes=3 * GIB)
    log.events.write("traffic", step=2, num_micro_batches=2, kinds={
        "all-gather": {"num_calls": 10, "buffer_bytes": 2 * GIB, "sent_bytes": GIB},
        "reduce-scatter": {"num_calls": 5, "buffer_bytes": 4 * GIB, "sent_bytes": 2 * GIB},
    })  # fmt: skip
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    ranks = [{f"{part}_bytes": GIB * (rank + 1) for part in parts} | {"host_bytes": 0} for rank in range(2)]
    log.events.write("memory", step=2, ranks=ranks, imbalance="rank 1 holds 33% more than the mean: " + "word " * 20)
    lines = end_lines(log.run)
    text = "\n".join(lines)
    assert "exchange    3 GiB sent per rank and step" in text and "10 all-gather 1 GiB, 5 reduce-scatter 2 GiB" in text
    assert "holds       weights 2 GiB, gradients 2 GiB" in text and "uneven      rank 1 holds 33% more" in text
    assert max(map(len, lines)) <= 80 or str(log.run.path) in text
    found = summary_to_json(log.run)
    assert found["sent_bytes_per_step"] == 3 * GIB and found["ranks"][1]["activations_bytes"] == 2 * GIB
    assert "sent per rank and step" in write_report(log.run).read_text(encoding="utf-8")


def test_the_commit_and_the_names_of_data_files_are_written_as_people_read_them(log):
    log.plan()
    log.step(1, 2.0)
    git = {"commit": "0123456789abcdef0123456789abcdef01234567", "changed": True}
    (log.run.path / "env.json").write_text(json.dumps({"git": git}))
    counts = {"num_kept": 5, "num_records": 6, "num_truncated": 0, "num_dropped_long": 1, "num_bad": 0}
    name = "corpus/shard_00001-of-00100-cleaned.parquet"
    (log.run.path / "data.json").write_text(json.dumps({"sets": [{"name": name, "counts": counts}]}))
    page = read_page(log.run)
    assert "0123456789ab, with changes of its own" in page and "'commit'" not in page
    said = lines_of(log.run)
    assert "shard_00001-of-00100-cleaned.parquet\n" in said and "5 samples of 6 records, 1 too long" in said


def test_an_empty_run_has_a_summary_too(log):
    from duoka.watch.report import summary_to_json

    found = summary_to_json(log.run)
    assert found["step"] == 0 and found["loss"] is None and found["ranks"] == []


CAUSE = "worker failed: rank 1 of 2 raised ValueError: 3 rows, not 4\n  1 other rank was stopped because of it"


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_that_failed_says_why_on_top(log, steps):
    for step in range(1, steps + 1):
        log.step(step, 4.0 / step)
    write_status(log.run, Status(state="failed", step=steps, exit_code=5, cause=CAUSE))
    first, empty, *cause = lines_of(log.run).splitlines()[:4]
    assert ": failed" in first and empty == ""
    assert cause == [f"  {line}" for line in CAUSE.splitlines()]
    assert summary_to_json(log.run)["cause"] == CAUSE
    assert ("the same command starts again" in lines_of(log.run)) and str(log.run.logs) in lines_of(log.run)
    write_status(log.run, Status(state="done", step=steps, cause=CAUSE))
    assert "worker failed" not in lines_of(log.run), "what was the matter before a good end is past"


def test_a_run_whose_process_is_gone_without_a_word_says_so(log):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    write_status(log.run, Status(state="running", world_size=2, **leader_identity(gone.pid)))
    gone.wait()
    said = lines_of(log.run)
    assert ": dead, no step was recorded" in said and f"(pid {gone.pid}) is gone and recorded no cause" in said
    write_status(log.run, Status(state="running", world_size=2, **leader_identity()))
    assert ": running" in lines_of(log.run) and "gone" not in lines_of(log.run)
