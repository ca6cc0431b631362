"""Activations kept in host memory or in files between a layer's forward pass and its backward pass.

What autograd saves inside a layer is taken by hooks, storage by storage. When the next layer begins, a thread moves
the finished one away; when the backward pass comes to a layer, the one before it is on its way back already. The last
layer stays: its backward pass comes first. Weights and small tensors stay too, and what several layers save, such as
rotary tables. What comes back is what went, bit for bit, so nothing that is learned depends on it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from duoka.model.build import find_core
from duoka.model.layers import find_layers
from duoka.optim.disk_arena import DiskArena
from duoka.torch_private import StorageWeakRef, side_thread, storage_key

LEAST_BYTES = 64 * 1024  # smaller ones are not worth a trip
_PENDING = 2  # finished layers that wait for the thread; with more, the forward pass waits
# Between a parameter and what is saved of it: casts and views, a rank's part of it, and one expert's of all.
_SEEN_THROUGH = (
    "TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "SplitBackward0", "UnbindBackward0",
    "_ToTorchTensorBackward",
)  # fmt: skip


class Home:
    """Where activations lie meanwhile: host memory, or with an arena files. On a GPU through pinned memory."""

    def __init__(self, device: torch.device, arena: DiskArena | None) -> None:
        self.arena = arena
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Any:
        """Behind what the device was told so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def put(self, held: torch.Tensor, ready: Any) -> Any:
        """The place of these bytes, from which they come back; in the thread."""
        if self._stream is not None:
            host = torch.empty(held.numel(), dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                host.copy_(held, non_blocking=True)
                self._stream.synchronize()
            held = host
        return held if self.arena is None else self.arena.put(held)

    def get(self, place: Any) -> torch.Tensor:
        host: torch.Tensor = place if self.arena is None else self.arena.get(place)
        if self._stream is None:
            return host
        with torch.cuda.stream(self._stream):
            there = host.to(self._stream.device, non_blocking=True)
            self._stream.synchronize()
        return there

    def used(self, held: torch.Tensor) -> None:
        """The device's current work reads it: its memory must not be given away before that is done."""
        if self._stream is not None:
            held.record_stream(torch.cuda.current_stream(held.device))


class ActivationsElsewhere:
    """Of one model on one device; made before its first pass. Without `folder` they lie in host memory."""

    def __init__(self, bare: torch.nn.Module, device: torch.device, folder: Path | None) -> None:
        self.home = Home(device, None if folder is None else DiskArena(folder, "activations"))
        self.moved_bytes = 0  # away, since the start
        self._layer: Layer | None = None
        self._hooks: Any = None
        self._thread = side_thread("duoka-activations", device)  # started by the first work
        bare.register_forward_pre_hook(self._enter)
        bare.register_forward_hook(self._leave, always_call=True)
        for layer in find_layers(find_core(bare)):
            layer.register_forward_pre_hook(self._next_layer)

    @property
    def disk_bytes(self) -> int:
        """Of files, at most so far."""
        return 0 if self.home.arena is None else self.home.arena.size_bytes

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = self._layer = None

    def _next_layer(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._hooks is None:
            return  # nothing is learned, or a layer is computed again
        done, self._layer = self._layer, Layer(self, module, self._layer)
        if done is not None:
            done.send()

    def _pack(self, tensor: torch.Tensor) -> Any:
        entry = self._layer.entry_of(tensor) if self._layer is not None and _is_worth_it(tensor) else None
        return tensor if entry is None else _Handle(entry, tensor)

    def later(self, work: Callable[[], None]) -> Future[None]:
        """In the thread, one after the other."""
        return self._thread.submit(work)


def _is_worth_it(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return False
    if tensor.untyped_storage().nbytes() < LEAST_BYTES:
        return False
    origin = tensor.grad_fn
    while origin is not None and origin.name() in _SEEN_THROUGH:
        origin = origin.next_functions[0][0]
    if origin is not None:
        return not isinstance(getattr(origin, "variable", None), torch.nn.Parameter)
    return not isinstance(tensor._base, torch.nn.Parameter)  # of a frozen weight


class Moved:
    """What of an engine's model lies elsewhere beside weights and state."""

    activations: ActivationsElsewhere | None = None

    @property
    def disk_bytes(self) -> int:
        return 0 if self.activations is None else self.activations.disk_bytes


class Layer:
    """What one pass of one layer saved. It lives as long as any of it does."""

    def __init__(self, owner: ActivationsElsewhere, module: torch.nn.Module, before: Layer | None) -> None:
        self.owner, self._module = owner, module
        self._before = None if before is None else weakref.ref(before)
        self._entries: list[weakref.ref[Entry]] = []
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[Entry]]] = {}  # by storage
        self._shared = {} if before is None else before._known
        self._pending: threading.Semaphore = threading.Semaphore(_PENDING) if before is None else before._pending
        self._sent: Future[None] | None = None
        self._fetched: Future[None] | None = None

    @functools.cached_property
    def _weights(self) -> set[int]:
        """The storages of the layer's weights, as its first operation finds them. A frozen one that is shared out has
        no history by which it could be known."""
        own = (one.to_local() if isinstance(one, DTensor) else one for one in self._module.parameters())
        return {storage_key(one.untyped_storage()) for one in own}

    def entry_of(self, tensor: torch.Tensor) -> Entry | None:
        """The entry of its storage; None for what the layer before has saved too, and for weights."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._weights:
            return None
        if key in self._shared and not self._shared[key][0].expired():
            self._known[key] = self._shared[key]
            return None
        entry = self._known[key][1]() if key in self._known else None
        if entry is None:
            entry = Entry(self, torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self._known[key] = StorageWeakRef(storage), weakref.ref(entry)
            self._entries.append(weakref.ref(entry))
        return entry

    def send(self) -> None:
        """Move it away, in the thread. The forward pass waits where too much is on its way."""
        self._shared = {}
        if not self._entries:
            return
        self._pending.acquire()
        ready = self.owner.home.mark()
        self._sent = self.owner.later(lambda: self._send(ready))

    def _send(self, ready: Any) -> None:
        try:
            for one in self._entries:
                if (entry := one()) is not None and entry.held is not None:
                    self.owner.moved_bytes += entry.held.numel()
                    entry.place = self.owner.home.put(entry.held, ready)
                    entry.held = None
        finally:
            self._pending.release()

    def fetch(self) -> Future[None] | None:
        """Begin to bring it back. None: it never left."""
        if self._sent is not None and self._fetched is None:
            self._fetched = self.owner.later(self._fetch)
        return self._fetched

    def _fetch(self) -> None:
        assert self._sent is not None
        self._sent.result()
        for one in self._entries:
            if (entry := one()) is not None and entry.held is None:
                entry.held = self.owner.home.get(entry.place)

    def wait(self) -> None:
        """Until it is here; the layer before it is on its way then."""
        here = self.fetch()
        if self._before is not None and (before := self._before()) is not None:
            before.fetch()
        if here is not None:
            here.result()


class Entry:
    """One storage, as bytes: `held` here, or at its `place`."""

    def __init__(self, layer: Layer, held: torch.Tensor) -> None:
        self.layer = layer
        self.held: torch.Tensor | None = held
        self.place: Any = None


class _Handle:
    """A saved tensor: its view of an entry."""

    def __init__(self, entry: Entry, tensor: torch.Tensor) -> None:
        self.entry, self.dtype = entry, tensor.dtype
        self.view = tensor.storage_offset(), tensor.size(), tensor.stride()


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    entry: Entry = packed.entry
    entry.layer.wait()
    held = entry.held
    assert held is not None, "what was waited for is here"
    entry.layer.owner.home.used(held)
    return torch.empty(0, dtype=packed.dtype, device=held.device).set_(held.untyped_storage(), *packed.view)
