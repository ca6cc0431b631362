"""The doctor: every check can find its fault, none needs torch, a blocker is exit code 3."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from duoka import cli as frame
from duoka.cluster import doctor, probe
from duoka.cluster.doctor import Finding, Patient
from duoka.plan.hardware import Gpu, Machine, count_usable_cores

GIB = 1 << 30


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    return Patient(tmp_path / "runs", tmp_path / "cache", Machine(4, 16 * GIB, 8 * GIB), 4)


def only(check: Callable[[Patient], Any], patient: Patient) -> Finding:
    (found,) = check(patient)
    return found


def test_a_healthy_machine_has_no_blocker_and_every_finding_is_whole(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path / "runs")
    assert {one.check for one in findings} >= {
        "python",
        "torch",
        "processor",
        "memory",
        "communication",
        "loopback",
        "clock",
    }
    for one in findings:
        assert one.seen and one.severity in ("ok", "warn", "fail", "skip"), one
        if one.severity in ("warn", "fail"):
            assert one.wanted and one.fix, f"a finding says what to do: {one}"
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"


def test_a_missing_package_is_a_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "read_versions", lambda names: {name: None if name == "peft" else "1" for name in names}
    )
    bad = [one for one in doctor.check_packages(patient) if one.severity == "fail"]
    assert [(one.check, one.fix) for one in bad] == [("peft", "pip install peft")]


def test_a_version_that_duoka_was_not_made_for_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip lets a later `pip install torch==...` leave the range; what then breaks names neither."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    wanted = [line.split('"')[1] for line in text.splitlines() if line.strip().startswith('"torch>=')]
    monkeypatch.setattr(probe.metadata, "requires", lambda name: ["deepspeed>=0.19; extra == 'deepspeed'", *wanted])
    known = dict.fromkeys(doctor.NEEDED + doctor.OPTIONAL, "1.0")
    for version, severity in (("2.13.0+cpu", "ok"), ("2.10.1", "warn"), ("3.0.0", "warn"), ("nightly", "ok")):
        monkeypatch.setattr(doctor, "read_versions", lambda names, one=version: known | {"torch": one})
        found = next(one for one in doctor.check_packages(patient) if one.check == "torch")
        assert found.severity == severity, found
        assert severity == "ok" or (version in found.seen and found.fix == f"pip install '{wanted[0]}'")


def test_swap_is_shown_and_is_no_help_to_a_gpu(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    for total, wanted in ((0, False), (8 * GIB, True)):
        monkeypatch.setattr(psutil, "swap_memory", lambda total=total: SimpleNamespace(total=total, used=GIB))
        seen = only(doctor.check_memory, patient).seen
        assert ("1 GiB of 8 GiB swap used, which is no help to a GPU" in seen) == wanted, seen


def test_how_ranks_will_talk_to_each_other_is_said(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with_gpus = replace(patient, machine=replace(patient.machine, gpus=(Gpu("H200", GIB, GIB, 9.0),) * 2))
    for nccl, who, severity, words in (
        ("", patient, "ok", "gloo between CPUs; no NCCL"),
        ("2.27.3", with_gpus, "ok", "NCCL 2.27.3 between GPUs"),
        ("", with_gpus, "warn", "no NCCL is installed"),
    ):
        monkeypatch.setattr(doctor, "read_nccl_version", lambda nccl=nccl: nccl)
        found = only(doctor.check_communication, who)
        assert found.severity == severity and words in found.seen, found
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert [(one.check, one.severity) for one in doctor.check_communication(patient)][1:] == [("NCCL_ALGO", "warn")]


def test_nccl_is_found_by_the_name_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"nvidia-nccl-cu13": "2.29.1", "torch": "2.13.0"}
    found = [SimpleNamespace(name=name, version=version) for name, version in names.items()]
    monkeypatch.setattr(probe.metadata, "distributions", lambda: found)
    assert probe.read_nccl_version() == "2.29.1"
    monkeypatch.setattr(probe.metadata, "distributions", lambda: found[1:])
    assert probe.read_nccl_version() == ""


def test_a_folder_without_write_access_is_a_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert only(doctor.check_output_folder, patient).severity == "fail"
    assert "DUOKA_CACHE" in only(doctor.check_cache_folder, patient).fix


def test_an_output_that_is_a_file_is_a_blocker(patient: Patient) -> None:
    patient.output.write_text("")
    assert "is a file" in only(doctor.check_output_folder, patient).seen


def test_a_nearly_full_disk_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10 * GIB, 9 * GIB, GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert only(doctor.check_output_folder, patient).severity == "warn"


def test_a_small_dev_shm_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found = only(doctor.check_shared_memory, patient)
    assert found.severity in ("warn", "skip")
    assert found.severity == "skip" or "--shm-size" in found.fix


def test_little_memory_is_a_warning(patient: Patient) -> None:
    short = replace(patient, machine=Machine(4, 2 * GIB, GIB))
    assert only(doctor.check_memory, short).severity == "warn"
    assert only(doctor.check_memory, patient).severity == "ok"


def test_a_busy_gpu_is_a_warning(patient: Patient) -> None:
    gpus = (Gpu("H200", 140 * GIB, 139 * GIB, 9.0), Gpu("H200", 140 * GIB, 20 * GIB, 9.0))
    found = list(doctor.check_gpu(replace(patient, machine=Machine(4, GIB, GIB, gpus=gpus))))
    assert [(one.check, one.severity) for one in found] == [("gpu 0", "ok"), ("gpu 1", "warn")]


@pytest.mark.parametrize(
    ("driver", "cuda", "severity"),
    [("570.86.15", "12.8", "ok"), ("470.57.02", "12.8", "fail"), ("570.86.15", "13.0", "fail"), ("570.1", "", "warn")],
)
def test_a_driver_that_is_too_old_for_torch_is_a_blocker(
    driver: str, cuda: str, severity: str, patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {driver}\necho {driver}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "read_torch_cuda", lambda: cuda)
    with_gpus = replace(patient, machine=replace(patient.machine, gpus=(Gpu("H200", GIB, GIB, 9.0),) * 2))
    found = only(doctor.check_driver, with_gpus)
    assert found.severity == severity and driver in found.seen and cuda in found.seen
    assert not list(doctor.check_driver(patient)), "no GPU needs no driver"


def test_the_cuda_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.version import cuda

    assert probe.read_torch_cuda() == (cuda or "")
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n")
    found = SimpleNamespace(locate_file=lambda name: tmp_path / "version.py")
    monkeypatch.setattr(probe.metadata, "distribution", lambda name: found)
    assert probe.read_torch_cuda() == "12.8"


@pytest.mark.parametrize(("cores", "severity"), [(2, "warn"), (16, "ok")])
def test_few_cores_are_a_warning(cores: int, severity: str, patient: Patient) -> None:
    assert next(iter(doctor.check_processor(replace(patient, num_cores=cores)))).severity == severity


@pytest.mark.parametrize(("value", "severity"), [(None, "ok"), ("2", "ok"), ("64", "warn"), ("many", "fail")])
def test_threads_that_fight_for_cores_are_found(
    value: str | None, severity: str, patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert [one.severity for one in doctor.check_processor(patient) if one.check == "threads"] == [severity]


@pytest.mark.parametrize(("user", "group", "severity"), [(4096, 64, "warn"), (16, None, "warn"), (-1, None, "ok")])
def test_a_tight_limit_of_processes_is_named(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, user: int, group: int | None, severity: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (user, user))
    monkeypatch.setattr("duoka.cluster.doctor.read_process_limit", lambda: group)
    found = only(doctor.check_processes, patient)
    assert found.severity == severity and (group is None or ("64" in found.seen and "pids.max" in found.seen))


def test_few_open_files_are_a_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert only(doctor.check_open_files, patient).severity == "fail"


@pytest.mark.skipif(sys.platform != "linux", reason="the limits of a child are set here")
def test_a_limit_that_ranks_raise_is_no_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS begins with 256 of unlimited; a lone process raises it as ranks do."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = only(doctor.check_open_files, patient)
    assert found.severity == "ok" and found.seen == "4096 (256 at first; ranks raise it)"
    monkeypatch.undo()
    program = (
        "import resource; from duoka.comm.world import start_world; from duoka.config.schema import ParallelConfig;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096)); start_world(ParallelConfig());"
        "from duoka.cluster.node_probe import look; import os;"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096)); print(look([], '.', '.', 'x')['nofile'])"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["4096", "4096"], done.stderr


def test_a_dead_loopback_is_a_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.check_loopback, patient).severity == "ok"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert only(doctor.check_loopback, patient).severity == "fail"


def test_a_host_name_without_an_address_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = only(doctor.check_host_name, patient)
    assert found.severity == "warn" and "/etc/hosts" in found.fix


def test_a_clock_in_1970_is_a_blocker(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 1000.0)
    assert only(doctor.check_clock, patient).severity == "fail"


def test_text_that_is_not_utf8_is_a_warning(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.locale, "getpreferredencoding", lambda _: "ANSI_X3.4-1968")
    assert only(doctor.check_text, patient).severity == "warn"


def test_a_check_that_breaks_is_a_finding(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_moon(patient: Patient) -> list[Finding]:
        raise OSError("no sky")

    monkeypatch.setattr(doctor, "CHECKS", (check_moon,))
    assert doctor.examine(patient.output) == [Finding("skip", "moon", "could not look: no sky")]


def test_exit_code_is_3_only_for_a_blocker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for severity, code in (("ok", 0), ("warn", 0), ("skip", 0), ("fail", 3)):
        finding = Finding(severity, "moon", "full", "new", "wait")  # type: ignore[arg-type]
        monkeypatch.setattr(doctor, "examine", lambda output, finding=finding: [finding])
        assert frame.run(["doctor"]) == code, severity
        assert frame.run(["doctor", "--json"]) == code
    capsys.readouterr()
    frame.run(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["fit"] is False and answer["findings"][0]["fix"] == "wait"


def test_it_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    """As on a laptop: torch cannot be imported or found, the doctor still examines everything and says so."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.metadata as m\n"
        "sys.modules['torch'] = None\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(frame.__file__).parents[2]}"}
    command = [sys.executable, "-m", "duoka", "doctor", "--json", "--output", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["severity"] == "fail" and done.returncode == 3, done.stderr
    assert findings["loopback"]["severity"] == "ok" and findings["memory"]["seen"]


def test_secrets_never_reach_env_json(tmp_path: Path) -> None:
    env = {
        "HF_TOKEN": "hf_abc", "DUOKA_API_KEY": "k", "HTTPS_PROXY": "http://me:pw@proxy:80", "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false", "HOME_SECRET": "x", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    command = ["duoka", "train", "log.alert.webhook=https://hooks.example/T0", "key=hf_abcdef", "log={alert: {}}"]
    command += ["log={to: []}"]
    command += ["log.every=5", "data.train=https://me:pw@x/y", "log.alert.command=curl -u me:pw x"]
    facts = probe.read_environment_facts(tmp_path, command, env | {"HF_HUB_TOKEN": "hf_abcdef"})
    assert facts["command"] == [
        "duoka", "train", "log.alert.webhook=***", "key=***", "log=***", "log={to: []}", "log.every=5", "data.train=https://***@x/y",
        "log.alert.command=***",
    ]  # fmt: skip
    text = json.dumps(facts)
    for secret in ("hf_abc", "me:pw", '"k"'):
        assert secret not in text, secret
    assert "HOME_SECRET" not in text, "variables that change no run are not kept at all"
    kept = facts["environment"]
    assert kept["OMP_NUM_THREADS"] == "2" and kept["TOKENIZERS_PARALLELISM"] == "false"
    assert kept["HF_TOKEN"] == "***" and kept["HTTPS_PROXY"] == "http://***@proxy:80"
    assert facts["packages"]["torch"] and facts["machine"]["num_usable_cores"] >= 1 and facts["git"] is None


def test_a_containers_share_of_cpu_time_counts(tmp_path: Path) -> None:
    everything = count_usable_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert count_usable_cores(tmp_path) == everything
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert count_usable_cores(tmp_path) == 1
