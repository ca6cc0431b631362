"""Slurm without Slurm: the script is a golden file, a step's variables become a place, states become exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from duoka.cli import cli
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
