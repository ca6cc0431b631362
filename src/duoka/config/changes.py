"""May a run go on under another config? Differences that results depend on, less those that are allowed.

Asked before a start, by cluster/run_lock.py with the run folder's config, and by store/resume.py with the checkpoint's.
"""

from __future__ import annotations

from duoka.config.catalog import leaves
from duoka.config.schema import RunConfig
from duoka.config.write import Difference, result_differences

LENGTH_KEYS = ("train.epochs", "train.max_steps", "train.tokens")
# The order of samples depends on these, and on what the samples are.
ORDER_KEYS = ("train.global_batch", "train.seed")
SAMPLE_KEYS = ("data.", "model.", "train.seed")
# What a run is: which weights are trained, from which base, by which optimizer. Its checkpoints hold these tensors and
# no others, so that no allowance can change them; a new run may begin with what this one has made.
FIXED_KEYS = (
    "model.name", "model.depth", "model.from_scratch", "model.width", "model.head_dim", "model.kv_heads",
    "model.mlp_width", "model.revision", "model.quantization", "model.double_quantization", "stage.name",
    "data.stream", "data.streams", "lora", "lora.rank", "lora.targets", "lora.init", "lora.pissa_iterations",
    "lora.adapter", "lora.merge", "train_only", "train_only.layers", "train_only.spread", "train_only.modules",
    "train_only.extra", "optim.name", "optim.state",
)  # fmt: skip
# The frozen base is computed from these too: what PiSSA takes out of it, or its random weights.
_KEYS_OF_PISSA = ("lora.alpha", "train.seed")
_KEYS_OF_RANDOM_BASE = ("train.seed",)
_NOT_SHOWN = ("output", "checkpoint.resume", "checkpoint.allow_changes")


def refused_changes(old: RunConfig, new: RunConfig) -> list[Difference]:
    """What must not differ when `new` goes on with a run of `old`."""
    return [one for one in result_differences(old, new) if not _is_allowed(one.key, old, new)]


def allowed_changes(old: RunConfig, new: RunConfig) -> list[Difference]:
    """What differs, changes results, and is allowed."""
    return [one for one in result_differences(old, new) if _is_allowed(one.key, old, new)]


def allows_other_samples(old: RunConfig, new: RunConfig) -> bool:
    """Whether the training data may be other than it was, by a changed key or because the data may change."""
    by_key = any(one.key.startswith(SAMPLE_KEYS) for one in allowed_changes(old, new))
    return by_key or bool({"data", "data.train"} & set(new.checkpoint.allow_changes))


def changes_order(old: RunConfig, new: RunConfig) -> bool:
    return any(one.key in ORDER_KEYS for one in allowed_changes(old, new))


def harmless_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Other keys that differ, as `log.every 10 -> 1`: no result depends on them."""
    before, after = leaves(old), leaves(new)
    loud = {one.key for one in result_differences(old, new)}
    keys = [key for key in after if key not in loud and key not in _NOT_SHOWN and key in before]
    return [f"{key} {before[key]} -> {after[key]}" for key in keys if before[key] != after[key]]


def is_fixed(key: str, config: RunConfig) -> bool:
    """Whether a run of `config` has this key for good."""
    is_adapted = config.lora is not None or config.train_only is not None
    is_pissa = config.lora is not None and config.lora.init == "pissa"
    return (
        key in FIXED_KEYS
        or (is_pissa and key in _KEYS_OF_PISSA)
        or (is_adapted and config.model.depth is not None and key in _KEYS_OF_RANDOM_BASE)
    )


def _is_allowed(key: str, old: RunConfig, new: RunConfig) -> bool:
    if is_fixed(key, old):
        return False
    allowed = new.checkpoint.allow_changes
    if key in allowed or key.split(".")[0] in allowed:
        return True
    # More epochs of a rate that knows no end: the steps done so far would have been the same.
    optim = new.optim
    endless = optim.schedule == "constant" and (isinstance(optim.warmup, str) or optim.warmup == 0 or optim.warmup >= 1)
    return key in LENGTH_KEYS and endless and old.optim == new.optim


def how_to_go_on(differences: list[Difference], old: RunConfig, run: str) -> str:
    """What to do about changes that are refused: `run` is the run's folder."""
    fixed = [one.key for one in differences if is_fixed(one.key, old)]
    if fixed:
        changed = f"{', '.join(fixed)} {'is' if len(fixed) == 1 else 'are'} fixed for a run, whatever is allowed:"
        begin = f"model={run} output={run}-2" if old.lora is None else f"output={run}-2"
        return f"go on with the old values; {changed} start anew:   {begin}"
    names = ", ".join(one.key for one in differences)
    reorders = any(one.key in ORDER_KEYS or one.key.startswith(SAMPLE_KEYS) for one in differences)
    place = "a checkpoint at an epoch's end" if reorders else "its newest checkpoint"
    return (
        f"go on with the old values, start anew:   output={run}-2\n"
        f"or change this run's course from {place} on:   checkpoint.allow_changes=[{names}]"
    )
