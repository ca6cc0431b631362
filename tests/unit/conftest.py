"""What several unit tests share: tokenizers, each built once; a run folder; a clock that stands still; kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.runs.folder import RunFolder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of this process: it stands until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture(params=("with kernels", "without"))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with what a compiler makes, and once by torch alone."""
    from duoka.model import native

    if request.param == "without":
        monkeypatch.setattr(native, "find", lambda: None)
    elif native.find() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.make()
    return run


@pytest.fixture(scope="session")
def tiny_model(deep_model: Path) -> Path:
    """Here layers are counted, and no step is slow."""
    return deep_model


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte-level tokenizer with a ChatML template, without a model."""
    from tiny import build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def demo_tokenizer_folder(demo_model: Path) -> Path:
    """The demo model's tokenizer: it lies beside the weights."""
    return demo_model
