"""Machines that a scheduler has given: the nodes of a Slurm job, the pods of a Kubernetes Job, for the doctor.

Called by cli/doctor.py. They are reached by `srun` and `kubectl exec` where others are by ssh (ssh.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from duoka.cluster.slurm import KEYS, read_asked
from duoka.config.hosts import Host
from duoka.errors import ConfigError
from duoka.process.interpreter import python_module

HERE = "job"  # --slurm without keys: the job that this terminal is in
LOOKS = "doctor"  # the name of a job that is there for the doctor alone
_LOOK_S = 30.0
_RUNS = '{range .items[?(@.status.phase=="Running")]}{.metadata.name}{"\\n"}{end}'


def nodes_of_job(env: Mapping[str, str]) -> list[Host]:
    names = env.get("SLURM_JOB_NODELIST", "")
    if not names:
        what = "--slurm without keys looks at the nodes of a job, and this terminal is in none"
        raise ConfigError(what, fix="write what to ask Slurm for:   --slurm partition=gpu,nodes=2")
    return [Host(name, way="slurm") for name in _lines(["scontrol", "show", "hostnames", names], "--slurm")]


def look_in_job(asked: str, words: Sequence[str]) -> int:
    """Ask Slurm for nodes, and run `duoka doctor` with `words` once they are there; its exit code."""
    wanted = {"time": "00:10:00", "name": LOOKS, **read_asked(asked)}
    command = ["salloc", "--quiet", "--ntasks-per-node=1"]
    command += [f"{KEYS[key]}={value}" for key, value in wanted.items()]
    command += python_module("duoka", "doctor", *words, "--slurm")
    try:
        return subprocess.run(command).returncode
    except OSError as error:
        raise ConfigError(f"--slurm: cannot start salloc: {error.strerror}", fix="type it where Slurm is") from None


def time_left_of_job(env: Mapping[str, str]) -> float | None:
    """Until Slurm ends the job that this terminal is in; None without a limit."""
    (left, *_) = [*_lines(["squeue", "--job", env.get("SLURM_JOB_ID", ""), "--noheader", "--format=%L"], "--slurm"), ""]
    days, _, clock = left.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")):
        return None  # UNLIMITED, NOT_SET
    hours, minutes, seconds = (0, 0, *map(int, parts))[-3:]
    return ((24.0 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds


def time_left_of_pods(name: str) -> float | None:
    """Until Kubernetes ends the Job; None without a deadline."""
    fields = '{.spec.activeDeadlineSeconds}{" "}{.status.startTime}'
    words = _lines(["kubectl", "get", "job", name, "--output", f"jsonpath={fields}"], "--k8s")
    if len(words) < 2 or not words[0].isdecimal():
        return None
    begun = datetime.fromisoformat(words[1].replace("Z", "+00:00")).timestamp()
    return max(0.0, begun + int(words[0]) - time.time())


def pods_of_job(name: str) -> list[Host]:
    """Of a Job, the pods that run now, in the order of their names, which end in their number."""
    command = ["kubectl", "get", "pods", "--selector", f"job-name={name}", "--output", f"jsonpath={_RUNS}"]
    names = sorted(_lines(command, "--k8s"))
    if not names:
        what = f"--k8s: no pod of a Job named {name} is running"
        raise ConfigError(what, fix="see what there is:   kubectl get pods --show-labels")
    return [Host(one, way="pod") for one in names]


def _lines(command: Sequence[str], flag: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{flag}: {command[0]} cannot be asked: {error}", fix=f"try it by hand:   {command[0]}"
        ) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{flag}: {command[0]} says: {said}", fix=f"try it by hand:   {' '.join(command[:3])}")
    return done.stdout.split()
