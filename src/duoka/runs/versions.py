"""Versions of what decides results: compared over ranks, and kept in each checkpoint."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

from duoka import __version__

VERSIONED = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def library_versions() -> dict[str, str]:
    return {"duoka": __version__, "python": platform.python_version()} | {name: _read(name) for name in VERSIONED}


@functools.cache  # a process keeps what it has imported, whatever is installed meanwhile
def _read(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
