"""Commands that measure (eval, score, embed, profile, comm test), started as several by mpirun or srun: one world."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from duoka.cli import cli
from duoka.cli.worlds import find_part
from duoka.cluster.launcher import Spec
from duoka.cluster.nodes import FixedNodes
from duoka.cluster.restart import LocalLauncher
from duoka.cluster.verdict import Kind, Verdict
from duoka.errors import ConfigError, DuokaError
from duoka.process.lifeline import PARENT_PID
from duoka.process.place import RANK_0_SPEAKS_S, adopt_place, adopt_step, let_rank_0_speak

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
TASK = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
RANKS = {
    **TASK, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
NODES = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "1"}


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    """What a command sets for itself is gone after a test."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("env", [OPEN_MPI, RANKS], ids=["mpirun", "srun"])
def test_each_of_several_processes_is_a_rank(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.update(env)
    part = find_part(None)
    assert part.place is not None and (part.place.rank, part.place.size) == (3, 4)
    assert not part.speaks and not part.starts(8)
    assert find_part(4).place == part.place
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DuokaError) as caught:
        find_part(2)
    assert "--nproc is 2, and this process is one of 4" in caught.value.what and not caught.value.lines()


def test_one_task_on_each_node_starts_the_ranks_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[FixedNodes, Spec]] = []

    def start(self: FixedNodes, spec: Spec, say: object) -> Verdict:
        seen.append((self, spec))
        return Verdict(Kind.DONE)

    monkeypatch.setattr(FixedNodes, "start", start)
    os.environ.update({**NODES, "DUOKA_ALLOW_LOOPBACK": "1"})
    done = CliRunner().invoke(cli, ["comm", "test", "--size", "4 KiB"], standalone_mode=False)
    assert done.return_value == 0, done.output
    ((launcher, spec),) = seen
    assert (launcher.num_machines, launcher.node, launcher.master_port, spec.num_processes) == (2, 1, 12070, 1)
    assert not find_part(None).speaks, "the first node's launcher does"
    os.environ["SLURM_NODEID"] = "0"
    assert find_part(None).speaks and find_part(None).num_nodes == 2


@pytest.mark.parametrize(
    "env", [{}, {**NODES, "SLURM_PTY_PORT": "4711"}, {"NNODES": "2", "JOB_COMPLETION_INDEX": "1"}],
    ids=["no launcher", "the shell of srun --pty", "a pod of a run, where somebody types"],
)  # fmt: skip
def test_who_types_a_command_is_alone(env: dict[str, str]) -> None:
    os.environ.update(env)
    part = find_part(None)
    assert part.place is None and part.speaks and part.num_nodes == 1 and not part.starts(1) and part.starts(2)
    assert isinstance(part.launcher, LocalLauncher)


@pytest.mark.parametrize(
    ("env", "waits"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, True), ({"RANK": "0", "WORLD_SIZE": "2"}, False), ({}, False),
        (OPEN_MPI, True), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, True), ({"PMI_RANK": "0", "PMI_SIZE": "2"}, False),
        (RANKS, True), ({**RANKS, "SLURM_PROCID": "0"}, False), ({**RANKS, "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", PARENT_PID: str(os.getppid())}, False),
    ],
)  # fmt: skip
def test_a_fault_of_all_ranks_is_rank_0_s_to_print(
    env: dict[str, str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    assert let_rank_0_speak(env) is waits
    assert slept == [RANK_0_SPEAKS_S] * waits


def test_a_start_that_mpirun_s_words_refuse_is_said_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """N processes said it at once."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for adopt in (adopt_place, adopt_step):
        with pytest.raises(ConfigError) as first:
            adopt({**several, "OMPI_COMM_WORLD_RANK": "0"})
        with pytest.raises(DuokaError) as other:
            adopt(dict(several))
        assert "on several machines" in first.value.lines()[0] and other.value.lines() == []
        assert first.value.exit_code == other.value.exit_code == 2
    assert slept == [RANK_0_SPEAKS_S] * 2


MPIRUN = """
import os, subprocess, sys
ranks = []
for rank in '01':
    names = {'OMPI_COMM_WORLD_RANK': rank, 'OMPI_COMM_WORLD_LOCAL_RANK': rank}
    names |= {'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}
    ranks.append(subprocess.Popen(sys.argv[1:], env={**os.environ, **names}))
sys.exit(max(one.wait() for one in ranks))
"""


def start_two(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As MPICH's mpirun does, which ends no rank when another one has left."""
    (tmp_path / "mpirun.py").write_text(MPIRUN, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "mpirun.py", sys.executable, "-m", "duoka", *words], cwd=tmp_path, env=env,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["train", "a.yaml"], ["train", "a.yaml", "--nprok", "2"], ["train", "a.yaml", "optim.lr=1", "output=/proc/x"]],
)
def test_what_all_ranks_would_refuse_is_printed_once(words: list[str], tmp_path: Path) -> None:
    """Under MPICH each rank printed it: others wait a while, and were not ended meanwhile."""
    (tmp_path / "a.yaml").write_text("model: demo\ndata: {train: [identity]}\noptim: {lr: fast}\n", encoding="utf-8")
    done = start_two(tmp_path, *words)
    assert done.returncode == (6 if words[-1] == "output=/proc/x" else 2)
    assert done.stderr.count("error:") == 1, done.stderr


def test_what_one_rank_alone_finds_it_says_itself(tmp_path: Path) -> None:
    """Nobody else would, and the others wait for it."""
    (tmp_path / "a.yaml").write_text("model: ${env:NAME,demo}\ndata: {train: [identity]}\n", encoding="utf-8")
    code = "import os, sys, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '0': time.sleep(15); sys.exit(0)\n"
    code += (
        "os.environ['NAME'] = './nowhere'\nsys.argv = ['duoka', 'train', 'a.yaml']\nfrom duoka.cli import main; main()"
    )
    (tmp_path / "mpirun.py").write_text(MPIRUN, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "mpirun.py", sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "model.name is './nowhere'" in done.stderr, done.stderr


def test_collectives_are_tested_between_the_processes_of_mpirun(tmp_path: Path) -> None:
    """Each started two of its own, and N reports were printed."""
    done = start_two(tmp_path, "comm", "test", "--size", "4 KiB", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("processes on") == 1 and done.stdout.startswith("2 processes on 1 machine"), done.stdout
