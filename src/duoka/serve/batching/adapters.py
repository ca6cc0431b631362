"""Several LoRA adapters on one base, each row of a pass with its own: added to what the base's products answer.

An adapter is computed for all rows of a pass in which some row asks for it, and counts for none that does not: a row's
numbers are the same whoever its neighbors are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from duoka.config.adapters import TAKES_FROM_BASE, WEIGHTS
from duoka.errors import ConfigError, typed
from duoka.model.adapters import refuse_unread

_PREFIX = "base_model.model."
_PRODUCTS = (".lora_A.weight", ".lora_B.weight")
# What of adapter_config.json makes an adapter more than products beside linear layers.
_MORE = {
    "use_dora": "it has DoRA's magnitudes",
    "modules_to_save": "it holds whole layers",
    "target_parameters": "it adapts single tensors (experts of a mixture, routers), which are no linear layers",
    "alora_invocation_tokens": "it counts from certain tokens of a text on (aLoRA)",
    "use_qalora": "it sums its inputs in groups (QA-LoRA)",
    "layer_replication": "it has a model with layers of its own",
    "use_bdlora": "its matrices are blocks (BD-LoRA)",
    "arrow_config": "it chooses among adapters for each token (Arrow)",
    "kasa_config": "it changes the weights below it (KaSA)",
}


@dataclass(frozen=True)
class _Low:
    """Of one matrix: what is added is scale · B·A·x."""

    down: torch.Tensor  # A: (rank, in)
    up: torch.Tensor  # B: (out, rank)
    scale: float


Matrices = dict[str, _Low]  # of an adapter, by module


class RowAdapters:
    """The adapters of one model, by name."""

    def __init__(self, lm: torch.nn.Module) -> None:
        self._modules = dict(lm.named_modules())
        parameter = next(lm.parameters())
        self._device = parameter.device
        self._dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        self._of: dict[str, Matrices] = {}  # by adapter
        self._hooked: dict[str, Any] = {}
        self._rows: tuple[str | None, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._of)

    def add(self, name: str, folder: Path) -> None:
        """Read an adapter as peft wrote it; refuses what is more than added products."""
        self.install(name, self.read(folder))

    def read(self, folder: Path) -> Matrices:
        """By whatever thread: what its files hold may be anything."""
        return _read(folder, self._modules, self._device, self._dtype)

    def install(self, name: str, found: Matrices) -> None:
        """Between two passes."""
        self._of[name] = found
        for module in found:
            if module not in self._hooked:
                self._hooked[module] = self._modules[module].register_forward_hook(self._hook_of(module))

    def remove(self, name: str) -> None:
        del self._of[name]
        needed = {module for one in self._of.values() for module in one}
        for module in [module for module in self._hooked if module not in needed]:
            self._hooked.pop(module).remove()

    def set_rows(self, rows: Sequence[str | None]) -> None:
        """Whose adapter each row of the next pass has; None: the base alone."""
        self._rows = tuple(rows)

    def _hook_of(self, module: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for name in sorted({row for row in self._rows if row is not None}):
                low = self._of[name].get(module)
                if low is None:
                    continue
                part = (inputs[0].to(low.down.dtype) @ low.down.T @ low.up.T).to(output.dtype) * low.scale
                if any(row != name for row in self._rows):
                    share = [float(row == name) for row in self._rows]
                    part = part * part.new_tensor(share).view(-1, *[1] * (part.ndim - 1))
                output = output + part
            return output

        return add


def why_not_by_rows(folder: Path) -> str:
    """Why an adapter cannot be laid over single rows of a pass; "": it can."""
    facts = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if str(facts.get("peft_type", "LORA")).upper() != "LORA":
        return f"it is {facts.get('peft_type')}, not LoRA"
    for key, words in _MORE.items():
        if facts.get(key):
            return words
    if facts.get("bias", "none") != "none":
        return "it trains biases"
    start = str(facts.get("init_lora_weights", "")).lower()
    if start.startswith(TAKES_FROM_BASE):
        return f"it was begun by {start}, which changes the weights below it"
    return _what_is_no_product(folder / WEIGHTS)


def _what_is_no_product(file: Path) -> str:
    """Of embeddings, of single tokens, of biases: PEFT writes them beside the products, whatever the settings say."""
    if not file.is_file():
        return f"there is no {file.name} in it"
    with safe_open(file, framework="pt") as opened:
        others = [name for name in opened.keys() if not name.endswith(_PRODUCTS)]  # noqa: SIM118  (a handle)
    return f"it holds {others[0].removeprefix(_PREFIX)}, which is no product beside a linear layer" if others else ""


def _read(folder: Path, modules: dict[str, torch.nn.Module], device: torch.device, dtype: torch.dtype) -> Matrices:
    refuse_unread(folder)
    if reason := why_not_by_rows(folder):
        raise ConfigError(
            f"the adapter in {folder} cannot be served beside others: {reason}",
            fix=f"serve it alone: duoka serve {typed(folder)}",
        )
    facts = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / WEIGHTS)
    found: Matrices = {}
    for key, down in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removesuffix(".lora_A.weight").removeprefix(_PREFIX)
        up = tensors[f"{_PREFIX}{module}.lora_B.weight"]
        sizes = _sizes_of(modules.get(module))
        if sizes != (down.shape[1], up.shape[0]):
            here = f"its {module} is {sizes[0]} x {sizes[1]}" if sizes else f"it has no linear layer {module}"
            raise ConfigError(
                f"the adapter in {folder} is of another model than the one here: {here}, and the adapter's is "
                f"{down.shape[1]} x {up.shape[0]}",
                fix="serve it beside the model that it was trained on",
            )
        alpha = _of_pattern(facts.get("alpha_pattern"), module, facts.get("lora_alpha", 8))
        rank = down.shape[0]
        scale = alpha / (math.sqrt(rank) if facts.get("use_rslora") else rank)
        found[module] = _Low(down.to(device, dtype), up.to(device, dtype), float(scale))
    return found


def _sizes_of(module: torch.nn.Module | None) -> tuple[int, int] | None:
    """(in, out) of a linear layer, packed or not, or of GPT-2's kind, whose weights lie; None: it is another module."""
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    sizes = getattr(module, "nx", None), getattr(module, "nf", None)
    return None if None in sizes else sizes  # type: ignore[return-value]


def _of_pattern(pattern: dict[str, float] | None, module: str, usual: float) -> float:
    """As peft reads it: each name is a regular expression, of the whole path or of its end from a dot on; the first
    that fits counts."""
    return next((value for name, value in (pattern or {}).items() if re.match(rf"(.*\.)?({name})$", module)), usual)
