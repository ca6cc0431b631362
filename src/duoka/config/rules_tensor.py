"""Contradictions between a tensor axis and other settings. A part of the table in rules.py, which evaluates it."""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.rules_parallel import ddp_settings
from duoka.config.schema import RunConfig

# Optimizers whose update of a weight asks for whole rows, columns or blocks of it.
_ASKS_FOR_WHOLE = ("muon", "adamw8bit", "adafactor")


def _is_cut(c: RunConfig) -> bool:
    return c.parallel.tensor > 1


TENSOR_RULES: tuple[Rule, ...] = (
    Rule(
        "tensor-with-one-process",
        ("parallel.strategy", "parallel.tensor"),
        lambda c: _is_cut(c) and c.parallel.strategy in ("single", "dp"),
        "parallel.strategy is {c.parallel.strategy}, which is one process, and parallel.tensor is {c.parallel.tensor}",
        "write:   strategy: auto",
    ),
    Rule(
        "tensor-with-ddp",
        ("parallel.strategy", "parallel.tensor"),
        lambda c: _is_cut(c) and c.parallel.strategy == "ddp" and c.parallel.engine == "native",
        "parallel.strategy is ddp, which adds up gradients of whole tensors, and parallel.tensor "
        "{c.parallel.tensor} cuts them",
        "write:   strategy: zero1   (gradients are added once a step too, and optimizer state is shared)",
    ),
    Rule(
        "tensor-with-ddp-settings",
        ("parallel.tensor",),
        lambda c: _is_cut(c) and c.parallel.strategy == "auto" and bool(ddp_settings(c)),
        "parallel.tensor is {c.parallel.tensor}, which ddp does not know, and other keys of parallel: are ddp's only",
        "delete bucket_mb, bucket_view, static_graph, find_unused_parameters and compress, or tensor",
    ),
    Rule(
        "tensor-with-optimizer-of-whole-matrices",
        ("optim.name", "parallel.tensor"),
        lambda c: _is_cut(c) and c.optim.name in _ASKS_FOR_WHOLE,
        "optim.name is {c.optim.name}, which looks at whole matrices, and parallel.tensor is {c.parallel.tensor}",
        "write:   name: adamw   or delete tensor: (strategy fsdp shares weights for muon too; the others are for ddp)",
    ),
    Rule(
        "tensor-with-packed-weights",
        ("model.quantization", "parallel.tensor"),
        lambda c: _is_cut(c) and c.model.quantization != "none",
        "model.quantization is {c.model.quantization}, whose packed blocks cannot be cut, and parallel.tensor is "
        "{c.parallel.tensor}",
        "write:   quantization: none   or delete tensor:",
    ),
    Rule(
        "tensor-with-compile",
        ("train.compile", "parallel.tensor"),
        lambda c: _is_cut(c) and bool(c.train.compile),
        "train.compile is on, and parallel.tensor {c.parallel.tensor} exchanges in the middle of each layer, where "
        "compiled code would be cut",
        "write:   compile: false",
    ),
    Rule(
        "tensor-with-offloaded-params",
        ("parallel.offload", "parallel.tensor"),
        lambda c: _is_cut(c) and c.parallel.offloads.params != "none",
        "parallel.offload is params, and parallel.tensor {c.parallel.tensor} cuts weights where they compute",
        "write:   offload: optimizer   or delete tensor:",
    ),
)
