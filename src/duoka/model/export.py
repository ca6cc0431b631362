"""From base + adapter to one plain transformers folder, checked on real text before anyone sees it.

The result is written to a hidden folder beside its place, read back, compared, and only then renamed: a folder under
the name that was asked for is whole and right, and nothing that was there is ever overwritten.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError, DuokaError, StorageError, typed
from duoka.hub.base import write_base
from duoka.hub.new_model import copy_processor_files
from duoka.hub.saving import without_deepspeed
from duoka.model.build import load_model, quiet_loading
from duoka.model.dtypes import BY_PRECISION, narrow
from duoka.model.experts import find_experts
from duoka.model.lora import save_adapter, untie_adapted_head
from duoka.model.request import ModelRequest
from duoka.model.result import add_stop_token, base_dtype, copy_tokenizer, name_dtype
from duoka.process.no_room import disk_error, more_room
from duoka.runs.folder import apply_umask

# Text of several kinds: what adapters changed shows where the model is sure of itself, not on noise.
PROBES = (
    "The quick brown fox jumps over the lazy dog, and the dog, being lazy, does nothing about it.",
    "多卡训练把一个大批次分给许多张显卡，每一步之后再把梯度加起来。",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Who are you, and who made you? I am",
)
# Largest difference of logits, as a share of the largest logit. fp32: other order of sums. The shorter types: weights
# are rounded once (8 or 11 bits), and the rounding adds up over layers.
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# A router chooses among experts, and rounding turns near ties over: so many positions may be further off there.
TURNED_SHARE = 0.1


@dataclass(frozen=True)
class Exported:
    """What was written, and how its logits compare with those of base + adapter (fp32 arithmetic on both sides)."""

    folder: Path
    dtype: torch.dtype
    size_bytes: int
    max_difference: float
    max_logit: float
    same_top_share: float
    num_positions: int
    off_share: float  # of positions, beyond the bound of the type


@dataclass(frozen=True)
class Sources:
    """Where the parts of an export that are copied come from. `chat_template`: one that isn't the tokenizer's own."""

    base: Path
    tokenizer: Path
    trust_remote_code: bool = False
    chat_template: str | None = None

    def copy_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self.tokenizer, folder, self.chat_template)

    def dtype(self, name: str | None) -> torch.dtype:
        """The type asked for, by default the one that the base came in."""
        return BY_PRECISION[name] if name else base_dtype(self.base)


def check_target(folder: Path) -> None:
    """Refuse a place that already holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not empty; nothing is overwritten", fix="name a new folder with -o, or remove it"
        )
    is_disk = os.path.ismount(folder.resolve())
    if is_disk or (folder.exists() and folder.samefile(Path())):
        what = "a disk of its own" if is_disk else "the folder that you are in"
        raise ConfigError(
            f"{folder} is {what}: what is written gets its name when it is whole, and this place has its name already",
            fix=f"write:   -o {typed(folder / 'model')}",
        )


def export_model(
    lm: torch.nn.Module,
    tokenizer: ChatTokenizer,
    sources: Sources,
    folder: Path,
    dtype: torch.dtype,
    stop_id: int | None = None,
    *,
    shard_gb: int | None = None,
) -> Exported:
    """Merge adapters (if any) of the fp32 model `lm` and write a full model; `lm` is used up.

    `stop_id` is the token that training ended answers with: a generator that loads the folder must know it.
    `shard_gb` is the size of a weight file at most, in GB; by default transformers' own.
    """
    check_target(folder)
    lm.eval()
    probes = [torch.tensor([tokenizer.encode(text)[0]]) for text in PROBES]
    wanted = [_logits(lm, probe) for probe in probes]
    if hasattr(lm, "peft_config"):
        lm = _merge(lm)
    add_stop_token(lm, stop_id)
    with draft_of(folder) as draft:
        most = {} if shard_gb is None else {"max_shard_size": f"{shard_gb}GB"}
        narrow(lm, dtype)
        with without_deepspeed():
            lm.save_pretrained(os.fspath(draft), **most)  # type: ignore[operator]
        name_dtype(draft, dtype)
        sources.copy_tokenizer(draft)
        copy_processor_files(sources.base, draft)
        with quiet_loading():
            written = load_model(
                ModelRequest(draft, dtype=torch.float32, attention="sdpa", trust_remote_code=sources.trust_remote_code)
            )
        got = [_logits(written.eval(), probe) for probe in probes]
        exported = _compare(folder, dtype, wanted, got, _size_bytes(draft))
        _check_difference(exported, has_experts=any(True for _ in find_experts(written)))
    return exported


def _merge(adapted: torch.nn.Module) -> torch.nn.Module:
    if any(getattr(one, "layer_replication", None) for one in adapted.peft_config.values()):  # type: ignore[union-attr, operator]
        raise ConfigError(
            "this adapter has some of the base's layers twice (layer_replication): merged, they would share weights",
            fix="keep base and adapter apart: write   --adapter   to have the adapter alone",
        )
    untie_adapted_head(adapted)
    try:
        return adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator, no-any-return]
    except (ValueError, AttributeError, RuntimeError) as error:
        if type(error) is RuntimeError and "merge" not in str(error):
            raise  # memory that ran out, for one
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"PEFT does not merge this adapter into this base: {reason}",
            fix="keep base and adapter apart: write   --adapter   to have the adapter alone",
        ) from error


def export_adapter(lm: torch.nn.Module, sources: Sources, base_name: str, folder: Path) -> int:
    """Write the adapter alone as a PEFT folder that names its base; returns its size in bytes."""
    check_target(folder)
    with draft_of(folder) as draft:
        save_adapter(lm, draft)
        write_base(sources.base, draft)
        # Named afterwards: PEFT would look for that base, on the Hub too, before it writes.
        facts = draft / "adapter_config.json"
        settings = json.loads(facts.read_text(encoding="utf-8")) | {"base_model_name_or_path": base_name}
        facts.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        sources.copy_tokenizer(draft)
        return _size_bytes(draft)


@torch.no_grad()
def _logits(lm: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    device = next(lm.parameters()).device
    logits: torch.Tensor = lm(input_ids=input_ids.to(device), use_cache=False).logits
    return logits.float().cpu()


def _compare(
    folder: Path, dtype: torch.dtype, wanted: list[torch.Tensor], got: list[torch.Tensor], size_bytes: int
) -> Exported:
    pairs = list(zip(wanted, got, strict=True))
    # NaN compares as smaller than everything: it must not pass for a small difference.
    worst = torch.cat([(a - b).abs().nan_to_num(nan=float("inf")).amax(-1).flatten() for a, b in pairs])
    same = sum((a.argmax(-1) == b.argmax(-1)).sum().item() for a, b in pairs)
    num_positions = sum(a.shape[0] * a.shape[1] for a in wanted)
    largest = max(a.abs().max().item() for a in wanted)
    off = (worst > _bound(dtype, largest)).float().mean().item()
    return Exported(
        folder=folder,
        dtype=dtype,
        size_bytes=size_bytes,
        max_difference=worst.max().item(),
        max_logit=largest,
        same_top_share=same / num_positions,
        num_positions=num_positions,
        off_share=off,
    )


def _bound(dtype: torch.dtype, max_logit: float) -> float:
    return BOUNDS[dtype] * max(1.0, max_logit)


def _check_difference(exported: Exported, *, has_experts: bool) -> None:
    bound = _bound(exported.dtype, exported.max_logit)
    allowed = TURNED_SHARE if has_experts and exported.dtype != torch.float32 else 0.0
    if exported.off_share <= allowed and math.isfinite(exported.max_difference):
        return
    raise DuokaError(
        f"the merged model does not answer as base + adapter do: logits differ by {exported.max_difference:.3g}, "
        f"at most {bound:.3g} is expected of {str(exported.dtype).removeprefix('torch.')}",
        where="nothing was written",
        fix="export with --dtype fp32; if it differs there too, keep base and adapter apart (--adapter)",
    )


@contextlib.contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """A hidden folder that takes the name `folder` when the block ends well, and vanishes when it doesn't."""
    folder = folder.resolve()  # a link stays one
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise StorageError(f"cannot write to {folder.parent}: {error.strerror or error}") from None
    try:
        yield draft
        apply_umask(draft)
        draft.rename(folder)
    except Exception as error:  # a full disk comes in libraries' own errors; others go on upwards
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None:
            raise
        raise StorageError(
            f"cannot write {folder}: {refused.strerror or refused}",
            where="nothing was left there",
            fix=f"{more_room(refused)}, or write elsewhere",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
