"""One command trains on two machines over ssh, as one machine would; and what happens when one of them goes.

The machines are network namespaces with an sshd each, made and removed here. SKIPPED, loudly, where they cannot be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import OWN_SCRIPT, run_duoka
from namespaces import Network, machines, why_not
from safetensors.torch import load_file
from tiny import write_conversations

from duoka.cluster.fault_injection import wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"NO MACHINES: {WHY_NOT}")
YAML = (
    "model: {model}\ndata: {{train: [{data}], max_length: 64}}\noptim: {{lr: 2e-3}}\n"
    "train: {{epochs: {epochs}, global_batch: 8, precision: fp32}}\n"
    "checkpoint: {{every: 2}}\nlog: {{every: 1}}\noutput: out\n"
)
WITHIN_S = 240


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    before = set(os.listdir("/dev/shm"))
    with machines(tmp_path / "net") as made:
        yield made
        alone = {node.sshd.pid for node in made.nodes if node.sshd is not None}
        deadline = time.monotonic() + 20
        while left := {pid for node in made.nodes for pid in node.pids()} - alone:
            assert time.monotonic() < deadline, f"processes are left: {[describe(pid) for pid in left]}"
            time.sleep(0.2)
    made_here = {name for name in set(os.listdir("/dev/shm")) - before if "duoka" in name}
    assert not made_here, f"shared memory is left: {made_here}"


def describe(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"{pid}, gone"


def write_home(folder: Path, model: Path, epochs: int) -> Path:
    folder.mkdir()
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    (folder / "run.yaml").write_text(YAML.format(model=model, data=data, epochs=epochs), encoding="utf-8")
    return folder


def start(net: Network, home: Path, *words: str) -> subprocess.Popen[str]:
    """From a terminal on machine a."""
    command = net.inside(0, sys.executable, "-m", "duoka", "train", "run.yaml", *words)
    return subprocess.Popen(
        command, cwd=home, env={**os.environ, "DUOKA_SSH": net.ssh}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
    return process.returncode, out, err


def train_alone(home: Path) -> RunFolder:
    """Two processes of this machine."""
    done = run_duoka("train", "run.yaml", "output=alone", "--nproc", "2", cwd=home, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    return RunFolder(home / "alone")


def same_bits(one: RunFolder, other: RunFolder) -> bool:
    ours, theirs = (load_file(run.final / "model.safetensors") for run in (one, other))
    same = all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    return same and [step["loss"] for step in read_steps(one)] == [step["loss"] for step in read_steps(other)]


@pytest.mark.timeout(600)
def test_one_command_trains_on_two_machines_as_on_one(tmp_path: Path, tiny_model: Path, net: Network) -> None:
    home = write_home(tmp_path / "home", tiny_model, 1)
    code, out, err = finish(start(net, home, "--hosts", "a,b"))
    assert code == 0, err
    run = RunFolder(home / "out")
    assert out.count("\nstep     1 ") == 1 and "[b] step" not in out, f"each line once: {out}"
    assert "2 machines over ssh: a, b; the rendezvous is 10.77.0.1:" in err and "Traceback" not in err, err
    logs = sorted(path.name for path in run.logs.glob("rank*.log"))
    assert logs == ["rank00000.log", "rank00001.log"] and "step     1 " in (run.logs / logs[0]).read_text()
    status = read_status(run)
    assert status is not None and status.state == "done"
    assert same_bits(run, train_alone(home)), "the same world, the same bits"
    assert not list(home.glob(".duoka-*")) and not (run.path / ".meeting").exists(), "nothing is left lying about"


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_ctrl_c_a_lost_machine_and_a_lost_terminal_cost_no_bit(tmp_path: Path, tiny_model: Path, net: Network) -> None:
    home = write_home(tmp_path / "home", tiny_model, 40)
    run = RunFolder(home / "out")

    (home / "hostfile").write_text("a slots=1  # as DeepSpeed has it\nb slots=1\n")

    def start_until(step: int) -> subprocess.Popen[str]:
        process = start(net, home, "--hostfile", "hostfile")
        wait_for_ranks(run, 2, lambda beat: beat.step >= step, within_s=WITHIN_S)
        return process

    process = start_until(3)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 75 and "the same command goes on" in err, err
    stopped_at = len(read_steps(run))

    process = start_until(stopped_at + 3)
    b = net.nodes[1]
    b.kill_all()
    code, _, err = finish(process)
    assert code == 5 and "b is lost" in err, err
    status = read_status(run)
    assert status is not None and status.state == "failed" and "b is lost" in status.cause, status
    net.revive(1)

    process = start_until(len(read_steps(run)) + 2)
    process.kill()
    process.wait()
    killed = time.monotonic()
    alone = {node.sshd.pid for node in net.nodes if node.sshd is not None}
    while {pid for node in net.nodes for pid in node.pids()} - alone:
        assert time.monotonic() - killed < 20, "10 s are promised, on a machine that nobody else uses"
        time.sleep(0.1)

    code, _, err = finish(start(net, home, "--hosts", "a,b"))
    assert code == 0, err
    assert [step["step"] for step in read_steps(run)] == list(range(1, 201)), "each step once"
    assert same_bits(run, train_alone(home))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", [0, 1])
def test_a_machine_that_dies_in_a_save_costs_no_bit(tmp_path: Path, tiny_model: Path, net: Network, which: int) -> None:
    """The one that writes the manifest, and the other one. The terminal's own machine goes with all that it started."""
    home = write_home(tmp_path / "home", tiny_model, 8)
    run = RunFolder(home / "out")
    process = start(net, home, "--hosts", "a,b")
    wait_for_ranks(run, 2, lambda beat: beat.step >= 5, within_s=WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while not any(name.endswith(".draft") for name in os.listdir(run.checkpoints)):
        assert time.monotonic() < deadline and process.poll() is None, "no save was seen"
    net.nodes[which].kill_all()
    code, _, err = finish(process)
    assert code == (5 if which else -signal.SIGKILL), err
    net.revive(which)
    code, _, err = finish(start(net, home, "--hosts", "a,b"))
    assert code == 0, err
    assert [step["step"] for step in read_steps(run)] == list(range(1, 41)), "each step once"
    assert same_bits(run, train_alone(home))
    assert not any(name.endswith(".draft") for name in os.listdir(run.checkpoints)), "nothing half-written is left"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_cable_that_is_pulled_for_good_ends_the_run_with_the_machines_name(
    tmp_path: Path, tiny_model: Path, net: Network
) -> None:
    home = write_home(tmp_path / "home", tiny_model, 40)
    process = start(net, home, "--hosts", "a,b")
    try:
        wait_for_ranks(RunFolder(home / "out"), 2, lambda beat: beat.step >= 3, within_s=WITHIN_S)
        net.nodes[1].unplug()
        code, _, err = finish(process)
    finally:
        net.nodes[1].plug_in()
    assert code == 5 and "b is lost" in err, err


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_folders_that_are_not_shared_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, net: Network
) -> None:
    """Machine b has another disk where the run would be."""
    home = write_home(tmp_path / "home", tiny_model, 1)
    (home / "out").mkdir()
    wrapped = tmp_path / "ssh"
    wrapped.write_text(
        "#!/bin/sh\n# As if b had a disk of its own under the same path.\n"
        f'case "$*" in *" b "*) for word; do last=$word; done; '
        f'exec unshare -m sh -c "mount -t tmpfs none {home}/out && $last";; esac\nexec {net.ssh} "$@"\n'
    )
    wrapped.chmod(0o755)
    env = {**os.environ, "DUOKA_SSH": str(wrapped)}
    command = net.inside(0, sys.executable, "-m", "duoka", "train", "run.yaml", "--hosts", "a,b")
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 3 and "b does not see what a writes" in done.stderr, done.stderr
    assert not list((home / "out").iterdir())


def test_an_own_script_meets_between_machines_by_a_line_of_torchrun(net: Network, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT, encoding="utf-8")
    meets = f"--rdzv_id=456 --rdzv_backend=c10d --rdzv_endpoint={net.nodes[0].address}:29517"
    line = (
        sys.executable,
        "-m",
        "duoka",
        "torchrun",
        "--nnodes=2",
        "--nproc_per_node=1",
        *meets.split(),
        "own.py",
        "word",
    )
    nodes = [
        subprocess.Popen(
            net.inside(number, *line), cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in (1, 0)
    ]  # fmt: skip
    ends = [finish(node) for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    logs = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("runs/own-456/logs/*"))
    said = logs + "".join(out for _, out, _ in ends)
    assert "rank 0 of 2: 3 word" in said and "rank 1 of 2: 3 word" in said, ends
