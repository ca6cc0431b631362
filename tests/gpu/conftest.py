"""The promises on GPUs: the bodies of tests/promises, on CUDA. `make gpu-check` runs them and prints their table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
for _folder in ("promises", "unit"):  # whose bodies are used here
    sys.path.append(str(TESTS / _folder))

from gpus import num_gpus  # noqa: E402


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One loud line without a GPU; with one, a table of what was found."""
    reports = [one for kind in ("passed", "failed", "error", "skipped") for one in terminalreporter.getreports(kind)]
    rows = [(one.nodeid, one.outcome, getattr(one, "duration", 0.0)) for one in reports if "tests/gpu/" in one.nodeid]
    if not rows:
        return
    if not num_gpus():
        count = sum(outcome == "skipped" for _, outcome, _ in rows)
        terminalreporter.write_line(
            f"NO GPU: {count} checks of tests/gpu were SKIPPED; `make gpu-check` runs them", red=True
        )
        return
    for name, outcome, seconds in sorted(rows):
        terminalreporter.write_line(f"{outcome:<8}{seconds:>7.1f} s  {name.partition('tests/gpu/')[2]}")


@pytest.fixture
def gpu() -> str:
    if not num_gpus():
        pytest.skip("no GPU")
    return "cuda"


@pytest.fixture
def two_gpus() -> int:
    if num_gpus() < 2:
        pytest.skip("fewer than two GPUs")
    return 2


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Bodies that take a device run on the CPU everywhere, so that they are known to work before a GPU sees them."""
    if request.param == "cuda" and not num_gpus():
        pytest.skip("no GPU")
    return str(request.param)
