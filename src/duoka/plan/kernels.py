"""Which implementation each part of a training step has, and why not a faster one: one table for plans and runs.

A row has the ways to compute a part, the best first; a way says why it is not taken, from `Facts`. A plan knows what is
installed (`expected`); a run looks at its model and tries what it would use on its device (model/kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from duoka.config.schema import RunConfig
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.prefixes import may_share, why_no_sharing
from duoka.plan.recipe import Work
from duoka.plan.sizes import ModelShape

LIGER_PARTS = ("rotation", "MLP")
TRITON_PARTS = ("norm", "loss")  # in kernels of duoka's own
USUAL = frozenset(("norm", *LIGER_PARTS))
_WIDE = ("attention", "dropout")  # of the compiled parts, those that know fp32 too
BENT = "the model scales its logits, or caps them"


_NATIVE_GATES = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Facts:
    """What decides. Each `no_...` says why that is not there; "": it is."""

    device: str = "cpu"
    precision: str = "fp32"
    packing: bool = True
    compiles: bool = False  # layers are compiled: torch.compile fuses by itself
    keeps_products: bool = False  # selective recompute
    attention_as_written: bool = False  # ours would compute something else
    has: frozenset[str] = USUAL  # which of these the model computes as duoka knows them
    gate: str = "silu"  # the MLP's
    joined_gate: bool = False  # and one product gives it and what it multiplies
    adapters: bool = False
    adapters_beside_others: bool = False  # than linear layers, say experts
    drops: bool = False  # adapters drop some of what they read
    own_logits: bool = False  # the loss is taken from logits that the model computes itself
    no_plain_loss: str = ""  # likelihood of the targets alone
    no_native: str = ""  # compiled kernels, on a CPU
    by_onednn: bool = False  # fp32 products, on CPUs where MKL is the slower one
    shares: bool = False  # samples of a row may begin alike
    no_sharing: str = ""  # of what they begin with
    no_documents: str = ""  # attention over all documents of a packed row in one launch, on a GPU
    no_liger: Mapping[str, str] = field(default_factory=dict)  # by part; a part that is not named is there
    no_triton: Mapping[str, str] = field(default_factory=dict)  # of duoka's own kernels, on a GPU; likewise


class Way(NamedTuple):
    """One implementation. `why_not`: "" it can be taken, a reason, or None: there is nothing to say of it here."""

    name: str
    why_not: Callable[[Facts], str | None]


@dataclass(frozen=True)
class Chosen:
    """What computes a part; `better` was not taken, for the reason in `why`."""

    part: str
    by: str
    better: str = ""
    why: str = ""


def _liger(part: str) -> Way:
    def why_not(facts: Facts) -> str | None:
        if facts.device != "cuda" or part not in facts.has:
            return None
        if part == "MLP" and facts.gate != "silu":
            return f"its kernel knows gates by silu, not {facts.gate}"
        if part == "MLP" and facts.joined_gate and not facts.no_liger.get(part):
            return "its kernel would copy gate and up out of the one product that gives both"
        if part == "rotation" and facts.keeps_products and not facts.no_liger.get(part):
            return "selective recompute keeps the products that it would write over"
        return facts.no_liger.get(part, "")

    return Way("Liger", why_not)


def _native(part: str, name: str = "compiled for this processor") -> Way:
    def why_not(facts: Facts) -> str | None:
        if facts.device != "cpu" or (facts.precision not in ("bf16", "fp8") and part not in _WIDE):
            return None
        if facts.compiles and part != "loss":  # which is no part of a layer
            return None
        if part in USUAL and part not in facts.has:
            return None
        if part == "MLP" and facts.gate not in _NATIVE_GATES:
            return f"they know gates by {' and '.join(_NATIVE_GATES)}, not {facts.gate}"
        if part == "loss" and (facts.own_logits or facts.no_plain_loss):
            return None if facts.own_logits else facts.no_plain_loss
        if part == "attention" and facts.keeps_products:
            return "selective recompute keeps torch's attention, by its name"
        return facts.no_native

    return Way(name, why_not)


def _fused(part: str, name: str, device: str) -> Way:
    return Way(name, lambda facts: "" if facts.device == device and part in facts.has else None)


def _documents(facts: Facts) -> str | None:
    return facts.no_documents if facts.device == "cuda" and facts.packing else None


def _slope(facts: Facts) -> str | None:
    if facts.device != "cuda" or facts.own_logits:
        return None
    return facts.no_plain_loss or facts.no_triton.get("loss", "")


def _norm(facts: Facts) -> str | None:
    return facts.no_triton.get("norm", "") if facts.device == "cuda" and "norm" in facts.has else None


def _when(condition: Callable[[Facts], bool], why: str | None = None) -> Callable[[Facts], str | None]:
    return lambda facts: "" if condition(facts) else why


def _has_one_sum(facts: Facts) -> str | None:
    if facts.keeps_products and not facts.compiles:
        return "selective recompute keeps products as they are"
    return None if facts.compiles or facts.adapters_beside_others else ""


_COMPILED = Way("torch.compile", _when(lambda facts: facts.compiles))
_WRITTEN = "as the model writes it"
_AS_WRITTEN = Way(_WRITTEN, _when(lambda facts: True))
# A row is a part that every step has, or one that `_is_there` asks the facts for.
TABLE: Mapping[str, tuple[Way, ...]] = {
    "attention": (
        Way(_WRITTEN, _when(lambda facts: facts.attention_as_written)),
        Way("torch, all documents in one launch", _documents),
        _native("attention"),
        Way("torch, one call per document", _when(lambda facts: facts.packing)),
        Way("torch", _when(lambda facts: True)),
    ),
    "prefixes": (
        Way("computed once for all samples of a micro-batch", lambda facts: facts.no_sharing),
        Way("computed in each sample", _when(lambda facts: True)),
    ),
    "norm": (
        _COMPILED, Way("one kernel each way (Triton)", _norm), _fused("norm", "torch, in one kernel", "cuda"),
        _native("norm"), _fused("norm", "duoka", "cpu"), _AS_WRITTEN,
    ),
    "rotation": (
        _COMPILED, _liger("rotation"), _fused("rotation", "duoka", "cuda"), _native("rotation"), _AS_WRITTEN,
    ),
    "MLP": (
        _COMPILED, _liger("MLP"), _fused("MLP", "duoka", "cuda"), _native("MLP"), _fused("MLP", "duoka", "cpu"),
        _AS_WRITTEN,
    ),
    "loss": (
        Way("in one kernel over each chunk of logits (Triton)", _slope),
        _native("loss"),
        Way("torch, from the model's own logits", _when(lambda facts: facts.own_logits)),
        Way("torch, over chunks of logits", _when(lambda facts: True)),
    ),
    "products": (Way("oneDNN, for MKL leaves this processor's AVX-512 unused", _when(lambda facts: facts.by_onednn)),),
    "adapters": (
        Way("duoka", _has_one_sum),
        _COMPILED,
        Way("PEFT", _when(lambda facts: True)),
    ),
    "dropout": (
        _native("dropout"),
        Way("torch, counted by token", _when(lambda facts: True)),
    ),
}  # fmt: skip
_IS_THERE: Mapping[str, Callable[[Facts], bool]] = {
    "prefixes": lambda facts: facts.shares,
    "products": lambda facts: facts.by_onednn,
    "adapters": lambda facts: facts.adapters,
    "dropout": lambda facts: facts.drops,
}


def choose_kernels(facts: Facts) -> tuple[Chosen, ...]:
    """Of each part that a step has: the first way that can be taken, and the best that cannot."""
    found = []
    for part, ways in TABLE.items():
        if part in _IS_THERE and not _IS_THERE[part](facts):
            continue
        better, why = "", ""
        for way in ways:
            reason = way.why_not(facts)
            if reason == "":
                found.append(Chosen(part, way.name, better, why))
                break
            if reason and not why:
                better, why = way.name, reason
    return tuple(found)


def kernel_sentences(chosen: tuple[Chosen, ...]) -> list[str]:
    """One line of what computes what, and one for each reason why it is not a faster one."""
    by: dict[str, list[str]] = {}
    for one in chosen:
        by.setdefault(one.by, []).append(one.part)
    missed: dict[tuple[str, str], list[str]] = {}
    for one in chosen:
        if one.why:
            missed.setdefault((one.better, one.why), []).append(one.part)
    first = "; ".join(f"{', '.join(parts)}: {name}" for name, parts in by.items())
    reasons = (f"{', '.join(parts)}: not {better}, because {why}" for (better, why), parts in missed.items())
    return [first, *reasons]


def kernels_json(chosen: tuple[Chosen, ...]) -> list[dict[str, Any]]:
    """For plan.json: a reason stands only where there is one."""
    return [{key: value for key, value in asdict(one).items() if value} for one in chosen]


def why_no_plain_loss(config: RunConfig) -> str:
    """What a run minimizes beside its targets' likelihood, for which the loss's fast kernels are."""
    train, stage = config.train, config.stage
    if stage.kind.scores or stage.kind.judges or stage.kind.draws:
        return f"stage {stage.name} asks for more than the sum of losses"
    if train.label_smoothing:
        return f"train.label_smoothing is {train.label_smoothing:g}"
    return "" if train.loss == "likelihood" else f"train.loss is {train.loss}"


def _usual_parts(shape: ModelShape) -> Iterator[str]:
    """Of a model that nobody looked at: a norm with one number a unit is taken for an RMS norm."""
    if shape.num_final_norm_parameters == shape.hidden_size:
        yield "norm"
    if not shape.num_positions and not shape.parts.own_rotation:
        yield "rotation"
    if shape.gated:
        yield "MLP"


def expected(config: RunConfig, work: Work, layout: Layout, machine: Machine) -> Facts:
    """What a plan knows before there is a model: of a GPU, that what is installed will work there."""
    wide = f"its kernel knows bf16 and fp16, not {layout.precision}" if layout.precision == "fp32" else ""
    return Facts(
        device=work.device,
        precision=layout.precision,
        packing=layout.packing,
        compiles=bool(layout.compile),
        keeps_products=layout.recompute == "selective",
        has=frozenset(_usual_parts(work.shape)),
        gate=work.shape.parts.act,
        joined_gate=work.shape.parts.joined_gate,
        adapters=config.lora is not None,
        adapters_beside_others=work.shape.packed_by not in ("", "bitsandbytes"),  # GPTQ's, AWQ's
        drops=config.lora is not None and config.lora.dropout > 0,
        no_plain_loss=why_no_plain_loss(config) or (BENT if work.shape.bent_logits else ""),
        no_native="" if work.has_kernels else "no C++ compiler (duoka doctor)",
        by_onednn=work.device == "cpu" and layout.precision == "fp32" and machine.mkl_is_slow,
        shares=layout.packing and may_share(config),
        no_sharing=why_no_sharing(config, layout),
        no_documents=wide
        or ("" if work.has_flash else "its kernel asks for a GPU of compute capability 8 (Ampere) or more"),
        no_liger=dict.fromkeys(LIGER_PARTS, machine.no_liger) if machine.no_liger else {},
        no_triton=dict.fromkeys(TRITON_PARTS, machine.no_triton) if machine.no_triton else {},
    )
