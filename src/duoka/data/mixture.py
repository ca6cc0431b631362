"""From sets to the samples of training and evaluation: the seeded split, and the shares of a mixture.

Both are decided by the samples' content and the seed alone, so that they stay the same when files move, and are kept
beside the tokens, so that they stay the same when this code changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duoka.config.schema import RunConfig
from duoka.data.feed.epoch_plan import mix_keys, shuffled
from duoka.data.read.registry import ResolvedSet
from duoka.data.tokens.token_store import TokenPart, TokenStore
from duoka.errors import DataError
from duoka.runs.cache import cache_folder, hold_lock, make_folder

MIX_VERSION = 1
_FIX = "look at the counts above: records may be too long, wrong, or without an answer that fits in data.max_length"


@dataclass(frozen=True)
class Asked:
    """How much of the mixture a set is to be, as `data.train` says it."""

    weight: float | None = None
    share: float | None = None
    epochs: float | None = None

    def key(self) -> object:
        """What tells one from another in the cache; a weight alone is written as it always was."""
        return self.weight if self.share is None and self.epochs is None else [self.share, self.epochs]


@dataclass(frozen=True)
class Mixture:
    train: TokenStore
    eval: TokenStore | None


def mix_parts(sets: Sequence[tuple[ResolvedSet, TokenPart]], config: RunConfig) -> Mixture:
    """The stores of a run. Raises DataError when one of them would be empty."""
    train = [(found, part) for found, part in sets if found.split == "train"]
    held_out = [part for found, part in sets if found.split == "eval"]
    share = config.data.eval if isinstance(config.data.eval, float) else 0.0
    parts = [part for _, part in train]
    asked = [Asked(found.weight, found.share, found.epochs) for found, _ in train]
    train_index, eval_index = _kept_index(parts, asked, share, config.train.seed)
    if len(train_index) == 0:
        raise DataError("no sample is left to learn from", fix=_FIX)
    store = TokenStore(parts, train_index)
    if held_out:
        if sum(map(len, held_out)) == 0:
            raise DataError("no sample is left in data.eval", fix=_FIX)
        return Mixture(store, TokenStore(held_out))
    if share == 0.0:
        return Mixture(store, None)
    if len(eval_index) == 0:
        few = f"{len(train_index)} samples are too few to split"
        few = few if len(train_index) < 2 else f"the {len(train_index)} samples are of one record, which stays whole"
        raise DataError(f"data.eval is {share:g}, and {few}", fix="set data.eval: 0, or add data")
    return Mixture(store, TokenStore(parts, eval_index))


def _kept_index(
    parts: Sequence[TokenPart], asked: Sequence[Asked], share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The chosen samples of train and eval, as places in the parts end to end; decided once, then read."""
    facts = [MIX_VERSION, seed, share, [one.key() for one in asked]]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.arrays.content.tobytes())
        if part.arrays.records is not None:
            digest.update(part.arrays.records.tobytes())
    root = make_folder(cache_folder() / "splits")
    file = root / f"{digest.hexdigest()}.npz"
    with hold_lock(root / f"{digest.hexdigest()}.lock", on_wait=lambda: None):
        if not file.is_file():
            train, held_out = split_and_mix([part.records for part in parts], asked, share, seed)
            draft = file.with_suffix(".draft")
            with draft.open("wb") as out:
                np.savez(out, train=train, eval=held_out)
            draft.replace(file)
    with np.load(file, allow_pickle=False) as kept:
        return kept["train"], kept["eval"]


def split_and_mix(
    records: Sequence[np.ndarray], asked: Sequence[Asked], share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places in the sets end to end, rising. Every set gives the same share to evaluation; weights act on the rest."""
    starts = np.cumsum([0, *map(len, records)])
    held_out, kept = [], []
    for start, record in zip(starts, records, strict=False):
        mine, others = split_set(np.asarray(record), share, seed)
        kept.append(mine + start)
        held_out.append(others + start)
    counts = count_mixture([len(places) for places in kept], asked)
    chosen = [
        _repeat(places, count, f"mixture/{seed}/{number}")
        for number, (places, count) in enumerate(zip(kept, counts, strict=True))
    ]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *chosen]), np.concatenate([empty, *held_out])


def split_set(records: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places for training and for evaluation. What is of one record, and equal samples, are on one side."""
    count = len(records)
    num_held_out = min(max(round(share * count), 1), count - 1) if share > 0 and count > 1 else 0
    start = int.from_bytes(hashlib.blake2b(f"split/{seed}".encode(), digest_size=8).digest(), "little")
    keys = records ^ np.uint64(start)
    mix_keys(keys)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    # The border nearest to the share: a part of what is learned would else be measured, too.
    borders = np.flatnonzero(np.diff(keys[order])) + 1
    if num_held_out:
        num_held_out = int(borders[np.argmin(np.abs(borders - num_held_out))]) if len(borders) else 0
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])


def count_mixture(sizes: Sequence[int], asked: Sequence[Asked]) -> list[int]:
    """Samples per set in an epoch: by weights, or each set `epochs` times and then the shares on top of these."""
    if all(one.share is None and one.epochs is None for one in asked):
        return mixture_counts(sizes, [one.weight for one in asked])
    counts = [
        0 if one.share is not None or not size else max(1, round(size * (1.0 if one.epochs is None else one.epochs)))
        for size, one in zip(sizes, asked, strict=True)
    ]
    shares = [one.share if one.share is not None and size else 0.0 for size, one in zip(sizes, asked, strict=True)]
    total = sum(counts) / (1.0 - sum(shares))
    return [max(1, round(share * total)) if share else count for share, count in zip(shares, counts, strict=True)]


def mixture_counts(sizes: Sequence[int], weights: Sequence[float | None]) -> list[int]:
    """Samples per set in an epoch, which stays as long as all sets together.

    Sets without a weight share the remainder, by size; without any weight each sample counts once.
    """
    if all(weight is None for weight in weights):
        return list(sizes)
    given = sum(weight for weight in weights if weight is not None)
    rest_size = sum(size for size, weight in zip(sizes, weights, strict=True) if weight is None)
    left = max(0.0, 1.0 - given) if rest_size else 0.0
    parts = [left * size / rest_size if weight is None else weight for size, weight in zip(sizes, weights, strict=True)]
    parts = [part if size else 0.0 for part, size in zip(parts, sizes, strict=True)]
    if sum(parts) == 0:
        return [0] * len(sizes)
    total = sum(sizes)
    borders = np.round(np.cumsum([0.0, *parts]) / sum(parts) * total).astype(int)
    return [int(count) for count in np.diff(borders)]


def _repeat(places: np.ndarray, count: int, name: str) -> np.ndarray:
    """`count` of the places: each as often as the others, give or take one."""
    if count == len(places) or len(places) == 0:
        return places
    times, more = divmod(count, len(places))
    extra = places[shuffled(len(places), name)[:more].astype(np.int64)]
    return np.sort(np.concatenate([np.repeat(places, times), extra]))
