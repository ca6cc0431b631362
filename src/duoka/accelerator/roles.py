"""Who does what: this process's place, what only some ranks do, and values that travel between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch

from duoka.accelerator.collect import Collector
from duoka.accelerator.nested import rebuild
from duoka.comm.world import World
from duoka.data.feed.map_loader import deal
from duoka.errors import ConfigError


class Roles:
    """The part of the Accelerator that knows the world and nothing of training."""

    def __init__(self, world: World, debug: bool) -> None:
        self.world = world
        self.collect = Collector(world, checks=debug)
        self.debug = debug
        self._trigger = False

    device = property(lambda self: self.world.device)
    num_processes = property(lambda self: self.world.size)
    process_index = property(lambda self: self.world.rank)
    local_process_index = property(lambda self: self.world.local_rank)
    is_main_process = property(lambda self: self.world.rank == 0)
    is_local_main_process = property(lambda self: self.world.local_rank == 0)
    is_last_process = property(lambda self: self.world.rank == self.world.size - 1)
    use_distributed = property(lambda self: self.world.size > 1)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, not once per rank."""
        if self.is_main_process:
            print(*values, **{"flush": True, **options})

    def wait_for_everyone(self) -> None:
        self.world.barrier()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: rank 0 runs it, the others return None."""
        return self.on_process(function, process_index=0)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        return self.on_local_process(function, local_process_index=0)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.on_process(function, process_index=self.world.size - 1)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        return _only_if(function, self.world.rank == process_index)

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int = 0) -> Any:
        return _only_if(function, self.world.local_rank == local_process_index)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 goes through the block before the others do (it fills a cache, and they read it)."""
        yield from self._first(self.is_main_process)

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """One rank of each machine goes through the block before that machine's others do."""
        yield from self._first(self.is_local_main_process)

    def _first(self, goes_first: bool) -> Iterator[None]:
        if not goes_first:
            self.world.barrier()
        try:
            yield
        finally:
            # Also when the block failed: the others must not wait for ever.
            if goes_first:
                self.world.barrier()

    def set_trigger(self) -> None:
        """Raise a flag here (a loss is NaN, time is up) that all ranks see at their next `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """True on every rank when any rank raised the flag, which is lowered by this."""
        raised = self.world.sum([float(self._trigger)])[0] > 0
        if raised:
            self._trigger = False
        return raised

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple, text, tensor, array, data set, or mapping of them; `apply_padding` repeats
        the last one."""
        yield self._split(inputs, apply_padding)

    def _split(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {len(value) for value in inputs.values()}
            if len(lengths) > 1:
                raise ConfigError(f"split_between_processes: the mapping's values have {sorted(lengths)} members")
            return rebuild(inputs, [self._split(value, apply_padding) for value in inputs.values()])
        count = len(inputs)
        own = range(count)[deal(range(count), self.world.rank, self.world.size)]
        missing = -(-count // self.world.size) - len(own) if apply_padding else 0
        return _pick(inputs, [*own, *[count - 1] * missing])

    def gather(self, tensor: Any) -> Any:
        """Every rank's tensors end to end, in the order of ranks; ranks may hold different numbers of rows."""
        return self.collect.gather(tensor)

    def gather_object(self, things: list[Any]) -> list[Any]:
        return self.collect.gather_objects(list(things))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, mean or max over ranks, as copies."""
        return self.collect.reduce(tensor, reduction, scale)

    def broadcast(self, value: Any, from_process: int = 0) -> Any:
        return self.collect.broadcast(value, from_process)

    def broadcast_object_list(self, things: list[Any], from_process: int = 0) -> list[Any]:
        return self.collect.broadcast_objects(things, from_process)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors made as long as the longest of all ranks along `dim`."""
        return self.collect.pad(tensor, dim, pad_index, pad_first)


def _pick(inputs: Any, numbers: list[int]) -> Any:
    """Some members of `inputs`, in its own form."""
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array_interface__"):
        return inputs[numbers]
    if hasattr(inputs, "iloc"):  # a table of pandas
        return inputs.iloc[numbers]
    if hasattr(inputs, "select"):  # a data set of the hub's library, whose slices are columns
        return inputs.select(numbers)
    if isinstance(inputs, torch.utils.data.Dataset):
        return torch.utils.data.Subset(inputs, numbers)
    members = [inputs[number] for number in numbers]
    return "".join(members) if isinstance(inputs, str) else tuple(members) if isinstance(inputs, tuple) else members


def _only_if(function: Callable[..., Any] | None, here: bool) -> Any:
    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if here else None

        return run

    return decorate if function is None else decorate(function)
