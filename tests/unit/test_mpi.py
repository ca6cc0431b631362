"""MPI without MPI: a launcher's variables become a place, and where they do not suffice it is said what to set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from duoka.cli import cli
from duoka.cluster.nodes import FixedNodes
from duoka.cluster.verdict import Kind, Verdict
from duoka.errors import ConfigError
from duoka.process.mpi import mpi_variables
from duoka.process.place import adopt_place, script_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-1@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


def test_on_one_machine_nothing_has_to_be_set() -> None:
    place = mpi_variables(OPEN_MPI)
    assert 12000 <= int(place.pop("MASTER_PORT")) < 32000 and int(place.pop("OMP_NUM_THREADS")) >= 1
    assert place == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"
    }  # fmt: skip
    told = mpi_variables({**OPEN_MPI, **MEETING, "OMP_NUM_THREADS": "7"})
    assert (told["MASTER_PORT"], told["MASTER_ADDR"], told["OMP_NUM_THREADS"]) == ("29500", "node1", "7")
    other = mpi_variables({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-1@2"})
    assert mpi_variables(OPEN_MPI)["MASTER_PORT"] != other["MASTER_PORT"], "two jobs of one daemon"


def test_on_several_machines_the_user_says_where_they_meet() -> None:
    with pytest.raises(ConfigError) as caught:
        mpi_variables(HYDRA)
    said = str(caught.value) + "".join(caught.value.lines())
    assert "4 processes on several machines (2 on this one)" in said and "-genv MASTER_ADDR HOST" in said
    with pytest.raises(ConfigError, match="MASTER_PORT is not set") as caught:
        mpi_variables({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node1"})
    assert "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500" in "".join(caught.value.lines())
    place = mpi_variables({**HYDRA, **MEETING})
    assert place.pop("OMP_NUM_THREADS").isdecimal()
    assert place == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_what_is_no_job_of_mpi_stays_as_it_is() -> None:
    one = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert mpi_variables({}) == {} == mpi_variables(one)
    assert mpi_variables({**OPEN_MPI, "RANK": "0"}) == {} == mpi_variables({**OPEN_MPI, "NNODES": "2"})
    # srun's own helper speaks PMI too, and slurm.py knows that step.
    assert mpi_variables({"PMI_RANK": "1", "PMI_SIZE": "4", **SRUN}) == {}
    assert mpi_variables({**OPEN_MPI, **SRUN})["RANK"] == "3", "mpirun in a job, whose helpers are the step"
    with pytest.raises(ConfigError, match="one of 4 processes of an MPI job"):
        mpi_variables({"PMI_RANK": "1", "PMI_SIZE": "4"})
    pals = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    assert mpi_variables(pals)["LOCAL_RANK"] == "1"


def test_the_processes_of_a_job_find_one_port_and_other_jobs_others(tmp_path: Path) -> None:
    """A launcher, a shell between it and its second process; twice."""
    ask = "import json, os, duoka.process.mpi as m; print(json.dumps(m.mpi_variables(os.environ)))"
    (tmp_path / "launcher.py").write_text(
        "import os, subprocess, sys\n"
        f"ask = [sys.executable, '-c', {ask!r}]\n"
        "for rank, command in enumerate((ask, ['sh', '-c', '\"$@\"; exit 0', 'sh', *ask])):\n"
        "    names = {'PMI_RANK': str(rank), 'PMI_SIZE': '2', 'MPI_LOCALRANKID': str(rank), 'MPI_LOCALNRANKS': '2'}\n"
        "    subprocess.run(command, env={**os.environ, **names}, check=True)\n"
    )
    jobs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "launcher.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        jobs.append([json.loads(line) for line in done.stdout.splitlines()])
    ports = [{place["MASTER_PORT"] for place in job} for job in jobs]
    assert [[place["RANK"] for place in job] for job in jobs] == [["0", "1"]] * 2
    assert all(len(each) == 1 for each in ports) and ports[0] != ports[1]


def test_one_task_on_each_node_is_a_launcher_or_of_a_script_a_rank() -> None:
    alone = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "1"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12000"}
    command = dict(alone)
    adopt_place(command)
    assert {name: command[name] for name in command.keys() - alone.keys()} == {
        "NNODES": "2", "NODE_RANK": "1", **meeting
    }  # fmt: skip
    assert script_variables(alone) == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", **meeting
    }  # fmt: skip
    assert script_variables({**alone, "SLURM_PTY_PORT": "1"}) == {}, "the shell of srun --pty"
    assert script_variables({**alone, "RANK": "0"}) == {}, "a rank of torchrun's in a task"
    assert script_variables({**OPEN_MPI, **MEETING})["RANK"] == "3"
    assert script_variables({**alone, "RANK": "0", "WORLD_SIZE": "1"}) == {}, "who means each alone"


def test_launch_on_each_node_of_a_slurm_step_is_one_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FixedNodes] = []

    def start(self: FixedNodes, spec: object, say: object) -> Verdict:
        seen.append(self)
        return Verdict(Kind.DONE)

    monkeypatch.setattr(FixedNodes, "start", start)
    monkeypatch.setattr(FixedNodes, "check", lambda self: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    task = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "1"}
    launch = ["launch", "--nproc", "1", "script.py"]

    def run(env: dict[str, str]) -> Result:
        with monkeypatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
                patch.delenv(name, raising=False)
            return CliRunner(env={**env, "DUOKA_ALLOW_LOOPBACK": "1"}).invoke(cli, launch, standalone_mode=False)

    before = dict(os.environ)
    try:
        assert run(task).return_value == 0
        assert [(one.num_machines, one.node, one.master_port) for one in seen] == [(2, 1, 12000)]
    finally:
        os.environ.clear()
        os.environ.update(before)
    refused = run({**task, **OPEN_MPI})
    assert isinstance(refused.exception, ConfigError)
    assert "one of 4 that srun or mpirun started" in str(refused.exception)


def test_a_script_that_mpirun_starts_is_one_world(tmp_path: Path) -> None:
    """Each process alone would train everything, and write into the folder of the others."""
    (tmp_path / "script.py").write_text(
        "import os, torch\nfrom duoka import Accelerator\nme = Accelerator()\n"
        "total = me.reduce(torch.tensor([me.process_index + 1.0]))\n"
        "said = (me.num_processes, me.process_index, me.is_main_process, total.item(), torch.get_num_threads())\n"
        "os.write(1, (' '.join(map(str, said)) + '\\n').encode())\n"  # a line at once: both write into one pipe
    )
    (tmp_path / "mpirun.py").write_text(
        "import os, subprocess, sys\nranks = []\n"
        "for rank in '01':\n"
        "    names = {'OMPI_COMM_WORLD_RANK': rank, 'OMPI_COMM_WORLD_LOCAL_RANK': rank}\n"
        "    names |= {'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}\n"
        "    ranks.append(subprocess.Popen([sys.executable, 'script.py'], env={**os.environ, **names}))\n"
        "sys.exit(max(one.wait() for one in ranks))\n"
    )
    given = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in given and "OMPI" not in name}
    done = subprocess.run(
        [sys.executable, "mpirun.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [f"2 0 True 3.0 {threads}", f"2 1 False 3.0 {threads}"], done.stderr
    assert done.stderr.count("note: the 2 processes that srun or mpirun started are one world") == 1
