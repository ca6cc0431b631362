"""Versions of what decides results: compared over ranks, and kept in each checkpoint."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from duoka import __version__

VERSIONED = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def library_versions() -> dict[str, str]:
    found = {"duoka": __version__, "python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
