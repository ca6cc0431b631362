"""Packages with kernels for GPUs that can be installed beside duoka: whether they are here, without importing them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

SWITCH = "DUOKA_LIGER"  # 0: Liger's kernels are left alone
GET_LIGER = "pip install 'duoka[gpu]'"


def why_no_liger(env: Mapping[str, str] = os.environ) -> str:
    """Why Liger's kernels cannot be had here; "" where they can, as far as can be told without importing them."""
    if env.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed ({GET_LIGER})"
    return why_no_triton()


def why_no_triton() -> str:
    return "" if importlib.util.find_spec("triton") else "Triton is not installed, which torch brings for CUDA"
