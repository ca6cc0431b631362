"""Files of a run that a disk has damaged, or another version wrote: pages and reports show what is whole."""

import http.client
import json
import os
import threading

import pytest
from written_runs import write_run

from duoka.errors import StorageError
from duoka.runs.events import EventTail, EventWriter, read_steps
from duoka.runs.folder import read_owner
from duoka.watch.board import Asked, Board, NotThere
from duoka.watch.differences import shown_config
from duoka.watch.ranks import read_ranks
from duoka.watch.report import end_lines
from duoka.watch.server import BoardServer
from duoka.watch.terminal import last_lines


def test_a_damaged_line_does_not_take_the_runs_page_away(tmp_path):
    """An evaluation whose step was no number: every look at that run was refused."""
    run = write_run(tmp_path / "a", 8)
    with (run.events / "run.jsonl").open("a") as file:
        file.write('{"type": "eval", "step": "x", "loss": "y"}\n{"type": "eval", "step": 8, "loss": NaN}\n')
        file.write('{"type": "checkpoint", "step": [1], "path": {}}\n{"type": "samples", "samples": 3}\n')
    series = Board(tmp_path).look(Asked(runs=("a",), focus="a", keys=("loss",)))["series"]["a"]
    assert len(series["curves"]["loss"]) == 8 and [loss for _, loss in series["evals"][-2:]] == [None, None]


def test_a_damaged_line_does_not_keep_a_run_from_going_on(tmp_path):
    """Whether steps were done is asked at every start: it ended in a traceback."""
    run = write_run(tmp_path / "a", 3)
    with (run.events / "run.jsonl").open("a") as file:
        file.write('{"type": "step", "step": "six"}\n{"type": "step"}\n{"type": "resume", "step": null}\n')
    assert [event["step"] for event in read_steps(run)] == [1, 2, 3]


def test_what_no_page_of_ours_asks_is_refused_in_words(tmp_path, capsys):
    write_run(tmp_path / "a", 3)
    with BoardServer(Board(tmp_path)) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/api/look?most=inf", headers={"Authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        assert answer.status == 400 and "infinity" in json.loads(answer.read())["error"]
        connection.close()
    assert "Traceback" not in capsys.readouterr().err


def test_a_report_has_what_it_can_read(tmp_path):
    """Other forms of plan.json and data.json ended `duoka runs show` in a traceback."""
    run = write_run(tmp_path / "a", 8)
    run.plan.write_text(json.dumps({"memory": [1], "speed": "fast", "machine": "x", "layout": ["a"], "compute": {}}))
    (run.path / "data.json").write_text(json.dumps({"sets": [{"name": "talks"}, 3, {"counts": {"num_kept": 1}}]}))
    assert "at step 8" in "\n".join(end_lines(run))


def test_a_named_pipe_where_a_file_of_a_run_is_expected_keeps_nobody_waiting(tmp_path):
    """Opening one waits until somebody writes into it: reports, pages and `duoka runs` never came to an end."""
    run = write_run(tmp_path / "a", 3)
    files = [run.events / "run.jsonl", run.events / "rank00000.jsonl", run.config, run.lock, run.logs / "x.log"]
    for path in files:
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    assert read_steps(run) == [] and read_owner(run) == "" and EventTail(files[0]).read() == []
    assert read_ranks(run, 1) == [] and shown_config(run) == ""
    assert "no plain file" in last_lines(run.logs / "x.log")[0]
    board = Board(tmp_path)
    board.look(Asked(runs=("a",), focus="a", keys=("loss",)))
    with pytest.raises(NotThere, match="has no log"):
        board.log("a", "x.log", None)
    with pytest.raises(StorageError, match="no plain file"):
        EventWriter(files[0])
