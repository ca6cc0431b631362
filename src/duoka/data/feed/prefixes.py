"""What documents of a packed row begin with alike. NumPy only: plans count it, and model/prefixes.py leaves it out."""

from __future__ import annotations

import itertools

import numpy as np

_WORTH = 0.02  # of a row's tokens: fewer that are left out do not pay for keys that are copied


def find_repeats(row: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(which tokens of a row stand for themselves, for each token the one that stands for it); None: nearly all do.

    Documents have these lengths; a beginning that several share stands for itself in one of them.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Bytes of big numbers first sort as the numbers do; neighbors in that order share the longest beginnings.
    words = row.astype(">i8")
    order = sorted(range(len(lengths)), key=lambda one: words[starts[one] : ends[one]].tobytes())
    is_own, source = np.ones(len(row), bool), np.arange(len(row))
    for before, one in itertools.pairwise(order):
        first, second = (row[starts[which] : ends[which]] for which in (before, one))
        size = min(len(first), len(second))
        differs = np.flatnonzero(first[:size] != second[:size])
        alike = int(differs[0]) if len(differs) else size
        is_own[starts[one] : starts[one] + alike] = False
        source[starts[one] : starts[one] + alike] = source[starts[before] : starts[before] + alike]
    return (is_own, source) if (~is_own).sum() > _WORTH * len(row) else None
