"""What this run needs of the nodes beyond what they are: a disk that writes its checkpoints, and time to end in.

Called by survey.py and cli/doctor.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from duoka.cluster.findings import NodeFinding
from duoka.units import format_bytes, format_seconds

SLOW_DISK = 0.5  # of what the others write
SLOWEST_BYTES_PER_S = 50e6  # a checkpoint of a 1B model would take four minutes
LONG_SAVE_S = 300.0


def judge_writes(rates: Mapping[str, float], checkpoint_bytes: int = 0) -> list[NodeFinding]:
    """Bytes per second that each node has on its disk when all write at once, as at a save; 0: it could not."""
    found = {name: rate for name, rate in rates.items() if rate}
    if not found:
        return []  # that they cannot write has been said
    words = {name: f"{rate / 1e6:,.0f} MB/s" for name, rate in found.items()}
    usual, least = statistics.median(found.values()), min(found.values())
    save_s = checkpoint_bytes / sum(found.values())
    says = (
        f"a checkpoint of {format_bytes(checkpoint_bytes)} takes {format_seconds(save_s)}" if checkpoint_bytes else ""
    )
    if least < SLOW_DISK * usual:
        odd = {name: words[name] for name, rate in found.items() if rate < SLOW_DISK * usual}
        cause = f"the others write {usual / 1e6:,.0f} MB/s at the same time, and a save waits for the slowest"
        fix = "see who else writes there (iotop), and what kind of disk it is (df -T)"
        return [NodeFinding("warn", "disk speed", odd, cause, fix)]
    if least < SLOWEST_BYTES_PER_S or save_s > LONG_SAVE_S:
        cause = says or "slow for checkpoints: 12 bytes of each trained weight"
        fix = "set output: to a faster disk, or save less often:   checkpoint: {every: 30min}"
        return [NodeFinding("warn", "disk speed", words, cause, fix)]
    low, high = f"{least / 1e6:,.0f}", f"{max(found.values()) / 1e6:,.0f} MB/s"
    shown = high if len(found) == 1 else f"{low} to {high}, all at once"
    return [NodeFinding("ok", "disk speed", {"all": f"{shown}; {says}" if says else shown})]


def judge_time_left(left_s: float | None, run_s: float | None, scheduler: str) -> NodeFinding:
    """Does the run end before the scheduler ends the job? None: no limit, or a run whose end is not known."""
    if left_s is None:
        return NodeFinding("ok", "time limit", {"job": "none"})
    left = f"{format_seconds(left_s)} left"
    if run_s is None or run_s <= left_s:
        needs = "" if run_s is None else f", and the whole run takes about {format_seconds(run_s)}"
        return NodeFinding("ok", "time limit", {"job": left + needs})
    cause = f"{scheduler} ends the job before the run is done"
    fix = (
        "ask for more time, or let   duoka train CONFIG --slurm ...   submit it: it saves, is queued again and goes on"
    )
    if scheduler == "Kubernetes":
        fix = "raise activeDeadlineSeconds of the Job, or leave it out"
    shown = f"{left}; the whole run takes about {format_seconds(run_s)}"
    return NodeFinding("warn", "time limit", {"job": shown}, cause, fix)
