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
KUBECTL = '#!/bin/sh\ncase "$1 $4" in "get job-name=mine") printf "mine-0-x\\nmine-1-y\\n";;\n'
KUBECTL += '"get"*) ;;\n*) while [ "$1" != -- ]; do shift; done; shift; exec "$@";; esac\n'


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("kubectl", KUBECTL)):
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
