"""torch's profiler and memory caches, behind the verbs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from duoka.comm.world import World


@contextlib.contextmanager
def profile(folder: str | None, world: World, options: Mapping[str, Any]) -> Iterator[Any]:
    """Gives torch's profiler; afterwards each rank's trace lies in FOLDER/profile, for Perfetto or TensorBoard."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(**{"activities": kinds, **options}) as profiler:
        yield profiler
    if folder is not None:
        target = Path(folder) / "profile"
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank{world.rank:05d}.json"))


def read_settings(settings: Any) -> dict[str, Any]:
    """A ProfileKwargs as arguments of torch's profiler; `folder` is where traces go."""
    said = settings.to_kwargs()
    names = {"schedule_option": "schedule", "output_trace_dir": "folder"}
    asked = {names.get(name, name): value for name, value in said.items()}
    if "activities" in asked:
        asked["activities"] = [
            getattr(torch.profiler.ProfilerActivity, str(one).upper()) for one in asked["activities"]
        ]
    if "schedule" in asked:
        asked["schedule"] = torch.profiler.schedule(**asked["schedule"])
    return asked


def empty_caches() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
