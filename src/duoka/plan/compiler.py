"""The C++ compiler of this machine, which kernels for bf16 training on CPUs are compiled with (model/native.py).

Here, because a plan counts with them: what a step keeps and how long it takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

SWITCH = "DUOKA_NATIVE"  # 0: none are compiled
INSTALL = "apt install g++   (Debian, Ubuntu; elsewhere gcc-c++ or clang)"


def has_kernels(env: Mapping[str, str] = os.environ) -> bool:
    """Whether they will be there, as far as can be told without compiling."""
    return env.get(SWITCH) != "0" and find_compiler(env) is not None


def find_compiler(env: Mapping[str, str] = os.environ) -> str | None:
    names = (env.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)
