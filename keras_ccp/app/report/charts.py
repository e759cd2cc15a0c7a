"""Small charts as SVG for a page whose style sheet gives them their colours.

They are as wide as a phone and scale up. Classes: `grid`, `axis`, `line-<i>` and
`area-<i>` for the i-th series, `switch` and `best` for marks, `strip` for what has a
`data-tip`, the text to show at the pointer.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

WIDTH, HEIGHT = 340, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 36


class Series(NamedTuple):
    """A line.

    Args:
        name: what it is.
        x: `(n,)` numbers.
        y: `(n,)` numbers; the line has a gap where one is not finite.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(
    label: str,
    series: Sequence[Series],
    x_name: str,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    switches: Sequence[float] = (),
    best: tuple[float, float] | None = None,
    unit: str = "",
) -> str:
    """Draws lines with a point for each value.

    Args:
        label: what a reader who does not see the chart is told.
        series: the lines.
        x_name: name of the horizontal axis.
        x_range: numbers at its ends.
        y_range: numbers at the ends of the vertical axis.
        switches: where vertical lines are drawn.
        best: point that gets a ring.
        unit: what stands behind the numbers of the vertical axis.

    Returns:
        An `<svg>` element.
    """
    chart = _Chart(label, x_name, x_range, y_range, unit, whole_numbers=True)
    for x in switches:
        chart.line("switch", chart.x(x), _TOP, chart.x(x), HEIGHT - _BOTTOM)
    tips = {}
    for number, (name, xs, ys) in enumerate(series):
        commands, is_open = [], False
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(y):
                commands.append(f"{'L' if is_open else 'M'}{chart.at(x, y)}")
                chart.circle(f"point line-{number}", x, y, 2.5)
                text = f"{name} {number_text(y)}{unit}"
                tips[x] = f"{tips[x]}, {text}" if x in tips else text
            is_open = math.isfinite(y)
        chart.add("path", {"class": f"line line-{number}", "d": " ".join(commands)})
    if best is not None:
        chart.circle("best", *best, 6)
    # Each value answers for the strip that is nearer to it than to others.
    places = sorted(tips)
    borders = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    bounds = zip([x_range[0], *borders], [*borders, x_range[1]], strict=True)
    for x, (low, high) in zip(places, bounds, strict=False):
        chart.strip(low, high, f"{x_name} {x:g}: {tips[x]}")
    return chart.text()


def bar_chart(
    label: str,
    edges: Sequence[float],
    shares: Sequence[tuple[str, Sequence[float]]],
    x_name: str,
) -> str:
    """Draws histograms over each other.

    Args:
        label: what a reader who does not see the chart is told.
        edges: `(n + 1,)` numbers, edges of the bins.
        shares: name and `(n,)` numbers from 0 to 1 of each histogram.
        x_name: name of the horizontal axis.

    Returns:
        An `<svg>` element.
    """
    top = max((max(values, default=0) for _, values in shares), default=0) or 1.0
    span = (float(edges[0]), float(edges[-1]))
    chart = _Chart(label, x_name, span, (0.0, 100 * top), " %")
    for number, (_, values) in enumerate(shares):
        corners = [(edges[0], 0.0)]
        for value, low, high in zip(values, edges[:-1], edges[1:], strict=True):
            corners += [(low, 100 * value), (high, 100 * value)]
        corners.append((edges[-1], 0.0))
        path = "M" + " L".join(chart.at(x, y) for x, y in corners) + "Z"
        chart.add("path", {"class": f"area area-{number}", "d": path})
    for place, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        parts = [f"{name} {100 * values[place]:.1f} %" for name, values in shares]
        chart.strip(low, high, f"{low:.2f} to {high:.2f}: {', '.join(parts)}")
    return chart.text()


def padded_range(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """A range with some room around the finite ones of some values.

    Args:
        values: numbers.

    Returns:
        Lower and upper end; from 0 to 1 without a finite value.
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    # Nothing here is negative that has no negative value.
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers of a range, 1, 2 or 5 times a power of 10 apart.

    Args:
        low: lower end.
        high: upper end, above it.
        count: about as many. Defaults to 4.
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def number_text(value: float) -> str:
    """A number with three or four digits.

    Args:
        value: the number.
    """
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


class _Chart:
    """Axes, and a map from values to pixels."""

    def __init__(self, label, x_name, x_range, y_range, unit, whole_numbers=False):
        self._x, self._y = x_range, y_range
        self._svg = ElementTree.Element(
            "svg",
            {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": label},
        )
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for value in ticks(*y_range):
            y = self.y(value)
            self.line("grid", _LEFT, y, right, y)
            self._write(f"{value:g}{unit}", _LEFT - 6, y + 4, "end")
        xs = ticks(*x_range, 6)
        if whole_numbers:
            xs = [value for value in xs if value == round(value)]
        for value in xs:
            self._write(f"{value:g}", self.x(value), bottom + 15, "middle")
        self.line("axis", _LEFT, bottom, right, bottom)
        self._write(x_name, (_LEFT + right) / 2, HEIGHT - 5, "middle")

    def x(self, value):
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value):
        low, high = self._y
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def at(self, x, y):
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def add(self, tag, attributes):
        return ElementTree.SubElement(self._svg, tag, attributes)

    def line(self, kind, x1, y1, x2, y2):
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        ends = {name: f"{value:.1f}" for name, value in ends.items()}
        self.add("line", {"class": kind, **ends})

    def circle(self, kind, x, y, radius):
        center = {"cx": f"{self.x(x):.1f}", "cy": f"{self.y(y):.1f}"}
        self.add("circle", {"class": kind, **center, "r": str(radius)})

    def strip(self, low, high, tip):
        box = {"x": self.x(low), "width": self.x(high) - self.x(low)}
        box = {name: f"{value:.1f}" for name, value in box.items()}
        box |= {"y": str(_TOP), "height": str(HEIGHT - _TOP - _BOTTOM)}
        self.add("rect", {"class": "strip", **box, "data-tip": tip})

    def _write(self, text, x, y, anchor):
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
        self.add("text", place).text = text

    def text(self):
        return ElementTree.tostring(self._svg, encoding="unicode")
