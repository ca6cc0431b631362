"""How Megatron-LM and Colossal-AI spell what a model is cut along: what becomes of each word here.

Read by `duoka explain --tensor-model-parallel-size`, by the advice for unknown keys (foreign.py), and held against
the table in docs/parallel.md by a test.
"""

from __future__ import annotations

from typing import NamedTuple

MEGATRON, COLOSSAL = "Megatron-LM", "Colossal-AI"


class Flag(NamedTuple):
    """One word of another trainer. `key` is ours, "" where there is none; `write` its value, "": the user's own."""

    tool: str
    name: str
    key: str
    note: str = ""
    write: str = ""


FLAGS: tuple[Flag, ...] = (
    Flag(MEGATRON, "tensor_model_parallel_size", "parallel.tensor"),
    Flag(MEGATRON, "pipeline_model_parallel_size", "parallel.pipeline"),
    Flag(MEGATRON, "context_parallel_size", "parallel.sequence"),
    Flag(
        MEGATRON,
        "sequence_parallel",
        "",
        "of tensor: ranks, it cuts what norms read; here each of them has that whole. What cuts rows of all layers "
        "is   sequence: 2   under parallel:",
    ),
    Flag(
        MEGATRON,
        "num_layers_per_virtual_pipeline_stage",
        "parallel.virtual_stages",
        "it counts stages of a rank, not layers of a stage, and goes with   schedule: interleaved",
        "2",
    ),
    Flag(
        MEGATRON,
        "virtual_pipeline_model_parallel_size",
        "parallel.virtual_stages",
        "stages of a rank; goes with   schedule: interleaved",
    ),
    Flag(
        MEGATRON,
        "decoder_first_pipeline_num_layers",
        "",
        "layers are dealt out so that the slowest stage computes as little as can be, the head counted",
    ),
    Flag(
        MEGATRON,
        "decoder_last_pipeline_num_layers",
        "",
        "layers are dealt out so that the slowest stage computes as little as can be, the head counted",
    ),
    Flag(MEGATRON, "use_distributed_optimizer", "parallel.strategy", "data ranks share the optimizer's state", "zero1"),
    Flag(MEGATRON, "overlap_grad_reduce", "", "exchanges lie under the backward pass by themselves"),
    Flag(MEGATRON, "overlap_param_gather", "", "exchanges lie under the forward pass by themselves"),
    Flag(
        MEGATRON,
        "cp_comm_type",
        "",
        "heads are exchanged where they divide by the ranks of a sequence, else keys and values are gathered",
    ),
    Flag(MEGATRON, "make_vocab_size_divisible_by", "", "ranks share any number of words, and none is added"),
    Flag(MEGATRON, "recompute_granularity", "train.recompute", "none, selective or full; auto asks the plan"),
    Flag(MEGATRON, "recompute_num_layers", "train.recompute", "a share of each stage's layers, evenly spread", "1/2"),
    Flag(MEGATRON, "recompute_method", "", "one layer is computed again at a time; how many of them:   recompute: 1/2"),
    Flag(COLOSSAL, "tp_size", "parallel.tensor"),
    Flag(COLOSSAL, "pp_size", "parallel.pipeline"),
    Flag(COLOSSAL, "sp_size", "parallel.sequence"),
    Flag(
        COLOSSAL,
        "enable_sequence_parallelism",
        "parallel.sequence",
        "how many ranks share each row; its modes split_gather and ring belong to tensor: ranks",
        "2",
    ),
    Flag(
        COLOSSAL,
        "sequence_parallelism_mode",
        "",
        "all_to_all where heads divide by the ranks of   sequence: 2   , else keys and values are gathered",
    ),
    Flag(
        COLOSSAL,
        "zero_stage",
        "parallel.strategy",
        "1 is zero1, 2 is zero2, and Gemini's sharing of weights is fsdp",
        "zero1",
    ),
    Flag(COLOSSAL, "pp_style", "parallel.schedule"),
    Flag(
        COLOSSAL, "num_model_chunks", "parallel.virtual_stages", "stages of a rank; goes with   schedule: interleaved"
    ),
    Flag(
        COLOSSAL,
        "num_microbatches",
        "train.micro_batch",
        "their size is what is written; auto makes them small enough to feed the stages",
        "auto",
    ),
    Flag(COLOSSAL, "microbatch_size", "train.micro_batch"),
    Flag(COLOSSAL, "parallel_output", "", "logits of a shared head are never gathered in training"),
)


def find_flag(word: str) -> Flag | None:
    """`--tensor-model-parallel-size`, `tensor_model_parallel_size` or `tp_size`."""
    name = word.strip().lstrip("-").partition("=")[0].partition(" ")[0].replace("-", "_")
    return next((flag for flag in FLAGS if flag.name == name), None)
