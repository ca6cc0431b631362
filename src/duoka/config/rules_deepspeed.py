"""Contradictions of `parallel.engine: deepspeed`: what DeepSpeed cannot do beside duoka's data plan, and what of its
switches means nothing without it. Each refusal names the native way.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.deepspeed_json import OF_WEIGHTS_IN_USE, is_quantized, switches
from duoka.config.rule import Rule
from duoka.config.schema import RunConfig
from duoka.config.schema_running import DeepSpeedConfig

_NATIVE = "write:   engine: native"
NO_DEEPSPEED = "parallel.engine is deepspeed, and the package deepspeed is not installed here"
NO_AIO = (
    "parallel.offload uses a disk and parallel.engine is deepspeed, which compiles its async_io for that: a C++ "
    "compiler and the headers of libaio are not there together"
)
GET_AIO = "apt install g++ libaio-dev   (Debian, Ubuntu; elsewhere libaio-devel), or write:   engine: native"
NO_QUANTIZER = "and parallel.engine is deepspeed, whose quantizer runs on CUDA alone; this machine has no GPU"
WITHOUT_QUANTIZER = "write:   engine: native   (which packs on a CPU too), or delete compress"
GET_DEEPSPEED = "DS_BUILD_OPS=0 pip install 'duoka[deepspeed]'   or write:   engine: native"


def _is_on(c: RunConfig) -> bool:
    return c.parallel.engine == "deepspeed"


def _axes(c: RunConfig) -> int:
    return c.parallel.pipeline * c.parallel.sequence * c.parallel.expert


def _is_cut(c: RunConfig) -> bool:
    return _is_on(c) and c.parallel.tensor > 1


def _of_ddp(c: RunConfig) -> bool:
    own = c.parallel
    return own.find_unused_parameters or own.static_graph or not own.bucket_view or own.bucket_mb != 25.0


DEEPSPEED_RULES: tuple[Rule, ...] = (
    Rule(
        "deepspeed-switches-without-it",
        ("parallel.deepspeed", "parallel.engine"),
        lambda c: not _is_on(c) and c.parallel.deepspeed != DeepSpeedConfig(),
        "parallel.deepspeed has switches of DeepSpeed, and parallel.engine is native",
        "write:   engine: deepspeed   or delete the block deepspeed",
    ),
    Rule(
        "deepspeed-with-strategy",
        ("parallel.strategy", "parallel.engine"),
        lambda c: _is_on(c) and c.parallel.strategy in ("dp", "hsdp"),
        "parallel.strategy is {c.parallel.strategy}, and parallel.engine is deepspeed, which has stages 0 to 3: ddp, "
        "zero1, zero2 and zero3",
        f"write:   strategy: zero3   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-axes",
        ("parallel.engine", "parallel.pipeline", "parallel.sequence", "parallel.expert"),
        lambda c: _is_on(c) and _axes(c) > 1,
        "parallel.engine is deepspeed, beside pipeline {c.parallel.pipeline}, sequence {c.parallel.sequence} and "
        "expert {c.parallel.expert}: its pipeline takes no stage 2 or 3, and its sequence parallelism scales gradients "
        "by stage",
        f"{_NATIVE}   (which has these axes under every strategy), or delete them",
    ),
    Rule(
        "autotp-with-adapters",
        ("parallel.tensor", "parallel.engine", "lora"),
        lambda c: _is_cut(c) and c.lora is not None,
        "parallel.tensor is {c.parallel.tensor} with lora, and parallel.engine is deepspeed, whose AutoTP cuts no "
        "adapters beside the matrices that it cuts",
        f"{_NATIVE}   (which does), or delete tensor or lora",
    ),
    Rule(
        "autotp-with-disk",
        ("parallel.offload", "parallel.tensor", "parallel.engine"),
        lambda c: _is_cut(c) and c.parallel.offloads.uses_disk,
        "parallel.offload uses a disk, parallel.tensor is {c.parallel.tensor}, and parallel.engine is deepspeed, whose "
        "norm of gradients in files counts what tensor ranks all have once for each",
        f"write:   offload: optimizer   (host memory), or   {_NATIVE[9:]}",
    ),
    Rule(
        "autotp-with-copies-in-a-node",
        ("parallel.reshard", "parallel.tensor", "parallel.engine"),
        lambda c: _is_cut(c) and c.parallel.reshard == "node",
        "parallel.reshard is node, parallel.tensor is {c.parallel.tensor}, and parallel.engine is deepspeed, whose "
        "copies inside a node are of neighboring ranks, which have other parts of each matrix",
        f"delete reshard, or   {_NATIVE}",
    ),
    Rule(
        "deepspeed-with-optimizer",
        ("optim.name", "parallel.engine"),
        lambda c: _is_on(c) and c.optim.name != "adamw",
        "optim.name is {c.optim.name}, which looks at whole matrices, and parallel.engine is deepspeed, which cuts "
        "them anywhere",
        f"write:   name: adamw   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-in-fp16",
        ("train.precision", "parallel.engine"),
        lambda c: _is_on(c) and c.train.precision == "fp16",
        "train.precision is fp16 and parallel.engine is deepspeed, whose loss scale this version does not keep",
        f"write:   precision: bf16   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-ddp-settings",
        ("parallel.find_unused_parameters", "parallel.static_graph", "parallel.bucket_mb", "parallel.bucket_view"),
        lambda c: _is_on(c) and _of_ddp(c),
        "parallel.engine is deepspeed, and find_unused_parameters, static_graph, bucket_mb and bucket_view are "
        "settings of torch's ddp",
        "delete them   (buckets are deepspeed: {{reduce_bucket_size: 50000000}})",
    ),
    Rule(
        "deepspeed-with-compress",
        ("parallel.compress", "parallel.engine"),
        lambda c: _is_on(c) and c.parallel.compress not in ("none", "bf16") and not is_quantized(c.parallel),
        "parallel.compress is {c.parallel.compress}, and parallel.engine deepspeed packs weights in int8 and gradients "
        "in int4 alone (ZeRO++), beside bf16",
        f"write:   compress: {{{{weights: int8}}}}   or   compress: bf16   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-packing-below-stage-3",
        ("parallel.compress", "parallel.strategy"),
        lambda c: _is_on(c) and is_quantized(c.parallel) and c.parallel.strategy not in ("zero3", "fsdp"),
        "parallel.compress is {c.parallel.compress} and parallel.strategy is {c.parallel.strategy}: ZeRO++ is "
        "DeepSpeed's stage 3",
        f"write:   strategy: zero3   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-packing-adapters",
        ("parallel.compress", "lora"),
        lambda c: _is_on(c) and is_quantized(c.parallel) and c.lora is not None,
        "parallel.compress is {c.parallel.compress} with lora, and parallel.engine deepspeed packs no matrix with a "
        "side of less than 256 numbers, which adapters have: all would travel as it is",
        f"delete compress, or   {_NATIVE}",
    ),
    Rule(
        "deepspeed-packing-what-is-offloaded",
        ("parallel.compress", "parallel.offload"),
        lambda c: _is_on(c) and is_quantized(c.parallel) and c.parallel.offload != "none",
        "parallel.compress is {c.parallel.compress} with parallel.offload {c.parallel.offload}, and DeepSpeed's "
        "quantized exchange beside offloading was never seen to work",
        f"delete one of them, or   {_NATIVE}",
    ),
    Rule(
        "deepspeed-compressing-fp32",
        ("parallel.compress", "train.precision"),
        lambda c: _is_on(c) and c.parallel.compress == "bf16" and c.train.precision == "fp32",
        "parallel.compress is bf16, train.precision is fp32, and parallel.engine deepspeed sends gradients as they are "
        "computed",
        f"write:   precision: bf16   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-reshard",
        ("parallel.reshard", "parallel.engine"),
        lambda c: (
            _is_on(c)
            and (c.parallel.reshard is False or (c.parallel.reshard == "node" and c.parallel.offloads.params != "none"))
        ),
        "parallel.reshard is {c.parallel.reshard} with offload {c.parallel.offload}, and parallel.engine is deepspeed: "
        "it knows true, and node while weights are not offloaded",
        "delete it, or write:   deepspeed: {{stage3_max_live_parameters: 1000000000}}",
    ),
    Rule(
        "deepspeed-with-disk",
        ("parallel.offload", "parallel.strategy"),
        lambda c: _is_on(c) and c.parallel.offloads.uses_disk and c.parallel.strategy not in ("zero3", "fsdp"),
        "parallel.offload is {c.parallel.offload} and parallel.strategy is {c.parallel.strategy}: DeepSpeed offloads "
        "to a disk at stage 3 alone",
        f"write:   strategy: zero3   or   offload: optimizer   (host memory), or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-part-of-the-state",
        ("parallel.offload.share", "parallel.engine"),
        lambda c: _is_on(c) and c.parallel.offloads.share < 1,
        "parallel.offload.share is {c.parallel.offloads.share}, and parallel.engine is deepspeed, which moves a part "
        "of the state at stage 3 alone, and with an optimizer of its own alone",
        f"delete share, or {_NATIVE}",
    ),
    Rule(
        "deepspeed-keeping-weights-of-a-disk",
        ("parallel.deepspeed", "parallel.offload"),
        lambda c: (
            _is_on(c)
            and c.parallel.offloads.params == "disk"
            and any(getattr(switches(c.parallel), name) for name in OF_WEIGHTS_IN_USE)
        ),
        "parallel.offload has params: disk, and parallel.deepspeed keeps gathered weights or fetches them ahead: "
        "each would hold one of the few buffers between disk and memory until DeepSpeed finds none",
        "delete   stage3_max_live_parameters, stage3_max_reuse_distance, stage3_prefetch_bucket_size   (0 here)",
    ),
    Rule(
        "deepspeed-offload-of-whole-models",
        ("parallel.offload", "parallel.strategy"),
        lambda c: (
            _is_on(c)
            and (
                (c.parallel.offload != "none" and c.parallel.strategy in ("auto", "single", "ddp"))
                or (c.parallel.offloads.params != "none" and c.parallel.strategy not in ("zero3", "fsdp"))
            )
        ),
        "parallel.offload is {c.parallel.offload} and parallel.strategy is {c.parallel.strategy}: DeepSpeed offloads "
        "the optimizer from stage 1 on, and weights at stage 3",
        "write:   strategy: zero3",
    ),
    Rule(
        "deepspeed-with-compile",
        ("train.compile", "parallel.engine"),
        lambda c: _is_on(c) and bool(c.train.compile),
        "train.compile is on, and parallel.engine is deepspeed, whose hooks gather weights inside the layers",
        f"write:   compile: false   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-packed-weights",
        ("model.quantization", "parallel.engine"),
        lambda c: _is_on(c) and c.model.quantization != "none",
        "model.quantization is {c.model.quantization}, whose packed blocks DeepSpeed does not know",
        f"write:   quantization: none   or   {_NATIVE[9:]}",
    ),
    Rule(
        "deepspeed-with-rl",
        ("stage.name", "parallel.engine"),
        lambda c: _is_on(c) and c.stage.kind.draws,
        "stage is {c.stage.name}, whose answers are drawn with the model that is trained, and parallel.engine is "
        "deepspeed",
        _NATIVE,
    ),
)
