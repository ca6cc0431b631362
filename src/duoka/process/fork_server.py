"""`python -m duoka.process.fork_server MODULE...`: imports the modules once, then forks ranks for its launcher.

Torch and a model's code cost seconds of CPU a process: ranks of one node share them, and so does the world that takes
the place of one that failed. cluster/forks.py is the other side of the socket that is this process's stdin. Ranks are
children of the launcher, as if it had started them: each is forked twice, and the launcher adopts orphans. Forking is
safe here, because nothing has used a thread, a group or a GPU yet: who imports must not begin to compute.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import socket
import sys
import time
import warnings
from dataclasses import dataclass

from duoka.process.lifeline import PARENT_PID, die_with_parent, parent_pid
from duoka.process.rank import send_output_to_log

_LENGTH_BYTES = 4
_ADOPTED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Fork:
    """What a new process is to be: `python -m module arguments...` with this environment and these streams.

    `imports` are modules more that all of them need.
    """

    imports: list[str]
    module: str
    arguments: list[str]
    env: dict[str, str]
    streams: list[int]  # of the receiving process: stdout, stderr


def send_fork(wire: socket.socket, fork: Fork) -> None:
    data = json.dumps([fork.imports, fork.module, fork.arguments, fork.env]).encode()
    # Descriptors travel with the first bytes.
    socket.send_fds(wire, [len(data).to_bytes(_LENGTH_BYTES, "big")], fork.streams)
    wire.sendall(data)


def receive_fork(wire: socket.socket) -> Fork | None:
    """The next request; None when the launcher is done."""
    head, streams, _, _ = socket.recv_fds(wire, _LENGTH_BYTES, 2)
    if len(head) < _LENGTH_BYTES:
        return None
    length, data = int.from_bytes(head, "big"), b""
    while len(data) < length:
        more = wire.recv(length - len(data))
        if not more:
            return None
        data += more
    imports, module, arguments, env = json.loads(data)
    return Fork(imports, module, arguments, env, list(streams))


def main(modules: list[str]) -> None:
    launcher = parent_pid()
    assert launcher is not None, "started by a launcher, which says who it is"
    die_with_parent(launcher)
    wire = socket.socket(fileno=os.dup(0))
    _import(modules)
    fork = _serve(wire)
    if fork is not None:
        wire.close()
        _become(fork)


def _import(modules: list[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):  # a rank that needs it says what is the matter
            importlib.import_module(name)
    # What is imported stays as it is: a collection in a rank would write to each of its pages, and unshare it.
    gc.collect()
    gc.freeze()


def _serve(wire: socket.socket) -> Fork | None:
    """None in the server, when the launcher is done; in a new process, what it is to be."""
    while (fork := receive_fork(wire)) is not None:
        if any(name not in sys.modules for name in fork.imports):
            _import(fork.imports)
        pid = _fork_twice()
        if pid == 0:
            return fork
        for descriptor in fork.streams:
            os.close(descriptor)
        wire.sendall(f"{pid}\n".encode())
    return None


def _fork_twice() -> int:
    """0 in the new process; else its pid, when the process between has left and the launcher has adopted it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads; the only ones here are OpenBLAS's, which start again after a fork by themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            os.close(reader)
            os.close(writer)
            return 0
    os.close(writer)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(between, 0)
    return pid


def _become(fork: Fork) -> None:
    """Be the process that `python -m module` would have been."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((null, *fork.streams)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(fork.env)
    random.seed()  # else all ranks would go on with the server's numbers
    launcher, until = int(fork.env[PARENT_PID]), time.monotonic() + _ADOPTED_WITHIN_S
    while os.getppid() != launcher and time.monotonic() < until:
        time.sleep(0.001)
    die_with_parent(launcher)
    send_output_to_log()
    sys.argv = [fork.module, *fork.arguments]
    runpy.run_module(fork.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
