"""Our attention, registered into transformers under the name `duoka`: exact, causal, documents isolated, no dense mask.

Packed rows carry their `Documents` through the model's keyword arguments, measured once per micro-batch; each document
attends to itself alone. Padded rows need no mask: padding stands to the right, where causal attention never looks.
On CUDA in half precision all documents go in one launch. For training only: it knows no key-value cache.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

from duoka.model import compiled_attention
from duoka.model.documents import Documents, documents_read
from duoka.model.dtypes import computed_in
from duoka.model.one_document import (
    UNSAID,
    Scoring,
    apart_from_others,
    attend_document,
    attend_stretch,
    fill_heads,
    find_window,
    share_keys,
)
from duoka.model.prefixes import take_keys

NAME = "duoka"
_HALF = (torch.float16, torch.bfloat16)


class SequenceExchange(Protocol):
    """How ranks that each have a stretch of every row attend to whole rows: parallel/sequence.py puts it on modules."""

    is_on: bool
    rank: int
    size: int

    def paused(self) -> AbstractContextManager[None]:
        """Around passes over rows that this rank has whole."""
        ...

    def deals_heads(self, num_heads: int) -> bool:
        """Whether each rank computes some heads of whole rows; else all heads of its stretch, and gathers keys."""
        ...

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor: ...

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gather_keys(self, token_keys: torch.Tensor) -> torch.Tensor: ...


def register_attention() -> str:
    """Make `attn_implementation="duoka"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    # No mask is registered beside it: transformers makes none then, and does not look on the device whether positions
    # begin again, which every forward pass would wait for.
    AttentionInterface.register(NAME, attend)
    return NAME


@contextlib.contextmanager
def with_documents(lm: torch.nn.Module) -> Iterator[None]:
    """Attention that knows documents of a packed row, in place of a model's own meanwhile."""
    core: Any = lm
    before = core.config._attn_implementation
    if before == NAME:
        yield
        return
    core.set_attn_implementation(register_attention())
    try:
        yield
    finally:
        core.set_attn_implementation(before)


def register_blind_attention() -> str:
    """A name for an attention in which each token sees itself alone: what differs then is mixed by other layers."""
    from transformers import AttentionInterface

    def see_itself(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None

    name = f"{NAME}_blind"
    AttentionInterface.register(name, see_itself)
    return name


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # (rows, heads, tokens, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    documents: Documents | None = None,
    sliding_window: int | None = UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; returns (rows, tokens, heads, head_dim). `s_aux`: a sink of each head.

    Of a row whose `documents` nobody measured, they are told by `cu_seq_lens_q`, as other attentions take them. Layers
    that hand on neither (StableLM, Nemotron) are those of the pass that is going on.
    """
    if documents is None and cu_seq_lens_q is not None:
        documents = Documents.of(cu_seq_lens_q, query.device)
    exchange: SequenceExchange | None = getattr(module, "sequence_exchange", None)
    if documents is None:
        ranks = exchange.size if exchange is not None and exchange.is_on else 1
        documents = documents_read(query.shape[0], query.shape[2], ranks)
    if documents is not None and documents.keys is not None:
        key, value = (take_keys(states.to(computed_in(states)), documents.keys.uses) for states in (key, value))
    elif query.shape[2] != key.shape[2]:
        raise RuntimeError("duoka's attention is for training; load the model with attention='sdpa' to generate")
    how = Scoring(scaling, find_window(module, sliding_window), softcap, sinks=s_aux)
    if exchange is not None and exchange.is_on:
        return _attend_together(module, exchange, query, key, value, documents, how, dropout), None
    value = apart_from_others(value, query)
    if getattr(module, compiled_attention.ALLOWED, False) and not dropout:
        own = compiled_attention.attend_compiled(query, key, value, documents, how)
        if own is not None:
            return own, None
    if dropout:
        how = replace(how, drop=_find_drop(module, query.device, dropout))
    return _attend_rows(query, key, value, documents, how), None


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | None, how: Scoring
) -> torch.Tensor:
    """Of whole rows: (rows, tokens, heads, head_dim)."""
    if documents is None:
        return attend_document(query, key, value, how).transpose(1, 2)
    if has_kernel_for(query, how, documents):
        return attend_all_documents(query, key, value, documents, how.scaling, how.window)
    if torch.compiler.is_compiling() and query.device.type == "cpu":
        uncompiled: torch.Tensor = _attend_apart_uncompiled(query, key, value, documents, how)
        return uncompiled
    return _attend_apart(query, key, value, documents, how)


def _attend_apart(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, how: Scoring
) -> torch.Tensor:
    """One call per document: a quadratic cost of each document's length instead of the whole row's."""
    if not how.is_written_out:
        key, value = share_keys(query, key, value)
    # Split, not sliced: the gradient of a slice is as large as the row.
    lengths = documents.lengths.tolist()
    held = lengths if documents.keys is None else documents.keys.lengths.tolist()
    apart = zip(query.split(lengths, dim=2), key.split(held, dim=2), value.split(held, dim=2), strict=True)
    if how.drop is None:
        before = (all_keys - own for all_keys, own in zip(held, lengths, strict=True))
        attended = (attend_document(*one, how, 0, ahead) for one, ahead in zip(apart, before, strict=True))
        return torch.cat(tuple(part.transpose(1, 2) for part in attended), dim=1)
    starts = itertools.accumulate(lengths, initial=0)
    parts = [attend_document(*one, how, start).transpose(1, 2) for one, start in zip(apart, starts, strict=False)]
    return torch.cat(parts, dim=1)


# A compiler is shown no loop over documents: it asks for their number, which ends its graph, and then makes the body
# anew for lengths of 1 and more, with a window and without, until torch's limit of 8 is reached. A CPU gains nothing.
_attend_apart_uncompiled = torch.compiler.disable(_attend_apart)


def _attend_together(
    module: torch.nn.Module,
    exchange: SequenceExchange,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | None,
    how: Scoring,
    dropout: float,
) -> torch.Tensor:
    """Of the stretch of each row that this rank has, among ranks that have the others; `documents` are whole rows'."""
    # What is exchanged is as narrow as what attention computes in.
    query, key, value = (tensor.to(computed_in(tensor)) for tensor in (query, key, value))
    num_heads, tokens = query.shape[1:3]
    deals = exchange.deals_heads(num_heads)
    first_head = exchange.rank * num_heads // exchange.size if deals else 0
    if dropout:
        drop = _find_drop(module, query.device, dropout, exchange.gather_keys, (first_head, num_heads))
        how = replace(how, drop=drop)
    if deals:
        if how.sinks is not None:
            how = replace(how, sinks=how.sinks[first_head : first_head + num_heads // exchange.size])
        return exchange.to_tokens(_attend_rows(*exchange.to_heads(query, key, value), documents, how))
    key, value = exchange.gather(key, value)
    lengths = [key.shape[2]] if documents is None else documents.lengths.tolist()
    return attend_stretch(query, key, value, exchange.rank * tokens, lengths, how).transpose(1, 2)


def _find_drop(
    module: torch.nn.Module,
    device: torch.device,
    p: float,
    whole_rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
    heads: tuple[int, int] | None = None,
) -> Callable[..., torch.Tensor]:
    """What drops a document's weights: counted where there are keys to count from, else torch's."""
    drops = getattr(module, "counted_drops", None)
    counted = None if drops is None else drops.attention(device, p, whole_rows, heads)
    if counted is not None:
        return counted  # type: ignore[no-any-return]
    return lambda weights, first_query=0, first_key=0: F.dropout(weights, p=p)


def attend_all_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """One packed row in one launch: (1, heads, tokens, head_dim) in, (1, tokens, heads, head_dim) out."""
    varlen: Any = find_varlen()
    edges, longest = documents.both_edges, documents.longest_key
    dtype = computed_in(query)
    # Squeezed, not indexed: the gradient of an index is a row of zeros that is written first.
    flat = [tensor.squeeze(0).transpose(0, 1).to(dtype).contiguous() for tensor in (query, key, value)]
    dim = value.shape[-1]
    flat[2] = fill_heads(flat[2], query.shape[-1])
    # A window counts the token itself; the kernel counts what lies before it.
    behind = -1 if window is None or window > longest else window - 1
    out: torch.Tensor = varlen(
        *flat, *edges, documents.longest, longest, scale=scaling, window_size=(behind, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out[..., :dim].unsqueeze(0)  # of (tokens, heads, dim)


VARLEN: dict[str, Any] = {}  # a table, not a cached function: of that compilers warn, and trace what it does


def find_varlen() -> Any:
    """torch's flash attention over documents of any length, where this torch has it as we call it."""
    if "kernel" not in VARLEN:
        VARLEN["kernel"] = _look_for_varlen()
    return VARLEN["kernel"]


def _look_for_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= set(known):
        return None
    if "enable_gqa" in known:
        return varlen_attn
    # torch 2.11 does not ask: its kernel shares keys among heads by itself, which the trial sees.
    return lambda *args, enable_gqa, **how: varlen_attn(*args, **how)


def kernel_packets() -> tuple[Any, ...]:
    """The kernel's operators, as a dispatch mode sees them; none where this torch has no such kernel."""
    if find_varlen() is None:
        return ()
    packet = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return () if packet is None else (packet,)


def has_kernel_for(query: torch.Tensor, how: Scoring, documents: Documents) -> bool:
    if not query.is_cuda or query.shape[0] != 1 or how.is_written_out:
        return False
    case: Case = "plain" if documents.keys is None else "prefixes"
    return not why_no_kernel(query.device, computed_in(query), query.shape[-1], case)


def why_no_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, case: Case = "plain") -> str:
    """Why a GPU takes one call per document of a packed row; "": all go in one launch, where no `Scoring` forbids it.

    `case`: "room": also with empty documents behind them; "prefixes": with keys that several share.
    """
    if find_varlen() is None:
        return "this torch has no kernel for documents of any length"
    if dtype not in _HALF:
        return f"its kernel knows bf16 and fp16, not {dtype}"
    if not kernel_works(device, dtype, head_dim):
        return f"its kernel does not answer as one call per document does, for heads of {head_dim}"
    if case == "plain" or kernel_works(device, dtype, head_dim, case):
        return ""
    return (
        f"its kernel knows no {'empty documents' if case == 'room' else 'documents that see more keys than they ask'}"
    )


Case = Literal["plain", "room", "prefixes"]
WORKS: dict[tuple[torch.device, torch.dtype, int, Case], bool] = {}


def kernel_works(device: torch.device, dtype: torch.dtype, head_dim: int, case: Case = "plain") -> bool:
    """Tried once beside one call per document: a GPU or a head size that the kernel does not serve goes without."""
    key = (device, dtype, head_dim, case)
    if key not in WORKS:  # a table, not a cached function: compiled layers read it, and would trace the other
        # In a thread of its own: what a recomputed layer records of its operations must not hold those of a trial.
        with ThreadPoolExecutor(1) as aside:
            WORKS[key] = aside.submit(_try_kernel, *key).result()
    return WORKS[key]


def _try_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, case: Case) -> bool:
    generator = torch.Generator().manual_seed(0)
    documents, tokens = Documents.of(torch.tensor([0, 7, 24]), device), 24
    if case == "room":
        documents = documents.with_room(24)
    elif case == "prefixes":  # the second document's first five tokens are the first one's
        ids = torch.tensor([[*range(7), *range(5), *range(30, 42)]])
        shortened = replace(documents, ids=ids).shortened()
        assert shortened is not None
        documents, tokens = shortened[1], 19
    shapes = ((1, 4, tokens, head_dim), (1, 2, tokens, head_dim), (1, 2, tokens, head_dim))
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    query, key, value = inputs
    try:
        with torch.enable_grad():
            if documents.keys is not None:
                key, value = (take_keys(one, documents.keys.uses) for one in (key, value))
            ours = attend_all_documents(query, key, value, documents, None, None)
            want = _attend_apart(query, key, value, documents, Scoring())
            pairs = [(ours, want)]
            pairs += zip(
                torch.autograd.grad(ours.sum(), inputs, retain_graph=True),
                torch.autograd.grad(want.sum(), inputs),
                strict=True,
            )
    except (RuntimeError, ValueError, TypeError):
        return False
    return all(torch.allclose(one.float(), two.float(), atol=0.03, rtol=0.03) for one, two in pairs)
