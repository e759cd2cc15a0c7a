"""How sure a retrieval score is: intervals, comparisons and ties."""

import dataclasses
from typing import Any

import numpy as np

from keras_ccp.checks import as_embeddings, as_labels
from keras_ccp.retrieval.exact_search import ExactSearch, in_chunks
from keras_ccp.retrieval.metrics import score_hits, score_queries


@dataclasses.dataclass(frozen=True)
class Interval:
    """A score and its confidence interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Ties:
    """MAP@R by the order of equal distances, and what is at distance 0."""

    lowest: float
    highest: float
    num_copies: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A difference of two scores, its confidence interval, and its p-value."""

    difference: float
    low: float
    high: float
    p_value: float


def interval(
    query_embeddings: np.ndarray,
    query_labels: Any,
    gallery_embeddings: np.ndarray | None = None,
    gallery_labels: Any = None,
    metric: str = "map_at_r",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Confidence interval of a retrieval score, for other classes of the same kind.

    Queries of one class are not independent, so classes are drawn: a bootstrap of the
    studentised mean (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
    section 12.5), whose coverage holds with few classes too. It says how the score
    would vary with other test classes, not with other seeds of the training.

    ```python
    found = retrieval.interval(model.embed(test), test.labels)
    print(f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    ```

    Args:
        query_embeddings: `(q, dim)` floats.
        query_labels: `(q,)` integers.
        gallery_embeddings: `(g, dim)` floats, or `None` to search among the queries.
        gallery_labels: `(g,)` integers, with a gallery.
        metric: as in `retrieval.evaluate`. Defaults to `"map_at_r"`.
        level: float, share of such intervals that hold the score. Defaults to 0.95.
        resamples: int, bootstrap resamples. Defaults to 10,000.
        seed: int, of the resamples. Defaults to 0.

    Returns:
        `Interval` with `value`, `low` and `high`; NaN for both bounds where only one
        class has queries that can be answered.
    """
    galleries = gallery_embeddings, gallery_labels
    scores = score_queries(query_embeddings, query_labels, *galleries, metrics=[metric])
    sums, counts = _by_class(scores[metric], query_labels)
    low, high = mean_interval(sums, counts, level, resamples, seed)
    return Interval(float(sums.sum() / counts.sum()), low, high)


def compare(
    first: np.ndarray,
    second: np.ndarray,
    labels: Any,
    metric: str = "map_at_r",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Difference of two embeddings of the same images, paired over classes.

    The interval is that of `interval`, of the differences. The p-value is that of a
    test that swaps the two embeddings class by class: the share of all swaps (or of
    `resamples` random ones, with the one that was observed) in which the difference is
    as large, on either side.

    Args:
        first: `(n, dim)` floats, embeddings by one model.
        second: `(n, dim)` floats, of the same images by another; widths may differ.
        labels: `(n,)` integers.
        metric: as in `retrieval.evaluate`. Defaults to `"map_at_r"`.
        level: float, of the interval. Defaults to 0.95.
        resamples: int, of the bootstrap and of the test. Defaults to 10,000.
        seed: int. Defaults to 0.

    Returns:
        `Comparison` with `difference` (first - second), `low`, `high`, `p_value`.
    """
    scores = [
        score_queries(e, labels, metrics=[metric])[metric] for e in (first, second)
    ]
    sums, counts = _by_class(scores[0] - scores[1], labels)
    low, high = mean_interval(sums, counts, level, resamples, seed)
    p_value = sign_flip_p(sums, resamples, seed)
    return Comparison(float(sums.sum() / counts.sum()), low, high, p_value)


def ties(
    query_embeddings: np.ndarray,
    query_labels: Any,
    gallery_embeddings: np.ndarray | None = None,
    gallery_labels: Any = None,
) -> Ties:
    """What the order of equally near images, which says nothing, may do to MAP@R.

    `evaluate` takes them by their index. Where both bounds are apart, images share
    their embedding: copies among the images, or a network that has collapsed.

    ```python
    found = retrieval.ties(model.embed(test), test.labels)
    print(f"MAP@R from {found.lowest:.3f} to {found.highest:.3f} by the order of ties")
    ```

    Args:
        query_embeddings: `(q, dim)` floats.
        query_labels: `(q,)` integers.
        gallery_embeddings: `(g, dim)` floats, or `None` to search among the queries.
        gallery_labels: `(g,)` integers, with a gallery.

    Returns:
        `Ties` with `lowest` and `highest`, MAP@R with the images of other classes
        first and last among equally near ones; and `num_copies`, the number of queries
        that have an image of another class at distance 0. Distances are compared as
        float64.
    """
    galleries = gallery_embeddings, gallery_labels
    references = score_queries(query_embeddings, query_labels, *galleries)
    references = references["num_references"]
    query = as_embeddings("query_embeddings", query_embeddings)
    labels = known = as_labels("query_labels", query_labels)
    gallery, is_one_set = query, gallery_embeddings is None
    if not is_one_set:
        gallery = as_embeddings("gallery_embeddings", gallery_embeddings)
        known = as_labels("gallery_labels", gallery_labels)
    search, most = ExactSearch(gallery), len(gallery) - is_one_set
    # Lowest and highest of each query, and whether it has a copy elsewhere.
    found = np.zeros((len(query), 3))

    def score(rows: np.ndarray, k: int) -> None:
        own, k = rows if is_one_set else None, min(k, most)
        squared, nearest = search.nearest(query[rows], k, own)
        if k < most:
            # The last distance may go on beyond what was looked at.
            last = np.maximum(references[rows] - 1, 0)[:, None]
            reached = np.take_along_axis(squared, last, axis=1)[:, 0]
            is_open = (squared[:, -1] == reached) | (squared[:, -1] == 0)
            if is_open.any():
                score(rows[is_open], 2 * k)
            rows, squared, nearest = (
                values[~is_open] for values in (rows, squared, nearest)
            )
            if not len(rows):
                return
        hits = known[nearest] == labels[rows, None]
        for column, first in enumerate((hits, ~hits)):
            order = np.lexsort((first, squared))
            ordered = np.take_along_axis(hits, order, axis=1)
            found[rows, column] = score_hits(ordered, references[rows])["map_at_r"]
        found[rows, 2] = ((squared == 0) & ~hits).any(axis=1)

    depth = np.where(references > 0, references + 1, 0)
    in_chunks(score, depth, len(gallery), None)
    lowest, highest = found[references > 0, :2].mean(axis=0)
    return Ties(float(lowest), float(highest), int(found[:, 2].sum()))


def _by_class(scores, labels):
    """Sum and number of the scores of each class, of queries that have an answer."""
    labels = as_labels("labels", labels, len(scores))
    scored = ~np.isnan(scores)
    _, classes = np.unique(labels[scored], return_inverse=True)
    return np.bincount(classes, scores[scored]), np.bincount(classes).astype(float)


def mean_interval(
    sums: np.ndarray,
    counts: np.ndarray,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bounds of `sums.sum() / counts.sum()` by a studentised bootstrap over classes.

    Takes `(num_classes,)` sums of the scores of each class and their numbers.
    """
    num_classes = len(sums)
    if num_classes < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    value, error = _mean_and_error(np.ones((1, num_classes)), sums, counts)
    deviations = []
    for size in _chunks(resamples, num_classes):
        drawn = rng.integers(num_classes, size=(size, num_classes))
        flat = drawn + num_classes * np.arange(size)[:, None]
        weights = np.bincount(flat.ravel(), minlength=size * num_classes)
        weights = weights.reshape(size, num_classes).astype(float)
        means, errors = _mean_and_error(weights, sums, counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            deviations.append((means - value) / errors)
    deviations = np.concatenate(deviations)
    # All classes drawn alike: no error to measure the deviation by.
    deviations = deviations[np.isfinite(deviations)]
    if not len(deviations):
        return float(value[0]), float(value[0])
    upper, lower = np.quantile(deviations, [(1 + level) / 2, (1 - level) / 2])
    return float(value[0] - upper * error[0]), float(value[0] - lower * error[0])


def _mean_and_error(weights, sums, counts):
    """`(resamples,)` means, and their standard errors to first order."""
    totals = weights @ counts
    means = weights @ sums / totals
    squares = (
        weights @ sums**2
        - 2 * means * (weights @ (sums * counts))
        + means**2 * (weights @ counts**2)
    )
    size = len(sums)
    # What is left of a difference of equal numbers is rounding.
    squares[squares < 1e-12 * (weights @ sums**2)] = 0
    return means, np.sqrt(squares * size / (size - 1)) / totals


def sign_flip_p(sums: np.ndarray, resamples: int = 10_000, seed: int = 0) -> float:
    """P-value of a sum of `(num_classes,)` differences, by turning their signs."""
    observed, size = abs(sums.sum()) * (1 - 1e-9), len(sums)
    if 2**size <= resamples:
        signs = 1 - 2 * ((np.arange(2**size)[:, None] >> np.arange(size)) & 1)
        return float(np.mean(abs(signs @ sums) >= observed))
    rng = np.random.default_rng(seed)
    as_large = 1
    for count in _chunks(resamples, size):
        signs = 2.0 * rng.integers(0, 2, (count, size), np.int8) - 1
        as_large += int(np.sum(abs(signs @ sums) >= observed))
    return as_large / (resamples + 1)


def _chunks(resamples, size):
    """Numbers of resamples that take some 80 MB at once."""
    step = max(1, 10_000_000 // size)
    return [min(step, resamples - start) for start in range(0, resamples, step)]
