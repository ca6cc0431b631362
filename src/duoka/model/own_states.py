"""Layers with a state or a convolution along the row (Mamba, linear attention): each document begins with its own.

Such a layer reads a row from its beginning, and in a packed row what it holds at the end of one document would run on
into the next. So for the time of that layer documents stand in rows of their own, beside others about as long; all
other layers read the packed row. transformers keeps them apart only by kernels that few machines have. Called by
LossModel.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
from typing import Any

import torch

from duoka.model import chunk_scan, convolution, delta_rule, kimi_delta, selective_scan
from duoka.model.documents import READ, Group, OwnRows, reading
from duoka.model.dropout import Drops
from duoka.model.layers import find_layers, text_decoder
from duoka.model.rewired import rewired

_OTHERS = ("time_shift", "slope_rate", "mlstm_backend")  # RWKV's, MiniMax's and xLSTM's, which have no convolution
_ALONG_ROWS = (convolution, delta_rule, kimi_delta, chunk_scan, selective_scan)
# mamba-ssm's kernels of a whole layer, which read the weights of its products, whatever adapters stand beside them.
_WHOLE = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
_OF_PACKED_ROWS = ("documents", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def keep_states_apart(lm: torch.nn.Module, drops: Drops | None = None) -> None:
    """In place; models without such layers stay as they are. `drops`: what is dropped inside of them."""
    for module in (text_decoder(lm) or lm).modules():
        if not _runs_on(module):
            continue
        if not hasattr(module, "forward_at_once"):
            # A class, not a method of this object: replicas that torch makes of it must not call the original.
            plain: Any = type(module)
            adapted = any(hasattr(child, "lora_A") for child in module.children())
            module.__class__ = _by_document(plain, adapted)
        if drops is not None:
            module.counted_drops = drops  # type: ignore[assignment]  # no child of it


def asks_what_is_read(core: torch.nn.Module) -> bool:
    """Whether parts of it are not handed the documents by those that call them."""
    apart = any(type(module).forward is _forward for module in core.modules())
    return apart or not all(map(_hands_on, {type(layer) for layer in find_layers(core)}))


def _hands_on(layer: type) -> bool:
    """Whether its code reads the further arguments that it is given."""
    code = getattr(inspect.unwrap(layer.forward), "__code__", None)  # type: ignore[attr-defined]
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    loads = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    return any(value == name or (isinstance(value, tuple) and name in value) for value in loads)


def _runs_on(module: torch.nn.Module) -> bool:
    """Whether it reads tokens before its own by other means than attention.

    What is not found here shows when a packed row is tried (exactness.py): then rows are padded.
    """
    has_convolution = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    return has_convolution or any(hasattr(module, name) for name in _OTHERS)


def with_own_scan(forward: Any, adapted: bool = False) -> Any:
    """The forward of a layer, with our functions in place of those of transformers that go along the row."""
    for scan in _ALONG_ROWS:
        if importlib.util.find_spec(scan.KERNELS) is None:
            forward = rewired(forward, scan.NAME, scan.in_place_of) or forward
    has_none = importlib.util.find_spec("mamba_ssm") is None  # then there are none, and each call of one says so
    for name in _WHOLE if adapted or has_none else ():
        forward = rewired(forward, name, lambda theirs: lambda *_args, **_named: None) or forward
    return forward


@functools.cache
def _by_document(kind: Any, adapted: bool) -> type:
    members = {"forward": _forward, "forward_at_once": with_own_scan(kind.forward, adapted)}
    return type(f"Apart{kind.__name__}", (kind,), members)


@torch.compiler.disable  # lengths differ from row to row
def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # With a gradient somebody has to say what is read: a layer computed again without would take a row for a document.
    documents = READ.get() if torch.is_grad_enabled() else READ.get(None)
    if documents is None:
        return self.forward_at_once(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKED_ROWS}
    if len(documents.lengths) == 1:
        return self.forward_at_once(*args, **kwargs)
    own, answers = documents.own_rows, []
    drops: Drops | None = getattr(self, "counted_drops", None)
    call = 0 if drops is None else drops.call
    with reading(None):
        for group in own.groups:
            take = functools.partial(_take, group, documents.num_tokens)
            with contextlib.nullcontext() if drops is None else drops.counting_part(take, call):
                named = {name: take(one) for name, one in kwargs.items()}
                answers.append(self.forward_at_once(*map(take, args), **named))
    return _join(own, answers)


def _take(group: Group, tokens: int, value: Any) -> Any:
    """What there is for each token of the packed row, for the documents of this group."""
    if isinstance(value, tuple):
        return tuple(_take(group, tokens, one) for one in value)
    if not _is_of_row(value, 1, tokens):
        return value
    return value[0].index_select(0, group.places).view(group.num_rows, group.longest, *value.shape[2:])


def _join(own: OwnRows, answers: list[Any]) -> Any:
    """What the groups gave, as of the packed row."""
    if isinstance(answers[0], tuple):
        return tuple(_join(own, list(values)) for values in zip(*answers, strict=True))
    pairs = zip(answers, own.groups, strict=True)
    if not all(_is_of_row(value, group.num_rows, group.longest) for value, group in pairs):
        return answers[0]
    return torch.cat([value.flatten(0, 1) for value in answers]).index_select(0, own.back)[None]


def _is_of_row(value: Any, rows: int, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == (rows, tokens)
