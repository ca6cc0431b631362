"""A curve in the terminal, within 80 columns: braille dots where the encoding has them, else plain ASCII."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from duoka.watch.scale import Point, log_ticks, nice_ticks, padded, points_of, short_number, thin, wants_log

# Dot (column, row) of a braille cell -> its bit, as Unicode numbers them.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def can_draw(text: str, encoding: str | None) -> bool:
    """True when a terminal with this encoding can show `text`."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw_curve(
    steps: Sequence[float],
    values: Sequence[float | None],
    *,
    width: int = 76,
    height: int = 10,
    encoding: str | None = None,
    title: str = "",
) -> list[str]:
    """Lines of text with axes. Nulls are left out; nothing to draw gives one line that says so."""
    encoding = encoding if encoding is not None else getattr(sys.stdout, "encoding", None)
    points = points_of(steps, values)
    if not points:
        return [f"{title}: nothing to draw yet".lstrip(": ")]
    unicode = can_draw("⣿┤└─", encoding)
    low, high = min(p.y for p in points), max(p.y for p in points)
    log = wants_log(low, high)
    bottom, top = padded(low, high, log=log)
    ticks = (log_ticks if log else nice_ticks)(bottom, top, max(2, height // 2))
    labels = _labels_by_row(ticks, bottom, top, height, log)
    margin = max(len(label) for label in labels.values()) if labels else 1
    columns = max(8, width - margin - 2)
    canvas = _Canvas(columns, height, unicode)
    _trace(canvas, points, bottom, top, log)
    side, corner, line = ("┤", "└", "─") if unicode else ("|", "+", "-")
    bar = "│" if unicode else "|"
    out = [f"{' ' * (margin + 2)}{title}{' (log scale)' if log else ''}".rstrip()] if title else []
    for row, text in enumerate(canvas.rows()):
        label = labels.get(row)
        out.append(f"{label or '':>{margin}} {side if label else bar}{text}".rstrip())
    out.append(f"{' ' * margin} {corner}{line * columns}")
    out.append(f"{' ' * (margin + 2)}{_step_axis(points[0].x, points[-1].x, columns)}")
    return out


class _Canvas:
    """A grid of dots in cells of 2 x 4 (braille) or 1 x 1 (ASCII)."""

    def __init__(self, columns: int, height: int, unicode: bool) -> None:
        self.unicode = unicode
        self.cell_wide, self.cell_high = (2, 4) if unicode else (1, 1)
        self.wide, self.high = columns * self.cell_wide, height * self.cell_high
        self._cells = [[0] * columns for _ in range(height)]

    def dot(self, x: int, y: int) -> None:
        """Set the dot at column x, row y, counted from the top left."""
        column, row = x // self.cell_wide, y // self.cell_high
        if 0 <= row < len(self._cells) and 0 <= column < len(self._cells[0]):
            self._cells[row][column] |= _DOTS[x % 2][y % 4] if self.unicode else 1

    def stroke(self, x0: int, y0: int, x1: int, y1: int) -> None:
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(count + 1):
            self.dot(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count))

    def rows(self) -> list[str]:
        if self.unicode:
            return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in self._cells]
        return ["".join("*" if cell else " " for cell in row) for row in self._cells]


def _share(value: float, low: float, high: float, log: bool) -> float:
    """Where a value lies between low (0) and high (1)."""
    if log:
        value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 0.5


def _trace(canvas: _Canvas, points: Sequence[Point], bottom: float, top: float, log: bool) -> None:
    first, last = points[0].x, points[-1].x
    before: tuple[int, int] | None = None
    for bucket in thin(points, canvas.wide):
        x = round(_share(bucket.x, first, last, False) * (canvas.wide - 1))
        y = round((1 - _share(bucket.mean, bottom, top, log)) * (canvas.high - 1))
        canvas.stroke(*(before or (x, y)), x, y)
        before = (x, y)


def _labels_by_row(ticks: Sequence[float], bottom: float, top: float, height: int, log: bool) -> dict[int, str]:
    rows = {}
    for tick in ticks:
        rows[round((1 - _share(tick, bottom, top, log)) * (height - 1))] = short_number(tick)
    return rows


def _step_axis(first: float, last: float, columns: int) -> str:
    """First step at the left, last at the right, and what they count between."""
    left, right = f"{first:,.0f}", f"{last:,.0f}"
    if first == last:
        return f"{left:^{columns}}".rstrip()
    return f"{left}{'step':^{max(4, columns - len(left) - len(right))}}{right}"
