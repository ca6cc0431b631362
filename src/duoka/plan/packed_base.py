"""What of a frozen base is packed into 4 or 8 bits, and in how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duoka.plan.recipe import ModelShare, Work

# Bytes per frozen weight: 4-bit with a scale per 64 weights, themselves in 8 bits.
BYTES: Mapping[int, float] = {4: 0.53, 8: 1.02}


def numbers(work: Work, share: ModelShare) -> int:
    """How many are packed: embedding, head, norms and experts stay as they are."""
    if not work.frozen_bits:
        return 0
    part = work.shape.num_packable / max(1, work.shape.num_block_linear)
    return min(int(part * share.block_linear), share.frozen)


def unpacked(work: Work, frozen_size: float) -> str:
    """What a formula has to say beside the packed ones' bytes."""
    return f" ({frozen_size:g} of experts)" if work.frozen_bits and work.shape.experts else ""


def shared(work: Work, packed: int, frozen_size: float, divisor: str) -> tuple[int, str]:
    """(bytes of a frozen base that every rank has all the same, its terms): the scales of packed blocks."""
    if not work.frozen_bits:
        return 0, f" + {frozen_size:g}(P-Pt)/{divisor}"
    codes = work.frozen_bits / 8
    scale = BYTES[work.frozen_bits] - codes
    terms = f" + {codes:g}(P-Pt)/{divisor}{unpacked(work, frozen_size)} + {scale:.2g}(P-Pt)"
    return int(packed * scale), terms
