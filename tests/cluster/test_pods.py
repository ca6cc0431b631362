"""What a manifest of `--k8s` starts in its pods, run as a kubelet would: two network namespaces instead of two nodes.

Command, environment and working folder are read from the manifest. The volume is this machine's disk; the name of the
first pod becomes known late, as it does in a cluster. SKIPPED, loudly, where there can be no namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespaces import Network, machines, why_not
from test_two_machines import WITHIN_S, same_bits, train_alone, write_home

from duoka.cluster.fault_injection import wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"NO MACHINES: {WHY_NOT}")


def write_manifest(home: Path, *asked: str) -> dict[str, Any]:
    """The container of its pods; what it mounts at /duoka lies in the folder `mounted`."""
    words = ",".join(["image=duoka:test", "nodes=2", f"volume=claim:{home}", *asked])
    command = [sys.executable, "-m", "duoka", "train", "run.yaml", "--k8s", words, "-o", "job.yaml"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    config, *_, workload = yaml.safe_load_all((home / "job.yaml").read_text())
    (home / "mounted").mkdir(exist_ok=True)
    for name, text in config["data"].items():
        (home / "mounted" / name).write_text(text)
    if workload["kind"] == "TrainJob":
        runtime = list(yaml.safe_load_all((home / "job.yaml").read_text()))[1]
        workload = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == str(home)
    return dict(container)


def translate(home: Path, command: list[str]) -> list[str]:
    """As in the image, where `python` and `duoka` are those of its environment."""
    program = {"duoka": [sys.executable, "-m", "duoka"], "python": [sys.executable]}[command[0]]
    return [*program, *(word.replace("/duoka/", f"{home}/mounted/") for word in command[1:])]


def start_pod(net: Network, home: Path, container: dict[str, Any], index: int, **pet: str) -> subprocess.Popen[str]:
    env = {**os.environ, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index), **pet}
    env |= {one["name"]: one["value"] for one in container["env"]}
    return subprocess.Popen(
        net.inside(index, *translate(home, container["command"])), cwd=home, env=env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def end_all(pods: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [pod.communicate(timeout=WITHIN_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()


@pytest.mark.timeout(600)
def test_the_pods_of_a_job_train_together(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 1)
    container = write_manifest(home)
    with machines(tmp_path / "net") as net:
        for node in net.nodes:
            node.know("localhost", "127.0.0.1")
        net.nodes[0].know("out-0.out", net.nodes[0].address)
        pods = [start_pod(net, home, container, index) for index in (1, 0)]
        assert pods[0].stdout is not None
        before = next((line for line in pods[0].stdout if "waiting for" in line), "")
        net.nodes[1].know("out-0.out", net.nodes[0].address)
        late, first = end_all(pods)
    assert [pod.returncode for pod in pods] == [0, 0], first + late
    run = RunFolder(home / "out")
    assert "waiting for out-0.out to be known" in before, late
    assert [step["step"] for step in read_steps(run)] == [1, 2, 3, 4, 5] and (home / ".cache" / "duoka").is_dir()
    probe = subprocess.run(
        translate(home, container["livenessProbe"]["exec"]["command"]), capture_output=True, text=True, timeout=60
    )
    assert probe.returncode == 0, probe.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_drained_pod_and_a_train_job_cost_no_bit(tmp_path: Path, tiny_model: Path) -> None:
    """A pod of a Job gets SIGTERM: all save and end with 75, which the manifest starts again. Then the same as a
    TrainJob, with the variables that Kubeflow sets."""
    home = write_home(tmp_path / "home", tiny_model, 8)
    run = RunFolder(home / "out")
    container = write_manifest(home)
    with machines(tmp_path / "net") as net:
        for node in net.nodes:
            node.know("localhost", "127.0.0.1")
            node.know("out-0.out", net.nodes[0].address)
            node.know("out-node-0-0.out", net.nodes[0].address)
        pods = [start_pod(net, home, container, index) for index in (0, 1)]
        wait_for_ranks(run, 2, lambda beat: beat.step >= 3, within_s=WITHIN_S)
        pods[1].send_signal(signal.SIGTERM)
        said = end_all(pods)
        assert [pod.returncode for pod in pods] == [75, 75], said
        stopped_at = len(read_steps(run))
        assert 3 <= stopped_at < 40, stopped_at
        train_job = write_manifest(home, "kind=trainjob")
        pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_PORT": "29400"}
        pods = [
            start_pod(net, home, train_job, index, **pet, PET_MASTER_ADDR="out-node-0-0.out", PET_NODE_RANK=str(index))
            for index in (0, 1)
        ]
        said = end_all(pods)
        assert [pod.returncode for pod in pods] == [0, 0], said
    assert [step["step"] for step in read_steps(run)] == list(range(1, 41)), "each step once"
    assert same_bits(run, train_alone(home))
