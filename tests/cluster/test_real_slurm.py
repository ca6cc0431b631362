"""A real Slurm runs what `--slurm` writes; time over, it is queued again and goes on to the same bits.

SKIPPED, loudly, where Slurm is not installed. Nightly: Slurm holds a requeued job back for two minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from slurm_bed import slurm, slurm_version, why_not
from tiny import write_conversations

from duoka.cluster.slurm import Job, follow, read_asked, submit
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

WHY_NOT = why_not()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
YAML = (
    "model: {model}\ndata: {{train: [{data}], max_length: 64}}\noptim: {{lr: 2e-3}}\n"
    "train: {{epochs: {epochs}, global_batch: 8, precision: fp32}}\ncheckpoint: {{every: 2}}\noutput: out\n"
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with slurm(tmp_path / "slurm") as env:
        yield {**env, "DUOKA_ALLOW_LOOPBACK": "1"}


def start(home: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "duoka", "train", "run.yaml", "--slurm", "partition=p,nodes=2,time=20min"]
    with (home / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=home, env=env, text=True, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )


@pytest.mark.timeout(1200)
def test_a_job_is_queued_again_when_its_time_is_over_and_ends_with_the_same_bits(
    tmp_path: Path, tiny_model: Path, env: dict[str, str]
) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model, data=data, epochs=20), encoding="utf-8")
    run = RunFolder(tmp_path / "out")
    process = start(tmp_path, env)
    try:
        wait_for(process, tmp_path, lambda: len(read_steps(run)) >= 3)
        number = re.search(r"job (\d+) is submitted", (tmp_path / "said").read_text())
        assert number is not None
        # What Slurm does 90 s before the time limit.
        subprocess.run(["scancel", "--batch", "--signal=USR2", number[1]], env=env, check=True)
        wait_for(process, tmp_path, lambda: "pending" in (tmp_path / "said").read_text().split("running", 1)[-1])
        steps_before = len(read_steps(run))
        assert 3 <= steps_before < 100, "it was stopped on its way, with a save"
        code = process.wait(600)
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    print(slurm_version(env))
    done = subprocess.run(
        [sys.executable, "-m", "duoka", "train", "run.yaml", "output=alone", "--nproc", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [step["step"] for step in read_steps(run)] == list(range(1, 101)), "each step once"
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("out", "alone"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs), "the same world, the same bits"


@pytest.mark.timeout(1200)
def test_a_drained_node_ends_its_job_and_a_failed_one_costs_no_bit(
    tmp_path: Path, tiny_model: Path, env: dict[str, str]
) -> None:
    """Drained: no new job, this one goes on. Down: Slurm ends it and queues it again, until the node is back."""
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model, data=data, epochs=20), encoding="utf-8")
    run = RunFolder(tmp_path / "out")

    def set_node(state: str) -> None:
        update = ["scontrol", "update", "nodename=n2", f"state={state}", "reason=test"]
        subprocess.run(update, env=env, check=True, capture_output=True)

    process = start(tmp_path, env)
    try:
        wait_for(process, tmp_path, lambda: len(read_steps(run)) >= 3)
        set_node("drain")
        drained_at = len(read_steps(run))
        wait_for(process, tmp_path, lambda: len(read_steps(run)) >= drained_at + 5)
        set_node("down")
        wait_for(process, tmp_path, lambda: "pending" in (tmp_path / "said").read_text().split("running", 1)[-1])
        assert len(read_steps(run)) < 100
        set_node("resume")
        code = process.wait(600)
    finally:
        process.kill()
        process.wait()
    assert code == 0, (tmp_path / "said").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "duoka", "train", "run.yaml", "output=alone", "--nproc", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [step["step"] for step in read_steps(run)] == list(range(1, 101)), "each step once"
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("out", "alone"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs), "the same world, the same bits"


def test_the_script_is_one_that_slurm_takes_and_a_wrong_word_in_it_is_not(
    tmp_path: Path, tiny_model: Path, env: dict[str, str]
) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 8, seed=2)
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model, data=data, epochs=1), encoding="utf-8")
    command = [sys.executable, "-m", "duoka", "train", "run.yaml", "--slurm", "partition=p,nodes=2,time=20min"]
    done = subprocess.run([*command, "--dry-run"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    script = done.stdout[done.stdout.index("#!/bin/bash") :]

    def is_taken(text: str) -> bool:
        (tmp_path / "job.sbatch").write_text(text)
        tried = ["sbatch", "--test-only", "job.sbatch"]
        return subprocess.run(tried, cwd=tmp_path, env=env, capture_output=True, timeout=60).returncode == 0

    assert is_taken(script)
    for right, wrong in (("nodes=2", "nodes=two"), ("partition=p", "partition=q"), ("time=00:20:00", "time=20 days")):
        assert right in script and not is_taken(script.replace(right, wrong)), wrong


@pytest.mark.timeout(300)
def test_the_doctor_asks_slurm_for_nodes_and_looks_at_each(tmp_path: Path, env: dict[str, str]) -> None:
    asked = ["--slurm", "partition=p,nodes=2", "--level", "net", "--json"]
    command = [sys.executable, "-m", "duoka", "doctor", *asked]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert sorted(found["reach"]["nodes"]) == ["n1", "n2"] and found["links"]["severity"] == "ok", done.stdout
    assert found["exchange"]["severity"] == "ok", found["exchange"]
    left = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True)
    assert not left.stdout, "the job that the doctor had is over"


@pytest.mark.timeout(600)
def test_a_run_that_is_cancelled_saves_and_is_not_queued_again(
    tmp_path: Path, tiny_model: Path, env: dict[str, str]
) -> None:
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model, data=data, epochs=60), encoding="utf-8")
    run = RunFolder(tmp_path / "out")
    process = start(tmp_path, env)
    try:
        wait_for(process, tmp_path, lambda: len(read_steps(run)) >= 3)
        stop = [sys.executable, "-m", "duoka", "runs", "stop", "out"]
        done = subprocess.run(stop, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        code = process.wait(120)
    finally:
        process.kill()
        process.wait()
    said, last = (tmp_path / "said").read_text(), len(read_steps(run))
    assert code == 75 and "pending" not in said.split("running", 1)[-1], said
    assert 3 <= last < 300 and (run.checkpoints / f"step-{last:08d}").is_dir(), sorted(run.checkpoints.iterdir())


STAND_IN = """
import json, os, signal, sys, time
from duoka.process.slurm import slurm_variables
place = slurm_variables(os.environ)
print("place " + json.dumps(place, sort_keys=True), flush=True)
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit(0)
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
open(f"ready-{place['NODE_RANK']}", "w").close()
time.sleep(100)
"""


@pytest.mark.timeout(500)
def test_slurm_starts_places_tells_and_requeues_what_the_script_says(tmp_path: Path, env: dict[str, str]) -> None:
    """The script and the following, with a stand-in that trains nothing: cheap, but for Slurm's two minutes."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    job = Job(
        read_asked("partition=p,nodes=2,time=20min"), (sys.executable, "stand_in.py"), str(tmp_path), tmp_path / "out"
    )
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, env[name])
        number = submit(job, "duoka train run.yaml --slurm ...")
        telling = threading.Thread(target=tell_when_ready, args=(tmp_path, number, env, said))
        telling.start()
        verdict = follow(job, number, said.append)
        telling.join()
        # A command that fails at once: its exit code is the job's, and no requeue.
        failing = Job(job.asked, (sys.executable, "-c", "raise SystemExit(6)"), str(tmp_path), tmp_path / "bad")
        bad = follow(failing, submit(failing, "x"), said.append)
    assert verdict.exit_code == 0 and bad.exit_code == 6, (said, verdict, bad)
    states = [line.split(": ")[1].split(" ")[0] for line in said if line.startswith(f"job {number}:")]
    # The second time it is over before the next look.
    assert states.count("running") in (1, 2) and states[-1] == "completed", states
    log = Path(job.log.replace("%j", number)).read_text()
    places = [json.loads(line.removeprefix("place ")) for line in log.splitlines() if line.startswith("place ")]
    assert sorted(place["NODE_RANK"] for place in places) == ["0", "0", "1", "1"], log
    assert len({place["MASTER_PORT"] for place in places}) == 1 and {p["MASTER_ADDR"] for p in places} == {"127.0.0.1"}


def tell_when_ready(folder: Path, number: str, env: dict[str, str], said: list[str]) -> None:
    """What Slurm does 90 s before the time limit."""
    deadline = time.monotonic() + 60

    def is_ready() -> bool:
        return all((folder / f"ready-{node}").exists() for node in (0, 1)) and any("running" in line for line in said)

    while not is_ready() and time.monotonic() < deadline:
        time.sleep(0.1)
    subprocess.run(["scancel", "--batch", "--signal=USR2", number], env=env, check=True)


def wait_for(process: subprocess.Popen[str], home: Path, is_so: object) -> None:
    deadline = time.monotonic() + 400
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline and process.poll() is None, (home / "said").read_text()
        time.sleep(0.1)
