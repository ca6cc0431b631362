"""The library of compiled kernels: made of the .cpp files beside, once per kind of machine, and kept in the cache."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from duoka.plan.hardware import count_usable_cores
from duoka.runs.cache import hold_lock

_FILES = (
    "native.h", "attention.h", "narrow_products.h", "native.cpp", "attention.cpp", "attention_wide.cpp", "decode.cpp",
    "adamw.cpp", "scan.cpp", "convolution.cpp", "delta.cpp", "thin.cpp",
)  # fmt: skip
SOURCES = tuple(Path(__file__).with_name(name) for name in _FILES)
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp",
            "-fno-strict-aliasing", "-fPIC")  # fmt: skip
_COMPILE_WITHIN_S = 120

_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: Mapping[str, list[Any]] = {
    "norm_forward": [_P, _P, _P, _P, _I, _I, _F, _N, _N, _N],
    "norm_backward": [_P, _P, _P, _P, _P, _P, _I, _I, _I, _N, _N, _N],
    "gate_forward": [_P, _P, _P, _I, _I, _I, _N, _N],
    "gate_backward": [_P, _P, _P, _P, _P, _P, _I, _I, _I, _N, _N],
    "rotate": [_P, _P, _P, _P, _I, _I, _I, _I, _F, _N, _N],
    "cross_entropy": [_P, _P, _P, _I, _I, _N],
    "add": [_P, _P, _I, _N],
    "drop": [_P, _P, _P, _I, _I, _I, _I, _N, _N],
    "adamw": [_P, _P, _P, _P, _I, _I, _I, *[_F] * 7, _N],
    "sum_rows": [_P, _P, _P, _P, _P, _I, _I, _N, _N],
    "weigh_rows": [_P, _P, _P, _P, _I, _I, _N, _N],
    "wide_attention_forward": [_P, _P, _P, _N, _N],
    "wide_attention_backward": [*[_P] * 8, _N, _N],
    "convolve_forward": [*[_P] * 4, *[_I] * 6, _N, _N, _N],
    "convolve_backward": [*[_P] * 7, *[_I] * 6, _N, _N, _N],
    "scan_forward": [*[_P] * 6, _I, _I, _I, _I, _N],
    "scan_backward": [*[_P] * 12, _I, _I, _I, _I, _I, _N],
    "delta_forward": [*[_P] * 6, *[_I] * 7, _N, _N, _N],
    "delta_backward": [*[_P] * 11, *[_I] * 7, _N, _N, _N],
    "thin_squeeze": [_P, _P, _P, *[_I] * 4, _F, _N, _N],
    "thin_spread": [_P, _P, _P, *[_I] * 4, _F, _N, _N],
    "thin_collect": [_P, _P, _P, *[_I] * 4, _F, _N, _N],
    "attend_rows": [_P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _F, _N, _N],
    "multiply_rows": [_P, _P, _P, _P, _I, _I, _I, _N, _N],
    "multiply_codes": [_P, _P, _P, _P, _P, _I, _I, _I, _N, _N],
}
_NARROW_ATTENTION: Mapping[str, list[Any]] = {
    "attention_forward": [_P, _P, _P, _N],
    "attention_backward": [*[_P] * 8, _N],
}


class Library:
    """The compiled functions, by name."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.has_narrow_attention = bool(library.duoka_has_narrow_attention())
        known = {**_SIGNATURES, **(_NARROW_ATTENTION if self.has_narrow_attention else {})}
        for name, arguments in known.items():
            function = getattr(library, f"duoka_{name}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(name)


def load_compiled(compiler: str, folder: Path) -> Library:
    """For this source, compiler and kind of processor: whoever is first compiles, others wait for it."""
    key = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES))
    key.update(repr((_OPTIONS, compiler, os.stat(compiler).st_mtime_ns, _processor())).encode())
    name = f"kernels-{key.hexdigest()[:20]}"
    path = _compiled(folder, name)
    if path is None:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / "compile.lock", on_wait=lambda: None):
            path = _compiled(folder, name) or _compile(compiler, folder, name)
    return Library(path)


def _compiled(folder: Path, name: str) -> Path | None:
    """The file that is what its name says: loading one that was cut short would end the process."""
    return next((path for path in folder.glob(f"{name}-*.so") if path.stem == f"{name}-{_digest(path)}"), None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _compile(compiler: str, folder: Path, name: str) -> Path:
    def make(target: Path, *words: str) -> Path:
        command = [compiler, *_OPTIONS, *words, "-o", str(target)]
        subprocess.run(command, check=True, timeout=_COMPILE_WITHIN_S, stdin=subprocess.DEVNULL, capture_output=True)
        return target

    units = [source for source in SOURCES if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        with ThreadPoolExecutor(min(len(units), count_usable_cores())) as side_by_side:
            objects = list(side_by_side.map(lambda unit: make(Path(place, f"{unit.stem}.o"), "-c", str(unit)), units))
        made = make(Path(place, "kernels.so"), "-shared", *map(str, objects))
        path = folder / f"{name}-{_digest(made)}.so"
        os.replace(made, path)
    return path


def _processor() -> str:
    """What -march=native asks: a cache folder may be shared by machines of several kinds."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
        if told:
            return "\n".join(told)
    return f"{platform.processor()} {platform.node()}"  # nobody says which: a machine's own
