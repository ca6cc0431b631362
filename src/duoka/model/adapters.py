"""The weights of trained adapters that a run begins with: one that goes on, others laid into the base before it.

build.py (whole models) and shards.py (models read by slices) ask for values by name; lora.py writes the result. Sums
are made in fp64 and rounded once, so that any cut into rows gives the same bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from duoka.config.adapters import FACTS, WEIGHTS, digest, read_adapter, read_held
from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.box import Box

PREFIX = "base_model.model."


def refuse_unread(folder: Path) -> None:
    """An adapter that peft passes over in silence, unless each call tells it where it begins to count."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8")) if (folder / FACTS).is_file() else {}
    if facts.get("alora_invocation_tokens"):
        raise ConfigError(
            f"the adapter in {folder} counts from certain tokens of a text on (aLoRA), which is not computed here",
            fix="ask it with the tool that made it",
        )


@dataclass(frozen=True)
class PlainAdapter:
    """One adapter's matrices by module of the base, A (rank, in) and B (out, rank); the weight gets scale * B A."""

    name: str
    rank: int
    scale: float
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    digest: str
    held: dict[str, str]  # others that are part of it, by name and digest
    is_transposed: bool = False  # the weights below are (in, out), as GPT-2 keeps them

    @classmethod
    def read(cls, name: str, base: Path) -> PlainAdapter:
        facts = read_adapter(name, base)
        tensors = load_file(facts.folder / WEIGHTS)
        pairs = {}
        for stored, down in tensors.items():
            if stored.endswith(".lora_A.weight"):
                up = tensors[stored.replace(".lora_A.", ".lora_B.")]
                pairs[stored.removeprefix(PREFIX).removesuffix(".lora_A.weight")] = (down.float(), up.float())
        held = read_held(facts.folder)
        return cls(name, facts.rank, facts.scale, pairs, digest(facts.folder), held, facts.is_transposed)


@dataclass(frozen=True)
class Earlier:
    """What was trained before: `goes_on` is trained further, `merged` are parts of the base."""

    goes_on: PlainAdapter | None = None
    merged: tuple[PlainAdapter, ...] = ()

    @classmethod
    def of(cls, lora: LoraConfig | None, base: Path, *, merged_only: bool = False) -> Earlier | None:
        """What a config names, its paths relative to `base`; `merged_only`: what goes on comes from a checkpoint."""
        if lora is None:
            return None
        adapter = None if merged_only else lora.adapter
        goes_on = PlainAdapter.read(adapter, base) if adapter else None
        merged = tuple(PlainAdapter.read(name, base) for name in lora.merge)
        return cls(goes_on, merged) if goes_on or merged else None

    def held(self) -> dict[str, str]:
        """What a result holds that begins here: all of these, and what they hold."""
        parts = [*self.merged, *([self.goes_on] if self.goes_on else [])]
        return {name: value for one in parts for name, value in (one.held | {one.name: one.digest}).items()}

    def begins(self, name: str) -> bool:
        """True for a parameter of an adapter whose values come from the one that goes on."""
        return self.goes_on is not None and (".lora_A." in name or ".lora_B." in name)

    def values(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Where a parameter such as `base_model.model...q_proj.lora_A.default.weight` begins."""
        assert self.goes_on is not None
        module, _, rest = name.rpartition(".lora_")
        pair = self.goes_on.pairs.get(module.removeprefix(PREFIX))
        if pair is None or pair["AB".index(rest[0])].shape != shape:
            found = "nothing" if pair is None else f"a matrix of {tuple(pair['AB'.index(rest[0])].shape)}"
            raise ConfigError(
                f"the adapter in {self.goes_on.name} does not fit the model: it has {found} for {module}, and "
                f"{tuple(shape)} is needed",
                fix="name the model that it was trained on",
            )
        return pair["AB".index(rest[0])].clone()

    def changes(self, module: str) -> bool:
        return any(module in one.pairs for one in self.merged)

    def merge_part(self, module: str, values: torch.Tensor, box: Box) -> torch.Tensor:
        """The part of a module's weight that lies in `box`, with all merged adapters on it, in its own type."""
        if not self.changes(module):
            return values
        total = values.double()
        for one in self.merged:
            if module in one.pairs:
                down, up = one.pairs[module]
                if one.is_transposed:
                    down, up = up.mT, down.mT
                part = up[box.rows].double() @ down[:, box.columns].double()
                total = total + part.mul_(one.scale).to(total.device)
        return total.to(values.dtype)

    def merge_into(self, model: torch.nn.Module) -> None:
        """Lay the merged adapters into a whole model, one after the other."""
        weights = dict(model.named_parameters(remove_duplicate=False))
        for module in sorted({module for one in self.merged for module in one.pairs}):
            weight = weights.get(f"{module}.weight")
            if weight is None:
                raise ConfigError(
                    f"lora.merge names an adapter on {module}, which the model does not have",
                    fix="name the model that it was trained on",
                )
            if hasattr(weight, "quant_state"):
                raise ConfigError(
                    f"the base is packed, and nothing can be laid into packed weights: {self.merged[0].name}",
                    fix="merge all of them first (duoka export FILE), and name the result",
                )
            with torch.no_grad():
                weight.copy_(self.merge_part(module, weight, Box.whole(weight.shape)))

    def beside(self, state: dict[str, torch.Tensor], scale: float) -> tuple[dict[str, torch.Tensor], int]:
        """An adapter's tensors with the merged ones' beside them, for the base as it came; and the rank of it all.

        `scale` is the new adapter's alpha / rank, which counts for every column of the result.
        """
        ranks = {m: v.shape[0] for n, v in state.items() if ".lora_A." in n for m in [n.partition(".lora_A.")[0]]}
        own = next(iter(ranks.values()))
        modules = sorted({*ranks, *(PREFIX + module for one in self.merged for module in one.pairs)})
        plain = {name: value for name, value in state.items() if ".lora_" not in name}
        for module in modules:
            down_name, up_name = (f"{module}.lora_{which}.default.weight" for which in "AB")
            downs, ups = [], []
            size = self._size_of(module.removeprefix(PREFIX), state.get(down_name), state.get(up_name))
            downs.append(state.get(down_name, torch.zeros(own, size[0])).cpu())
            ups.append(state.get(up_name, torch.zeros(size[1], own)).cpu())
            for one in self.merged:
                nothing = (torch.zeros(one.rank, size[0]), torch.zeros(size[1], one.rank))
                down, up = one.pairs.get(module.removeprefix(PREFIX), nothing)
                downs.append(down)
                ups.append(up * (one.scale / scale))
            plain[down_name], plain[up_name] = torch.cat(downs), torch.cat(ups, dim=1)
        return plain, own + sum(one.rank for one in self.merged)

    def _size_of(self, module: str, down: torch.Tensor | None, up: torch.Tensor | None) -> tuple[int, int]:
        """(in, out) of a module that the new adapter or a merged one lies beside."""
        if down is None or up is None:
            down, up = next(one.pairs[module] for one in self.merged if module in one.pairs)
        return down.shape[1], up.shape[0]
