"""Who am I in this world, and the few things that all ranks do together.

`start_world` makes the process group (or none, for one process) and refuses ranks whose code, config or data differ:
they are named before the first step. Everyone else asks a `World`, never the environment.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.collectives import all_reduce
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError, DuokaError, WorkerFailed
from duoka.process.environ import LOOPBACK, RankEnvironment, read_rank_environment
from duoka.process.interface import choose_interface
from duoka.process.lifeline import parent_pid
from duoka.process.open_files import raise_open_files
from duoka.process.place import script_variables
from duoka.process.rank import LOGS_FOLDER
from duoka.process.refused import refused_by_system
from duoka.process.threads_at_rest import let_threads_rest
from duoka.runs.heart import Heart
from duoka.torch_private import abort_groups
from duoka.units import parse_seconds


@dataclass(frozen=True)
class World:
    """This process's place: `rank` of `size`, on `device`. A world of one has a group only when sharded."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    heart: Heart = field(default_factory=Heart, compare=False)
    group: dist.ProcessGroup | None = None  # None: that of all ranks, which training talks in
    name: str = "everyone"  # or the axes along which its ranks lie (parallel/mesh.py)
    is_aside: bool = False  # talks beside training: no part of a step, and not in its ledger

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, text: str) -> None:
        """Print once, not once per rank."""
        if self.is_main:
            print(text, flush=True)

    def _called(self, collective: str) -> str:
        return collective if self.name == "everyone" else f"{collective} (over {self.name})"

    def barrier(self) -> None:
        if self.size > 1:
            with self.heart.exchange(self._called("barrier")):
                dist.barrier(group=self.group)

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks of this world, in fp64."""
        if self.size == 1:
            return list(values)
        # MPS-like devices know no fp64; gloo and nccl both do.
        tensor = torch.tensor(values, dtype=torch.float64).to(self.device, non_blocking=True)
        return [float(value) for value in self.sum_tensor(tensor).tolist()]

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The same of a tensor on this world's device, in place; nobody has to wait for it."""
        if self.size > 1:
            with self.heart.exchange(self._called("all_reduce of the step's sums")):
                if self.is_aside:
                    dist.all_reduce(values, group=self.group)
                else:
                    all_reduce(values, self.group)
        return values

    def agree(self, value: Any) -> Any:
        """The value of this world's rank 0, on every rank of it."""
        if self.size == 1:
            return value
        box = [value]
        with self.heart.exchange(self._called("broadcast of rank 0's choice")):
            dist.broadcast_object_list(box, group_src=0, device=self.device, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.heart.exchange(self._called("all_gather of facts")):
            dist.all_gather_object(box, value, group=self.group)
        return box


def pick_device(local_rank: int) -> torch.device:
    """The GPU of this place on its machine, or the only one that this process was given (Slurm, Kubernetes, Ray)."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if count == 1 and _VISIBLE in os.environ:
            return torch.device("cuda", 0)  # check_own_gpu says whether others were given the same one
        if local_rank >= count:
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU: there are {count}",
                fix=f"start at most {count} processes here (--nproc {count})",
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def set_gpu_habits(env: MutableMapping[str, str]) -> None:
    """What CUDA, its allocator and NCCL read from the environment when they begin; what the user set stays."""
    if torch.version.cuda is None:
        return
    habits = {
        # As nvidia-smi counts them, whose numbers plan and messages have; CUDA alone begins with the fastest.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # The last collectives of each rank, written down when one of them waits for too long.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in env:  # the older name of the same
        # Micro-batches differ in length: fixed segments would leave holes that no later one fits into.
        habits["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if LOGS_FOLDER in env:
        habits["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = os.path.join(env[LOGS_FOLDER], "nccl-rank")
    for name, value in habits.items():
        env.setdefault(name, value)


def check_own_gpu(world: World) -> None:
    """Refuse a world in which two processes have one GPU: NCCL would, and name neither."""
    if world.device.type != "cuda":
        return
    uuid = str(torch.cuda.get_device_properties(world.device).uuid)
    everyone: list[tuple[int, str]] = world.gather((world.node, uuid))
    first = everyone.index((world.node, uuid))
    if first != world.rank:
        raise ConfigError(
            f"rank {world.rank} has the same GPU as rank {first}",
            where=f"node {world.node}: {_VISIBLE}={os.environ.get(_VISIBLE, 'not set')}",
            fix="start one process per GPU, or let each see a GPU of its own (Slurm: --gpus-per-task=1)",
        )


def start_world(parallel: ParallelConfig, heart: Heart | None = None) -> World:
    """Join the world that the launcher described, or be a world of one; `heart` tells watchers of its progress."""
    heart = heart or Heart()
    raise_open_files()
    place = read_rank_environment()
    set_gpu_habits(os.environ)
    device = pick_device(place.local_rank if place else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if parallel.backend == "nccl" and device.type != "cuda":
        raise ConfigError("parallel.backend is nccl, and this machine has no GPU", fix="write backend: auto")
    backend = parallel.backend if parallel.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    timeout = datetime.timedelta(seconds=min(parse_seconds(parallel.timeout), 86400.0))
    if place is None or place.size == 1:
        is_gathered = parallel.strategy == "auto" and parallel.offloads.params != "none"  # auto takes fsdp then
        is_shared = is_gathered or parallel.strategy in ("zero1", "zero2", "zero3", "fsdp", "hsdp")
        if not is_shared and parallel.engine == "native":
            return World(device=device, heart=heart)
        # FSDP and DeepSpeed want a group also for a single process: offloading is of use to one process too.
        dist.init_process_group(carriers(backend), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return World(device=device, backend=backend, heart=heart)
    if parallel.strategy in ("single", "dp"):
        raise ConfigError(
            f"parallel.strategy is {parallel.strategy}, which is one process, but {place.size} processes were started",
            fix="write strategy: auto, or start one process (--nproc 1)",
        )
    choose_interface(place)
    with heart.exchange("meeting of all processes"):
        try:
            store = _meeting_place(place, timeout)
            dist.init_process_group(
                carriers(backend), rank=place.rank, world_size=place.size, timeout=timeout, store=store
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise _nobody_came(place, parallel.timeout, error) from error
    if dist.get_world_size() != place.size:
        raise WorkerFailed(f"asked for a world of {place.size} processes, got {dist.get_world_size()}")
    world = World(place.rank, place.local_rank, place.size, place.local_size, place.node, device, backend, heart)
    if place.guesses_node:
        world = _find_node(world)
    check_own_gpu(world)
    return world


def _find_node(world: World) -> World:
    """By the names of the machines: `mpirun --map-by node` deals ranks out in turn, and says no node's number."""
    names = world.gather(socket.gethostname())
    nodes = list(dict.fromkeys(names))
    if len(nodes) * world.local_size != world.size:  # containers of one name, or nodes of several sizes
        return world
    if any(nodes.index(name) != rank // world.local_size for rank, name in enumerate(names)):
        world.print(
            f"note: ranks that are neighbors are on different machines ({', '.join(names[:4])}, ...), and what should "
            "stay inside a machine (hsdp, tensor, reshard: node) goes over the network:   mpirun --map-by slot"
        )
    return replace(world, node=nodes.index(socket.gethostname()))


def carriers(backend: str) -> str:
    """What torch is told: NCCL carries no tensors of the host, where objects and offloaded shards are."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


_KNOCK_EVERY_S = 0.02
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_met: dict[RankEnvironment, tuple[dist.Store, int]] = {}  # where this process met its world, and how many times


def _meeting_place(place: RankEnvironment, timeout: datetime.timedelta) -> dist.Store:
    """The store in which ranks find each other, with pages of its own for each world that these processes make.

    The nth world of a process meets in the store of the first: what an earlier world left there, and a rank that is
    still in it, would send the next one to addresses where nobody listens any more.
    """
    if place not in _met:
        ours = place.master_addr == LOOPBACK and parent_pid() == os.getppid()
        store = _private_store(place, timeout) if ours else _torchs_store(place, timeout)
        _met[place] = (store, 0)
    store, worlds = _met[place]
    store.set_timeout(timeout)
    _met[place] = (store, worlds + 1)
    return dist.PrefixStore(f"duoka world {worlds}", store)


def _torchs_store(place: RankEnvironment, timeout: datetime.timedelta) -> dist.Store:
    store: dist.Store
    if place.rank:
        wait_for_listener(place.master_addr, place.master_port, timeout)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timeout))
    return store


def _private_store(place: RankEnvironment, timeout: datetime.timedelta) -> dist.TCPStore:
    """Where the ranks of one machine meet, for nobody else: torch's own choice listens to every network."""
    if place.rank:
        wait_for_listener(LOOPBACK, place.master_port, timeout)
        return dist.TCPStore(LOOPBACK, place.master_port, place.size, False, timeout)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher keeps the port free for us
        listener.bind((LOOPBACK, place.master_port))
        listener.listen(socket.SOMAXCONN)
        file = listener.detach()
    return dist.TCPStore(
        LOOPBACK, place.master_port, place.size, True, timeout, multi_tenant=True, master_listen_fd=file
    )


def wait_for_listener(host: str, port: int, timeout: datetime.timedelta) -> None:
    """Until rank 0 listens: a client of torch's that comes a moment too early waits for half a second and more.

    Nothing is said here: what stays wrong is the client's to tell.
    """
    end = time.monotonic() + timeout.total_seconds()
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
            return
        except ConnectionRefusedError:
            time.sleep(_KNOCK_EVERY_S)
        except OSError:
            return


def join_world(parallel: ParallelConfig) -> tuple[World, bool]:
    """(the world, was it started here): for people's own scripts, which may have made the process group themselves."""
    if not dist.is_initialized():
        _adopt_place()
        return start_world(parallel), True
    place = read_rank_environment()
    rank, size = dist.get_rank(), dist.get_world_size()
    local_size = place.local_size if place else size
    local_rank, node = (place.local_rank, place.node) if place else (rank % local_size, rank // local_size)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Scripts that chose a device have it set; others get the one of their place.
        chosen = torch.cuda.current_device()
        device = torch.device("cuda", chosen) if chosen else pick_device(local_rank)
        torch.cuda.set_device(device)
    return World(rank, local_rank, size, local_size, node, device, str(dist.get_backend())), False


def _adopt_place() -> None:
    """Of a script that mpirun or srun started: each process alone would train in the place of the others."""
    found = script_variables(os.environ)
    if "OMP_NUM_THREADS" in found and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(int(found["OMP_NUM_THREADS"]))  # torch has read its variable when it was imported
    os.environ.update(found)
    if found.get("RANK") == "0":  # Accelerate takes tasks of srun for strangers: whoever means that reads how
        text = f"note: the {found['WORLD_SIZE']} processes that srun or mpirun started are one world"
        print(f"{text}; each alone:   RANK=0 WORLD_SIZE=1", file=sys.stderr, flush=True)


def compute_init(device_type: str = "auto") -> tuple[bool, int, int, int, torch.device]:
    """(is distributed, rank, local rank, world size, device), with the process group made: gloo on CPUs too."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("compute_init was asked for cuda, and this machine has no GPU", fix="write compute_init()")
    world, _ = join_world(ParallelConfig(backend="gloo" if device_type == "cpu" else "auto"))
    world.barrier()
    device = torch.device("cpu") if device_type == "cpu" else world.device
    return world.size > 1, world.rank, world.local_rank, world.size, device


def _nobody_came(place: RankEnvironment, timeout: float | str, error: Exception) -> DuokaError:
    """A rendezvous that failed. Torch's own words differ with which rank waits; ours name the address."""
    if (refused := refused_by_system(error)) is not None:
        return refused
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return WorkerFailed(
        f"rank {place.rank}: the rendezvous of {place.size} processes did not complete within {timeout}",
        where=f"at {place.master_addr}:{place.master_port}: {reason}",
        fix=f"start all {place.size} with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT and a RANK of their own; "
        "`duoka doctor` says whether this machine can be reached",
    )


_kept: list[object] = []  # never let go, see below


def keep_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Let a process group outlive the model that uses it.

    A gloo group that goes with the last model that used it waits for its threads, and these may be waiting for Python's
    lock to let go of DDP's hook: a rank in four that ended right after a backward pass hung there. So it stays.
    """
    _kept.append(group)
    return group


def end_world(world: World, *, has_failed: bool = False) -> None:
    """Leave the process group. A rank that failed does not wait for the others, who wait for it in a collective."""
    if world.backend == "none" or not dist.is_initialized():
        return
    keep_group(dist.group.WORLD)
    if has_failed and world.device.type == "cuda":
        abort_groups()  # NCCL's orderly end would first have its peers come to the same place
    else:
        dist.destroy_process_group()
    let_threads_rest()


def open_side_world(world: World) -> World:
    """The same ranks on a process group of their own, for a thread beside training. All ranks call it.

    In one group, a thread's messages and training's would be taken for each other, and both wait for ever.
    """
    # A heart of its own, which nobody listens to: that a thread writes is no sign that training goes on.
    if world.size == 1:
        return replace(world, device=torch.device("cpu"), heart=Heart())
    # Without a limit of its own: a slow disk is no hang, and a rank that dies closes its connections.
    group = keep_group(dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1)))
    return replace(world, device=torch.device("cpu"), backend="gloo", group=group, heart=Heart(), is_aside=True)


def close_side_world(world: World) -> None:
    if world.group is not None and dist.is_initialized():
        dist.destroy_process_group(world.group)


def check_same_everywhere(world: World, facts: Mapping[str, str]) -> None:
    """Refuse a world whose ranks differ in code, config, model or data; name the ranks and what differs."""
    everyone = world.gather(dict(facts))
    where = []
    for name in facts:
        seen = [str(other.get(name)) for other in everyone]
        others = [rank for rank, value in enumerate(seen) if value != seen[0]]
        if others:
            shown = ", ".join(f"rank {rank}: {seen[rank]}" for rank in [0, *others[:3]])
            where.append((name, shown))
    if where:
        raise ConfigError(
            f"{' and '.join(name for name, _ in where)} {'is' if len(where) == 1 else 'are'} not the same on all ranks",
            where="\n".join(shown if len(where) == 1 else f"{name}: {shown}" for name, shown in where),
            fix="make the machines alike and start again",
        )
