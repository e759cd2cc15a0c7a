"""How far samples lie from the proxies that stand for their class."""

from typing import Any

import numpy as np

from keras_ccp.checks import as_floats
from keras_ccp.retrieval.validation import as_embeddings, as_labels, safe_shift


def covering_radius(
    embeddings: np.ndarray, labels: Any, centers: np.ndarray | None = None
) -> float:
    """Mean over the classes of the largest distance from a sample to its center.

    For class `c` with samples `x` and centers `z` the radius is
    `max_x min_z ||x - z||`, L2 and not squared. Classes without a sample have none.

    Source: arXiv 2209.09060, where it bounds what proxies miss of their class.

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` or `(n, 1)` ints from 0 on.
        centers: `(num_classes, centers_per_class, dim)` floats, row `c` for label `c`,
            for example the proxies. Defaults to `None`: the mean of each class is its
            only center.

    Returns:
        The mean radius, a float.

    Raises:
        ValueError: for wrong shapes, values that are not finite, labels that are no
            integers from 0 on, or a label without a row in `centers`.
        TypeError: for embeddings, labels or centers that are no numbers.
    """
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    if centers is not None:
        centers = as_floats("centers", centers)
        if centers.ndim != 3 or 0 in centers.shape or labels.max() >= len(centers):
            raise ValueError(
                "`centers` must have shape (num_classes, centers_per_class, dim), with "
                f"a row for each label up to {labels.max()}. "
                f"Received: centers.shape={centers.shape}"
            )
        flat = as_embeddings(
            "centers", centers.reshape(-1, centers.shape[2]), embeddings.shape[1]
        )
        centers = flat.reshape(centers.shape)
    shift = safe_shift(embeddings, *([] if centers is None else [centers]))
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    radii = np.empty(len(classes))
    for place, members in enumerate(np.split(order, starts[1:])):
        samples = np.ldexp(embeddings[members].astype(np.float64), shift)
        if centers is None:
            own = samples.mean(axis=0, keepdims=True)
        else:
            own = np.ldexp(centers[classes[place]].astype(np.float64), shift)
        nearest = np.full(len(samples), np.inf)
        for center in own:
            difference = samples - center
            squared = np.einsum("nd,nd->n", difference, difference)
            np.minimum(nearest, squared, out=nearest)
        radii[place] = np.sqrt(nearest.max())
    return float(np.ldexp(radii.mean(), -shift))
