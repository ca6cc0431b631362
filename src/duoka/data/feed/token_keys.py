"""A number for every token of a step: of the seed, the step, the sample and the place in it, and of nothing else.

The loader and the stream feed lay them beside the tokens; model/dropout.py counts its masks from them. However a step
is cut into ranks and micro-batches, packed or padded, a token keeps its number. NumPy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from duoka.data.feed.epoch_plan import mix_keys

PADDING_KEY = 0  # of padding positions: no target attends to them


def step_key(seed: int, step: int) -> int:
    """The key that all token keys of one step derive from; `step` counts from the run's first as 0."""
    return int.from_bytes(hashlib.blake2b(f"dropout/{seed}/{step}".encode(), digest_size=8).digest(), "little")


def sample_keys(key: int, sample: int, length: int) -> np.ndarray:
    """The keys (length,) int64 of one sample's tokens in the step of `key`."""
    start = np.array([sample], np.uint64)
    start += np.uint64(key)
    mix_keys(start)
    keys = np.arange(length, dtype=np.uint64)
    keys += start
    mix_keys(keys)
    return keys.view(np.int64)


def end_to_end(key: int, samples: Iterable[tuple[int | None, int]]) -> np.ndarray:
    """The keys of a packed row, from each (sample, length) in it; a sample of None is padding."""
    parts = [
        np.full(length, PADDING_KEY, np.int64) if sample is None else sample_keys(key, sample, length)
        for sample, length in samples
    ]
    return np.concatenate(parts)
