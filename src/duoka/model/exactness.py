"""Whether an architecture computes the same packed, padded and alone: tried on a tiny copy of it before a run begins.

Transformers has layers that drop the documents' borders, and layers whose state runs on into the next document (both
are told of them here: own_states.py), attention that reads its mask only, and heads that do more than a matrix product.
None of them says so: losses are wrong and nothing else shows. So two short documents go through our forward pass packed
into a row, or padded, and each alone through the model's own. What differs is padded instead, with a note; where our
attention is what differs, padded rows go through the model's own attention; what differs then is refused. No list of
families.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError

from duoka.errors import ConfigError
from duoka.model.attention import NAME, register_attention, register_blind_attention
from duoka.model.build import LossModel, quiet_loading
from duoka.model.chunks import IGNORED
from duoka.model.documents import Documents
from duoka.model.own_lengths import find_stretch
from duoka.model.pipeline_stages import cut_model
from duoka.model.tiny_copy import SPECIAL, VOCABULARY, build_tiny, count_parameters, tiny_config
from duoka.process.refused import refused_by_system

# The last: padded rows through the attention that the model's own code brings, where ours computes something else.
LayOut = Literal["packed", "padded", "as written"]
LAYOUTS: tuple[LayOut, ...] = ("packed", "padded", "as written")

# Why each is off, as far as can be seen from outside.
_LOOKS = "its attention or its layers look at what stands to the right, or read a mask that training leaves out"
_REASONS: dict[LayOut, str] = {
    "packed": "positions or states of its layers run on from one document into the next",
    "padded": _LOOKS,
    "as written": _LOOKS,
}

# The relative error of loss and gradient above which two ways of computing are not the same. Of all architectures of
# transformers those that are exact show at most 5e-6 in fp32, and the nearest of the others 3e-2.
TOLERANCE = 1e-3
# Longer than the short windows and chunks of a tiny copy, and of different lengths, so that one of them is padded.
_LENGTHS = (11, 14)
_ALIKE = 5
_MOST_PARAMETERS = 200_000_000  # of a copy whose widths could not be made small: a second of one core

# Whatever the code of an architecture may end with on inputs that it doesn't take; what is no Exception goes on.
_BREAKS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, ArithmeticError,
    StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True)
class LayoutTrial:
    """One way to lay documents out, held against each document alone.

    `error` is relative, of the loss or of the gradient, whichever is more; `own_logits`: as computed with the model's
    own logits, because our head is off. `why` says what went wrong, where it is known.
    """

    error: float
    own_logits: bool = False
    why: str = ""

    @property
    def is_exact(self) -> bool:
        return self.error <= TOLERANCE

    def sentence(self) -> str:
        difference = f"loss or gradient is off by {self.error:.1%}"
        if not math.isfinite(self.error):
            return self.why or "loss or gradient is no number"
        return f"{difference}: {self.why}" if self.why else difference


@dataclass(frozen=True)
class _Alone:
    """A tiny model, and the summed loss of documents that it saw one at a time, with its gradients."""

    weights: dict[str, torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


class SelfTest:
    """The trials of one architecture; each is made when it is asked for, once."""

    def __init__(self, config: Any, *, trust_remote_code: bool = False) -> None:
        register_attention()
        self.name = str(getattr(config, "model_type", "") or type(config).__name__)
        self._trust = trust_remote_code
        self._documents = _draw_documents()
        self._done: dict[LayOut, LayoutTrial] = {}
        self._shared = ""  # why packed documents' common prefix cannot be computed once
        self._tiny, self._alone = self._find_copy(config)
        self.stretched_from = find_stretch(config)  # tokens; None: its rotary embedding is one for all lengths

    def trial(self, layout: LayOut) -> LayoutTrial:
        if layout not in self._done:
            with quiet_loading():
                self._done[layout] = self._try(layout, self._alone or self._learn_alone(self._tiny))
            if self._done[layout].is_exact:
                self._alone = None  # nobody asks further: its weights and gradients need not stay
        return self._done[layout]

    def why_no_sharing(self) -> str:
        """Why what packed documents begin with alike is computed in each of them; "": once is exact."""
        if not self.trial("packed").is_exact:
            return "documents are not packed"
        if self.stretched_from is not None:
            return "its rotary embedding depends on how long a document is"
        return self._shared

    @functools.cached_property
    def pieces(self) -> LayoutTrial:
        """A row computed in two pieces, with an attention in which no token sees another: whether anything else does.

        What ranks of a sequence exchange is attention's; layers that mix tokens otherwise would miss their neighbors.
        """
        row = torch.cat(self._documents)[None]
        places = torch.arange(row.shape[1])[None]
        middle = row.shape[1] // 2

        def answer(part: slice) -> torch.Tensor:
            logits = model(input_ids=row[:, part], position_ids=places[:, part], use_cache=False).logits
            assert isinstance(logits, torch.Tensor)
            return logits

        try:
            with quiet_loading(), torch.no_grad():
                model = build_tiny(self._tiny, register_blind_attention(), trust_remote_code=self._trust)
                whole = answer(slice(None))
                cut = torch.cat((answer(slice(middle)), answer(slice(middle, None))), dim=1)
        except _BREAKS as error:
            return LayoutTrial(math.inf, why=f"its code does not run in pieces ({_why(error)})")
        off = float((cut - whole).norm() / whole.norm())
        why = "layers beside its attention look at other tokens, or at how many there are"
        return LayoutTrial(off if math.isfinite(off) else math.inf, why=why)

    def trial_in_stages(self) -> LayoutTrial:
        """The padded copy again, cut into two stages of a pipeline."""
        with quiet_loading():
            alone = self._alone or self._learn_alone(self._tiny)
            try:
                model = self._build("as written" if self.layout == "as written" else "padded")
                model.load_state_dict(alone.weights)
                return _measure_stages(model, _pad(self._documents), alone)
            except _BREAKS as error:
                return LayoutTrial(math.inf, why=_why(error))

    @property
    def layout(self) -> LayOut | None:
        """How documents are laid out where nothing else is asked; None: no way is exact."""
        return next((one for one in LAYOUTS if self.trial(one).is_exact), None)

    def layout_for(self, *, packing: bool) -> LayOut:
        """The same where it is decided whether rows are packed."""
        if packing:
            return "packed"
        return "padded" if self.trial("padded").is_exact else "as written"

    @functools.cached_property
    def written_attention(self) -> str:
        """The attention of the model's own code: torch's where it knows that, else written out."""
        try:
            with quiet_loading():
                build_tiny(self._tiny, "sdpa", trust_remote_code=self._trust)
        except _BREAKS:
            return "eager"
        return "sdpa"

    def _build(self, layout: LayOut) -> torch.nn.Module:
        attention = self.written_attention if layout == "as written" else NAME
        return build_tiny(self._tiny, attention, trust_remote_code=self._trust, own_experts=True)

    def _find_copy(self, config: Any) -> tuple[Any, _Alone | None]:
        """The smallest copy that runs: code that does not take small widths gets its own, with few layers or all."""
        reason = ""
        for make in (tiny_config, functools.partial(tiny_config, widths=False), lambda own: own):
            try:
                tiny = make(config)
                with quiet_loading():
                    if make is tiny_config or count_parameters(tiny, self._trust) <= _MOST_PARAMETERS:
                        return tiny, self._learn_alone(tiny)
            except _BREAKS as error:
                reason = reason or _why(error)
        raise ConfigError(
            f"model type {self.name} could not be tried before the run: no small copy of it computes a loss",
            where=reason or f"the smallest has more than {_MOST_PARAMETERS:,} parameters",
            fix="leave PYTHONOPTIMIZE and -OO away: transformers reads docstrings, which they remove"
            if sys.flags.optimize > 1
            else "use a decoder-only language model of transformers",
        )

    def _learn_alone(self, tiny: Any) -> _Alone:
        """What each document gives alone, by the model's own attention and logits."""
        model = build_tiny(tiny, "eager", trust_remote_code=self._trust)
        loss = _loss_alone(model, self._documents)
        return _Alone(model.state_dict(), float(loss.detach()), _gradients(model, loss))

    def _try(self, layout: LayOut, alone: _Alone) -> LayoutTrial:
        try:
            model = self._build(layout)
            model.load_state_dict(alone.weights)
        except _BREAKS as error:
            return LayoutTrial(math.inf, why=f"its attention takes no other implementation ({_why(error)})")
        batch = (_pack if layout == "packed" else _pad)(self._documents)
        trials = []
        for own_logits in (False, True):
            trials.append(_measure(LossModel(model, own_logits=own_logits), batch, own_logits, alone))
            if trials[-1].is_exact:
                if layout == "packed":
                    self._shared = _try_sharing(model, batch, own_logits, alone)
                return trials[-1]
        best = min(trials, key=lambda one: one.error)
        return best if best.why else LayoutTrial(best.error, best.own_logits, _REASONS[layout])


def check_architecture(folder: Path, *, trust_remote_code: bool = False) -> SelfTest:
    """The self-test of the model in `folder`; of one process's runs with the same config it is the same."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the config of the model in {folder} could not be read: {_why(error)}") from error
    key = f"{type(config).__module__} {config.to_json_string(use_diff=False)}"
    if key not in KNOWN:
        KNOWN[key] = SelfTest(config, trust_remote_code=trust_remote_code)
    return KNOWN[key]


KNOWN: dict[str, SelfTest] = {}


def _draw_documents() -> list[torch.Tensor]:
    """They begin alike, so that this may be computed once."""
    numbers = torch.Generator().manual_seed(2)
    documents = [torch.randint(SPECIAL, VOCABULARY, (length,), generator=numbers) for length in _LENGTHS]
    documents[1][:_ALIKE] = documents[0][:_ALIKE]
    return documents


def _loss_alone(model: torch.nn.Module, documents: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    with torch.enable_grad():
        for document in documents:
            logits = model(input_ids=document[None], use_cache=False).logits
            total = total + F.cross_entropy(logits[0, :-1].float(), document[1:], reduction="sum")
    return total


def _try_sharing(model: torch.nn.Module, batch: dict[str, torch.Tensor], own_logits: bool, alone: _Alone) -> str:
    ids, whole = batch["input_ids"], LossModel(model, own_logits=own_logits).eval()  # nothing is dropped
    whole.no_sharing = ""
    trial = _measure(
        whole, {**batch, "boundaries": Documents.of(batch["boundaries"], ids.device, ids)}, own_logits, alone
    )
    if trial.is_exact and whole.num_shared:
        return ""
    return f"its layers look at more than the keys of a document ({trial.sentence()})"


def _measure(model: LossModel, batch: dict[str, Any], own_logits: bool, alone: _Alone) -> LayoutTrial:
    try:
        with torch.enable_grad():
            loss, _ = model(**batch)
        gradients = _gradients(model.lm, loss)
    except _BREAKS as error:
        return LayoutTrial(math.inf, own_logits, _why(error))
    off = max(abs(float(loss.detach()) / alone.loss - 1), _distance(gradients, alone.gradients))
    return LayoutTrial(off if math.isfinite(off) else math.inf, own_logits)


def _measure_stages(model: torch.nn.Module, batch: dict[str, torch.Tensor], alone: _Alone) -> LayoutTrial:
    """Two stages that one rank has."""
    trials = []
    whole = LossModel(model)
    whole.stages = cut_model(model, 0, 1, 2)
    for own_logits in (False, True):
        whole.has_plain_head = whole.has_plain_head and not own_logits
        with torch.enable_grad():
            hidden, _ = whole(**batch, stage=0)
            loss, _ = whole(**batch, hidden=hidden, stage=1)
        gradients = _gradients(model, loss)
        off = max(abs(float(loss.detach()) / alone.loss - 1), _distance(gradients, alone.gradients))
        trials.append(LayoutTrial(off if math.isfinite(off) else math.inf, own_logits))
    return min(trials, key=lambda one: one.error)


def _labels(document: torch.Tensor) -> torch.Tensor:
    return F.pad(document[1:], (0, 1), value=IGNORED)


def _pack(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    edges = [0]
    for document in documents:
        edges.append(edges[-1] + len(document))
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat([_labels(document) for document in documents])[None],
        "position_ids": torch.cat([torch.arange(len(document)) for document in documents])[None],
        "boundaries": torch.tensor(edges, dtype=torch.int32),
    }


def _pad(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    def fill(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = fill(documents, SPECIAL)
    labels = fill([_labels(document) for document in documents], IGNORED)
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def _distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to the wanted ones; one that is missing counts as zero."""
    zero = torch.zeros(())
    apart = [(found.get(name, zero) - wanted.get(name, zero)).norm() for name in found.keys() | wanted.keys()]
    size = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    return float(torch.stack(apart).norm() / size)


def _why(error: BaseException) -> str:
    """What code of a model ended with. What the system refused says nothing about the model, and goes on upwards."""
    if (refused := refused_by_system(error)) is not None:
        raise refused from error
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
