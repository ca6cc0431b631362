"""Trained adapters that a config begins with: where they lie, and what their adapter_config.json says.

load.py asks for the keys that such an adapter fixes; model/adapters.py reads its weights. Nothing here knows torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.config.paths import given_path, is_folder
from duoka.config.schema import LoraConfig, RunConfig
from duoka.config.yaml_text import yaml_text
from duoka.errors import ConfigError, Fault, typed

FACTS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HOLDS = "merged.json"  # in an adapter's folder: which others are part of it, by name and digest
# Inits that take a part out of the weights below: peft does so again wherever it reads such an adapter.
TAKES_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_WRITE = f"write the folder of a trained adapter ({FACTS} and {WEIGHTS}), or of a finished LoRA run"
# Keys of adapter_config.json that make an adapter more than B(A(x)) beside chosen layers: what asks for nothing of it.
_ODD: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (False,), "a DoRA adapter (it also learns the length of each column), which duoka does not train"),
    ("bias", ("none",), "trained with biases"),
    ("modules_to_save", ([],), "trained with whole modules beside it (modules_to_save)"),
    ("rank_pattern", ({},), "of different ranks in different layers (rank_pattern)"),
    ("alpha_pattern", ({},), "of different alphas in different layers (alpha_pattern)"),
    ("layers_to_transform", ([],), "on some layers only (layers_to_transform)"),
    ("target_parameters", ([],), "on bare parameters (target_parameters)"),
    ("trainable_token_indices", ({},), "trained with tokens of the embedding (trainable_token_indices)"),
    ("lora_bias", (False,), "trained with biases of its own (lora_bias)"),
    ("alora_invocation_tokens", ([],), "that counts from certain tokens of a text on (alora_invocation_tokens)"),
    ("use_qalora", (False,), "that sums its inputs in groups (use_qalora)"),
    ("use_bdlora", (False, {}), "of blocks (use_bdlora)"),
    ("layer_replication", ([],), "of a model with some layers twice (layer_replication)"),
    ("kasa_config", ({},), "that changes the weights below it (kasa_config)"),
    ("arrow_config", ({},), "that chooses among others for each token (arrow_config)"),
)
_MERGED = "merge it into its base with the tool that made it, and name the result as the model"


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter is, as PEFT's file says; `alpha` counts as alpha / rank, whatever the file's own way is."""

    folder: Path
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    base_name: str
    is_transposed: bool  # beside layers that keep their weight the other way round

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def find_adapter(name: str, base: Path, key: str = "lora.adapter") -> Path:
    """The PEFT folder that a name means, from here or from the YAML's folder; of a run, its result."""
    given = given_path(name)
    places = [place for place in (given, base / given) if is_folder(place)]
    for folder in (inside for place in places for inside in (place, place / "final")):
        if (folder / FACTS).is_file():
            return folder.resolve()
    if not places:
        raise ConfigError(f"{key} is {name!r}, and there is no such folder", fix=_WRITE)
    if (places[0] / "final/config.json").is_file() or (places[0] / "config.json").is_file():
        what = "which holds a whole model, not an adapter"
        raise ConfigError(f"{key} is {name!r}, {what}", fix="name it as the model:   model: FOLDER")
    if (places[0] / "checkpoints").is_dir():
        raise ConfigError(
            f"{key} is {name!r}, a run that has not ended: its adapter is not written yet",
            fix=f"let it end, or write what it has:   duoka export {typed(name)} --adapter -o DIR",
        )
    raise ConfigError(f"{key} is {name!r}, which holds no adapter ({FACTS})", fix=_WRITE)


def read_adapter(name: str, base: Path, key: str = "lora.adapter") -> AdapterFacts:
    """What the adapter of that name is; refuses kinds that are no plain low-rank product beside frozen layers."""
    folder = find_adapter(name, base, key)

    def refuse(what: str, fix: str) -> ConfigError:
        return ConfigError(f"{key} is {name!r}, {what}", fix=fix)

    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        kind = str(facts.get("peft_type", "LORA")).upper()
        rank, alpha = int(facts.get("r", 8)), float(facts.get("lora_alpha", 8))
        dropout = float(facts.get("lora_dropout", 0.0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise refuse(f"whose {FACTS} cannot be read ({error})", "copy the adapter again") from None
    if facts.get("task_type") == "SEQ_CLS":
        raise refuse("the adapter of a reward model: it was trained to give scores, not words", "name another adapter")
    if kind != "LORA":
        raise refuse(f"an adapter of kind {kind}, and duoka trains LoRA", _MERGED)
    for name, off, reason in _ODD:
        if facts.get(name) is not None and facts[name] not in off:
            raise refuse(reason, _MERGED)
    start = facts.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(TAKES_FROM_BASE):
        what = f"begun by {start} and never turned into a plain one: it belongs to a base that gave parts of itself up"
        raise refuse(what, "save it again with PEFT's path_initial_model_for_weight_conversion (pissa_convert)")
    targets = facts.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise refuse(f"which chooses its modules by {targets!r}, not by a list of names", _MERGED)
    if rank < 1 or alpha <= 0:
        raise refuse(f"whose {FACTS} says rank {rank} and alpha {alpha:g}", "copy the adapter again")
    if not (folder / WEIGHTS).is_file():
        old = (
            " (adapter_model.bin is a pickle, which duoka never opens)"
            if (folder / "adapter_model.bin").is_file()
            else ""
        )
        raise refuse(f"which has no {WEIGHTS}{old}", "save it again with safetensors, or copy it again")
    scaled = alpha * rank**0.5 if facts.get("use_rslora") else alpha
    return AdapterFacts(
        folder, rank, scaled, dropout, tuple(sorted(map(str, targets))),
        str(facts.get("base_model_name_or_path") or ""), bool(facts.get("fan_in_fan_out")),
    )  # fmt: skip


def named_adapters(lora: LoraConfig | None) -> list[tuple[str, str]]:
    """(key, name) of every trained adapter that the config names."""
    if lora is None:
        return []
    own = [("lora.adapter", lora.adapter)] if lora.adapter else []
    return [*((f"lora.merge[{place}]", name) for place, name in enumerate(lora.merge)), *own]


def digest(folder: Path) -> str:
    """What tells one adapter's weights from another's, wherever they lie."""
    return hashlib.blake2b((folder / WEIGHTS).read_bytes(), digest_size=8).hexdigest()


def read_held(folder: Path) -> dict[str, str]:
    """Other adapters that are part of the one in `folder`: their names and digests."""
    return dict(json.loads((folder / HOLDS).read_text(encoding="utf-8"))) if (folder / HOLDS).is_file() else {}


def check_counted_once(named: list[tuple[str, str]], base: Path) -> list[Fault]:
    """Faults of adapters that are named twice, or are part of another one: what began above them was written with them.

    One that is spelled twice alike under lora is a rule's matter.
    """
    folders = [(key, name, find_adapter(name, base, key)) for key, name in named]
    faults = []
    for key, name, place in folders if len(folders) > 1 else ():
        first, own = next(one for _, one, folder in folders if folder == place), digest(place)
        if first != name:
            what = f"{key} names {name!r}, which is the adapter in {first!r} again: it would count twice"
            faults.append(Fault(what, key=key, fix="name it once"))
        for _, holder, folder in folders:
            if own in read_held(folder).values() and folder != place:
                what = f"{key} names {name!r}, and {holder!r} was trained above it and holds it: it would count twice"
                faults.append(Fault(what, key=key, fix=f"name {holder} alone"))
    return faults


def check_adapters(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of the adapters' places and kinds."""
    faults = []
    for key, name in named_adapters(config.lora):
        try:
            read_adapter(name, base, key)
        except ConfigError as error:
            faults.append(Fault(error.what, key=key, fix=error.fix or ""))
    return faults or check_counted_once(named_adapters(config.lora), base)


def take_over(config: RunConfig, base: Path, written: Container[str]) -> tuple[RunConfig, dict[str, str], list[str]]:
    """The config with what its adapter fixes, the origins of these keys, and a note where something else was written.

    Rank and targets are the shape of its matrices, alpha is what they were learned with: the adapter's own win. Its
    dropout is how it was trained, so another may be written. An adapter that is not there is a matter of the checks.
    """
    lora = config.lora
    if lora is None or not lora.adapter:
        return config, {}, []
    try:
        facts = read_adapter(lora.adapter, base)
    except ConfigError:
        return config, {}, []
    own: dict[str, Any] = {"rank": facts.rank, "alpha": facts.alpha, "targets": facts.targets}
    if "lora.dropout" not in written:
        own["dropout"] = facts.dropout
    other = []
    for name, value in own.items():
        before = getattr(lora, name)
        same = set(before) == set(value) if isinstance(before, tuple) else before == value
        if f"lora.{name}" in written and not same:
            other.append(f"lora.{name} {yaml_text(before)} (the adapter's: {yaml_text(value)})")
    notes = [
        f"{', '.join(other)}: the adapter in {lora.adapter} goes on with its own, which are the shape of its matrices "
        f"and the scale that they were learned with; for a new adapter above it write   merge: [{lora.adapter}]"
    ]
    origins = {f"lora.{name}": "from lora.adapter" for name, value in own.items() if getattr(lora, name) != value}
    return config.model_copy(update={"lora": lora.model_copy(update=own)}), origins, notes if other else []
