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
def demo_tokenizer_folder(demo_model: Path) -> Path:
    """The demo model's tokenizer: it lies beside the weights."""
    return demo_model
