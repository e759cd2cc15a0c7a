"""projection_figure: embeddings, proxies and next proxies of each proxy problem."""

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from keras_ccp.checks import check_int
from keras_ccp.monitor.projections import Projection, measure

# Paul Tol's "muted" scheme, which colour-blind people tell apart, its grey darkened.
_COLORS = ("#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255")
_COLORS += ("#44AA99", "#999933", "#AA4499", "#AAAAAA")
_INCHES = 3.3  # side of a panel
_NAMED = 20  # classes, beyond which names would hide the picture


def projection_figure(
    projections: Sequence[Projection],
    titles: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    columns: int = 3,
    seed: int = 0,
) -> Any:
    """Draws the paper's figure: a panel for each proxy problem that ended.

    Small dots are sample embeddings, coloured by class (ten colours in turn); squares
    are the converged proxies of the problem, circles those that the switch put in their
    place. Titles give MAP@R of the validation images and, of the samples that are
    drawn, mean covering radius by the converged proxies and mean inter-class distance,
    as `keras_ccp.monitor.projections.measure` defines them and in all dimensions. Those of
    two dimensions are drawn as they are, the panels on one scale; those of more by
    t-SNE, of the samples and proxies of a panel together.

    Needs `pip install -e ".[plots]"`. Source of the figure:
    https://arxiv.org/abs/2209.09060.

    Args:
        projections: what to draw, for example of `load_projections`.
        titles: first line of each panel's title. Defaults to `None`: "problem 1", ...
        class_names: name of each class, to stand beside its samples where there are at
            most 20 classes. Defaults to `None`: no names.
        columns: int, panels in a row at most. Defaults to 3.
        seed: int, of t-SNE. Defaults to 0.

    Returns:
        `matplotlib.figure.Figure` of 150 dpi; its `savefig(path)` writes it.

    Raises:
        ImportError: if matplotlib, or scikit-learn for t-SNE, is not installed.
        ValueError: if there is no projection, or not one title for each.
    """
    check_int("columns", columns, minimum=1)
    if titles is None:
        titles = [f"problem {number}" for number in range(1, len(projections) + 1)]
    if not projections or len(titles) != len(projections):
        raise ValueError(
            "`projections` must hold at least one, and `titles` one for each. "
            f"Received: {len(projections)} projections and {len(titles)} titles"
        )
    pictures = [_in_two_dimensions(projection, seed) for projection in projections]
    columns = min(columns, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure = _required("matplotlib.figure").Figure(
        figsize=(_INCHES * columns, (_INCHES + 0.45) * rows + 0.5),
        dpi=150,
        layout="constrained",
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, title, shown, real in zip(
        panels, titles, pictures, projections, strict=False
    ):
        _draw(panel, shown, class_names)
        panel.set_title(f"{title}\n{_numbers(real)}", fontsize=8.5)
    for panel in panels[len(pictures) :]:
        panel.axis("off")
    if all(projection.embeddings.shape[1] == 2 for projection in projections):
        _one_scale(panels[: len(pictures)], pictures)
    figure.legend(
        handles=[_handle(*marker) for marker in _MARKERS],
        loc="outside lower center",
        ncols=3,
        fontsize=8.5,
        columnspacing=1.2,
        handletextpad=0.2,
    )
    return figure


def _numbers(projection: Projection) -> str:
    numbers = measure(projection.embeddings, projection.labels, projection.proxies)
    return (
        f"MAP@R {projection.map_at_r:.2f}   "
        f"radius {numbers['mean_covering_radius']:.2f}   "
        f"distance {numbers['mean_inter_class_distance']:.2f}"
    )


def _in_two_dimensions(projection: Projection, seed: int) -> Projection:
    """The projection itself, or its t-SNE."""
    sets = [projection.embeddings, projection.proxies, projection.next_proxies]
    dim = projection.embeddings.shape[1]
    if dim == 2:
        return projection
    present = [points for points in sets if points is not None]
    points = np.concatenate([points.reshape(-1, dim) for points in present])
    tsne = _required("sklearn.manifold").TSNE(
        init="pca" if dim > 1 else "random",
        perplexity=min(30.0, (len(points) - 1) / 3),
        random_state=seed,
    )
    places = tsne.fit_transform(points)
    ends = np.cumsum([points.size // dim for points in present])
    shown = [
        part.reshape(*points.shape[:-1], 2)
        for part, points in zip(np.split(places, ends[:-1]), present, strict=True)
    ]
    return Projection(
        shown[0],
        projection.labels,
        shown[1],
        shown[2] if len(shown) > 2 else None,
        projection.map_at_r,
    )


# ==== Drawing ====

# Name in the legend and style; the samples are drawn first.
_MARKERS = (
    ("sample", {"marker": "o", "s": 5, "linewidths": 0, "alpha": 0.6}),
    ("current proxy", {"marker": "s", "s": 30, "linewidths": 0.9, "edgecolors": "k"}),
    ("next proxy", {"marker": "o", "s": 26, "linewidths": 0.9, "edgecolors": "k"}),
)


def _draw(panel, shown: Projection, class_names: Sequence[str] | None) -> None:
    colors = np.array(_COLORS)
    proxy_colors = colors[np.arange(len(shown.proxies)) % len(colors)]
    sets = (
        (shown.embeddings, colors[shown.labels % len(colors)]),
        (shown.proxies, proxy_colors.repeat(shown.proxies.shape[1])),
        (shown.next_proxies, proxy_colors.repeat(shown.proxies.shape[1])),
    )
    # Squares above circles, since the converged proxies hide behind one another anyway.
    for (points, color), (_, style), order in zip(
        sets, _MARKERS, (1, 4, 3), strict=True
    ):
        if points is not None:
            x, y = points.reshape(-1, 2).T
            panel.scatter(x, y, c=color, zorder=order, **style)
    panel.set_aspect("equal", adjustable="datalim")
    panel.set_xticks([])
    panel.set_yticks([])
    if class_names is not None and len(shown.proxies) <= _NAMED:
        _name_classes(panel, shown, class_names)


def _name_classes(panel, shown: Projection, class_names: Sequence[str]) -> None:
    center = shown.embeddings.mean(axis=0)
    outline = _required("matplotlib.patheffects").withStroke(
        linewidth=2.5, foreground="white"
    )
    for label in range(len(shown.proxies)):
        mean = shown.embeddings[shown.labels == label].mean(axis=0)
        away = mean - center
        away = away / max(np.linalg.norm(away), 1e-12)
        panel.annotate(
            class_names[label],
            mean,
            # Off its proxies, to the outside.
            xytext=tuple(14 * away),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold",
            zorder=2,  # behind the proxies
            path_effects=[outline],
        )


def _one_scale(panels, pictures: Sequence[Projection]) -> None:
    sets = [
        points.reshape(-1, 2)
        for shown in pictures
        for points in (shown.embeddings, shown.proxies, shown.next_proxies)
        if points is not None
    ]
    limit = 1.2 * max(np.abs(points).max() for points in sets)
    for panel in panels:
        panel.set_aspect("equal", adjustable="box")
        panel.set(xlim=(-limit, limit), ylim=(-limit, limit))


def _handle(name: str, style: dict[str, Any]) -> Any:
    return _required("matplotlib.lines").Line2D(
        [],
        [],
        linestyle="",
        label=name,
        marker=style["marker"],
        # Of a single sample there would be little to see.
        markersize=max(style["s"] ** 0.5, 4),
        markerfacecolor="#888888",
        markeredgecolor=style.get("edgecolors", "none"),
    )


def _required(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "`projection_figure` draws with matplotlib, and with scikit-learn where "
            "embeddings have more than two dimensions: "
            'pip install -e ".[plots]"'
        ) from error
