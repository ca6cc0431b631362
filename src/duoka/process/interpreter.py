"""How a process of ours is started: this Python, with a module of ours."""

from __future__ import annotations

import sys


def python_module(name: str, *arguments: str) -> tuple[str, ...]:
    """`python -m name`, with the current folder off the import path: modules there must not shadow Python's."""
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, "-m", name, *arguments)
