"""How far apart images of one class are, and images of two."""

from typing import NamedTuple

import numpy as np

# Distances held at once: 32 MB of float64.
_CHUNK_VALUES = 2**22


class DistanceHistogram(NamedTuple):
    """Counts of pairs by their distance.

    Args:
        edges: `(num_bins + 1,)` float64 from 0 on; a bin holds its lower edge.
        same: `(num_bins,)` int64, pairs of one class.
        other: the same, of two classes.
        mean_same: mean distance of pairs of one class, NaN without one.
        mean_other: the same, of two classes.
        num_queries: queries whose pairs with the whole gallery were counted.
    """

    edges: np.ndarray
    same: np.ndarray
    other: np.ndarray
    mean_same: float
    mean_other: float
    num_queries: int


def distance_histogram(
    query: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    num_bins: int = 60,
    max_pairs: int = 50_000_000,
    seed: int = 0,
) -> DistanceHistogram:
    """Counts the L2 distances of queries and gallery, in chunks.

    Each query is compared with the whole gallery, or with all other queries without
    one. Beyond `max_pairs` a sample of the queries is counted, drawn without
    replacement. The last of `num_bins` bins that is not empty ends the histogram.
    """
    is_one_set = gallery is None
    if is_one_set:
        gallery, gallery_labels = query, labels
    # Near the origin rounding errors are smallest; and no two points of a ball are
    # further apart than its diameter.
    origin = gallery.mean(axis=0, dtype=np.float64)
    query, gallery = query - origin, gallery - origin
    squares = (query**2).sum(axis=1), (gallery**2).sum(axis=1)
    reach = sum(np.sqrt(part.max()) for part in squares) * (1 + 1e-9) or 1.0
    rows, most = np.arange(len(query)), max(1, max_pairs // len(gallery))
    if len(rows) > most:
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.choice(rows, most, replace=False))
    counts, sums = np.zeros((2, num_bins), np.int64), np.zeros(2)
    for chunk in np.array_split(rows, -(-len(rows) * len(gallery) // _CHUNK_VALUES)):
        distances = squares[0][chunk, None] + squares[1] - 2 * query[chunk] @ gallery.T
        distances = np.sqrt(np.maximum(distances, 0))
        is_same = gallery_labels == labels[chunk, None]
        is_other = ~is_same
        if is_one_set:
            is_same[np.arange(len(chunk)), chunk] = False
        for kind, mask in enumerate((is_same, is_other)):
            values = distances[mask]
            counts[kind] += np.histogram(values, num_bins, (0, reach))[0]
            sums[kind] += values.sum()
    used = int(np.flatnonzero(counts.any(axis=0)).max(initial=0)) + 1
    edges = np.linspace(0, reach, num_bins + 1)[: used + 1]
    totals = counts.sum(axis=1)
    means = np.divide(sums, totals, out=np.full(2, np.nan), where=totals > 0)
    return DistanceHistogram(edges, *counts[:, :used], *means.tolist(), len(rows))
