"""Ranks on CPUs get a heap that keeps its memory, where the machine has one; what users set stays."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import write_conversations

from duoka.cluster import doctor
from duoka.cluster.doctor import Patient
from duoka.cluster.launch import share_of_machine
from duoka.plan import heap
from duoka.plan.advice import advice
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.heap import describe_allocator, find_allocator, has_allocator
from duoka.plan.layout import Layout
from duoka.plan.memory import HEAP, estimate_memory
from duoka.plan.recipe import Work
from duoka.plan.shape import demo_shape
from duoka.process import allocator
from duoka.process.allocator import allocator_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are preloaded on Linux")


def test_the_first_folder_that_has_one_counts(tmp_path):
    own, system = tmp_path / "own", tmp_path / "system"
    for folder, name in ((own, "libjemalloc.so.2"), (system, "libtcmalloc.so.4"), (system, "libtcmalloc_minimal.so.4")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    assert find_allocator([str(tmp_path), str(own), str(system)]) == own / "libjemalloc.so.2"
    assert find_allocator([str(system)]) == system / "libtcmalloc_minimal.so.4"
    assert find_allocator([str(tmp_path)]) is None


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setattr(allocator, "find_allocator", lambda: Path("/lib/libjemalloc.so.2"))
    made = allocator_environment({})
    assert made == {"LD_PRELOAD": "/lib/libjemalloc.so.2"} and describe_allocator(made) == "jemalloc"
    monkeypatch.setattr(allocator, "find_allocator", lambda: Path("/lib/libtcmalloc_minimal.so.4"))
    assert allocator_environment({})["TCMALLOC_RELEASE_RATE"] == "0"
    assert allocator_environment({}, keeps=False) == {"LD_PRELOAD": "/lib/libtcmalloc_minimal.so.4"}, "for a disk's run"
    assert allocator_environment({"TCMALLOC_RELEASE_RATE": "2"}) == {"LD_PRELOAD": "/lib/libtcmalloc_minimal.so.4"}
    assert allocator_environment({"LD_PRELOAD": "/opt/libmine.so"}) == {}
    assert allocator_environment({"DUOKA_MALLOC": "0"}) == {}
    monkeypatch.setattr(allocator, "find_allocator", lambda: None)
    assert allocator_environment({}) == {} and "MALLOC_MMAP_THRESHOLD_" in allocator_environment({}, keeps=False)
    assert describe_allocator({"LD_PRELOAD": "/opt/libmine.so"}) == describe_allocator({}) == ""


def test_doctor_names_the_package_where_bf16_wants_it(tmp_path, monkeypatch):
    patient = Patient(tmp_path, tmp_path, Machine(4, 16 << 30, 8 << 30), 4)
    monkeypatch.setattr(doctor, "find_allocator", lambda: None)
    (plain,) = doctor.check_heap(patient)
    assert plain.severity == "ok"
    (slow,) = doctor.check_heap(replace(patient, machine=replace(patient.machine, cpu_bf16="amx_bf16")))
    assert slow.severity == "warn" and "apt install libtcmalloc-minimal4" in slow.fix
    gpus = (Gpu("H100", 80 << 30, 79 << 30, 9.0),)
    assert not list(doctor.check_heap(replace(patient, machine=replace(patient.machine, gpus=gpus))))


@pytest.mark.parametrize(("flag", "cost"), [("amx_bf16", "two thirds of its speed"), ("", "twice its time")])
def test_doctor_asks_for_a_compiler_on_cpus(tmp_path, monkeypatch, flag, cost):
    narrow = Patient(tmp_path, tmp_path, Machine(4, 16 << 30, 8 << 30, cpu_bf16=flag), 4)
    gpus = (Gpu("H100", 80 << 30, 79 << 30, 9.0),)
    assert not list(doctor.check_kernels(replace(narrow, machine=replace(narrow.machine, gpus=gpus))))
    monkeypatch.delenv("DUOKA_NATIVE", raising=False)
    monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/g++")
    assert [one.severity for one in doctor.check_kernels(narrow)] == ["ok"]
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    (slow,) = doctor.check_kernels(narrow)
    assert slow.severity == "warn" and "apt install g++" in slow.fix and cost in slow.seen
    monkeypatch.setenv("DUOKA_NATIVE", "0")
    (off,) = doctor.check_kernels(narrow)
    assert off.fix == "unset DUOKA_NATIVE"


@pytest.mark.timeout(240)
@pytest.mark.skipif(find_allocator() is None, reason="neither tcmalloc nor jemalloc is installed")
def test_a_run_has_it_says_it_and_computes_the_same(tiny_model, tmp_path):
    data = write_conversations(tmp_path / "chats.jsonl", 12)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {tiny_model}\ndata: {{train: [{data}]}}\ntrain: {{epochs: 2}}\nlog: {{to: []}}\noutput: x\n"
    )
    losses = {}
    for switch in ("1", "0"):
        command = [sys.executable, "-m", "duoka", "train", str(yaml), f"output={tmp_path / switch}"]
        env = {**os.environ, "DUOKA_MALLOC": switch}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert ("heap " in done.stdout) == (switch == "1")
        lines = (tmp_path / switch / "events" / "run.jsonl").read_text().splitlines()
        losses[switch] = [event["loss"] for event in map(json.loads, lines) if event["type"] == "step"]
    assert losses["1"] == losses["0"] and losses["1"]


def test_what_is_compiled_for_a_shape_is_not_kept_for_a_thousand_others() -> None:
    """1.44 GiB where 905 MiB were planned, in the demo's 42 steps of other lengths each."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        assert share_of_machine(2, 4, {})[name] == "64"
        assert share_of_machine(2, 4, {name: "9"})[name] == "9"


def test_a_plan_counts_what_the_c_library_s_heap_keeps(monkeypatch):
    monkeypatch.setattr(heap, "find_allocator", lambda: None)
    assert not has_allocator({}) and has_allocator({"LD_PRELOAD": "/lib/libjemalloc.so.2"})
    monkeypatch.setattr(heap, "find_allocator", lambda: Path("/lib/libjemalloc.so.2"))
    assert has_allocator({}) and not has_allocator({"DUOKA_MALLOC": "0"}) and not has_allocator({"LD_PRELOAD": "/x.so"})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert has_allocator({}), "another heap than the one that was measured"
    memories = {
        (device, known, disk): estimate_memory(
            Work(demo_shape(), None, device, has_allocator=known), Layout(precision="fp32", disk=disk), 2048
        )
        for device in ("cpu", "cuda") for known in (True, False) for disk in ("none", "optimizer")
    }  # fmt: skip
    plain, kept = memories["cpu", True, "none"], memories["cpu", False, "none"]
    more = HEAP * (plain.parts["activations"] + plain.parts["loss"])
    assert kept.parts["heap"] == pytest.approx(more, rel=1e-6) and "heap" in kept.formulas
    assert kept.peak_bytes - plain.peak_bytes == pytest.approx(more, rel=1e-6) and kept.high_bytes > plain.high_bytes
    for device, disk in (("cpu", "optimizer"), ("cuda", "none")):
        assert memories[device, False, disk].peak_bytes == memories[device, True, disk].peak_bytes


def test_a_plan_with_files_says_what_the_c_library_s_heap_costs_it():
    """0.68 of the speed where a fresh page is dear, at the memory that tcmalloc has too."""
    on_disk, sharded = Layout(strategy="fsdp", disk="params"), Layout(strategy="fsdp")
    for layout, words in ((on_disk, "third of its speed"), (sharded, "MALLOC_MMAP_THRESHOLD_"), (Layout(), None)):
        for known in (True, False):
            work = Work(demo_shape(), None, "cpu", has_allocator=known)
            said = advice(work, layout, None, (), 1)
            assert [words in one for one in said] == ([] if known or words is None else [True]), said
