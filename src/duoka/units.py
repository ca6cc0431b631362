"""Numbers with units as people write and read them: "8k tokens", "10min", "1 epoch", 1.5 GiB."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

_SCALE = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000, "g": 1_000_000_000}
_AMOUNT = re.compile(r"^\s*([0-9]+(?:[._][0-9]+)*(?:\.[0-9]+)?)\s*([kmbg]?)\s*([a-z]*)\s*$", re.IGNORECASE)
_SECONDS = {
    "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600,
    "d": 86400, "day": 86400, "days": 86400,
}  # fmt: skip


@dataclass(frozen=True)
class Amount:
    """A count of samples or tokens, e.g. a global batch of 16 samples or of 8,000 tokens."""

    count: int
    unit: Literal["samples", "tokens"]

    def __str__(self) -> str:
        return f"{self.count:,} {self.unit}"


def parse_amount(value: int | float | str) -> Amount:
    """16 -> 16 samples; "8k tokens" -> 8,000 tokens. Raises ValueError with the reason."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is no count")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value != int(value) or value < 1:
            raise ValueError(f"{value!r} is not a whole number of at least 1")
        return Amount(int(value), "samples")
    found = _AMOUNT.match(value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f'{value!r} is neither a number nor like "8k tokens"')
    number, scale, unit = found.groups()
    count = float(number.replace("_", "")) * _SCALE[scale.lower()]
    unit = unit.lower() or "samples"
    if unit not in ("sample", "samples", "token", "tokens"):
        raise ValueError(f"{unit!r} is no unit here; samples or tokens are")
    if count != int(count) or count < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return Amount(int(count), "tokens" if unit.startswith("token") else "samples")


def parse_warmup(value: int | float | str) -> float | Amount:
    """0.03 -> a share, 100 -> steps, "2M tokens" -> 2,000,000 tokens. Raises ValueError with the reason."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            amount = parse_amount(str(value))
            if amount.unit != "tokens":
                raise ValueError(f"{value!r} counts no tokens; a bare number is a share or steps") from None
            return amount
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} must be a number of at least 0")
    return float(value)


def parse_share_of_layers(value: int | float | str) -> Fraction:
    """ "1/2" -> every second layer, "3/4" -> three of four; neither none nor all. Raises ValueError with the reason."""
    found = re.match(r"^\s*([0-9]{1,4})\s*/\s*([0-9]{1,4})\s*$", value) if isinstance(value, str) else None
    if not found:
        raise ValueError(f'{value!r} is no share of the layers; write for example "1/2"')
    some, of = (int(part) for part in found.groups())
    if not 0 < some < of:
        raise ValueError(f"{value!r} must be between none and all of the layers")
    return Fraction(some, of)


@dataclass(frozen=True)
class Budget:
    """How much text to learn from: tokens, or tokens per parameter."""

    count: float
    is_per_parameter: bool

    def tokens(self, num_parameters: int) -> int:
        return math.ceil(self.count * (num_parameters if self.is_per_parameter else 1))


def parse_budget(value: int | float | str) -> Budget:
    """ "20x" -> 20 tokens per parameter; "2B tokens", "2B" and 2000000000 -> so many. Raises ValueError."""
    found = re.match(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*[x×]\s*$", value) if isinstance(value, str) else None
    if found:
        if not float(found.group(1)):
            raise ValueError(f"{value!r} is no text at all")
        return Budget(float(found.group(1)), is_per_parameter=True)
    if isinstance(value, str) and "sample" in value.lower():
        raise ValueError(f"{value!r} counts samples, and tokens are meant")
    return Budget(parse_amount(value).count, is_per_parameter=False)


@dataclass(frozen=True)
class Every:
    """How often something happens: every so many steps, seconds, or epochs."""

    count: float
    unit: Literal["steps", "seconds", "epochs"]

    def __str__(self) -> str:
        number = int(self.count) if self.count == int(self.count) else self.count
        return f"{number} {self.unit}"


def parse_every(value: int | str) -> Every:
    """50 -> 50 steps; "10min" -> 600 seconds; "1 epoch" -> 1 epoch. Raises ValueError with the reason."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f'{value!r} is neither a number of steps nor like "10min" or "1 epoch"')
    if isinstance(value, int):
        value = f"{value} steps"
    found = re.match(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*$", value, re.IGNORECASE)
    if not found:
        raise ValueError(f'{value!r} is neither a number of steps nor like "10min" or "1 epoch"')
    count, unit = float(found.group(1)), found.group(2).lower() or "steps"
    if count <= 0:
        raise ValueError(f"{value!r} must be more than 0")
    if unit in ("step", "steps"):
        if count != int(count):
            raise ValueError(f"{value!r} is not a whole number of steps")
        return Every(count, "steps")
    if unit in ("epoch", "epochs"):
        return Every(count, "epochs")
    if unit in _SECONDS:
        return Every(count * _SECONDS[unit], "seconds")
    raise ValueError(f"{unit!r} is no unit of time here; steps, epochs, s, min, h, d are")


def steps_of_epochs(epochs: float, per_epoch: int) -> int:
    """Steps of so many epochs; a part of a step counts as one, as in transformers' Trainer.

    1.1 x 10 is 11.000000000000002 in floats, and 11 here.
    """
    return max(1, math.ceil(round(epochs * per_epoch, 6)))


def parse_seconds(value: int | float | str) -> float:
    """600 or "10min" -> 600.0. Raises ValueError with the reason."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 < value < math.inf:
            raise ValueError(f"{value!r} must be more than 0 seconds, and finite")
        return float(value)
    every = parse_every(f"{value} s" if re.fullmatch(r"\s*[0-9.]+\s*", str(value)) else str(value))
    if every.unit != "seconds":
        raise ValueError(f'{value!r} is no time; write for example "10min"')
    return every.count


_BYTES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(text: str) -> int:
    """`16 MiB` becomes 16777216; a bare number is bytes. Raises ValueError with the reason."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if not found or found.group(2).lower() not in _BYTES:
        raise ValueError(f'{text!r} is no number of bytes; write for example "16 MiB"')
    count = int(float(found.group(1)) * _BYTES[found.group(2).lower()])
    if count < 1:
        raise ValueError(f"{text!r} must be at least one byte")
    return count


def format_bytes(count: float) -> str:
    """1610612736 -> "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{3 if abs(count) < 999.5 else 4}g} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB" if count < 1024 else f"{count / 1024:,.2f} PiB"


def format_count(count: float) -> str:
    """134515008 -> "134.5M"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.4g}{unit}"
    return f"{count:.4g}"


def format_seconds(seconds: float) -> str:
    """5025 -> "1h 24min", 0.034 -> "34 ms"."""
    if 0 < seconds < 0.0995:  # what two digits would round to 0.1 s is written so: "1e+02 ms" otherwise
        return f"{seconds * 1000:.2g} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, secs = divmod(max(60, int(seconds)), 60)
    if minutes < 60:
        return f"{minutes}min {secs:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}min"
    return f"{hours // 24}d {hours % 24}h"
