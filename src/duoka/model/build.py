"""From a folder to a module that answers a batch with its summed loss.

transformers builds the model on the meta device and fills it from safetensors; adapters come through PEFT.
`LossModel` is what gets parallelized and trained: its forward is the only one that training calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from duoka.config.adapters import read_held
from duoka.errors import ConfigError
from duoka.hub.new_model import is_new
from duoka.model.adapters import Earlier, refuse_unread
from duoka.model.attention import SequenceExchange, register_attention
from duoka.model.cached import look_further
from duoka.model.chunks import Places
from duoka.model.documents import Documents, reading
from duoka.model.drawing import check_harmless, has_drawn, read_generators
from duoka.model.dropout import count_dropout
from duoka.model.expert_adapters import adapt_rows
from duoka.model.experts import use_own_experts
from duoka.model.freeze import apply_train_only, freeze_beside_text
from duoka.model.head import (
    apply_head,
    apply_head_to_logps,
    is_readable,
    logps_from_logits,
    loss_from_logits,
    read_bend,
)
from duoka.model.layers import unrecorded
from duoka.model.logps import More
from duoka.model.lora import apply_lora, keep_earlier, quiet_adapters, without_packer
from duoka.model.loss import LIKELIHOOD, Goal
from duoka.model.own_lengths import use_own_lengths
from duoka.model.own_states import keep_states_apart
from duoka.model.pipeline_stages import PipelineStages
from duoka.model.prefixes import ShortRow
from duoka.model.quantize import Quantization, compute_in, options_to_learn_beside
from duoka.model.random_init import random_weights
from duoka.model.reading import read_adapted, read_model
from duoka.model.request import ModelRequest
from duoka.model.steady import Steady
from duoka.model.wide_products import widen_products

GATHERED_HEAD = "apply_gathered"
# What a LossModel is asked for: the sum of its targets' losses, or numbers of each target; of a pipeline's stage before
# the last, it answers with hidden states whatever it is asked. `scores`: of a ScoreModel (model/scores.py); `values`:
# of a ValueModel (model/value_head.py).
Answer = Literal["loss", "logps", "entropy", "likeliest", "scores", "values"]


def _is_news(record: logging.LogRecord) -> bool:
    """transformers misses an attention mask in rows that need none: padding stands behind a row's tokens, where none of
    them looks, and documents of a packed row are kept apart by their edges. And packages of CUDA kernels where there is
    no GPU for them."""
    said = str(record.msg)
    if "is falling back to its reference PyTorch implementation" in said:
        return torch.cuda.is_available()
    return not said.startswith("We strongly recommend passing in an `attention_mask`")


for _name in ("transformers.modeling_utils", "transformers.integrations.hub_kernels"):
    logging.getLogger(_name).addFilter(_is_news)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """transformers draws progress bars and notes on every rank; ours are printed once, by rank 0."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # transformers and PEFT warn of each other's old names; no user can do anything about it.
            warnings.simplefilter("ignore", FutureWarning)
            # Of an adapter on a tied head: export.py gives the head weights of its own before it merges.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)


def load_model(request: ModelRequest) -> torch.nn.Module:
    """The transformers model that is asked for, whole."""
    folder, dtype = request.folder, request.dtype
    if request.attention == "duoka":
        register_attention()
    if dtype is torch.bfloat16:
        widen_products()
    if is_new(folder):
        return _draw_model(request)
    packing = request.packing or Quantization.in_files(folder)
    with quiet_loading():
        model = read_model(
            folder,
            scores=request.scores,
            attn_implementation=request.named_attention,
            trust_remote_code=request.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            **({"dtype": dtype} if packing is None else packing.options(folder, dtype)),
            **(options_to_learn_beside(folder) if request.trains and packing is None else {}),
        )
        if packing is not None:
            compute_in(model, dtype, packing)
        if request.has_own_experts:
            use_own_experts(model)
        if request.earlier is not None:
            request.earlier.merge_into(model)
        freeze_beside_text(model)
        if request.train_only is not None:
            apply_train_only(model, request.train_only)
        if request.lora is None:
            return model
        return apply_lora(model, request.lora, request.seed, request.earlier, scores=request.scores)


def _draw_model(request: ModelRequest) -> torch.nn.Module:
    """A new model, from the seed; what shards of it begin with is the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(request.folder, local_files_only=True)
    with quiet_loading():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=request.dtype, attn_implementation=request.named_attention
        )
    drawn = random_weights(request.folder, config, request.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn.read(name, parameter.shape))
    return model


def load_adapter(base: torch.nn.Module, folder: Path, earlier: Earlier | None = None) -> torch.nn.Module:
    """`base` with the trained adapter of a PEFT folder; weights come from safetensors only.

    `earlier`: what was merged into the base, so that the adapter is written with it again.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no adapter (adapter_model.safetensors)")
    refuse_unread(folder)
    with quiet_loading(), quiet_adapters(), without_packer():
        adapted = read_adapted(base, folder)
    adapt_rows(adapted)
    keep_earlier(adapted, earlier, read_held(folder))
    return adapted


def named_part(model: torch.nn.Module) -> torch.nn.Module:
    """The part whose names checkpoints use: the language model inside a LossModel, any other model as it is."""
    return model.lm if isinstance(model, LossModel) else model


def named_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter by the name that checkpoints use: of the language model, and what a LossModel has beside it."""
    inside = isinstance(model, LossModel)
    return {name.removeprefix("lm.") if inside else name: p for name, p in model.named_parameters()}


def find_core(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, inside adapters and a LossModel when there are any."""
    lm = named_part(model)
    peft_base = getattr(lm, "get_base_model", None)
    return peft_base() if callable(peft_base) else lm


def use_head(head: torch.nn.Module, read: Callable[..., Any], *how: Any) -> Any:
    """`read` a head's weights: as a method of a sharded head, with these gathered."""
    return read(head, *how)


class LossModel(torch.nn.Module):
    """A causal language model that answers a micro-batch with the sum of its target tokens' losses, or each one's.

    Stages compute their losses from these answers: a wrapper (DDP, FSDP) must see the call that has gradients.

    `own_logits`: from the model's own logits, because its head is more than a matrix product (see exactness.py).
    Cut into `stages`, it computes one of them at a time, from token ids in the first, from `hidden` states in others.
    """

    stages: PipelineStages | None = None
    steady: Steady | None = None  # where layers are compiled for rows of one length
    no_sharing = "nobody allowed it"  # why documents' common prefixes are computed in each; "": once (prefixes.py)
    num_shared = 0  # tokens of passes with gradients that were left out so

    def __init__(self, lm: torch.nn.Module, goal: Goal = LIKELIHOOD, *, own_logits: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.goal = goal
        self.drops = count_dropout(lm)
        use_own_lengths(lm)
        keep_states_apart(lm, self.drops)
        self.may_draw = False  # what it draws was looked at, and changes nothing
        core: Any = self.core
        find_head = getattr(core, "get_output_embeddings", None)
        self.has_plain_head = not own_logits and find_head is not None and is_readable(find_head())
        if self.has_plain_head:
            self.bend = read_bend(core.config.get_text_config())

    def forward(
        self,
        input_ids: torch.Tensor,  # (rows, tokens)
        labels: torch.Tensor,  # (rows, tokens), already shifted
        position_ids: torch.Tensor,  # (rows, tokens)
        boundaries: torch.Tensor | Documents | None = None,
        token_keys: torch.Tensor | None = None,  # (rows, tokens), what dropout is counted from
        places: Places | None = None,  # of the targets among all tokens, where they are known already
        answer: Answer = "loss",
        hidden: torch.Tensor | None = None,  # (rows, tokens, dim), as the stage before this one left them
        stage: int | None = None,
        temperature: float = 1.0,  # of log-probabilities
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`loss`: (summed loss, correct target tokens); the second is counted in eval mode only.

        `logps`, `entropy`, `likeliest`: (log p of each target, None or the entropy there or 1 where it is likeliest),
        shaped as the labels, 0 elsewhere.
        Of a `stage` before the last: (hidden states, None).
        """
        short = self._shorten(boundaries)
        if short is not None:
            row, boundaries = short
            input_ids, position_ids = input_ids[:, row.kept], position_ids[:, row.kept]
            places = (places or Places.of(labels)).in_short_row(row.keys.places)
            token_keys = None if token_keys is None else token_keys[:, row.kept]
        entry = input_ids if hidden is None else hidden
        boundaries = None if boundaries is None else Documents.of(boundaries, entry.device)
        if boundaries is not None and self.steady is not None:
            boundaries = self.steady.documents(boundaries)
        inputs = (entry, labels, position_ids, boundaries, places, answer, temperature)

        @reading(boundaries)
        def compute() -> tuple[torch.Tensor, torch.Tensor | None]:
            if self.steady is not None:
                with self.steady.passing():
                    return self._answer(*inputs)
            if self.stages is None or stage is None:
                return self._answer(*inputs)
            with self.stages.shown(stage):
                return self._answer(*inputs, hands_on=not self.stages.is_last(stage))

        if token_keys is None or not self.training:
            return compute()
        keys = token_keys

        def count() -> tuple[torch.Tensor, torch.Tensor | None]:
            with contextlib.nullcontext() if self.drops is None else self.drops.counting(keys):
                return compute()

        if self.may_draw:
            return count()
        before = read_generators(input_ids.device)
        found = count()
        if has_drawn(before, input_ids.device):
            check_harmless(lambda: count()[0], input_ids.device)
            self.may_draw = True
        return found

    def _answer(
        self,
        entry: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        boundaries: Documents | None,
        places: Places | None,
        answer: Answer,
        temperature: float = 1.0,
        hands_on: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`entry`: token ids, or hidden states."""
        more: More = answer if answer == "entropy" or answer == "likeliest" else ""
        core: Any = self.core
        options: dict[str, Any] = {"use_cache": False, "position_ids": position_ids, **unrecorded(core)}
        options["inputs_embeds" if entry.is_floating_point() else "input_ids"] = entry
        if boundaries is not None:
            # By the names of transformers too: layers that are no attention read where documents begin.
            options.update(documents=boundaries, cu_seq_lens_q=boundaries.edges, cu_seq_lens_k=boundaries.edges)
        if hands_on:
            return core.get_decoder()(**options).last_hidden_state, None
        if not self.has_plain_head:
            logits = core(**options).logits
            if answer != "loss":
                return logps_from_logits(logits / temperature, labels, places, more)
            return loss_from_logits(logits, labels, places, self.goal, self.training)
        hidden = core.get_decoder()(**options).last_hidden_state  # (rows, tokens, dim)
        head = core.get_output_embeddings()
        # A head that is sharded by itself has a form of these that gathers its weight around the call.
        use: Any = getattr(head, GATHERED_HEAD, None) or functools.partial(use_head, head)
        if answer != "loss":
            bend = self.bend.over(temperature)
            return use(apply_head_to_logps, hidden, labels, places, bend, more)  # type: ignore[no-any-return]
        return use(apply_head, hidden, labels, places, self.bend, self.goal)  # type: ignore[no-any-return]

    def _shorten(self, boundaries: torch.Tensor | Documents | None) -> tuple[ShortRow, Documents] | None:
        """The row that is computed in this pass in place of a whole one; None where that is the whole row."""
        is_dropping = self.training and self.drops is not None
        if self.no_sharing or is_dropping or not isinstance(boundaries, Documents):
            return None
        short = boundaries.shortened()
        if short is not None and torch.is_grad_enabled():
            row = short[0]
            self.num_shared += len(row.keys.places) - len(row.kept)
        return short

    def next_token(self, input_ids: torch.Tensor, hidden: torch.Tensor | None = None) -> int:
        """The likeliest token after one row (1, tokens); the last stage of a pipeline takes `hidden` states of it.

        Under FSDP all ranks call it: weights are gathered for it.
        """
        with self.on_whole_rows():
            return self._next_token(input_ids, hidden)

    def on_whole_rows(self) -> contextlib.AbstractContextManager[None]:
        """Around passes whose rows are not cut over ranks, where those of training are."""
        exchange: SequenceExchange | None = getattr(self, "sequence_exchange", None)
        return contextlib.nullcontext() if exchange is None else exchange.paused()

    def _next_token(self, input_ids: torch.Tensor, hidden: torch.Tensor | None) -> int:
        core: Any = self.core
        length = input_ids.shape[1]
        entry = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        options: dict[str, Any] = {**entry, "use_cache": False, **unrecorded(core)}
        options["position_ids"] = torch.arange(length, device=input_ids.device)[None]
        with contextlib.nullcontext() if self.stages is None else self.stages.shown(self.stages.num_stages - 1):
            if not self.has_plain_head:
                return int(core(**options).logits[0, -1].argmax())
            documents = Documents.of(torch.tensor([0, length]), input_ids.device)
            options.update(documents=documents, cu_seq_lens_q=documents.edges, cu_seq_lens_k=documents.edges)
            with reading(documents):
                states = core.get_decoder()(**options).last_hidden_state
        return int(core.get_output_embeddings()(states[:, -1:])[0, -1].argmax())  # (1, 1, vocab)

    def continue_from(self, input_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """(logits of the next token (rows, vocab), cache) after these tokens and those in the cache, None at first.

        Under FSDP all ranks call it, as next_token.
        """
        return look_further(self.core, input_ids, cache)

    def look_at_slots(self, input_ids: torch.Tensor, position_ids: torch.Tensor, slots: Any) -> torch.Tensor:
        """Logits after the last token of each row (rows, vocab), over `slots` of their own (slots.py).

        Under FSDP all ranks call it, as next_token.
        """
        core: Any = self.core
        options: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1, **unrecorded(core)}
        output = core(input_ids=input_ids, position_ids=position_ids, slots=slots, **options)
        return output.logits[:, -1]  # type: ignore[no-any-return]

    @property
    def core(self) -> torch.nn.Module:
        """The transformers model, inside its adapters when there are any."""
        return find_core(self)
