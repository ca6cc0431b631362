"""Contradictions between an expert axis and other settings. A part of the table in rules.py, which evaluates it."""

from __future__ import annotations

from duoka.config.rule import Rule
from duoka.config.rules_parallel import ddp_settings
from duoka.config.schema import RunConfig


def _shares_experts(c: RunConfig) -> bool:
    return c.parallel.expert > 1


EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        "expert-with-one-process",
        ("parallel.strategy", "parallel.expert"),
        lambda c: _shares_experts(c) and c.parallel.strategy in ("single", "dp"),
        "parallel.strategy is {c.parallel.strategy}, which is one process, and parallel.expert is {c.parallel.expert}",
        "write:   strategy: fsdp",
    ),
    Rule(
        "expert-with-ddp",
        ("parallel.strategy", "parallel.expert"),
        lambda c: _shares_experts(c) and c.parallel.strategy == "ddp",
        "parallel.strategy is ddp, which has the whole model on every rank, and parallel.expert {c.parallel.expert} "
        "shares experts out",
        "write:   strategy: zero1   (gradients of all else are added once a step too), or   strategy: fsdp",
    ),
    Rule(
        "expert-with-ddp-settings",
        ("parallel.expert",),
        lambda c: _shares_experts(c) and c.parallel.strategy == "auto" and bool(ddp_settings(c)),
        "parallel.expert is {c.parallel.expert}, which ddp does not know, and other keys of parallel: are ddp's only",
        "delete bucket_mb, bucket_view, static_graph, find_unused_parameters and compress, or expert",
    ),
    Rule(
        "expert-with-late-gradients",
        ("parallel.schedule", "parallel.expert"),
        lambda c: _shares_experts(c) and c.parallel.pipeline > 1 and c.parallel.schedule not in ("1f1b", "gpipe"),
        "parallel.schedule is {c.parallel.schedule}, whose ranks add whole gradients at its end, and parallel.expert "
        "{c.parallel.expert} goes with strategies that share state",
        "write:   schedule: 1f1b   or delete expert",
    ),
    Rule(
        "expert-with-compress",
        ("parallel.expert", "parallel.compress"),
        lambda c: _shares_experts(c) and c.parallel.compression.changes_anything,
        "parallel.compress is {c.parallel.compress}, and experts' gradients, which parallel.expert "
        "{c.parallel.expert} adds up by itself, travel as they are",
        "delete compress, or expert",
    ),
    Rule(
        "expert-with-optimizer",
        ("optim.name", "parallel.expert"),
        lambda c: _shares_experts(c) and c.optim.name != "adamw",
        "optim.name is {c.optim.name}, and experts that parallel.expert {c.parallel.expert} shares out learn by adamw",
        "write:   name: adamw   or delete expert",
    ),
    Rule(
        "expert-with-adapted-experts",
        ("lora.targets", "parallel.expert"),
        lambda c: _shares_experts(c) and c.lora is not None and c.lora.targets == "all",
        "lora.targets is all, which takes in experts, and parallel.expert {c.parallel.expert} shares these out: their "
        "adapters would stay whole",
        "write:   targets: [q_proj, k_proj, v_proj, o_proj]   or delete expert",
    ),
    Rule(
        "expert-with-packed-weights",
        ("model.quantization", "parallel.expert"),
        lambda c: _shares_experts(c) and c.model.quantization != "none",
        "model.quantization is {c.model.quantization}, whose packed blocks cannot be cut, and parallel.expert is "
        "{c.parallel.expert}",
        "write:   quantization: none   or delete expert",
    ),
    Rule(
        "expert-with-compile",
        ("train.compile", "parallel.expert"),
        lambda c: _shares_experts(c) and bool(c.train.compile),
        "train.compile is on, and parallel.expert {c.parallel.expert} exchanges in the middle of each layer, where "
        "compiled code would be cut",
        "write:   compile: false",
    ),
    Rule(
        "expert-with-offload",
        ("parallel.offload", "parallel.expert"),
        lambda c: _shares_experts(c) and c.parallel.offloads.moves_anything,
        "parallel.offload is {c.parallel.offload}, and experts that parallel.expert {c.parallel.expert} shares out "
        "stay where they compute",
        "write:   offload: none   or delete expert",
    ),
)
