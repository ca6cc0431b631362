"""DeepSpeed's stage 3 with its state in files (ZeRO-Infinity): between steps its lines are empty in memory.

A line's weights and each of its moments have a file of DeepSpeed's, which checkpoints read and fill through a mapping.
DeepSpeed opens its files by name, so they lie in a folder that is this process's and goes with it; what a killed one
left is removed by the next that offloads to the same place. For deepspeed.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from duoka.config.rules_deepspeed import GET_AIO
from duoka.errors import ConfigError
from duoka.parallel.deepspeed_room import with_room
from duoka.parallel.deepspeed_zero import Zero3
from duoka.parallel.flat_shard import mapped_file, real_shape
from duoka.runs.cache import cache_folder, hold_lock, make_folder, try_lock

PREFIX, LOCK = "deepspeed-", "in-use"


class Zero3OnDisk(Zero3):
    """Groups of less than a MiB stay in memory: DeepSpeed reads and writes no smaller pieces."""

    def values_of(self, line: torch.Tensor) -> torch.Tensor:
        return line if self._number_of(line) is None else self._mapped(line, line)

    def gradients(self) -> list[torch.Tensor]:
        """Of those that were put away, the norms, which DeepSpeed noted: they stand for them wherever all are added."""
        swapped = {
            self.zero.get_param_id(parameter)
            for group, line in zip(self.zero.fp16_groups, self.lines(), strict=True)
            if self._number_of(line) is not None
            for parameter in group
        }
        noted = [norm for key, norm in self.zero.norm_for_param_grads.items() if key in swapped]
        return [*super().gradients(), *noted]

    def shorten(self, norm: torch.Tensor, max_norm: float) -> None:
        """Told to DeepSpeed, by whose norm (the same) each group is shortened when its step has read it."""
        self.zero.clip_grad = max_norm

    def _cut_again(self) -> None:
        for file in Path(self.zero.optimizer_swapper.swap_folder).iterdir():
            with file.open("rb+") as written:
                os.fsync(written.fileno())  # filled through mappings, and read past the page cache
        for number, line in enumerate(self.lines()):
            with self._here(number, line):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)

    def disk_bytes(self) -> int:
        """Of all files, those of weights and of gradients too."""
        folder = Path(self.zero.optimizer_swapper.swap_folder).parents[2]
        return sum(file.stat().st_blocks * 512 for file in folder.rglob("*.swp"))

    def _state_of(self, line: torch.Tensor) -> dict[str, torch.Tensor]:
        number = self._number_of(line)
        if number is None:
            return super()._state_of(line)
        state: dict[str, torch.Tensor] = self.zero.optimizer.state[line]
        if not state:
            self.zero._optimizer_states_and_gradient_swap_in(number)
            super()._state_of(line)
            self.zero._optimizer_states_and_gradient_swap_out(number)
        return {kind: self._mapped(line, value) if value.ndim else value for kind, value in state.items()}

    def _mapped(self, line: Any, value: Any) -> torch.Tensor:
        """`value` is the line itself, or a moment."""
        swapped = self.zero.optimizer_swapper.swap_params_info[line.ds_id]
        path = next(one.swap_path for one in swapped.tensors if one.compute_tensor is value)
        return mapped_file(path, swapped.numel(), line.dtype)

    def _number_of(self, line: torch.Tensor) -> int | None:
        """Of the group whose line it is; None where that stays in memory."""
        number = next(number for number, one in enumerate(self.lines()) if one is line)
        return number if self.zero._swappable_optimizer_subgroup(number) else None

    @contextlib.contextmanager
    def _here(self, number: int, line: torch.Tensor) -> Iterator[None]:
        """A line's values are in memory, to be read."""
        if self._number_of(line) is None:
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(number)
        yield
        self.zero._release_swap_buffers(number)


def build_aio(package: Any, say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's reader and writer, or load what was compiled: one process of a machine after the other.

    A build that was killed leaves a lock that the next would wait for; who is alone here knows that nobody holds it.
    """
    own = cache_folder() / "torch_extensions" / torch.__version__
    place = make_folder(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or own))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    if not list(place.glob("async_io/*.so")):
        say(f"DeepSpeed's async_io is compiled, once for this machine, for some minutes   ({place})")
    with hold_lock(place / "compile.lock", on_wait=lambda: None):
        for left in place.glob("*/lock"):
            left.unlink()
        try:
            with_room(package.ops.op_builder.AsyncIOBuilder().load(verbose=False))
        except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                "DeepSpeed's async_io, which parallel.offload: disk needs, cannot be compiled or loaded here",
                where=str(error).strip().splitlines()[-1][:200],
                fix=f"{GET_AIO}; what was compiled lies in {place}, and may be deleted",
            ) from None


def set_buffers(settings: Mapping[str, Any], model: torch.nn.Module, ranks: int) -> None:
    """As many and as large buffers for weights as a module needs that computes: its own are for other models."""
    place = settings["zero_optimization"].get("offload_param", {})
    if place.get("device") != "nvme":
        return
    parts = [-(-real_shape(one).numel() // ranks) for one in model.parameters()]
    most = max(sum(1 for _ in module.parameters(recurse=False)) for module in model.modules())
    place["buffer_size"], place["buffer_count"] = max(parts), most + 2


def needed_bytes(model: torch.nn.Module, ranks: int, *, weights_too: bool) -> int:
    """Of a rank's files: fp32 weights, moments and gradients of what is trained; and the weights that passes use."""
    total = 0
    for parameter in model.parameters():
        part = -(-real_shape(parameter).numel() // ranks)
        total += part * (16 * parameter.requires_grad + parameter.element_size() * weights_too)
    return total


class SwapFolder:
    """A folder of this process under `base`, removed with `owner`; those of processes that are gone are removed now."""

    def __init__(self, base: Path, owner: object) -> None:
        base.mkdir(parents=True, exist_ok=True)
        remove_left(base)
        new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=base))
        lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR, 0o600)  # held until the process is gone
        try_lock(lock)
        # By its name, others look whether it is held: only now.
        self.path = new.rename(base / new.name.removeprefix("new-"))
        weakref.finalize(owner, shutil.rmtree, self.path, ignore_errors=True)


def remove_left(base: Path) -> None:
    """Folders that processes which were killed left under `base`."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, or in use
            handle = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
