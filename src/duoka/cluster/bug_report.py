"""What a bug report needs of this machine and installation, as `duoka env` prints it: facts, and nothing private.

Left out beside secrets: the host's name and the user's (the home folder is written ~). Never imports torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duoka
from duoka.cluster.launch import threads_per_process
from duoka.cluster.probe import (
    PACKAGES,
    read_driver,
    read_environment_facts,
    read_git_commit,
    read_nccl_version,
    read_torch_cuda,
    read_versions,
)
from duoka.plan.hardware import read_cpu_flags, read_gpus
from duoka.plan.heap import find_allocator
from duoka.process.secrets import hide_secrets
from duoka.units import format_bytes

# Not needed for every run: named only where they are there.
EXTRAS = ("bitsandbytes", "datasets", "huggingface_hub", "wandb", "triton", "liger-kernel", "flash-attn", "deepspeed",
          "gguf")  # fmt: skip
# Instructions that decide which kernels a CPU runs.
_TELLING_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd",
                  "bf16", "sve")  # fmt: skip
# Variables of a scheduler or launcher that name people and machines.
_PERSONAL = re.compile("USER|MAIL|HOST|NODELIST|NODENAME|ADDR")


def read_facts(env: Mapping[str, str] = os.environ, package: Path = Path(duoka.__file__).parent) -> dict[str, Any]:
    """All facts by name; texts are free of secrets, and of the home folder."""
    facts = read_environment_facts(package, env=env)
    machine = facts["machine"]
    allocator = find_allocator()
    cores = machine["num_usable_cores"]
    found = {
        "duoka": {"version": facts["duoka"], "folder": str(package), "git": read_commit_of_code(package)},
        "python": {"version": facts["python"], "executable": facts["executable"]},
        "packages": read_versions(PACKAGES) | {name: one for name, one in read_versions(EXTRAS).items() if one},
        "system": facts["system"],
        "cpu": {
            "name": machine["cpu"],
            "flags": sorted(read_cpu_flags() & set(_TELLING_FLAGS)),
            "num_usable_cores": cores,
            "memory_bytes": machine["memory_bytes"],
            "available_bytes": machine["available_bytes"],
        },
        "threads": {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS"), "of_one_process": threads_per_process(cores, 1)},
        "allocator": str(allocator) if allocator else None,
        "gpus": [{"name": one.name, "memory_bytes": one.memory_bytes, "capability": one.capability}
                 for one in read_gpus(env)],
        "cuda": {"driver": read_driver(), "torch": read_torch_cuda(), "nccl": read_nccl_version()},
        "environment": {name: one for name, one in facts["environment"].items() if not _PERSONAL.search(name)},
    }  # fmt: skip
    cleaned: dict[str, Any] = _clean(found, env)
    return cleaned


def read_commit_of_code(package: Path) -> dict[str, Any] | None:
    """The commit that the code is of; None for an installed wheel, though a venv may lie in somebody's repository."""
    command = ["git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py"]
    try:
        subprocess.run(command, capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return read_git_commit(package)


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts as a person reads them, a line each: to be pasted into a report."""
    code, cpu, cuda, git = facts["duoka"], facts["cpu"], facts["cuda"], facts["duoka"]["git"]
    commit = f"commit {git['commit'][:12]}{', files changed' if git['changed'] else ''}" if git else "installed"
    threads, own = facts["threads"]["OMP_NUM_THREADS"], facts["threads"]["of_one_process"]
    gpus = [f"{one['name']} {format_bytes(one['memory_bytes'])} (compute capability {one['capability']:g})"
            for one in facts["gpus"]]  # fmt: skip
    memory = f"{format_bytes(cpu['available_bytes'])} available of {format_bytes(cpu['memory_bytes'])}"
    rows = [
        ("duoka", f"{code['version']}, {commit}, in {code['folder']}"),
        ("python", f"{facts['python']['version']}, {facts['python']['executable']}"),
        *((name, version or "missing") for name, version in facts["packages"].items()),
        ("system", facts["system"]),
        ("cpu", f"{cpu['name']}, {cpu['num_usable_cores']} usable cores; {' '.join(cpu['flags']) or 'no known flag'}"),
        ("memory", memory),
        ("threads", f"OMP_NUM_THREADS={threads}" if threads else f"{own}, for one process"),
        ("allocator", facts["allocator"] or "the C library's"),
        *(("gpu", one) for one in gpus or ["none"]),
        ("cuda", ", ".join(f"{name} {value or 'none'}" for name, value in cuda.items())),
        *((name, value) for name, value in facts["environment"].items()),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _clean(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _clean(one, env) for name, one in value.items()}
    if isinstance(value, list):
        return [_clean(one, env) for one in value]
    if not isinstance(value, str):
        return value
    home = env.get("HOME", "")
    text = hide_secrets(value, env)
    return text.replace(home, "~") if len(home) > 1 else text
