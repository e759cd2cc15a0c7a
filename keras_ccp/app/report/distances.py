"""How far apart images of one class are, and images of two."""

from typing import NamedTuple

import numpy as np

from keras_ccp.checks import as_embeddings, as_labels

# Distances held at once: 32 MB of float64.
_CHUNK_VALUES = 2**22
# Counted finer than shown, since the largest distance is only known afterwards.
_FINER = 64


class DistanceHistogram(NamedTuple):
    """Counts of pairs by their distance.

    Args:
        edges: `(num_bins + 1,)` float64 from 0 on; a bin holds its lower edge.
        same: `(num_bins,)` int64, pairs of one class.
        other: likewise, of two classes.
        mean_same: mean distance of pairs of one class, NaN without one.
        mean_other: likewise, of two classes.
        num_queries: queries whose pairs with the whole gallery were counted.
    """

    edges: np.ndarray
    same: np.ndarray
    other: np.ndarray
    mean_same: float
    mean_other: float
    num_queries: int


def distance_histogram(
    query_embeddings: np.ndarray,
    query_labels: np.ndarray,
    gallery_embeddings: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    num_bins: int = 40,
    max_pairs: int = 50_000_000,
    seed: int = 0,
) -> DistanceHistogram:
    """Counts the L2 distances of queries and gallery, in chunks.

    Each counted query is compared with the whole gallery, without itself in one set.
    Bins have one width, the last one that is not empty ends the histogram.

    Args:
        query_embeddings: `(num_queries, dim)` floats.
        query_labels: `(num_queries,)` ints.
        gallery_embeddings: `(num_gallery, dim)` floats. Defaults to `None`: the queries
            themselves.
        gallery_labels: likewise.
        num_bins: int, at most. Defaults to 40.
        max_pairs: int. With more pairs than this a sample of the queries is counted,
            drawn without replacement. Defaults to 50 million.
        seed: int, of that sample. Defaults to 0.
    """
    is_one_set = gallery_embeddings is None
    query = as_embeddings("query_embeddings", query_embeddings).astype(np.float64)
    labels = as_labels("query_labels", query_labels, len(query))
    gallery, known = query, labels
    if not is_one_set:
        gallery = as_embeddings("gallery_embeddings", gallery_embeddings)
        gallery = gallery.astype(np.float64)
        known = as_labels("gallery_labels", gallery_labels, len(gallery))
    rows = np.arange(len(query))
    most = max(1, max_pairs // len(gallery))
    if len(rows) > most:
        rng = np.random.default_rng(seed)
        rows = np.sort(rng.choice(rows, most, replace=False))
    own = rows if is_one_set else None
    counts, sums, width = _count(
        query[rows], labels[rows], gallery, known, own, num_bins * _FINER
    )
    totals = counts.sum(axis=1)
    means = [s / n if n else np.nan for s, n in zip(sums, totals, strict=True)]
    edges, same, other = _merged(counts, width, num_bins)
    return DistanceHistogram(edges, same, other, *map(float, means), len(rows))


def _count(query, labels, gallery, known, own, num_bins):
    """Counts and sums `(2, ...)` of pairs of one class and of two, and the bins' width.

    `own` are the gallery rows that the queries are themselves, if they are in it.
    """
    # Near the origin rounding errors are smallest; and no two points of a ball are
    # further apart than its diameter.
    origin = gallery.mean(axis=0)
    query, gallery = query - origin, gallery - origin
    reach = np.linalg.norm(query, axis=1).max() + np.linalg.norm(gallery, axis=1).max()
    width = (reach or 1.0) * (1 + 1e-9) / num_bins
    counts, sums = np.zeros((2, num_bins + 1), np.int64), np.zeros(2)
    step = max(1, _CHUNK_VALUES // len(gallery))
    for start in range(0, len(query), step):
        chunk = slice(start, start + step)
        distances = _distances(query[chunk], gallery)
        is_pair = np.ones(distances.shape, bool)
        if own is not None:
            is_pair[np.arange(len(distances)), own[chunk]] = False
        is_same = known == labels[chunk, None]
        for kind, mask in enumerate((is_same & is_pair, ~is_same)):
            values = distances[mask]
            bins = (values / width).astype(np.int64)
            counts[kind] += np.bincount(bins, minlength=num_bins + 1)
            sums[kind] += values.sum()
    return counts, sums, width


def _distances(query: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    squared = query @ gallery.T
    squared *= -2
    squared += np.einsum("nd,nd->n", query, query)[:, None]
    squared += np.einsum("nd,nd->n", gallery, gallery)
    return np.sqrt(np.maximum(squared, 0, out=squared), out=squared)


def _merged(
    counts: np.ndarray, width: float, num_bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges and counts of wider bins, up to the last that is not empty."""
    used = int(np.flatnonzero(counts.any(axis=0)).max(initial=0)) + 1
    factor = -(-used // num_bins)
    size = -(-used // factor)
    merged = np.zeros((2, size * factor), np.int64)
    merged[:, :used] = counts[:, :used]
    same, other = merged.reshape(2, size, factor).sum(axis=2)
    return np.arange(size + 1) * factor * width, same, other
