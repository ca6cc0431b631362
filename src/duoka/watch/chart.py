"""Line charts as SVG, written by hand: no library, no script, readable on light and dark pages and on paper.

`draw_chart` gives one <svg> element that also stands alone as a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from duoka.watch.scale import (
    ChartBin,
    Point,
    log_ticks,
    nice_ticks,
    padded,
    points_of,
    short_number,
    smooth,
    thin,
    wants_log,
)

MOST_POINTS = 900  # more than a screen can show side by side

# Colors that also differ for color-blind readers, on both grounds.
STYLE = """
.dk{--ink:#1f2430;--soft:#6b7280;--grid:#e7e9ee;--main:#2f6bde;--other:#d97706;--mark:#9aa1ad;--ground:none;
font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI","Noto Sans","PingFang SC",sans-serif}
@media (prefers-color-scheme:dark){.dk{--ink:#e8eaf0;--soft:#9aa3b2;--grid:#2b303b;--main:#7ba7ff;--other:#f5b14c;
--mark:#6b7280}}
.dk .ground{fill:var(--ground)}.dk .title{fill:var(--ink);font-size:15px;font-weight:600}
.dk .tick{fill:var(--soft);font-variant-numeric:tabular-nums}.dk .grid{stroke:var(--grid);stroke-width:1}
.dk .axis{stroke:var(--mark);stroke-width:1}.dk .main{fill:none;stroke:var(--main);stroke-width:2.25;
stroke-linejoin:round;stroke-linecap:round}.dk .raw{fill:none;stroke:var(--main);stroke-width:1;opacity:.32}
.dk .band{fill:var(--main);opacity:.16}.dk .dot{fill:var(--main)}.dk .eval{fill:var(--other)}
.dk .evals{fill:none;stroke:var(--other);stroke-width:1.5;stroke-dasharray:3 3}
.dk .mark{stroke:var(--mark);stroke-width:1;stroke-dasharray:2 4}.dk .note{fill:var(--soft);font-size:11px}
.dk .last{fill:var(--main);font-weight:600}
""".replace("\n", "")


@dataclass(frozen=True)
class Chart:
    """One picture: a measured line with its smoothed form, points of another kind, and vertical marks."""

    title: str
    steps: Sequence[float]
    values: Sequence[float | None]
    extra: Sequence[Point] = ()
    extra_name: str = ""
    marks: Sequence[tuple[float, str]] = ()
    width: int = 960
    height: int = 340
    is_smoothed: bool = True
    from_zero: bool = False
    format: Callable[[float], str] = field(default=short_number)


@dataclass(frozen=True)
class _Frame:
    """From numbers to places on the picture."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = (value - low) / (high - low) if high > low else 0.5
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def draw_chart(chart: Chart) -> str:
    """The <svg> element; without any point, one that says so."""
    points = points_of(chart.steps, chart.values)
    buckets = thin(points, MOST_POINTS)
    body: list[str] = []
    if buckets:
        frame = _frame(chart, points)
        body.append(_title(chart, " (log scale)" if frame.log else ""))
        body += [*_axes(chart, frame), *_marks(chart, frame), *_line(chart, frame, points, buckets)]
        body += [*_extra(chart, frame), *_legend(chart)]
    else:
        body.append(_title(chart))
        body.append(f'<text class="note" x="{chart.width / 2:.0f}" y="{chart.height / 2:.0f}" text-anchor="middle">'
                    "nothing measured yet</text>")  # fmt: skip
    return (
        f'<svg class="dk" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width} {chart.height}" '
        f'role="img" aria-label="{escape(_in_words(chart, points))}"><style>{STYLE}</style>'
        f'<rect class="ground" width="100%" height="100%"/>{"".join(body)}</svg>'
    )


def _in_words(chart: Chart, points: Sequence[Point]) -> str:
    """The chart in words, for screen readers."""
    if not points:
        return f"{chart.title}: nothing measured yet"
    first, last = points[0], points[-1]
    return (
        f"{chart.title}: from {chart.format(first.y)} at step {first.x:,.0f} "
        f"to {chart.format(last.y)} at step {last.x:,.0f}"
    )


def _frame(chart: Chart, points: Sequence[Point]) -> _Frame:
    ys = [point.y for point in (*points, *chart.extra)]
    low, high = min(ys), max(ys)
    log = wants_log(low, high) and not chart.from_zero
    if chart.from_zero and low > 0:
        low = 0.0
    low, high = padded(low, high, log=log)
    xs = [point.x for point in (*points, *chart.extra)]
    return _Frame(58, chart.width - 64, 46, chart.height - 38, (min(xs), max(xs)), (low, high), log)


def _title(chart: Chart, remark: str = "") -> str:
    name = escape(chart.title)
    return f'<text class="title" x="16" y="24">{name}<tspan class="tick" font-weight="400">{remark}</tspan></text>'


def _axes(chart: Chart, frame: _Frame) -> list[str]:
    out: list[str] = []
    rows = max(3, int((frame.bottom - frame.top) / 44))
    ticks = (log_ticks if frame.log else nice_ticks)(*frame.y_range, rows)
    for tick in ticks:
        y = frame.y(tick)
        out.append(f'<line class="grid" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{frame.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">')
        out.append(f"{escape(chart.format(tick))}</text>")
    out.append(
        f'<line class="axis" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{frame.bottom:.1f}" '
        f'y2="{frame.bottom:.1f}"/>'
    )
    columns = max(2, int((frame.right - frame.left) / 84))
    for tick in sorted({round(tick) for tick in nice_ticks(*frame.x_range, columns)}):
        if frame.x_range[0] <= tick <= frame.x_range[1]:
            out.append(
                f'<text class="tick" x="{frame.x(tick):.1f}" y="{frame.bottom + 18:.1f}" text-anchor="middle">'
                f"{tick:,}</text>"
            )
    out.append(f'<text class="tick" x="{frame.right:.1f}" y="{frame.bottom + 32:.1f}" text-anchor="end">step</text>')
    return out


def _marks(chart: Chart, frame: _Frame) -> list[str]:
    out = []
    for step, name in chart.marks:
        if frame.x_range[0] <= step <= frame.x_range[1]:
            x = frame.x(step)
            out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top:.1f}" y2="{frame.bottom:.1f}"/>')
            out.append(f'<text class="note" x="{x + 4:.1f}" y="{frame.top + 10:.1f}">{escape(name)}</text>')
    return out


def _path(frame: _Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(point.x):.1f} {frame.y(point.y):.1f}" for point in points)


def _line(chart: Chart, frame: _Frame, points: Sequence[Point], buckets: Sequence[ChartBin]) -> list[str]:
    out: list[str] = []
    if len(points) == 1:
        x, y = frame.x(points[0].x), frame.y(points[0].y)
        return [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>', _last(chart, frame, points[0])]
    raw = [Point(bucket.x, bucket.mean) for bucket in buckets]
    if len(points) > len(buckets):
        upper = [Point(bucket.x, bucket.high) for bucket in buckets]
        lower = [Point(bucket.x, bucket.low) for bucket in reversed(buckets)]
        out.append(f'<path class="band" d="{_path(frame, [*upper, *lower])}Z"/>')
    main = raw
    if chart.is_smoothed and len(raw) >= 20:
        out.append(f'<path class="raw" d="{_path(frame, raw)}"/>')
        main = smooth(raw)
    out.append(f'<path class="main" d="{_path(frame, main)}"/>')
    out.append(_last(chart, frame, main[-1]))
    return out


def _last(chart: Chart, frame: _Frame, point: Point) -> str:
    """The value where the line ends, beside it."""
    y = min(max(frame.y(point.y), frame.top + 4), frame.bottom - 4)
    return f'<text class="last" x="{frame.right + 8:.1f}" y="{y + 4:.1f}">{escape(chart.format(point.y))}</text>'


def _extra(chart: Chart, frame: _Frame) -> list[str]:
    if not chart.extra:
        return []
    out = [f'<path class="evals" d="{_path(frame, chart.extra)}"/>'] if len(chart.extra) > 1 else []
    for point in chart.extra:
        out.append(f'<circle class="eval" cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}" r="4"/>')
    return out


def _legend(chart: Chart) -> list[str]:
    """Only where two things are drawn."""
    if not chart.extra:
        return []
    x = chart.width - 64 - 178
    return [
        f'<line class="main" x1="{x}" x2="{x + 18}" y1="20" y2="20"/>',
        f'<text class="tick" x="{x + 24}" y="24">training</text>',
        f'<circle class="eval" cx="{x + 100}" cy="20" r="4"/>',
        f'<text class="tick" x="{x + 110}" y="24">{escape(chart.extra_name)}</text>',
    ]
