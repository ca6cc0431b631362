"""torch.cuda as on a machine with emulated GPUs: memory and random numbers are asked of gpu.cpp, nothing waits."""

import contextlib
import ctypes
import os
import time
from types import SimpleNamespace

import idle_streams
import torch

from emulated import kernels

NAME, TOTAL_BYTES = "NVIDIA H100 80GB HBM3", 80 * 2**30  # as machine/nvidia-smi says
CAPABILITY = tuple(int(part) for part in os.environ.get("EMULATED_CAPABILITY", "9.0").split("."))
_library = None


def answer(library):
    """Replace what asks the driver, in this process for good; `library` is gpu.cpp's."""
    global _library
    _library = library
    library.emulated_held.restype = library.emulated_peak.restype = library.emulated_state.restype = ctypes.c_int64
    library.emulated_seed.argtypes = [ctypes.c_uint64]
    library.emulated_state.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.emulated_set_state.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    library.emulated_resize.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.emulated_pin.argtypes, library.emulated_unpin.argtypes = [ctypes.c_uint64] * 2, [ctypes.c_uint64]
    for name, what in {
        **_asked_of_devices(),
        **_asked_of_streams(),
        **_asked_of_memory(),
        **_asked_of_chance(),
    }.items():
        setattr(torch.cuda, name, what)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = _rng_state, _set_rng_state
    torch.accelerator.current_stream = lambda device=None: Stream(device)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.cuda.nvtx._nvtx = _Silent()
    torch.cuda.nccl.version = lambda: (2, 28, 3)
    # What the compiler's code asks for when it is imported, and nothing calls here.
    for name in ("getCurrentRawStream", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", lambda index: 0)
    usual = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda self, size: (
        library.emulated_resize(self._cdata, size) if self.device.type == "cuda" else usual(self, size)
    )
    torch.Tensor.record_stream = _record_stream
    kernels.provide()


def _index(device=None):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _library.emulated_current() if index is None else index


class Stream(idle_streams.Stream):
    def __init__(self, device=None, priority=0):
        self.device = torch.device("cuda", _index(device))

    def record_event(self, event=None):
        return (event or Event()).record()


class Event(idle_streams.Event):
    at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()
        return self

    def elapsed_time(self, other):
        return max(1e-3, (other.at - self.at) * 1000)


class _Device:
    """torch.cuda.device: that one, for a while."""

    def __init__(self, device):
        self.index = -1 if device is None else _index(device)

    def __enter__(self):
        self.before = _library.emulated_current()
        if self.index >= 0:
            _library.emulated_set_current(self.index)

    def __exit__(self, *error):
        _library.emulated_set_current(self.before)


class _Silent:
    """Marks for a profiler."""

    def __getattr__(self, name):
        return lambda *words: 0


class _Runtime:
    """CUDA's own functions, as duoka calls them: a 0 is success."""

    def cudaHostRegister(self, address, size, flags):
        return _library.emulated_pin(address, size)

    def cudaHostUnregister(self, address):
        return _library.emulated_unpin(address)


def _asked_of_devices():
    count = int(os.environ["EMULATED_GPUS"])
    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "_is_compiled": lambda: True, "cudart": _Runtime,
        "is_bf16_supported": lambda *args, **kwargs: CAPABILITY >= (8, 0),
        "device_count": lambda: count, "current_device": lambda: _library.emulated_current(), "device": _Device,
        "set_device": lambda device: _library.emulated_set_current(_index(device)),
        "get_device_name": lambda device=None: NAME, "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=NAME, total_memory=TOTAL_BYTES, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
            uuid=f"GPU-00000000-{_index(device)}", L2_cache_size=50 * 2**20,
        ),
    }  # fmt: skip


def _asked_of_streams():
    return {
        "Stream": Stream, "Event": Event, "current_stream": Stream, "default_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(), "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None, "is_current_stream_capturing": lambda: False,
    }  # fmt: skip


def _asked_of_memory():
    def held(device=None):
        return _library.emulated_held(_index(device))

    def peak(device=None):
        return _library.emulated_peak(_index(device))

    def stats(device=None):
        now, most = held(device), peak(device)
        kinds = {"allocated_bytes", "reserved_bytes", "active_bytes"}
        named = {f"{kind}.all.{what}": size for kind in kinds for what, size in (("current", now), ("peak", most))}
        return {**named, "num_alloc_retries": 0, "num_ooms": 0}

    return {
        "memory_allocated": held, "memory_reserved": held, "max_memory_allocated": peak, "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: _library.emulated_reset_peak(_index(device)),
        "memory_stats": stats, "empty_cache": lambda: None, "ipc_collect": lambda: None,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - held(device), TOTAL_BYTES),
    }  # fmt: skip


def _asked_of_chance():
    def seed(number):
        _library.emulated_seed(int(number) % 2**64)

    return {
        "manual_seed": seed, "manual_seed_all": seed, "get_rng_state": _rng_state, "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_rng_state(index) for index in range(torch.cuda.device_count())],
        "set_rng_state_all": lambda states: [_set_rng_state(one, index) for index, one in enumerate(states)],
    }  # fmt: skip


def _rng_state(device="cuda"):
    index = _index(device)
    state = torch.empty(_library.emulated_state(index, None), dtype=torch.uint8)
    _library.emulated_state(index, state.data_ptr())
    return state


def _set_rng_state(state, device="cuda"):
    state = state.contiguous()
    _library.emulated_set_state(_index(device), state.data_ptr(), state.numel())


def _record_stream(tensor, stream):
    assert tensor.is_cuda, "a stream can use memory of its own device only"
