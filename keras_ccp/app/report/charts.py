"""The charts of a report: what each shows, and where in the box that a template draws.

By hand, since a page of matplotlib's SVG is twice as large, does not tell the values at
the pointer, and costs half a second of import for as much code.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from keras_ccp.app.report.distances import DistanceHistogram
from keras_ccp.app.report.history import History

MAP_AT_R = "val_map_at_r"
MEASURES = {
    "mean_covering_radius": "Mean covering radius",
    "proxy_spread": "Proxy spread",
    "proxy_usage": "Proxy usage",
    "max_covering_radius": "Largest covering radius",
    "mean_inter_class_distance": "Mean inter-class distance",
}
# Those that a projection is about; the others stand in the table.
_CHARTED = ("mean_covering_radius", "proxy_spread", "proxy_usage")
_Series = dict[str, tuple[Sequence[float], Sequence[float]]]


@dataclasses.dataclass
class Chart:
    """Lines or areas in a box as wide as a phone; `left` to `bottom` are its axes.

    Args:
        title: what stands above it.
        label: what a reader who does not see it is told.
        x_name: name of the horizontal axis.
        x_range: numbers at its ends.
        y_range: numbers at the ends of the vertical axis.
        series: x and y by name; a line has a gap where y is not finite.
        unit: what stands behind the numbers of the vertical axis.
        kind: `"line"` or `"area"`.
        tips: first and last x of a strip, and the text to show there at the pointer.
        projections: where vertical lines are drawn.
        best: point that gets a ring.
    """

    title: str
    label: str
    x_name: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    series: _Series
    unit: str = ""
    kind: str = "line"
    tips: Sequence[tuple[float, float, str]] = ()
    projections: Sequence[float] = ()
    best: tuple[float, float] | None = None

    left, right, top, bottom = 46, 330, 10, 164

    def x(self, value: float) -> float:
        """Place of a number on the horizontal axis."""
        return _between(value, *self.x_range, self.left, self.right)

    def y(self, value: float) -> float:
        """Place of a number on the vertical axis."""
        return _between(value, *self.y_range, self.bottom, self.top)

    def points(self, name: str) -> list[tuple[float, float] | None]:
        """Places of a series, `None` where it has a gap."""
        values = zip(*self.series[name], strict=True)
        return [(self.x(x), self.y(y)) if math.isfinite(y) else None for x, y in values]

    @property
    def ticks(self) -> tuple[list[float], list[float]]:
        """Round numbers of the horizontal and the vertical axis."""
        xs = round_numbers(*self.x_range, 6)
        if self.kind == "line":  # over counts
            xs = [x for x in xs if x == round(x)]
        return xs, round_numbers(*self.y_range, 4)


def _between(value, low, high, first, last):
    return round(first + (value - low) / (high - low) * (last - first), 1)


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """About as many numbers of a range, 1, 2 or 5 times a power of 10 apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def padded_range(values: Sequence[float]) -> tuple[float, float]:
    """A range with some room around the finite ones of some values."""
    finite = [float(value) for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    # Nothing here is negative that has no negative value.
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def line_chart(
    title: str, label: str, x_name: str, last: int, series: _Series, **options
) -> Chart:
    """Series over the whole numbers 1 to `last`, whose values are told at the pointer.

    `options` are arguments of `Chart`, of which `y_range` is needed.
    """
    unit, values = options.get("unit", ""), {}
    for name, (xs, ys) in series.items():
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(y):
                values.setdefault(x, []).append(f"{name} {y:.4g}{unit}")
    tips = [
        (x - 0.5, x + 0.5, f"{x_name} {x}: {', '.join(values[x])}")
        for x in sorted(values)
    ]
    x_range = 0.5, last + 0.5
    return Chart(title, label, x_name, x_range, series=series, tips=tips, **options)


def training_charts(history: History, histories: Sequence[History]) -> list[Chart]:
    """MAP@R of the validation classes and the losses of a model, over the evaluations.

    `histories` are those of all models, whose axes are the same so that they compare.
    """
    wanted = {name: [name] for name in history.losses}
    if {"loss", "pair_loss"} <= wanted.keys():
        del wanted["loss"], wanted["pair_loss"]
        wanted = {"Loss, total and of pairs": ["loss", "pair_loss"], **wanted}
    if MAP_AT_R in history.columns:
        wanted = {"Validation MAP@R": [MAP_AT_R], **wanted}
    return [_over_time(history, histories, *item) for item in wanted.items()]


def _over_time(
    history: History, histories: Sequence[History], title: str, names: list[str]
) -> Chart:
    title = _spelled(title)
    factor, unit = (100, " %") if names == [MAP_AT_R] else (1, "")
    every = [h.columns[name] for h in histories for name in names if name in h.columns]
    evaluations = history.epochs + 1
    values = [factor * history.columns[name] for name in names]
    best, label = None, f"{title} over {len(evaluations)} evaluations, {history.title}"
    if unit and np.isfinite(values[0]).any():
        place = int(np.nanargmax(values[0]))
        best = int(evaluations[place]), float(values[0][place])
        label += f": best {best[1]:.2f} % at evaluation {best[0]}"
    # Between the last evaluation of a problem and the first one of the next.
    projections = [epoch + 0.5 for epoch in history.projection_epochs]
    if projections:
        label += f"; {len(projections)} projections"
    keys = [title] if len(names) == 1 else map(_spelled, names)
    return line_chart(
        title,
        label,
        "evaluation",
        max(int(h.epochs.max(initial=0)) + 1 for h in histories),
        {name: (evaluations, ys) for name, ys in zip(keys, values, strict=True)},
        y_range=padded_range(factor * np.concatenate(every)),
        projections=projections,
        best=best,
        unit=unit,
    )


def _spelled(name: str) -> str:
    return name[:1].upper() + name[1:].replace("_", " ")


def projection_charts(history: History, histories: Sequence[History]) -> list[Chart]:
    """What each projection did to the proxies of a model, with the axes of all."""

    def values(of: History, moment: str, measure: str) -> tuple[list, list]:
        lines = [line for line in of.projections if line[moment]]
        numbers = [line["projection"] + 1 for line in lines]
        return numbers, [line[moment][measure] for line in lines]

    moments = ("before", "after")
    return [
        line_chart(
            MEASURES[measure],
            f"{MEASURES[measure]} before and after each projection, {history.title}",
            "proxy problem",
            max(len(h.projections) for h in histories),
            {moment: values(history, moment, measure) for moment in moments},
            y_range=padded_range(
                [
                    y
                    for h in histories
                    for m in moments
                    for y in values(h, m, measure)[1]
                ]
            ),
        )
        for measure in _CHARTED
    ]


def distance_chart(histogram: DistanceHistogram) -> Chart:
    """Distances of pairs of one class and of two."""
    edges, counts = histogram.edges, (histogram.same, histogram.other)
    shares = {
        f"{name} class": 100 * count / max(1, count.sum())
        for name, count in zip(("same", "other"), counts, strict=True)
    }
    tips = []
    for row, (low, high) in enumerate(itertools.pairwise(edges)):
        parts = ", ".join(f"{name} {ys[row]:.1f} %" for name, ys in shares.items())
        tips.append((low, high, f"{low:.2f} to {high:.2f}: {parts}"))
    return Chart(
        "Share of the pairs by distance",
        f"Histogram of distances: pairs of one class are {histogram.mean_same:.3g} "
        f"apart on average, pairs of two classes {histogram.mean_other:.3g}",
        "distance",
        (edges[0], edges[-1]),
        (0.0, max(ys.max() for ys in shares.values())),
        # Each bin is a step, and both ends lie on the axis.
        {
            name: (np.repeat(edges, 2), np.concatenate([[0], np.repeat(ys, 2), [0]]))
            for name, ys in shares.items()
        },
        unit=" %",
        kind="area",
        tips=tips,
    )
