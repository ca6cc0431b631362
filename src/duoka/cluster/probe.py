"""Facts about this machine and this installation, read without judging: for env.json and for the doctor.

Uses the standard library and psutil only, never torch: it must work where torch is missing or broken.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from duoka import __version__
from duoka.plan.hardware import count_usable_cores, read_machine
from duoka.process.secrets import hide_in_command, mask_secrets

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "peft", "accelerate", "numpy", "pyarrow", "pydantic",
    "PyYAML", "rich", "click", "psutil", "tensorboard", "jinja2",
)  # fmt: skip
# Variables that change what a run does; others are the user's own business.
_ENV_PREFIXES = (
    "DUOKA_", "OMP_", "MKL_", "KMP_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_",
    "TOKENIZERS_", "SLURM_", "PYTHON", "RANK", "LOCAL_", "WORLD_", "MASTER_", "GROUP_", "XDG_CACHE", "LANG", "LC_",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "VIRTUAL_ENV", "CONDA_DEFAULT",
)  # fmt: skip


def read_versions(names: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Installed versions by package, None for what is missing. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def wanted_versions(name: str) -> str:
    """The range of a package that duoka's own metadata name, such as ">=2.11,<2.15"; empty: any."""
    try:
        lines = metadata.requires("duoka") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return ""
    for line in lines:
        found = re.fullmatch(r"([\w.-]+)\s*\(?([<>=!~][^;)]*?)\)?", line.strip())
        if found and found[1].lower() == name.lower():
            return ",".join(sorted((word.strip() for word in found[2].split(",")), reverse=True))
    return ""


def is_among(version: str, wanted: str) -> bool:
    """Whether `version` is in a range; True where nothing can tell."""
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet
        from packaging.version import InvalidVersion, Version
    except ImportError:
        return True
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def read_nccl_version() -> str:
    """Of the NCCL that was installed with torch (nvidia-nccl-cu12 and later); empty: none."""
    found = [one for one in metadata.distributions() if (one.name or "").startswith("nvidia-nccl-cu")]
    return found[0].version if found else ""


def read_torch_cuda() -> str:
    """The CUDA that the installed torch was built for, as "12.8"; empty: none. Torch itself is not imported."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else ""


def read_driver() -> str:
    """The version of NVIDIA's driver, as nvidia-smi says it; empty: none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.split() or [""])[0]


def read_git_commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository around `folder`, and whether files differ from it; None without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def read_environment_facts(
    folder: Path, command: Sequence[str] = (), env: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """What env.json holds: enough to know later what this run ran on, and no secrets."""
    chosen = {name: value for name, value in env.items() if name.startswith(_ENV_PREFIXES)}
    return {
        "duoka": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": hide_in_command(command, env),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": read_versions(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "machine": {**read_machine(env).to_json(), "num_usable_cores": count_usable_cores()},
        "git": read_git_commit(folder),
        "environment": mask_secrets(chosen),
    }
