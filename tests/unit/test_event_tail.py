"""A log that grows is read piece by piece: any split gives what reading it at once gives, and nothing comes twice."""

import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_runs import step_line, write_run

from duoka.runs.events import EventTail, EventWriter, global_log, rank_log, read_events, read_steps
from duoka.runs.folder import RunFolder
from duoka.watch.follow import FollowedRun
from duoka.watch.history import History, read_history

LINES = st.one_of(
    st.builds(lambda n, x: {"type": "step", "step": n, "loss": x}, st.integers(0, 12), st.floats(0, 9)),
    st.builds(lambda n: {"type": "resume", "step": n}, st.integers(0, 12)),
    st.builds(lambda n: {"type": "eval", "step": n, "loss": 1.0}, st.integers(0, 12)),
    st.builds(lambda text: {"type": "warning", "text": text}, st.text(max_size=5)),
    st.sampled_from(["", '{"type": "st', "[1, 2]", "null", "多卡"]),  # what a killed writer and a bad disk leave
)


def as_bytes(lines):
    return b"".join(
        (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)).encode() + b"\n" for line in lines
    )


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(LINES, max_size=12), cuts=st.lists(st.integers(0, 600), max_size=8), again=st.booleans())
def test_any_split_of_the_bytes_gives_the_same_events_and_history(lines, cuts, again):
    """`again`: each piece is read by another process, which knows the offset of the one before."""
    whole = as_bytes(lines)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.events.mkdir()
        path = run.events / "run.jsonl"
        edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        tail, seen, history = EventTail(path), [], History(run)
        assert tail.read() == []
        for start, end in itertools.pairwise(edges):
            with path.open("ab") as file:
                file.write(whole[start:end])
            new = tail.read()
            assert not tail.replaced
            seen += new
            for event in new:
                history.apply(event)
            tail = EventTail(path, tail.offset) if again else tail
        assert tail.offset == len(whole)
        expected = [line for line in lines if isinstance(line, dict)]
        assert seen == expected == list(read_events(path))
        at_once = read_history(run)
        assert (history.steps, history.evals, history.warnings) == (at_once.steps, at_once.evals, at_once.warnings)
        assert history.resumes == at_once.resumes


def test_steps_are_those_that_count_after_every_resume(tmp_path):
    history = History(RunFolder(tmp_path))
    for step in (1, 2, 3, 4):
        history.apply({"type": "step", "step": step, "loss": float(step)})
    history.apply({"type": "resume", "step": 2})
    assert [one.step for one in history.steps] == [1, 2]
    for step, loss in ((3, 30.0), (4, 40.0), (3, 31.0)):
        history.apply({"type": "step", "step": step, "loss": loss})
    assert [(one.step, one.loss) for one in history.steps] == [(1, 1.0), (2, 2.0), (3, 31.0), (4, 40.0)]


def test_a_run_that_begins_once_more_has_lost_its_steps(tmp_path):
    """A crash before the first checkpoint: the next start is at step 0."""
    run = RunFolder(tmp_path)
    for _ in range(2):
        log = EventWriter(global_log(run))
        log.write("run", step=0)
        log.close()
        assert read_steps(run) == list(read_history(run).steps) == []
        log = EventWriter(global_log(run))
        for step in (1, 2, 3):
            log.write("step", step=step, loss=1.0)
        log.close()
    assert (read_history(run).num_lost, len(read_history(run).resumes)) == (3, 1)


def test_ranks_of_an_earlier_larger_world_are_none_of_now(tmp_path):
    """One of them, which had waited least, was called the slowest of a world that it was not in."""
    run = RunFolder(tmp_path)
    log = EventWriter(global_log(run))
    for size, wait_s in ((4, 0.0), (2, 0.5)):
        log.write("resume", step=0, world_size=size)
        for rank in range(size):
            EventWriter(rank_log(run, rank)).write("rank", rank=rank, step=size, step_s=1.0, wait_s=wait_s)
    followed = FollowedRun(run)
    followed.catch_up()
    assert [tail.rank for tail in followed.ranks()] == [tail.rank for tail in read_history(run).ranks] == [0, 1]


def replace_file(path):
    other = path.with_suffix(".new")
    EventWriter(other).write("run", number=2)
    os.replace(other, path)


def cut_file(path):
    path.write_bytes(b"")
    EventWriter(path).write("run", number=2)


def cut_and_grow(path):
    size = path.stat().st_size
    path.write_bytes(b"")
    log = EventWriter(path)
    log.write("run", number=2)
    log.write("x", text="x" * size)


@pytest.mark.parametrize("change", [replace_file, cut_file, cut_and_grow])
def test_another_file_in_its_place_is_noticed_and_read_from_its_start(tmp_path, change):
    path = tmp_path / "run.jsonl"
    log = EventWriter(path)
    for _ in range(3):
        log.write("run", number=1)
    tail = EventTail(path)
    assert [event["number"] for event in tail.read()] == [1, 1, 1] and not tail.replaced
    change(path)
    first, *_ = tail.read()
    assert first["number"] == 2 and tail.replaced
    assert tail.read() == [] and not tail.replaced


def test_an_offset_that_is_beyond_the_file_begins_anew(tmp_path):
    path = tmp_path / "run.jsonl"
    EventWriter(path).write("run")
    tail = EventTail(path, 10_000)
    assert len(tail.read()) == 1 and tail.replaced
    path.unlink()
    assert tail.read() == [], "between two files"


def test_no_line_that_damage_makes_stops_a_reader(tmp_path):
    run = write_run(tmp_path / "a", 3)
    with global_log(run).open("a") as file:
        file.write('{"v": 1, "type": "step", "step": 99999999999999999999, "loss": 1.0}\n')
        file.write('{"v": 1, "type": "step", "step": 4, "loss": 1' + 400 * "0" + ', "lr": 1' + 400 * "0" + "}\n")
        file.write(100_000 * "[" + "\n" + step_line(5))
    followed = FollowedRun(run)
    followed.catch_up()
    for history in (read_history(run), followed.history):
        assert list(history.steps.numbers()) == [1, 2, 3, 4, 5] and history.nonfinite == [4]
