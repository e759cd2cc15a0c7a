"""Labels that the neighbours of an image contradict."""

from typing import Any, NamedTuple

import numpy as np

from keras_ccp.checks import as_embeddings, as_labels
from keras_ccp.retrieval.exact_search import search


class DoubtfulLabel(NamedTuple):
    """An image that lies among those of another class.

    Args:
        row: of the image.
        label: the one that it has.
        suggested: the one that most of its neighbours have.
        share: of the neighbours that have the suggested one, less the share of those
            that have its own: 1 where all agree on the other, just above 0 at least.
    """

    row: int
    label: int
    suggested: int
    share: float


def doubtful_labels(
    embeddings: np.ndarray, labels: Any, k: int = 5
) -> list[DoubtfulLabel]:
    """Lists images whose nearest neighbours have another label, the surest first.

    They are to be looked at: a wrong label, an image of two things, or a class that the
    network does not tell from another. A network that was trained on these very labels
    has learned the wrong ones too: embed with another fold's, or a pretrained one.

    ```python
    for found in retrieval.doubtful_labels(embedder.predict(data.images), data.labels):
        print(data.class_names[found.label], "or", data.class_names[found.suggested])
    ```

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` integers.
        k: int, neighbours that are asked. Defaults to 5.

    Returns:
        `DoubtfulLabel`s, by falling share, then by the nearness of the neighbour that
        suggests another label.
    """
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    k = min(k, len(labels) - 1)
    distances, nearest = search(embeddings, embeddings, k, exclude_self=True)
    known = labels[nearest]
    # Votes for the class of each neighbour, and for the image's own.
    votes = (known[:, :, None] == known[:, None, :]).sum(axis=2)
    best = votes.argmax(axis=1)  # the nearest of as many votes
    rows = np.arange(len(labels))
    suggested, most = known[rows, best], votes[rows, best]
    own = (known == labels[:, None]).sum(axis=1)
    doubtful = np.flatnonzero((suggested != labels) & (most > own))
    shares = (most - own)[doubtful] / k
    order = np.lexsort((distances[doubtful, best[doubtful]], -shares))
    return [
        DoubtfulLabel(int(row), int(labels[row]), int(suggested[row]), float(share))
        for row, share in zip(doubtful[order], shares[order], strict=True)
    ]
