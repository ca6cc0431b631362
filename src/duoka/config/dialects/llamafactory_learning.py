"""LLaMA-Factory's values about learning: optimizer, loss, schedule, batches, precision. What a value means, by key.

The rows of llamafactory.py call these as `learn.NAME`; what a conversion may answer stands in rows.py.
"""

from __future__ import annotations

from typing import Any

from duoka.config.dialects.rows import (
    Answer,
    Asked,
    Refusal,
    batch_answer,
    is_none,
    is_true,
    number,
    share,
    shown,
    whole,
    words,
)

PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
PRECISIONS = ("bf16", "fp16", "pure_bf16", "fp8")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def precision(value: Any, asked: Asked) -> Any:
    on = [name for name in PRECISIONS if asked.is_on(name)]
    if "fp16" in on and len(on) > 1:
        raise Refusal(f"{' and '.join(on)} are both on", "keep one of them")
    if not on:
        return Answer()
    if "fp8" in on:  # over bf16, whether that is said or not
        return Answer({"train.precision": "fp8"})
    if "pure_bf16" in on:
        return Answer({"train.precision": "bf16"}, "computed in bf16; the trained weights themselves stay in fp32")
    if on == ["fp16"] and not asked.start.has_gpu:
        return Answer({"train.precision": "auto"}, "no GPU here, and fp16 training needs one: train.precision is auto")
    return Answer({"train.precision": on[0]})


def warmup(value: Any, asked: Asked) -> Any:
    if is_none(value) or _schedule_name(asked) == "constant":
        return Answer(note="" if is_none(value) else "lr_scheduler_type constant has no warm-up")
    steps = number(asked.get("warmup_steps", 0), "warmup_steps")
    if steps < 0:
        raise Refusal(
            f"warmup_steps must be 0 or more, got {steps:g}", "write for example:   warmup_steps: 20", "warmup_steps"
        )
    ratio = share(asked.get("warmup_ratio", 0), "warmup_ratio", "warmup_steps")
    return Answer({"optim.warmup": steps if steps > 0 else ratio})


def _schedule_name(asked: Asked) -> str:
    return str(asked.get("lr_scheduler_type", "")).strip().lower()


def schedule(value: Any, asked: Asked) -> Any:
    word = words(
        "lr_scheduler_type",
        {
            "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine",
        },
    )(value, asked)  # fmt: skip
    name = _schedule_name(asked)
    if name != "cosine_with_min_lr":
        return Answer({"optim.schedule": word, **({"optim.warmup": 0.0} if name == "constant" else {})})
    more = asked.get("lr_scheduler_kwargs", {})
    if not isinstance(more, dict):
        example = "write:   lr_scheduler_kwargs: {min_lr_rate: 0.1}"
        raise Refusal(f"lr_scheduler_kwargs must be a block of keys, got {shown(more)}", example, "lr_scheduler_kwargs")
    rate, least = more.get("min_lr_rate"), more.get("min_lr")
    if least is not None:
        peak = number(asked.get("learning_rate", 5e-5), "learning_rate")
        if peak <= 0:
            raise Refusal(
                f"learning_rate must be more than 0, got {peak:g}", "write:   learning_rate: 5.0e-5", "learning_rate"
            )
        rate = number(least, "min_lr") / peak
    if rate is None:
        raise Refusal(
            "lr_scheduler_type cosine_with_min_lr needs its end", "write:   lr_scheduler_kwargs: {min_lr_rate: 0.1}"
        )
    return Answer({"optim.schedule": word, "optim.min_lr": number(rate, "min_lr_rate")})


def schedule_extra(value: Any, asked: Asked) -> Any:
    if is_none(value) or _schedule_name(asked) == "cosine_with_min_lr":
        return Answer()
    raise Refusal(
        "lr_scheduler_kwargs would change the schedule", "only cosine_with_min_lr takes min_lr_rate or min_lr"
    )


def betas(value: Any, asked: Asked) -> Any:
    both = []
    for name, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999)):
        beta = number(asked.get(name, usual), name)
        if not 0 <= beta < 1:
            raise Refusal(f"{name} must be at least 0 and below 1, got {beta:g}", f"write:   {name}: {usual}", name)
        both.append(beta)
    if both[0] ** 2 >= both[1] and both[0] > 0:
        what = f"adam_beta1 {both[0]:g}, squared, is not below adam_beta2 {both[1]:g}: AdamW diverges"
        raise Refusal(what, "write:   adam_beta2: 0.999", "adam_beta2")
    return Answer({"optim.betas": both})


def optimizer(value: Any, asked: Asked) -> Any:
    if asked.is_on("use_muon"):
        return Answer()  # which stands above this name there too
    if str(value) in PLAIN_ADAMW:
        return "adamw"
    if str(value) in ("adamw_8bit", "adamw_bnb_8bit"):
        return "adamw8bit"
    if str(value).startswith("paged_adamw"):
        name = "adamw_8bit" if str(value) == "paged_adamw_8bit" else "adamw_torch"
        raise Refusal(
            f"optim {value} moves its state to the host when the GPU is full, which duoka does not do by itself",
            f"write:   optim: {name}   and, where that does not fit, offload the optimizer (DeepSpeed's "
            "offload_optimizer, or parallel.offload: optimizer in duoka's own YAML)",
        )
    raise Refusal(f"optim {value} is not there yet", f"write:   optim: adamw_torch   (known: {', '.join(PLAIN_ADAMW)})")


def epochs(value: Any, asked: Asked) -> Any:
    if not _max_steps(asked):
        return value
    number(value, "num_train_epochs")
    return Answer(note="max_steps says how long")


def _max_steps(asked: Asked) -> int:
    steps = number(asked.get("max_steps", -1), "max_steps")
    if steps < 0 and steps != -1:
        raise Refusal(
            f"max_steps {steps:g} is no number of steps",
            "write for example:   max_steps: 500   or   -1, which means that num_train_epochs says how long",
            "max_steps",
        )
    return whole(steps, "max_steps") if steps > 0 else 0


def steps(value: Any, asked: Asked) -> Any:
    steps = _max_steps(asked)
    # There max_steps goes on past num_train_epochs, so an epoch must never end the run here.
    return Answer({"train.max_steps": steps, "train.epochs": float(steps)} if steps else {})


def batch(value: Any, asked: Asked) -> Any:
    return batch_answer(asked.get(BATCH[0], 8), asked.get(BATCH[1], 1), asked, BATCH)


def data_seed(value: Any, asked: Asked) -> Any:
    seed = asked.get("seed", 42)
    if is_none(value) or number(value, "data_seed") == number(seed, "seed"):
        return Answer()
    what = f"data_seed is {value} and seed is {seed}: one seed is for everything here, the order included"
    is_seed = isinstance(value, int) and value >= 0
    raise Refusal(what, f"delete data_seed, or write:   seed: {value}" if is_seed else "delete data_seed")


def recompute(value: Any, asked: Asked) -> Any:
    return Answer({"train.recompute": "full" if value else "none"})


def muon(value: Any, asked: Asked) -> Any:
    """Their Muon moves a matrix by 0.2 sqrt(max(rows, columns)) x lr, so that one rate serves both halves."""
    if not value:
        return Answer()
    rate = asked.get("learning_rate", 5e-5)
    return Answer(
        {"optim.name": "muon", "optim.muon_scale": "adamw", "optim.adamw_lr": rate},
        "the same formula and rate for the layers' matrices, AdamW at that rate for the rest; norms and biases never "
        "decay here, and on a CPU matrices are made orthogonal in fp32 (bf16 there)",
    )


def loader(value: Any, asked: Asked) -> Any:
    """Accelerate's words for how batches are handed out; one of them makes the batch another one."""
    is_written = isinstance(value, str) and "split_batches" in value  # as JSON in a string, or in a file of that name
    if is_written or (isinstance(value, dict) and is_true(value.get("split_batches"))):
        raise Refusal(
            "accelerator_config.split_batches shares one batch per device among all devices",
            "delete it, and write the batch of one device as per_device_train_batch_size",
        )
    return Answer() if is_none(value) else Answer(note="batches are read from memory-mapped tokens")
