"""When a run saves, and what it does when it cannot: the Saver, with a store of its own and nothing trained."""

import pytest
from test_checkpoint import make_contents

from duoka.comm.world import World
from duoka.config.schema import CheckpointConfig
from duoka.errors import StorageError
from duoka.plan.layout import Layout
from duoka.runs.manifest import list_checkpoints, step_of
from duoka.store import checkpoint
from duoka.store.checkpoint import CheckpointStore
from duoka.store.saving import Saver
from duoka.train.hooks import Timer
from duoka.units import parse_every


class Record:
    """What a run says."""

    def __init__(self):
        self.saved_steps, self.said = [], []

    def saved(self, step, *facts):
        self.saved_steps.append(step)

    def event(self, type, **values):
        pass

    def say(self, text):
        self.said.append(text)


@pytest.fixture
def start(tmp_path):
    stores = []

    def begin(**settings):
        config = CheckpointConfig(**settings)
        store = CheckpointStore(tmp_path, World(), Layout())
        stores.append(store)
        return Saver(store, make_contents(1), config, Timer(parse_every(config.every), 10), Record(), World())

    yield begin
    for store in stores:
        store.close()


def walk(saver, step, *, last=False, stop=False):
    saver.contents.state.step = step
    failed = saver.has_failed()
    saver.after_step(due=False, failed=failed, last=last, stop=stop, stopping=lambda: stop)


def steps_there(saver):
    return sorted(step_of(folder) for folder in list_checkpoints(saver.store.folder))


def test_the_best_step_by_evaluation_is_saved_and_stays(start):
    saver = start(every=100, keep=1, keep_best=True)
    for step, loss in enumerate((3.0, 2.0, float("nan"), 2.5, 4.0), 1):
        saver.contents.state.step = step
        saver.evaluated(loss)
        walk(saver, step, last=step == 5)
    assert saver.record.saved_steps == [1, 2, 5]
    assert steps_there(saver) == [2, 5], "the better of the evaluations, and the newest"
    assert saver.contents.state.best_step == 2


def test_the_best_by_one_measure_is_forgotten_where_another_one_counts(start):
    """A run that goes on with `best_by: sort`: a loss of 0.1 would beat all that a task lacks to its full score."""
    saver = start(every=100, keep=1, keep_best=True)
    saver.evaluated(0.1)
    walk(saver, 1)
    state = saver.contents.state
    saver.config = saver.config.model_copy(update={"best_by": "sort"})
    for step, (lacks, loss) in enumerate(((0.9, 0.05), (0.7, 0.04), (0.8, 0.03)), 2):
        saver.contents.state.step = step
        saver.evaluated(loss)
        saver.evaluated(lacks, by="sort")
        walk(saver, step, last=step == 4)
    assert (state.best_by, state.best_step, state.best_loss) == ("sort", 3, 0.7)
    assert steps_there(saver) == [3, 4]


def test_a_best_step_that_was_not_kept_is_no_hurdle_when_the_best_is_kept_from_now_on(start):
    saver = start(every=2, keep=1)
    for step, loss in enumerate((0.5, 3.0), 1):
        saver.contents.state.step = step
        saver.evaluated(loss)
        walk(saver, step, last=step == 2)
    config = saver.config.model_copy(update={"keep_best": True})
    timer = Timer(parse_every(100), 10)
    saver = Saver(saver.store, saver.contents, config, timer, saver.record, World())
    for step, loss in enumerate((2.5, 2.7, 2.6), 3):
        saver.contents.state.step = step
        saver.evaluated(loss)
        walk(saver, step, last=step == 5)
    assert steps_there(saver) == [3, 5] and saver.contents.state.best_loss == 2.5
    assert "best evaluation so far was at step 1, of which there is no checkpoint" in saver.record.said[0]
    again = Saver(saver.store, saver.contents, config, timer, Record(), World())
    assert again.contents.state.best_step == 3 and not again.record.said, "one that is there stays"


@pytest.mark.parametrize("on_error", ["skip", "wait"])
def test_a_best_step_whose_save_failed_is_no_hurdle(start, monkeypatch, on_error):
    saver = start(every=100, keep=1, keep_best=True, on_error=on_error)
    fail_at(monkeypatch, 1)
    for step, loss in enumerate((0.5, None, 3.0, 4.0), 1):
        saver.contents.state.step = step
        if loss is not None:
            saver.evaluated(loss)
        walk(saver, step, last=step == 4)
        saver.settle()
    assert steps_there(saver) == [3, 4] and saver.contents.state.best_step == 3


def test_without_keep_best_an_evaluation_saves_nothing(start):
    saver = start(every=100)
    saver.evaluated(1.0)
    walk(saver, 1)
    walk(saver, 2, last=True)
    assert steps_there(saver) == [2]


def fail_at(monkeypatch, *steps):
    """The disk is full at these steps, and has room again after each."""
    real = checkpoint.write_share
    left = list(steps)

    def write(path, chunks):
        if left and f"{left[0]:08d}" in str(path):
            left.pop(0)
            raise OSError(28, "No space left on device")
        return real(path, chunks)

    monkeypatch.setattr(checkpoint, "write_share", write)


def test_a_full_disk_stops_the_run_at_the_step_that_sees_it(start, monkeypatch):
    saver = start(every=1)
    fail_at(monkeypatch, 2)
    walk(saver, 1)
    walk(saver, 2)
    with pytest.raises(StorageError, match="step 2 could not be written"):
        for step in range(3, 1000):
            walk(saver, step)
    assert steps_there(saver)[0] == 1


def test_skip_leaves_one_out_and_saves_the_next(start, monkeypatch):
    saver = start(every=2, keep=9, on_error="skip")
    fail_at(monkeypatch, 4)
    for step in range(1, 9):
        walk(saver, step, last=step == 8)
    assert steps_there(saver) == [2, 6, 8]
    assert [text for text in saver.record.said if "goes on without it" in text]


def test_skip_does_not_pretend_that_a_stopped_run_was_saved(start, monkeypatch):
    saver = start(every=100, on_error="skip")
    fail_at(monkeypatch, 3)
    with pytest.raises(StorageError):
        walk(saver, 3, stop=True)


def test_wait_saves_the_step_at_which_it_waited(start, monkeypatch):
    saver = start(every=100, on_error="wait")
    fail_at(monkeypatch, 3)
    walk(saver, 3, last=True)
    assert steps_there(saver) == [3]
    assert len(saver.record.said) == 2
