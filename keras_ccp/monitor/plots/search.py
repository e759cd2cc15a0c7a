"""search_figure: MAP@R over lambda and the number of proxies."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np


def search_figure(
    proximal_weights: Sequence[float],
    proxies_per_class: Sequence[int],
    map_at_r: Sequence[float],
    is_pruned: Sequence[bool] | None = None,
    own: tuple[float, int] | None = None,
) -> Any:
    """Draws the trials of a search over lambda (log scale) and proxies of each class.

    Discs are trials that were trained to their end, coloured by MAP@R and drawn from
    the worst to the best; a star marks the best. Crosses are those that were cut short:
    their MAP@R is of fewer evaluations, and has no colour. A square marks the values
    that the search began with.

    Needs `pip install -e ".[plots]"`. Source of the figure:
    https://arxiv.org/abs/2209.09060.

    Args:
        proximal_weights: `(n,)` lambda of each trial, above 0.
        proxies_per_class: `(n,)` its proxies of each class.
        map_at_r: `(n,)` its result, not used where it was cut short.
        is_pruned: `(n,)` whether it was cut short. Defaults to `None`: none was.
        own: lambda and proxies that the search began with. Defaults to `None`: no
            square.

    Returns:
        `matplotlib.figure.Figure` of 150 dpi; its `savefig(path)` writes it.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if no trial was trained to its end, or the lengths differ.
    """
    weights, counts = np.asarray(proximal_weights), np.asarray(proxies_per_class)
    scores = np.asarray(map_at_r)
    pruned = np.zeros(len(scores), bool) if is_pruned is None else np.asarray(is_pruned)
    lengths = [len(values) for values in (weights, counts, scores, pruned)]
    if len(set(lengths)) > 1 or pruned.all():
        raise ValueError(
            "`proximal_weights`, `proxies_per_class`, `map_at_r` and `is_pruned` must "
            "have a value for each trial, of which one was not pruned. Received: "
            f"lengths {lengths}, {int(pruned.sum())} of them pruned"
        )
    figure = _matplotlib_figure().Figure(
        figsize=(6.4, 4.4), dpi=150, layout="constrained"
    )
    axes = figure.subplots()
    discs = _draw_trials(axes, weights, counts, scores, pruned)
    if own is not None:
        _mark(axes, *own, "the configuration's own", "s", 320)
    axes.set_xscale("log")
    axes.set_xlabel("λ, weight of the proximal term")
    axes.set_ylabel("proxies of each class")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, zorder=0)
    figure.colorbar(discs, label="MAP@R of the validation classes")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure


def _draw_trials(axes, weights, counts, scores, pruned) -> Any:
    """Draws discs, crosses and the star; returns the discs."""
    order = np.argsort(scores, kind="stable")
    order = order[~pruned[order]]
    discs = axes.scatter(
        weights[order],
        counts[order],
        c=scores[order],
        s=130,
        cmap="viridis",
        edgecolors="white",
        linewidths=0.8,
        zorder=3,
    )
    if pruned.any():
        style = {"marker": "x", "s": 30, "c": "#777777", "linewidths": 1.2}
        axes.scatter(
            weights[pruned], counts[pruned], label="cut short", zorder=2, **style
        )
    best = order[-1]
    _mark(axes, weights[best], counts[best], f"best, MAP@R {scores[best]:.4f}", "*", 90)
    return discs


def _mark(axes, weight, count, label, marker, size) -> None:
    is_frame = marker == "s"
    axes.scatter(
        [weight],
        [count],
        marker=marker,
        s=size,
        facecolors="none" if is_frame else "#CC3311",
        edgecolors="black" if is_frame else "white",
        linewidths=1.2 if is_frame else 0.6,
        label=label,
        zorder=4,
    )


def _matplotlib_figure() -> ModuleType:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            '`search_figure` draws with matplotlib: pip install -e ".[plots]"'
        ) from error
