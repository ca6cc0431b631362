"""Before the interpreter ends, other threads are given what they wait for: Python's lock, and a moment."""

import threading
import time

from duoka.process.threads_at_rest import let_threads_rest


def test_a_thread_that_works_is_waited_for_and_one_that_sleeps_is_not():
    done, stop = threading.Event(), threading.Event()

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        done.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    let_threads_rest(limit_s=60)
    assert done.is_set() and thread.is_alive()
    stop.set()
    thread.join()


def test_a_thread_that_never_rests_keeps_nobody(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (an odd ) name) R 1 2 3", encoding="utf-8")
    began = time.monotonic()
    let_threads_rest(limit_s=0.05, tasks=tmp_path)
    assert time.monotonic() - began >= 0.05


def test_systems_that_do_not_tell_and_threads_that_went_are_at_rest(tmp_path):
    (tmp_path / "7").mkdir()
    let_threads_rest(limit_s=60, tasks=tmp_path)
    let_threads_rest(limit_s=60, tasks=tmp_path / "none")
