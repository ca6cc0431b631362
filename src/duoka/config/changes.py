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


def _is_allowed(key: str, old: RunConfig, new: RunConfig) -> bool:
    allowed = new.checkpoint.allow_changes
    if key in allowed or key.split(".")[0] in allowed:
        return True
    # More epochs of a rate that knows no end: the steps done so far would have been the same.
    optim = new.optim
    endless = optim.schedule == "constant" and (isinstance(optim.warmup, str) or optim.warmup == 0 or optim.warmup >= 1)
    return key in LENGTH_KEYS and endless and old.optim == new.optim


def how_to_allow(differences: list[Difference]) -> str:
    return f"checkpoint.allow_changes=[{', '.join(one.key for one in differences)}]"
