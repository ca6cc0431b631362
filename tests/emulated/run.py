"""Compile the emulated GPUs and run commands or worlds on them. Called by tests."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from fakegpu.run import compile_beside_torch, why_not

__all__ = ["compile_gpus", "compile_nccl", "environment", "train_on_gpus", "why_not"]

HERE = Path(__file__).parent
SECONDS = 300


def compile_gpus(folder):
    return compile_beside_torch(HERE / "gpu.cpp", folder / "gpu.so")


def compile_nccl(folder):
    python = f"-I{sysconfig.get_paths()['include']}"
    return compile_beside_torch(HERE / "nccl.cpp", folder / "emulated_nccl.so", python, "-ltorch", "-ltorch_python")


def environment(gpus, library, nccl=""):
    """Variables of a process that finds so many GPUs."""
    paths = [HERE / "machine", HERE.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "EMULATED_GPUS": str(gpus), "EMULATED_LIBRARY": str(library), "EMULATED_NCCL": str(nccl),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": os.pathsep.join((str(HERE / "machine"), os.environ.get("PATH", ""))),
    }  # fmt: skip


def train_on_gpus(jobs, size, env):
    """worlds.train_all on GPUs: (yaml, overrides, folder) in turn, by `size` ranks in one world."""
    told = [(str(yaml), list(overrides), str(folder)) for yaml, overrides, folder in jobs]
    ended = subprocess.run(
        [sys.executable, "-m", "emulated.run"], input=json.dumps([told, size]), env=env, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]


if __name__ == "__main__":
    from worlds import train_all

    train_all(*json.load(sys.stdin))
