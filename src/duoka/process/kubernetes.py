"""This pod's place in a Job, TrainJob or PyTorchJob, in the words that other launchers use.

Kubernetes says JOB_COMPLETION_INDEX in pods of an Indexed Job; Kubeflow says PET_NNODES, PET_NODE_RANK and their kin
(torchrun's own variables), its older operator RANK and WORLD_SIZE of pods. A process that torchrun started there has
LOCAL_RANK too: it is a rank, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

IN_POD = "KUBERNETES_SERVICE_HOST"
INDEX = "JOB_COMPLETION_INDEX"
_SAME = {
    "PET_NODE_RANK": "NODE_RANK", "PET_NPROC_PER_NODE": "NPROC_PER_NODE", "PET_MASTER_ADDR": "MASTER_ADDR",
    "PET_MASTER_PORT": "MASTER_PORT", "PET_MAX_RESTARTS": "MAX_RESTARTS",
}  # fmt: skip


def adopt_pod_place(env: MutableMapping[str, str]) -> None:
    """Set NNODES, NODE_RANK and so on from what the pod was given; a place that was given already stays."""
    if "LOCAL_RANK" in env:
        return
    if env.get("PET_NNODES") and "NNODES" not in env:
        for name, value in _read_torchrun_variables(env).items():
            env.setdefault(name, value)
    elif IN_POD in env and "RANK" in env and "WORLD_SIZE" in env and "NNODES" not in env:
        env["NNODES"], env["NODE_RANK"] = env["WORLD_SIZE"], env["RANK"]
    elif not _counts_nodes(env):
        _adopt_index(env)
        return
    # Of pods, not of processes: they would be taken for a rank's.
    env.pop("RANK", None)
    env.pop("WORLD_SIZE", None)
    _adopt_index(env)


def _counts_nodes(env: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE are those of machines, as some clusters set them, and the line of LLaMA-Factory's
    guide for these: NNODES=$WORLD_SIZE NODE_RANK=$RANK."""
    place = (env.get("NNODES", "").strip(), env.get("NODE_RANK", "").strip())
    return "" not in place and place == (env.get("WORLD_SIZE"), env.get("RANK"))


def _adopt_index(env: MutableMapping[str, str]) -> None:
    is_one_of_several = env.get("NNODES", "1") != "1" or env.get("MAX_NNODES", "1") != "1"
    if env.get(INDEX) and is_one_of_several and "RANK" not in env:
        env.setdefault("NODE_RANK", env[INDEX])


def _read_torchrun_variables(env: Mapping[str, str]) -> dict[str, str]:
    found = {ours: env[theirs] for theirs, ours in _SAME.items() if env.get(theirs)}
    least, _, most = env["PET_NNODES"].partition(":")
    if most and most != least:
        found |= {"MIN_NNODES": least, "MAX_NNODES": most}
    else:
        found["NNODES"] = least
    host, _, port = env.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    if host and port.isdecimal():
        found.setdefault("MASTER_ADDR", host.strip("[]"))
        found.setdefault("MASTER_PORT", port)
    return found


def lonely_pod(env: Mapping[str, str]) -> str:
    """A note for a pod that is one of several by its index, and trains alone."""
    names = ("NNODES", "MAX_NNODES", "RANK")
    if env.get(INDEX, "0") == "0" or any(name in env for name in names):
        return ""
    text = f"this pod has the index {env[INDEX]} of an Indexed Job, and trains alone"
    return f"{text}; for one run of all pods set NNODES, MASTER_ADDR and MASTER_PORT"
