"""Packages that tests want, looked for without importing them: DeepSpeed alone cost each worker two seconds."""

import importlib.util

import pytest


def need(package: str, install: str) -> None:
    """At the top of a file of tests, or in one: skip what follows where it is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {install}", allow_module_level=True)


def need_deepspeed() -> None:
    need("deepspeed", "'duoka[deepspeed]'")
