"""What follows from `model.depth`, `train.tokens`, `stage` and `parallel.layout`; each gives way to what is written.

`load.py` fills a config by it; banners ask which values still are the rules' own. The reasons are in docs/pretrain.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from duoka.config.layout_name import read_layout_name
from duoka.config.schema import RunConfig
from duoka.config.stages import StageName
from duoka.units import parse_amount, parse_budget

WIDTH_PER_LAYER = 64
HEAD_DIM = 128
ROW_TOKENS = 2048
USUAL_VOCABULARY = 32768  # for a first count of parameters, before a tokenizer is read
TOKENS_PER_PARAMETER = "20x"
TRIED_DEPTHS = (12, 26)  # where rules like these are known to train well (docs/pretrain.md says by whom)

# What the rates were found for: this many tokens a step, and a model this wide.
REFERENCE_BATCH = 2**19
REFERENCE_DEPTH, REFERENCE_WIDTH = 12, 768
# The batch at which more of it no longer pays grows with the tokens to be learned, to this power; these grow with the
# third power of the depth.
BATCH_EXPONENT = 0.383 * 3
# Runs of no more steps than these learn most at the full rates, whatever their batch.
FULL_RATE_STEPS = 128
MATRIX_LR, EMBEDDING_LR, HEAD_LR, VECTOR_LR = 0.02, 0.1, 0.006, 0.01
ADAMW_LR = 6e-4


@dataclass(frozen=True)
class Derived:
    """`value` sees a config in which all earlier keys are filled; None: nothing follows."""

    key: str
    value: Callable[[RunConfig], Any]
    origin: str = "from depth"
    unless: tuple[str, ...] = ()  # written keys that say the same thing in another way


def count_batch_tokens(config: RunConfig) -> int:
    """Tokens that one optimizer step learns from, at most; samples count as whole rows."""
    batch = parse_amount(config.train.global_batch)
    return batch.count if batch.unit == "tokens" else batch.count * config.sample_tokens


def _width(c: RunConfig) -> int:
    assert c.model.depth and c.model.head_dim
    return max(1, round(c.model.depth * WIDTH_PER_LAYER / c.model.head_dim)) * c.model.head_dim


def _batch(c: RunConfig) -> str:
    assert c.model.depth
    wanted = REFERENCE_BATCH * (c.model.depth / REFERENCE_DEPTH) ** BATCH_EXPONENT
    return f"{max(c.data.max_length, 2 ** round(math.log2(wanted)))} tokens"


def _count_steps(c: RunConfig) -> float | None:
    """About how many steps the run has, with a vocabulary of usual size; None when only the data says it."""
    ends = [float(c.train.max_steps)] if c.train.max_steps else []
    if c.train.tokens is not None:
        ends.append(parse_budget(c.train.tokens).tokens(_count_parameters(c)) / count_batch_tokens(c))
    return min(ends, default=None)


def _count_parameters(c: RunConfig) -> int:
    """About those that multiply: of attention, MLPs and head."""
    model = c.model
    width, inside = model.width or 0, (model.kv_heads or 0) * (model.head_dim or 0)
    return (model.depth or 0) * width * (2 * width + 2 * inside + 3 * (model.mlp_width or 0)) + USUAL_VOCABULARY * width


def _gain(c: RunConfig) -> float:
    """Rates as a share of what they are at the reference's batch.

    In a long run noise decides: gradients of larger batches are surer by the root of their size, and allow for larger
    steps. In a short one the way to go does: these optimizers move weights by about the rate whatever the gradient's
    length, a walk of so many steps leads as far as their root, and shorter ones have to take longer steps to come as
    far. Never longer than the reference's, for small batches' sake: nobody has seen training hold beyond them.
    """
    batch = math.sqrt(count_batch_tokens(c) / REFERENCE_BATCH)
    steps = _count_steps(c)
    return batch if not steps else max(batch, min(1.0, math.sqrt(FULL_RATE_STEPS / steps)))


def _as_it_is(rate: float) -> Callable[[RunConfig], Any]:
    """Muon moves a matrix by its own measure, whatever its width."""
    return lambda c: _rounded(rate * _gain(c))


def _by_width(rate: float) -> Callable[[RunConfig], Any]:
    """AdamW moves every weight alike, and a sum over more of them grows."""
    return lambda c: _rounded(rate * _gain(c) * math.sqrt(REFERENCE_WIDTH / (c.model.width or REFERENCE_WIDTH)))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _with_muon(value: Callable[[RunConfig], Any]) -> Callable[[RunConfig], Any]:
    return lambda c: value(c) if c.optim.name == "muon" else None


def _rate(c: RunConfig) -> float | None:
    rules = {"muon": _as_it_is(MATRIX_LR), "adamw": _by_width(ADAMW_LR), "adamw8bit": _by_width(ADAMW_LR)}
    return rules[c.optim.name](c) if c.optim.name in rules else None


def _always(value: Any) -> Callable[[RunConfig], Any]:
    return lambda c: value


_FROM_DEPTH: tuple[Derived, ...] = (
    Derived("stage.name", _always("pretrain"), unless=("stage",)),
    Derived("model.head_dim", _always(HEAD_DIM)),
    Derived("model.width", _width),
    Derived("model.kv_heads", lambda c: max(1, (c.model.width or 0) // (c.model.head_dim or 1))),
    Derived("model.mlp_width", lambda c: 3 * (c.model.width or 0)),
    Derived("data.max_length", _always(ROW_TOKENS)),
    Derived("model.context", lambda c: c.data.max_length),
    Derived("train.global_batch", _batch),
    Derived(
        "train.tokens",
        lambda c: TOKENS_PER_PARAMETER if c.stage.kind.reads_text else None,
        unless=("train.max_steps", "train.epochs"),
    ),
    Derived("optim.name", _always("muon")),
    Derived("optim.lr", _rate),
    Derived("optim.adamw_lr", _with_muon(_by_width(VECTOR_LR))),
    Derived("optim.embedding_lr", _with_muon(_by_width(EMBEDDING_LR))),
    Derived("optim.head_lr", _with_muon(_by_width(HEAD_LR))),
    Derived("optim.betas", _always((0.8, 0.95))),
    Derived("optim.eps", _always(1e-10)),
    Derived("optim.schedule", _always("wsd")),
    Derived("optim.decay", lambda c: 0.5 if c.optim.schedule == "wsd" else None),
    Derived("optim.warmup", _always(0.01)),
    Derived("train.eval_every", lambda c: 250 if c.is_evaluated else None),
    Derived("log.samples", lambda c: 2 if c.data.eval else None),
)
_MID = "from stage mid"
# Conversations and tasks as text that all is learned, none of it cut away, once, the rate falling over the last fifth.
_FROM_STAGE: dict[StageName, tuple[Derived, ...]] = {
    "mid": (
        Derived("data.targets", _always("all"), _MID),
        Derived("data.on_long", _always("split"), _MID),
        Derived("train.epochs", _always(1.0), _MID),
        Derived("optim.schedule", _always("wsd"), _MID),
        Derived("optim.warmup", _always(0.0), _MID),
    ),
}
# Without any other limit, epochs count.
_FROM_TOKENS = Derived("train.epochs", _always(None), origin="from train.tokens")


def derive(config: RunConfig, written: Container[str]) -> tuple[RunConfig, dict[str, str]]:
    """The config with all that follows from it, and the origins of those keys; `written` keys stay as they are."""
    origins: dict[str, str] = {}
    if config.parallel.layout is not None:
        for key, meant in read_layout_name(config.parallel.layout).meant().items():
            name = f"parallel.{key}"
            if name not in written:
                config, origins[name] = _with_value(config, name, meant), "from parallel.layout"
    rules = (*_FROM_STAGE.get(config.stage.name, ()), *(_FROM_DEPTH if config.model.depth else ()))
    for rule in rules:
        is_set = rule.key in origins or any(key in written for key in (rule.key, *rule.unless))
        value = None if is_set else rule.value(config)
        if value is not None:
            config, origins[rule.key] = _with_value(config, rule.key, value), rule.origin
    counted = config.train.tokens is not None or bool(config.model.depth and config.train.max_steps)
    if counted and _FROM_TOKENS.key not in written:
        origin = _FROM_TOKENS.origin if config.train.tokens is not None else "from train.max_steps"
        config, origins[_FROM_TOKENS.key] = _with_value(config, _FROM_TOKENS.key, None), origin
    return config, origins


def rules_kept(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and values of a filled config: those that are what depth says, and those that the user wrote otherwise."""
    own: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for rule in _FROM_DEPTH if config.model.depth else ():
        expected, actual = rule.value(config), _value(config, rule.key)
        if expected is not None and actual is not None:
            (own if expected == actual else other)[rule.key] = actual
    return own, other


def is_outside_what_was_tried(depth: int) -> bool:
    return not TRIED_DEPTHS[0] <= depth <= TRIED_DEPTHS[1]


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def _with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    block, _, name = key.rpartition(".")
    if not block:
        return config.model_copy(update={name: value})
    section = getattr(config, block).model_copy(update={name: value})
    return config.model_copy(update={block: section})
