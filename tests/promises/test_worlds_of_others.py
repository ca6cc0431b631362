"""`duoka train` in a world that torchrun started, in one that it started itself, and when a rank of it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import OWN_SCRIPT, run_duoka, start_duoka
from worlds import free_port

from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.heart import read_beats
from duoka.runs.status import read_status

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "sft.yaml").write_text(
        f"model: {tiny_model}\ndata: {{train: [identity], max_length: 64}}\n"
        "train: {epochs: 1, global_batch: 16, precision: fp32}\ncheckpoint: {every: 2}\nlog: {every: 1}\n",
        encoding="utf-8",
    )
    return tmp_path


def start(home: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=home, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def run(home: Path, *command: str) -> tuple[int, str, str]:
    process = start(home, *command)
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def start_world(home: Path, *words: str, **more: str) -> list[tuple[int, str, str]]:
    """Two ranks with the variables that torchrun gives each, but forked; how each ended."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start_duoka(
            *(word.replace("{rank}", rank) for word in words), cwd=home, merged=False,
            env={**place, "RANK": rank, "LOCAL_RANK": rank, **more},
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_torchrun_and_our_own_launcher_train_the_same_and_print_once(home: Path) -> None:
    done = run_duoka("train", "sft.yaml", "output=runs/ours", "--nproc", "2", cwd=home)
    ours = done.returncode, done.stdout, done.stderr
    theirs = run(home, *TORCHRUN, "duoka", "train", "sft.yaml", "output=runs/theirs")
    losses = []
    for name, (code, out, err) in (("ours", ours), ("theirs", theirs)):
        folder = RunFolder(home / "runs" / name)
        assert code == 0, err
        assert out.count("\nstep     1 ") == 1, f"every line once, not once per rank: {out}"
        status = read_status(folder)
        assert status is not None and status.state == "done" and status.world_size == 2
        assert folder.config.is_file() and folder.plan.is_file() and json.loads(folder.env.read_text())["packages"]
        losses.append([event["loss"] for event in read_steps(folder)])
        assert not (folder.path / ".join").exists(), "the meeting place is gone"
        assert len(list((folder.path / "tensorboard").glob("events.*"))) == 1, "rank 0 writes, and nobody else"
    assert losses[0] == losses[1] and len(losses[0]) > 3

    refused = start_world(home, "train", "sft.yaml", "output=runs/theirs", "train.seed=7")
    assert all(code != 0 for code, _, _ in refused)
    said = "".join(err for _, _, err in refused)
    assert said.count("train.seed: 42 there, 7 now") == 1, f"refused with what differs, by one rank: {said}"


def test_what_mpirun_starts_is_one_world(home: Path) -> None:
    how: dict[str, Any] = {"cwd": home, "merged": False}
    job = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    ranks = [
        start_duoka("train", "sft.yaml", env={**job, "PMI_RANK": rank, "MPI_LOCALRANKID": rank}, **how) for rank in "10"
    ]
    outputs = ended_well(ranks)
    said = "".join(out for out, _ in outputs)
    status = read_status(RunFolder(home / "runs/sft"))
    assert said.count("\nstep     1 ") == 1, said
    assert status is not None and (status.state, status.world_size) == ("done", 2)


def test_a_rank_of_srun_that_is_asked_to_stop_while_it_loads_leaves_with_the_code_that_goes_on(home: Path) -> None:
    """srun and a scheduler send the signal to each rank; here the other one never comes, and both wait for it."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank, name in ("0", "SIGUSR2"), ("1", "SIGTERM"):
        env = {**place, "RANK": rank, "LOCAL_RANK": rank}
        process = start_duoka("train", "sft.yaml", f"output=runs/{name}", cwd=home, env=env, merged=False)
        waits = home / "runs" / name / (".join" if rank == "1" else "logs/beat-rank00000.json")
        try:
            deadline = time.monotonic() + 90
            while not waits.exists() or (rank == "0" and "meeting" not in waits.read_text()):
                assert time.monotonic() < deadline and process.poll() is None, process.said()
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(getattr(signal, name))
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
        assert process.returncode == 75, err
        assert ("stopped by SIGUSR2 while no step was trained" in err) == (rank == "0"), err


def test_a_rank_of_a_training_run_that_is_killed_is_named_with_its_step(home: Path) -> None:
    process = start_duoka("train", "sft.yaml", "train.epochs=500", "--nproc", "2", cwd=home, merged=False)
    folder = RunFolder(home / "runs/sft")
    try:
        deadline = time.monotonic() + 90
        while len(read_steps(folder)) < 3:
            assert time.monotonic() < deadline and process.poll() is None, "it never got to step 3"
            time.sleep(0.1)
        os.kill(read_beats(folder)[1].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert time.monotonic() - killed_at < 30, "everything is down within 30 s"
    assert process.returncode == 5
    top = err[err.index("worker failed") :].splitlines()
    assert top[0].startswith("worker failed: rank 1 of 2 was killed by SIGKILL after step "), err
    assert "the same command goes on" in err and "Traceback" not in err, "the other rank's loss of it is no news"
    status = read_status(folder)
    assert status is not None and (status.state, status.exit_code) == ("failed", 5)


def ended_well(nodes):
    """What the launchers of two machines said."""
    try:
        outputs = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return outputs


def test_two_starts_with_the_guides_environment_make_one_world(home: Path) -> None:
    alone = run_duoka("train", "sft.yaml", "output=runs/alone", cwd=home)
    assert alone.returncode == 0, alone.stderr
    env = {"FORCE_TORCHRUN": "1", "NNODES": "2", "NPROC_PER_NODE": "2", "DUOKA_ALLOW_LOOPBACK": "1",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    line, how = ("llamafactory-cli", "train", "sft.yaml"), {"cwd": home, "merged": False}
    nodes = [start_duoka(*line, env={**env, "NODE_RANK": str(node)}, **how) for node in (1, 0)]
    outputs = ended_well(nodes)
    said = "".join(out for out, _ in outputs)
    assert said.count("\nstep     1 ") == 1 and "4 ranks" in said, said
    assert "node 1 of 2: ranks 2 to 3 of 4" in outputs[0][1], outputs[0][1]
    assert len(list((home / "runs" / "sft" / "tensorboard").glob("events.*"))) == 1, "of four ranks one writes"
    losses = [[event["loss"] for event in read_steps(RunFolder(home / "runs" / name))] for name in ("alone", "sft")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 3


@pytest.mark.parametrize("form", ["places", "meeting"])
def test_an_own_script_runs_on_several_machines_by_the_lines_of_torchrun(tmp_path: Path, form: str) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT, encoding="utf-8")
    port = free_port()
    line = ["torchrun", "--nnodes=2", "--nproc_per_node=1"]
    if form == "meeting":
        line += ["--rdzv_id=456", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    nodes = []
    for node in range(2):
        place = [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        typed = [*line, *(place if form == "places" else []), "own.py", "word"]
        nodes.append(start_duoka(*typed, env={"DUOKA_ALLOW_LOOPBACK": "1"}, cwd=tmp_path, merged=False))
    outputs = ended_well(nodes)
    logs = [path.read_text(encoding="utf-8") for path in tmp_path.glob("runs/own-456/logs/*")]
    said = "".join((*(out for out, _ in outputs), *logs))
    assert "rank 0 of 2: 3 word" in said and "rank 1 of 2: 3 word" in said, outputs


def accelerate_launch() -> list[str]:
    plain = {"num_processes": 2, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    flags = ["--multi_gpu", *(f"--{name}={value}" for name, value in plain.items())]
    return [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port", str(free_port()), "-m"]


def older_launcher() -> list[str]:
    """torch.distributed.launch, with the variables of torchrun and --local-rank behind them."""
    place = ("--nproc-per-node", "2", "--master-port", str(free_port()))
    return [sys.executable, "-m", "torch.distributed.launch", *place, "-m"]


COMM_TEST = ("comm", "test", "--size", "4 KiB", "--rounds", "1", "--json")
# What they give each rank beside torchrun's variables; `make nightly` starts them themselves.
GIVEN = {
    "accelerate launch": ((), {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}),
    "torch.distributed.launch": (("--local-rank={rank}",), {}),
}


@pytest.mark.parametrize("launcher", GIVEN)
def test_what_other_launchers_give_makes_a_world(home: Path, launcher: str) -> None:
    flags, env = GIVEN[launcher]
    (code, out, err), (other, _, _) = start_world(home, *flags, *COMM_TEST, **env)
    assert (code, other) == (0, 0), err
    assert json.loads(out)["world_size"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [accelerate_launch, older_launcher])
def test_other_launchers_make_a_world(home: Path, launcher: Callable[[], list[str]]) -> None:
    code, out, err = run(home, *launcher(), "duoka", *COMM_TEST)
    assert code == 0, err
    assert json.loads(out)["world_size"] == 2


@pytest.mark.nightly
def test_accelerate_launch_starts_duokas_module(home: Path) -> None:
    code, out, err = run(home, *accelerate_launch(), "duoka", "train", "sft.yaml", "output=runs/accelerate")
    assert code == 0, err
    status = read_status(RunFolder(home / "runs/accelerate"))
    assert out.count("\nstep     1 ") == 1 and status is not None and status.world_size == 2
