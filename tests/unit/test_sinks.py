"""Who gets a run's numbers: each what it asks for, in order; trouble of one stops neither the run nor the others."""

import errno
import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from duoka.config.load import load_config
from duoka.config.trackers import TRACKERS, TrackerName, installed_trackers
from duoka.errors import Faults
from duoka.plan import choose
from duoka.runs.events import read_events
from duoka.runs.folder import RunFolder
from duoka.sinks import background
from duoka.sinks.event_log import EventLog
from duoka.sinks.fan_out import Sinks, build_sink
from duoka.sinks.sink import RunFacts, Sink, StepNumbers
from duoka.train.record import Recorder
from duoka.train.step import StepResult

NUMBERS = {"epoch": 0.5, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 10}


def step_of(number):
    return StepNumbers(number, NUMBERS, {"mfu": 0.1}, 5.0, 2.0, 1000, 4.0, None, 60.0)


class Listener(Sink):
    """Writes down what it hears; raises, or waits, where it is told to."""

    def __init__(self, *, remote=False, raises=(), gate=None):
        self.name, self.is_remote, self.heard = "listener", remote, []
        self._raises, self._gate = raises, gate

    def _hear(self, what, *more):
        if self._gate is not None:
            self._gate.wait()
        self.heard.append((what, *more))
        if what in self._raises:
            raise ValueError(f"no {what}")

    def open(self, facts, say):
        self._hear("open")

    def step(self, now):
        self._hear("step", now.step)

    def scalars(self, values, step, options):
        self._hear("scalars", values, step)

    def close(self):
        self._hear("close")


def run_through(sinks, tmp_path, num_steps=3):
    sinks.open(RunFacts("run", tmp_path))
    for step in range(1, num_steps + 1):
        sinks.step(step_of(step))
    sinks.close()


HEARD = [("open",), ("step", 1), ("step", 2), ("step", 3), ("close",)]


@pytest.mark.parametrize("remote", [False, True])
def test_a_sink_hears_everything_in_order(tmp_path, remote):
    sink = Listener(remote=remote)
    run_through(Sinks([sink]), tmp_path)
    assert sink.heard == HEARD


@pytest.mark.parametrize("remote", [False, True])
def test_what_a_sink_raises_is_said_once_and_the_others_hear_all(tmp_path, remote, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    said, other = [], Listener()
    sink = Listener(remote=remote, raises=("step", "close"))
    run_through(Sinks([sink, other], warn=said.append), tmp_path)
    assert sink.heard == HEARD == other.heard
    assert said == ["warning: listener has a fault: no step", "warning: listener has a fault: no close"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_sink_that_cannot_be_opened_hears_no_more(tmp_path, remote):
    said, sink = [], Listener(remote=remote, raises=("open",))
    run_through(Sinks([sink], warn=said.append), tmp_path)
    assert sink.heard == [("open",)] and said == ["warning: listener has a fault: no open"]


def test_secrets_are_not_in_what_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    class Tells(Sink):
        name = "tells"

        def open(self, facts, say):
            raise ValueError("key 0123456789abcdef at https://me:pass@host refused")

    said = []
    Sinks([Tells()], warn=said.append).open(RunFacts("run", tmp_path))
    assert said == ["warning: tells has a fault: key *** at https://***@host refused"]


def test_a_sink_that_waits_for_ever_drops_what_comes_and_the_run_leaves_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 4)
    monkeypatch.setattr(background, "CLOSE_S", 0.2)
    said, gate = [], threading.Event()
    sinks = Sinks([Listener(remote=True, gate=gate)], warn=said.append)
    steps = threading.Thread(target=run_through, args=(sinks, tmp_path, 50), daemon=True)
    steps.start()
    steps.join(60)
    assert not steps.is_alive(), "steps waited for the sink"
    first, last = said
    assert "4 calls wait for it; what comes until it has room is left out" in first
    assert re.search("takes nothing any more, and the run ends without it; 4[67] calls were left out", last), last
    gate.set()


@pytest.mark.parametrize("reason", ["done", "signal"])
def test_the_goodbye_of_a_run_that_is_done_may_take_longer_than_what_waits(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(background, "CLOSE_S", 0.2)
    monkeypatch.setattr(background, "GOODBYE_S", 60)
    gate = threading.Event()

    class SendsFiles(Sink):
        name, is_remote = "sends files", True

        def close(self):
            gate.wait(60)

    said = []
    sinks = Sinks([SendsFiles()], warn=said.append)
    sinks.open(RunFacts("run", tmp_path))
    sinks.ended(3, reason, 0, "")
    threading.Timer(0.6, gate.set).start()
    sinks.close()
    gate.set()
    assert len(said) == (reason != "done"), said
    assert all("it has not ended within 0.2 s" in one for one in said)


def test_a_sink_that_takes_long_gets_what_waited_when_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    said, gate = [], threading.Event()
    sink = Listener(remote=True, gate=gate)
    sinks = Sinks([sink], warn=said.append)
    sinks.open(RunFacts("run", tmp_path))
    for step in range(1, 10):
        sinks.step(step_of(step))
    gate.set()
    sinks.close()
    assert sink.heard[0] == ("open",) and sink.heard[-1] == ("close",)
    num_left_out = 9 - (len(sink.heard) - 2)
    assert 5 <= num_left_out <= 7 and f"{num_left_out} calls were left out in all" in said[-1]


def test_numbers_are_those_of_the_call_although_the_loop_fills_the_mapping_again(tmp_path):
    gate = threading.Event()
    sink = Listener(remote=True, gate=gate)
    sinks, values = Sinks([sink]), {"loss": 1.0}
    sinks.open(RunFacts("run", tmp_path))
    sinks.scalars(values, 1, {})
    values["loss"] = 2.0
    gate.set()
    sinks.close()
    assert ("scalars", {"loss": 1.0}, 1) in sink.heard


def test_the_event_logs_line_of_a_step_has_every_number(tmp_path):
    run_through(Sinks([EventLog()]), tmp_path, 1)
    (event,) = read_events(tmp_path / "events" / "run.jsonl")
    assert event["type"] == "step" and event["step"] == 1
    assert {key: event[key] for key in NUMBERS} == NUMBERS
    assert (event["tokens_per_s"], event["step_s"], event["mfu"], event["memory_bytes"]) == (5.0, 2.0, 0.1, 1000)


def test_every_name_of_the_config_has_a_row_and_every_row_a_sink():
    assert set(TrackerName.__args__) == set(TRACKERS)
    for name in TRACKERS:
        assert build_sink(name).name == name


YAML = "model: demo\ndata: {train: [identity]}\nlog: {to: [tensorboard, wandb]}\n"


def test_a_tracker_whose_package_is_missing_is_refused_with_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(YAML, encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else object())
    assert "tensorboard" in installed_trackers() and "wandb" not in installed_trackers()
    with pytest.raises(Faults) as refused:
        load_config(tmp_path / "a.yaml", checks=(lambda config, base: choose.check_packages(config),))
    said = "\n".join(refused.value.lines())
    assert "log.to names wandb, and the package wandb is not installed here" in said and "a.yaml, line 3" in said
    assert 'pip install "duoka[wandb]"' in said and refused.value.exit_code == 2


def test_trackers_get_the_config_without_its_secrets(tmp_path, monkeypatch):
    """docs/config.md: what comes from a variable that is called a secret is never written. W&B had it as a setting."""
    monkeypatch.setenv("HOOK_TOKEN", "hunter2-of-the-environment")
    (tmp_path / "a.yaml").write_text(
        "model: x/${env:HOOK_TOKEN}\ndata: {train: [identity, '${env:HOOK_TOKEN}']}\nlog: {to: [wandb], alert: "
        "{webhook: 'https://hooks.example/T0/hunter2', command: '', events: [done]}}\noptim: {lr: 1e-3}\n",
        encoding="utf-8",
    )
    loaded = load_config(tmp_path / "a.yaml")
    heard = []

    class Keeps(Listener):
        def open(self, facts, say):
            heard.append(facts.config)

    monkeypatch.setattr("duoka.train.record.build_sink", lambda name: Keeps())
    monkeypatch.setattr("duoka.train.record.AlertFollower", Listener)
    world, state = SimpleNamespace(is_main=True, rank=0, size=1), SimpleNamespace(step=0)
    record = Recorder(RunFolder(tmp_path / "run"), world, loaded, 1, 0)
    record.start(state)
    record.close()
    (config,) = heard
    assert "hunter2" not in json.dumps(config), config
    assert config["model"]["name"] == "x/${env:HOOK_TOKEN}" and config["data"]["train"][1] == "${env:HOOK_TOKEN}"
    assert config["log"]["alert"] == {"webhook": "***", "command": "", "events": ["done"]}
    assert config["optim"]["lr"] == 1e-3 and loaded.config.log.alert.webhook.endswith("hunter2")


def test_a_run_knows_at_its_end_what_prefix_sharing_left_out(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML.replace("[tensorboard, wandb]", "[]"), encoding="utf-8")
    world = SimpleNamespace(is_main=True, rank=0, size=1)
    record = Recorder(RunFolder(tmp_path / "run"), world, load_config(tmp_path / "a.yaml"), 2, 0)
    record.start(SimpleNamespace(step=0))
    assert record.prefixes() == ""
    for step, shared in ((1, 60), (2, 0)):
        result = StepResult(num_shared=shared)
        record.step(SimpleNamespace(step=step), {**NUMBERS, "num_tokens": 100}, result, 0.5)
    record.close()
    assert record.prefixes() == "prefix sharing: 30% of 200 tokens were left out, as samples begin alike"


def test_an_unknown_tracker_is_refused_with_those_that_are_known(tmp_path):
    (tmp_path / "a.yaml").write_text(YAML.replace("wandb", "weights"), encoding="utf-8")
    with pytest.raises(Faults) as refused:
        load_config(tmp_path / "a.yaml")
    said = "\n".join(refused.value.lines())
    assert "log.to[1] must be" in said and "tensorboard, wandb" in said and "weights" in said


def test_a_login_in_a_trackers_address_is_not_said(tmp_path):
    """MLFLOW_TRACKING_URI=https://me:password@host stood on the screen and in the log."""

    class Telling(Sink):
        def open(self, facts, say):
            say("MLflow: run 7 at https://me:hunter22@host/x")

    said = []
    Sinks([Telling()], tell=said.append).open(RunFacts("run", tmp_path))
    assert said == ["MLflow: run 7 at https://***@host/x"]


def test_tensorboard_shows_steps_evaluations_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks([build_sink("tensorboard")])
    sinks.open(RunFacts("run", tmp_path, config={"lr": 0.1}, goes_on=True))
    sinks.step(step_of(1))
    sinks.evaluated(1, {"loss": 3.0, "perplexity": 20.0, "accuracy": 0.5, "bits_per_byte": None})
    sinks.samples(1, [("Once", " upon")])
    sinks.scalars({"mine": torch.tensor(7.0), "note": "text"}, 2, {})
    sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {tag: board.Scalars(tag)[0].value for tag in ("train/loss", "eval/loss", "mine")} == {
        "train/loss": 2.0, "eval/loss": 3.0, "mine": 7.0,
    }  # fmt: skip
    assert "eval/bits_per_byte" not in board.Tags()["scalars"]
    sinks = Sinks([build_sink("tensorboard")])
    sinks.open(RunFacts("run", tmp_path, goes_on=True))  # once more from the beginning: nothing had been saved
    sinks.close()
    board.Reload()
    assert not board.Scalars("train/loss")
    texts = {tag: board.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in board.Tags()["tensors"]}
    assert "Once| upon" in texts["samples/text_summary"] and '"lr": 0.1' in texts["config/text_summary"]


def test_tensorboard_shows_each_step_once_after_a_rollback(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks([build_sink("tensorboard")])
    sinks.open(RunFacts("run", tmp_path, goes_on=True))
    for step in (1, 2, 3):
        sinks.step(step_of(step))
    sinks.event("resume", 1, {"reason": "step 4: the loss is not finite; back to step-00000001"})
    for step in (2, 3, 4):
        sinks.step(step_of(step))
    sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [one.step for one in board.Scalars("train/loss")] == [1, 2, 3, 4]


def test_tensorboard_goes_on_in_another_file_once_a_full_disk_has_room(tmp_path, monkeypatch, capfd):
    """Its writer ends with the first error: until the next start of the run nothing was drawn any more."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    real, said = RecordWriter.write, []
    sinks = Sinks([build_sink("tensorboard")], warn=said.append)
    sinks.open(RunFacts("run", tmp_path, goes_on=True))
    sinks.step(step_of(1))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    deadline = time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        sinks.step(step_of(2))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    monkeypatch.setattr("duoka.sinks.tensorboard.ANEW_S", 0.0)
    sinks.step(step_of(2)), sinks.step(step_of(2))  # tried again, and still full
    monkeypatch.setattr(RecordWriter, "write", real)
    sinks.step(step_of(3))
    sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")][-1] == 3
    assert said == ["warning: TensorBoard's file cannot be written: No space left on device"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_under_an_offline_run_of_wandb_is_said_once(tmp_path, monkeypatch):
    """Its file is written by a process of its own, which tells nobody."""

    class Run:
        offline, dir, url = True, "x", None

        def log(self, values):
            pass

        define_metric = finish = lambda *_, **__: None

    room, said = [1 << 30], []
    package = SimpleNamespace(init=lambda **_: Run(), Settings=lambda **_: None, teardown=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=room[0], f_frsize=1))
    sinks = Sinks([build_sink("wandb")], warn=said.append)
    sinks.open(RunFacts("run", tmp_path, goes_on=True))
    sinks.step(step_of(1))
    time.sleep(0.05)
    assert not said
    for step in (2, 3):
        room[0] = 4096
        sinks.step(step_of(step))
    sinks.close()
    assert said == ["warning: Weights & Biases does not get all numbers: No space left on device"]
