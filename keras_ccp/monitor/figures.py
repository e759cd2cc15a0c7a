"""Pictures of what an embedder finds, of projections and of a tuning search."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ccp.checks import require
from keras_ccp.monitor.projection_log import Projection, measure

__all__ = ["neighbor_gallery", "projection_figure", "search_figure"]

# Frames of wrong and right neighbours and of queries.
_FRAMES = np.array([(214, 40, 40), (34, 160, 60), (90, 90, 90)], np.uint8)
# Paul Tol's "muted" scheme, which colour-blind people tell apart, its grey darkened.
_COLORS = ("#CC6677", "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255")
_COLORS = np.array([*_COLORS, "#44AA99", "#999933", "#AA4499", "#AAAAAA"])
_INCHES = 3.3  # side of a panel
_NAMED = 20  # classes, beyond which names would hide the picture
_PROXY = {"linewidths": 0.9, "edgecolors": "k"}
# Name in the legend and style. Squares lie above circles, since the converged proxies
# hide behind one another anyway.
_MARKERS = (
    ("sample", {"marker": "o", "s": 5, "linewidths": 0, "alpha": 0.6, "zorder": 1}),
    ("current proxy", {"marker": "s", "s": 30, "zorder": 4, **_PROXY}),
    ("next proxy", {"marker": "o", "s": 26, "zorder": 3, **_PROXY}),
)
# Names of classes lie behind the proxies.
_NAME = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold"}
_NAME |= {"textcoords": "offset points", "zorder": 2}
_LEGEND = {"fontsize": 8.5, "columnspacing": 1.2, "handletextpad": 0.2}
_DISC = {"s": 130, "cmap": "viridis", "ec": "white", "linewidths": 0.8, "zorder": 3}
_CROSS = {"marker": "x", "s": 30, "c": "#777777", "linewidths": 1.2, "zorder": 2}
_STAR = {"marker": "*", "s": 90, "c": "#CC3311", "ec": "white", "linewidths": 0.6}
_SQUARE = {"marker": "s", "s": 320, "fc": "none", "ec": "black", "linewidths": 1.2}


def neighbor_gallery(
    queries: np.ndarray,
    neighbors: np.ndarray,
    is_right: np.ndarray,
    columns: int = 2,
    scale: int = 2,
) -> np.ndarray:
    """Draws queries, each with its nearest neighbours to the right of it.

    Queries are framed grey, neighbours green where they are right and red where they
    are wrong.

    Args:
        queries: `(n, height, width, 3)` uint8 images.
        neighbors: `(n, k, height, width, 3)` uint8 images, nearest first.
        is_right: `(n, k)` bool, whether a neighbour is of the query's class.
        columns: int, queries side by side. Defaults to 2.
        scale: int, each pixel becomes a square of this side. Defaults to 2.

    Returns:
        `(picture_height, picture_width, 3)` uint8 image on white.

    Example: `neighbor_gallery(images[:8], images[found[:8]], is_right[:8])`.
    """
    images = np.concatenate([np.asarray(queries)[:, None], neighbors], axis=1)
    n, count = images.shape[:2]
    kinds = np.concatenate([np.full((n, 1), 2), is_right], axis=1)
    images = images.repeat(scale, axis=2).repeat(scale, axis=3)
    height, width = (side + 4 * scale for side in images.shape[2:4])
    tiles = np.empty((n, count, height, width, 3), np.uint8)
    tiles[:] = _FRAMES[kinds.astype(int)][:, :, None, None]
    tiles[:, :, 2 * scale : -2 * scale, 2 * scale : -2 * scale] = images
    margin = (scale, scale)
    tiles = np.pad(tiles, ((0, 0), (0, 0), margin, margin, (0, 0)), constant_values=255)
    # A gap sets the query apart from what it found, another one the next query.
    gap = np.full((n, tiles.shape[2], 8 * scale, 3), 255, np.uint8)
    found = np.moveaxis(tiles[:, 1:], 1, 0)
    rows = np.concatenate([tiles[:, 0], gap[:, :, : 6 * scale], *found, gap], axis=2)
    rows = np.pad(rows, ((0, -n % columns), *3 * [(0, 0)]), constant_values=255)
    lines = rows.reshape(-1, columns, *rows.shape[1:])
    return np.concatenate([np.concatenate(line, axis=1) for line in lines])


def projection_figure(
    projections: Sequence[Projection],
    titles: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    columns: int = 3,
    seed: int = 0,
) -> Any:
    """Draws the paper's figure: a panel for each proxy problem that ended.

    Small dots are sample embeddings, coloured by class (ten colours in turn); squares
    are the converged proxies of the problem, circles those that take their place.
    Titles give MAP@R of the validation images and, of the samples that are drawn, mean
    covering radius by the converged proxies and mean inter-class distance, as
    `keras_ccp.monitor.projection_log.measure` defines them and in all dimensions. Those
    of two dimensions are drawn as they are, the panels on one scale; those of more by
    t-SNE, of the samples and proxies of a panel together.

    Source of the figure: https://arxiv.org/abs/2209.09060.

    Args:
        projections: what to draw, for example of `load_projections`.
        titles: first line of each panel's title. Defaults to `None`: "problem 1", ...
        class_names: name of each class, to stand beside its samples where there are at
            most 20 classes. Defaults to `None`: no names.
        columns: int, panels in a row at most. Defaults to 3.
        seed: int, of t-SNE. Defaults to 0.

    Returns:
        `matplotlib.figure.Figure` of 150 dpi.

    Raises:
        ImportError: if matplotlib, or scikit-learn for t-SNE, is not installed.
        ValueError: if there is no projection, or not one title for each.

    Example: `projection_figure(load_projections("run")).savefig("projections.png")`.
    """
    count = len(projections)
    if not count:
        raise ValueError(
            "`projections` must hold at least one. Received: none\n"
            "Look for projections.jsonl in the folder that ProjectionLog wrote to"
        )
    titles = titles or [f"problem {number}" for number in range(1, count + 1)]
    pictures = [_points(projection, seed) for projection in projections]
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = _figure((_INCHES * columns, (_INCHES + 0.45) * rows + 0.5))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels[count:]:
        panel.axis("off")
    panels = panels[:count]
    for panel, title, sets, projection in zip(
        panels, titles, pictures, projections, strict=True
    ):
        for (places, labels), (_, style) in zip(sets, _MARKERS, strict=False):
            panel.scatter(*places.T, c=_COLORS[labels % len(_COLORS)], **style)
        panel.set(xticks=[], yticks=[])
        panel.set_aspect("equal", adjustable="datalim")
        panel.set_title(f"{title}\n{_numbers(projection)}", fontsize=8.5)
        if class_names is not None and len(projection.proxies) <= _NAMED:
            _name_classes(panel, *sets[0], class_names)
    if all(projection.embeddings.shape[1] == 2 for projection in projections):
        limit = 1.2 * max(np.abs(p).max() for sets in pictures for p, _ in sets)
        for panel in panels:
            panel.set_aspect("equal", adjustable="box")
            panel.set(xlim=(-limit, limit), ylim=(-limit, limit))
    handles = [_handle(*marker) for marker in _MARKERS]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, **_LEGEND)
    return figure


def _figure(size: tuple[float, float]) -> Any:
    matplotlib = require("matplotlib.figure", "plots")
    return matplotlib.Figure(figsize=size, dpi=150, layout="constrained")


def _numbers(projection: Projection) -> str:
    numbers = measure(projection.embeddings, projection.labels, projection.proxies)
    return (
        f"MAP@R {projection.map_at_r:.2f}   "
        f"radius {numbers['mean_covering_radius']:.2f}   "
        f"distance {numbers['mean_inter_class_distance']:.2f}"
    )


def _points(projection: Projection, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places in two dimensions and labels: of samples, proxies and next proxies."""
    proxies, dim = projection.proxies, projection.embeddings.shape[1]
    owners = np.arange(len(proxies)).repeat(proxies.shape[1])
    sets, labels = [projection.embeddings, proxies], [projection.labels, owners]
    if projection.next_proxies is not None:
        sets.append(projection.next_proxies)
        labels.append(owners)
    points = np.concatenate([points.reshape(-1, dim) for points in sets])
    if dim != 2:
        manifold = require("sklearn.manifold", "plots")
        points = manifold.TSNE(
            init="pca" if dim > 1 else "random",
            perplexity=min(30.0, (len(points) - 1) / 3),
            random_state=seed,
        ).fit_transform(points)
    ends = np.cumsum([len(part) for part in labels])[:-1]
    return list(zip(np.split(points, ends), labels, strict=True))


def _name_classes(panel, places, labels, class_names: Sequence[str]) -> None:
    effects = require("matplotlib.patheffects", "plots")
    outline = effects.withStroke(linewidth=2.5, foreground="white")
    center = places.mean(axis=0)
    for label in np.unique(labels):
        mean = places[labels == label].mean(axis=0)
        away = (mean - center) / max(np.linalg.norm(mean - center), 1e-12)
        # Off its proxies, to the outside.
        place = {"xy": mean, "xytext": tuple(14 * away), "path_effects": [outline]}
        panel.annotate(class_names[label], **place, **_NAME)


def _handle(name: str, style: dict[str, Any]) -> Any:
    return require("matplotlib.lines", "plots").Line2D(
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


def search_figure(
    proximal_weights: Sequence[float],
    proxies_per_class: Sequence[int],
    map_at_r: Sequence[float],
    is_pruned: Sequence[bool] | None = None,
    own: tuple[float, int] | None = None,
) -> Any:
    """Draws the trials of a search over lambda (log scale) and proxies of each class.

    Discs are trials that were trained to their end, coloured by MAP@R; a star marks the
    best, crosses are those that were cut short. Source of the figure: https://arxiv.org/abs/2209.09060.

    Args:
        proximal_weights: `(n,)` lambda of each trial, above 0.
        proxies_per_class: `(n,)` its proxies of each class.
        map_at_r: `(n,)` its result, not used where it was cut short.
        is_pruned: `(n,)` whether it was cut short, not all of them. Defaults to `None`:
            none was.
        own: lambda and proxies that the search began with, marked by a square. Defaults
            to `None`: no square.

    Returns:
        `matplotlib.figure.Figure` of 150 dpi.

    Raises:
        ImportError: if matplotlib is not installed.

    Example: `search_figure([1e-4, 1e-3], [4, 2], [0.61, 0.64]).savefig("s.png")`.
    """
    points, scores = np.stack([proximal_weights, proxies_per_class]), np.array(map_at_r)
    pruned = np.zeros(len(scores), bool) if is_pruned is None else np.array(is_pruned)
    order = np.argsort(scores, kind="stable")
    order = order[~pruned[order]]
    best = order[-1]
    figure = _figure((6.4, 4.4))
    axes = figure.subplots()
    discs = axes.scatter(*points[:, order], c=scores[order], **_DISC)
    if pruned.any():
        axes.scatter(*points[:, pruned], label="cut short", **_CROSS)
    label = f"best, MAP@R {scores[best]:.4f}"
    axes.scatter(*points[:, best], label=label, zorder=4, **_STAR)
    if own is not None:
        label = "the configuration's own"
        axes.scatter(*own, label=label, zorder=4, **_SQUARE)
    axes.set_xscale("log")
    axes.set_xlabel("λ, weight of the proximal term")
    axes.set_ylabel("proxies of each class")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, zorder=0)
    figure.colorbar(discs, label="MAP@R of the validation classes")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure
