"""DeepSpeed's three numbers of a batch, and the ranks that they are counted for, as train.global_batch."""

from __future__ import annotations

from typing import Any

from duoka.config.dialects.rows import Answer, Asked, Refusal, batch_answer, whole

MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
TENSOR = "tensor_parallel.autotp_size"


def _micro(asked: Asked) -> int | None:
    for name in (MICRO, "per_device_train_batch_size"):
        value = asked.get(name, "auto")
        if value != "auto":
            return whole(value, name)
    return None


def _accumulation(value: Any, asked: Asked) -> Any:
    micro = _micro(asked)
    if micro is None:
        return Answer(note=f"of no use without {MICRO}: duoka accumulates as train.global_batch asks for")
    steps = asked.get(STEPS, 1)
    return batch_answer(micro, 1 if steps == "auto" else steps, asked, (MICRO, STEPS), _tensor_ranks(asked))


def read_steps(value: Any, asked: Asked) -> Any:
    if "auto" in (asked.get("train_batch_size", "auto"), asked.get(MICRO, "auto")):
        return _accumulation(value, asked)
    return Answer()  # the row of the micro-batch has looked at all three


def read_micro_batch(value: Any, asked: Asked) -> Any:
    total, steps = asked.get("train_batch_size", "auto"), asked.get(STEPS, "auto")
    if total != "auto" and steps == "auto":
        return Answer({"train.micro_batch": whole(value, MICRO)})
    answer, ranks = _accumulation(value, asked), _ranks(asked)
    per_rank = whole(value, MICRO) * (1 if steps == "auto" else whole(steps, STEPS))
    if total == "auto" or (wanted := whole(total, "train_batch_size")) == per_rank * ranks:
        return answer
    needed, rest = divmod(wanted, per_rank)
    start = "" if rest else f"start {needed} processes (--nproc {needed}), or "
    raise Refusal(
        f"train_batch_size is {wanted}, and {MICRO} {value} x {STEPS} {steps} x {ranks} "
        f"process{'es' if ranks > 1 else ''} of this start are {per_rank * ranks}",
        f"{start}delete one of the three",
    )


def _ranks(asked: Asked) -> int:
    """Processes as DeepSpeed counts them: whole groups that share every matrix."""
    tensor = _tensor_ranks(asked)
    return max(1, asked.start.num_ranks // tensor) * tensor


def read_batch(value: Any, asked: Asked) -> Any:
    """DeepSpeed counts a sample once for each rank that shares it."""
    size, ranks = whole(value, "train_batch_size"), _tensor_ranks(asked)
    if size % ranks:
        raise Refusal(
            f"train_batch_size is {size}, which counts each sample once for each of the {ranks} ranks of "
            f"{TENSOR}: no multiple of it",
            f'write:   "train_batch_size": {-(-size // ranks) * ranks}',
            "train_batch_size",
        )
    note = f"{size} counts every sample once for each of the {ranks} ranks that share a matrix"
    return size if ranks == 1 else Answer({"train.global_batch": size // ranks}, note)


def read_tensor(value: Any, asked: Asked) -> Any:
    size = _tensor_ranks(asked)
    if size > 1 and asked.get("per_device_train_batch_size") is not None:
        raise Refusal(
            f"{TENSOR} is {size} beside a batch per device, of which not every device has one of its own then",
            "delete it, and write duoka's own   parallel: {tensor: 2}   with   train.global_batch",
            TENSOR,
        )
    return size if size > 1 else Answer()


def _tensor_ranks(asked: Asked) -> int:
    return max(1, whole(asked.get(TENSOR, 1), TENSOR, least=0))
