"""Ends that come at an odd moment: before a launcher has anything to stop, and of rank 0 before the run is over."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from test_meeting import seat  # noqa: F401

from duoka.cli import main
from duoka.cli.asked_to_leave import AskedToLeave, leave_when_asked
from duoka.cli.train import start_here
from duoka.cluster.elastic import ComingAndGoing
from duoka.cluster.launcher import Spec
from duoka.cluster.meeting import Rules
from duoka.cluster.nodes import FixedNodes, Flags
from duoka.model.export import draft_of
from duoka.runs.failure import write_failure
from duoka.runs.folder import RunFolder


@pytest.fixture(autouse=True)
def harmless():
    """A signal that comes when nobody listens any more is one test's failure, not the end of all that this process has
    still to test."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    time.sleep(0.15)  # longer than a repeat waits
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "launcher", [FixedNodes(2, 1, "sft-0.sft", 29500), ComingAndGoing(Rules(1, 2, "sft-0.sft", 1))]
)
def test_a_pod_that_waits_for_the_first_ones_name_stops_when_asked(launcher, tmp_path, monkeypatch):
    """The first process of a container does not even die of a SIGTERM that it does not listen to."""

    def look(host, port, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    said = []
    verdict = launcher.start(Spec(("false",), 1, RunFolder(tmp_path / "run")), said.append)
    assert verdict.exit_code == 75 and "stopped by SIGTERM" in verdict.lines[0], verdict
    assert said[-1] == "waiting for sft-0.sft to be known (Name or service not known)"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_while_the_config_is_read_is_one_while_all_is_prepared(name, monkeypatch, capsys):
    monkeypatch.setattr("duoka.cli.train.load_checked", lambda *_, **__: os.kill(os.getpid(), signal.Signals[name]))
    before = signal.getsignal(signal.SIGTERM)
    assert start_here("x.yaml", (), Flags(), dry_run=False) == 75
    assert f"stopped by {name} while model and data were prepared" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_command_that_is_asked_to_leave_takes_its_draft_along(name, tmp_path, monkeypatch, capsys):
    """`duoka export` left a hidden folder as large as the model."""

    def write(**_):
        with draft_of(tmp_path / "new") as draft:
            (draft / "weights").write_bytes(b"half")
            child = os.fork()
            if not child:  # a child is ended by it as by default: it has nothing of ours to unwind
                os.kill(os.getpid(), signal.Signals[name])
                os._exit(1)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.Signals[name]  # not of what another test left
            os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr("duoka.cli.cli.main", write)
    # A tracker's thread of another test that still waits for its network: this process would leave at once for it.
    monkeypatch.setattr("duoka.process.lifeline.leaves_thread_behind", lambda: False)
    again = []
    monkeypatch.setattr("threading.Timer", lambda *words: again.append(words))  # on a busy machine it killed
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        main(["export", "run", "-o", str(tmp_path / "new")])
    assert left.value.code == 128 + signal.Signals[name] and not os.listdir(tmp_path)
    assert capsys.readouterr().err == f"stopped by {name}\n" and signal.getsignal(signal.SIGTERM) is before
    assert not again, "what was heard is not asked for once more"


class Drops:
    """Compiled code that calls back, a destructor, a library's bare except: what is raised in there is lost."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        len(os.listdir())


def test_a_request_to_leave_that_python_dropped_is_made_again(monkeypatch):
    """`duoka serve` served on when one met its imports, and every later SIGTERM was ignored."""
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    with pytest.raises(AskedToLeave), leave_when_asked():
        Drops()
        assert time.monotonic() - began < 5
        time.sleep(5)
    assert time.monotonic() - began < 5 and signal.getsignal(signal.SIGTERM) is before


def test_a_second_request_does_not_meet_the_cleanup_of_the_first():
    with pytest.raises(AskedToLeave), leave_when_asked():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            tidied = True
    assert tidied


@pytest.mark.parametrize(("state", "code"), [("running", 5), ("done", 0)])
def test_a_rank_0_that_exits_in_the_middle_has_not_finished_the_run(seat, state, code):  # noqa: F811
    """Others that miss it fail; what it says in progress.json tells that from an end after the end."""
    table = seat(2, 2)
    table.join("host", is_host=True)
    table.join("guest")
    table.run.progress.write_text(json.dumps({"state": state, "step": 5}))
    try:
        raise RuntimeError("[gloo] Connection closed by peer")
    except RuntimeError as error:
        for rank in (2, 3):
            write_failure(table.run, rank, error, 5)
    table.ended("host", 0, 0, 1)
    table.ended("guest", 1, 2, 1)
    assert table.code("host") == code == table.code("guest")
    if code:
        assert "rank 0 of 4 left early, with exit code 0" in table.last("host", "done")["lines"][0]


def test_a_folder_with_a_space_stands_in_a_batch_script():
    from duoka.cluster.slurm import Job, render

    script = render(Job({}, ("duoka",), "/home/me", Path("my runs/a b")), "duoka train x.yaml")
    assert "#SBATCH --output='my runs/a b-slurm-%j.log'\n" in script and "#SBATCH --job-name='a b'\n" in script
