"""LLaMA-Factory's values about adapters and the packed base below them: new ones, and trained ones that go on.

The rows of llamafactory.py call these as `lora.NAME`; what a conversion may answer stands in rows.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from duoka.config.dialects.llamafactory_stages import compares
from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Refusal,
    asks_for_nothing,
    comma_list,
    is_none,
    number,
    whole,
    words,
)
from duoka.config.paths import is_folder


def is_lora(asked: Asked) -> bool:
    """Whether adapters are trained: LLaMA-Factory's default; in the nested form only when something says so."""
    kind = asked.get("finetuning_type")
    if kind is not None:
        return str(kind).lower() == "lora"
    if asked.flavour == "nested":
        return any(name.startswith("lora_") or name == "adapter_name_or_path" for name in asked.values)
    return True


def of_lora(convert: Any = None) -> Any:
    def run(value: Any, asked: Asked) -> Any:
        if not is_lora(asked):
            return Answer(note=f"of no use here: finetuning_type is {asked.get('finetuning_type', 'full')}")
        if is_none(value):
            return Answer()
        return convert(value, asked) if convert else value

    return run


def _adapters(asked: Asked) -> list[str]:
    """The trained adapters that a file names; the bare word lora of guides means a new one."""
    try:
        names = comma_list(asked.get("adapter_name_or_path", []), "adapter_name_or_path")
    except Refusal:  # which its own row says
        return []
    is_word = names == ["lora"] and not any(is_folder(place) for place in (Path("lora"), asked.folder / "lora"))
    return [] if is_word else names


def goes_on(asked: Asked) -> bool:
    """Whether a trained adapter is trained further, as theirs unless a new one is asked for."""
    return bool(_adapters(asked)) and not asked.is_on("create_new_adapter")


def earlier(value: Any, asked: Asked) -> Any:
    if is_none(value):
        return Answer()
    comma_list(value, "adapter_name_or_path")
    if not is_lora(asked):
        raise Refusal(
            f"adapter_name_or_path {value} is an adapter, and finetuning_type {asked.get('finetuning_type')} has none",
            "merge it first (duoka export) and name the result as the model, or write:   finetuning_type: lora",
        )
    names = _adapters(asked)
    if not names:
        return Answer({"lora.adapter": None}, "there is no folder lora: the bare word means a new adapter")
    if not goes_on(asked):
        return Answer({"lora.merge": names}, "merged into the base, as create_new_adapter asks")
    note = "it is trained further, with its own rank, alpha, dropout and modules"
    if compares(asked):
        note += "; the reference is this adapter as it begins (there: the base without it)"
    if names[:-1]:
        note = f"{', '.join(names[:-1])} merged into the base; {names[-1]}: {note}"
    return Answer({"lora.adapter": names[-1], **({"lora.merge": names[:-1]} if names[:-1] else {})}, note)


def new_adapter(value: Any, asked: Asked) -> Any:
    return Answer() if not value or _adapters(asked) else Answer(note="no other adapter is named: it is new")


def of_new_lora(convert: Any = None) -> Any:
    """Keys of a new adapter: one that goes on has them in its own files, and there they win too."""
    run = of_lora(convert)

    def of_new(value: Any, asked: Asked) -> Any:
        if is_lora(asked) and goes_on(asked):
            return Answer() if is_none(value) else Answer(note="of a new adapter: the one that goes on has its own")
        return run(value, asked)

    return of_new


def dropout(value: Any, asked: Asked) -> Any:
    if not compares(asked) or number(value, "lora_dropout") == 0:
        return value
    return Answer({"lora.dropout": 0.0}, "dropout is off in preference stages, as it is there")


def alpha(value: Any, asked: Asked) -> Any:
    """Rank-stabilised LoRA weights an update alpha / sqrt(rank): the plain form with alpha x sqrt(rank)."""
    scale = whole(asked.get("lora_rank", 8), "lora_rank") ** 0.5 if asked.is_on("use_rslora") else 1.0
    return number(value, "lora_alpha") * scale


def rslora(value: Any, asked: Asked) -> Any:
    if not value:
        return Answer()
    rank = whole(asked.get("lora_rank", 8), "lora_rank")
    given = asked.get("lora_alpha", 2 * rank)
    return Answer(
        {"lora.alpha": number(given, "lora_alpha") * rank**0.5},
        "alpha / sqrt(rank) is alpha x sqrt(rank) / rank: lora.alpha is written so",
    )


def bits(value: Any, asked: Asked) -> Any:
    """4 bits while loading, as theirs by bitsandbytes."""
    if asks_for_nothing(value, ()):
        return Answer()
    if number(value, "quantization_bit") != 4:
        raise Refusal(f"quantization_bit {value} is not there: duoka packs into 4 bits", "write:   quantization_bit: 4")
    if not is_lora(asked):
        raise Refusal("quantization_bit packs the frozen base under adapters", "write:   finetuning_type: lora")
    return packed_kind(asked.get("quantization_type", "nf4"), asked)


def packed_kind(value: Any, asked: Asked) -> Any:
    return words("quantization_type", {"nf4": "nf4", "fp4": "fp4"})(value, asked)


def packer(value: Any, asked: Asked) -> Any:
    if str(value).lower() in ("bnb", "bitsandbytes"):
        return Answer()
    raise Refusal(f"quantization_method {value} is another packer, and duoka has bitsandbytes' 4 bits", "write:   bnb")


def of_bits(convert: Any) -> Any:
    """Keys that have a meaning beside quantization_bit only."""

    def run(value: Any, asked: Asked) -> Any:
        if is_none(value):
            return Answer()
        if asks_for_nothing(asked.get("quantization_bit"), ()):
            return Answer(note="of a packed base, and quantization_bit is not there")
        return convert(value, asked) if convert else value

    return run


def pissa_rounds(value: Any, asked: Asked) -> Any:
    if not asked.is_on("pissa_init"):
        return Answer(note="of PiSSA, which is not on")
    return 0 if number(value, "pissa_iter") == -1 else whole(value, "pissa_iter")
