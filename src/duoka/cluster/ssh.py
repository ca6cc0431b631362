"""One connection to one node, by the ssh command that the user has: their config, keys, agent and jump hosts.

Used by fleet.py (which starts runs over it) and by survey.py (the doctor's probe). Nothing is asked on the terminal,
and nothing is ended but the ssh client that was started here: what runs on the node ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from duoka.cluster.node_probe import ANSWER
from duoka.config.hosts import Host
from duoka.errors import ConfigError

SSH = "DUOKA_SSH"  # another command in place of ssh, with its flags: "ssh -F config"
CONNECT_S = 15
# A node whose cable is pulled is noticed after ALIVE_S times ALIVE_COUNT.
ALIVE_S, ALIVE_COUNT = 5, 4
CONNECTION_LOST = 255  # ssh's own exit code
NO_FOLDER, NO_PYTHON = 81, 82
_LOOK_EVERY_S = 0.1
_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", f"ServerAliveInterval={ALIVE_S}",
    "-o", f"ServerAliveCountMax={ALIVE_COUNT}",
)  # fmt: skip


def ssh_command(host: Host, script: str) -> list[str]:
    """`script` is for sh, whatever shell the user logs in to. Nodes of a Slurm job and pods: by their own commands."""
    if host.way == "slurm":
        step = ["srun", "--overlap", "--quiet", "--unbuffered", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
        return [*step, "sh", "-c", script]
    if host.way == "pod":
        return ["kubectl", "exec", "--stdin", host.name, "--", "sh", "-c", script]
    port = ("-p", str(host.port)) if host.port else ()
    program = shlex.split(os.environ.get(SSH) or "ssh")
    return [*program, *_OPTIONS, *port, host.target, f"exec sh -c {shlex.quote(script)}"]


def in_folder(folder: str, command: Sequence[str]) -> str:
    """A script that runs `command` in `folder`, and says by its exit code which of the two is not there."""
    checks = f"cd -- {shlex.quote(folder)} || exit {NO_FOLDER}; test -x {shlex.quote(command[0])} || exit {NO_PYTHON}"
    return f"{checks}; exec {shlex.join(command)}"


def run_sent_python(size: int) -> str:
    """A script that runs the program of `size` bytes that stdin begins with.

    By this Python's path there, or by any Python: a node without our environment is to be told from one out of reach.
    """
    code = f'import sys; exec(compile(sys.stdin.buffer.read({size}), "sent", "exec"), {{"__name__": "duoka_probe"}})'
    python = shlex.quote(sys.executable)
    return f"p={python}; test -x $p || p=python3; exec $p -c {shlex.quote(code)}"


class Connection:
    """The ssh client and its three streams. Never blocks, `close` apart."""

    def __init__(self, host: Host, script: str) -> None:
        self.host = host
        self.code: int | None = None
        self.ended_at = 0.0
        command = ssh_command(host, script)
        try:
            # Its own session: Ctrl-C in the terminal is for us, who end the far side in good order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            fix = f"install OpenSSH's client, or write another command in {SSH}"
            if host.way != "ssh":
                fix = f"type this where {command[0]} is"
            raise ConfigError(f"cannot start {command[0]}: {error.strerror or error}", fix=fix) from None
        self._waiting = b""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None and self._process.stderr is not None
        return self._process.stdout, self._process.stderr

    def send(self, message: dict[str, Any] | None = None) -> None:
        """A line of JSON; without a message an empty one, which says that we are still here."""
        self.send_bytes((json.dumps(message).encode() if message else b"") + b"\n")

    def send_bytes(self, data: bytes) -> None:
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(stdin.fileno(), self._waiting) :]
        except BlockingIOError:
            return
        except OSError:  # the client has ended: its exit code says more
            self._waiting = b""

    @property
    def is_behind(self) -> bool:
        """The far side has not taken all that was sent."""
        return bool(self._waiting)

    def look(self) -> bool:
        """Whether the client still runs."""
        if self.code is None:
            self.code = self._process.poll()
            self.ended_at = time.monotonic() if self.code is not None else 0.0
        return self.code is None

    @property
    def is_lost(self) -> bool:
        """The connection ended, and not what ran over it."""
        return self.code is not None and (self.code == CONNECTION_LOST or self.code < 0)

    def hang_up(self) -> None:
        """The far side sees the end of its stdin, and ends what it has started."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self, wait_s: float) -> None:
        """Hang up, and wait so long for the far side; then end the client here."""
        self.hang_up()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.look()
        for stream in self.streams:
            stream.close()


class Reader:
    """Reads both streams of many connections as they come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, connection: Connection) -> None:
        for number, stream in enumerate(connection.streams):
            self._selector.register(stream, selectors.EVENT_READ, (connection, number))

    def drop(self, connection: Connection) -> None:
        """Of one that is replaced: what else it says is not read."""
        for key in list(self._selector.get_map().values()):
            if key.data[0] is connection:
                self._selector.unregister(key.fileobj)

    @property
    def is_idle(self) -> bool:
        """All streams have come to their end."""
        return not self._selector.get_map()

    def read(self, wait_s: float) -> list[tuple[Connection, int, bytes]]:
        """(whose, 0 for stdout or 1 for stderr, bytes); empty bytes at a stream's end."""
        if self.is_idle:
            time.sleep(wait_s)
            return []
        found = []
        for key, _ in self._selector.select(wait_s):
            connection, number = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self._selector.unregister(key.fileobj)
            found.append((connection, number, data))
        return found

    def close(self) -> None:
        self._selector.close()


def why_lost(connection: Connection, errors: str) -> tuple[str, str]:
    """(what is wrong, what to do) of a node whose client has ended before the node said a word."""
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    last = said[-1] if said else "it said nothing"
    name = connection.host
    by_hand = f"try it by hand:   {name.by_hand} true"
    if connection.code == NO_FOLDER:
        return f"{name}: {last}", "the working folder must be on all machines, under the same path"
    if connection.code == NO_PYTHON:
        return f"{name} has no Python under the path of this one", "install the same environment at the same place"
    if "No module named" in last:
        return f"{name}: its Python has no duoka ({last})", "install the same environment at the same place"
    if "Permission denied" in last:
        return f"{name} lets nobody in without a password: {last}", f"ssh-copy-id {name.target}; then {by_hand}"
    if "Host key verification failed" in last:
        return f"{name} is not known to ssh yet, or has another key than before: {last}", by_hand
    if connection.is_lost:
        return f"{name} cannot be reached: {last}", by_hand
    return f"{name}: could not start there (exit code {connection.code}): {last}", by_hand


def silent(node: Connection, seconds: float) -> tuple[str, str]:
    return f"{node.host} has not answered within {seconds:.0f} s", f"try it by hand:   {node.host.by_hand} true"


def ask(
    nodes: Sequence[Connection], reader: Reader, asks: Sequence[Mapping[str, Any]], within_s: float,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any] | str] | None:  # fmt: skip
    """One answer of each; in its place what a node has said on stderr, when it ended or kept silent.

    None when `is_stopped` says so meanwhile.
    """
    answers: dict[Connection, dict[str, Any]] = {}
    output = {node: [b"", b""] for node in nodes}
    for node, question in zip(nodes, asks, strict=True):
        node.send(dict(question))
    until, ended_at = time.monotonic() + within_s, 0.0
    while len(answers) < len(nodes) and time.monotonic() < until:
        if is_stopped():
            return None
        for node, stream, data in reader.read(_LOOK_EVERY_S):
            if node in output:
                output[node][stream] += data
                found = _find_answer(output[node][0])
                if found is not None:
                    answers[node] = found
        waiting = [node for node in nodes if node not in answers]
        alive = [node for node in waiting if node.look()]
        if alive:
            ended_at = 0.0
        elif waiting:  # their last words may still be on the way
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > 1:
                break
        for node in waiting:
            node.flush()
    return [answers[node] if node in answers else output[node][1].decode(errors="replace") for node in nodes]


def _find_answer(data: bytes) -> dict[str, Any] | None:
    for line in data.split(b"\n")[:-1]:
        if line.startswith(ANSWER.encode()):
            found = json.loads(line[len(ANSWER) :])
            return found if isinstance(found, dict) else None
    return None
