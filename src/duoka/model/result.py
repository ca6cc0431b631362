"""What training leaves behind: a PEFT folder for adapters, a transformers folder for full models; with tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from duoka.hub.base import write_base
from duoka.hub.new_model import MORE_TEMPLATES, copy_processor_files, copy_tokenizer_files
from duoka.hub.saving import without_deepspeed
from duoka.model.dtypes import stays_wide
from duoka.model.lora import save_adapter
from duoka.runs.folder import apply_umask, read_json, remove_folder

_READ_AS = "_original_object_hash"  # transformers' name of it


def write_result(
    lm: torch.nn.Module,
    base_folder: Path,
    final: Path,
    state: dict[str, torch.Tensor] | None = None,
    *,
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    beside: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the trained model to `final` in one step; an older result of the same run is replaced.

    `state` holds its whole tensors when the model has only this rank's shards of them; `tokenizer_folder` is not the
    base's when training used another, `chat_template` is given when it isn't the tokenizer's own; `beside` are further
    files; `dtype` is that of full weights, by default the base's own.
    """
    draft = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
    try:
        if hasattr(lm, "peft_config"):
            save_adapter(lm, draft, state)
            write_base(base_folder, draft)
        else:
            _write_full(lm, lm.state_dict() if state is None else state, dtype or base_dtype(base_folder), draft)
            copy_processor_files(base_folder, draft)
        copy_tokenizer(tokenizer_folder or base_folder, draft, chat_template)
        write_beside(beside or {}, draft)
        put_in_place(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_beside(files: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> None:
    """Tensors that are no part of the model, as it is read by others."""
    from safetensors.torch import save_file

    for name, tensors in files.items():
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})


def put_in_place(draft: Path, final: Path) -> None:
    """Give a whole draft its name in one step; what had it before is removed after that."""
    apply_umask(draft)
    if os.path.lexists(final):  # also a link to a disk that is not mounted
        old = final.with_name(f".{final.name}.old")
        remove_folder(old)
        final.rename(old)
        draft.rename(final)
        remove_folder(old)
    else:
        draft.rename(final)


def _write_full(lm: torch.nn.Module, whole: dict[str, torch.Tensor], dtype: torch.dtype, draft: Path) -> None:
    """By default in the base's own type: masters are fp32 in training, people expect the size they came with."""
    # Shared tensors stay shared in a plain dict, so that transformers finds tied heads and writes them once.
    cast: dict[int, torch.Tensor] = {}
    state, is_wide = {}, stays_wide(lm, dtype)
    for name, tensor in whole.items():
        kind = torch.float32 if is_wide(name) else dtype
        state[name] = cast.setdefault(tensor.data_ptr(), tensor.to(kind) if tensor.is_floating_point() else tensor)
    with without_deepspeed():
        lm.save_pretrained(os.fspath(draft), state_dict=state)  # type: ignore[operator]
    name_dtype(draft, dtype)


def name_dtype(folder: Path, dtype: torch.dtype) -> None:
    """transformers names the type that the model trained in; the files have another."""
    config = folder / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    facts["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def add_stop_token(lm: torch.nn.Module, stop_id: int | None) -> None:
    """What training ended answers with, beside what ended the base's: whoever loads the folder must know it."""
    settings = getattr(lm, "generation_config", None)
    if settings is None:
        return
    _drop_contradictions(settings)
    if stop_id is None:
        return
    named = settings.eos_token_id
    known = list(named) if isinstance(named, (list, tuple)) else [] if named is None else [named]
    if stop_id in known:
        return
    before = hash(settings)
    settings.eos_token_id = [*known, stop_id] if known else stop_id
    # transformers writes a published file's contradictions (a temperature without sampling) back as they were read, and
    # refuses them in one that was changed: by its mark this one counts as read, since nothing else did change.
    if getattr(settings, _READ_AS, None) == before:
        setattr(settings, _READ_AS, hash(settings))


def _drop_contradictions(settings: Any) -> None:
    """What is said beside greedy answers, and ignored, where transformers writes no such file, not even as it came: it
    would stop the result. Up to 5.17 at least."""
    if _READ_AS in type(settings).save_pretrained.__code__.co_consts:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        if not settings.do_sample:
            for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
                setattr(settings, name, None)
        if (settings.pad_token_id or 0) < 0:
            settings.pad_token_id = None


def base_dtype(folder: Path) -> torch.dtype:
    """The type that a model folder says its weights have; fp32 when it doesn't say."""
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = facts.get("dtype") or facts.get("torch_dtype") or "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def copy_tokenizer(source: Path, target: Path, chat_template: str | None = None) -> None:
    """A model without its tokenizer and chat template is half a model; a server must format prompts as training did."""
    copy_tokenizer_files(source, target)
    if chat_template is not None:
        _forget_templates(target)
        (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _forget_templates(folder: Path) -> None:
    """The tokenizer's own, one for tools above all, would be read beside another that training used for everything."""
    shutil.rmtree(folder / MORE_TEMPLATES.split("/")[0], ignore_errors=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    settings = read_json(file) or {}
    if settings.pop("chat_template", None) is not None:
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
