"""How much memory tensors hold, part of a step by part: for the dry run, whose tensors are fake."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from duoka.torch_private import TorchDispatchMode, innermost, read_number, running_node, tree_map_only

BLOCK_BYTES = 512  # what an allocator rounds to
SECOND = "the layer before the last"
BETWEEN = "between that and the first layer"


class Part(NamedTuple):
    """Of a step: `phase` of one of its micro-batches, whose peak may lie at either end of the layers."""

    phase: str
    micro: int = 1
    place: str = ""


class StoragePeak(TorchDispatchMode):
    """Bytes of all storages that are alive, and the most in each part of a step.

    torch's own FSDPMemTracker counts the optimizer's temporaries of one tensor as if they stayed, and is off by tens of
    times. Storages are known by themselves, so views cost nothing; FSDP frees and allocates by resizing them.
    """

    def __init__(self, block: int = BLOCK_BYTES) -> None:
        super().__init__()
        self._block = block
        self.now = self.peak = 0
        self.peaks: dict[Part, int] = {}
        self._part: Part | None = None
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def hold(self, model: torch.nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(tensor)

    def enter(self, part: Part) -> None:
        self.leave()
        self._part, self.peak = part, self.now

    def leave(self) -> None:
        """The part that was entered ends here."""
        if self._part is not None:
            self.peaks[self._part] = max(self.peak, self.peaks.get(self._part, 0))
        self._part = None

    def watch(self, layers: Sequence[torch.nn.Module]) -> None:
        """Tell both passes' ends apart: what comes before the first layer and after it, and each end's own layer.

        A layer that holds much while it computes has its peak at the one end, one whose weights' gradients are large at
        the other; how much either is grows with the number of layers along a line of its own. From the second layer of
        the backward pass on, gradients of the one before are on their way.
        """
        layers[0].register_forward_pre_hook(lambda module, args: self._go_on("forward", "", "layers"))
        for number, to in ((len(layers) - 2, SECOND), (len(layers) - 3, BETWEEN), (0, "first layer")):
            if number >= 0:
                layers[number].register_forward_hook(functools.partial(self._see_gradient, to))

    def _see_gradient(self, to: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(lambda gradient: self._go_on("backward", None, to))

    def _go_on(self, phase: str, before: str | None, to: str) -> None:
        """To the next place, unless this is another pass: layers are computed again while gradients are."""
        part = self._part
        if part is not None and part.phase == phase and before in (None, part.place):
            self.enter(part._replace(place=to))

    def _add(self, tensor: torch.Tensor) -> None:
        local = innermost(tensor)
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        box = self._seen.get(storage)
        if box is None:
            box = self._seen[storage] = [0]
            weakref.finalize(storage, self._set, box, 0)
        self._set(box, storage.nbytes())

    def _set(self, box: list[int], size: int) -> None:
        rounded = -(-size // self._block) * self._block
        self.now += rounded - box[0]
        box[0] = rounded
        self.peak = max(self.peak, self.now)

    def __enter__(self) -> StoragePeak:
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            answer = resize(storage, size)
            box = tracker._seen.get(storage)
            if box is not None:
                tracker._set(box, storage.nbytes())
            return answer

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            # Which tokens are targets is data, and there is none: all of them.
            return torch.arange(args[0].numel()).unsqueeze(1)
        if func is read_number:
            return 1  # a number that the host asks for: which step it is
        if func is torch.ops.aten.add.Tensor and running_node() == "EmbeddingBackward0":
            # Of one weight at both ends. Autograd adds in place, but not where it sees a mode like this one.
            return args[0].add_(args[1])
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, out)
        return out
