"""Is this machine fit for training? A table of checks, each of which returns a Finding; none changes anything.

`duoka doctor` prints them. Every check works without torch, ends within seconds, and says what to do. A `fail` is
a blocker (exit code 3); a `warn` costs speed or comfort, or will hurt later.
"""

from __future__ import annotations

import locale
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from duoka.cluster import node_probe
from duoka.cluster.compare_devices import DEVICE_COMPARISONS
from duoka.cluster.findings import Severity, Survey
from duoka.cluster.launch import threads_per_process
from duoka.cluster.probe import (
    is_among,
    read_driver,
    read_nccl_version,
    read_torch_cuda,
    read_versions,
    wanted_versions,
)
from duoka.plan.compiler import INSTALL as INSTALL_COMPILER
from duoka.plan.compiler import SWITCH, find_compiler
from duoka.plan.hardware import Machine, count_usable_cores, read_machine, read_process_limit
from duoka.plan.heap import INSTALL, find_allocator
from duoka.process.environ import LOOPBACK
from duoka.runs.cache import cache_folder
from duoka.units import format_bytes

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "pyarrow", "pydantic", "PyYAML")
OPTIONAL = ("rich", "click", "psutil", "tensorboard", "jinja2")
_GIB = 1 << 30
# A rank's own thread, its loader's, NCCL's and the writer of checkpoints; tokenizing takes all that there are.
_CORES_WANTED = 8
_PROCESSES_WANTED = 512  # of a world of a few ranks: each has some dozens of threads
# The oldest driver that runs programs of a CUDA's major version (NVIDIA's table of minor version compatibility, Linux).
OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}


@dataclass(frozen=True)
class Finding:
    """One check's answer."""

    severity: Severity
    check: str
    seen: str
    wanted: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """What the checks look at."""

    output: Path  # where runs will be written
    cache: Path
    machine: Machine
    num_cores: int


Check = Callable[[Patient], Iterator[Finding]]


def examine(output: Path, cache: Path | None = None) -> list[Finding]:
    """All findings, in the order of the table. A check that itself breaks is a finding, not a crash."""
    patient = Patient(output.absolute(), cache or cache_folder(), read_machine(), count_usable_cores())
    found: list[Finding] = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            found += check(patient)
        except (OSError, ValueError, RuntimeError) as error:
            found.append(Finding("skip", name, f"could not look: {error}"))
    return found


def check_python(patient: Patient) -> Iterator[Finding]:
    seen = f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"
    if sys.prefix == sys.base_prefix and not os.environ.get("CONDA_PREFIX"):
        fix = "python3 -m venv .venv && . .venv/bin/activate"
        yield Finding("warn", "python", f"{seen}, the system's own", "an environment of its own", fix)
    else:
        yield Finding("ok", "python", seen)


def check_packages(patient: Patient) -> Iterator[Finding]:
    versions = read_versions((*NEEDED, *OPTIONAL))
    for name in NEEDED:
        version = versions[name]
        if version is None:
            yield Finding("fail", name, "not installed", "installed", f"pip install {name}")
        elif (wanted := wanted_versions(name)) and not is_among(version, wanted):
            fix = f"pip install '{name}{wanted}'"
            yield Finding("warn", name, f"{version}, with which duoka was not tried", wanted, fix)
        elif name == "torch" and patient.machine.notes:
            yield Finding(
                "warn", name, f"{version}; {patient.machine.notes[0]}", "a CUDA build", "install torch for CUDA"
            )
        else:
            yield Finding("ok", name, version)
    missing = [name for name in OPTIONAL if versions[name] is None]
    if missing:
        words = ", ".join(missing)
        yield Finding(
            "warn", "other packages", f"not installed: {words}", "installed", f"pip install {' '.join(missing)}"
        )


def check_processor(patient: Patient) -> Iterator[Finding]:
    cores, given = patient.num_cores, os.environ.get("OMP_NUM_THREADS")
    logical = os.cpu_count() or 1
    shown = f"{cores} usable of {logical} cores, {patient.machine.cpu_name}"
    shown = f"{shown}; {patient.machine.bf16_reason}"
    if cores < _CORES_WANTED:
        fix = "a larger machine or share of it; duoka runs here, and takes longer to tokenize and load"
        yield Finding("warn", "processor", shown, f"{_CORES_WANTED} cores or more", fix)
    else:
        yield Finding("ok", "processor", shown)
    if given is None:
        two = threads_per_process(cores, 2)
        yield Finding("ok", "threads", f"set per process: {cores} for one process, {two} for two")
    elif not given.isdigit() or int(given) < 1:
        yield Finding("fail", "threads", f"OMP_NUM_THREADS={given!r}", "a number", "unset OMP_NUM_THREADS")
    elif int(given) > cores:
        fix = "unset OMP_NUM_THREADS: duoka sets it per process"
        yield Finding("warn", "threads", f"OMP_NUM_THREADS={given}", f"at most {cores}", fix)
    else:
        yield Finding("ok", "threads", f"OMP_NUM_THREADS={given} in the environment: every process uses that many")


def check_heap(patient: Patient) -> Iterator[Finding]:
    if patient.machine.gpus or sys.platform != "linux":
        return
    path = find_allocator()
    if path is not None:
        yield Finding("ok", "heap", f"{path}: ranks on the CPU get it")
    elif patient.machine.has_native_bf16:
        seen = "the C library's, which costs bf16 training on CPUs some of its speed (a fifth without compiled kernels)"
        yield Finding("warn", "heap", seen, "tcmalloc or jemalloc", INSTALL)
    else:
        yield Finding("ok", "heap", f"the C library's; less memory with tcmalloc: {INSTALL}")


def check_kernels(patient: Patient) -> Iterator[Finding]:
    if patient.machine.gpus:
        return
    path = find_compiler()
    if os.environ.get(SWITCH) == "0":
        yield Finding("warn", "kernels", f"{SWITCH}=0: training goes without them", "unset", f"unset {SWITCH}")
    elif path is None:
        narrow = patient.machine.has_native_bf16
        cost = (
            "bf16 training on this CPU goes at two thirds of its speed" if narrow else "attention takes twice its time"
        )
        yield Finding("warn", "kernels", f"no C++ compiler: {cost}", "g++ or clang++", INSTALL_COMPILER)
    else:
        yield Finding("ok", "kernels", f"compiled by {path} when a run first needs them")


def check_memory(patient: Patient) -> Iterator[Finding]:
    machine = patient.machine
    import psutil

    seen = f"{format_bytes(machine.available_bytes)} available of {format_bytes(machine.memory_bytes)}"
    swap = psutil.swap_memory()
    if swap.total:
        seen += f"; {format_bytes(swap.used)} of {format_bytes(swap.total)} swap used, which is no help to a GPU"
    if machine.available_bytes < 2 * _GIB:
        fix = "close other programs, or raise the container's memory limit"
        yield Finding("warn", "memory", seen, "2 GiB or more", fix)
    else:
        yield Finding("ok", "memory", seen)


def check_gpu(patient: Patient) -> Iterator[Finding]:
    gpus = patient.machine.gpus
    if not gpus:
        why = patient.machine.notes[0] if patient.machine.notes else "no NVIDIA GPU, or no nvidia-smi"
        yield Finding("skip", "gpu", why)
        return
    for number, gpu in enumerate(gpus):
        seen = f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)}"
        if gpu.free_bytes < 0.5 * gpu.memory_bytes:
            fix = "nvidia-smi shows who uses it; choose others with CUDA_VISIBLE_DEVICES"
            yield Finding("warn", f"gpu {number}", seen, "mostly free", fix)
        else:
            yield Finding("ok", f"gpu {number}", seen)


def check_driver(patient: Patient) -> Iterator[Finding]:
    """NVIDIA's driver, and whether it runs the CUDA that torch was built for."""
    if not patient.machine.gpus:
        return
    driver, cuda = read_driver(), read_torch_cuda()
    if not driver:
        yield Finding("skip", "driver", "nvidia-smi does not say which driver is there")
        return
    if not cuda:
        yield Finding(
            "warn", "driver", f"{driver}; torch is a build without CUDA", "a CUDA build", "install torch for CUDA"
        )
        return
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
    seen = f"{driver}, and torch is built for CUDA {cuda}"
    if oldest and tuple(int(part) for part in driver.split(".")[:2]) < oldest:
        wanted = f"{'.'.join(map(str, oldest))} or newer"
        yield Finding("fail", "driver", seen, wanted, "install a newer driver, or a torch of an older CUDA")
    else:
        yield Finding("ok", "driver", seen)


def check_devices(patient: Patient) -> Iterator[Finding]:
    """Cards, links and the GPUs' state: what several machines are compared by (compare_devices.py), of this one."""
    facts = {**node_probe.devices(), "env": dict(os.environ)}
    survey = Survey({"here": facts}, str(Path.cwd()), 0.0, 0.0, {"here": ""})
    for comparison in DEVICE_COMPARISONS:
        for found in comparison(survey):
            if found.severity in ("warn", "fail") or (found.severity == "ok" and patient.machine.gpus):
                yield Finding(
                    found.severity, found.check, "; ".join(found.nodes.values()), found.cause, found.fix.strip()
                )


def check_communication(patient: Patient) -> Iterator[Finding]:
    """The communication backend: NCCL between GPUs, gloo between CPUs."""
    torch = read_versions(("torch",))["torch"]
    nccl = read_nccl_version()
    if torch is None:
        yield Finding("skip", "communication", "torch is not installed")
    elif nccl:
        yield Finding("ok", "communication", f"NCCL {nccl} between GPUs, gloo between CPUs")
    elif patient.machine.gpus:
        seen, fix = f"no NCCL is installed beside torch {torch}", "duoka comm test shows whether torch brings its own"
        yield Finding("warn", "communication", seen, "NCCL", fix)
    else:
        yield Finding("ok", "communication", "gloo between CPUs; no NCCL, which GPUs would need")
    if algorithm := os.environ.get("NCCL_ALGO"):
        fix = "unset NCCL_ALGO: NCCL's own tuner takes the fastest for each size"
        yield Finding("warn", "NCCL_ALGO", f"forced to {algorithm}", "not set", fix)


def check_output_folder(patient: Patient) -> Iterator[Finding]:
    yield from _check_folder("output folder", patient.output, need_bytes=5 * _GIB, fix="choose another output:")


def check_cache_folder(patient: Patient) -> Iterator[Finding]:
    fix = "set DUOKA_CACHE to a folder that you may write to"
    yield from _check_folder("cache folder", patient.cache, need_bytes=2 * _GIB, fix=fix)


def _check_folder(name: str, folder: Path, *, need_bytes: int, fix: str) -> Iterator[Finding]:
    """Writable, and with room. Writes in the nearest folder that exists and leaves nothing there."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        yield Finding("fail", name, f"{there} is a file", "a folder", fix)
        return
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"duoka")
            file.flush()
    except OSError as error:
        yield Finding("fail", name, f"{there}: {error.strerror or error}", "a folder to write to", fix)
        return
    free = shutil.disk_usage(there).free
    seen = f"{folder}: {format_bytes(free)} free"
    if free < need_bytes:
        yield Finding("warn", name, seen, f"{format_bytes(need_bytes)} or more", "free some space, or " + fix)
    else:
        yield Finding("ok", name, seen)


def check_shared_memory(patient: Patient) -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("skip", "/dev/shm", "this system has none")
        return
    usage = shutil.disk_usage(folder)
    seen = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _GIB:
        fix = "in a container: docker run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory"
        yield Finding("warn", "/dev/shm", seen, "1 GiB or more", fix)
    else:
        yield Finding("ok", "/dev/shm", seen)


def check_open_files(patient: Patient) -> Iterator[Finding]:
    # Ranks raise the soft limit to the hard one (process/open_files.py): that one decides. macOS begins with 256.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    seen = "unlimited" if unlimited else str(hard)
    seen += f" ({soft} at first; ranks raise it)" if soft not in (hard, resource.RLIM_INFINITY) else ""
    if not unlimited and hard < 1024:
        yield Finding("fail", "open files", seen, "1024 or more", "ulimit -n 65536")
    elif not unlimited and hard < 4096 and patient.machine.gpus:
        yield Finding("warn", "open files", seen, "4096 or more", "ulimit -n 65536")
    else:
        yield Finding("ok", "open files", seen)


def check_processes(patient: Patient) -> Iterator[Finding]:
    """Threads count too: each rank has those of its cores, of its tokenizer, of its exchange and its watchers."""
    user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = {"ulimit -u": None if user == resource.RLIM_INFINITY else user, "pids.max": read_process_limit()}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        yield Finding("ok", "processes", "no limit")
        return
    name, least = min(known.items(), key=lambda one: one[1])
    shown = f"{least:,} processes and threads ({name})"
    if least < _PROCESSES_WANTED:
        fix = "ulimit -u 65536; Docker: --pids-limit; Kubernetes: podPidsLimit"
        yield Finding("warn", "processes", shown, f"{_PROCESSES_WANTED:,} or more", fix)
    else:
        yield Finding("ok", "processes", shown)


def check_loopback(patient: Patient) -> Iterator[Finding]:
    """Ranks of one machine rendezvous here: a real listener and connection, not only the settings."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(3)
            port = server.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=3) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"duoka")
                    heard = other.recv(5)
    except OSError as error:
        fix = "bring the interface lo up, and let no firewall block 127.0.0.1"
        yield Finding("fail", "loopback", f"{error.strerror or error}", f"a connection to {LOOPBACK}", fix)
        return
    good = heard == b"duoka"
    yield Finding("ok" if good else "fail", "loopback", f"{LOOPBACK} answers, port {port} was free")


def check_host_name(patient: Patient) -> Iterator[Finding]:
    name = socket.gethostname()
    start = time.monotonic()
    try:
        address = str(socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0])
    except OSError as error:
        fix = f"add a line to /etc/hosts: 127.0.0.1 {name}"
        yield Finding("warn", "host name", f"{name} does not resolve ({error.strerror or error})", "an address", fix)
        return
    seconds = time.monotonic() - start
    if seconds > 2:
        fix = f"add {name} to /etc/hosts, or mend the name server"
        yield Finding("warn", "host name", f"{name} is {address}, found after {seconds:.0f} s", "at once", fix)
    else:
        yield Finding("ok", "host name", f"{name} is {address}")


def check_text(patient: Patient) -> Iterator[Finding]:
    stream = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    files = locale.getpreferredencoding(False).lower().replace("-", "")
    if stream == "utf8" and files == "utf8":
        yield Finding("ok", "text", "UTF-8 on screen and in files")
    else:
        fix = "export LC_ALL=C.UTF-8"
        yield Finding("warn", "text", f"{stream} on screen, {files} in files", "UTF-8: Chinese text needs it", fix)


def check_clock(patient: Patient) -> Iterator[Finding]:
    """Resuming and ages compare times of files with the clock."""
    now, built = time.time(), Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if now < 1_577_836_800:  # 2020: a board without a battery
        yield Finding("fail", "clock", shown, "today", "set the clock (timedatectl set-ntp true)")
    elif now < built - 86400:
        yield Finding("warn", "clock", f"{shown}, before duoka was installed", "now", "set the clock")
    else:
        yield Finding("ok", "clock", shown)


CHECKS: tuple[Check, ...] = (
    check_python, check_packages, check_processor, check_heap, check_kernels, check_memory, check_gpu, check_driver,
    check_devices, check_communication,
    check_output_folder, check_cache_folder, check_shared_memory, check_open_files, check_processes,
    check_loopback, check_host_name, check_text, check_clock,
)  # fmt: skip
