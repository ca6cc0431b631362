"""Reading a machine: made-up files of the operating system in, facts out."""

import sys
from dataclasses import replace

import pytest

from duoka.cluster import node_probe
from duoka.plan import hardware
from duoka.plan.catalog import cluster_of
from duoka.plan.hardware import (
    Machine,
    count_usable_cores,
    parse_gpus,
    read_cgroup_limit,
    read_cpu,
    read_machine,
)

MIB = 2**20
SMI = """0, GPU-aaaa-1, NVIDIA A100-SXM4-80GB, 81920, 81000, 8.0
1, GPU-bbbb-2, Tesla T4, 15360, 15000, 7.5
2, GPU-cccc-3, NVIDIA H100, [N/A], [N/A], 9.0
"""


def test_this_machine_can_be_read():
    machine = read_machine(env={"CUDA_VISIBLE_DEVICES": ""})
    assert machine.num_cores >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.device == "cpu" and machine.bf16_reason


def test_a_plan_has_the_cores_that_a_container_leaves(monkeypatch):
    monkeypatch.setattr("duoka.plan.hardware.count_usable_cores", lambda: 3)
    assert read_machine().num_cores == 3


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA A100-SXM4-80GB", "Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA A100-SXM4-80GB"]),
        ("GPU-bbbb", ["Tesla T4"]),
        ("0,7,1", ["NVIDIA A100-SXM4-80GB"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_visible_devices_leaves(visible, names):
    assert [gpu.name for gpu in parse_gpus(SMI, visible)] == names


def test_gpu_memory_and_capability_are_read():
    gpu = parse_gpus(SMI, "0")[0]
    assert (gpu.memory_bytes, gpu.free_bytes, gpu.capability) == (81920 * MIB, 81000 * MIB, 8.0)


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx512f avx512_bf16", "avx512_bf16"), ("amx_bf16 avx512_bf16", "amx_bf16"), ("fpu avx2", "")],
)
def test_native_bf16_is_read_from_the_cpu_flags(tmp_path, flags, found):
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name : A fine CPU\nflags\t\t: {flags}\n", encoding="utf-8")
    assert read_cpu(path) == ("A fine CPU", found)
    assert read_cpu(tmp_path / "missing")[1] == ""


@pytest.mark.parametrize(("highest", "native"), [("avx2", False), ("AVX512_CORE", False), ("AVX512_CORE_AMX", True)])
def test_a_cpu_kept_from_its_bf16_does_not_compute_it(monkeypatch, highest, native):
    monkeypatch.setattr("duoka.plan.hardware.read_cpu", lambda: ("A fine CPU", "avx512_bf16"))
    machine = read_machine(env={"CUDA_VISIBLE_DEVICES": "", "ONEDNN_MAX_CPU_ISA": highest})
    assert machine.has_native_bf16 == native
    assert ("ONEDNN_MAX_CPU_ISA=" in machine.bf16_reason) != native


def test_the_older_name_of_that_setting_counts_where_the_newer_is_not_set(monkeypatch):
    """As in torch's oneDNN: bf16 was taken, and emulated at a quarter of fp32's speed."""
    monkeypatch.setattr("duoka.plan.hardware.read_cpu", lambda: ("A fine CPU", "amx_bf16"))
    older = {"CUDA_VISIBLE_DEVICES": "", "DNNL_MAX_CPU_ISA": "AVX2"}
    machine = read_machine(env={**older, "ONEDNN_MAX_CPU_ISA": ""})
    assert not machine.has_native_bf16 and "DNNL_MAX_CPU_ISA=AVX2" in machine.bf16_reason
    assert read_machine(env={**older, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}).has_native_bf16


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_tightest_limit_of_nested_groups_counts_and_page_cache_is_free(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    write(own, "0::/outer/inner\n")
    write(root / "outer/inner/memory.max", "max\n")
    write(root / "outer/inner/memory.current", "1\n")
    write(root / "outer/memory.max", f"{1000 * MIB}\n")
    write(root / "outer/memory.current", f"{600 * MIB}\n")
    write(root / "outer/memory.stat", f"anon 5\ninactive_file {100 * MIB}\nactive_file {30 * MIB}\n")
    limit = read_cgroup_limit(root, own)
    assert limit is not None
    assert (limit.limit_bytes, limit.free_bytes) == (1000 * MIB, 530 * MIB)


def test_limits_of_the_older_kind_of_groups_are_read_and_none_is_none(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    write(own, "9:name=systemd:/\n4:memory:/job\n0::/\n")
    write(root / "memory/job/memory.limit_in_bytes", f"{300 * MIB}")
    write(root / "memory/job/memory.usage_in_bytes", f"{100 * MIB}")
    write(root / "memory/memory.limit_in_bytes", "9223372036854771712")
    write(root / "memory/memory.usage_in_bytes", "5")
    limit = read_cgroup_limit(root, own)
    assert limit is not None and limit.free_bytes == 200 * MIB
    write(own, "0::/\n")
    assert read_cgroup_limit(root, own) is None
    assert read_cgroup_limit(root, tmp_path / "missing") is None


@pytest.mark.parametrize("older", [False, True])
def test_the_share_of_cpu_time_of_nested_groups_counts(tmp_path, monkeypatch, older):
    """Of a job of Slurm's or systemd's, where the root of groups is the machine's and has no limit."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    write(own, "1:cpu,cpuacct:/jobs/7/step\n" if older else "0::/jobs/7/step\n")
    assert count_usable_cores(root, own) == 16
    for group, quota in (("jobs/7", 400000), ("jobs/7/step", -1)):
        if older:
            write(root / "cpu" / group / "cpu.cfs_quota_us", f"{quota}\n")
            write(root / "cpu" / group / "cpu.cfs_period_us", "100000\n")
        else:
            write(root / group / "cpu.max", f"{quota if quota > 0 else 'max'} 100000\n")
    assert count_usable_cores(root, own) == 4


def test_a_node_tells_what_its_groups_leave_it(monkeypatch):
    """It counted the machine's cores, and page cache as used memory."""
    monkeypatch.setattr(hardware, "count_usable_cores", lambda: 3)
    monkeypatch.setattr(hardware, "read_memory", lambda: (700, 600))
    assert node_probe.cores() == 3 and node_probe.memory() == {"total": 700, "available": 600}
    monkeypatch.setitem(sys.modules, "duoka.plan.hardware", None)  # where duoka is not there
    assert node_probe.cores() >= 1 and node_probe.memory()["total"] > 700


def test_idle_cores_do_not_count_when_the_user_sets_threads():
    machine = Machine(8, 64 << 30, 60 << 30)
    whole = cluster_of(machine, 1, 2)
    some = cluster_of(replace(machine, threads_per_rank=1), 1, 2)
    assert some.device.fp32_flops == whole.device.fp32_flops / 4 and "2 of 8 cores compute" in some.notes[-1]
    assert cluster_of(replace(machine, threads_per_rank=4), 1, 2).device == whole.device
    assert read_machine(env={"OMP_NUM_THREADS": "3"}).threads_per_rank == 3
