"""Signals that ask the process a user started to leave, before it has ranks to pass them on to.

Every command is under `leave_when_asked`: a SIGTERM or SIGHUP unwinds what is under way, as a Ctrl-C does (drafts are
removed, workers ended, locks let go of), and is reported as what it is; `duoka train` says of it while model and data
are prepared that the same command goes on. Ranks of ours die of it at once, and their launcher knows what it asked for.
Ranks that torchrun, srun or mpirun started have nobody who knows: they leave at once, in words
and with the code of a run that goes on (`leave_at_once`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from duoka.process.exits import RESUME_ME

_ASK_TO_LEAVE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_ASK_AGAIN_S = 0.1


class AskedToLeave(BaseException):
    """Not an Exception: no handler on the way may swallow it and go on."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
        self.is_heard = threading.Event()  # set by who catches it: nothing asks again when it is gone


@contextmanager
def leave_when_asked() -> Iterator[None]:
    """Raise AskedToLeave in this thread, the main one, when a signal asks. One that is ignored (nohup) stays so."""

    owner = os.getpid()
    unwinding: list[weakref.ref[AskedToLeave]] = []
    heard: list[threading.Event] = []
    repeats: list[threading.Timer] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a child that was forked from here is ended by it as by default
            signal.signal(number, signal.SIG_DFL)
            return os.kill(os.getpid(), number)
        was_dropped = not unwinding or unwinding[-1]() is None
        if was_dropped and not any(one.is_set() for one in heard):  # once: a second must not interrupt the cleanup
            raise watched(AskedToLeave(signal.Signals(number).name), number)

    def watched(asked: AskedToLeave, number: int) -> AskedToLeave:
        heard[:] = [asked.is_heard]
        unwinding[:] = [weakref.ref(asked, lambda gone: ask_again(number))]
        return asked

    def ask_again(number: int) -> None:
        """Python drops what is raised in a destructor or a callback of compiled code, and goes on."""
        if heard[-1].is_set():
            return
        repeats.append(threading.Timer(_ASK_AGAIN_S, os.kill, (owner, number)))
        repeats[-1].daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads: whoever asks again is heard
            repeats[-1].start()

    before = {n: signal.getsignal(n) for n in _ASK_TO_LEAVE if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        unwinding.clear()  # it was heard: nothing asks again when the exception is gone
        for repeat in repeats:
            repeat.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leave_at_once(*, speaks: bool) -> Iterator[None]:
    """End this process with 75 when a signal asks, wherever it is; but while the training loop listens, it answers.

    A handler alone would wait for what the main thread does in compiled code, such as for peers that have left.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def leave(number: int, frame: FrameType | None) -> None:
        if speaks:
            name = signal.Signals(number).name
            text = f"stopped by {name} while no step was trained, with nothing new saved; the same command goes on\n"
            os.write(2, text.encode())
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(RESUME_ME)

    def listen() -> None:
        while byte := os.read(reader, 1):
            if signal.getsignal(byte[0]) is leave:  # else the loop has taken over, or the signal is another one
                leave(byte[0], None)

    before = {n: signal.signal(n, leave) for n in _ASK_TO_LEAVE if signal.getsignal(n) is not signal.SIG_IGN}
    told = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A forked child would tell of its own signals here, and end its parent.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=listen, name="duoka-asked-to-leave", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(told)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
