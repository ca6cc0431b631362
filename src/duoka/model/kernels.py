"""The kernels' table (plan/kernels.py) for a model as it stands on its device: what is there is looked at, not guessed.

`agree_on_kernels` comes before there are layers, `look` after they were replaced; all ranks call both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from duoka.config.schema import RunConfig
from duoka.model import gpu_kernels, native
from duoka.model.attention import NAME, Case, why_no_kernel
from duoka.model.build import LossModel, find_core, named_part
from duoka.model.chunks import STRAIGHT
from duoka.model.dtypes import BY_PRECISION
from duoka.model.fused import GATED_BY, JOINED, fused_parts
from duoka.model.layers import Absent
from duoka.model.one_document import has_flash
from duoka.model.onednn_products import use_onednn
from duoka.plan.kernels import BENT, LIGER_PARTS, TRITON_PARTS, USUAL, Facts, why_no_plain_loss
from duoka.plan.layout import Layout
from duoka.plan.prefixes import may_share
from duoka.plan.shape import ModelShape


def agree_on_kernels(
    layout: Layout, shape: ModelShape, device: torch.device, gather: Callable[[Any], list[Any]]
) -> None:
    """Try what this device may use, and use what all ranks have: copies of a weight learn the same bits.

    `gather` gives what every rank said.
    """
    if device.type == "cuda":
        has_flash(device)
        sizes = gpu_kernels.Sizes(
            shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size,
            shape.vocab_size,
        )  # fmt: skip
        parts: tuple[gpu_kernels.Part, ...] = ("loss",) if layout.compile else gpu_kernels.PARTS
        gpu_kernels.try_all(device, BY_PRECISION[layout.precision], sizes, parts)
        for others in gather(dict(gpu_kernels.why_not())):
            gpu_kernels.leave(part for part, why in others.items() if why)
    else:
        native.use_at_most(min(gather(native.level())))


def look(bare: Any, config: RunConfig, layout: Layout, device: torch.device) -> Facts:
    """What the table asks of a model whose parts were replaced where they could be."""
    fused = fused_parts(named_part(bare))
    gates = sorted(part for part in fused if GATED_BY in part)
    facts = Facts(
        device=device.type,
        precision=layout.precision,
        packing=layout.packing,
        compiles=bool(layout.compile),
        keeps_products=layout.recompute == "selective",
        attention_as_written=find_core(bare).config._attn_implementation != NAME,  # type: ignore[union-attr]
        has=fused & USUAL | ({"MLP"} if gates else set()),
        gate=gates[0].partition(GATED_BY)[2] if gates else "silu",
        joined_gate=bool(gates) and gates[0].startswith(JOINED),
        adapters=config.lora is not None,
        adapters_beside_others="adapters" not in fused,
        drops=config.lora is not None and config.lora.dropout > 0,
        shares=layout.packing and may_share(config),
        no_sharing=getattr(bare, "no_sharing", ""),
        own_logits=isinstance(bare, LossModel) and not bare.has_plain_head,
        no_plain_loss=why_no_plain_loss(config) or _why_no_plain_head(bare, layout),
    )
    if device.type == "cuda":
        why = {str(part): why for part, why in gpu_kernels.why_not().items()}
        launch = why_no_launch(find_core(bare), layout, device)
        liger, own = ({part: why[part] for part in parts} for parts in (LIGER_PARTS, TRITON_PARTS))
        return replace(facts, no_documents=launch, no_liger=liger, no_triton=own)
    by_onednn = layout.precision == "fp32" and use_onednn()
    return replace(facts, no_native=native.why_not(), by_onednn=by_onednn)


def _why_no_plain_head(bare: Any, layout: Layout) -> str:
    """What stands between hidden states and the loss beside one product."""
    if layout.tp > 1:
        return "a tensor axis shares the vocabulary"
    if not isinstance(bare, LossModel) or not bare.has_plain_head:
        return ""
    core: Any = bare.core
    head = core.get_output_embeddings()
    if isinstance(head, Absent):  # another stage of the pipeline has it
        return ""
    if hasattr(head, "base_layer") or head.bias is not None:
        return "the head has a bias, or an adapter"
    return "" if bare.bend == STRAIGHT else BENT


def settle_sharing(bare: Any, layout: Layout, device: torch.device) -> None:
    """Where one launch serves packed rows, but none whose documents share keys, each is computed whole: a call per
    document costs more than its prefix. Tried here, before layers run."""
    if device.type == "cuda" and isinstance(bare, LossModel) and not bare.no_sharing:
        core = find_core(bare)
        bare.no_sharing = "" if why_no_launch(core, layout, device) else why_no_launch(core, layout, device, "prefixes")


def why_no_launch(core: Any, layout: Layout, device: torch.device, case: Case = "plain") -> str:
    """Why packed rows take one call per document; "": one launch serves all of them. Tried here, before layers run.

    `case`: what else it is to serve (why_no_kernel).
    """
    if not layout.packing:
        return ""
    if device.type != "cuda":
        return "a CPU computes attention a document at a time"
    config = core.config.get_text_config()
    heads, dim = getattr(config, "num_attention_heads", 0), getattr(config, "head_dim", None)
    if not heads:
        return "the model has no attention"
    dim = dim or config.hidden_size // heads
    return _why_written_out(core, config) or why_no_kernel(device, BY_PRECISION[layout.precision], dim, case)


def _why_written_out(core: torch.nn.Module, config: Any) -> str:
    """What of the model's attention no kernel of torch knows."""
    if getattr(config, "attention_dropout", 0.0):
        return "the model drops attention weights"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "the model caps its scores (softcap)"
    has_sinks = any(isinstance(getattr(one, "sinks", None), torch.Tensor) for one in core.modules())
    return "the model has attention sinks" if has_sinks else ""
