"""Compile the guard, start the process that has a fake GPU, and bring back what it counted. Called by tests."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 300


def why_not():
    """Why there can be no fake GPU here; "" where there can."""
    if find_compiler() is None:
        return "NO C++ COMPILER (g++ or clang++): the fake GPU was not compiled, and no budget of kernels was checked"
    import torch

    return "this torch knows CUDA by itself" if torch.version.cuda else ""


def find_compiler():
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def compile_guard(folder):
    return compile_beside_torch(HERE / "guard.cpp", folder / "guard.so")


def compile_beside_torch(source, library, *more):
    """`source` as a shared library that is loaded into torch's process."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    subprocess.run(
        [
            find_compiler(), "-std=c++20", "-O0", "-shared", "-fPIC", str(source), "-o", str(library),
            f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu",
            *more, f"-Wl,-rpath,{torch}/lib",
        ],
        check=True, timeout=SECONDS,
    )  # fmt: skip
    return library


def run_on_fake_gpu(guard, calls, folder):
    """What `calls`, a name -> (a function of steps.py, its keywords), gave: JSON, or the text of an exception.

    All of them run one after another in one process, in `folder`.
    """
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "fakegpu.child", str(guard)],
        input=json.dumps(calls), cwd=folder, capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])
