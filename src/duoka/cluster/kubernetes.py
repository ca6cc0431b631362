"""`duoka train X --k8s image=...,nodes=2,gpus=8,volume=data:/data`: manifests that `kubectl apply -f` takes.

Called by cli/kubernetes.py. An Indexed Job with a headless Service, or a Kubeflow TrainJob with a runtime of its own;
in each pod one `duoka train X` finds its place by itself (process/kubernetes.py). Nothing here talks to a cluster.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duoka.cluster.asked import read_pairs
from duoka.errors import ConfigError, DoctorError, DoesNotFit, StoppedEarly
from duoka.runs.heart import SLOW_S
from duoka.units import parse_seconds

EXAMPLE = "image=IMAGE,nodes=2,gpus=8,volume=CLAIM:/data"
KEYS = (
    "image", "name", "namespace", "nodes", "gpus", "cpus", "mem", "shm", "volume", "secret", "queue", "priority",
    "account", "pull", "select", "kind", "port", "time", "failures",
)  # fmt: skip
KINDS = ("job", "trainjob")
CONFIG_FOLDER = "/duoka"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Of Services and TrainJobs (RFC 1035): the API server refuses one that begins with a digit.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DOTTED = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LONGEST_NAME = 50  # a pod's host name is NAME-node-0-INDEX, and has at most 63 letters
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MARGIN_S = 60.0  # for the launcher, beside what its ranks are allowed
_FOREVER_S = 86400.0
_NEVER_BETTER = (ConfigError.exit_code, DoctorError.exit_code, DoesNotFit.exit_code)
_TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_CONTAINER = {"job": "duoka", "trainjob": "node"}  # the name that Kubeflow looks for


@dataclass(frozen=True)
class Asked:
    """What is asked of Kubernetes."""

    image: str
    name: str
    volumes: tuple[tuple[str, str], ...]  # (claim, where it is mounted)
    namespace: str
    least: int
    nodes: int
    gpus: int
    cpus: str
    mem: str
    shm: str
    secret: str
    queue: str
    priority: str
    account: str
    pull: str
    select: tuple[str, str] | None
    kind: str
    port: int
    time_s: int
    failures: int

    @property
    def home(self) -> str:
        """The working folder in the container: relative paths of the config are on this volume."""
        return self.volumes[0][1]


@dataclass(frozen=True)
class Work:
    """The run: its config as it was written, what follows `duoka train FILE`, and what its faults block says."""

    config_name: str
    config_text: str
    words: Sequence[str]
    output: str
    stop_within_s: float | None
    hang_after_s: float | None


def read_asked(text: str, default_name: str) -> Asked:
    """`key=value,key=value`. Raises ConfigError for what is missing, not known, or no such value."""
    pairs = read_pairs("--k8s", text, KEYS, EXAMPLE)
    given = dict(pairs)
    volumes = tuple(_read_volume(value) for key, value in pairs if key == "volume")
    if "image" not in given:
        raise ConfigError("--k8s: no image is given", fix=f"write for example:   {EXAMPLE}")
    if not volumes:
        raise ConfigError(
            "--k8s: no volume is given: the run would be gone with its pods",
            fix=f"name a PersistentVolumeClaim that all pods can mount:   {EXAMPLE}",
        )
    name = given.get("name") or _name_of(default_name)
    least, nodes = _read_nodes(given.get("nodes", "1"))
    kind = given.get("kind", "job")
    if kind not in KINDS:
        raise ConfigError(f'--k8s: kind is "{kind}"', fix=f"write kind={' or kind='.join(KINDS)}")
    if kind == "trainjob" and least != nodes:
        raise ConfigError("--k8s: a TrainJob has a fixed number of nodes", fix=f"write nodes={nodes}, or kind=job")
    words = {key: given.get(key, "") for key in ("namespace", "secret", "priority", "account", "pull", "queue")}
    if not _NAME.fullmatch(name):
        whence = "" if "name" in given else f"what is left of the run folder {default_name}"
        fix = "Kubernetes takes a-z, 0-9 and -, a letter first; write for example:   name=my-run"
        raise ConfigError(f'--k8s: name is "{name}"', where=whence, fix=fix)
    for key, value in words.items():
        if value:
            _check(key, value, _DOTTED if key == "secret" else _LABEL)
    amounts = {key: _check(key, given[key], _QUANTITY) if key in given else "" for key in ("cpus", "mem")}
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"--k8s: name has {len(name)} letters", fix=f"write name=... with at most {_LONGEST_NAME}")
    return Asked(
        given["image"], name, volumes, least=least, nodes=nodes, kind=kind, select=_read_select(given),
        time_s=_read_time(given), gpus=_whole("gpus", given.get("gpus", "0")),
        port=_whole("port", given.get("port", "29500")), failures=_whole("failures", given.get("failures", "6")),
        shm=_check("shm", given.get("shm", "8Gi"), _QUANTITY), **words, **amounts,
    )  # fmt: skip


def _name_of(run: str) -> str:
    """The run folder's, as far as Kubernetes takes it: 7b-sft is run-7b-sft; of Chinese letters nothing is left."""
    word = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if word[:1].isdecimal():
        word = f"run-{word}"
    return word[:_LONGEST_NAME].strip("-")


def _check(key: str, value: str, form: re.Pattern[str]) -> str:
    if not form.fullmatch(value):
        raise ConfigError(f'--k8s: {key} is "{value}"', fix="Kubernetes takes a-z, 0-9 and -; amounts as 64Gi or 500m")
    return value


def _whole(key: str, value: str) -> int:
    if not value.isdecimal() or (key == "port" and not 1024 <= int(value) <= 65535):
        raise ConfigError(f'--k8s: {key} is "{value}"', fix=f"write a number:   {key}={29500 if key == 'port' else 8}")
    return int(value)


def _read_nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(
            f'--k8s: nodes is "{text}"', fix="write nodes=2, or the fewest and the most that train:   nodes=1:2"
        )
    return int(low), int(high or low)


def _read_volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not path.startswith("/") or posixpath.normpath(path) in ("/", CONFIG_FOLDER, "/dev/shm") or ":" in path:
        raise ConfigError(f'--k8s: volume is "{text}"', fix="write a claim and where to mount it:   volume=CLAIM:/data")
    return _check("volume", claim, _LABEL), posixpath.normpath(path)


def _read_select(given: dict[str, str]) -> tuple[str, str] | None:
    if "select" not in given:
        return None
    key, _, value = given["select"].partition(":")
    if not value:
        raise ConfigError(f'--k8s: select is "{given["select"]}"', fix="write a label of nodes:   select=LABEL:VALUE")
    return key, value


def _read_time(given: dict[str, str]) -> int:
    if "time" not in given:
        return 0
    try:
        return int(parse_seconds(given["time"]))
    except ValueError as error:
        raise ConfigError(f"--k8s: time: {error}", fix="write for example:   time=2h") from None


def render(asked: Asked, work: Work) -> list[dict[str, Any]]:
    """The documents, in the order in which they are to be made."""
    output = posixpath.normpath(posixpath.join(asked.home, work.output))
    if not any(output.startswith(f"{path}/") for _, path in asked.volumes):
        mounts = ", ".join(path for _, path in asked.volumes)
        raise ConfigError(
            f"--k8s: output is {output}, which is on no volume ({mounts}): checkpoints would be gone with the pods",
            fix="write a path on a volume:   output=runs/NAME",
        )
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(asked),
              "data": {work.config_name: work.config_text}}  # fmt: skip
    pod = _pod(asked, work, output)
    return [config, *(_job(asked, pod) if asked.kind == "job" else _train_job(asked, pod))]


def _metadata(asked: Asked, **more: Any) -> dict[str, Any]:
    where = {"namespace": asked.namespace} if asked.namespace else {}
    return {"name": asked.name, **where, "labels": {"app.kubernetes.io/name": "duoka"}, **more}


def _queued(asked: Asked) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": asked.queue} if asked.queue else {}
    return _metadata(asked, labels={"app.kubernetes.io/name": "duoka", **labels})


def grace_s(stop_within_s: float | None) -> int:
    """From SIGTERM to SIGKILL: as long as a save may take. A pod that has saved ends at once."""
    allowed_s = SLOW_S if stop_within_s is None else min(stop_within_s, _FOREVER_S)
    return int(allowed_s + _MARGIN_S)


def _pod(asked: Asked, work: Work, output: str) -> dict[str, Any]:
    claims = list(dict.fromkeys(claim for claim, _ in asked.volumes))
    volumes: list[dict[str, Any]] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    volumes += [
        {"name": "config", "configMap": {"name": asked.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": asked.shm}},
    ]
    pod: dict[str, Any] = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s(work.stop_within_s),
        "containers": [_container(asked, work, output, claims)], "volumes": volumes,
    }  # fmt: skip
    if asked.nodes > 1 and asked.kind == "job":
        pod["subdomain"] = asked.name
    if asked.account:
        pod["serviceAccountName"] = asked.account
    if asked.priority:
        pod["priorityClassName"] = asked.priority
    if asked.pull:
        pod["imagePullSecrets"] = [{"name": asked.pull}]
    if asked.select:
        pod["nodeSelector"] = dict([asked.select])
    return pod


def _container(asked: Asked, work: Work, output: str, claims: list[str]) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": f"volume-{claims.index(claim)}", "mountPath": path} for claim, path in asked.volumes
    ]
    mounts += [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"},
    ]  # fmt: skip
    container: dict[str, Any] = {
        "name": _CONTAINER[asked.kind], "image": asked.image,
        "command": ["duoka", "train", f"{CONFIG_FOLDER}/{work.config_name}", *work.words],
        "workingDir": asked.home, "env": _variables(asked), "volumeMounts": mounts,
    }  # fmt: skip
    if asked.secret:
        container["envFrom"] = [{"secretRef": {"name": asked.secret}}]
    amounts = {"cpu": asked.cpus, "memory": asked.mem, "nvidia.com/gpu": str(asked.gpus or "")}
    if wanted := {name: amount for name, amount in amounts.items() if amount}:
        container["resources"] = {"requests": wanted, "limits": dict(wanted)}
    if work.hang_after_s != math.inf:
        patience = [] if work.hang_after_s is None else ["--hang-after", f"{work.hang_after_s:g}"]
        container["livenessProbe"] = {
            "exec": {"command": ["python", "-m", "duoka.runs.alive", output, *patience]},
            "periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": 3, "terminationGracePeriodSeconds": 60,
        }  # fmt: skip
    return container


def _variables(asked: Asked) -> list[dict[str, str]]:
    """Caches on the volume are shared by the pods; of a TrainJob Kubeflow says who is where."""
    found = {"DUOKA_CACHE": f"{asked.home}/.cache/duoka", "HF_HOME": f"{asked.home}/.cache/huggingface"}
    if asked.kind == "job" and asked.nodes > 1:
        counts = {"NNODES": asked.nodes}
        if asked.least < asked.nodes:
            counts = {"MIN_NNODES": asked.least, "MAX_NNODES": asked.nodes}
        found |= {name: str(count) for name, count in counts.items()}
        found |= {"MASTER_ADDR": f"{asked.name}-0.{asked.name}", "MASTER_PORT": str(asked.port)}
    return [{"name": name, "value": value} for name, value in found.items()]


def _job_spec(asked: Asked, pod: dict[str, Any]) -> dict[str, Any]:
    """What was refused is refused again; what was saved and stopped, or moved by the cluster, is no failure."""
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": _codes(asked, *_NEVER_BETTER)},
        {"action": "Ignore", "onExitCodes": _codes(asked, StoppedEarly.exit_code)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "backoffLimit": asked.failures, "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": "duoka"}}, "spec": pod},
    }  # fmt: skip


def _codes(asked: Asked, *codes: int) -> dict[str, Any]:
    return {"containerName": _CONTAINER[asked.kind], "operator": "In", "values": list(codes)}


def _job(asked: Asked, pod: dict[str, Any]) -> list[dict[str, Any]]:
    spec = {"completionMode": "Indexed", "completions": asked.nodes, "parallelism": asked.nodes,
            **({"activeDeadlineSeconds": asked.time_s} if asked.time_s else {}), **_job_spec(asked, pod)}  # fmt: skip
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(asked), "spec": spec}
    if asked.nodes == 1:
        return [job]
    # Pods must find each other before they are ready.
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": _metadata(asked),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True,
                 "selector": {"batch.kubernetes.io/job-name": asked.name}, "ports": [{"port": asked.port}]},
    }  # fmt: skip
    return [service, job]


def _train_job(asked: Asked, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """A runtime of this run alone: what the cluster's own ones leave out (volumes, probes, exit codes) is in it."""
    job = {"metadata": {"labels": _TRAINER_LABEL}, "spec": _job_spec(asked, pod)}
    kubeflow = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": kubeflow, "kind": "TrainingRuntime", "metadata": _metadata(asked),
        "spec": {"mlPolicy": {"numNodes": asked.nodes, "torch": {}},
                 "template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}}},
    }  # fmt: skip
    train_job = {
        "apiVersion": kubeflow, "kind": "TrainJob", "metadata": _queued(asked),
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": asked.name}, "trainer": {"numNodes": asked.nodes},
                 **({"activeDeadlineSeconds": asked.time_s} if asked.time_s else {})},
    }  # fmt: skip
    return [runtime, train_job]
