"""Which GPU a rank takes and what it says when there is none for it; torch.cuda is played."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from duoka.comm import world as room
from duoka.comm.world import World, check_own_gpu, pick_device, set_gpu_habits
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError
from duoka.plan.hardware import Gpu, Machine
from duoka.process.environ import RankEnvironment
from duoka.process.interface import choose_interface
from duoka.train.gpus import as_torch_sees


@pytest.fixture
def cuda(monkeypatch):
    """Call it with the number of GPUs that this process sees; the list is told of each device that was set."""
    chosen = []

    def see(count, current=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        facts = SimpleNamespace(uuid="card-1", name="H100", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
        return chosen

    return see


def test_a_rank_takes_the_gpu_of_its_place(cuda, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda(8)
    assert pick_device(3) == torch.device("cuda", 3)
    cuda(1)
    with pytest.raises(ConfigError, match="process 3 of this machine has no GPU: there are 1"):
        pick_device(3)


def test_a_rank_that_was_given_one_gpu_takes_it(cuda, monkeypatch):
    """Slurm's --gpus-per-task=1, Kubernetes, Ray."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    cuda(1)
    assert pick_device(3) == torch.device("cuda", 0)


def test_two_ranks_with_one_gpu_are_refused_by_name(cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cuda(1)
    everyone = [(0, "card-0"), (0, "card-1"), (0, "card-1")]
    monkeypatch.setattr(World, "gather", lambda self, value: everyone)
    check_own_gpu(World(rank=1, size=3, device=torch.device("cuda", 0)))
    with pytest.raises(ConfigError, match="rank 2 has the same GPU as rank 1"):
        check_own_gpu(World(rank=2, size=3, device=torch.device("cuda", 0)))


@pytest.mark.parametrize(("current", "device"), [(0, 2), (5, 5)])
def test_a_group_that_a_script_made_gets_a_device_of_its_own(cuda, monkeypatch, current, device):
    chosen = cuda(8, current)
    monkeypatch.setattr(room.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(room.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(room.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(room.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(room, "read_rank_environment", lambda: None)
    world, _ = room.join_world(ParallelConfig())
    assert world.device == torch.device("cuda", device) and chosen == [world.device]


def test_nccl_comes_with_gloo_for_what_lies_on_the_host():
    assert room.carriers("nccl") == "cpu:gloo,cuda:nccl"
    assert room.carriers("gloo") == "gloo"


def test_a_rank_that_failed_waits_for_nobody(monkeypatch):
    did = []
    monkeypatch.setattr(room.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(room.dist, "destroy_process_group", lambda: did.append("destroy"))
    monkeypatch.setattr(room, "abort_groups", lambda: did.append("abort"))
    gpu = World(size=2, backend="nccl", device=torch.device("cuda", 0))
    room.end_world(gpu, has_failed=True)
    room.end_world(gpu)
    room.end_world(World(size=2, backend="gloo"), has_failed=True)
    assert did == ["abort", "destroy", "destroy"]


def test_what_cuda_reads_from_the_environment_is_set_and_what_a_user_set_stays(monkeypatch):
    env = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setattr(torch.version, "cuda", None)
    set_gpu_habits(env)
    assert len(env) == 2
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    set_gpu_habits(env)
    assert env["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST" and "PYTORCH_ALLOC_CONF" not in env
    set_gpu_habits(other := {"DUOKA_LOGS": "/logs"})
    assert other["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert other["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith("/logs/")


def test_nccl_meets_where_gloo_does(monkeypatch):
    monkeypatch.setattr("duoka.process.interface.interface_towards", lambda host: "eth7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    place = RankEnvironment(0, 0, 4, 2, 0, "10.0.0.1", 1234)
    choose_interface(place)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")


def test_the_plan_is_for_the_gpus_that_torch_sees(cuda):
    cuda(1)
    blind = Machine(8, 64 << 30, 60 << 30)
    gpu = World(size=4, local_size=4, device=torch.device("cuda", 0))
    seen = as_torch_sees(blind, gpu)
    assert seen.device == "cuda" and len(seen.gpus) == 4 and seen.gpus[0] == Gpu("H100", 80 << 30, 70 << 30, 9.0)
    assert as_torch_sees(seen, gpu) == seen
    on_cpu = as_torch_sees(blind, World())  # what this process holds is part of what the plan counts for it
    assert replace(on_cpu, available_bytes=blind.available_bytes) == blind
    assert blind.available_bytes < on_cpu.available_bytes <= blind.memory_bytes
    without = as_torch_sees(seen, World())
    assert not without.gpus and "CUDA does not start" in without.notes[0]
