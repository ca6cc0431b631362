"""What autograd keeps of a token in a layer, measured: for plans of model types that are in no table.

A model of the same sizes with few layers, on fake tensors, through the code of a run: nothing is computed or held.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from duoka.config.schema import LoraConfig
from duoka.errors import DuokaError
from duoka.model.attention import register_attention
from duoka.model.auto_class import language_class
from duoka.model.build import LossModel, quiet_loading
from duoka.model.documents import Documents
from duoka.model.experts import use_own_experts
from duoka.model.freeze import freeze_beside_text
from duoka.model.fused import apply_fused
from duoka.model.layers import find_layers
from duoka.model.lora import apply_lora
from duoka.model.storage_peak import StoragePeak
from duoka.model.tiny_copy import tiny_config
from duoka.plan.shape import read_facts, read_shape
from duoka.plan.sizes import ModelShape
from duoka.runs.kept import with_kept
from duoka.torch_private import FakeTensorMode

_LAYERS = 8
_TOKENS = (256, 512)  # more than a chunk of any state
# Whatever code of a model ends with on tensors that hold nothing; the plan goes on with its guess.
_BREAKS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, ArithmeticError,
    OSError, StrictDataclassError, DuokaError,
)  # fmt: skip


def read_measured_shape(folder: Path) -> ModelShape:
    return with_kept(read_shape(folder), read_facts(folder), measure_kept)


def measure_kept(facts: Mapping[str, Any]) -> dict[str, float]:
    """Bytes by method and arithmetic ("lora bf16"), the mean of all layers; none where that cannot be seen."""
    found = {}
    for method in ("full", "lora"):
        for precision in ("bf16", "fp32"):
            for cut in (_cut(facts), dict(facts)):
                with contextlib.suppress(*_BREAKS):
                    found[f"{method} {precision}"] = _measure(cut, facts, _Way(method == "lora", precision == "bf16"))
                    break
    return found


@dataclass(frozen=True)
class _Way:
    has_adapters: bool
    is_half: bool


def _measure(cut: dict[str, Any], whole: Mapping[str, Any], way: _Way) -> float:
    config = _config(cut)
    each = _kept_by_layer(config, way)
    kinds = _text(whole).get("layer_types")
    if isinstance(kinds, list):
        of_kind = {kind: [own for own, other in zip(each, kinds, strict=False) if other == kind] for kind in set(kinds)}
        mean = sum(sum(of_kind[kind]) / len(of_kind[kind]) for kind in kinds) / len(kinds)
    else:
        mean = sum(each) / len(each)
    if not way.is_half:
        return mean
    # Compiled kernels, which keep less, read no fake tensors: their share is that of a small copy.
    small = tiny_config(config)
    return mean * sum(_kept_by_layer(small, way, is_fake=False)) / sum(_kept_by_layer(small, way))


def _kept_by_layer(config: Any, way: _Way, *, is_fake: bool = True) -> list[float]:
    """Bytes of a token that each layer leaves behind."""
    model = _build(config, way)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    rows = [_packed(tokens) for tokens in _TOKENS]
    found, marks = [], list[int]()
    with fake, StoragePeak(block=1) as live:
        model.to_empty(device="cpu")
        core: Any = model.core
        core.tie_weights()  # to_empty gives tied names a tensor each
        layers = find_layers(core)
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: marks.append(live.now))
        layers[-1].register_forward_hook(lambda *_: marks.append(live.now))
        live.hold(model)
        for tokens, documents in zip(_TOKENS, rows, strict=True):
            marks.clear()
            ids = torch.zeros((1, tokens), dtype=torch.long)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.is_half):
                loss, _ = model(ids, ids, ids, documents)
            found.append([after - before for before, after in itertools.pairwise(marks)])
            del loss
    return [(more - few) / (_TOKENS[1] - _TOKENS[0]) for few, more in zip(*found, strict=True)]


def _packed(tokens: int) -> Documents:
    """Two documents, one of them longer; its numbers are known before tensors are fake."""
    documents = Documents.of(torch.tensor([0, tokens * 5 // 8, tokens]), torch.device("cpu"))
    _ = documents.own_rows, documents.num_tokens
    return documents


def _config(facts: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[facts["model_type"]](**{key: value for key, value in facts.items() if key != "model_type"})


def _build(config: Any, way: _Way) -> LossModel:
    attention = register_attention()
    dtype = torch.bfloat16 if way.has_adapters and way.is_half else torch.float32
    with quiet_loading(), torch.device("meta"), torch.random.fork_rng(devices=[]):
        lm = language_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
        use_own_experts(lm)
        freeze_beside_text(lm)
        if way.has_adapters:
            lm = apply_lora(lm, LoraConfig(dropout=0.0))
    model = LossModel(lm.train())
    apply_fused(lm)
    return model


def _text(facts: Mapping[str, Any]) -> dict[str, Any]:
    inner = facts.get("text_config")
    return inner if isinstance(inner, dict) else dict(facts)


def _cut(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same model with fewer layers, where these are of all kinds."""
    found: dict[str, Any] = copy.deepcopy(dict(facts))
    inner = found["text_config"] if isinstance(found.get("text_config"), dict) else found
    kinds = inner.get("layer_types")
    if isinstance(kinds, list) and set(kinds) != set(kinds[:_LAYERS]):
        return found
    if isinstance(inner.get("num_hidden_layers"), int):
        inner["num_hidden_layers"] = min(_LAYERS, inner["num_hidden_layers"])
    if isinstance(kinds, list):
        inner["layer_types"] = kinds[:_LAYERS]
    return found
