"""Kubernetes without Kubernetes: manifests are golden files and hold against the published schemas, strictly; a pod's
variables become a place; the probe tells a run that hangs from one that loads.

SKIPPED, loudly, where the schemas are not installed (they come with `pip install -e '.[dev]'`).
"""

from __future__ import annotations

import copy
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from needs import need

from duoka.cli import cli
from duoka.cluster.kubernetes import grace_s, read_asked
from duoka.cluster.launch import wait_for_name
from duoka.errors import ConfigError
from duoka.process.kubernetes import adopt_pod_place, lonely_pod
from duoka.runs.alive import find_silence, main
from duoka.runs.folder import RunFolder
from duoka.runs.heart import Beat, Heart

need("kubernetes_validate", "kubernetes-validate")
need("kubeflow_trainer_api", "kubeflow-trainer-api")

GOLDEN = Path(__file__).parents[1] / "cluster" / "golden"
YAML = "model: {name: demo}\ndata: {train: [chats.jsonl]}\nfaults: {stop_within: 10min}\noutput: runs/sft\n"
OLDEST, NEWEST = "1.31", "1.37"  # of Kubernetes: podFailurePolicy is stable since 1.31
ASKED = {
    "job": "image=ghcr.io/me/duoka:1,nodes=2,gpus=8,cpus=64,mem=512Gi,volume=data:/data,volume=runs:/runs,secret=hub,"
    "queue=team,time=2h",
    "trainjob": "kind=trainjob,image=ghcr.io/me/duoka:1,nodes=4,gpus=8,volume=data:/data,priority=high,account=trainer,"
    "pull=registry,select=cloud.google.com/gke-accelerator:nvidia-h100-80gb",
    "elastic": "image=ghcr.io/me/duoka:1,nodes=1:2,volume=data:/data",
    "alone": "image=ghcr.io/me/duoka:1,gpus=1,volume=data:/data,namespace=me,name=first-try",
}


def render(folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str, *words: str) -> str:
    monkeypatch.chdir(folder)
    (folder / "sft.yaml").write_text(YAML, encoding="utf-8")
    done = CliRunner().invoke(
        cli, ["train", "sft.yaml", *words, "--k8s", asked, "-o", "job.yaml"], standalone_mode=False
    )
    assert done.exception is None and done.return_value == 0, done.output
    assert "kubectl" in done.stderr and not done.stdout
    return (folder / "job.yaml").read_text(encoding="utf-8")


def find_faults(document: dict[str, Any]) -> str:
    """What the published schemas say; empty: nothing."""
    if document["apiVersion"].startswith("trainer.kubeflow.org"):
        from kubeflow_trainer_api import models

        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        try:
            back = model.from_dict(document).to_dict()
        except ValueError as error:
            return str(error)
        return "" if back == document else f"a field that is not known: {back} is left of {document}"
    import kubernetes_validate

    for version in (OLDEST, NEWEST):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return f"{version}: {error}"
    return ""


@pytest.mark.parametrize("name", list(ASKED))
def test_manifests_are_the_golden_ones_and_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written anew on purpose only: DUOKA_WRITE_GOLDEN=1."""
    text = render(tmp_path, monkeypatch, ASKED[name], "optim.lr=1e-4")
    golden = GOLDEN / f"k8s-{name}.yaml"
    if os.environ.get("DUOKA_WRITE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    for document in yaml.safe_load_all(text):
        assert not find_faults(document), document["kind"]


def test_a_wrong_field_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, and whatever is wrong: its name, its type, its place."""
    job = list(yaml.safe_load_all(render(tmp_path, monkeypatch, ASKED["job"])))[-1]
    runtime, train_job = list(yaml.safe_load_all(render(tmp_path, monkeypatch, ASKED["trainjob"])))[-2:]
    node = ("spec", "template", "spec", "replicatedJobs", 0, "template")
    pod, inner = ("spec", "template", "spec"), ("spec", "template", "spec", "containers", 0)
    wrong: list[tuple[dict[str, Any], tuple[Any, ...], str, Any]] = [
        (job, ("spec",), "completionsMode", "Indexed"),
        (job, ("spec",), "completions", "two"),
        (job, ("spec",), "podFailurePolicy", {"rule": []}),
        (job, pod, "terminationGracePeriodSeconds", "30s"),
        (job, inner, "livenessProbe", {"exec": "true"}),
        (job, inner, "volumeMount", []),
        (runtime, ("spec", "mlPolicy"), "numNodes", "two"),
        (runtime, (*node, "spec"), "backOffLimit", 6),
        (runtime, (*node, *inner), "comand", ["duoka"]),
        (train_job, ("spec",), "runtime", {}),
        (train_job, ("spec", "trainer"), "numNodes", "two"),
    ]
    for document, path, key, value in wrong:
        broken = copy.deepcopy(document)
        place: Any = broken
        for step in path:
            place = place[step]
        place[key] = value
        assert find_faults(broken), f"{key} = {value} went through"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("nodes=2,volume=data:/data", "no image"), ("image=a,nodes=2", "no volume"),
        ("image=a,volume=data:/data,nods=2", "did you mean nodes?"), ("image=a,volume=data", 'volume is "data"'),
        ("image=a,volume=data:/dev/shm", "volume is"), ("image=a,volume=data:/data,nodes=0", 'nodes is "0"'),
        ("image=a,volume=data:/data,nodes=2:1", "nodes is"), ("image=a,volume=data:/data,kind=pod", 'kind is "pod"'),
        ("image=a,volume=data:/data,mem=lots", 'mem is "lots"'), ("image=a,volume=data:/data,gpus=all", "gpus is"),
        ("image=a,volume=data:/data,name=My_Run", "name is"), ("image=a,volume=data:/data,time=soon", "time"),
        ("image=a,volume=data:/data,kind=trainjob,nodes=1:2", "fixed number"),
        (f"image=a,volume=data:/data,name={'n' * 60}", "60 letters"), ("image=a,volume=data:/data,port=80", "port is"),
        ("image=a,volume=data:/data,select=gpu", "select is"),
    ],
)  # fmt: skip
def test_what_is_misspelt_or_missing_is_refused(asked: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_asked(asked, "run")
    assert words in str(caught.value)


def test_what_a_pod_cannot_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "more.yaml").write_text("extends: sft.yaml\n", encoding="utf-8")
    asked = ["--k8s", "image=a,volume=data:/data"]
    for words, expected in (
        (["more.yaml", *asked], "extends another file"),
        (["sft.yaml", "output=/elsewhere/run", *asked], "on no volume"),
        (["sft.yaml", *asked, "--slurm", "nodes=2"], "--slurm and --k8s are both given"),
        (["sft.yaml", *asked, "--nodes", "2"], "not for --k8s"),
        (["sft.yaml", "-o", "job.yaml"], "-o is for what --k8s writes"),
    ):
        done = CliRunner().invoke(cli, ["train", *words], standalone_mode=False)
        assert isinstance(done.exception, ConfigError) and expected in str(done.exception), (words, done.output)


def test_the_time_to_save_is_the_runs_own() -> None:
    assert [grace_s(one) for one in (None, 600.0, float("inf"))] == [1860, 660, 86460]


IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "r-node-0-0.r",
       "PET_MASTER_PORT": "29400", **IN_POD}  # fmt: skip
PLACE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "r-node-0-0.r", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PET, {**PLACE, "NPROC_PER_NODE": "auto"}),
        # PyTorchJob's operator says both; RANK is the pod's.
        ({**PET, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "r-master-0", "MASTER_PORT": "23456"},
         {**PLACE, "NPROC_PER_NODE": "auto", "MASTER_ADDR": "r-master-0", "MASTER_PORT": "23456"}),
        ({**IN_POD, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
         {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "r-worker-0:29400", "PET_MAX_RESTARTS": "3"},
         {"MIN_NNODES": "1", "MAX_NNODES": "4", "MASTER_ADDR": "r-worker-0", "MASTER_PORT": "29400",
          "MAX_RESTARTS": "3"}),
        ({"NNODES": "2", "MASTER_ADDR": "r-0.r", "MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1"},
         {"NNODES": "2", "MASTER_ADDR": "r-0.r", "MASTER_PORT": "29500", "NODE_RANK": "1"}),
        ({"NNODES": "2", "NODE_RANK": "0", "JOB_COMPLETION_INDEX": "1"}, {"NNODES": "2", "NODE_RANK": "0"}),
        ({"JOB_COMPLETION_INDEX": "3"}, {}),
        # What torchrun started in such a pod is a rank.
        ({**PET, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
         {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}),
        # LLaMA-Factory's line where a cluster counts machines: NNODES=$WORLD_SIZE NODE_RANK=$RANK.
        *[
            ({**where, "RANK": rank, "WORLD_SIZE": size, "NNODES": size, "NODE_RANK": rank},
             {"NNODES": size, "NODE_RANK": rank})
            for where in ({}, IN_POD) for rank, size in (("1", "2"), ("0", "1"))
        ],
        ({"RANK": "3", "WORLD_SIZE": "4", "NNODES": "2", "NODE_RANK": "1"},
         {"RANK": "3", "WORLD_SIZE": "4", "NNODES": "2", "NODE_RANK": "1"}),
    ],
)  # fmt: skip
def test_a_pods_variables_are_a_place(given: dict[str, str], expected: dict[str, str]) -> None:
    env = dict(given)
    adopt_pod_place(env)
    theirs = ("PET_", "KUBERNETES_", "JOB_")
    assert {name: value for name, value in env.items() if not name.startswith(theirs)} == expected


def test_a_pod_of_several_that_would_train_alone_is_told() -> None:
    assert "index 3" in lonely_pod({"JOB_COMPLETION_INDEX": "3"})
    assert not lonely_pod({"JOB_COMPLETION_INDEX": "3", "NNODES": "4"}) and not lonely_pod({})


def test_a_name_that_comes_with_its_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a pod a name that is not known is wrong at once."""
    said: list[str] = []
    wait_for_name("no.such.name.invalid", said.append)
    assert not said
    answers = iter([OSError(-2, "Name or service not known")] * 2)

    def look(host: str, port: object) -> list[object]:
        for error in answers:
            raise error
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr("duoka.cluster.launch.ASK_NAME_EVERY_S", 0.01)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    wait_for_name("sft-0.sft", said.append)
    assert said == ["waiting for sft-0.sft to be known (Name or service not known)"]


def test_the_probe_tells_a_hang_from_a_load(tmp_path: Path) -> None:
    now = 1e6
    working = Beat(phase="forward", is_slow=False, time=now - 100, slowest_s=1.0)
    hangs = Beat(phase="backward", is_slow=False, time=now - 500, slowest_s=1.0)
    loads = Beat(phase="start", is_slow=True, time=now - 500)
    assert find_silence([], now, 0, None) is None, "nothing is heard yet"
    assert find_silence([hangs], now, 0, None) == 500
    assert find_silence([hangs, working], now, 0, None) is None, "a hang is that no rank moves"
    assert find_silence([loads], now, 0, None) is None
    assert find_silence([hangs], now, now - 400, None) is None, "of the start before this container's"
    assert find_silence([hangs], now, 0, 1000.0) is None and find_silence([working], now, 0, 10.0) is None
    assert find_silence([Beat(phase="forward", is_slow=False, time=now - 131)], now, 0, 10.0) is not None

    run = RunFolder(tmp_path / "run")
    run.make()
    assert main([str(run.path)]) == 0
    heart = Heart(run, 0)
    heart.warm_up()
    heart.tell("forward", 1)
    assert main([str(run.path), "--hang-after", "30"]) == 0
    assert abs(time.time() - heart.beat.time) < 60, "by the clock of this machine"
    heart.close()
