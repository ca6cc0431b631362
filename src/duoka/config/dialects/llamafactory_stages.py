"""LLaMA-Factory's preference stages: what their keys mean here, and that they mean nothing to the others.

The rows stand in llamafactory.py's table; its `stage` chooses which of them count.
"""

from __future__ import annotations

from typing import Any

from duoka.config.dialects.rows import Answer, Asked, Convert, Refusal, Row, implemented, is_none, number, words

_PAIRS, _LABELED, _COMPARING = ("dpo",), ("kto",), ("dpo", "kto")
_LOSSES = {name: name for name in ("sigmoid", "hinge", "ipo", "orpo", "simpo", "kto_pair")}


def stage_of(asked: Asked) -> str:
    return str(asked.get("stage", "sft")).strip().lower()


def compares(asked: Asked) -> bool:
    """Whether answers are compared with what the model said before, without dropout."""
    return stage_of(asked) in _COMPARING


def pref_rows() -> list[Row]:
    return [
        *implemented("pref_loss", "stage.loss", _of(_PAIRS, _loss), "kto_pair is refused"),
        *implemented("pref_beta", "stage.beta", _of(_COMPARING, _number("pref_beta")), "of orpo, its lambda"),
        *implemented("pref_ftx", "stage.sft_weight", _of(_COMPARING, _ftx), "orpo has 1 of it by itself"),
        *implemented("dpo_label_smoothing", "stage.label_smoothing", _of(_PAIRS, _smoothing)),
        *implemented("simpo_gamma", "stage.gamma", _of(_PAIRS, _gamma), "with pref_loss simpo"),
        *implemented("ld_alpha", "stage.ld_alpha", _of(_PAIRS, _number("ld_alpha")), "of the reference's tokens too"),
        *implemented("kto_chosen_weight", "stage.desirable_weight", _of(_LABELED, _number("kto_chosen_weight"))),
        *implemented("kto_rejected_weight", "stage.undesirable_weight", _of(_LABELED, _number("kto_rejected_weight"))),
        *implemented("pref_bco_weight", "", _of(_PAIRS, _no_bco), "above 0 it is refused"),
        *implemented("ref_model", "", _of(_COMPARING, _own_start("ref_model")), "the reference is the run's own start"),
        *implemented("ref_model_adapters", "", _of(_COMPARING, _own_start("ref_model_adapters")), "refused"),
        *implemented("ref_model_quantization_bit", "", _of(_COMPARING, _own_start("ref_model_quantization_bit")),
                     "refused"),
    ]  # fmt: skip


def _of(stages: tuple[str, ...], convert: Convert) -> Convert:
    """Keys that only these stages read."""

    def run(value: Any, asked: Asked) -> Any:
        if is_none(value):
            return Answer()
        if stage_of(asked) not in stages:
            return Answer(note=f"of preference stages, which {stage_of(asked)} does not read")
        return convert(value, asked)

    return run


def _number(name: str) -> Convert:
    return lambda value, asked: number(value, name)


def _loss_of(asked: Asked) -> str:
    return str(asked.get("pref_loss", "sigmoid")).strip().lower()


def _loss(value: Any, asked: Asked) -> Any:
    name = words("pref_loss", _LOSSES)(value, asked)
    if name == "kto_pair":
        raise Refusal("pref_loss kto_pair is not there", "write:   pref_loss: sigmoid")
    return name


def _ftx(value: Any, asked: Asked) -> Any:
    weight = number(value, "pref_ftx")
    if stage_of(asked) != "dpo":
        if weight > 0:
            raise Refusal(f"pref_ftx {weight:g} beside stage {stage_of(asked)} is not there", "delete pref_ftx")
        return Answer()
    return weight + (1.0 if _loss_of(asked) == "orpo" else 0.0)


def _smoothing(value: Any, asked: Asked) -> Any:
    share = number(value, "dpo_label_smoothing")
    return Answer({"stage.label_smoothing": share} if share else {})


def _gamma(value: Any, asked: Asked) -> Any:
    gamma = number(value, "simpo_gamma")
    return gamma if _loss_of(asked) == "simpo" else Answer(note="of pref_loss simpo, which is not on")


def _no_bco(value: Any, asked: Asked) -> Any:
    if number(value, "pref_bco_weight") > 0:
        raise Refusal(f"pref_bco_weight {value}: the BCO term is not there", "delete pref_bco_weight")
    return Answer()


def _own_start(name: str) -> Convert:
    def run(value: Any, asked: Asked) -> Any:
        raise Refusal(
            f"{name} {value} names another reference, and duoka's is what the run begins with",
            f"delete {name}; a run that begins with that model has it as its reference",
        )

    return run
