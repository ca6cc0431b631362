"""What each rank really holds, by part, from the storages themselves; measured in a run's first steps, then no more.

Parts are the largest seen of each, in the plan's terms:
whole weights that ZeRO-1 and ZeRO-2 gathered are weights, the shards they came from are optimizer state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from duoka.optim.disk import DiskAdamW
from duoka.parallel.engine import Engine
from duoka.plan.layout import Layout
from duoka.torch_private import StorageWeakRef, TorchDispatchMode, gradients_not_exchanged, living_bytes, storage_key
from duoka.train.moments import Concern, StepEnd
from duoka.train.record import Recorder
from duoka.units import format_bytes

# The optimizer's state exists after the first step; the second has every part, unless a scaler left one out.
NUM_STEPS = 2
UNEVEN = 1.1  # a rank that holds this many times the mean is named


@dataclass(frozen=True)
class Holdings:
    """One rank's bytes. `activations_bytes`: all that a forward pass leaves until its backward, of `num_tokens`."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    buffers_bytes: int = 0
    host_bytes: int = 0  # of these: in host memory although a GPU computes
    disk_bytes: int = 0  # of these: in files
    num_tokens: int = 0

    def max(self, other: Holdings) -> Holdings:
        return Holdings(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    @property
    def total_bytes(self) -> int:
        held = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes)
        return sum(held) + self.activations_bytes + self.buffers_bytes


class AllocationWatch(TorchDispatchMode):
    """Records every storage that operators allocate, and keeps none alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for tensor in answer if isinstance(answer, (tuple, list)) else (answer,):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                # A dead storage's address may be given out again.
                known = self.seen.get(storage_key(storage))
                if known is None or known.expired():
                    self.seen[storage_key(storage)] = StorageWeakRef(storage)
        return answer

    def alive(self) -> dict[int, int]:
        """Bytes by storage, of those that are still referenced."""
        out = {}
        for key, reference in self.seen.items():
            size = living_bytes(reference)
            if size is not None:
                out[key] = size
        return out


class MemoryWatch(Concern):
    """Looks at one rank's storages in the passes of the first steps and after them."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, layout: Layout, record: Recorder) -> None:
        self._engine = engine
        self._world, self._device = engine.world, engine.world.device
        self._record = record
        self._optimizer = optimizer
        self._layout = layout
        # Before the first pass: this rank's own parts, frozen ones too.
        self._own = engine.lasting_weights()
        self._num_steps = 0
        self._held = Holdings()

    @property
    def is_on(self) -> bool:
        return self._num_steps < NUM_STEPS

    @contextlib.contextmanager
    def forward(self, num_tokens: int) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        if self._device.type == "cuda":
            before = self._loose_bytes()
            yield
            left = self._loose_bytes() - before
        elif self._layout.compile:
            # Operators are not seen one by one, and a mode would make them compile again.
            yield
            left = 0
        else:
            births = AllocationWatch()
            with births:
                yield
            known = {**bytes_by_storage(self._all_parameters()), **bytes_by_storage(self._gradients())}
            left = sum(size for key, size in births.alive().items() if key not in known)
        self._held = self._held.max(Holdings(activations_bytes=left, num_tokens=num_tokens))
        self._look()

    def _loose_bytes(self) -> int:
        """What the GPU's allocator has given out, weights (whole while they are gathered) and gradients apart."""
        known = bytes_by_storage(t for t in (*self._all_parameters(), *self._gradients()) if t.device.type == "cuda")
        return int(torch.cuda.memory_allocated(self._device)) - sum(known.values())

    def after_backward(self) -> None:
        if self.is_on:
            self._look()

    def after_step(self, end: StepEnd) -> None:
        """After the last step that is watched, every rank's holdings: who holds how much, and who more than its share.

        Nothing that counts is gone when a step has ended: gradients were seen after the last backward pass.
        """
        if not (self.is_on and end.has_learned):
            return
        self._look()
        self._num_steps += 1
        if not self.is_on:
            ranks = [Holdings(**one) for one in self._world.gather(asdict(self._held))]
            held = [asdict(one) for one in ranks]
            # Stages of a pipeline hold different layers, and the first ones more micro-batches.
            imbalance = "" if self._layout.pp > 1 else explain_imbalance(ranks)
            self._record.event("memory", step=end.step, ranks=held, imbalance=imbalance)

    def _look(self) -> None:
        masters = bytes_by_storage(self._engine.masters())
        # FSDP's gathered layers pass by: what lasts is a rank's own part. Zero1 and zero2 have all whole from one step
        # to the next.
        shown = self._all_parameters() if self._layout.strategy in ("zero1", "zero2") else self._own
        weights = {key: size for key, size in bytes_by_storage(shown).items() if key not in masters}
        state = bytes_by_storage(v for one in self._optimizer.state.values() for v in one.values())
        state = {**state, **masters}
        gradients, buffers = bytes_by_storage(self._gradients()), bytes_by_storage(self._engine.bare.buffers())
        on_host = 0
        if self._device.type == "cuda":
            parts = (self._engine.named_trainable().values(), self._gradients(), self._optimizer_tensors())
            on_host = sum(
                sum(bytes_by_storage(t for t in part if t.device.type == "cpu" and t.numel() > 1).values())
                for part in parts
            )
        weights_bytes, gradients_bytes, state_bytes = (sum(part.values()) for part in (weights, gradients, state))
        on_disk = self._engine.disk_bytes
        on_disk += self._optimizer.file.size_bytes if isinstance(self._optimizer, DiskAdamW) else 0
        on_host = max(0, on_host - on_disk)
        now = Holdings(weights_bytes, gradients_bytes, state_bytes, 0, sum(buffers.values()), on_host, on_disk)
        self._held = self._held.max(now)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        return (v for one in self._optimizer.state.values() for v in one.values() if isinstance(v, torch.Tensor))

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        """Those that the optimizer knows, and those that the modules show now (whole while they are gathered)."""
        yield from self._engine.named_trainable().values()
        yield from self._engine.bare.parameters()

    def _gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self._all_parameters():
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._engine.gradients()
        for module in self._engine.bare.modules():
            if isinstance(module, FSDPModule):
                yield from gradients_not_exchanged(module)


def bytes_by_storage(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage: shared ones once, of sharded tensors this rank's part."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            found[storage_key(storage)] = storage.nbytes()
    return found


def explain_imbalance(ranks: list[Holdings]) -> str:
    """Which rank holds most, of what, and the likely cause; "" when they are about equal."""
    totals = [one.total_bytes for one in ranks]
    mean = sum(totals) / len(totals)
    rank = max(range(len(ranks)), key=lambda i: totals[i])
    if totals[rank] <= UNEVEN * mean:
        return ""
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    means = {part: sum(getattr(one, f"{part}_bytes") for one in ranks) / len(ranks) for part in parts}
    part = max(parts, key=lambda name: getattr(ranks[rank], f"{name}_bytes") - means[name])
    if part == "activations":
        tokens = sum(one.num_tokens for one in ranks) / len(ranks)
        cause = f"its longest micro-batch had {ranks[rank].num_tokens:,} tokens, the mean over ranks is {tokens:,.0f}"
    else:
        cause = f"tensors whose first dimension does not divide by {len(ranks)} are cut unevenly"
    more = getattr(ranks[rank], f"{part}_bytes") - means[part]
    return (
        f"rank {rank} holds {totals[rank] / mean - 1:.0%} more than the mean of ranks, "
        f"most of it {part} ({format_bytes(more)} more): {cause}"
    )
