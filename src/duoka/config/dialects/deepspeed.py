"""DeepSpeed's JSON: batch, precision, clipping and ZeRO as our keys; buckets and switches as notices.

A file on its own, or what `deepspeed:` of another file points to. "auto" means what the other file says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects.rows import (
    WHOLE_AT_THE_END,
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    asks_for_nothing,
    batch_answer,
    implemented,
    is_true,
    number,
    read_switch,
    refused,
    reported,
    shorten,
    switch,
    table,
    whole,
)
from duoka.config.schema_running import DeepSpeedConfig

_MICRO, _STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Where a state lies decides; how it gets there and back is duoka's own.
_OFFLOAD_PARTS = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline", "pipeline_read",
    "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip
_OPTIMIZER = "optimizer.params."
_ZERO = "zero_optimization."
_TENSOR = "tensor_parallel.autotp_size"


def _auto(convert: Any = None) -> Any:
    """ "auto" is whatever the file beside says: nothing to do here."""

    def run(value: Any, asked: Asked) -> Any:
        if value == "auto":
            return Answer()
        return convert(value, asked) if convert else value

    return run


def _micro(asked: Asked) -> int | None:
    for name in (_MICRO, "per_device_train_batch_size"):
        value = asked.get(name, "auto")
        if value != "auto":
            return whole(value, name)
    return None


def _accumulation(value: Any, asked: Asked) -> Any:
    micro = _micro(asked)
    if micro is None:
        return Answer(note=f"of no use without {_MICRO}: duoka accumulates as train.global_batch asks for")
    steps = asked.get(_STEPS, 1)
    return batch_answer(micro, 1 if steps == "auto" else steps, asked, (_MICRO, _STEPS), _tensor_ranks(asked))


def _micro_batch(value: Any, asked: Asked) -> Any:
    if asked.get("train_batch_size", "auto") != "auto" and asked.get(_STEPS, "auto") == "auto":
        return Answer({"train.micro_batch": whole(value, _MICRO)})
    return _accumulation(value, asked)


def _enabled(precision: str) -> Any:
    def convert(value: Any, asked: Asked) -> Any:
        if not value:
            return Answer()
        if precision == "fp16" and not asked.start.has_gpu:
            note = "no GPU here, and fp16 training needs one: train.precision is auto"
            return Answer({"train.precision": "auto"}, note)
        return precision

    return convert


def _stage(value: Any, asked: Asked) -> Any:
    stage = read_stage(value, f"{_ZERO}stage")
    group = _group(asked)
    if group > 1 and stage != 3:
        raise Refusal(f"mics_shard_size {group} shards weights, and stage is {stage}", 'write:   "stage": 3')
    if group > 1:
        return Answer({"parallel.strategy": "hsdp", "parallel.shard_ranks": group})
    return "ddp" if stage == 0 else f"zero{stage}"


def read_stage(value: Any, name: str) -> int:
    stage = number(value, name)
    if stage not in (0, 1, 2, 3):
        raise Refusal(f"{name} is {value}; there are 0, 1, 2 and 3", f"write:   {name.rpartition('.')[2]}: 2", name)
    return int(stage)


def _group(asked: Asked) -> int:
    """MiCS: so many ranks share one copy, as hsdp does it; -1 and 1 mean none."""
    name = f"{_ZERO}mics_shard_size"
    value = asked.get(name, -1)
    return -1 if number(value, name) == -1 else whole(value, name)


def _offload(name: str, what: str) -> Any:
    """What lies in host memory or on a disk. Weights there take the optimizer's state along."""

    def convert(value: Any, asked: Asked) -> Any:
        where = _device(value)
        if where == "none":
            return Answer()
        if where not in ("cpu", "nvme"):
            raise Refusal(f"{name} to {shorten(where)} is not known", 'write:   "device": "cpu"   or "nvme"')
        stage = asked.get(f"{_ZERO}stage", 0)
        if what == "params" and str(stage) != "3":
            raise Refusal(
                f"{name} moves weights that stage 3 has sharded, and stage is {shorten(stage)}", 'write:   "stage": 3'
            )
        other = f"{_ZERO}offload_{'param' if what == 'optimizer' else 'optimizer'}"
        if "nvme" in (where, _device(asked.get(other))):
            return _to_disk(name, what, value, asked.get(other))
        if what == "optimizer" and _device(asked.get(other)) == "cpu":
            return Answer()
        ratio = value.get("ratio") if isinstance(value, dict) else None
        if what == "params" or ratio is None or (share := number(ratio, name)) == 1:
            return Answer({"parallel.offload": what})
        return Answer({"parallel.offload": {"optimizer": "host", "share": share}})

    return convert


def _to_disk(name: str, what: str, value: Any, other: Any) -> Answer:
    """A block for both keys, of which at least one is on a disk; each of them gives the same."""
    optimizer, params = (value, other) if what == "optimizer" else (other, value)
    if _device(params) == "nvme" and _device(optimizer) == "cpu":
        raise Refusal(
            "offload_param to nvme with offload_optimizer to cpu: what is larger and needed less often goes first",
            'write:   "offload_optimizer": {"device": "nvme"}',
            name,
        )
    block = {"params": "disk"} if _device(params) == "nvme" else {"optimizer": "disk"}
    if _device(params) == "cpu":
        block["params"] = "host"
    paths = [one["nvme_path"] for one in (optimizer, params) if isinstance(one, dict) and one.get("nvme_path")]
    return Answer({"parallel.offload": block | ({"folder": str(paths[0])} if paths else {})})


def _quantized(value: Any, asked: Asked) -> Answer:
    """Of both keys; each of them gives the same."""
    ours = {"weights": "int8", "gradients": "int4"}
    block = {part: bits for part, bits in ours.items() if is_true(asked.get(f"{_ZERO}zero_quantized_{part}"))}
    return Answer({"parallel.compress": block} if block else {})


def _copy_in_node(value: Any, asked: Asked) -> Answer:
    size = whole(value, f"{_ZERO}zero_hpz_partition_size")
    words = "the copy is shared by the processes of a node, however many these are"
    return Answer({"parallel.reshard": "node"}, words) if size > 1 else Answer()


def _tensor(value: Any, asked: Asked) -> Any:
    size = _tensor_ranks(asked)
    if size > 1 and asked.get("per_device_train_batch_size") is not None:
        raise Refusal(
            f"{_TENSOR} is {size} beside a batch per device, of which not every device has one of its own then",
            "delete it, and write duoka's own   parallel: {tensor: 2}   with   train.global_batch",
            _TENSOR,
        )
    return size if size > 1 else Answer()


def _tensor_ranks(asked: Asked) -> int:
    return max(1, whole(asked.get(_TENSOR, 1), _TENSOR, least=0))


def _batch(value: Any, asked: Asked) -> Any:
    """DeepSpeed counts a sample once for each rank that shares it."""
    size, ranks = whole(value, "train_batch_size"), _tensor_ranks(asked)
    if size % ranks:
        raise Refusal(
            f"train_batch_size is {size}, which counts each sample once for each of the {ranks} ranks of "
            f"{_TENSOR}: no multiple of it",
            f'write:   "train_batch_size": {-(-size // ranks) * ranks}',
            "train_batch_size",
        )
    note = f"{size} counts every sample once for each of the {ranks} ranks that share a matrix"
    return size if ranks == 1 else Answer({"train.global_batch": size // ranks}, note)


def _device(value: Any) -> str:
    """`{"device": "cpu"}`, a bare word, or the older switch true."""
    device = value.get("device", "none") if isinstance(value, dict) else value
    return "cpu" if is_true(device) else "none" if asks_for_nothing(device, ()) else str(device).strip().lower()


def _optimizer(value: Any, asked: Asked) -> Any:
    if str(value).lower() in ("adam", "adamw"):
        return "adamw"
    raise Refusal(f"the optimizer {value} is not there yet", 'write:   "type": "AdamW"')


def _scheduler(value: Any, asked: Asked) -> Any:
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if str(value) in kinds:
        return kinds[str(value)]
    raise Refusal(f"the scheduler {value} is not there yet", f"known: {', '.join(kinds)}")


def _engine(value: Any, asked: Asked) -> Any:
    if value in ("native", "deepspeed"):
        return value
    raise Refusal(f"engine is {shorten(value)}; there are native and deepspeed", 'write:   "engine": "deepspeed"')


def _own_switch(name: str) -> Any:
    """A switch of DeepSpeed's, which only DeepSpeed reads."""

    def convert(value: Any, asked: Asked) -> Any:
        if asked.get("engine") != "deepspeed":
            return Answer(note=_BUNDLES)
        if value == "auto":
            return Answer()
        long_name = f"{_ZERO}{name}"
        if name == "overlap_comm":
            return Answer({f"parallel.deepspeed.{name}": read_switch(value, long_name)})
        return Answer({f"parallel.deepspeed.{name}": whole(value, long_name, least=0)})

    return convert


_BUNDLES = "bundles, fetching, gathering: duoka's own, and no result changes"


def _switch_rows() -> list[Row]:
    return [
        *(Row(f"{_ZERO}{name}", "implemented", f"parallel.deepspeed.{name}", "with engine deepspeed; else " + _BUNDLES,
              _own_switch(name)) for name in DeepSpeedConfig.model_fields),
        *reported(_BUNDLES, *(f"{_ZERO}{name}" for name in (
            "allgather_partitions", "reduce_scatter", "contiguous_gradients", "round_robin_gradients",
            "ignore_unused_parameters", "load_from_fp32_weights", "memory_efficient_linear"))),
    ]  # fmt: skip


def _tensor_rows() -> list[Row]:
    return [
        *implemented(_TENSOR, "parallel.tensor", _tensor, "with engine deepspeed by DeepSpeed's "
                     "AutoTP; else duoka's own axis"),
        *reported("AutoTP's own: duoka's types are the run's, and sums wait for nothing", "tensor_parallel.dtype",
                  "tensor_parallel.tp_overlap_comm", "tensor_parallel.tp.tp_size", "tensor_parallel.tp.tp_grain_size"),
        *refused("which matrices are cut is read off the plan that transformers ships; head and embedding of AutoTP "
                 "stay whole", "tensor_parallel.partition_config", "tensor_parallel.preset_model",
                 "tensor_parallel.vocab_parallel_lm_head", "tensor_parallel.injection_policy_tuple"),
    ]  # fmt: skip


def deepspeed_rows() -> list[Row]:
    zero = _ZERO
    return [
        *implemented("engine", "parallel.engine", _engine, "deepspeed: DeepSpeed itself does what the rest says; left "
                     "out: duoka's own layout of that kind"),
        *implemented("train_batch_size", "train.global_batch", _auto(_batch)),
        *implemented(_MICRO, "train.micro_batch", _auto(_micro_batch)),
        *implemented(_STEPS, "train.global_batch", _auto(_accumulation)),
        *implemented("gradient_clipping", "optim.clip", _auto()),
        *switch("bf16.enabled", "train.precision", _auto(_enabled("bf16"))),
        *switch("bfloat16.enabled", "train.precision", _auto(_enabled("bf16"))),
        *switch("fp16.enabled", "train.precision", _auto(_enabled("fp16"))),
        *implemented(f"{zero}stage", "parallel.strategy", _auto(_stage), "0 is ddp; what duoka lacks is refused"),
        Row(f"{zero}offload_optimizer", "implemented", "parallel.offload", "cpu, nvme or none",
            _offload("offload_optimizer", "optimizer"), parts=_OFFLOAD_PARTS),
        Row(f"{zero}offload_param", "implemented", "parallel.offload", "cpu, nvme or none",
            _offload("offload_param", "params"), parts=_OFFLOAD_PARTS),
        *switch(f"{zero}cpu_offload", "parallel.offload", _offload("cpu_offload", "optimizer"),
                     "the older switch"),
        *switch(f"{zero}cpu_offload_params", "parallel.offload", _offload("cpu_offload_params", "params"),
                     "the older switch"),
        *implemented(f"{zero}mics_shard_size", "parallel.shard_ranks", lambda value, asked: Answer(),
                     "with stage 3: hsdp, whose groups have so many ranks"),
        *implemented("optimizer.type", "optim.name", _auto(_optimizer)),
        *implemented(f"{_OPTIMIZER}lr", "optim.lr", _auto()),
        *implemented(f"{_OPTIMIZER}betas", "optim.betas", _auto()),
        *implemented(f"{_OPTIMIZER}eps", "optim.eps", _auto()),
        *implemented(f"{_OPTIMIZER}weight_decay", "optim.weight_decay", _auto()),
        *implemented("scheduler.type", "optim.schedule", _auto(_scheduler)),
        *implemented("scheduler.params.warmup_num_steps", "optim.warmup",
                     _auto(lambda value, asked: whole(value, "scheduler.params.warmup_num_steps", least=0))),
        *implemented("scheduler.params.warmup_max_lr", "optim.lr", _auto()),
        *implemented("scheduler.params.cos_min_ratio", "optim.min_lr", _auto()),
        *reported("the schedule climbs from 0, to the run's own end", "scheduler.params.warmup_min_lr",
                  "scheduler.params.warmup_min_ratio",
                  "scheduler.params.total_num_steps", "scheduler.params.warmup_type"),
        *reported("duoka's own loss scale: it starts high and halves on overflow", "fp16.loss_scale",
                  "fp16.loss_scale_window", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale",
                  "fp16.auto_cast"),
        *_switch_rows(),
        *reported(WHOLE_AT_THE_END, *(f"{zero}{name}" for name in (
            "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"))),
        *reported("a switch of DeepSpeed's own", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
                  "steps_per_print", "wall_clock_breakdown", "comms_config", "comms_logger", "monitor_config",
                  "tensorboard", "wandb", "csv_monitor", "flops_profiler", "dump_state", "communication_data_type",
                  "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "data_types", "aio",
                  "checkpoint", "activation_checkpointing", "optimizer.params.torch_adam",
                  "optimizer.params.adam_w_mode", "_comment"),
        *_tensor_rows(),
        *refused("parallelism over dimensions is not there yet", "pipeline", "sequence_parallel_size", off=(1,)),
        *refused("it would change the result, and duoka has nothing like it", "compression_training",
                 "data_efficiency", "curriculum_learning", "progressive_layer_drop", "sparse_attention", "amp",
                 "hybrid_engine"),
        *switch(f"{zero}zero_quantized_weights", "parallel.compress", _quantized, "qwZ: weights in 8 bits"),
        *switch(f"{zero}zero_quantized_gradients", "parallel.compress", _quantized, "qgZ: gradients in 4 bits"),
        *implemented(f"{zero}zero_hpz_partition_size", "parallel.reshard", _copy_in_node, "hpZ: of a node's processes"),
        *reported("weights are gathered over all ranks of a group; hsdp keeps groups inside a node",
                  f"{zero}mics_hierarchical_params_gather"),
        *refused("what elastic batches may be is train.global_batch's business", "elasticity"),
    ]  # fmt: skip


def _fits(top: Mapping[str, Any]) -> bool:
    return (
        "zero_optimization" in top
        or _MICRO in top
        or any(isinstance(top.get(name), dict) and "enabled" in top[name] for name in ("bf16", "fp16"))
    )


@cache
def deepspeed() -> Dialect:
    return Dialect("deepspeed", "DeepSpeed", table(deepspeed_rows()), _fits, is_whole=False)


_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|(?<=[\s,{\[])#[^\n]*', re.DOTALL)


def without_comments(text: str) -> str:
    """JSON as people write it for DeepSpeed: comments become spaces, tabs too, and every line keeps its number."""

    def blank(found: re.Match[str]) -> str:
        word = found.group()
        return word if word.startswith('"') else re.sub(r"[^\n]", " ", word)

    return _COMMENT.sub(blank, text).replace("\t", " ")
