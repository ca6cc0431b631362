"""Slurm without Slurm: the script is a golden file, a step's variables become a place, states become exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duoka.cli import cli
from duoka.cluster import kubernetes
from duoka.cluster.slurm import Job, read_asked, render, verdict_of_state
from duoka.errors import ConfigError
from duoka.process.slurm import first_node, slurm_variables, step_port, tasks_per_node, unused_nodes

GOLDEN = Path(__file__).parents[1] / "cluster" / "golden" / "job.sbatch"
STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip
# A fake Slurm: three words of the job's state, its log grows meanwhile.
SBATCH = "#!/bin/sh\necho 4711\n"
SCONTROL = """#!/bin/sh
count=$(cat "$FAKE/count" 2>/dev/null || echo 0); echo $((count + 1)) > "$FAKE/count"
case $count in
  0) state="PENDING Reason=Resources";;
  1) echo step 1 > out-slurm-4711.log; state="RUNNING Reason=None";;
  *) echo step 2 >> out-slurm-4711.log; state="FAILED Reason=NonZeroExitCode";;
esac
echo "JobId=4711 JobState=$state ExitCode=6:0"
"""


def test_the_script_is_the_golden_one() -> None:
    """Written anew on purpose only: DUOKA_WRITE_GOLDEN=1."""
    asked = read_asked("partition=gpu,nodes=2,time=2h,gpus=8,nodelist=n[1-2,4]")
    job = Job(
        asked,
        ("/env/bin/python", "-P", "-m", "duoka", "train", "run.yaml", "optim.lr=1e-4"),
        "/home/me",
        Path("runs/run"),
    )
    script = render(job, "duoka train run.yaml optim.lr=1e-4 --slurm partition=gpu,nodes=2,time=2h,gpus=8")
    if os.environ.get("DUOKA_WRITE_GOLDEN"):
        GOLDEN.write_text(script, encoding="utf-8")
    assert script == GOLDEN.read_text(encoding="utf-8")
    assert "#SBATCH --time=02:00:00\n" in script and "#SBATCH --nodelist=n[1-2,4]\n" in script


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partion=gpu", "did you mean partition?"), ("nodes=two", 'nodes is "two"'), ("time=soon", "time"),
        ("partition=a b", "partition is"), ("partition", "partition is"), ("nodes=2,mem=$(reboot)", "mem is"),
    ],
)  # fmt: skip
def test_what_is_misspelt_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_asked(text)
    assert words in str(caught.value)


def test_a_task_per_node_is_a_launcher_and_more_are_ranks() -> None:
    port = str(step_port(STEP))
    assert slurm_variables(STEP) == {
        "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port
    }  # fmt: skip
    ranks = {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "3,2",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "1",
    }
    assert slurm_variables(ranks) == {
        "RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip


def test_only_the_step_counts_and_a_place_that_is_given_stays() -> None:
    """The batch script and salloc's shell are no part of a world; nor is a rank's own child."""
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert slurm_variables(batch) == {} and "has 4 nodes" in unused_nodes(batch)
    assert slurm_variables({**STEP, "SLURM_STEP_ID": "4294967290"}) == {}
    assert slurm_variables({**STEP, "RANK": "0"}) == {} and slurm_variables({**STEP, "NNODES": "2"}) == {}
    assert slurm_variables({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) == {}
    assert unused_nodes(STEP) == "" and unused_nodes({}) == ""


def test_names_and_counts_are_read_as_slurm_shortens_them() -> None:
    assert [first_node(text) for text in ("n1", "n[03-05,9],m1", "a,b", "r[1-2]n[04,06]")] == [
        "n1",
        "n03",
        "a",
        "r1n04",
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1] and tasks_per_node("4") == [4]
    ports = {
        step_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in range(50) for step in range(3)
    }
    assert len(ports) == 150 and min(ports) >= 12000 and max(ports) < 32000


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("COMPLETED", 0, 0), ("FAILED", 2, 2), ("FAILED", 6, 6), ("FAILED", 75, 75), ("TIMEOUT", 0, 75),
     ("CANCELLED", 0, 75), ("PREEMPTED", 0, 75), ("OUT_OF_MEMORY", 125, 4), ("NODE_FAIL", 0, 5), ("BOOT_FAIL", 0, 5)],
)  # fmt: skip
def test_a_jobs_end_is_one_of_our_exit_codes(state: str, code: int, expected: int) -> None:
    assert verdict_of_state(state, code, "1").exit_code == expected


def test_a_job_is_submitted_and_followed_to_its_exit_code(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duoka.cluster.slurm.LOOK_EVERY_S", 0.01)
    (tmp_path / "run.yaml").write_text(f"model: {tiny_model}\ndata: {{train: [identity]}}\noutput: out\n")
    done = CliRunner().invoke(cli, ["train", "run.yaml", "--slurm", "nodes=2,partition=gpu"], standalone_mode=False)
    assert done.exception is None and done.return_value == 6, done.output
    assert done.stdout == "step 1\nstep 2\n", "the log, once"
    assert "job 4711: pending (Resources)" in done.stderr and "job 4711: running\n" in done.stderr
    assert "srun --kill-on-bad-exit=0" in (tmp_path / "out.sbatch").read_text()
    dry = CliRunner().invoke(cli, ["train", "run.yaml", "--slurm", "nodes=2", "--dry-run"], standalone_mode=False)
    assert dry.stdout.startswith("#!/bin/bash\n# Written by: duoka train run.yaml --slurm nodes=2\n")


@pytest.fixture
def queue(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a config, and a Slurm that says what is in the file `queue`, and notes what is cancelled."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (
        ("sbatch", "echo 4711\n"), ("scontrol", 'cat "$FAKE/queue"\n'), ("scancel", 'echo "$@" >> "$FAKE/cancelled"\n'),
    ):  # fmt: skip
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(f"model: {tiny_model}\ndata: {{train: [identity]}}\noutput: runs/sft\n")
    return tmp_path


def run_cli(*words: str) -> Any:
    return CliRunner().invoke(cli, list(words), standalone_mode=False)


def test_a_sweep_is_an_array_and_its_runs_stand_in_the_list(queue: Path) -> None:
    done = run_cli(
        "train", "run.yaml", "--slurm", "nodes=1", "--sweep", "optim.lr=[1e-4,3e-4]", "--sweep", "train.seed=[1,2]"
    )
    assert done.return_value == 0 and "4711 is submitted with 4 runs" in done.stderr, done.output
    script = (queue / "runs/sft.sbatch").read_text()
    assert "#SBATCH --array=0-3\n" in script and 'train run.yaml "${point[@]}" &' in script
    assert "  2) point=(optim.lr=3e-4 train.seed=1 output=runs/sft-lr=3e-4,seed=1);;\n" in script
    assert "-slurm-%A_%a.log" in script
    for number, expected in (("2", "optim.lr=3e-4 train.seed=1 output=runs/sft-lr=3e-4,seed=1"), ("9", "exit 2")):
        case = script[script.index("case ") : script.index("esac") + 4]
        shell = ["bash", "-c", f'{case}\necho "${{point[@]}}"']
        ran = subprocess.run(shell, env={**os.environ, "SLURM_ARRAY_TASK_ID": number}, capture_output=True, text=True)
        assert (ran.stdout.strip() == expected) if number == "2" else ran.returncode == 2

    (queue / "queue").write_text(
        "JobId=4712 ArrayJobId=4711 ArrayTaskId=2-3 JobState=PENDING Reason=Priority ExitCode=0:0\n"
        "JobId=4713 ArrayJobId=4711 ArrayTaskId=1 JobState=RUNNING Reason=None ExitCode=0:0\n"
        "JobId=4714 ArrayJobId=4711 ArrayTaskId=0 JobState=COMPLETED Reason=None ExitCode=0:0\n"
    )
    rows = {row["name"]: row for row in json.loads(run_cli("runs", "--json").stdout)}
    assert {name: (row["state"], row["cause"]) for name, row in rows.items()} == {
        "sft-lr=1e-4,seed=2": ("running", "job 4711_1 is running"),
        "sft-lr=3e-4,seed=1": ("queued", "job 4711_2 is pending (Priority)"),
        "sft-lr=3e-4,seed=2": ("queued", "job 4711_3 is pending (Priority)"),
    }
    assert "job 4711_2 is pending (Priority)" in run_cli("runs").stdout
    stopped = run_cli("runs", "stop", "sft-lr=3e-4,seed=1")
    assert stopped.exception is None and "taken back: it had not begun" in stopped.stderr
    assert "asked to save and leave" in run_cli("runs", "stop", "sft-lr=1e-4,seed=2").stderr
    assert (queue / "cancelled").read_text() == "4711_2\n--signal=USR2 4711_1\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sweep", "optim.lr=[1e-4]"], "--sweep is"), (["--sweep", "optim.lr=[1e-4,1e-4]"], "--sweep is"),
        (["--sweep", "train.seed=[1,2]", "--sweep", "train.seed=[3,4]"], "twice"),
        (["--sweep", f"train.seed=[{','.join(map(str, range(1001)))}]"], "1,001 runs"),
        (["--sweep", "optim.lr=[1e-4,many]"], "optim.lr"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_run_is_refused_before_it_is_submitted(
    words: list[str], expected: str, queue: Path
) -> None:
    done = run_cli("train", "run.yaml", "--slurm", "nodes=1", *words)
    assert isinstance(done.exception, ConfigError) and expected in str(done.exception), done.output
    assert not (queue / "runs").exists()


def test_without_slurm_no_run_is_lost_from_the_list(queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "4711" in run_cli("train", "run.yaml", "--slurm", "nodes=1", "--sweep", "train.seed=[1,2]").stderr
    monkeypatch.setenv("PATH", "/nowhere")
    assert json.loads(run_cli("runs", "--json").stdout) == []
    assert "--sweep makes a job array" in str(run_cli("train", "run.yaml", "--sweep", "train.seed=[1,2]").exception)


@pytest.mark.parametrize(
    ("run", "name"), [("7b-sft", "run-7b-sft"), ("我的 7B", "run-7b"), ("Qwen3_0.6B", "qwen3-0-6b")]
)
def test_a_runs_name_becomes_one_that_services_may_have(run: str, name: str) -> None:
    """The API server refuses a Service whose name begins with a digit, and Kubeflow such a TrainJob."""
    assert kubernetes.read_asked("image=a,nodes=2,volume=data:/data", run).name == name
    with pytest.raises(ConfigError, match='name is "7b"') as caught:
        kubernetes.read_asked("image=a,nodes=2,volume=data:/data,name=7b", run)
    assert "a letter first" in "".join(caught.value.lines())


def test_of_a_run_without_such_letters_a_name_is_asked_for() -> None:
    with pytest.raises(ConfigError, match='name is ""') as caught:
        kubernetes.read_asked("image=a,nodes=2,volume=data:/data", "我的 运行")
    said = "".join(caught.value.lines())
    assert "我的 运行" in said and "name=my-run" in said


def test_runs_of_a_sweep_over_models_stand_beside_each_other(queue: Path) -> None:
    """The slash of Qwen/Qwen3-0.6B made a folder in a folder, where `duoka runs` finds no run."""
    (queue / "queue").write_text("JobId=4712 ArrayJobId=4711 ArrayTaskId=0-1 JobState=PENDING ExitCode=0:0\n")
    models = "model=[Qwen/Qwen3-0.6B,Qwen/Qwen3-1.7B]"
    assert run_cli("train", "run.yaml", "--slurm", "nodes=1", "--sweep", models).return_value == 0
    assert sorted(one["name"] for one in json.loads(run_cli("runs", "--json").stdout)) == [
        "sft-model=Qwen-Qwen3-0.6B", "sft-model=Qwen-Qwen3-1.7B"
    ]  # fmt: skip
    dry = run_cli("train", "run.yaml", "--slurm", "nodes=1", "--sweep", "model=[a/b,a-b]", "--dry-run").stdout
    assert "output=runs/sft-0,model=a-b" in dry and "output=runs/sft-1,model=a-b" in dry, "no folder of two runs"
