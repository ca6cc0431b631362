"""Machines that a scheduler has given are reached by its own commands. Stand-ins for srun and kubectl run what they
are told right here; tests/cluster/test_real_slurm.py asks a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from duoka.cli import cli
from duoka.errors import ConfigError

SRUN = '#!/bin/sh\necho "$@" | grep -q "nodelist=n2" && { echo "srun: error: node n2 is down" >&2; exit 1; }\n'
SRUN += 'while [ "$1" != sh ]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/sh\n[ "$3" = "n[1-2]" ] && { echo n1; echo n2; }\n[ "$3" = n1 ] && echo n1\ntrue\n'
SQUEUE = '#!/bin/sh\n[ "$2" = 7 ] && echo 1:30:00\n[ "$2" = 8 ] && echo UNLIMITED\n[ "$2" = 9 ] && echo 0:05\ntrue\n'
KUBECTL = (
    '#!/bin/sh\n[ "$2 $3" = "job mine" ] && { echo 3600 "$(date -u +%Y-%m-%dT%H:%M:%SZ)"; exit; }\ncase "$1 $4" in\n'
)
KUBECTL += '"get job-name=mine") printf "mine-0-x\\nmine-1-y\\n";;\n'
KUBECTL += '"get"*) ;;\n*) while [ "$1" != -- ]; do shift; done; shift; exec "$@";; esac\n'


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("kubectl", KUBECTL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(tmp_path)
    return folder


def doctor(*words: str) -> tuple[int, dict[str, dict[str, object]]]:
    done = CliRunner().invoke(cli, ["doctor", *words, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, {one["check"]: one for one in json.loads(done.stdout)["findings"]}


@pytest.mark.timeout(120)
def test_the_nodes_of_the_job_are_asked_by_srun(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    _, found = doctor("--slurm")
    assert found["reach"]["severity"] == "ok" and list(found["reach"]["nodes"]) == ["n1"]  # type: ignore[call-overload]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    code, found = doctor("--slurm")
    assert code == 3 and "node n2 is down" in str(found["reach"]), found["reach"]
    assert "srun --overlap --nodes=1 --nodelist=n2 true" in str(found["reach"]["fix"])


@pytest.mark.timeout(120)
def test_the_pods_of_a_job_are_asked_by_kubectl(commands: Path) -> None:
    _, found = doctor("--k8s", "mine")
    assert list(found["reach"]["nodes"]) == ["mine-0-x", "mine-1-y"]  # type: ignore[call-overload]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("job", "severity", "words"),
    [
        ("7", "ok", ["1h 30min left", "the whole run takes about"]),
        ("8", "ok", ["none"]),
        ("9", "warn", ["5.0 s left", "ends the job before the run is done", "--slurm"]),
    ],
)
def test_the_job_s_time_is_compared_with_the_plan_s(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, job: str, severity: str, words: list[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n', encoding="utf-8")
    yaml = f"model: {tiny_model}\ndata: {{train: [chats.jsonl]}}\ntrain: {{max_steps: 100, global_batch: 8}}\n"
    Path("run.yaml").write_text(yaml, encoding="utf-8")
    found = doctor("run.yaml", "--slurm", "--output", "runs")[1]["time limit"]
    assert found["severity"] == severity and all(word in str(found) for word in words), found


@pytest.mark.timeout(120)
def test_pods_have_a_deadline_and_a_disk_whose_speed_is_measured(commands: Path) -> None:
    _, found = doctor("--k8s", "mine", "--level", "net")
    assert "59min" in str(found["time limit"]["nodes"]) or "1h" in str(found["time limit"]["nodes"])
    assert "MB/s" in str(found["disk speed"]["nodes"]), found["disk speed"]
    assert not [path for path in commands.parent.iterdir() if path.is_file()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm"], "this terminal is in none"),
        (["--k8s", "other"], "no pod of a Job named other is running"),
        (["--slurm", "nodes=2", "--hosts", "a,b"], "keep one of them"),
        (["--slurm", "node=2"], "node"),
    ],
)
def test_what_names_no_machines_is_refused(
    commands: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    done = CliRunner().invoke(cli, ["doctor", *words])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
