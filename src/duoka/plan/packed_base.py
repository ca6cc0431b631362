"""What of a frozen base is packed into 4 or 8 bits (0: nothing), and in how many bytes."""

from __future__ import annotations

from collections.abc import Mapping

from duoka.plan.sizes import ModelShape

# Bytes per frozen weight: 4-bit with a scale per 64 weights, themselves in 8 bits.
BYTES: Mapping[int, float] = {4: 0.53, 8: 1.02}


def numbers(bits: int, shape: ModelShape, block_linear: int, frozen: int) -> int:
    """How many of a share's are packed: embedding, head, norms and experts stay as they are."""
    if not bits:
        return 0
    part = shape.num_packable / max(1, shape.num_block_linear)
    return min(int(part * block_linear), frozen)


def unpacked(bits: int, shape: ModelShape, frozen_size: float) -> str:
    """What a formula has to say beside the packed ones' bytes."""
    return f" ({frozen_size:g} of experts)" if bits and shape.experts else ""


def shared(bits: int, shape: ModelShape, packed: int, frozen_size: float, divisor: str) -> tuple[int, str]:
    """(bytes of a frozen base that every rank has all the same, its terms): the scales of packed blocks."""
    if not bits:
        return 0, f" + {frozen_size:g}(P-Pt)/{divisor}"
    codes = bits / 8
    scale = BYTES[bits] - codes
    terms = f" + {codes:g}(P-Pt)/{divisor}{unpacked(bits, shape, frozen_size)} + {scale:.2g}(P-Pt)"
    return int(packed * scale), terms
