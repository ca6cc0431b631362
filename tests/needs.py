"""Packages that tests want, looked for without importing them: DeepSpeed alone cost each worker two seconds."""

import importlib.util
from importlib.metadata import version

import pytest
from packaging.version import Version


def need(package: str, install: str) -> None:
    """At the top of a file of tests, or in one: skip what follows where it is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {install}", allow_module_level=True)


def need_deepspeed() -> None:
    need("deepspeed", "'duoka[deepspeed]'")


def since(**wanted: str) -> pytest.MarkDecorator:
    """For a test of what the oldest admitted versions (constraints-oldest.txt) do otherwise: since then, by package."""
    older = [f"{name} {version(name)}" for name, least in wanted.items() if Version(version(name)) < Version(least)]
    return pytest.mark.skipif(bool(older), reason=f"{', '.join(older)}: it is of {wanted}")
