"""`duoka.spawn(fn, args, nprocs)`: a function on N processes of this machine, for scripts that start their own ranks.

The arguments are those of torch.multiprocessing.spawn. Beyond it, ranks find each other with nothing set by hand (RANK,
WORLD_SIZE, MASTER_PORT ... are there: `init_process_group`, `Accelerator` and `compute_init` work as they stand), and a
failure is one message that names the rank and shows its traceback once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from duoka.cluster.blame import SECOND_HAND
from duoka.cluster.launch import hold_free_port, share_of_machine
from duoka.cluster.ranks import RankPlace, rank_environment
from duoka.errors import ConfigError, WorkerFailed
from duoka.plan.hardware import count_usable_cores
from duoka.process.environ import LOOPBACK, read_rank_environment
from duoka.process.exits import DRAIN_S, SIGTERM_S
from duoka.process.lifeline import die_with_parent

_LONGEST_ACCOUNT = 16_000  # letters; more would wait in a full pipe for a reader that waits for the end
_starts = threading.Lock()  # the environment of a fresh process is this process's own


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Spawned | None:
    """`fn(rank, *args)` in `nprocs` fresh processes; left out, one for each GPU, on a CPU one.

    Waits for all, and raises WorkerFailed when one fails; the others are ended then. With `join=False` comes back at
    once with what `join` can be called on.
    """
    count = _count(nprocs)
    _check(fn, start_method)
    spawned = Spawned(fn, args, count, daemon)
    if not join:
        return spawned
    spawned.join()
    return None


def _count(asked: int | None) -> int:
    if asked is None:
        import torch

        return max(1, torch.cuda.device_count())
    if asked < 1:
        raise ConfigError(
            f"nprocs is {asked}: no process would run (torch.cuda.device_count() is 0 without a GPU)",
            fix="leave nprocs out: one for each GPU, on a CPU one; or write for example   nprocs=2",
        )
    return asked


def _check(fn: Callable[..., Any], start_method: str) -> None:
    name = getattr(fn, "__qualname__", repr(fn))
    if start_method != "spawn":
        fix = "leave it out; functions of a notebook are forked by   duoka.notebook_launcher"
        raise ConfigError(f'duoka.spawn starts fresh processes, and start_method is "{start_method}"', fix=fix)
    place = read_rank_environment()
    if place is not None and place.size > 1:
        raise ConfigError(
            f"this process is rank {place.rank} of a world of {place.size}, and would start ranks of its own",
            fix='start the script with python alone, and call spawn under   if __name__ == "__main__":',
        )
    if fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        fix = "write:   duoka.notebook_launcher(fn, args, num_processes=2)   or put it into a .py file"
        raise ConfigError(f"{name} was typed into this session, and fresh processes cannot find it", fix=fix)
    if isinstance(fn, types.FunctionType) and not _is_found_by_name(fn):
        fix = "define it at the top level of a .py file"
        raise ConfigError(f"{name} cannot be sent to fresh processes", fix=fix)


def _is_found_by_name(fn: types.FunctionType) -> bool:
    """Fresh processes are told where a function stands: one inside of another, or without a name, stands nowhere."""
    here: Any = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        here = getattr(here, part, None)
    return here is fn


@dataclass(frozen=True)
class _End:
    """How one rank ended: its exit code, and its own account where it left one."""

    rank: int
    code: int
    time: float  # of its error, where it told; else when the end was seen
    said: str = ""  # the exception in a line
    traceback: str = ""

    @property
    def is_second_hand(self) -> bool:
        """Whether it only says that another rank was lost."""
        return any(words in f"{self.said}\n{self.traceback[-4000:]}".lower() for words in SECOND_HAND)


class Spawned:
    """Ranks that run. `join` has to be called until it says True."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], count: int, daemon: bool) -> None:
        import torch.multiprocessing

        fresh = torch.multiprocessing.get_context("spawn")
        port, self._holder = hold_free_port()
        place = RankPlace(0, 1, count, LOOPBACK, port)
        self._ends: dict[int, _End] = {}
        self._accounts: list[connection.Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(count):
                account, told = fresh.Pipe(duplex=False)
                # Of a daemon Python sees to the end; every rank ends when this process is gone without a word.
                process = fresh.Process(target=_run_rank, args=(fn, rank, args, told, os.getpid()), daemon=daemon)
                with _environment(rank_environment(place, rank), count):
                    process.start()
                told.close()
                self._accounts.append(account)
                self._processes.append(process)
        except BaseException:  # a Ctrl-C too must leave no process behind; raised again
            self._end_all()
            raise

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, at most so many seconds: True when all are done, False while some still run.

        Raises WorkerFailed when one has failed, after the others were ended.
        """
        try:
            ends = None if timeout is None else time.monotonic() + timeout
            while self._running() and not self._failed():
                if not self._wait(ends):
                    return False
            if self._failed():
                self._let_the_others_end()
                raise self._failure()
        except BaseException:  # a Ctrl-C too: nobody stays behind
            self._end_all()
            raise
        self._end_all()
        return True

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self._ends]

    def _failed(self) -> list[_End]:
        return [end for end in self._ends.values() if end.code != 0]

    def _wait(self, until: float | None) -> bool:
        """Until one more rank has ended; False when the time is over before."""
        by_sentinel = {self._processes[rank].sentinel: rank for rank in self._running()}
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = connection.wait(list(by_sentinel), left)
        for sentinel in ready:
            rank = by_sentinel[sentinel]
            self._processes[rank].join()
            self._ends[rank] = self._end_of(rank)
        return bool(ready)

    def _end_of(self, rank: int) -> _End:
        account = self._accounts[rank]
        code = int(self._processes[rank].exitcode)
        with contextlib.suppress(EOFError, OSError):
            if account.poll():
                return _End(rank, code, *account.recv())
        return _End(rank, code, time.time())

    def _let_the_others_end(self) -> None:
        """They notice the loss by themselves, and can say so; who does not is asked, and then killed."""
        until = time.monotonic() + DRAIN_S
        while self._running() and self._wait(until):
            pass

    def _failure(self) -> WorkerFailed:
        cause = min(self._failed(), key=lambda end: (end.is_second_hand, end.time))
        size = len(self._processes)
        gone = [end for end in self._ends.values() if end.code == 0 and end.time < cause.time]
        if cause.is_second_hand and gone:
            first = min(gone, key=lambda end: end.time)
            return WorkerFailed(
                f"rank {first.rank} of {size} was done, and the others still waited for it", where=cause.traceback
            )
        if cause.said:
            return WorkerFailed(f"rank {cause.rank} of {size} raised {cause.said}", where=cause.traceback)
        how = f"was ended by {signal.Signals(-cause.code).name}" if cause.code < 0 else f"left with {cause.code}"
        return WorkerFailed(f"rank {cause.rank} of {size} {how}")

    def _end_all(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        until = time.monotonic() + SIGTERM_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._holder.close()


@contextlib.contextmanager
def _environment(own: Mapping[str, str], count: int) -> Iterator[None]:
    """What a process that starts now finds in its environment, before it imports anything."""
    with _starts:
        before = dict(os.environ)
        wanted = share_of_machine(count, count_usable_cores(), before) | dict(own)
        if sys.platform == "linux":
            wanted.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no host name has to be found
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name in wanted.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def _run_rank(
    fn: Callable[..., Any], rank: int, args: tuple[Any, ...], told: connection.Connection, parent: int
) -> None:
    die_with_parent(parent)
    try:
        try:
            fn(rank, *args)
        except SystemExit:
            told.send((time.time(), "", ""))
            raise
        told.send((time.time(), "", ""))  # a rank's own clock says who left first
    except KeyboardInterrupt:  # the terminal's Ctrl-C reaches all; who started them says so
        _leave(128 + signal.SIGINT)
    except Exception as error:  # a rank's outermost frame: whatever it was, the parent says it; raised again
        first = (str(error).splitlines() or [""])[0]
        said = f"{type(error).__name__}: {first}" if first else type(error).__name__
        told.send((time.time(), said, "".join(traceback.format_exception(error))[-_LONGEST_ACCOUNT:]))
        _leave(1)
        raise


def _leave(code: int) -> None:
    """End without waiting for threads: a process group that lost a peer may never let its own ones go."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
