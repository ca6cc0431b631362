"""Devices and networks to plan for: tables with a source per row, and the user's own measurements.

`--on "2x8xH100-80G@NDR"` becomes a Cluster here, and so does the machine we are on. `duoka bench hardware` writes
hardware.json, which overrides the tables. No torch, no network: rows of text and arithmetic.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from duoka.errors import ConfigError
from duoka.plan.hardware import Gpu, Machine
from duoka.registry import nearest

GIB = 2**30
EMULATED_BF16 = 0.8  # of fp32's speed, on CPUs that widen bf16 to multiply it (model/wide_products.py); 135M, AVX2
# TFLOP/s of a virtual machine's core in products, fp32 and bf16, by the instructions that it has for bf16. With AVX2,
# 2 fused operations of 8 numbers a cycle at 2.5 GHz are 0.08, and less where two "cores" are threads of one. Used when
# nothing was measured; a wide guess, and the plan says so.
CPU_CORE_TFLOPS = {
    "": (0.06, EMULATED_BF16 * 0.06),
    "bf16": (0.06, 0.12),
    "avx512_bf16": (0.09, 0.2),
    "amx_bf16": (0.1, 0.38),
}
WIDE_AMD = (0.22, 0.44)  # Zen 5, whose cores compute 512 bits at once
# What a node has beside its GPUs, when only GPUs are named: about what cloud nodes have for each.
HOST_BYTES_PER_GPU = 128 * GIB


@dataclass(frozen=True)
class Network:
    """A link or a network card: bytes per second each way, and the seconds before the first byte."""

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = ""


@dataclass(frozen=True)
class Device:
    """One accelerator (or one machine's CPU). Peaks are those of dense matrix products."""

    name: str
    generation: str
    capability: float
    memory_bytes: int
    memory_bytes_per_s: float
    half_flops: float
    fp32_flops: float
    source: str
    link: str = "pcie4"
    gpus_per_node: int = 8
    network: str = "10GbE"
    nics_per_node: int = 1
    aliases: tuple[str, ...] = ()
    measured: bool = False  # peaks are what products really reach here, not a data sheet's
    threads_share: float = 1.0  # of a CPU's speed, where one process has several threads, for their synchronization
    fp8_flops: float = 0.0  # dense e4m3, summed in fp32; 0: there are no such products
    fp32_attention: float = 0.0  # flops per second of attention where they were measured, of both passes; 0: not
    half_attention: float = 0.0  # of duoka's own kernel, on CPUs
    half_trained: float = 0.0  # of a CPU's 16-bit products in both passes, with weights' gradients, where measured
    half_frozen: float = 0.0  # without

    def peak_flops(self, precision: str) -> float:
        """Of attention and the head, and what MFU compares with: in fp8 too it is the peak of bf16."""
        if precision == "fp32":
            return self.fp32_flops
        return self.half_flops

    def linear_flops(self, precision: str) -> float:
        """Of products of the layers' linear modules."""
        return self.fp8_flops if precision == "fp8" and self.fp8_flops else self.peak_flops(precision)

    @property
    def kind(self) -> str:
        return "cpu" if self.generation == "cpu" else "cuda"


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices: `link` joins those of a node, `num_nics` cards of `network` join nodes."""

    device: Device
    num_nodes: int
    per_node: int
    link: Network
    network: Network
    num_nics: int = 1
    host_bytes_per_node: int = 0
    is_measured: bool = False
    disk_bytes_per_s: float = 0.0  # 0: not measured
    offload_bytes_per_s: float = 0.0  # of the disk, read and written at once in slices; 0: not measured
    notes: tuple[str, ...] = field(default=())

    @property
    def host_room_bytes(self) -> int:
        """A node's host memory, when it stands empty; where only GPUs are named, what cloud nodes have beside them."""
        return int(0.95 * (self.host_bytes_per_node or HOST_BYTES_PER_GPU * self.per_node))

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def name(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        joined = f", {self.num_nics} x {self.network.name} between nodes" if self.num_nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.device.name} ({self.link.name}{joined})"

    def machine(self) -> Machine:
        """One node of it, as the rest of the plan sees machines. Free memory is all but what drivers keep."""
        device = self.device
        if device.kind == "cpu":
            raise ValueError("a CPU is planned for as the machine that we are on")
        card = Gpu(device.name, device.memory_bytes, int(device.memory_bytes * 0.99), device.capability)
        host = self.host_room_bytes
        return Machine(16 * self.per_node, int(host / 0.95), host, gpus=(card,) * self.per_node)


@functools.cache
def devices() -> dict[str, Device]:
    """All known devices by name."""
    return {row["name"]: _device(row) for row in read_rows("devices.csv")}


@functools.cache
def networks() -> dict[str, Network]:
    return {row["name"]: _network(row) for row in read_rows("networks.csv")}


def read_rows(name: str) -> list[dict[str, str]]:
    text = (files("duoka.plan") / "tables" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _device(row: Mapping[str, str]) -> Device:
    return Device(
        name=row["name"],
        generation=row["generation"],
        capability=float(row["capability"]),
        memory_bytes=int(row["memory_mib"]) << 20,
        memory_bytes_per_s=float(row["memory_gb_s"]) * 1e9,
        half_flops=float(row["half_tflops"]) * 1e12,
        fp32_flops=float(row["fp32_tflops"]) * 1e12,
        fp8_flops=float(row["fp8_tflops"]) * 1e12,
        source=row["source"],
        link=row["link"],
        gpus_per_node=int(row["gpus_per_node"]),
        network=row["network"],
        nics_per_node=int(row["nics_per_node"]),
        aliases=tuple(filter(None, row["aliases"].split(";"))),
    )


def _network(row: Mapping[str, str]) -> Network:
    return Network(row["name"], float(row["gb_s"]) * 1e9, float(row["latency_us"]) * 1e-6, row["source"])


def _plain(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` and `rtx4090` alike; 80GB and 80G alike."""
    name = re.sub(r"(?i)nvidia|geforce|tesla|amd|instinct|hbm\d?e?|generation|\bada\b(?= lovelace)", "", name)
    name = re.sub(r"(?i)(\d+)\s*gi?b\b", r"\1G", name)
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _by_plain_name() -> dict[str, str]:
    """Spellings to names. A short one (3090, H100) belongs to the first row that claims it as an alias or begins so."""
    found: dict[str, str] = {}
    for device in devices().values():
        found |= dict.fromkeys(map(_plain, (device.name, *device.aliases)), device.name)
    for device in devices().values():
        for name in (device.name, *device.aliases):
            for short in (name, re.sub(r"-\d+G$", "", name), f"RTX{name}", name.removeprefix("RTX")):
                found.setdefault(_plain(short), device.name)
    return found


def find_device(name: str) -> Device:
    """The device of that name, as people, clouds or nvidia-smi spell it; raises ConfigError with the nearest."""
    known, plain = _by_plain_name(), _plain(name)
    if plain in known:
        return devices()[known[plain]]
    guess = nearest(name, [*devices(), *known])
    raise ConfigError(
        f"there is no device {name!r} in the plan's table",
        fix=f"did you mean {devices()[known.get(_plain(guess), guess)].name}?" if guess else
        f"known are {', '.join(devices())}; others go into hardware.json",
    )  # fmt: skip


def match_gpu(gpu: Gpu) -> Device | None:
    """The row of a card that nvidia-smi reported: its name, or its name with its memory."""
    for name in (gpu.name, f"{gpu.name} {round(gpu.memory_bytes / 1e9 / 8) * 8}G"):
        if (found := _by_plain_name().get(_plain(name))) is not None:
            return devices()[found]
    plain = _plain(gpu.name)
    near = [row for row in devices().values() if _plain(row.name.split("-")[0]) in plain]
    near = [row for row in near if abs(row.memory_bytes / gpu.memory_bytes - 1) < 0.06]
    return max(near, key=lambda row: len(row.name.split("-")[0]), default=None)


def find_network(name: str) -> Network:
    wanted = name.lower()
    for row in read_rows("networks.csv"):
        if wanted in (row["name"].lower(), *row["aliases"].lower().split(";")):
            return networks()[row["name"]]
    guess = nearest(name, list(networks()))
    hint = f"did you mean {guess}?" if guess else f"known are {', '.join(networks())}"
    raise ConfigError(f"there is no network {name!r} in the plan's table", fix=hint)


_ON = re.compile(r"^\s*(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([^@]+?)\s*(?:@\s*(?:(\d+)\s*x\s*)?(\S+))?\s*$", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """`H100`, `8xA100-80G`, `2x8xH100-80G`, `4x8xH100@400GbE`, `48x8xA100-80G@4xHDR` (cards per node)."""
    found = _ON.match(text)
    numbers = [int(part) for part in found.groups()[:2] if part is not None] if found else []
    if not found or 0 in numbers:
        raise ConfigError(
            f"--on {text!r} is no description of machines", fix='write for example:   --on "2x8xH100-80G"'
        )
    device = find_device(found.group(3))
    num_nodes, per_node = (1, 1) if not numbers else (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    link, network, nics = find_network(device.link), find_network(device.network), device.nics_per_node
    if found.group(5):
        named = find_network(found.group(5))
        if num_nodes == 1:
            link = named
        else:
            network, nics = named, int(found.group(4) or nics)
    return Cluster(device, num_nodes, per_node, link, network, nics)


def cluster_of(machine: Machine, num_nodes: int, per_node: int, own: Mapping[str, Any] | None = None) -> Cluster:
    """The machine that we are on, `num_nodes` times, with what was measured on it laid over the tables."""
    if machine.gpus:
        gpu = machine.gpus[0]
        device = match_gpu(gpu)
        notes: tuple[str, ...] = ()
        if device is None:
            device = replace(devices()["A100-40G"], name=gpu.name, memory_bytes=gpu.memory_bytes)
            notes = (f"{gpu.name} is not in the plan's table: its speed is taken for an A100's",)
        link, network, nics = find_network(device.link), find_network(device.network), device.nics_per_node
    else:
        notes = ("CPU speed is a guess from the number of cores; measure it: duoka bench hardware",)
        device = _cpu(machine)
        link, network, nics = networks()["memory"], networks()["10GbE"], 1
    cluster = Cluster(device, num_nodes, per_node, link, network, nics, machine.memory_bytes, notes=notes)
    if own and own.get("device") == hardware_key(machine):
        cluster = _overlay(cluster, own)
    return cluster if machine.gpus else _on_some_cores(cluster, machine, per_node)


def _on_some_cores(cluster: Cluster, machine: Machine, per_node: int) -> Cluster:
    """Peaks are those of all cores; with OMP_NUM_THREADS, ranks may leave some idle."""
    used = machine.cores_used(per_node)
    # Measured with a thread on every core; each doubling of a process's threads costs as much.
    doublings = math.log(max(1.0, used / per_node)) / math.log(max(2, machine.num_cores))
    device = replace(cluster.device, threads_share=cluster.device.threads_share**doublings)
    cluster = replace(cluster, device=device)
    if used >= machine.num_cores:
        return cluster
    share = used / machine.num_cores
    note = f"OMP_NUM_THREADS={machine.threads_per_rank}: {used} of {machine.num_cores} cores compute"
    slower = replace(device, fp32_flops=share * device.fp32_flops, half_flops=share * device.half_flops)
    return replace(cluster, device=slower, notes=(*cluster.notes, note))


def local_cluster(machine: Machine, world_size: int, local_size: int) -> Cluster:
    """This machine, as often as the world needs it, with what was measured on it."""
    return cluster_of(machine, max(1, world_size // local_size), local_size, read_hardware())


def _cpu(machine: Machine) -> Device:
    is_wide = machine.mkl_is_slow and not machine.halves_avx512
    speeds = WIDE_AMD if is_wide else CPU_CORE_TFLOPS.get(machine.cpu_bf16, CPU_CORE_TFLOPS["bf16"])
    fp32, half = (1e12 * machine.num_cores * speed for speed in speeds)
    return Device(
        name=machine.cpu_name,
        generation="cpu",
        capability=0.0,
        memory_bytes=machine.memory_bytes,
        memory_bytes_per_s=20e9,
        half_flops=half if machine.has_native_bf16 else EMULATED_BF16 * fp32,
        fp32_flops=fp32,
        source="cores and their instructions, a guess",
        link="memory",
        gpus_per_node=1,
    )


# --- the user's own measurements ---


def hardware_file(env: Mapping[str, str] = os.environ) -> Path:
    """Where `duoka bench hardware` writes: DUOKA_HARDWARE, or the user's configuration folder; the cache folder's for
    a container's user without a home."""
    if env.get("DUOKA_HARDWARE"):
        return Path(env["DUOKA_HARDWARE"])
    home = env.get("HOME") or os.path.expanduser("~")
    if home == "~" and not env.get("XDG_CONFIG_HOME"):
        return Path(env.get("DUOKA_CACHE") or os.devnull) / "hardware.json"
    return Path(env.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")) / "duoka" / "hardware.json"


def read_hardware(path: Path | None = None) -> dict[str, Any] | None:
    """What was measured, or None; a damaged file is an error that names it."""
    path = path or hardware_file()
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not os.path.exists(path):
            return None  # also where the folder is none (HOME=/dev/null), or another user's (HOME=/root)
        raise ConfigError(f"{path} cannot be read: {error}", fix="measure again: duoka bench hardware") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no object", fix="measure again: duoka bench hardware")
    return raw


def hardware_key(machine: Machine) -> str:
    """The machine that a measurement is for: another machine's figures must not be used for this one."""
    return machine.gpus[0].name if machine.gpus else f"{machine.cpu_name}, {machine.num_cores} cores"


def _overlay(cluster: Cluster, own: Mapping[str, Any]) -> Cluster:
    """`cluster` with measured speeds; keys that were not measured stay as they are."""
    device, has_peaks = cluster.device, bool(own.get("half_flops") or own.get("fp32_flops"))
    try:
        half_flops = float(own.get("half_flops") or device.half_flops)
        device = replace(
            device,
            half_flops=half_flops,
            # Not measured by itself: taken to lose as much of the data sheet's as 16-bit products do.
            fp8_flops=device.fp8_flops * half_flops / device.half_flops,
            fp32_flops=float(own.get("fp32_flops") or device.fp32_flops),
            memory_bytes_per_s=float(own.get("memory_bytes_per_s") or device.memory_bytes_per_s),
            threads_share=min(1.0, float(own.get("threads_share") or 1.0)),
            fp32_attention=float(own.get("fp32_attention") or 0.0),
            half_attention=float(own.get("half_attention") or 0.0),
            half_trained=float(own.get("half_trained") or 0.0),
            half_frozen=float(own.get("half_frozen") or 0.0),
            source="measured by duoka bench hardware" if has_peaks else device.source,
            measured=has_peaks,
        )
        link, network = _own_link(cluster.link, own, "link"), _own_link(cluster.network, own, "network")
        disk, slices = (float(own.get(key) or 0.0) for key in ("disk_bytes_per_s", "offload_bytes_per_s"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hardware.json: {error}", fix="measure again: duoka bench hardware") from None
    nics = cluster.num_nics if network is cluster.network else 1
    return replace(cluster, device=device, link=link, network=network, num_nics=nics, is_measured=has_peaks,
                   disk_bytes_per_s=disk, offload_bytes_per_s=slices,
                   notes=() if has_peaks else cluster.notes)  # fmt: skip


def _own_link(known: Network, own: Mapping[str, Any], kind: str) -> Network:
    """Between a node's devices, or between nodes: `network_bytes_per_s` is written by hand, of all cards together."""
    if not own.get(f"{kind}_bytes_per_s"):
        return known
    latency = float(own.get(f"{kind}_latency_s") or known.latency_s)
    return Network("measured", float(own[f"{kind}_bytes_per_s"]), latency, "from hardware.json")
