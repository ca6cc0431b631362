"""The launcher's side of the fork server (process/fork_server.py): ranks of this machine from one process that has
imported what they need.

`duoka train` opens one while it prepares; ranks.py starts ranks by it where it can, and as processes of their own where
not: another system than Linux, other variables than it was started with, a server that ended or that cannot import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.process.fork_server import Fork, send_fork
from duoka.process.interpreter import python_module
from duoka.process.lifeline import PARENT_PID, WORLD_TOKEN

if TYPE_CHECKING:
    from duoka.config.schema import RunConfig

SWITCH = "DUOKA_FORK"  # 0: every rank imports by itself
_IMPORTS_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1
# What differs from rank to rank and from world to world; no library reads it when it is imported.
_OF_A_RANK = frozenset((
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES",
    "NODE_RANK", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES", "MAX_RESTARTS", "RDZV_ID", "FORCE_TORCHRUN",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
))  # fmt: skip


class ForkedRank:
    """A rank that the server forked and this process adopted, as far as subprocess.Popen's face is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class ForkServer:
    """Open until `close`. `is_hurried` says while its imports are waited for that ranks are wanted as they are."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self.token = uuid.uuid4().hex
        self.imports: list[str] = []  # more, which are known later
        self.is_hurried: Callable[[], bool] = lambda: False
        self._env = _at_import(env)
        self._wire, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                python_module("duoka.process.fork_server", *modules),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what cannot be imported a rank says by itself
                env={**env, PARENT_PID: str(os.getpid()), WORLD_TOKEN: self.token},
                start_new_session=True,  # a Ctrl-C in the terminal is the launcher's
            )

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def fork(self, command: Sequence[str], env: Mapping[str, str], streams: tuple[int, int]) -> ForkedRank | None:
        """`command` as a new child of this process; None where it has to be started by itself."""
        base = python_module("")[:-1]
        if self._process is None or tuple(command[: len(base)]) != base or _at_import(env) != self._env:
            return None
        module, *arguments = command[len(base) :]
        try:
            send_fork(
                self._wire, Fork(self.imports, module, arguments, {**env, WORLD_TOKEN: self.token}, list(streams))
            )
            answer = self._answer()
        except OSError:
            answer = b""
        if not answer:
            self._give_up()
            return None
        return ForkedRank(int(answer))

    def _answer(self) -> bytes:
        """The pid, when everything is imported; nothing from a server that ended, or that is not waited for."""
        until = time.monotonic() + _IMPORTS_WITHIN_S
        while time.monotonic() < until and not self.is_hurried():
            if select.select([self._wire], [], [], _LOOK_EVERY_S)[0]:
                return self._wire.recv(64)
        return b""

    def _give_up(self) -> None:
        """End the server, and what it forked after it was no longer waited for: the same rank starts by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._wire.setblocking(False)
            for pid in self._wire.recv(64).split():
                stray = ForkedRank(int(pid))
                stray.kill()
                stray.wait()
        self.close()

    def close(self) -> None:
        """The server ends; ranks that it forked live on."""
        self._wire.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def open_fork_server(modules: Sequence[str], env: Mapping[str, str]) -> Iterator[ForkServer | None]:
    """For ranks with the variables `env`. None where they cannot be forked, or where the user wants none."""
    # Elsewhere nobody adopts orphans.
    if sys.platform != "linux" or env.get(SWITCH) == "0":
        yield None
        return
    server = ForkServer(modules, env)
    try:
        yield server
    finally:
        server.close()


def imports_of(config: RunConfig) -> list[str]:
    """What all ranks of a run import, as far as its config tells."""
    found = ["duoka.train.main", "duoka.model.preload"]
    if config.lora is not None:
        found.append("peft")
    if "tensorboard" in config.log.to:
        found.append("torch.utils.tensorboard")
    return found


def imports_of_model(folder: Path) -> list[str]:
    """The model's own code, as a model folder names it."""
    with contextlib.suppress(OSError, ValueError):
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
        if re.fullmatch(r"\w+", kind):
            return [f"transformers.models.{kind}.modeling_{kind}"]
    return []


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a library may read when it is imported."""
    return {name: value for name, value in env.items() if name not in _OF_A_RANK and not name.startswith("DUOKA_")}
