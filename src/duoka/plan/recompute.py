"""Which layers are computed again in the backward pass, by the value of train.recompute.

The same answer for the plan's arithmetic and for the model itself (parallel/recompute.py), so that a rank keeps what
was planned. Layers are counted on each rank alone: every stage of a pipeline computes its share again.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from duoka.units import parse_share_of_layers

# What `auto` tries in this order, the least first. Few on purpose: a little more or less free memory changes nothing.
RUNGS = ("1/4", "1/2", "3/4", "full")


def check_recompute(how: str) -> str:
    """`how` itself. Raises ValueError for what train.recompute cannot be."""
    if how not in ("none", "selective", "full"):
        parse_share_of_layers(how)
    return how


def is_share(how: str) -> bool:
    """True for a share of the layers, such as 1/2."""
    return how not in ("none", "selective", "full")


def whole_layers(how: str, num_layers: int) -> tuple[bool, ...]:
    """Of each layer, whether all of it is computed again: at least that share, evenly spread.

    The last one only where all are (3/4 of three layers come to that). The backward pass begins with it: where it is
    kept whole, nothing is computed again while everything else is still there.
    """
    if how in ("none", "selective"):
        return (False,) * num_layers
    if how == "full":
        return (True,) * num_layers
    count = math.ceil(parse_share_of_layers(how) * num_layers)
    upto = [math.ceil(Fraction(count * layers, max(1, num_layers))) for layers in range(num_layers + 1)]
    return tuple(after > before for before, after in itertools.pairwise(upto))


def part_of_layers(how: str, num_layers: int) -> float:
    """The part of them that is computed again as a whole."""
    return sum(whole_layers(how, num_layers)) / max(1, num_layers)


def in_words(how: str) -> str:
    """As the plan says it: which kind is meant."""
    if how == "selective":
        return "selective (operator by operator: products and attention are kept)"
    if not is_share(how):
        return how
    share = parse_share_of_layers(how)
    layers = f"every {_ORDINALS.get(share.denominator, f'{share.denominator}th')} layer"
    return f"{how} ({layers if share.numerator == 1 else f'{share.numerator} of {share.denominator} layers'}, whole)"


_ORDINALS = {2: "second", 3: "third", 4: "fourth"}
