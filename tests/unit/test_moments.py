"""Concerns of a run: told in one order, ended whatever happens; garbage goes between steps and nothing grows."""

import contextlib
import gc
import weakref

import pytest

from duoka.train.garbage import EVERY, GarbageCollection
from duoka.train.moments import Concern, Moments, StepEnd


class Noted(Concern):
    def __init__(self, name, heard, *, fails=()):
        self.name, self.heard, self.fails = name, heard, fails

    def _note(self, moment):
        self.heard.append(f"{self.name} {moment}")
        if moment in self.fails:
            raise RuntimeError(f"{self.name} {moment}")

    def start(self):
        self._note("start")

    @contextlib.contextmanager
    def forward(self, num_tokens):
        self._note(f"forward of {num_tokens}")
        yield
        self._note("forward ends")

    def after_backward(self):
        self._note("after_backward")

    def after_step(self, end):
        self._note(f"after step {end.step}")

    def end(self):
        self._note("end")


def test_every_moment_reaches_every_concern_in_the_tuples_order():
    heard = []
    moments = Moments((Noted("a", heard), Noted("b", heard)))
    with moments.until_end():
        with moments.forward(7):
            heard.append("pass")
        moments.after_backward()
        moments.after_step(StepEnd(1))
    assert heard == [
        "a start", "b start", "a forward of 7", "b forward of 7", "pass", "b forward ends", "a forward ends",
        "a after_backward", "b after_backward", "a after step 1", "b after step 1", "b end", "a end",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["start", "end", "the run"])
def test_every_concern_that_was_started_hears_the_end_whatever_raises(where):
    heard = []
    moments = Moments((Noted("a", heard), Noted("b", heard, fails=(where,)), Noted("c", heard)))
    with pytest.raises(RuntimeError), moments.until_end():
        if where == "the run":
            raise RuntimeError
    begun = [line.split()[0] for line in heard if line.endswith("start")]
    assert begun == (["a", "b"] if where == "start" else ["a", "b", "c"])
    assert [line.split()[0] for line in heard if line.endswith("end")] == begun[::-1]


@pytest.fixture
def as_found():
    """Whatever a test does, the collector is on again after it."""
    yield
    gc.unfreeze()
    gc.enable()


class Cycle:
    def __init__(self, alive):
        self.me = self
        alive.add(self)


@pytest.mark.parametrize("evaluates", [False, True])
def test_cycles_of_steps_are_collected_between_steps_and_never_in_one(as_found, evaluates):
    garbage, alive, most = GarbageCollection(), weakref.WeakSet(), 0
    with Moments((garbage,)).until_end():
        for step in range(1, 3 * EVERY + 1):
            for _ in range(1000):  # enough for the collector to begin by itself
                Cycle(alive)
            before = len(alive)
            assert step == 1 or (before >= 1000 and not gc.isenabled())
            garbage.after_step(StepEnd(step, is_evaluated=evaluates and step % 10 == 0))
            most = max(most, before)
            if step == 1 or step % (10 if evaluates else EVERY) == 0:
                assert not alive, "nothing of the steps before is left"
    assert most == 1000 * (10 if evaluates else EVERY), f"{most} cycles lived at once"


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_after_the_run_what_it_was_before(as_found, was_on):
    (gc.enable if was_on else gc.disable)()
    garbage = GarbageCollection()
    with contextlib.suppress(RuntimeError), Moments((garbage,)).until_end():
        garbage.after_step(StepEnd(1))
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
        raise RuntimeError("the run fails")
    assert gc.isenabled() == was_on and gc.get_freeze_count() == 0
    with Moments((GarbageCollection(),)).until_end():
        pass
    assert gc.isenabled() == was_on, "a run without a step has changed nothing"
