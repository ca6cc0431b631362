"""A command that another one has started is asked to leave before it is killed: it may have a run to save."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from duoka.cli.asked_to_leave import AskedToLeave, leave_when_asked
from duoka.process.child import run_to_end

# Takes its draft along when it is asked to leave, which needs longer than subprocess.run's quarter of a second.
CHILD = """
import pathlib, signal, sys, time
draft = pathlib.Path(sys.argv[1])
def leave(*_):
    time.sleep(0.5)
    draft.unlink()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
draft.touch()
time.sleep(60)
"""


def test_what_a_command_says_is_read():
    script = "import sys; print(sys.stdin.read().upper()); print('多卡', file=sys.stderr); sys.exit(3)"
    done = run_to_end([sys.executable, "-c", script], told="hello")
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (3, "HELLO", "多卡")
    assert run_to_end([sys.executable, "-c", script]).stdout.strip() == "", "nothing to read, and no terminal's words"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_child_has_time_to_take_its_drafts_along(name, tmp_path):
    """`duoka bench run` left a folder in /tmp whenever it was stopped, and `duoka demo` a run unsaved."""
    draft = tmp_path / "draft"

    def stop():
        while not draft.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # on a busy machine the child may be quicker than we are
        signal.pthread_kill(threading.main_thread().ident, signal.Signals[name])

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises((AskedToLeave, KeyboardInterrupt)), leave_when_asked():
        run_to_end([sys.executable, "-c", CHILD, str(draft)])
    assert not draft.exists()


def test_so_has_one_that_takes_too_long(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_end([sys.executable, "-c", CHILD, str(tmp_path / "draft")], limit_s=1.5)
    assert not (tmp_path / "draft").exists()
