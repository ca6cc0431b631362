"""The doctor over several machines: what differs is found, with both values and what to type; what is alike is not.

GPUs are recorded lines of nvidia-smi (fixtures: no GPU was looked at here).
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from duoka.cli import cli
from duoka.cluster import compare
from duoka.cluster.compare import COMPARISONS, NodeFinding, Survey, compare_links, compare_rates, read_gpus
from duoka.cluster.compare_run import judge_writes
from duoka.cluster.survey import Question, examine_nodes, rounds_of
from duoka.config.hosts import parse_hosts

GIB = 1 << 30
H100 = "550.54.15, NVIDIA H100 80GB HBM3, 81559, 4, Enabled\n"
A100 = "525.60.13, NVIDIA A100-SXM4-40GB, 40960, 0, Disabled\n"
OLD = "470.82.01, Tesla V100-SXM2-16GB, 16160, 0, Enabled\n"
FACTS: dict[str, Any] = {
    "time": 1000.0, "host": "n", "python": "3.11.7", "executable": "/env/bin/python", "has_python": True,
    "address": "10.0.0.1", "resolves_to": ["10.0.0.1"], "code": "c" * 64, "torch_cuda": "12.8", "folder": True,
    "packages": {"torch": "2.13.0", "numpy": "2.0", "click": "8.1"},
    "files": {"/w/run.yaml": {"kind": "file", "size": 10, "digest": "d" * 64}},
    "memory": {"total": 64 * GIB, "available": 50 * GIB},
    "disk": {"path": "/w", "can_write": True, "free": 900 * GIB, "files": 10**7},
    "shm": {"free": 30 * GIB, "total": 30 * GIB}, "cores": 32, "nofile": 65536, "gpus": "", "env": {},
    "nics": {}, "ipv6": False, "infiniband": {}, "memlock": -1, "governor": "", "gpu_state": "", "gpu_apps": "",
    "topology": "", "xid": [],
}  # fmt: skip
NOT_THERE = {"kind": "missing", "size": 0, "digest": "", "why": "No such file or directory"}


def survey_of(**changes: Any) -> Survey:
    """Three nodes, of which c has other facts."""
    facts = {name: copy.deepcopy(FACTS) for name in "abc"}
    facts["c"] |= changes
    return Survey(facts, "/w", 999.9, 1000.2, {name: f"ssh {name}" for name in "abc"})


def findings_of(survey: Survey) -> list[NodeFinding]:
    return [one for comparison in COMPARISONS for one in comparison(survey)]


@pytest.mark.parametrize(
    ("rates", "checkpoint", "severity", "words"),
    [
        ([900e6, 800e6, 850e6], 0, "ok", ["800 to 900 MB/s"]),
        ([900e6, 800e6, 850e6], 12 * GIB, "ok", ["a checkpoint of 12 GiB takes 5"]),
        ([900e6, 800e6, 90e6], 0, "warn", ["'n2': '90 MB/s'", "800 MB/s", "iotop"]),
        ([20e6, 21e6, 22e6], 0, "warn", ["20 MB/s", "12 bytes", "faster disk"]),
        ([200e6, 200e6, 200e6], 500 * GIB, "warn", ["a checkpoint of 500 GiB takes 14min 54"]),
        ([500e6, 0.0, 510e6], 0, "ok", ["500 to 510"]),
    ],
)
def test_disks_are_compared_with_each_other_and_with_what_a_save_takes(
    rates: list[float], checkpoint: int, severity: str, words: list[str]
) -> None:
    (found,) = judge_writes({f"n{number}": rate for number, rate in enumerate(rates)}, checkpoint)
    assert found.severity == severity and all(word in str(found) for word in words), found


def test_machines_alike_have_no_finding() -> None:
    assert {one.severity for one in findings_of(survey_of())} <= {"ok", "skip"}


@pytest.mark.parametrize(
    ("changes", "severity", "check", "words"),
    [
        ({"has_python": False}, "fail", "python path", ["not there", "same environment"]),
        ({"python": "3.10.2"}, "fail", "python", ["3.11.7", "3.10.2"]),
        ({"python": "3.11.9"}, "warn", "python", ["3.11.7", "3.11.9"]),
        ({"packages": {**FACTS["packages"], "torch": "2.12.1"}}, "fail", "torch",
         ["2.13.0", "2.12.1", "ssh c /env/bin/python -m pip install 'torch==2.13.0'"]),
        ({"packages": {**FACTS["packages"], "click": "8.0"}}, "warn", "other packages", ["click 8.1", "click 8.0"]),
        ({"code": "e" * 64}, "fail", "duoka", ["cccc", "eeee"]),
        ({"code": ""}, "fail", "duoka", ["not installed"]),
        ({"files": {"/w/run.yaml": {"kind": "file", "size": 10, "digest": "e" * 64}}}, "fail", "/w/run.yaml",
         ["dddd", "eeee", "rsync -a /w/run.yaml c:/w/run.yaml"]),
        ({"files": {"/w/run.yaml": NOT_THERE}}, "fail", "/w/run.yaml", ["No such file", "rsync"]),
        ({"folder": False}, "fail", "folder", ["/w", "not there"]),
        ({"time": 1003.0}, "warn", "clocks", ["+2.8 s", "set-ntp"]),
        ({"time": -2600.0}, "fail", "clocks", ["-3599.9 s"]),
        ({"memory": {"total": 64 * GIB, "available": GIB}}, "warn", "memory", ["1 GiB"]),
        ({"memory": {"total": 64 * GIB, "available": 20 * GIB}}, "warn", "memory", ["20 GiB", "50 GiB"]),
        ({"disk": {"path": "/w", "can_write": False, "free": 9 * GIB, "files": -1}}, "fail", "disk", ["/w", "chown"]),
        ({"disk": {"path": "/w", "can_write": True, "free": GIB, "files": -1}}, "warn", "disk", ["1 GiB free"]),
        ({"disk": {"path": "/w", "can_write": True, "free": 9 * GIB, "files": 9}}, "warn", "disk", ["9 more", "df -i"]),
        ({"shm": {"free": 64 << 20, "total": 64 << 20}}, "warn", "/dev/shm", ["64 MiB", "--shm-size"]),
        ({"nofile": 256}, "fail", "open files", ["256", "ulimit"]),
        ({"cores": 8}, "warn", "cores", ["32", "8"]),
        ({"resolves_to": ["127.0.1.1"]}, "warn", "host names", ["127.0.1.1", "10.0.0.1 n"]),
        ({"env": {"NCCL_DEBUG": "INFO"}}, "warn", "NCCL_DEBUG", ["INFO", "not set"]),
    ],
)  # fmt: skip
def test_what_differs_is_found_with_both_values_and_a_way_out(
    changes: dict[str, Any], severity: str, check: str, words: list[str]
) -> None:
    found = [one for one in findings_of(survey_of(**changes)) if one.severity in ("warn", "fail")]
    assert [(one.severity, one.check) for one in found] == [(severity, check)]
    said = json.dumps([dict(found[0].nodes), found[0].cause, found[0].fix])
    assert "c" in found[0].nodes and found[0].fix and all(word in said for word in words), said


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((H100 * 8, H100 * 8, H100 * 8), {("ok", "gpus")}),
        ((H100 * 8, H100 * 8, H100 * 7), {("fail", "gpus"), ("ok", "gpus")}),
        ((H100, H100, A100), {("warn", "gpu kinds"), ("warn", "driver"), ("warn", "persistence mode")}),
        ((OLD, OLD, OLD), {("fail", "driver"), ("ok", "gpus")}),
        (("", "", ""), {("skip", "gpus")}),
        ((H100, H100, ""), {("fail", "gpus"), ("warn", "gpu kinds"), ("warn", "driver")}),
    ],
)
def test_gpus_are_compared_by_what_nvidia_smi_said(gpus: tuple[str, ...], expected: set[tuple[str, str]]) -> None:
    survey = survey_of()
    for facts, text in zip(survey.facts.values(), gpus, strict=True):
        facts["gpus"] = text  # type: ignore[index]
    assert {(one.severity, one.check) for one in compare.compare_gpus(survey)} == expected
    assert read_gpus("Unable to determine the device handle: Unknown Error\n") == []


def test_links_tell_refused_filtered_and_unroutable_apart() -> None:
    hows = {"a": {"b": "ok", "c": "refused"}, "b": {"a": "ok", "c": "filtered"}, "c": {"a": "unroutable", "b": "ok"}}
    reached = {one: {other: {"how": how, "ms": 1.0} for other, how in peers.items()} for one, peers in hows.items()}
    findings = compare_links(reached, {name: f"10.0.0.{name}:1" for name in "abc"})
    assert [(one.severity, list(one.nodes)) for one in findings] == [
        ("fail", ["a -> c"]), ("fail", ["b -> c"]), ("fail", ["c -> a"])
    ]  # fmt: skip
    assert "rejects" in findings[0].cause and "drops" in findings[1].cause and "no way" in findings[2].cause
    for peers in reached.values():
        for one in peers.values():
            one["how"] = "ok"
    (fine,) = compare_links(reached, {})
    assert fine.severity == "ok" and "6 connections" in fine.nodes["all"]


FAKE_SSH = """#!/bin/sh
# Every host is this machine; the last word is what sshd would hand to a shell.
for word; do last=$word; done
case "$*" in *" gone "*) echo "ssh: connect to host gone port 22: Connection timed out" >&2; exit 255;; esac
exec sh -c "$last"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fake-ssh"
    path.write_text(FAKE_SSH)
    path.chmod(0o755)
    monkeypatch.setenv("DUOKA_SSH", str(path))
    monkeypatch.setenv(
        "SSH_CONNECTION", "127.0.0.1 40000 127.0.0.1 22"
    )  # sshd's word: from where, and at which address


def test_the_probe_is_asked_over_ssh_and_one_node_out_of_reach_hides_no_other(
    fake_ssh: None, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        f"model: {tiny_model}\ndata: {{train: [identity]}}\ncluster: {{hosts: [a, b]}}\n"
    )
    done = CliRunner().invoke(cli, ["doctor", "run.yaml", "--level", "net", "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    bad = {name: one for name, one in findings.items() if one["severity"] == "fail"}
    assert not bad and findings["links"]["severity"] == "ok" and "2 connections" in findings["links"]["nodes"]["all"]
    assert "2 ranks over" in findings["exchange"]["nodes"]["all"]
    assert findings[str(tmp_path / "run.yaml")]["severity"] == "ok" and findings[str(tiny_model)]["severity"] == "ok"
    assert "shared" in findings["output folder"]["nodes"]["all"] and not list(tmp_path.glob(".duoka-*"))
    done = CliRunner().invoke(cli, ["doctor", "--hosts", "a,gone"], standalone_mode=False)
    assert done.return_value == 3 and "gone cannot be reached" in done.stdout and "Connection timed out" in done.stdout
    assert "ssh gone true" in done.stdout and "python" in done.stdout, "what a has is still said"


@pytest.mark.nightly
def test_64_nodes_are_asked_side_by_side(fake_ssh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is printed, and held against a bound far above it: this machine is shared."""
    monkeypatch.chdir(tmp_path)
    start, cpu = time.monotonic(), sum(os.times()[:4])
    findings = examine_nodes(parse_hosts(",".join(f"n{number}" for number in range(64))), Question())
    print(f"64 nodes: {time.monotonic() - start:.1f} s, {sum(os.times()[:4]) - cpu:.1f} s of CPU")
    assert findings[0].severity == "ok" and len(findings[0].nodes) == 64


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_pair_is_measured_both_ways_and_no_machine_twice_at_a_time(count: int) -> None:
    names = "abcdefg"[:count]
    rounds = rounds_of(names)
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy)), pairs
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(itertools.permutations(names, 2))


def test_the_slow_link_is_the_one_machines_or_the_one_pairs() -> None:
    """Not that of the machines that it is measured with."""

    def find(slow: dict[str, float], pairs: dict[tuple[str, str], float] | None = None) -> tuple[str, list[str]]:
        rates = {
            (one, other): 1e9 * min(slow.get(one, 1.0), slow.get(other, 1.0))
            for one, other in itertools.permutations("abcde", 2)
        }
        (found,) = compare_rates({**rates, **(pairs or {})})
        assert found.check == "bandwidth"
        return found.severity, list(found.nodes)

    assert find({}) == ("ok", ["all"]) and find({"c": 0.8}) == ("ok", ["all"])
    assert find({"c": 0.5}) == ("warn", ["c"]) and find({"c": 0.1}) == ("fail", ["c"])
    assert find({}, {("a", "b"): 1e8}) == ("warn", ["b -> a"])
    assert compare_rates({}) == []
    assert [one.severity for one in compare_rates({("a", "b"): 1e9, ("b", "a"): 1e8})] == ["warn"], "one way only"
