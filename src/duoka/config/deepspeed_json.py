"""The JSON that DeepSpeed is given for a run: complete, with no "auto", and with every default that changes results.

For `parallel.engine: deepspeed`, and for `duoka config convert` (people who go on with DeepSpeed itself). Clipping is
always written: left out it is 1.0 in DeepSpeed, which nobody sees in a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duoka.config.rates import batch_factor, warmup_steps
from duoka.config.schema import OptimConfig, ParallelConfig, RunConfig
from duoka.config.schema_running import DeepSpeedConfig, OffloadConfig
from duoka.errors import Fault, Faults
from duoka.units import Amount, parse_amount, parse_warmup

OF_WEIGHTS_IN_USE = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


# Elements of a group where the state lies on a disk: four times so many pass through memory.
GROUP_ON_DISK = 20_000_000


def engine_json(
    parallel: ParallelConfig, strategy: str, precision: str, world_size: int, folder: Path | None = None, near: int = 0
) -> dict[str, Any]:
    """What duoka gives DeepSpeed as its engine: batches, the loss's scale, clipping and the schedule stay duoka's.

    `world_size`: ranks that read different samples. `folder`: of what lies on a disk. `near`: ranks of a node, which
    share a copy of weights between the two passes.
    """
    zero = _zero(parallel, strategy, folder)
    zero |= _quantized(parallel)
    if zero["stage"] == 3 and parallel.reshard == "node" and 1 < near < world_size and world_size % near == 0:
        zero["zero_hpz_partition_size"] = near
    settings: dict[str, Any] = {
        "train_batch_size": world_size * parallel.tensor,  # DeepSpeed counts all ranks here
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": _autocast(parallel, precision),
        "steps_per_print": 1 << 60,
    }
    if parallel.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": parallel.tensor}
    return settings


def _zero(parallel: ParallelConfig, strategy: str, folder: Path | None = None) -> dict[str, Any]:
    own, offloads = switches(parallel).model_dump(), parallel.offloads
    stage = STAGES[strategy]
    kept = {name: value for name, value in own.items() if stage == 3 or not name.startswith(("stage3", "sub_group"))}
    zero: dict[str, Any] = {"stage": stage, "reduce_scatter": True, "contiguous_gradients": True}
    zero |= kept if stage else {}
    if offloads.moves_anything and stage:
        where = offloads.params if offloads.optimizer == "none" else offloads.optimizer
        zero["offload_optimizer"] = _place(offloads, where, folder)
        if offloads.share < 1:
            zero["offload_optimizer"]["ratio"] = offloads.share
    if offloads.params != "none" and stage == 3:
        zero["offload_param"] = _place(offloads, offloads.params, folder)
        if offloads.params == "disk":
            zero["offload_param"]["max_in_cpu"] = 0  # a model of up to 1e9 elements would stay in memory
    if stage in (1, 2) and not offloads.moves_anything:
        zero["compute_grad_norm"] = False  # duoka's norm is there before the step
    return zero


def switches(parallel: ParallelConfig) -> DeepSpeedConfig:
    """Those of the config. Where a disk is used the defaults are others: by these, all state would pass through memory
    at once, and weights lie in more buffers than there are."""
    own, offloads = parallel.deepspeed, parallel.offloads
    here: dict[str, int] = {"sub_group_size": GROUP_ON_DISK} if offloads.uses_disk else {}
    here |= dict.fromkeys(OF_WEIGHTS_IN_USE, 0) if offloads.params == "disk" else {}
    plain = DeepSpeedConfig()
    return own.model_copy(update={k: size for k, size in here.items() if getattr(own, k) == getattr(plain, k)})


def is_quantized(parallel: ParallelConfig) -> bool:
    """Whether weights or gradients travel as ZeRO++ packs them: in 8 bits and in 4, and in no other way."""
    packed = _packed(parallel)
    known = packed["weights"] in ("none", "int8") and packed["gradients"] in ("none", "int4")
    return known and set(packed.values()) != {"none"}


def _packed(parallel: ParallelConfig) -> dict[str, str]:
    return {"weights": parallel.compression.weights, "gradients": parallel.compression.gradients}


def _quantized(parallel: ParallelConfig) -> dict[str, bool]:
    packed = _packed(parallel) if is_quantized(parallel) else {}
    return {f"zero_quantized_{part}": True for part, kind in packed.items() if kind != "none"}


def _place(offloads: OffloadConfig, where: str, folder: Path | None) -> dict[str, Any]:
    if where == "disk":
        path = str(folder) if folder is not None else offloads.folder or "/local_nvme"
        return {"device": "nvme", "nvme_path": path, "pin_memory": False}
    return {"device": "cpu", "pin_memory": False}


def _autocast(parallel: ParallelConfig, precision: str) -> dict[str, Any]:
    """bf16 as every strategy of duoka computes it: autocast over fp32 weights, whose gradients are added in fp32."""
    if precision != "bf16":
        return {"enabled": False}
    travels: dict[str, Any] = {} if parallel.compress == "bf16" else {"lower_precision_safe_modules": []}
    return {"enabled": True, "dtype": "bfloat16", **travels}


def file_json(config: RunConfig, world_size: int, precision: str) -> tuple[dict[str, Any], list[str]]:
    """(the JSON of a run for DeepSpeed alone, under a script of people's own; what it cannot say).

    Raises Faults with all that stands in the way.
    """
    if faults := list(_unsayable(config, world_size)):
        raise Faults(faults)
    parallel, optim = config.parallel, config.optim
    batch, micro = _samples(config.train.global_batch), _samples(config.train.micro_batch) or 1
    steps = batch // (micro * (world_size // parallel.tensor))
    zero = _zero(parallel, parallel.strategy)
    zero.pop("compute_grad_norm", None)
    zero |= _quantized(parallel)
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    rate = optim.lr * batch_factor(optim, Amount(batch, "samples"))
    params = {
        "lr": rate, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay,
    }  # fmt: skip
    # A part of the state is moved for DeepSpeed's own optimizer alone, which it compiles.
    own = parallel.offloads.share < 1
    params |= {} if own else {"torch_adam": True}
    facts: dict[str, Any] = {
        "train_batch_size": micro * steps * world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": optim.clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": own,
        "optimizer": {"type": "AdamW", "params": params},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }
    if zero["stage"] or precision == "fp32":  # stage 0 knows no others than those of its weights
        facts["data_types"] = {"grad_accum_dtype": "fp32"}
    if parallel.compress in ("bf16", "fp16"):
        facts["communication_data_type"] = parallel.compress
    if parallel.tensor > 1:
        facts["tensor_parallel"] = {"autotp_size": parallel.tensor}
    notes = _unsaid(config)
    if config.train.max_steps is None:
        notes.append("train.max_steps is not written, so the file has no scheduler: it counts steps, not epochs")
    elif (why := _unscheduled(optim)) is not None:
        notes.append(f"{why}: the file has no scheduler")
    else:
        facts["scheduler"] = _scheduler(optim, config.train.max_steps, rate)
        notes.append("DeepSpeed asks its scheduler after each step: a warm-up is two steps later than here, from 0 on")
    return facts, notes


def _unscheduled(optim: OptimConfig) -> str | None:
    """What of a schedule none of DeepSpeed's does."""
    if optim.schedule == "wsd":
        return "optim.schedule is wsd, which DeepSpeed does not have"
    if optim.schedule == "linear" and optim.min_lr:
        return f"optim.schedule is linear with min_lr {optim.min_lr:g}, and DeepSpeed's WarmupDecayLR falls to 0"
    if isinstance(parse_warmup(optim.warmup), Amount):
        return f"optim.warmup is {optim.warmup}, and DeepSpeed counts steps"
    return None


def _unsaid(config: RunConfig) -> list[str]:
    """What of a run is otherwise under DeepSpeed and a script of people's own, or is said nowhere in the file."""
    parallel = config.parallel
    notes = [
        "DeepSpeed divides a loss by rank and micro-batch, not by the tokens of the global batch, and lets all weights "
        "decay; duoka with engine: deepspeed does neither",
    ]
    if parallel.tensor > 1:
        notes.append(
            f"train_batch_size counts every sample {parallel.tensor} times, once for each rank that shares a matrix, "
            "as DeepSpeed counts; your script gives these ranks the same samples"
        )
    if parallel.offloads.activations != "none":
        notes.append(
            f"parallel.offload has activations: {parallel.offloads.activations}, and no key of a DeepSpeed JSON moves "
            "those of a model as it is: under your script they stay where the model computes"
        )
    own = [name for name in ("embedding_lr", "head_lr") if getattr(config.optim, name) is not None]
    own += ["lora.b_lr_ratio"] if config.lora is not None and config.lora.b_lr_ratio != 1 else []
    if own:
        notes.append(f"{' and '.join(own)}: the file has one rate for all weights; others are your script's groups")
    if parallel.reshard == "node":
        notes.append(
            "parallel.reshard is node, and the file does not say how many GPUs a node has: add "
            '"zero_hpz_partition_size" to zero_optimization'
        )
    if parallel.offloads.share < 1:
        notes.append("a part of the optimizer's state moves with DeepSpeed's own Adam alone, which it compiles (g++)")
    if not _samples(config.train.micro_batch):
        notes.append(
            f"train.micro_batch is {config.train.micro_batch}, which is 1 in this file: DeepSpeed counts samples"
        )
    return notes


def _scheduler(optim: OptimConfig, steps: int, rate: float) -> dict[str, Any]:
    climb = warmup_steps(optim, steps)
    if optim.schedule == "cosine":
        own: dict[str, Any] = {"total_num_steps": steps, "cos_min_ratio": optim.min_lr, "warmup_min_ratio": 0.0}
    else:
        own = {"warmup_min_lr": 0.0, "warmup_max_lr": rate}
        own |= {"total_num_steps": steps} if optim.schedule == "linear" else {}
    kind = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}[optim.schedule]
    return {"type": kind, "params": {**own, "warmup_num_steps": max(1, climb), "warmup_type": "linear"}}


def _samples(size: int | str) -> int:
    """0: tokens, or auto."""
    if size == "auto":
        return 0
    amount = parse_amount(size)
    return amount.count if amount.unit == "samples" else 0


def _unsayable(config: RunConfig, world_size: int) -> Iterator[Fault]:
    parallel = config.parallel
    if parallel.strategy == "hsdp":
        yield Fault(
            "parallel.strategy is hsdp, whose counterpart (MiCS) newer versions of DeepSpeed do not have",
            key="parallel.strategy",
            fix="add   parallel.strategy=zero3",
        )
    if parallel.strategy == "auto":
        yield Fault(
            "parallel.strategy is auto, and a DeepSpeed JSON names its stage",
            key="parallel.strategy",
            fix="add for example   parallel.strategy=zero2   to the line; `duoka plan` says which one fits",
        )
    if parallel.pipeline * parallel.sequence * parallel.expert > 1:
        yield Fault(
            "axes beside data and tensor parallelism are no keys of a DeepSpeed JSON",
            key="parallel",
            fix="add   parallel.pipeline=1 parallel.sequence=1 parallel.expert=1",
        )
    if world_size % parallel.tensor:
        yield Fault(
            f"parallel.tensor is {parallel.tensor}, and {world_size} processes are no multiple of it",
            key="parallel.tensor",
            fix=f"add   --nproc {-(-world_size // parallel.tensor) * parallel.tensor}",
        )
    if config.optim.name != "adamw":
        yield Fault(
            f"optim.name is {config.optim.name}, and the file would name AdamW",
            key="optim.name",
            fix="optim.name=adamw",
        )
    if config.train.precision == "fp8":
        what = "train.precision is fp8, and a DeepSpeed JSON knows bf16 and fp16"
        yield Fault(what, key="train.precision", fix="train.precision=bf16")
    if parallel.compress not in ("none", "bf16", "fp16") and not (
        is_quantized(parallel) and parallel.strategy in ("zero3", "fsdp")
    ):
        what = f"parallel.compress is {parallel.compress}, which is not DeepSpeed's"
        yield Fault(what, key="parallel.compress", fix="parallel.compress=none")
    yield from _unsayable_offload(parallel)
    batch, micro = _samples(config.train.global_batch), _samples(config.train.micro_batch) or 1
    at_once = micro * max(1, world_size // parallel.tensor)
    if not batch:
        yield Fault(
            f"train.global_batch is {config.train.global_batch}, and DeepSpeed counts samples",
            key="train.global_batch",
            fix="add for example   train.global_batch=64",
        )
    elif batch % at_once:
        yield Fault(
            f"train.global_batch is {batch}, which {world_size} processes with micro-batches of {micro} do not divide",
            key="train.global_batch",
            fix=f"add   train.global_batch={-(-batch // at_once) * at_once}   or another --nproc",
        )


def _unsayable_offload(parallel: ParallelConfig) -> Iterator[Fault]:
    """What DeepSpeed leaves out without a word, or ends at: below stage 3 it moves all of the state, into memory."""
    offloads, stage = parallel.offloads, STAGES.get(parallel.strategy, 3)
    if offloads.moves_anything and not stage:
        yield Fault(
            f"parallel.offload is {parallel.offload}, and DeepSpeed offloads from stage 1 on; strategy is "
            f"{parallel.strategy}",
            key="parallel.offload",
            fix="add   parallel.strategy=zero1   or   parallel.offload=none",
        )
    elif stage < 3 and (offloads.share < 1 or "disk" in (offloads.optimizer, offloads.params)):
        part = f"share is {offloads.share:g}" if offloads.share < 1 else "optimizer is disk"
        yield Fault(
            f"parallel.offload's {part}, which DeepSpeed knows at stage 3 alone; strategy is {parallel.strategy}",
            key="parallel.offload",
            fix="add   parallel.strategy=zero3   or   parallel.offload=optimizer",
        )
