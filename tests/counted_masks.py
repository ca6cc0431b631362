"""Dropout's masks by whole numbers: what duoka counts, written again in Python and NumPy, sharing no code with it."""

import hashlib

import numpy as np

ALL = 2**64 - 1
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def number_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(value):
    value = value * STEP & ALL
    value = (value ^ value >> 30) * FIRST & ALL
    value = (value ^ value >> 27) * SECOND & ALL
    return value ^ value >> 31


def keys_of(seed, step, sample, length):
    """One number per token of a sample, of 64 bits without a sign."""
    begin = mix((number_of(f"dropout/{seed}/{step}") + sample) & ALL)
    return [mix((begin + place) & ALL) for place in range(length)]


def is_dropped(keys, name, width, p, call=0):
    """(tokens, width) of the dropout of this name: 16 bits a unit, four units a hash."""
    state = (np.array(keys, dtype=np.uint64) + np.uint64(number_of(f"{name}/{call}")))[:, None]
    state = state + np.arange(-(-width // 4), dtype=np.uint64) * np.uint64(STEP)
    for shift, factor in ((32, FIRST), (29, SECOND)):
        # Shifted with the sign: ones come in from above where the first bit is one.
        high = np.where(state >> np.uint64(63), np.uint64(ALL << (64 - shift) & ALL), np.uint64(0))
        state = (state ^ (state >> np.uint64(shift) | high)) * np.uint64(factor)
    lanes = np.stack([state >> np.uint64(16 * lane) & np.uint64(0xFFFF) for lane in range(4)], axis=-1)
    flipped = lanes.reshape(len(keys), -1)[:, :width] ^ np.uint64(0x8000)  # as a number with a sign is ordered
    return flipped < round(p * 65536)
