"""`duoka train X --slurm partition=gpu,nodes=2,time=2h`: a batch script that a person can read, submitted and followed.

Called by cli/slurm.py. In the job `srun` starts one `duoka train X` per node, which finds its place by itself
(process/slurm.py). Before the time limit the run saves, and the job is queued again; it goes on where it was.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.cluster.asked import read_pairs
from duoka.cluster.launcher import Say
from duoka.cluster.verdict import INTERRUPTED, KIND_OF_CODE, Kind, Verdict, failed, stopped
from duoka.errors import ConfigError, DoesNotFit, StoppedEarly, WorkerFailed
from duoka.units import parse_seconds

SAVE_S = 90  # before the time limit: Slurm tells the script, and the run saves
# What may be asked for, and sbatch's flag for it.
KEYS = {
    "partition": "--partition", "nodes": "--nodes", "time": "--time", "gpus": "--gpus-per-node", "gres": "--gres",
    "cpus": "--cpus-per-task", "mem": "--mem", "account": "--account", "qos": "--qos", "constraint": "--constraint",
    "reservation": "--reservation", "nodelist": "--nodelist", "exclude": "--exclude", "name": "--job-name",
}  # fmt: skip
LOOK_EVERY_S = 2.0
_GONE_S = 30.0  # without a word of the job from Slurm


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm, and the command that srun starts on each node."""

    asked: Mapping[str, str]
    command: Sequence[str]
    folder: str
    run: Path  # the run folder; script and log lie beside it
    points: Sequence[Sequence[str]] = ()  # of a sweep: what each task of the array adds to the command

    @property
    def script(self) -> Path:
        return self.run.with_name(f"{self.run.name}.sbatch")

    @property
    def log(self) -> str:
        return str(self.run.with_name(f"{self.run.name}-slurm-{'%A_%a' if self.points else '%j'}.log"))


def read_asked(text: str) -> dict[str, str]:
    """`key=value,key=value`. Raises ConfigError with the keys that there are."""
    asked = dict(read_pairs("--slurm", text, KEYS, "partition=gpu,nodes=2,time=2h"))
    if not asked.get("nodes", "1").isdecimal() or asked.get("nodes") == "0":
        raise ConfigError(f'--slurm: nodes is "{asked["nodes"]}"', fix="write a number:   nodes=2")
    if "time" in asked and ":" not in asked["time"]:
        try:
            asked["time"] = _clock(parse_seconds(asked["time"]))
        except ValueError as error:
            raise ConfigError(f"--slurm: time: {error}", fix="write for example:   time=2h") from None
    return asked


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def render(job: Job, typed: str) -> str:
    """The batch script. `typed` is what the user did, for the first line."""
    asked = {"name": shlex.quote(job.run.name), "nodes": "1", **job.asked}  # sbatch knows quotes as a shell does
    flags = [f"{KEYS[key]}={value}" for key, value in asked.items()]
    flags += [
        "--ntasks-per-node=1", f"--output={shlex.quote(job.log)}", "--open-mode=append", "--requeue",
        f"--signal=B:USR2@{SAVE_S}",
    ]  # fmt: skip
    if job.points:
        flags.append(f"--array=0-{len(job.points) - 1}")
    header = "\n".join(f"#SBATCH {flag}" for flag in flags)
    return f"""#!/bin/bash
# Written by: {typed}
{header}

cd {shlex.quote(job.folder)} || exit 2
{_cases(job.points)}
# {SAVE_S} s before the time limit Slurm sends USR2 to this script, which passes it on: the run saves, and ends with 75.
asked=no
trap 'asked=yes; scancel --signal=USR2 "$SLURM_JOB_ID"' USR2

# One launcher on each node. It finds its place by Slurm's variables, and starts a process for each of its GPUs.
srun --kill-on-bad-exit=0 {shlex.join(job.command)}{' "${point[@]}"' if job.points else ""} &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"  # the first one was interrupted by the signal
  code=$?
done

# Saved because the time was over: back into the queue, to go on from there. (A preempted job Slurm requeues itself.)
if [ "$code" -eq 75 ] && [ "$asked" = yes ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _cases(points: Sequence[Sequence[str]]) -> str:
    """Which point of a sweep a task of the array is."""
    if not points:
        return ""
    lines = [f"  {number}) point=({shlex.join(point)});;" for number, point in enumerate(points)]
    return "\n".join(["", 'case "$SLURM_ARRAY_TASK_ID" in', *lines, "  *) exit 2;;", "esac", ""])


def submit(job: Job, typed: str) -> str:
    """Write the script, hand it to sbatch, and return the job's number."""
    job.script.parent.mkdir(parents=True, exist_ok=True)
    job.script.write_text(render(job, typed), encoding="utf-8")
    done = _slurm("sbatch", "--parsable", str(job.script))
    if done.returncode:
        why = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ConfigError(f"sbatch refused {job.script}", where=why, fix="sinfo shows partitions and their limits")
    return done.stdout.strip().split(";")[0]


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {command[0]} on this machine",
            fix="type this on a login node of the cluster, or see --dry-run",
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer within 60 s")


def follow(job: Job, number: str, say: Say) -> Verdict:
    """Show the log as it grows until the job is over. Ctrl-C ends the following, not the job."""
    log, shown, seen, gone_at = Path(job.folder, job.log.replace("%j", number)), 0, "", 0.0
    try:
        while True:
            now = job_state(number)
            state, code, reason = now.state, now.code, now.reason
            if state != seen and state:
                seen = state
                say(f"job {number}: {state.lower()}{f' ({reason})' if reason not in ('', 'None') else ''}")
            shown = _show_more(log, shown)
            if state and state not in GOING_ON:
                _show_more(log, shown)
                return verdict_of_state(state, code, number)
            gone_at = 0.0 if state else gone_at or time.monotonic()
            if gone_at and time.monotonic() - gone_at > _GONE_S:
                return failed(Kind.LAUNCHER_LOST, f"Slurm knows nothing of job {number} any more", f"  its log: {log}")
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        text = f"job {number} goes on; to stop it with a save:   scancel --signal=USR2 {number}"
        return stopped(text, INTERRUPTED)


def _show_more(log: Path, shown: int) -> int:
    try:
        with log.open("rb") as file:
            file.seek(shown)
            data = file.read()
    except OSError:  # not begun yet
        return shown
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(data)


@dataclass(frozen=True)
class JobState:
    """A line of `scontrol show job`: of an array there are several."""

    state: str  # empty: Slurm does not know it
    code: int = 0
    reason: str = ""
    task: str = ""  # of an array: 3, or 0-3 while all of them wait


def job_state(number: str) -> JobState:
    return next(iter(job_states(number)), JobState(""))


def job_states(number: str) -> list[JobState]:
    """As Slurm says. Raises ConfigError where there is no Slurm."""
    done = _slurm("scontrol", "show", "job", number, "--oneliner")
    found = []
    for line in done.stdout.splitlines():
        words = {name: value for name, _, value in (word.partition("=") for word in line.split())}
        if "JobState" in words:
            code, _, killed_by = words.get("ExitCode", "0:0").partition(":")
            whole = int(code) or (128 + int(killed_by) if int(killed_by or 0) else 0)
            found.append(JobState(words["JobState"], whole, words.get("Reason", ""), words.get("ArrayTaskId", "")))
    return found


GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING",
            "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT")  # fmt: skip


def verdict_of_state(state: str, code: int, number: str) -> Verdict:
    """Slurm's word for a job's end, as an end of ours."""
    again = "the same command goes on from the newest checkpoint"
    if state == "COMPLETED":
        return Verdict(Kind.DONE)
    if state in ("TIMEOUT", "PREEMPTED", "DEADLINE"):
        return stopped(f"job {number} ended by {state.lower()}; {again}")
    if state == "CANCELLED":
        return stopped(f"job {number} was cancelled; {again}", StoppedEarly.exit_code)
    if state == "OUT_OF_MEMORY":
        text = f"{DoesNotFit.title}: job {number} used more memory than it asked for"
        return Verdict(Kind.OUT_OF_MEMORY, DoesNotFit.exit_code, (text, "  ask for more, for example mem=64G"))
    if state == "FAILED":  # the log has said why
        return Verdict(KIND_OF_CODE.get(code, Kind.WORKER_DIED), code or 1, cause=f"exit code {code}")
    return failed(Kind.LOST_RANK, f"job {number} ended as {state}", f"  {again}", cause=WorkerFailed.title)
