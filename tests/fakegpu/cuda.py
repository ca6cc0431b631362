"""torch.cuda as a machine with one GPU has it, as far as a training step asks: nothing here does anything."""

import contextlib
import functools

import idle_streams
import torch
from torch._subclasses.fake_tensor import FakeTensor

MILLISECONDS = 8.0  # between any two events


class Stream(idle_streams.Stream):
    def __init__(self, device=None, priority=0, **kwargs):
        self.device = torch.device("cuda", 0)

    def synchronize(self):
        _note("stream.synchronize")

    def record_event(self, event=None):
        return event or Event()


class Event(idle_streams.Event):
    def synchronize(self):
        _note("event.synchronize")

    def elapsed_time(self, other):
        return MILLISECONDS


def _note(kind):
    from fakegpu.mode import FakeGpu

    if FakeGpu.active is not None:
        FakeGpu.active.note_sync(kind)


def answer_for_one_gpu():
    """Replace what asks the driver, in this process for good."""
    only = Stream()
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "current_stream": lambda device=None: only,
        "default_stream": lambda device=None: only,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "synchronize": lambda device=None: _note("cuda.synchronize"),
        "get_device_name": lambda device=None: "a GPU that computes nothing",
        "mem_get_info": lambda device=None: (70 * 2**30, 80 * 2**30),
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.accelerator.current_stream = lambda device=None: only
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.utils._foreach_utils._foreach_supported_types.append(FakeTensor)
    FakeTensor.tolist = _read_all
    _have_kernels()


def _read_all(tensor):
    """One wait, where the fake tensor's own asks for each number; zeros: nothing overflowed, and memory was enough."""
    _note("tolist")
    return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


def _have_kernels():
    """A CPU build knows these as several; with a kernel of its own for CUDA each stays one, as on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "_foreach_norm.Scalar"):
        library.impl(name, functools.partial(_never, name), "CUDA")
    _have_kernels.kept = library


def _never(name, *args, **kwargs):
    raise AssertionError(f"{name} was computed: its tensors were not fake")
