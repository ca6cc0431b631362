"""Contradictions in what is trained of which model: adapters, chosen layers, revisions.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.schema import RunConfig


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _lora_scale_is_odd(c: RunConfig) -> bool:
    return c.lora is not None and not 1e-3 <= c.lora.alpha / c.lora.rank <= 1e3


def _lora_names(c: RunConfig) -> tuple[str, ...]:
    return c.lora.targets if c.lora is not None and isinstance(c.lora.targets, tuple) else ()


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "lora-without-targets",
        ("lora.targets",),
        lambda c: c.lora is not None and c.lora.targets == (),
        "lora.targets is empty: nothing would be trained",
        "write:   targets: all   or for example   targets: [q_proj, v_proj]",
    ),
    Rule(
        "lora-all-in-a-list",
        ("lora.targets",),
        lambda c: "all" in _lora_names(c),
        "lora.targets lists all beside or as a module's name",
        "write:   targets: all   without brackets",
    ),
    Rule(
        "lora-target-twice",
        ("lora.targets",),
        lambda c: len(set(_lora_names(c))) < len(_lora_names(c)),
        "lora.targets names a module twice",
        "name it once",
    ),
    Rule(
        "lora-target-is-no-name",
        ("lora.targets",),
        lambda c: any(not name.strip() or "," in name or name != name.strip() for name in _lora_names(c)),
        "lora.targets has an entry that is no module's name",
        "write for example:   targets: [q_proj, v_proj]",
    ),
    Rule(
        "lora-scale",
        ("lora.alpha", "lora.rank"),
        _lora_scale_is_odd,
        "lora.alpha is {c.lora.alpha:g} with lora.rank {c.lora.rank}: adapters count alpha / rank, "
        "and that is no useful number here",
        "alpha is usually one or two times the rank:   alpha: 16",
    ),
    Rule(
        "lora-and-train-only",
        ("train_only", "lora"),
        lambda c: c.train_only is not None and c.lora is not None,
        "lora and train_only are both given: one trains adapters beside frozen weights, the other some of the weights",
        "delete one of the two blocks",
    ),
    Rule(
        "train-only-nothing",
        ("train_only.layers", "train_only"),
        lambda c: c.train_only is not None and c.train_only.layers in (0, ()) and not c.train_only.extra,
        "train_only names no layer and no module: nothing would be trained",
        "write for example:   layers: 2",
    ),
    Rule(
        "spread-of-named-layers",
        ("train_only.spread", "train_only.layers"),
        lambda c: (
            c.train_only is not None
            and c.train_only.spread
            and not (isinstance(c.train_only.layers, int) and c.train_only.layers > 0)
        ),
        "train_only.spread needs a number of layers to spread, and layers is {c.train_only.layers}",
        "write for example:   layers: 8",
    ),
    Rule(
        "revision-of-no-hub-model",
        ("model.revision", "model.name"),
        lambda c: c.model.revision is not None and (c.model.name == "demo" or _is_path(c.model.name)),
        "model.revision is {c.model.revision}, but {c.model.name} comes from no Hub and has no revisions",
        "delete revision",
    ),
)
