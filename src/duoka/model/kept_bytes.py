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

from duoka.config.schema import LoraConfig, RunConfig
from duoka.errors import DuokaError
from duoka.model.attention import register_attention
from duoka.model.auto_class import config_of, language_class
from duoka.model.build import LossModel, quiet_loading
from duoka.model.documents import Documents
from duoka.model.experts import use_own_experts
from duoka.model.freeze import freeze_beside_text
from duoka.model.fused import apply_fused
from duoka.model.layers import find_layers
from duoka.model.lora import apply_lora
from duoka.model.storage_peak import StoragePeak
from duoka.model.tiny_copy import count_parameters, tiny_config
from duoka.plan.shape import read_facts, read_shape
from duoka.plan.sizes import ModelShape
from duoka.process.refused import refused_by_system
from duoka.runs.kept import with_kept
from duoka.torch_private import FakeTensorMode

_LAYERS = 8  # where nothing tells their kinds apart
_MOST_PARAMETERS = 50_000_000  # of a small copy, whose tensors are real
_TOKENS = (256, 512)  # more than a chunk of any state
# Whatever code of a model ends with on tensors that hold nothing; the plan goes on with its guess.
_BREAKS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, ArithmeticError,
    OSError, StrictDataclassError, DuokaError,
)  # fmt: skip


def read_measured_shape(folder: Path, config: RunConfig) -> ModelShape:
    return with_kept(read_shape(folder), read_facts(folder), config, measure_kept)


def measure_kept(facts: Mapping[str, Any], way: str) -> dict[str, float] | None:
    """Bytes under that way ("lora bf16"), the mean of all layers, and what one more holds beside that while its
    gradient is computed ("working lora bf16"); none where that cannot be seen. None where the system refused it memory.
    """
    whole, how = _text_alone(facts), _Way(way.startswith("lora"), way.endswith("bf16"))
    for cut in (_cut(whole), dict(whole)):
        # Nobody's numbers are drawn here, whatever the pass around it is.
        try:
            with quiet_loading(), torch.random.fork_rng(devices=[]), torch.enable_grad():
                kept, working = _measure(cut, whole, how)
            return {way: kept, f"working {way}": working}
        except _BREAKS as error:
            if refused_by_system(error) is not None:
                return None
    return {}


@dataclass(frozen=True)
class _Way:
    has_adapters: bool
    is_half: bool


def _measure(cut: dict[str, Any], whole: Mapping[str, Any], way: _Way) -> tuple[float, float]:
    config = config_of(cut)
    each, working = _bytes_by_layer(config, way)
    known = _text(whole).get("layer_types")
    kinds = known if isinstance(known, list) and known else [""] * len(each)
    # Of the first and of the last layer a part lies outside of them; where a kind has no other, it has to do.
    named = list(zip(each, kinds, strict=False))
    inner = named[1:-1] if {kind for _, kind in named[1:-1]} == set(kinds) else named
    of_kind = {kind: [own for own, other in inner if other == kind] for kind in set(kinds)}
    mean = sum(sum(of_kind[kind]) / len(of_kind[kind]) for kind in kinds) / len(kinds)
    if way.is_half:
        # Compiled kernels, which keep less, read no fake tensors: their share is that of a small copy.
        small = tiny_config(config)
        if count_parameters(small, False) <= _MOST_PARAMETERS:
            real, fake = (_bytes_by_layer(small, way, is_fake=it, learns=False)[0] for it in (False, True))
            mean *= sum(real) / sum(fake)
    return mean, max(working)


def _bytes_by_layer(
    config: Any, way: _Way, *, is_fake: bool = True, learns: bool = True
) -> tuple[list[float], list[float]]:
    """(that each layer leaves behind, that it holds beside that in its backward pass), of a token."""
    model = _build(config, way)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    rows = [_packed(tokens) for tokens in _TOKENS]
    with fake, StoragePeak(block=1) as live:
        model.to_empty(device="cpu")
        core: Any = model.core
        core.tie_weights()  # to_empty gives tied names a tensor each
        marks = _Marks(live, find_layers(core))
        live.hold(model)

        def look(is_backward: bool) -> list[float]:
            found = []
            for documents in rows:
                ids = torch.zeros((1, documents.num_tokens), dtype=torch.long)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.is_half):
                    loss, _ = model(ids, ids, ids, documents)
                if is_backward:
                    loss.backward()
                found.append(marks.take()[is_backward])
                del loss
            few, more = found
            return [(high - low) / (_TOKENS[1] - _TOKENS[0]) for low, high in zip(few, more, strict=True)]

        kept = look(False)
        # Without weights' gradients, which tokens do not make larger.
        model.requires_grad_(False)
        core.get_input_embeddings().register_forward_hook(lambda _, __, states: states.requires_grad_())
        return kept, look(True) if learns else []


class _Marks:
    """What is held as each layer is entered, and as its backward pass begins and ends."""

    def __init__(self, live: StoragePeak, layers: list[torch.nn.Module]) -> None:
        self.live = live
        self.entries: list[int] = []
        self.begun: list[int] = []
        self.peaks: list[int] = []
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.entries.append(live.now))
            layer.register_forward_hook(self._see_gradient)
        layers[-1].register_forward_hook(lambda *_: self.entries.append(live.now))

    def _see_gradient(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        states.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        if self.begun:
            self.peaks.append(self.live.peak)
        self.begun.append(self.live.now)
        self.live.peak = self.live.now

    def take(self) -> tuple[list[int], list[int]]:
        """(left behind by each, held beside), from the first layer to the last; then from the beginning."""
        self.peaks.append(self.live.peak)
        kept = [after - before for before, after in itertools.pairwise(self.entries)]
        working = [peak - begun for peak, begun in zip(self.peaks, self.begun, strict=False)][::-1]
        self.entries, self.begun, self.peaks = [], [], []
        return kept, working


def _packed(tokens: int) -> Documents:
    """Two documents, one of them longer; its numbers are known before tensors are fake."""
    documents = Documents.of(torch.tensor([0, tokens * 5 // 8, tokens]), torch.device("cpu"))
    _ = documents.own_rows, documents.num_tokens
    return documents


def _build(config: Any, way: _Way) -> LossModel:
    attention = register_attention()
    dtype = torch.bfloat16 if way.has_adapters and way.is_half else torch.float32
    with torch.device("meta"):
        lm = language_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
        use_own_experts(lm)
        freeze_beside_text(lm)
        if way.has_adapters:
            lm = apply_lora(lm, LoraConfig(dropout=0.0))
    model = LossModel(lm.train())
    apply_fused(lm)
    return model


def _text_alone(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model with towers the config of what reads text, where that is a model of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = _text(facts)
    return text if text.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else facts


def _text(facts: Mapping[str, Any]) -> dict[str, Any]:
    inner = facts.get("text_config")
    return inner if isinstance(inner, dict) else dict(facts)


def _cut(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same model with fewer layers; where a list tells their kinds apart, each stands once between others."""
    found: dict[str, Any] = copy.deepcopy(dict(facts))
    inner = found["text_config"] if isinstance(found.get("text_config"), dict) else found
    kinds, layers = inner.get("layer_types"), _LAYERS
    if isinstance(kinds, list) and kinds:
        later = kinds[1:]
        layers = 3 + max((later.index(kind) for kind in later), default=0)
        inner["layer_types"] = kinds[:layers]
    if isinstance(inner.get("num_hidden_layers"), int):
        inner["num_hidden_layers"] = min(layers, inner["num_hidden_layers"])
    return found
