"""The names that loops import from `accelerate.local_sgd`, as duoka.accelerator.local_sgd: see names/offered.py."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from duoka.accelerator.names.offered import find

    return find(name, __name__)
