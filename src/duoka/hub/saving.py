"""What has to be around a call of transformers' own that writes a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_deepspeed() -> Iterator[None]:
    """Around transformers' save_pretrained, which has Accelerate look whether the model is one of DeepSpeed's.

    Where that is installed it would be imported for it: seconds of CPU, and a line of its own on the screen.
    """
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deepspeed"]
