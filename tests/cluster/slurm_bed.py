"""A Slurm of this machine alone: a controller and two nodes, from a folder of its own, made and ended by a test.

Both nodes are this host under two ports, so that their addresses are loopback ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """
ClusterName=duoka
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=1 RealMemory=1000
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """Empty where a Slurm can be started."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return f"NO SLURM: not installed: {', '.join(missing)} (on Debian: apt install slurm-wlm munge)" if missing else ""


def slurm_version(env: dict[str, str]) -> str:
    return subprocess.run(["sbatch", "--version"], env=env, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its kin talk to it."""
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    one, two, ctld = (_free_port() for _ in range(3))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, one=one, two=two, ctld=ctld))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf)}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.out").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    try:
        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *files)
        _wait(folder / "munge.socket")
        start("slurmctld", "slurmctld", "-D", "-c", "-f", str(conf))
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            start(node, "slurmd", "-D", "-N", node, "-f", str(conf))
        _wait_for_nodes(env, folder)
        yield env
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=env, capture_output=True, timeout=30)
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.1)


def _wait_for_nodes(env: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True)
        if done.stdout.split() == ["idle", "2"]:
            return
        logs = [path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.out"))]
        assert time.monotonic() < deadline, f"{done.stdout} {done.stderr} {logs}"
        time.sleep(0.5)
