"""What stage mid takes from the run that `optim.state` names: the settings of its optimizer, and its batches.

load.py asks for it. A rate that was found for another batch or another optimizer's state would fit neither, so that
all of it comes together, unless the config says otherwise. Nothing here opens a checkpoint.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from duoka.config.paths import given_path, is_file
from duoka.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig

CONFIG = "config.yaml"
_OPTIM = (
    "name", "lr", "adamw_lr", "embedding_lr", "head_lr", "muon_scale", "momentum", "lr_scaling", "lr_batch", "clip",
    "weight_decay", "betas", "eps",
)  # fmt: skip
_ORIGIN = "from optim.state"


def read_run(name: str, base: Path) -> dict[str, Any]:
    """The resolved config of a run, or of one of its checkpoints, as plain values; empty where there is none."""
    given = given_path(name)
    starts = (given, base / given, Path("runs") / given)
    folders = [place for start in starts for place in (start, start.parent.parent)]  # of a checkpoint: its run
    file = next((folder / CONFIG for folder in folders if is_file(folder / CONFIG)), None)
    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def take_over_rates(config: RunConfig, base: Path, written: Container[str]) -> tuple[RunConfig, dict[str, str]]:
    """The config of a mid stage with what the run before has, and the origins of these keys.

    A run that is not there yet is refused later, by who opens its checkpoint.
    """
    if config.stage.name != "mid" or config.optim.state is None:
        return config, {}
    before = read_run(config.optim.state, base)
    optim, data, train = (before.get(block) or {} for block in ("optim", "data", "train"))
    if not optim or ("optim.name" in written and optim.get("name") != config.optim.name):
        return config, {}
    wanted = {
        "optim": {name: optim[name] for name in _OPTIM if name in optim},
        "data": {name: data[name] for name in ("max_length",) if name in data},
        "train": {name: train[name] for name in ("global_batch",) if name in train},
    }
    origins: dict[str, str] = {}
    sections: dict[str, type[OptimConfig] | type[DataConfig] | type[TrainConfig]]
    sections = {"optim": OptimConfig, "data": DataConfig, "train": TrainConfig}
    for block, section in sections.items():
        own = {name: value for name, value in wanted[block].items() if f"{block}.{name}" not in written}
        try:
            filled = section.model_validate({**getattr(config, block).model_dump(), **own})
        except ValidationError:
            continue  # the other run was trained by another version of duoka
        origins |= {f"{block}.{name}": _ORIGIN for name in own}
        config = config.model_copy(update={block: filled})
    return config, origins
