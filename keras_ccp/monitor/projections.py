"""What a projection does to the proxies, in numbers.

A projection ends a proxy problem, whose proxies have converged, and begins the next one
with proxies chosen anew. Before and after it, these numbers say how well the proxies
cover their classes.
"""

import dataclasses
from typing import Any

import numpy as np

from keras_ccp import retrieval
from keras_ccp.model import CCPModel
from keras_ccp.checks import as_embeddings, as_labels


@dataclasses.dataclass(frozen=True)
class Projection:
    """One proxy problem at its best weights, and the proxies of the next one.

    Args:
        embeddings: `(n, dim)` float32, normalised embeddings of a fixed sample.
        labels: `(n,)` ints, 0..C-1.
        proxies: `(C, proxies_per_class, dim)` normalised proxies of the problem.
        next_proxies: likewise, those that the switch put in their place, or `None`
            where the training ended.
        map_at_r: float, MAP@R of the validation images.
    """

    embeddings: np.ndarray
    labels: np.ndarray
    proxies: np.ndarray
    next_proxies: np.ndarray | None
    map_at_r: float


def measure(
    embeddings: np.ndarray, labels: Any, proxies: np.ndarray
) -> dict[str, float]:
    """Measures proxies against samples of their classes.

    All distances are L2, not squared. The result has

    - `mean_covering_radius`, `max_covering_radius`: over the classes, of the largest
      distance from a sample to the nearest proxy of its class.
    - `mean_inter_class_distance`: see that function.
    - `proxy_spread`: mean of `proxy_spreads`; near 0 where proxies have collapsed.
    - `proxy_usage`: share of the proxies that are, of those of their class, the nearest
      to at least one sample. Of proxies that are the same the first counts.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` ints, 0..C-1, each of them present.
        proxies: `(C, proxies_per_class, dim)` floats, row `c` for label `c`.

    Returns:
        dict of the five numbers.

    Raises:
        ValueError: if the shapes do not go together or a class has no sample.
    """
    embeddings, labels, proxies = _checked(embeddings, labels, proxies)
    radii, used = [], []
    for members, own in zip(_by_class(embeddings, labels), proxies, strict=True):
        zeros = np.zeros(len(members), int)
        radii.append(retrieval.covering_radius(members, zeros, own[None]))
        _, nearest = retrieval.search(members, own, k=1)
        used.append(len(np.unique(nearest)) / len(own))
    return {
        "mean_covering_radius": float(np.mean(radii)),
        "max_covering_radius": float(np.max(radii)),
        "mean_inter_class_distance": mean_inter_class_distance(embeddings, labels),
        "proxy_spread": float(proxy_spreads(embeddings, labels, proxies).mean()),
        "proxy_usage": float(np.mean(used)),
    }


def mean_inter_class_distance(embeddings: np.ndarray, labels: Any) -> float:
    """Mean over all pairs of classes of the distance between their mean embeddings.

    The paper (https://arxiv.org/abs/2209.09060) gives such a number without its
    definition; this is ours. For C classes evenly on the unit circle it is
    `2 / (C - 1) * cot(pi / (2 C))`: 1.40 for ten.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` ints, 0..C-1, each of them present.

    Returns:
        The mean distance, 0 for a single class.
    """
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    means = np.stack(
        [members.mean(axis=0) for members in _by_class(embeddings, labels)]
    )
    if len(means) == 1:
        return 0.0
    total = sum(
        np.linalg.norm(means[i + 1 :] - means[i], axis=1).sum()
        for i in range(len(means))
    )
    return float(total / (len(means) * (len(means) - 1) / 2))


def proxy_spreads(
    embeddings: np.ndarray, labels: Any, proxies: np.ndarray
) -> np.ndarray:
    """How far the proxies of each class lie apart, as a share of its samples' spread.

    For a class with samples `x` and proxies `z` it is
    `mean ||z - mean z|| / mean ||x - mean x||`: 0 for proxies on one point, about 1 for
    proxies that are drawn from the samples.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` ints, 0..C-1, each of them present.
        proxies: `(C, proxies_per_class, dim)` floats.

    Returns:
        `(C,)` float64. Where all samples of a class are the same it is 0 if its proxies
        are too, else infinite.

    Raises:
        ValueError: if the shapes do not go together or a class has no sample.
    """
    embeddings, labels, proxies = _checked(embeddings, labels, proxies)
    of_samples = [_spread(members) for members in _by_class(embeddings, labels)]
    of_proxies = [_spread(own) for own in proxies.astype(np.float64)]
    return np.array(
        [
            0.0 if own == 0 else own / members if members else np.inf
            for own, members in zip(of_proxies, of_samples, strict=True)
        ]
    )


def reference_embeddings(model: CCPModel) -> np.ndarray:
    """Embeds what stands for the classes, as it is now.

    Args:
        model: model with proxies or reference samples.

    Returns:
        `(num_classes, proxies_per_class, dim)` normalised proxies, or embeddings of the
        reference samples.
    """
    return model.proxy_embeddings()


def _checked(embeddings, labels, proxies):
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    proxies = np.asarray(proxies)
    num_classes = len(np.unique(labels))
    expected = (num_classes, *proxies.shape[1:2], embeddings.shape[1])
    if proxies.shape != expected or labels.max() >= num_classes:
        raise ValueError(
            "`proxies` must have shape (num_classes, proxies_per_class, "
            f"{embeddings.shape[1]}), and each class a sample. Received: "
            f"proxies.shape={proxies.shape}, samples of {num_classes} classes up to "
            f"label {labels.max()}"
        )
    return embeddings, labels, proxies


def _by_class(embeddings, labels):
    """The float64 samples of each class in turn."""
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    return np.split(embeddings[order].astype(np.float64), starts[1:])


def _spread(points):
    return float(np.linalg.norm(points - points.mean(axis=0), axis=1).mean())
