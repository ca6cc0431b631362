"""Models and other things on disk for other programs: safetensors and JSON, whole or not at all, never a pickle."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from duoka.errors import ConfigError
from duoka.hub.saving import without_deepspeed
from duoka.model.build import named_part, quiet_loading

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@contextmanager
def files_beside(folder: Path) -> Iterator[Path]:
    """A draft folder whose files take their places in `folder` when all are written; what else is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder, prefix=".draft."))
    try:
        yield draft
        for path in sorted(draft.iterdir()):
            os.chmod(path, 0o644)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_model(model: torch.nn.Module, folder: Path, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """With config and generation settings where the model has them; of adapters the adapters alone."""
    lm = named_part(model)
    with files_beside(folder) as draft:
        if hasattr(lm, "save_pretrained"):
            with quiet_loading(), without_deepspeed():
                lm.save_pretrained(os.fspath(draft), state_dict=state, **taken(lm, options))  # type: ignore[operator]
        else:
            _write_split(state, draft, options.get("max_shard_size"))


def taken(lm: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that the model's save_pretrained knows."""
    known = inspect.signature(lm.save_pretrained).parameters  # type: ignore[arg-type]
    return {name: value for name, value in options.items() if name in known}


def _write_split(state: dict[str, torch.Tensor], draft: Path, max_shard_size: int | str | None) -> None:
    """model.safetensors, or where that would be larger than `max_shard_size`, several files with their index."""
    if max_shard_size is None:
        write_tensors(state, draft / "model.safetensors")
        return
    split = split_torch_state_dict_into_shards(
        state, max_shard_size=max_shard_size, filename_pattern="model{suffix}.safetensors"
    )
    for name, tensors in split.filename_to_tensors.items():
        write_tensors({one: state[one] for one in tensors}, draft / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_tensors(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Shared tensors are written under each of their names: their readers know no sharing."""
    seen: set[int] = set()
    whole = {}
    for name, tensor in state.items():
        tensor = tensor.detach().contiguous()
        whole[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(whole, path)


def write_object(thing: Any, path: Path) -> None:
    """Named tensors as safetensors, plain values as JSON; the name's ending says which."""
    if path.suffix in PICKLED:
        raise ConfigError(
            f"{path.name} is the name of a pickle, and duoka writes none", fix="write .safetensors or .json"
        )
    with files_beside(path.parent) as draft:
        if isinstance(thing, Mapping) and thing and all(isinstance(one, torch.Tensor) for one in thing.values()):
            write_tensors(thing, draft / path.name)
            return
        try:
            text = json.dumps(thing, indent=1, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path.name} cannot be written: {error}",
                fix="give a mapping of names to tensors, or numbers, texts, lists and mappings of them",
            ) from None
        (draft / path.name).write_text(text, encoding="utf-8")
