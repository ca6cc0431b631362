"""DeepSpeed's own checkpoints, read without DeepSpeed: the fp32 weights of its ranks, put together by name.

They are pickles. torch reads them with `weights_only`, which makes tensors, numbers and containers and nothing else;
the four types of DeepSpeed's that stand in them become empty ones of ours. Anything else is refused, unread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duoka.errors import ConfigError, StorageError


class _Opaque:
    """What is not looked at."""


class _Number(int):
    """An enumeration of DeepSpeed's."""


def _member(kind: object, name: str) -> _Opaque:
    """How Python before 3.11.4 writes a member of one: as getattr, which this is for nothing else."""
    if kind is not _Number:
        raise torch.serialization.pickle.UnpicklingError(f"GLOBAL getattr of {kind} and {name}")
    return _Opaque()


_OTHER_STEP = "some of its files are of another step, or were cut short: bring them again, or name another step"
_STAND_INS = [
    (_Opaque, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Opaque, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Opaque, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
]


@dataclass(frozen=True)
class Found:
    """Weights by name, as wide as they were trained, and where they are from."""

    weights: dict[str, torch.Tensor]
    kind: str
    step: int


def read_deepspeed(folder: Path) -> Found:
    """The weights of a checkpoint: a step's folder, or the one that holds `latest`."""
    place = _find(folder)
    models = sorted(place.glob("*model_states.pt"), key=_rank_of)
    if not models:
        raise ConfigError(
            f"{folder} is no checkpoint of DeepSpeed or FSDP: it has no *_model_states.pt, and no .metadata of shards",
            fix="name the folder that DeepSpeed's save_checkpoint wrote, or a step in it; one with config.json and "
            "*.safetensors is a model already:   model: FOLDER",
        )
    if any("mp_rank_00" not in model.name for model in models):
        raise ConfigError(
            f"{place} is cut by a tensor or pipeline axis (mp_rank), which is not read here",
            fix="make it universal first: ds_to_universal --inject_missing_state, and name that folder",
        )
    try:
        return _read(place, models)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise StorageError(
            f"{place} is written otherwise than the versions of DeepSpeed that are known here: {error!r}",
            fix="convert it with DeepSpeed's own zero_to_fp32.py --safe_serialization, and name that folder as model",
        ) from None


def _read(place: Path, models: list[Path]) -> Found:
    first, parts = _load(models[0]), sorted(place.glob("*_optim_states.pt"), key=_rank_of)
    step = int(first.get("global_steps", 0))
    if (place / "zero").is_dir():
        return Found(_with_others(_universal(place / "zero", first), first), "universal", step)
    if not parts:
        return Found(*_of_stage0(first), step)
    states = [_load(part)["optimizer_state_dict"] for part in parts]
    _check_ranks(place, states, int(first.get("dp_world_size", len(states))))
    stage = 3 if "fp32_flat_groups" in states[0] else 2
    weights = _of_stage3(place, first, states, models) if stage == 3 else _of_stage2(place, first, states)
    return Found(_with_others(weights, first), "stage 3" if stage == 3 else "stage 1 or 2", step)


def _with_others(weights: dict[str, torch.Tensor], first: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Buffers too, and shared weights under each of their names: the narrow copy of one may be there beside it."""
    weights |= {name: first["module"][name] for name in first.get("buffer_names") or ()}
    return weights | {
        alias: weights[name] for alias, name in dict(first.get("shared_params") or {}).items() if name in weights
    }


def _find(folder: Path) -> Path:
    latest = next((folder / name for name in ("latest", "latest_universal") if (folder / name).is_file()), None)
    if latest is None:
        return folder
    name = latest.read_text(encoding="utf-8").strip()
    if Path(name).name != name or not (folder / name).is_dir():
        raise ConfigError(
            f"{latest} names {name!r}, and there is no such folder beside it", fix="name the step's folder"
        )
    return folder / name


def _rank_of(path: Path) -> int:
    found = re.search(r"pp_rank_(\d+)", path.name)
    return int(found.group(1)) if found else 0


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except torch.serialization.pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({asked.group(1)})" if asked else ""
        raise ConfigError(
            f"{path} holds more than tensors{what}: it is a pickle that could run code, and is not read",
            fix="where you trust it, convert it with DeepSpeed's own zero_to_fp32.py --safe_serialization",
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StorageError(f"{path} cannot be read: {reason}", fix="name another step") from None


def _check_ranks(place: Path, states: list[Any], num_ranks: int) -> None:
    if len(states) != num_ranks:
        raise StorageError(
            f"{place} has optimizer states of {len(states)} ranks, and was written by {num_ranks}",
            fix="bring the other machines' files into this folder",
        )


def _of_stage0(first: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    """The module's weights; of one that learned in 16 bits the fp32 ones, which lie beside it without names."""
    narrow = {name: value for name, value in first["module"].items() if value is not None}
    held = first.get("optimizer") or {}
    apart = [torch.cat([one.flatten() for one in group]) for group in held.get("fp32_groups", ())]
    lines = held.get("fp32_groups_flat") or apart
    if not lines:
        return narrow, "stage 0"
    wide = _name_by_value([line.detach() for line in lines], narrow)
    if wide is None:
        return narrow, "stage 0, the 16-bit weights: whose the fp32 ones beside them are cannot be told"
    return narrow | wide, "stage 0, its fp32 weights"


def _name_by_value(lines: list[torch.Tensor], narrow: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The weights in `lines`, groups of parameters end to end in the module's order: each rounds to the module's own.

    None where that does not use up the lines.
    """
    places, wide, by_memory = [0] * len(lines), dict[str, torch.Tensor](), dict[tuple[int, torch.Size], torch.Tensor]()
    for name, value in narrow.items():
        memory = value.data_ptr(), value.shape
        if memory in by_memory:  # a tied weight under its second name
            wide[name] = by_memory[memory]
            continue
        for group, line in enumerate(lines):
            part = line[places[group] : places[group] + value.numel()]
            if len(part) == value.numel() and torch.equal(part.to(value.dtype), value.flatten()):
                wide[name] = by_memory[memory] = part.view(value.shape)
                places[group] += value.numel()
                break
    return wide if places == [len(line) for line in lines] else None


def _of_stage2(place: Path, first: Mapping[str, Any], states: list[Any]) -> dict[str, torch.Tensor]:
    """Stages 1 and 2: a group's parameters end to end, cut over ranks."""
    weights = dict(first.get("frozen_param_fragments") or {})
    for group, shapes in enumerate(first["param_shapes"]):
        line = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states])
        paddings = states[0].get("param_alignment_paddings")
        gaps = list(paddings[group]) if paddings else [0] * len(shapes)
        at = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            length = math.prod(shape)
            if at + length > len(line):
                raise StorageError(f"{place} ends before {name} does", fix=_OTHER_STEP)
            weights[name] = line[at : at + length].view(torch.Size(shape))
            at += length + gap
        even = 2 * len(states)  # what a line's end is filled up to
        if -(-at // even) != -(-len(line) // even):
            raise StorageError(f"{place}: parameters have {at:,} numbers, and its files {len(line):,}", fix=_OTHER_STEP)
    return weights


def _of_stage3(place: Path, first: Mapping[str, Any], states: list[Any], models: list[Path]) -> dict[str, torch.Tensor]:
    """Stage 3: each parameter in equal parts, those of a rank end to end."""
    lines = [torch.cat(list(state["fp32_flat_groups"])) for state in states]
    weights: dict[str, torch.Tensor] = {}
    at = 0
    for shapes in first["param_shapes"]:
        for name, shape in shapes.items():
            length = math.prod(shape)
            each = -(-length // len(lines))
            whole = torch.cat([line[at : at + each] for line in lines])[:length]
            if len(whole) < length:
                raise StorageError(f"{place} ends before {name} does", fix=_OTHER_STEP)
            weights[name] = whole.view(torch.Size(shape))
            at += each
    if any(len(line) != at for line in lines):
        lengths = ", ".join(f"{len(line):,}" for line in lines)
        raise StorageError(f"{place}: each rank's part has {at:,} numbers, and its files {lengths}", fix=_OTHER_STEP)
    frozen = dict(first.get("frozen_param_shapes") or {})
    if frozen and len(models) != len(states):
        raise StorageError(
            f"{place} has model states of {len(models)} ranks, and was written by {len(states)}",
            fix="bring the other machines' files into this folder",
        )
    if frozen:
        parts = [_load(model)["frozen_param_fragments"] for model in models]
        for name, shape in frozen.items():
            whole = torch.cat([part[name].flatten() for part in parts])
            weights[name] = whole[: math.prod(shape)].view(torch.Size(shape))
    return weights


def _universal(folder: Path, first: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A folder per parameter, each with its weight; of stage 3 flat, and maybe padded."""
    shapes = {name: torch.Size(shape) for group in first.get("param_shapes") or () for name, shape in group.items()}
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*/fp32.pt")):
        held, name = _load(file), file.parent.name
        value = (held["param"] if isinstance(held, dict) else held).detach()
        weights[name] = value.flatten()[: shapes[name].numel()].view(shapes[name]) if name in shapes else value
    if not weights:
        raise ConfigError(f"{folder} has no fp32.pt of any parameter", fix="convert with --inject_missing_state")
    return weights


def named_as(weights: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under a model's names, however DeepSpeed's script had wrapped it. Raises ConfigError."""
    if adapted := [name for name in weights if ".lora_A." in name or ".lora_embedding_A" in name]:
        raise ConfigError(
            "these weights are of a model with adapters beside it, which are not merged here",
            where=f"{adapted[0]} and {len(adapted) - 1:,} more",
            fix="name what PEFT wrote beside it (adapter_model.safetensors):   duoka export FOLDER -o DIR",
        )
    for start in ("", *_beginnings(weights)):
        named = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
        if named.keys() & wanted.keys():
            break
    # Of tied weights one name is enough.
    twins = {id(value): named[name] for name, value in wanted.items() if name in named}
    named |= {name: twins[id(value)] for name, value in wanted.items() if id(value) in twins}
    ours = {name: named[name] for name in wanted if name in named}
    wrong = [f"{name}: not there" for name in wanted if name not in named]
    wrong += [
        f"{name}: {tuple(value.shape)} there, {tuple(wanted[name].shape)} in the model"
        for name, value in ours.items()
        if value.shape != wanted[name].shape
    ]
    wrong += [f"{name}: not in the model" for name in named if name not in wanted]
    if wrong:
        more = [f"and {len(wrong) - 3:,} more"] if len(wrong) > 3 else []
        raise ConfigError(
            "these weights are not those of the model", where="\n".join([*wrong[:3], *more]),
            fix="name the model that was trained:   --model FOLDER",
        )  # fmt: skip
    return ours


def _beginnings(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """module., model.module. and the like, of the first name."""
    words = next(iter(weights), "").split(".")
    for count in range(1, len(words)):
        yield ".".join(words[:count]) + "."
