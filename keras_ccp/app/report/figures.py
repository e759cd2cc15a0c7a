"""The charts of a report: what each shows, and its axes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_ccp.app.report.charts import Series, bar_chart, line_chart, padded_range
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
# Those that a switch is about; the others stand in the table.
_CHARTED = ("mean_covering_radius", "proxy_spread", "proxy_usage")
_LOSSES = {
    "loss": "Loss",
    "pair_loss": "Pair loss",
    "proximal_loss": "Proximal loss",
}


class Figure(NamedTuple):
    """A chart with what stands above it.

    Args:
        title: what it shows.
        svg: the chart.
        legend: names of its series, empty where there is only one.
    """

    title: str
    svg: str
    legend: list[str]


def training_figures(history: History, histories: Sequence[History]) -> list[Figure]:
    """MAP@R of the validation classes and the losses, over the evaluations.

    Args:
        history: of the model.
        histories: of all models, whose axes are the same so that they compare.
    """
    figures = []
    if MAP_AT_R in history.columns:
        figures.append(_over_time(history, histories, [MAP_AT_R], "Validation MAP@R"))
    losses = history.losses
    if "loss" in losses and "pair_loss" in losses:
        losses.remove("pair_loss")
        losses.remove("loss")
        title = "Loss, total and of pairs"
        figures.append(_over_time(history, histories, ["loss", "pair_loss"], title))
    for name in losses:
        title = _LOSSES.get(name, name.replace("_", " ").capitalize())
        figures.append(_over_time(history, histories, [name], title))
    return figures


def projection_figures(history: History, histories: Sequence[History]) -> list[Figure]:
    """What each switch did to the proxies.

    Args:
        history: of the model.
        histories: of all models, whose axes are the same so that they compare.
    """
    figures = []
    count = max((len(h.projections) for h in histories), default=0)
    for measure in _CHARTED:
        title = MEASURES[measure]
        values = [
            _values(other, moment, measure)
            for other in histories
            for moment in ("before", "after")
        ]
        series = [
            Series(moment, *_xy(history, moment, measure))
            for moment in ("before", "after")
        ]
        svg = line_chart(
            f"{title} before and after each switch, {_name(history)}",
            series,
            "proxy problem",
            (0.5, max(count, 1) + 0.5),
            padded_range(np.concatenate(values)),
        )
        figures.append(Figure(title, svg, [one.name for one in series]))
    return figures


def distance_figure(histogram: DistanceHistogram) -> Figure:
    """Distances of pairs of one class and of two.

    Args:
        histogram: the counts.
    """
    shares = [
        (name, counts / max(1, counts.sum()))
        for name, counts in (
            ("same class", histogram.same),
            ("other class", histogram.other),
        )
    ]
    label = (
        f"Histogram of distances: pairs of one class are {histogram.mean_same:.3g} "
        f"apart on average, pairs of two classes {histogram.mean_other:.3g}"
    )
    svg = bar_chart(label, histogram.edges, shares, "distance")
    title = "Share of the pairs by distance"
    return Figure(title, svg, [name for name, _ in shares])


def _over_time(history, histories, names, title):
    factor, unit = (100, " %") if names == [MAP_AT_R] else (1, "")
    values = [
        factor * other.columns[name]
        for other in histories
        for name in names
        if name in other.columns
    ]
    last = max(int(other.epochs.max(initial=0)) + 1 for other in histories)
    evaluations = history.epochs + 1
    series = [
        Series(_LOSSES.get(name, title), evaluations, factor * history.columns[name])
        for name in names
    ]
    best = None
    label = f"{title} over {len(evaluations)} evaluations, {_name(history)}"
    if names == [MAP_AT_R] and np.isfinite(series[0].y).any():
        place = int(np.nanargmax(series[0].y))
        best = int(evaluations[place]), float(series[0].y[place])
        label += f": best {best[1]:.2f} % at evaluation {best[0]}"
    switches = history.switches
    if switches:
        label += f"; {len(switches)} switches of proxies"
    svg = line_chart(
        label,
        series,
        "evaluation",
        (0.5, last + 0.5),
        padded_range(np.concatenate(values)),
        # Between the last evaluation of a problem and the first one of the next.
        [epoch + 0.5 for epoch in switches],
        best,
        unit,
    )
    legend = [one.name for one in series] if len(series) > 1 else []
    return Figure(title, svg, legend)


def _name(history):
    return f"repetition {history.repeat + 1}, model {history.fold + 1}"


def _xy(history, moment, measure):
    xs = [line["projection"] + 1 for line in history.projections if line[moment]]
    return xs, _values(history, moment, measure)


def _values(history, moment, measure):
    lines = [line[moment] for line in history.projections if line[moment]]
    return [line[measure] for line in lines]
