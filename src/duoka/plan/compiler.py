"""The C++ compiler of this machine, which kernels for training on CPUs are compiled with (model/native.py).

Here, because a plan counts with them: what a step keeps and how long it takes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping

SWITCH = "DUOKA_NATIVE"  # 0: none are compiled
INSTALL = "apt install g++   (Debian, Ubuntu; elsewhere gcc-c++ or clang)"


def has_kernels(env: Mapping[str, str] = os.environ) -> bool:
    """Whether they will be there, as far as can be told without compiling."""
    return env.get(SWITCH) != "0" and find_compiler(env) is not None


def find_compiler(env: Mapping[str, str] = os.environ) -> str | None:
    names = (env.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def why_no_layers(env: Mapping[str, str] = os.environ) -> str:
    """Why torch.compile makes nothing for this machine's CPU; "": it does. It asks for one compiler, and no other."""
    if sys.platform == "win32":
        return ""
    name = env.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return "" if shutil.which(name) else f"torch.compile needs a C++ compiler for a CPU, and there is no {name!r} here"


def has_aio(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a program with Linux's asynchronous reads and writes compiles, which DeepSpeed's offload to a disk does.

    Seen by compiling one, with the compiler that torch takes for that and the flags that DeepSpeed looks at, too.
    """
    compiler = shutil.which(env.get("CXX") or "c++")
    if compiler is None:
        return False
    flags = [flag for name in ("CFLAGS", "LDFLAGS") for flag in shlex.split(env.get(name, ""))]
    program = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"
    line = [compiler, "-x", "c++", "-", *flags, "-laio", "-o", os.devnull]
    return subprocess.run(line, input=program, text=True, capture_output=True, timeout=60, check=False).returncode == 0
