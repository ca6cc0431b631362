"""The JSON that DeepSpeed is given for a run: complete, with no "auto", and with every default that changes results.

For `parallel.engine: deepspeed`, and for `duoka config convert` (people who go on with DeepSpeed itself). Clipping is
always written: left out it is 1.0 in DeepSpeed, which nobody sees in a loss.
"""

from __future__ import annotations

from typing import Any

from duoka.config.schema import ParallelConfig

STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


def engine_json(
    parallel: ParallelConfig, strategy: str, precision: str, offload: str, world_size: int
) -> dict[str, Any]:
    """What duoka gives DeepSpeed as its engine: batches, the loss's scale, clipping and the schedule stay duoka's."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": _zero(parallel, strategy, offload),
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": _autocast(parallel, precision),
        "steps_per_print": 1 << 60,
    }


def _zero(parallel: ParallelConfig, strategy: str, offload: str) -> dict[str, Any]:
    own = parallel.deepspeed.model_dump()
    stage = STAGES[strategy]
    kept = {name: value for name, value in own.items() if stage == 3 or not name.startswith(("stage3", "sub_group"))}
    zero: dict[str, Any] = {"stage": stage, "reduce_scatter": True, "contiguous_gradients": True}
    zero |= kept if stage else {}
    if offload != "none" and stage:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if offload == "params" and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if stage in (1, 2) and offload == "none":
        zero["compute_grad_norm"] = False  # duoka's norm is there before the step
    return zero


def _autocast(parallel: ParallelConfig, precision: str) -> dict[str, Any]:
    """bf16 as every strategy of duoka computes it: autocast over fp32 weights, whose gradients are added in fp32."""
    if precision != "bf16":
        return {"enabled": False}
    travels: dict[str, Any] = {} if parallel.compress == "bf16" else {"lower_precision_safe_modules": []}
    return {"enabled": True, "dtype": "bfloat16", **travels}
