"""A checkpoint as DeepSpeed's universal one, which its engine goes on from at stages 1 to 3 on any number of ranks.

Written without DeepSpeed, a parameter at a time, in pickles of tensors, which are its form. What decides the next steps
beside weights and moments (learning rate, betas, decay, data) is the script's own that goes on. Called by
`duoka export-checkpoint`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from duoka.errors import ConfigError
from duoka.model.export import draft_of
from duoka.runs.manifest import step_of
from duoka.store.reader import opened
from duoka.store.resume import STATE, config_of

_VERSION = "0.19.8"  # of DeepSpeed, whose form this is
_SAY_EVERY_S = 5.0
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOST_GROUPS = 256  # of a script's optimizer: one for each weight of a large model that has rates of its own
# Stage 3 looks for the second name, the others for the first.
_FACTS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


@dataclass(frozen=True)
class Exported:
    step: int
    num_parameters: int
    num_tensors: int
    tag: str


def export_universal(checkpoint: Path, folder: Path, say: Callable[[str], None] = lambda _: None) -> Exported:
    """Write `checkpoint` into the new `folder`; `say` hears how far it is, where that takes long."""
    step = step_of(checkpoint)
    with opened(checkpoint) as (_, saved):
        shapes = {name: tuple(one.size) for name, one in saved.items() if hasattr(one, "size")}
    names = [name.removeprefix("model.") for name in shapes if name.startswith("model.")]
    _check(checkpoint, names, shapes)
    with draft_of(folder) as draft:
        place = draft / f"global_step{step}"
        (place / "zero").mkdir(parents=True)
        counts, total, said = _steps_of(checkpoint, names, shapes), 0, time.monotonic()
        for number, name in enumerate(names):
            kept = [f"model.{name}", *(f"optim.{kind}.{name}" for kind in _MOMENTS)]
            parts = dict(zip(("fp32", *_MOMENTS), _read(checkpoint, {key: shapes[key] for key in kept}), strict=True))
            own = place / "zero" / name
            own.mkdir()
            for kind, value in parts.items():
                torch.save({"param": value, "cat_dim": 0}, own / f"{kind}.pt")
            torch.save(counts[name].clone(), own / "step.pt")
            total += parts["fp32"].numel()
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(f"{number + 1:,} of {len(names):,} parameters are written")
        _write_facts(place, checkpoint, step, counts[names[0]])
        (draft / "latest_universal").write_text(place.name, encoding="utf-8")
    return Exported(step, total, len(names), f"global_step{step}")


def _check(checkpoint: Path, names: list[str], shapes: Collection[str]) -> None:
    config, why = config_of(checkpoint), ""
    if config.optim.name != "adamw":
        why = f"was trained by {config.optim.name}, and DeepSpeed's engine goes on with AdamW's moments alone"
    elif config.lora is not None:
        why = "holds adapters, and their names in a model differ from script to script"
    elif not all(f"optim.{kind}.{name}" in shapes for name in names for kind in _MOMENTS):
        why = "has frozen weights, which have no moments"
    if why:
        raise ConfigError(f"{checkpoint} {why}", fix="`duoka export` writes the weights, from which a script can begin")


def _read(checkpoint: Path, shapes: dict[str, tuple[int, ...]]) -> list[torch.Tensor]:
    wanted = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    with opened(checkpoint) as (reader, _):
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)
    return list(wanted.values())


def _steps_of(checkpoint: Path, names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """AdamW's own count of each parameter: without steps that were left out, with those of a stage before."""
    kept = {f"optim.step.{name}": () for name in names if f"optim.step.{name}" in shapes}
    found = dict(zip(kept, _read(checkpoint, dict(kept)), strict=True))
    return {name: found.get(f"optim.step.{name}", torch.tensor(float(step_of(checkpoint)))) for name in names}


def _write_facts(place: Path, checkpoint: Path, step: int, count: torch.Tensor) -> None:
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["progress"]
    # Of DeepSpeed's schedules, torch's and transformers': each looks at its own.
    schedule = {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}
    facts: dict[str, Any] = {
        "module": {}, "ds_version": _VERSION, "dp_world_size": 1, "mp_world_size": 1, "global_steps": step,
        "global_samples": state["num_samples"], "skipped_steps": 0, "lr_scheduler": schedule,
        "duoka": {key: state[key] for key in ("step", "epoch", "num_samples", "num_tokens")},
    }  # fmt: skip
    for name in _FACTS:
        torch.save(facts, place / name)
    # A group's learning rate, betas and decay stay as the script sets them: nothing is said of them here. But stages 1
    # and 2 load no more groups than there are here, and leave the others' weights as they were without a word.
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(_MOST_GROUPS)]
    whole = {"state": {0: {"step": count.clone()}}, "param_groups": groups}
    torch.save(
        {"optimizer_state_dict": whole, "param_groups": groups, "ds_version": _VERSION},
        place / "zero" / "optimizer_state.pt",
    )
