"""Curves and charts: readable ticks, every point inside the picture, smoothing that does not lag."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from duoka.watch.chart import Chart, draw_chart
from duoka.watch.curve import draw_curve
from duoka.watch.page import page
from duoka.watch.scale import Point, log_ticks, nice_ticks, points_of, short_number, smooth, thin


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 4, [0, 1, 2, 3, 4]), (0.3, 0.94, [0.4, 0.6, 0.8]), (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]), (5, 5, [5])],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1e-8), (0.123, 1234.5), (-3, 7), (1e12, 3e12), (-0.01, -0.001)])
def test_ticks_are_few_and_inside(low, high):
    ticks = nice_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 6 and all(low <= tick <= high for tick in ticks)


def test_log_ticks_are_few_round_and_inside():
    assert log_ticks(0.1, 100, 5) == pytest.approx([0.1, 1, 10, 100])
    assert len(log_ticks(1e-12, 1e12, 6)) <= 6


def test_thinning_loses_no_extreme_and_keeps_order():
    points = [Point(step, 100.0 if step == 777 else 1.0) for step in range(10_000)]
    buckets = thin(points, 50)
    assert len(buckets) == 50 and max(bucket.high for bucket in buckets) == 100.0
    assert [bucket.x for bucket in buckets] == sorted(bucket.x for bucket in buckets)
    assert sum(bucket.mean for bucket in buckets) * 200 == pytest.approx(sum(point.y for point in points))
    assert thin([], 5) == [] and len(thin(points[:3], 5)) == 3


def test_smoothing_does_not_run_behind_a_falling_curve():
    line = [Point(step, 1000.0 - step) for step in range(1000)]
    middle = smooth(line)[500]
    assert middle.y == pytest.approx(500.0, abs=1.0)


def test_gaps_are_left_out_and_not_drawn_as_zero():
    assert points_of([1, 2, 3], [1.0, None, math.nan]) == [Point(1, 1.0)]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "no-such-encoding"])
@pytest.mark.parametrize("count", [1, 2, 30, 5000])
def test_a_curve_fits_80_columns_in_every_encoding(encoding, count):
    lines = draw_curve(
        range(count), [1 / (step + 1) for step in range(count)], width=80, encoding=encoding, title="loss"
    )
    assert max(map(len, lines)) <= 80
    if encoding != "utf-8":
        assert all(line.isascii() for line in lines)


def test_a_falling_curve_falls():
    rows = draw_curve(range(100), [float(100 - step) for step in range(100)], width=60, encoding="ascii")
    stars = [(row, match.start()) for row, line in enumerate(rows) for match in re.finditer(r"\*", line)]
    by_column = sorted(stars, key=lambda star: star[1])
    assert by_column[0][0] < by_column[-1][0]
    assert [row for row, _ in by_column] == sorted(row for row, _ in by_column)


def test_nothing_to_draw_is_said():
    assert draw_curve([], [], title="loss") == ["loss: nothing to draw yet"]


def places(svg):
    """All coordinates of lines and dots."""
    for element in ElementTree.fromstring(svg).iter():
        for word in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", element.get("d") or ""):
            yield float(word[0]), float(word[1])
        if element.tag.endswith("circle"):
            yield float(element.get("cx")), float(element.get("cy"))


@pytest.mark.parametrize(
    "values",
    [[1.0], [2.0, 2.0, 2.0], [5.0 / (1 + i) for i in range(5000)], [1e-9, 3e4, 2.0], [-5.0, 3.0], [None, 1.0, None]],
)
def test_every_point_of_a_chart_lies_inside_the_picture(values):
    chart = Chart(
        "A & B", list(range(len(values))), values, extra=[Point(1, 1.5)], extra_name="<eval>", marks=[(1, "x")]
    )
    found = list(places(draw_chart(chart)))
    assert found
    assert all(0 <= x <= chart.width and 0 <= y <= chart.height for x, y in found)


def test_a_range_of_many_powers_of_ten_is_drawn_on_a_log_axis_and_says_so():
    svg = draw_chart(Chart("Loss", [1, 2, 3], [100.0, 1.0, 0.01]))
    (_, top), (_, middle), (_, bottom) = list(places(svg))
    assert middle - top == pytest.approx(bottom - middle, abs=0.2)
    assert "log scale" in svg and "log scale" not in draw_chart(Chart("Loss", [1, 2], [4.0, 1.0]))


def test_a_chart_tells_those_who_cannot_see_it_where_it_starts_and_ends():
    svg = draw_chart(Chart("Loss", [1, 50], [4.0, 0.5]))
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label == "Loss: from 4 at step 1 to 0.5 at step 50"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (2e-5, "2e-5"), (0.35, "0.35"), (12_345, "12.3k"), (3e6, "3M"), (3.7579, "3.758")]
)
def test_labels_are_short(value, text):
    assert short_number(value) == text


def test_bars_fit_into_a_narrow_page():
    """Of 400 px the memory's table has 324: two columns of words take 170, and a bar of 160 ran off the card."""
    narrow = re.search(r"@media \(max-width:760px\)\{(.*)\}", page("run", []))
    assert narrow and int(re.search(r"\.track\{min-width:(\d+)px\}", narrow[1])[1]) <= 100
