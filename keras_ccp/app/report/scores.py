"""What queries find, by query, by class and by pair of classes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Shares above 0 of a class that is taken for another, by both labels.
Confusions = dict[tuple[int, int], float]


class ClassScore(NamedTuple):
    """Means over the queries of a class.

    Args:
        label: int, its class.
        num_queries: those with a true reference.
        num_references: true references of each of them.
        precision_at_1: NaN without such a query.
        map_at_r: the same.
    """

    label: int
    num_queries: int
    num_references: int
    precision_at_1: float
    map_at_r: float


class ConfusedPair(NamedTuple):
    """Two classes that are taken for each other.

    Args:
        labels: the two classes, the smaller label first.
        shares: of the first taken for the second, and of the second for the first.
        query: row of a query of one of them whose neighbour of the other is nearest.
        neighbour: row of that neighbour in the gallery.
    """

    labels: tuple[int, int]
    shares: tuple[float, float]
    query: int
    neighbour: int


class Neighbors(NamedTuple):
    """What the queries find, nearest first.

    Args:
        query_labels: `(n,)` ints, classes of the queries.
        distances: `(n, k)` floats.
        indices: `(n, k)` ints, rows of the gallery.
        labels: `(n, k)` ints, their classes.
        num_references: `(n,)` ints, true references R of each query. Its nearest
            `min(R, k)` neighbours count where classes are confused.
    """

    query_labels: np.ndarray
    distances: np.ndarray
    indices: np.ndarray
    labels: np.ndarray
    num_references: np.ndarray

    @property
    def counted(self) -> np.ndarray:
        """`(n, k)` booleans: the neighbour counts."""
        return np.arange(self.labels.shape[1]) < self.num_references[:, None]


def class_scores(labels: np.ndarray, scores: dict[str, np.ndarray]) -> list[ClassScore]:
    """Averages the scores of the queries of each class, by label.

    `scores` are those of each query, as `retrieval.score_queries` gives them.
    """
    entries = []
    for label in np.unique(labels).tolist():
        own = np.flatnonzero(labels == label)
        count = int(scores["num_references"][own[0]])
        means = [scores[k][own].mean() for k in ("precision_at_1", "map_at_r")]
        entries.append(ClassScore(label, len(own) * bool(count), count, *means))
    return entries


def confusions(neighbors: Neighbors) -> Confusions:
    """How often neighbours are of which other class.

    The share of a class `a` that is taken for `b` is the number of neighbours of class
    `b` that queries of `a` have, over the number of all neighbours they have. Only the
    neighbours that count are meant.
    """
    labels, counted = neighbors.query_labels, neighbors.counted
    totals = np.bincount(labels, weights=counted.sum(axis=1))
    rows, columns = np.nonzero(counted & (neighbors.labels != labels[:, None]))
    pairs = np.stack([labels[rows], neighbors.labels[rows, columns]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    shares = counts / totals[pairs[:, 0]]
    return dict(zip(map(tuple, pairs.tolist()), shares.tolist(), strict=True))


def most_confused_with(shares: Confusions) -> dict[int, tuple[int, float]]:
    """The class that a class is most often taken for, with its share.

    Of equal shares it is the smaller label.
    """
    most = {}
    for (a, b), share in sorted(shares.items()):
        if share > most.get(a, (b, 0.0))[1]:
            most[a] = b, share
    return most


def confused_pairs(
    shares: Confusions, neighbors: Neighbors, count: int
) -> list[ConfusedPair]:
    """The pairs of classes that are taken for each other most.

    They are ordered by the mean of their two shares, equal ones by their labels.
    """
    both = {
        (a, b): (shares.get((a, b), 0.0), shares.get((b, a), 0.0))
        for a, b in map(sorted, shares)
    }
    pairs, labels = [], neighbors.query_labels
    for a, b in sorted(both, key=lambda pair: (-sum(both[pair]), pair))[:count]:
        rows = np.flatnonzero((labels == a) | (labels == b))
        hits = neighbors.labels[rows] == (a + b - labels[rows, None])
        hits &= neighbors.counted[rows]
        reached = np.where(hits, neighbors.distances[rows], np.inf)
        row, column = np.unravel_index(np.argmin(reached), reached.shape)
        query = int(rows[row])
        found = int(neighbors.indices[query, column])
        pairs.append(ConfusedPair((a, b), both[a, b], query, found))
    return pairs


def choose_queries(
    labels: np.ndarray,
    map_at_r: np.ndarray,
    first_distances: np.ndarray,
    count: int,
    seed: int = 0,
) -> dict[str, list[int]]:
    """Chooses rows of at most `count` queries to show, of each kind.

    - `best`: highest MAP@R, at most one of a class, of at most half of the classes;
      `worst`: lowest, one of each of the other classes. Among equals the one whose
      nearest neighbour is nearest, then the first row.
    - `random`: drawn from all queries alike.

    Those whose MAP@R is NaN are not shown.
    """
    scored = np.flatnonzero(~np.isnan(map_at_r))
    near = first_distances[scored]
    downward = scored[np.lexsort((scored, near, -map_at_r[scored]))]
    upward = scored[np.lexsort((scored, near, map_at_r[scored]))]
    half = -(-len(np.unique(labels[scored])) // 2)
    best = _one_of_a_class(downward, labels, min(count, half))
    others = upward[~np.isin(labels[upward], labels[best])]
    worst = _one_of_a_class(others, labels, count)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(scored, min(count, len(scored)), replace=False)
    return {"best": best, "worst": worst, "random": drawn.tolist()}


def _one_of_a_class(rows: Sequence[int], labels: np.ndarray, count: int) -> list[int]:
    _, first = np.unique(labels[rows], return_index=True)
    return rows[np.sort(first)[:count]].tolist()
