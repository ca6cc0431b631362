"""DeepSpeed's JSON: batch, precision, clipping and ZeRO as our keys; buckets and switches as notices.

A file on its own, or what `deepspeed:` of another file points to. "auto" means what the other file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from duoka.config.dialects.deepspeed_batch import (
    MICRO,
    STEPS,
    TENSOR,
    read_batch,
    read_micro_batch,
    read_steps,
    read_tensor,
)
from duoka.config.dialects.rows import (
    WHOLE_AT_THE_END,
    Answer,
    Asked,
    Dialect,
    Refusal,
    Row,
    asks_for_nothing,
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

# Where a state lies decides; how it gets there and back is duoka's own.
_OFFLOAD_PARTS = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline", "pipeline_read",
    "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip
_OPTIMIZER = "optimizer.params."
_ZERO = "zero_optimization."


def _auto(convert: Any = None) -> Any:
    """ "auto" is whatever the file beside says: nothing to do here."""

    def run(value: Any, asked: Asked) -> Any:
        if value == "auto":
            return Answer()
        return convert(value, asked) if convert else value

    return run


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
            places = value, asked.get(other)
            return to_disk(name, *(places if what == "optimizer" else places[::-1]))
        if what == "optimizer" and _device(asked.get(other)) == "cpu":
            return Answer()
        ratio = value.get("ratio") if isinstance(value, dict) else None
        if what == "params" or ratio is None or (share := number(ratio, name)) == 1:
            return Answer({"parallel.offload": what})
        return Answer({"parallel.offload": {"optimizer": "host", "share": share}})

    return convert


def to_disk(name: str, optimizer: Any, params: Any) -> Answer:
    """A block for both keys, of which at least one is on a disk; each of them gives the same."""
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


def _device(value: Any) -> str:
    """`{"device": "cpu"}`, a bare word, or the older switch true."""
    device = value.get("device", "none") if isinstance(value, dict) else value
    return "cpu" if is_true(device) else "none" if asks_for_nothing(device, ()) else str(device).strip().lower()


def _check_decay(asked: Asked) -> None:
    """Of type Adam alone: AdamW is AdamW there, whatever its adam_w_mode says."""
    name = f"{_OPTIMIZER}adam_w_mode"
    decay = asked.get(f"{_OPTIMIZER}weight_decay", 0)
    decay = asked.get("weight_decay", 0) if decay == "auto" else decay
    if asks_for_nothing(asked.get(name, True), ()) and number(decay, "weight_decay"):
        raise Refusal(
            f"{name} is false and weight_decay is {decay}: Adam adds that to the gradients, and duoka's AdamW takes it "
            "off the weights",
            'write:   "adam_w_mode": true   or   "weight_decay": 0',
            name,
        )


def _optimizer(value: Any, asked: Asked) -> Any:
    own = str(value).lower()
    if own == "adam":
        _check_decay(asked)
    if own in ("adam", "adamw"):
        return "adamw"
    if own in ("lamb", "muon"):
        what = f"the optimizer {value} has settings of DeepSpeed's own, and duoka's {own} has others"
        raise Refusal(what, f"delete the block optimizer, and write in the YAML   optim: {{name: {own}, lr: ...}}")
    raise Refusal(f"the optimizer {value} is not there yet", 'write:   "type": "AdamW"')


def _autocast(value: Any, asked: Asked) -> Any:
    if not value:
        return Answer()
    kinds = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
    kind = str(asked.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
    if kind not in kinds:
        raise Refusal(f"torch_autocast.dtype is {kind}; there are bfloat16 and float16", 'write:   "dtype": "bfloat16"')
    return _enabled(kinds[kind])(True, asked)


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
            "ignore_unused_parameters", "load_from_fp32_weights", "memory_efficient_linear",
            "use_multi_rank_bucket_allreduce", "compute_grad_norm", "elastic_checkpoint", "legacy_stage1",
            "cpu_offload_use_pin_memory", "stage3_model_persistence_threshold", "parameter_alignment",
            "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "leaf_module",
            "stage3_allgather_sequential", "pipeline_loading_checkpoint", "override_module_apply",
            "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"))),
    ]  # fmt: skip


def _tensor_rows() -> list[Row]:
    return [
        *implemented(TENSOR, "parallel.tensor", read_tensor, "with engine deepspeed by DeepSpeed's "
                     "AutoTP; else duoka's own axis"),
        *reported("AutoTP's own: duoka's types are the run's, and sums wait for nothing", "tensor_parallel.dtype",
                  "tensor_parallel.tp_overlap_comm", "tensor_parallel.tp.tp_size", "tensor_parallel.tp.tp_grain_size"),
        *refused("which matrices are cut is read off the plan that transformers ships; head and embedding of AutoTP "
                 "stay whole", "tensor_parallel.partition_config", "tensor_parallel.preset_model",
                 "tensor_parallel.vocab_parallel_lm_head", "tensor_parallel.injection_policy_tuple"),
    ]  # fmt: skip


def _precision_rows() -> list[Row]:
    return [
        *switch("bf16.enabled", "train.precision", _auto(_enabled("bf16"))),
        *switch("bfloat16.enabled", "train.precision", _auto(_enabled("bf16"))),
        *switch("fp16.enabled", "train.precision", _auto(_enabled("fp16"))),
        *reported("duoka's own loss scale: it starts high and halves on overflow", "fp16.loss_scale",
                  "fp16.loss_scale_window", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale",
                  "fp16.auto_cast", "fp16.consecutive_hysteresis"),
        *switch("torch_autocast.enabled", "train.precision", _auto(_autocast), "of torch_autocast.dtype"),
        *reported("duoka's own bf16: autocast over fp32 weights, gradients in fp32, and no step that is not "
                  "finite", "torch_autocast.dtype", "torch_autocast.lower_precision_safe_modules",
                  "bf16.immediate_grad_update", "bf16.check_grad_overflow"),
        *refused("weights, gradients and moments stay in fp32 under DeepSpeed's JSON; in 8 bytes a parameter natively: "
                 "train: {weights: bf16}", *(f"{block}.{name}" for block, name in (
                     ("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states"),
                     ("fp16", "fp16_master_weights_and_grads")))),
    ]  # fmt: skip


def _refused_rows() -> list[Row]:
    zero = _ZERO
    return [
        *refused("this axis is duoka's own, and written in the YAML:   parallel: {sequence: 2}   with engine native",
                 "sequence_parallel_size", off=(1,)),
        *refused("this axis is duoka's own, and written in the YAML:   parallel: {pipeline: 2}   with engine native",
                 "pipeline", off=(1,)),
        *refused("it would change the result, and duoka has nothing like it", "compression_training",
                 "data_efficiency", "curriculum_learning", "progressive_layer_drop", "sparse_attention", "amp",
                 "hybrid_engine", "weight_quantization", "expert_parallel", f"{zero}zenflow",
                 f"{zero}zero_quantized_nontrainable_weights"),
        *refused("duoka adds gradients over all target tokens of a step", "gradient_allreduce_op", off=("mean",)),
        *refused("what elastic batches may be is train.global_batch's business", "elasticity"),
    ]  # fmt: skip


def deepspeed_rows() -> list[Row]:
    zero = _ZERO
    return [
        *implemented("engine", "parallel.engine", _engine, "deepspeed: DeepSpeed itself does what the rest says; left "
                     "out: duoka's own layout of that kind"),
        *implemented("train_batch_size", "train.global_batch", _auto(read_batch)),
        *implemented(MICRO, "train.micro_batch", _auto(read_micro_batch)),
        *implemented(STEPS, "train.global_batch", _auto(read_steps)),
        *implemented("gradient_clipping", "optim.clip", _auto()),
        *_precision_rows(),
        *implemented(f"{zero}stage", "parallel.strategy", _auto(_stage), "0 is ddp; what duoka lacks is refused"),
        Row(f"{zero}offload_optimizer", "implemented", "parallel.offload", "cpu, nvme or none",
            _offload("offload_optimizer", "optimizer"), parts=_OFFLOAD_PARTS),
        Row(f"{zero}offload_param", "implemented", "parallel.offload", "cpu, nvme or none",
            _offload("offload_param", "params"), parts=_OFFLOAD_PARTS),
        *switch(f"{zero}cpu_offload", "parallel.offload", _offload("cpu_offload", "optimizer"),
                     "the older switch"),
        *switch(f"{zero}cpu_offload_params", "parallel.offload", _offload("cpu_offload_params", "params"),
                     "the older switch"),
        *switch(f"{zero}cpu_offload_param", "parallel.offload", _offload("cpu_offload_param", "params"),
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
        *_switch_rows(),
        *reported(WHOLE_AT_THE_END, *(f"{zero}{name}" for name in (
            "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"))),
        *reported("a switch of DeepSpeed's own", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
                  "steps_per_print", "wall_clock_breakdown", "comms_config", "comms_logger", "monitor_config",
                  "tensorboard", "wandb", "csv_monitor", "flops_profiler", "dump_state", "communication_data_type",
                  "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "data_types", "aio",
                  "checkpoint", "activation_checkpointing", "optimizer.params.torch_adam",
                  "optimizer.params.fp32_optimizer_states", "disable_allgather", "compile",
                  "seq_parallel_communication_data_type", "memory_breakdown", "log_level", "timers", "autotuning",
                  "nebula", "datastates_ckpt", "disable_python_gc", "dataloader_drop_last",
                  "use_data_before_expert_parallelism", "optimizer.params.adam_w_mode", "_comment"),
        *_tensor_rows(),
        *switch(f"{zero}zero_quantized_weights", "parallel.compress", _quantized, "qwZ: weights in 8 bits"),
        *switch(f"{zero}zero_quantized_gradients", "parallel.compress", _quantized, "qgZ: gradients in 4 bits"),
        *implemented(f"{zero}zero_hpz_partition_size", "parallel.reshard", _copy_in_node, "hpZ: of a node's processes"),
        *reported("weights are gathered over all ranks of a group; hsdp keeps groups inside a node",
                  f"{zero}mics_hierarchical_params_gather"),
        *_refused_rows(),
    ]  # fmt: skip


def _fits(top: Mapping[str, Any]) -> bool:
    return (
        "zero_optimization" in top
        or MICRO in top
        or any(isinstance(top.get(name), dict) and "enabled" in top[name] for name in ("bf16", "fp16"))
    )


@cache
def deepspeed() -> Dialect:
    return Dialect("deepspeed", "DeepSpeed", table(deepspeed_rows()), _fits, is_whole=False)
