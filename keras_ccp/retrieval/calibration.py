"""A distance that tells the same kind of thing from another."""

import dataclasses
from typing import Any

import numpy as np

from keras_ccp.checks import as_embeddings, as_labels
from keras_ccp.retrieval.statistics import Interval


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Thresholds of distance, and how well they tell pairs of one class from others.

    Args:
        threshold: pairs up to this distance match.
        true_match_rate: share of the pairs of one class that match (TAR at that FAR).
        false_match_rate: share of the pairs of two classes that match.
        best_f1_threshold: distance of the highest F1, for as many pairs of either kind
            as there are among the images.
        best_f1: that F1.
        roc_auc: area under the curve of true by false match rates.
        equal_error_rate: false match rate where it equals the share of missed pairs.
    """

    threshold: float
    true_match_rate: Interval
    false_match_rate: Interval
    best_f1_threshold: float
    best_f1: Interval
    roc_auc: Interval
    equal_error_rate: Interval


def calibrate(
    embeddings: np.ndarray,
    labels: Any,
    false_match_rate: float = 0.001,
    level: float = 0.95,
    resamples: int = 200,
    max_pairs: int = 1_000_000,
    seed: int = 0,
) -> Calibration:
    """Finds the distance up to which two images count as the same kind of thing.

    Take classes that the network was not trained on: those of the training are nearer
    to each other. Intervals are percentiles of a bootstrap over classes (with 30 of
    them, 92 % of 150 simulated ones of 95 % held the area); the rates of the two
    thresholds stay with their distances.

    ```python
    found = retrieval.calibrate(model.embed(validation), validation.labels)
    distances, ids = index.search(queries, k=5, max_distance=found.threshold)
    ```

    Args:
        embeddings: `(n, dim)` floats.
        labels: `(n,)` integers.
        false_match_rate: float between 0 and 1, highest share of the pairs of two
            classes that may match. Defaults to 0.001.
        level: float, of the intervals. Defaults to 0.95.
        resamples: int, bootstrap resamples. Defaults to 200.
        max_pairs: int. Where there are more, images of large classes, then classes are
            left out at random. Defaults to 1,000,000, of some 1,400 images.
        seed: int, of both draws. Defaults to 0.

    Returns:
        `Calibration`.

    Raises:
        ValueError: If there are not pairs of both kinds, or fewer of two classes than
            that rate can be seen with.
    """
    embeddings = as_embeddings("embeddings", embeddings)
    labels = as_labels("labels", labels, len(embeddings))
    rng = np.random.default_rng(seed)
    rows = _drawn_rows(labels, max_pairs, rng)
    _, classes = np.unique(labels[rows], return_inverse=True)
    distances, first, second = _pairs(embeddings[rows], classes)
    same = first == second
    num_others = np.count_nonzero(~same)
    if not same.any() or num_others * false_match_rate < 1:
        raise ValueError(
            "`labels` must have pairs of one class, and of two at least 1 / "
            f"false_match_rate. Received: {same.sum():,} and {num_others:,} pairs, "
            f"{false_match_rate=}\nGive more images, or a higher rate"
        )
    order = np.argsort(distances, kind="stable")
    distances, same = distances[order], same[order]
    first, second = first[order], second[order]
    # The last of equal distances: those before it match with it.
    ends = np.flatnonzero(np.append(np.diff(distances) > 0, True))
    curve = _Curve(same, ends, np.ones(len(same)))
    reached = np.flatnonzero(curve.false_rates <= false_match_rate)
    at, best = reached[-1] if len(reached) else None, int(np.argmax(curve.f1))
    value = curve.summary(at, best)
    num_classes = classes.max() + 1
    drawn = []
    for _ in range(resamples):
        draw = rng.integers(num_classes, size=num_classes)
        times = np.bincount(draw, minlength=num_classes).astype(float)
        # A class that is drawn twice is two classes, without pairs between them.
        weights = times[first] * np.where(same, 1, times[second])
        if weights[same].any() and weights[~same].any():
            drawn.append(_Curve(same, ends, weights).summary(at, best))
    bounds = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    intervals = [
        Interval(*map(float, each)) for each in zip(value, *bounds, strict=True)
    ]
    true_rate, false_rate, f1, auc, equal_error = intervals
    return Calibration(
        threshold=_between(distances, ends, at),
        true_match_rate=true_rate,
        false_match_rate=false_rate,
        best_f1_threshold=_between(distances, ends, best),
        best_f1=f1,
        roc_auc=auc,
        equal_error_rate=equal_error,
    )


def _drawn_rows(labels, max_pairs, rng):
    """Rows of all images, or of random classes that do not make more pairs."""
    classes = rng.permutation(np.unique(labels))
    if len(labels) * (len(labels) - 1) // 2 <= max_pairs:
        return np.arange(len(labels))
    # Of one class no more than leave room for seven others.
    most = max(2, int((2 * max_pairs) ** 0.5 / 8))
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:most] for c in classes]
    totals = np.cumsum([len(rows) for rows in drawn])
    count = np.count_nonzero(totals * (totals - 1) // 2 <= max_pairs)
    return np.sort(np.concatenate(drawn[:count] or [np.empty(0, int)]))


def _pairs(embeddings, classes):
    """`(p,)` float64 distances of all pairs of rows, and the classes of both ends."""
    embeddings, distances = embeddings.astype(np.float64), [np.empty(0)]
    for row in range(len(classes) - 1):
        between = embeddings[row + 1 :] - embeddings[row]
        distances.append(np.sqrt(np.einsum("nd,nd->n", between, between)))
    first, second = np.triu_indices(len(classes), 1)
    return np.concatenate(distances), classes[first], classes[second]


def _between(distances, ends, at):
    """Halfway from the last distance that matches to the next, for their rounding."""
    if at is None:  # nothing matches
        return float(np.nextafter(distances[0], -np.inf))
    following = ends[min(at + 1, len(ends) - 1)]
    return float((distances[ends[at]] + distances[following]) / 2)


class _Curve:
    """True and false match rates at each distance, of weighted pairs."""

    def __init__(self, same, ends, weights):
        true = np.cumsum(weights * same)[ends]
        false = np.cumsum(weights)[ends] - true
        self.true_rates, self.false_rates = true / true[-1], false / false[-1]
        # 2 TP / (2 TP + FP + FN), where FN = all - TP
        self.f1 = 2 * true / (true + false + true[-1])

    def summary(self, at, best):
        """Rates and F1 at two places, area, and equal error rate."""
        rates = (0.0, 0.0)
        if at is not None:
            rates = self.true_rates[at], self.false_rates[at]
        true, false = (np.append(0, r) for r in (self.true_rates, self.false_rates))
        area = np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2)
        nearest = np.argmin(np.abs(false - (1 - true)))
        equal_error = (false[nearest] + 1 - true[nearest]) / 2
        return *rates, self.f1[best], area, equal_error
