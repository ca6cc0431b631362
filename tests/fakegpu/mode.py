"""The dispatch mode: tensors on the GPU are fake, those on the host real, and what is asked of either is counted."""

import collections
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operators that launch nothing on a GPU: they look at memory in another way, or make it.
NO_KERNEL = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "slice", "select",
    "unsqueeze", "squeeze", "split", "unbind", "split_with_sizes", "detach", "alias", "as_strided", "unfold",
    "diagonal", "chunk", "narrow", "lift_fresh", "set_", "resize_", "view_as", "device", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "is_pinned", "record_stream",
))  # fmt: skip
# The host waits for their answer.
READS = {"_local_scalar_dense": 1, "is_nonzero": True, "equal": True, "allclose": True}
_ON_GPU = torch._C.DispatchKey.CUDA
# What is so small says nothing of work: numbers of steps, learning rates, lengths of documents.
SMALL = 64


class FakeGpu(TorchDispatchMode):
    """Counts by operator (`kernels`) and by line of code (`syncs`, `uploads`, `on_host`)."""

    active = None

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.start()

    def start(self):
        """Count from here on."""
        self.kernels, self.syncs = collections.Counter(), collections.Counter()
        self.uploads, self.on_host = collections.Counter(), collections.Counter()
        self.casts = collections.Counter()

    def __enter__(self):
        FakeGpu.active = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") comes by here, as an upload
        return super().__enter__()

    def __exit__(self, *error):
        FakeGpu.active = None
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def note_sync(self, kind):
        self.syncs[f"{kind} {line_of_code()}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the tensors that lie inside
        name = func._schema.name.partition("::")[2]
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if name in ("_pin_memory", "pin_memory", "is_pinned"):
            return args[0] if name != "is_pinned" else True  # as if all host memory were
        goes = kwargs.get("device")
        goes = None if goes is None else torch.device(goes).type
        if name in NO_KERNEL and goes == "cpu":
            kwargs = {**kwargs, "pin_memory": False}
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if not on_gpu and goes != "cuda":
            if name not in NO_KERNEL and any(tensor.numel() > SMALL for tensor in tensors):
                self.on_host[f"{name} {line_of_code()}"] += 1
            return func(*args, **kwargs)
        if on_gpu and name in READS:
            self.note_sync(name)
            return self._read(name, on_gpu[0])
        if on_gpu and goes == "cpu":
            if name == "_to_copy" and waits:
                self.note_sync("copy to the host")
            return torch.zeros(on_gpu[0].shape, dtype=kwargs.get("dtype") or on_gpu[0].dtype)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            if waits:
                self.note_sync("copy_ to the host")
            return args[0]
        if name == "copy_" and not isinstance(args[1], FakeTensor):
            self.uploads[f"{'waits ' if waits else ''}{line_of_code()}"] += 1
            return args[0]
        if name == "nonzero":
            self.note_sync(name)
            with self.fake:
                return torch.arange(args[0].numel(), device=args[0].device).unsqueeze(1)
        if not on_gpu and name == "_to_copy":
            self.uploads[f"{'waits ' if waits else ''}{line_of_code()}"] += 1
            sent = args[0]
            with self.fake:
                return torch.empty_strided(
                    sent.shape, sent.stride(), dtype=kwargs.get("dtype") or sent.dtype, device=goes
                )
        if name not in NO_KERNEL:
            self.kernels[name] += 1
            if name == "_to_copy":
                self.casts[line_of_code()] += 1
        with self.fake:
            return func(*args, **kwargs)

    def _as_fake(self, tensor):
        # FSDP moves a module's tensors by giving the same objects other data: what is left of a fake one is no fake.
        if isinstance(tensor, (FakeTensor, DTensor)) or not torch._C._dispatch_keys(tensor).has(_ON_GPU):
            return tensor
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    def _read(self, name, tensor):
        if name == "_local_scalar_dense" and tensor.is_floating_point():
            return 1.0
        return READS[name]


def line_of_code():
    """The innermost line of duoka, or of a library that it calls; of a backward pass of torch's own there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for root in ("/src/duoka/", "/site-packages/transformers/", "/site-packages/peft/"):
            if root in path:
                return f"{root.split('/')[2]}/{path.partition(root)[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch's autograd"
