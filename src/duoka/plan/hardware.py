"""This machine, as far as a plan needs it: memory, cores, GPUs, and whether it computes bf16 natively.

Asks the operating system and nvidia-smi; never torch. Numbers are of this moment and this container: a cgroup's
limit counts when it is below the machine's memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from duoka.plan.compiler import has_kernels, why_no_layers
from duoka.plan.gpu_packages import why_no_liger, why_no_triton
from duoka.plan.heap import has_allocator

# Instructions that multiply bf16 matrices in hardware. Without them bf16 is emulated, and slower than fp32.
_CPU_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
# Where oneDNN, torch's library of products, is told the highest that it may use: the first of these that is set.
_HIGHEST = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
_BELOW_BF16 = (*_BELOW_AVX512, "AVX512_CORE", "AVX512_CORE_VNNI")
_ZEN_5 = 26  # AMD's family from which on a core computes 512 bits at once
_AMPERE = 8.0  # 2020: bf16, and torch's FlashAttention
_VOLTA = 7.0  # 2017: fp16 in tensor cores


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    capability: float  # CUDA compute capability, such as 8.0


@dataclass(frozen=True)
class Machine:
    """One machine. With GPUs, a rank has a GPU of its own; without, ranks share cores and memory."""

    num_cores: int
    memory_bytes: int
    available_bytes: int
    cpu_name: str = "CPU"
    cpu_bf16: str = ""  # the instruction set that computes bf16, or empty
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = field(default=())
    bf16_hindrance: str = ""  # the setting that keeps torch from the CPU's bf16
    disk_free_bytes: int | None = None  # where a run offloads to; None: not looked at
    threads_per_rank: int = 0  # OMP_NUM_THREADS; 0: not set, so that ranks share all cores
    has_kernels: bool = True  # compiled ones, on CPUs
    no_layers: str = ""  # why torch.compile compiles none, on CPUs
    has_allocator: bool = True  # tcmalloc or jemalloc, for ranks on CPUs
    no_liger: str = ""  # why Liger's kernels are not there for GPUs
    no_triton: str = ""
    mkl_is_slow: bool = False  # so that oneDNN multiplies fp32 matrices on CPUs
    halves_avx512: bool = False  # an AMD's

    def cores_used(self, num_local_ranks: int) -> int:
        """By all ranks together, when CPUs compute."""
        return min(self.num_cores, (self.threads_per_rank or self.num_cores) * num_local_ranks)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def has_native_bf16(self) -> bool:
        if self.gpus:
            return all(gpu.capability >= _AMPERE for gpu in self.gpus)
        return bool(self.cpu_bf16) and not self.bf16_hindrance

    @property
    def has_flash(self) -> bool:
        return all(gpu.capability >= _AMPERE for gpu in self.gpus)

    @property
    def has_fast_fp16(self) -> bool:
        return bool(self.gpus) and all(gpu.capability >= _VOLTA for gpu in self.gpus)

    @property
    def bf16_reason(self) -> str:
        """Why bf16 is native here, or why it is not, in one line."""
        if self.gpus:
            slowest = min(self.gpus, key=lambda gpu: gpu.capability)
            verb = "computes" if self.has_native_bf16 else "does not compute"
            return f"{slowest.name} (compute capability {slowest.capability:g}) {verb} bf16 natively"
        if self.bf16_hindrance:
            return f"{self.bf16_hindrance} keeps torch from the CPU's bf16, so it would be emulated"
        if self.cpu_bf16:
            return f"the CPU has {self.cpu_bf16}"
        return "the CPU has neither amx_bf16 nor avx512_bf16, so bf16 would be emulated"

    def available_per_rank(self, num_local_ranks: int) -> int:
        """Memory that one rank may use: its GPU's, or an equal share of what is available."""
        if self.gpus:
            return min(gpu.free_bytes for gpu in self.gpus)
        return self.available_bytes // max(1, num_local_ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "cpu": self.cpu_name,
            "num_cores": self.num_cores,
            "memory_bytes": self.memory_bytes,
            "available_bytes": self.available_bytes,
            "native_bf16": self.has_native_bf16,
            "gpus": [vars(gpu) for gpu in self.gpus],
        }


def available_memory_bytes() -> int:
    """Of host memory, in this container, now."""
    return read_memory()[1]


def read_memory() -> tuple[int, int]:
    """(all, available) bytes of host memory in this container, now."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit = read_cgroup_limit()
    return (total, available) if limit is None else (min(total, limit.limit_bytes), min(available, limit.free_bytes))


def read_machine(env: Mapping[str, str] = os.environ) -> Machine:
    """This machine, now."""
    total, available = read_memory()
    cpu_name, cpu_bf16 = read_cpu()
    gpus = read_gpus(env)
    notes: tuple[str, ...] = ()
    if gpus and _torch_has_no_gpu():
        notes = (f"{len(gpus)} GPU found, but the installed torch is built for CPUs only: planned for the CPU",)
        gpus = ()
    threads = env.get("OMP_NUM_THREADS", "")
    return Machine(
        count_usable_cores(), total, available, cpu_name, cpu_bf16, gpus, notes, _bf16_hindrance(cpu_bf16, env),
        threads_per_rank=int(threads) if threads.isdigit() else 0, has_kernels=has_kernels(env),
        no_layers=why_no_layers(env), has_allocator=has_allocator(env), no_liger=why_no_liger(env),
        no_triton=why_no_triton(), mkl_is_slow=mkl_is_slow(env=env), halves_avx512=halves_avx512(),
    )  # fmt: skip


_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def count_usable_cores(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Cores that this process may use: its affinity, and its groups' share of time when that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _own_groups("cpu", root, own) if (quota := _read_cpu_quota(folder))]
    return max(1, min(cores, int(min(quotas, default=cores))))


def _own_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """This process's group that `controller` limits and the groups above it, in both systems of groups. A container
    may see its own as the root."""
    yield from (root, root / controller)
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.strip("/")
        while top in folder.parents:
            yield folder
            folder = folder.parent


def _read_cpu_quota(group: Path) -> float | None:
    try:
        limit, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        try:
            limit = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
        except OSError:
            return None
    try:
        return int(limit) / int(period) if int(limit) > 0 else None
    except ValueError:  # "max"
        return None


def _torch_has_no_gpu() -> bool:
    """The wheel's version tells (2.11.0+cpu) without the seconds that importing it takes."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """(name, the bf16 instruction set or an empty string). All-empty where the system has no such file."""
    facts = _read_cpuinfo(path)
    flags = read_cpu_flags(path)
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    return name, next((flag for flag in _CPU_BF16_FLAGS if flag in flags), "")


def _bf16_hindrance(cpu_bf16: str, env: Mapping[str, str]) -> str:
    name = next((name for name in _HIGHEST if env.get(name)), "")
    return f"{name}={env[name]}" if name and cpu_bf16 and env[name].upper() in _BELOW_BF16 else ""


def has_cpu_bf16(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torch multiplies bf16 matrices on this CPU by instructions for them."""
    _, cpu_bf16 = read_cpu()
    return bool(cpu_bf16) and not _bf16_hindrance(cpu_bf16, env)


def mkl_is_slow(path: Path = Path("/proc/cpuinfo"), env: Mapping[str, str] = os.environ) -> bool:
    """Whether torch's library of fp32 products leaves this CPU's widest instructions unused, and oneDNN uses them."""
    is_amd = _read_cpuinfo(path).get("vendor_id") == "AuthenticAMD"
    limit = next((env[name].upper() for name in _HIGHEST if env.get(name)), "")
    return is_amd and "avx512f" in read_cpu_flags(path) and limit not in _BELOW_AVX512


def halves_avx512(path: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether AMD's processor computes AVX-512 in two halves, as Zen 4 does: no wider than what MKL uses there."""
    facts = _read_cpuinfo(path)
    family = facts.get("cpu family", "")
    return facts.get("vendor_id") == "AuthenticAMD" and family.isdigit() and int(family) < _ZEN_5


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets by the kernel's names; empty where the system has no such file."""
    facts = _read_cpuinfo(path)
    return set((facts.get("flags") or facts.get("features", "")).split())


def _read_cpuinfo(path: Path) -> dict[str, str]:
    """Facts of the first core, by their names in small letters."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


# Limit, use, and the parts of it that the kernel gives back, by the newer and the older system of groups.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


@dataclass(frozen=True)
class CgroupLimit:
    limit_bytes: int
    free_bytes: int


def read_cgroup_limit(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> CgroupLimit | None:
    """The tightest memory limit of this container and the groups above it, or None without a limit."""
    found = [limit for folder in _own_groups("memory", root, own) for limit in _limits_of(folder)]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


def _limits_of(group: Path) -> Iterator[CgroupLimit]:
    for limit_name, usage_name, cache_names in _MEMORY_FILES:
        limit, usage = _read_number(group / limit_name), _read_number(group / usage_name)
        # An absent limit is written as "max", or as a number near 2**63.
        if limit is not None and usage is not None and limit < 1 << 60:
            cache = sum(_read_field(group / "memory.stat", name) for name in cache_names)
            yield CgroupLimit(limit, max(0, min(limit, limit - usage + cache)))


def read_process_limit(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int | None:
    """How many processes and threads the tightest of this process's groups may have; None: as many as it likes."""
    found = (_read_number(folder / "pids.max") for folder in _own_groups("pids", root, own))
    return min((limit for limit in found if limit is not None), default=None)


def count_oom_kills(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int | None:
    """Processes of this one's group that the kernel has killed for want of memory so far; None where it does not say.

    Of the innermost group that counts: kills in containers beside this one are nobody's here.
    """
    inner = [*_own_groups("memory", root, own)][2:]
    for folder in (*inner, root, root / "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (folder / name).is_file():
                return _read_field(folder / name, "oom_kill")
    return None


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_field(path: Path, name: str) -> int:
    """One number of a file of `name number` lines; page cache that the kernel gives back counts as free."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def read_gpus(env: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that this process may use; none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free,compute_cap"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout, env.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's CSV, in the order and number that CUDA_VISIBLE_DEVICES leaves."""
    by_name: dict[str, Gpu] = {}
    order: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            index, uuid, name, total, free, capability = cells
            gpu = Gpu(name, int(total) << 20, int(free) << 20, float(capability))
        except ValueError:
            continue  # a card that answers [N/A] cannot be planned for
        order.append(gpu)
        by_name[index] = by_name[uuid] = gpu
    if visible is None:
        return tuple(order)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        found = by_name.get(word)
        if found is None and word.startswith("GPU-"):  # a shortened uuid
            found = next((gpu for uuid, gpu in by_name.items() if uuid.startswith(word)), None)
        if found is None:
            break  # as CUDA does: what follows an unknown name is invisible too
        chosen.append(found)
    return tuple(chosen)
