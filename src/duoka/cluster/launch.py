"""How a world of processes on this machine is started: number of processes, port, environment, command.

Called by `duoka train` and `duoka launch`; supervise.py starts what this file describes. Starts nothing itself.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from duoka.cluster.launcher import Say, Spec
from duoka.errors import ConfigError
from duoka.process.allocator import FEW_PRIMITIVES
from duoka.process.kubernetes import IN_POD
from duoka.process.rank import LOGS_FOLDER, NUM_RESTARTS

POD_NAME_S = 600.0  # images of many GB are pulled meanwhile
ASK_NAME_EVERY_S = 1.0
ALLOW_LOOPBACK = "DUOKA_ALLOW_LOOPBACK"  # several nodes on one machine, to try it out


@dataclass(frozen=True)
class WorldSpec(Spec):
    """One world of a run on this machine: its launch settings, rendezvous port, and number of restarts."""

    port: int = 0  # 0: a free one
    num_restarts: int = 0  # how many worlds of this run have failed before
    log_from: int = 0  # where in the event log its own begins
    oom_kills: int | None = None  # that this group of processes had seen before


def count_processes(asked: int | None, num_gpus: int) -> int:
    """One process per GPU; on a CPU one, unless asked for more."""
    if asked is None:
        return max(1, num_gpus)
    if asked < 1:
        raise ConfigError(f"--nproc is {asked}; at least 1 process is needed", fix="write for example: --nproc 2")
    if num_gpus and asked > num_gpus:
        raise ConfigError(
            f"--nproc is {asked}, and this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''} to use",
            fix=f"write --nproc {num_gpus}, or CUDA_VISIBLE_DEVICES= in front to use the CPU",
        )
    return asked


def threads_per_process(num_cores: int, num_processes: int) -> int:
    """Processes that each take all cores slow each other down several times."""
    return max(1, num_cores // max(1, num_processes))


def hold_free_port() -> tuple[int, socket.socket]:
    """A free port, and the socket that reserves it until closed: rank 0 listens there only after importing torch.

    Linux lets rank 0 bind it too, as this socket does not listen and both set SO_REUSEADDR; no other program gets it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    if sys.platform != "linux":  # elsewhere rank 0 would be refused
        holder.close()
    return port, holder


def wait_for_name(
    host: str, say: Say, within_s: float | None = None, *, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """In a pod: until the first pod's name is known, which it is when that pod has its address. Elsewhere: at once."""
    limit_s = within_s if within_s is not None else POD_NAME_S if IN_POD in os.environ else 0.0
    until, told = time.monotonic() + limit_s, False
    while time.monotonic() < until and not is_stopped():
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if not told:
                say(f"waiting for {host} to be known ({error.strerror})")
                told = True
        time.sleep(ASK_NAME_EVERY_S)


def check_port(port: int, fix: str = "leave --port (or MASTER_PORT) out: a free one is taken") -> None:
    """Refuse a port that is taken, with the process that has it."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}; ports are 1 to 65535", fix=fix)
    with socket.socket() as listener:
        # A port whose last connections are still closing down can be listened on: that is not "taken".
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except PermissionError:
            raise ConfigError(f"port {port} may only be used by root", fix="use a port above 1023") from None
        except OSError as error:
            owner = find_port_owner(port)
            raise ConfigError(
                f"port {port} is taken" if owner else f"port {port} cannot be used: {error.strerror}",
                where=f"by {owner}" if owner else None,
                fix=fix,
            ) from None


def find_port_owner(port: int) -> str:
    """`pid 4711: python -m http.server 29500`, as far as this user may know."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process that only an administrator can see"
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            if connection.pid is None:
                return "a process of another user"
            return f"pid {connection.pid}: {_command_of(connection.pid)}"
    return ""


def _command_of(pid: int) -> str:
    import psutil

    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return "?"
    text = " ".join(words)
    return text if len(text) <= 120 else text[:117] + "..."


def share_of_machine(num_processes: int, num_cores: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of processes that share a machine; what the user set stays."""
    out = {**FEW_PRIMITIVES, **env}
    out.setdefault("OMP_NUM_THREADS", str(threads_per_process(num_cores, num_processes)))
    # Unbuffered: the last output of a killed rank must not be lost.
    out.setdefault("PYTHONUNBUFFERED", "1")
    out.setdefault("TOKENIZERS_PARALLELISM", "false")
    return out


def build_environment(spec: WorldSpec, num_cores: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every process of the world gets beside its place."""
    out = share_of_machine(spec.num_processes, num_cores, {**env, **spec.env})
    out[LOGS_FOLDER] = str(spec.run.logs.resolve())
    out[NUM_RESTARTS] = str(spec.num_restarts)
    if sys.platform == "linux":
        # One machine: gloo on loopback is unreachable from outside, and needs no host name that resolves.
        out.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return out
